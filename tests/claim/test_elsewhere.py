"""A claim keeps its GPUs on the whole host by its doors, whatever becomes of the state directory, and where it has none
its entry counts."""

import _socket
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.claims import claim, try_claim
from support.ground import PlayedClaim, simulated_doors
from support.processes import own_network

import safe_gpu
from safe_gpu import NotEnoughGpusError
from safe_gpu.claim import doubts as warnings
from safe_gpu.claim.functions import wait_for_gpus
from safe_gpu.claim.search.look import Look
from safe_gpu.coordination.doors import Doors, digest
from safe_gpu.coordination.holders import living_claims
from safe_gpu.coordination.queue import waiting_tickets
from safe_gpu.drivers.presets import preset
from safe_gpu.host import file_systems
from safe_gpu.host.file_systems import FileSystem

UUIDS = [gpu.uuid for gpu in preset("dgx-a100").gpus()]
CLAIM = """
import os, safe_gpu
os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # of the test's own claim
def claim(nb_gpus, **options):
    return safe_gpu.GPUOwner(nb_gpus, safe_gpu.NoPlaceholder(), affinity=None, **{"timeout": 0, **options})
def attempt(nb_gpus=1, **options):
    try:
        owner = claim(nb_gpus, **options)
    except safe_gpu.NotEnoughGpusError as err:
        return "refused"
    return owner.devices_taken
"""
ALONE = "the GPUs are claimed by an entry alone, since their doors cannot be taken ([Errno 1] Operation not permitted)"
STALE = "names no living claim of this user here"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One simulated host; where its processes are has nothing to do with state directories."""
    monkeypatch.setenv("SAFE_GPU_SIMULATED_DIR", str(tmp_path / "host"))
    monkeypatch.setenv("SAFE_GPU_DIR", str(tmp_path / "state"))
    return tmp_path


def other_dir(host: Path) -> dict[str, str]:
    return {"SAFE_GPU_DIR": str(host / "other")}


def closed() -> list[int]:
    """Indices of the GPUs of which any door is held."""
    return [index for index, uuid in enumerate(UUIDS) if simulated_doors().are_taken(uuid, ())]


def test_two_state_directories_do_not_book_twice(host: Path, child: Any) -> None:
    child(CLAIM + "say(claim(3).devices_taken); listen()", "[0, 1, 2]", env=other_dir(host))
    with claim(5) as owner:
        assert owner.devices_taken == [3, 4, 5, 6, 7]
    with pytest.raises(NotEnoughGpusError, match="6 GPUs asked for, 5 free") as caught:
        claim(6)
    reasons = [verdict.reason for verdict in caught.value.verdicts]
    assert reasons[3:] == [""] * 5
    assert all("claimed in another state directory" in reason for reason in reasons[:3])
    assert safe_gpu.get_free_gpus() == ["3", "4", "5", "6", "7"]
    assert closed() == [0, 1, 2], "the refused hold none"


def test_a_state_directory_that_was_removed(host: Path, child: Any) -> None:
    with claim(2) as owner:
        shutil.rmtree(host / "state")
        other = child(CLAIM + "say(attempt(7)); say(attempt(6)); listen()")
        assert other.hear() == "refused"
        assert other.hear() == "[2, 3, 4, 5, 6, 7]"
        assert safe_gpu.get_free_gpus() == []
    assert len(owner.devices_taken) == 0


def test_who_only_waits_takes_no_door(host: Path, child: Any) -> None:
    assert [gpu.index for gpu in wait_for_gpus(8, timeout=0)] == list(range(8))
    child(CLAIM + "say(claim(1).devices_taken); listen()", "[0]", env=other_dir(host))
    with pytest.raises(NotEnoughGpusError):
        wait_for_gpus(8, timeout=0)
    assert closed() == [0]


def test_a_waiter_gets_what_the_other_directory_gives_back(host: Path, child: Any, eventually: Any) -> None:
    holder = child(CLAIM + "owner = claim(8); say('holds'); listen(); owner.release_gpus(); listen()", "holds")
    waiter = child(CLAIM + "say(attempt(8, timeout=60))", env=other_dir(host))
    eventually(lambda: bool(waiting_tickets(str(host / "other"))))
    holder.tell()
    assert waiter.hear() == "[0, 1, 2, 3, 4, 5, 6, 7]"


def test_a_door_that_is_held_for_a_moment_is_tried_again(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies closes its descriptors one by one, and those of doors may be the last."""
    real, refusals = Doors.take_whole, []

    def late(self: Doors, uuid: str, *more: Any) -> bool:
        if not refusals:
            refusals.append(uuid)
            return False
        return real(self, uuid, *more)

    monkeypatch.setattr(Doors, "take_whole", late)
    with claim(8) as owner:
        assert len(owner.gpus) == 8
    assert len(refusals) == 1


@pytest.mark.parametrize("options", [{}, {"delegate": True}, {"share": "20GiB"}])
def test_doors_are_released_before_the_entry(host: Path, monkeypatch: pytest.MonkeyPatch, options: Any) -> None:
    """Else others of this directory would find the GPU free, and be refused by its door."""
    owner, lived = claim(1, **options), []
    release = Doors.release
    monkeypatch.setattr(Doors, "release", lambda self: (lived.append(len(living_claims())), release(self)))
    owner.release_gpus()
    assert (lived[0], living_claims(), closed()) == (1, [], [])


def test_a_shared_display_has_no_door(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:laptop")
    with claim(1) as owner:
        assert not simulated_doors().are_taken(owner.gpus[0].uuid, ())


def test_a_claim_of_before_the_display_was_active_is_waited_for(
    host: Path, child: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (uuid,) = [gpu.uuid for gpu in preset("laptop").gpus()]
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:laptop")
    earlier = PlayedClaim({uuid: None}, os.getppid(), os.geteuid())
    looks, run = [], Look.run
    monkeypatch.setattr(Look, "run", lambda self, **more: (looks.append(self), run(self, **more)))
    assert try_claim(1) is None
    assert not any(look.seen.withdrawn for look in looks), "it is seen, and nothing is taken beside it"
    earlier.release()
    assert try_claim(1) == (0,)


# Children that live on, and claims inside claims


def test_a_child_that_lives_on_holds_the_entry_and_no_door(
    host: Path, child: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is inside nothing, since another directory may have the GPU."""
    work = "owner = claim(1, delegate=True)\nif os.fork(): os._exit(0)\n"
    work += "say(os.environ['SAFE_GPU_SCOPE']); listen()\n"
    orphan = child(CLAIM + work)
    monkeypatch.setenv("SAFE_GPU_SCOPE", orphan.hear())
    orphan.process.wait(30)
    assert closed() == []
    with pytest.raises(NotEnoughGpusError, match="8 GPUs asked for, 7 free"):
        claim(8)
    with claim(1) as owner:
        assert owner.devices_taken == [1]
    child(CLAIM + "say(claim(1).devices_taken); listen()", "[0]", env=other_dir(host))
    orphan.tell()


@pytest.mark.parametrize("where", ["removed", "other", "network"])
def test_who_cannot_see_the_claim_around_is_inside_nothing(
    host: Path, child: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with claim(2, delegate=True):
        if where == "removed":
            shutil.rmtree(host / "state")
        code = CLAIM + "say(attempt(8)); say(attempt(6)); listen()"
        if where == "network":
            with own_network():
                inside = child(code)
        else:
            inside = child(code, env=other_dir(host) if where == "other" else {})
        assert inside.hear() == "refused"
        assert inside.hear() == "[2, 3, 4, 5, 6, 7]"
        inside.kill()
        assert STALE in inside.process.stderr.read()


def test_a_claim_inside_outlives_the_one_around(host: Path, child: Any) -> None:
    """Its part keeps others off, of other directories too."""
    inner = "if not os.fork(): claim(1); say(os.getpid()); signal.pause()\nlisten()"
    outer = child(CLAIM + "import signal\nowner = claim(1, delegate=True)\n" + inner)
    inside = int(outer.hear())
    outer.kill()
    try:
        assert try_claim(8) is None
        shutil.rmtree(host / "state")
        assert try_claim(8) is None
        assert try_claim(7) == (1, 2, 3, 4, 5, 6, 7)
    finally:
        os.kill(inside, signal.SIGKILL)


@pytest.mark.parametrize("removed", [True, False])
def test_no_claim_begins_inside_one_that_ends_just_then(
    host: Path, child: Any, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    """It has found the claim around, which then ends, and another state directory gets the GPU before the part is
    taken."""
    ends = "owner = claim(1, delegate=True); say(os.environ['SAFE_GPU_SCOPE']); listen(); owner.release_gpus()\n"
    outer = child(CLAIM + ends + "say('ended'); listen()")
    other = child(CLAIM + "listen(); say(claim(1).devices_taken); listen()", env=other_dir(host))
    monkeypatch.setenv("SAFE_GPU_SCOPE", outer.hear())
    take, seen = Doors.take_inside, []

    def late(self: Doors, *arguments: Any) -> bool:
        if not seen:
            if removed:
                shutil.rmtree(host / "state")
            outer.tell()
            seen.append(outer.hear())
            other.tell()
            seen.append(other.hear())
        return take(self, *arguments)

    monkeypatch.setattr(Doors, "take_inside", late)
    with claim(1) as owner:
        assert seen == ["ended", "[0]"]
        assert owner.devices_taken == [1]


# Without doors


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``refuse(2)``: of the next sockets of this process only two are made."""

    def start(number: int) -> None:
        made, left = _socket.socket, [number]

        def make(*arguments: int) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise PermissionError(1, "Operation not permitted")
            return made(*arguments)

        monkeypatch.setattr(_socket, "socket", make)

    return start


@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize("options", [{}, {"share": "20GiB"}, {"delegate": True}])
def test_where_doors_cannot_be_taken_the_entry_counts(
    host: Path, child: Any, refuse: Callable[[int], None], caplog: Any, number: int, options: Any
) -> None:
    """It holds the doors of all of its GPUs or of none: claims inside it would not find the others."""
    other = child(CLAIM + "listen(); say(attempt(7)); say(attempt(6))")
    refuse(number)
    with claim(2, **options) as owner:
        assert owner.devices_taken == [0, 1]
        assert [(len(one.gpus), one.parts) for one in living_claims()] == [(2, {})]
        other.tell()
        assert other.hear() == "refused"
        assert other.hear() == "[2, 3, 4, 5, 6, 7]"
    assert ALONE in caplog.text


def test_claims_inside_one_without_doors_have_none(
    host: Path, child: Any, refuse: Callable[[int], None], caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(0)
    with claim(2, delegate=True):
        token = os.environ["SAFE_GPU_SCOPE"]
        child(CLAIM + "say(attempt()); listen()", says="[0]")
        child(CLAIM + "say(attempt(2), attempt()); listen()", says="refused [1]")
    assert [one.inside for one in living_claims()] == [digest(token)] * 2
    assert try_claim(7) is None
    monkeypatch.setenv("SAFE_GPU_SCOPE", token)
    assert try_claim(6) == (2, 3, 4, 5, 6, 7)
    assert STALE in caplog.text


def in_namespace(space: str, mount: str, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a namespace of its own, after a mount."""
    enter = ["unshare", *space.split(), "sh", "-c"]
    if subprocess.run([*enter, mount], capture_output=True).returncode:
        pytest.skip("needs root, to make namespaces")
    return subprocess.run(
        [*enter, f'{mount} && exec "$0" -c "$1"', sys.executable, CLAIM + code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(safe_gpu.__file__).parents[1]), **environment},
    )


@pytest.mark.parametrize("space", ["--mount", "--mount --pid --fork --mount-proc"], ids=["private /tmp", "own pids"])
def test_from_another_namespace(host: Path, child: Any, space: str) -> None:
    """The same path of the state directory, and another file system under it, as with a private /tmp."""
    (host / "state").mkdir()
    (host / "state").chmod(0o1777)
    with claim(2):
        done = in_namespace(
            space, f"mount -t tmpfs -o mode=1777 tmpfs {host / 'state'}", "print(attempt(7), attempt(6), flush=True)"
        )
        assert done.stdout.strip() == "refused [2, 3, 4, 5, 6, 7]", done.stderr


# A container's own state directory


@pytest.mark.parametrize(
    ("kind", "point", "network", "told"),
    [
        ("overlay", "/", False, True),
        ("fuse-overlayfs", "/", False, True),
        ("overlay", "/", True, False),
        ("overlay", "/tmp", False, False),
        ("ext4", "/", False, False),
        ("", "", False, False),
    ],
)
def test_a_container_without_the_network_of_the_host_is_told_once(
    host: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, kind: str, point: str, network: bool, told: bool
) -> None:
    monkeypatch.setattr(file_systems, "file_system_at", lambda path, device: FileSystem(kind, point))
    monkeypatch.setattr(file_systems, "sees_network_devices", lambda: network)
    monkeypatch.setattr(warnings, "_told", set())
    warnings.doubt_of_image.cache_clear()
    claim(1).release_gpus()
    claim(1).release_gpus()
    warnings.doubt_of_image.cache_clear()
    lines = [one.getMessage() for one in caplog.records if "belongs to this container" in one.getMessage()]
    assert len(lines) == told
    assert all(f"start it with -v {host}/state:{host}/state" in line for line in lines)
