"""A claim keeps its GPUs on the whole host by its doors, whatever becomes of the state directory. Where it has none its
entry counts, and while it dies nobody gets its GPU twice."""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.actor import Actor, Listen, Say, in_words
from support.claims import claim, try_claim
from support.gpus import PACKAGE_ROOT
from support.processes import own_network
from support.real import long
from support.state import simulated_doors

import safe_gpu
from safe_gpu import NotEnoughGpusError

UUIDS = [gpu.uuid for gpu in api.find_preset("dgx-a100").gpus]
CLAIM = """
import os, safe_gpu
os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # of the test's own claim
def claim(nb_gpus=1, **options):
    options = {"affinity": None, "timeout": 0, **options}
    try: return safe_gpu.GPUOwner(nb_gpus, safe_gpu.NoPlaceholder(), **options).devices_taken
    except safe_gpu.NotEnoughGpusError: return "refused"
"""
STALE = "names no living claim of this user here"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One simulated host; where its processes are has nothing to do with state directories."""
    monkeypatch.setenv("SAFE_GPU_SIMULATED_DIR", str(tmp_path / "host"))
    monkeypatch.setenv("SAFE_GPU_DIR", str(tmp_path / "state"))
    return tmp_path


def test_two_state_directories_do_not_book_twice(host: Path, forked: Any) -> None:
    forked(CLAIM + "say(claim(3)); listen()", "[0, 1, 2]", env={"SAFE_GPU_DIR": str(host / "other")})
    assert try_claim(5) == (3, 4, 5, 6, 7)
    with pytest.raises(NotEnoughGpusError, match="6 GPUs asked for, 5 free") as caught:
        claim(6)
    reasons = [verdict.reason for verdict in caught.value.verdicts]
    assert reasons[3:] == [""] * 5
    assert all("claimed in another state directory" in reason for reason in reasons[:3])
    assert safe_gpu.get_free_gpus() == ["3", "4", "5", "6", "7"]
    assert not any(simulated_doors().are_taken(uuid, ()) for uuid in UUIDS[3:]), "the refused hold none"


def test_the_first_report_of_a_wait_counts_all_that_are_held_elsewhere(host: Path, forked: Any) -> None:
    """An attempt asks for doors only until too few GPUs are left."""
    forked(CLAIM + "say(claim(3)); listen()", "[0, 1, 2]", env={"SAFE_GPU_DIR": str(host / "other")})

    class FirstReportError(Exception):
        pass

    def end(status: Any) -> None:
        raise FirstReportError(status.free)

    with pytest.raises(FirstReportError, match="5"):
        api.wait_for_gpus(8, timeout=60, on_wait=end)


def test_a_door_that_is_held_for_a_moment_is_tried_again(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies closes its descriptors one by one, and those of doors may be the last."""
    take, tries = api.Doors.take_whole, []

    def late(self: api.Doors, uuid: str, *more: Any, **which: Any) -> bool:
        tries.append(uuid)
        return len(tries) > 1 and take(self, uuid, *more, **which)

    monkeypatch.setattr(api.Doors, "take_whole", late)
    assert try_claim(8) == tuple(range(8))


def test_a_child_that_lives_on_holds_the_entry_and_no_door(host: Path, child, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is inside nothing, since another directory may have the GPU."""
    work = "claim(1, delegate=True)\nif os.fork(): os._exit(0)\nsay(os.environ['SAFE_GPU_SCOPE']); listen()"
    orphan = child(CLAIM + work)
    monkeypatch.setenv("SAFE_GPU_SCOPE", orphan.hear())
    orphan.process.wait(30)
    assert not simulated_doors().are_taken(UUIDS[0], ())
    assert (try_claim(8), try_claim(1)) == (None, (1,))
    child(CLAIM + "say(claim(1)); listen()", "[0]", env={"SAFE_GPU_DIR": str(host / "other")})
    orphan.tell()


def test_a_child_that_lives_on_is_inside_nothing_whoever_takes_the_doors_names(
    host: Path, child: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All users can read these names while the claim lives, and may have them once it has ended."""
    work = "claim(1, delegate=True)\nif os.fork(): os._exit(0)\nsay(os.environ['SAFE_GPU_SCOPE']); listen()"
    orphan = child(CLAIM + work)
    token = orphan.hear()
    orphan.process.wait(30)
    stranger = simulated_doors()
    assert stranger.take_whole(UUIDS[0], (), token)
    monkeypatch.setenv("SAFE_GPU_SCOPE", token)
    taken = try_claim(1)
    stranger.release()
    orphan.tell()
    assert taken == (1,)


@pytest.mark.parametrize("where", ["removed", "other", "network"])
def test_who_cannot_see_the_claim_around_is_inside_nothing(host, child, caplog, monkeypatch, where: str) -> None:
    with claim(2, delegate=True):
        if where == "removed":
            shutil.rmtree(host / "state")
        code = CLAIM + "say(claim(8)); say(claim(6)); listen()"
        if where == "network":
            with own_network():
                inside = child(code)
        else:
            inside = child(code, env={"SAFE_GPU_DIR": str(host / "other")} if where == "other" else {})
        assert [inside.hear(), inside.hear()] == ["refused", "[2, 3, 4, 5, 6, 7]"]
        inside.kill()
        assert STALE in inside.process.stderr.read()


# Without doors


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``refuse(2)``: of the next sockets of this process only two are made."""

    def start(number: int) -> None:
        make, left = api.doors.socket, iter(range(number))

        def make_some(*arguments: int) -> Any:
            if next(left, None) is None:
                raise PermissionError(1, "Operation not permitted")
            return make(*arguments)

        monkeypatch.setattr(api.doors, "socket", make_some)

    return start


@pytest.mark.parametrize(("number", "options"), [(0, {}), (3, {"share": "20GiB"}), (3, {"delegate": True})])
def test_where_doors_cannot_be_taken_the_entry_counts(host, child, refuse, caplog, number: int, options) -> None:
    """It holds the doors of all of its GPUs or of none: claims inside it would not find the others."""
    other = child(CLAIM + "listen(); say(claim(7)); say(claim(6))")
    refuse(number)
    with claim(2, **options) as owner:
        assert owner.devices_taken == [0, 1]
        assert [(len(one.gpus), one.parts) for one in api.living_claims()] == [(2, {})]
        other.tell()
        assert [other.hear(), other.hear()] == ["refused", "[2, 3, 4, 5, 6, 7]"]
    told = "this claim is visible only in this state directory, since no abstract socket can be bound ([Errno 1] Oper"
    assert told in caplog.text


def test_claims_inside_one_without_doors_have_none(host, child, refuse, caplog, monkeypatch) -> None:
    refuse(0)
    with claim(2, delegate=True):
        token = os.environ["SAFE_GPU_SCOPE"]
        child(CLAIM + "say(claim()); listen()", says="[0]")
        child(CLAIM + "say(claim(2), claim()); listen()", says="refused [1]")
    assert [one.inside for one in api.living_claims()] == [api.digest(token)] * 2
    assert try_claim(7) is None
    monkeypatch.setenv("SAFE_GPU_SCOPE", token)
    assert try_claim(6) == (2, 3, 4, 5, 6, 7)
    assert STALE in caplog.text


def test_from_another_namespace(host: Path) -> None:
    """The same path of the state directory, and another file system under it, as with a private /tmp."""
    (host / "state").mkdir()
    (host / "state").chmod(0o1777)
    mount = f"mount -t tmpfs -o mode=1777 tmpfs {host / 'state'}"
    enter = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c"]
    if subprocess.run([*enter, mount], capture_output=True).returncode:
        pytest.skip("needs root, to make namespaces")
    code = CLAIM + "print(claim(7), claim(6), flush=True)"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)}
    with claim(2):
        line = [*enter, f'{mount} && exec "$0" -c "$1"', sys.executable, code]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout.strip() == "refused [2, 3, 4, 5, 6, 7]", done.stderr


def test_a_container_without_the_network_of_the_host_is_told_once(host: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(api.checks, "given_doubts", set())
    for kind, point, network, told in (
        ("overlay", "/", True, 0),
        ("ext4", "/", False, 0),
        ("overlay", "/", False, 1),
        ("overlay", "/", False, 1),
    ):
        monkeypatch.setattr(api.procfs, "file_system_at", lambda *_, found=(kind, point): api.FileSystem(*found))
        monkeypatch.setattr(api.procfs, "sees_network_devices", lambda network=network: network)
        claim(1).release_gpus()
        assert caplog.text.count("belongs to this container") == told
    assert f"start it with -v {host}/state:{host}/state" in caplog.text


def test_where_no_mount_is_listed_for_the_root_directory(host: Path, monkeypatch: Any, caplog: Any) -> None:
    """As in a plain chroot (sbuild, mock, a rescue system)."""
    monkeypatch.setattr(api.procfs, "lines_of", lambda path: iter(()))
    api.procfs.file_system_at.cache_clear()
    assert (try_claim(2), caplog.text) == ((0, 1), "")
    api.procfs.file_system_at.cache_clear()


# A state directory that goes away while claims wait, where its users cannot make it again


@pytest.mark.parametrize("comes_back", [True, False])
def test_it_is_waited_for(open_tmp: Path, dgx: Any, as_user: Any, monkeypatch: Any, comes_back: bool) -> None:
    """For a minute."""
    for name, mode in (("simulated", 0o1777), ("lib", 0o755)):
        (open_tmp / name).mkdir()
        (open_tmp / name).chmod(mode)
    state, gone = open_tmp / "lib" / "state", open_tmp / "lib" / "gone"
    monkeypatch.setenv("SAFE_GPU_SIMULATED_DIR", str(open_tmp / "simulated"))
    monkeypatch.setenv("SAFE_GPU_DIR", str(state))
    if not comes_back:
        monkeypatch.setattr("safe_gpu.claim.search.LONGEST_TROUBLE", 0.1)

    def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        logger = logging.getLogger("waiter")
        logger.addFilter(lambda record: record.levelno >= logging.WARNING and say(record.getMessage()))
        say(claim(1, timeout=None, logger=logger).devices_taken)

    dgx.hold(*range(8))
    waiter = as_user(work, uid=4711)
    assert "for 1 GPU" in waiter.hear()
    state.rename(gone)
    heard = waiter.hear()
    assert "; waiting " in heard
    assert heard.endswith(" for it")
    if not comes_back:
        assert waiter.hear().startswith("StateDirError: ")
    gone.rename(state)
    dgx.let_go()
    assert not comes_back or waiter.hear() == "[0]"


# A claim of which only some descriptors are left. The kernel closes those of the dying one by one, in the order of
# their numbers or in the reverse one. So every state between is tried, before and at each step of a claim inside it.


HELD = 5  # descriptors of a claim of one GPU that allows claims inside it: four doors and the entry
LOSSES = [(which, number) for which in ("first", "last") for number in range(1, HELD)]
REFUSED = "refused"


def descriptors() -> set[int]:
    """Those of this process, directories left out."""
    paths = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return {int(os.path.basename(path)) for path in paths if os.path.exists(path) and not os.path.isdir(path)}


def stop_at(step: str, stop: Callable[[], None]) -> None:
    """Let the next claim inside another one stop at this step."""
    take, is_inside, locked = api.Doors.take_inside, api.Doors.is_inside, api.Host.locked
    taking: list[str] = []

    def take_inside(doors: api.Doors, uuid: str, *arguments: Any) -> bool:
        if step == "before the part":
            stop()
        taking.append(uuid)
        return take(doors, uuid, *arguments)

    def asked(doors: api.Doors, *arguments: Any) -> bool:
        if taking and step == "after the part":
            stop()
        return is_inside(doors, *arguments)

    @contextmanager
    def holding(*arguments: Any) -> Iterator[None]:
        with locked(*arguments):
            yield
        if step == "before the second listing":
            stop()

    api.Doors.take_inside, api.Doors.is_inside, api.Host.locked = take_inside, asked, holding


class Process(Actor):
    """A process with a state directory that claims GPU 0 and loses what it holds, as told."""

    def __init__(self, directory: Path, scope: str = "") -> None:
        def work(say: Say, listen: Listen) -> None:
            os.environ["SAFE_GPU_DIR"], os.environ["SAFE_GPU_SCOPE"] = str(directory), scope
            before = descriptors()
            while True:
                verb, _, rest = listen().partition(" ")
                if verb == "claim":
                    say(claim_first(**json.loads(rest)))
                elif verb == "stop":
                    stop_at(rest, lambda: (say("stopped"), listen()))
                    say("ready")
                else:
                    held = sorted(descriptors() - before)
                    assert len(held) == HELD
                    for fd in held[: int(rest)] if verb == "first" else held[-int(rest) :]:
                        os.close(fd)
                    say("closed")

        super().__init__(in_words(work))

    def ask(self, *words: object) -> str:
        self.tell(" ".join(map(str, words)))
        return self.hear()

    def claim(self, **options: Any) -> str:
        """Claim GPU 0. Returns the token of the claim, or "" if it has none, or "refused"."""
        return self.ask("claim", json.dumps(options))


def claim_first(**options: Any) -> str:
    if options.get("delegate"):
        del os.environ["SAFE_GPU_SCOPE"]
    try:
        claim(1, only=0, **options)
    except NotEnoughGpusError:
        return REFUSED
    return os.environ["SAFE_GPU_SCOPE"] if options.get("delegate") else ""


@pytest.fixture
def scene(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, everything_imported: None
) -> Callable[[str], AbstractContextManager[tuple[Process, Process, Process]]]:
    """``with scene("other")``: a claim of GPU 0, a rival with that state directory, and one inside the claim."""
    monkeypatch.setenv("SAFE_GPU_SIMULATED_DIR", str(tmp_path / "host"))

    @contextmanager
    def play(directory: str) -> Iterator[tuple[Process, Process, Process]]:
        around = Process(tmp_path / "state")
        token = around.claim(delegate=True)
        three = (around, Process(tmp_path / directory), Process(tmp_path / "state", token))
        try:
            yield three
        finally:
            for process in three:
                process.end()

    return play


KINDS = pytest.mark.parametrize(
    "rival_wants", [{}, pytest.param({"delegate": True}, marks=long), pytest.param({"share": 45 << 30}, marks=long)]
)


@KINDS
@pytest.mark.parametrize(
    ("first", "directory"), [("rival", "other"), ("inside", "other"), pytest.param("rival", "state", marks=long)]
)
def test_of_two_that_find_what_is_left_one_gets_it(scene, first: str, directory: str, rival_wants) -> None:
    for loss in LOSSES:
        with scene(directory) as (around, rival, inside):
            around.ask(*loss)
            both = [(rival, rival_wants), (inside, {})]
            answers = [process.claim(**wants) for process, wants in (both if first == "rival" else both[::-1])]
            assert REFUSED in answers, (loss, answers)


@KINDS
@pytest.mark.parametrize(
    "step", [pytest.param("before the part", marks=long), "after the part", "before the second listing"]
)
def test_wherever_the_claim_around_it_begins_to_die_while_one_inside_claims(scene, step: str, rival_wants) -> None:
    """The rival has another state directory, and so another host.lock."""
    for loss in LOSSES:
        with scene("other") as (around, rival, inside):
            assert inside.ask("stop", step) == "ready"
            assert inside.claim() == "stopped"
            around.ask(*loss)
            answer = rival.claim(**rival_wants)
            inside.tell()
            while (other := inside.hear()) == "stopped":
                inside.tell()
            assert REFUSED in (answer, other), (loss, answer, other)


ENTER = """
for path in /*; do
  if [ -L "$path" ]; then cp -P "$path" "$0$path"
  elif [ -d "$path" ] && [ "$path" != /tmp ]; then mkdir -p "$0$path" && mount --rbind "$path" "$0$path"
  fi
done
mkdir -p -m 1777 "$0/tmp"
exec chroot "$0" "$@"
"""
TELL = """awk '$5 == "/"' /proc/self/mountinfo; echo "$CUDA_VISIBLE_DEVICES"; cd "$SAFE_GPU_DIR/claims"; ls | wc -l"""


def test_a_claim_in_a_plain_chroot(open_tmp: Path) -> None:
    enter = ["unshare", "--mount", "sh", "-euc", ENTER, str(open_tmp)]
    if os.geteuid() or subprocess.run([*enter, sys.executable, "-c", ""], capture_output=True).returncode:
        pytest.skip("needs root, to make a chroot")
    run = [sys.executable, "-m", "safe_gpu", "run", "-q", "--affinity", "node", "-n", "2", "--", "sh", "-c", TELL]
    environment = {**os.environ, "SAFE_GPU_DIR": "/tmp/state", "PYTHONPATH": str(PACKAGE_ROOT)}
    del environment["SAFE_GPU_TEST_ETC"]  # it is not below this root
    done = subprocess.run([*enter, *run], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["0,1", "1"], "")
