"""The owner of the state directory is its first user: he may rename and remove what others make there, sticky bit or
not. Nobody, root above all, is led to change, write or make anything elsewhere by that. Where ``safe-gpu setup`` made
it, it is root's: no neighbour removes or closes it."""

import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.claims import claim
from support.processes import own_network
from support.state import locked_host

from .conftest import exchange

OWNER = 4711
PRIVATE = 0o100600
RACE = 10.0 if os.environ.get("SAFE_GPU_REQUIRE_REAL") == "1" else 0.5  # seconds; tests run without the variable

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be the victim")


@pytest.fixture
def owned(state_dir: Path) -> Path:
    """A state directory of another user, which is used already."""
    with locked_host():
        pass
    for part in (state_dir, *state_dir.iterdir()):
        os.chown(part, OWNER, OWNER)
    return state_dir


@pytest.fixture
def victim(open_tmp: Path) -> Path:
    file = open_tmp / "victim"
    file.write_text("precious")
    file.chmod(0o600)
    return file


def exchange_after(place: int, directory: Path, pattern: str, victim: Path, patch: pytest.MonkeyPatch) -> list[str]:
    """Put a link to the victim in the place of what is being made, after the n-th system call that concerns it."""
    trap = directory / "trap"
    trap.symlink_to(victim)
    calls: list[str] = []
    own: list[bool] = []

    def call(name: str, genuine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = genuine(*args, **kwargs)
        if not own:
            own.append(True)
            if made := [entry for entry in directory.glob(pattern) if not entry.is_symlink()]:
                calls.append(name)
                if len(calls) == place:
                    assert exchange(made[0], trap) == 0
            own.clear()
        return result

    for name in ("mkdir", "open", "fstat", "listdir", "fchmod", "stat", "write"):
        patch.setattr(os, name, partial(call, name, getattr(os, name)))
    return calls


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)


CALLS = {"claims": 5, "queue": 5, "history": 5, "host.lock": 2, "entry": 4}
"""How many system calls concern what is being made."""


@needs_root
@pytest.mark.parametrize(("part", "place"), [(part, n + 1) for part, most in CALLS.items() for n in range(most)])
def test_what_is_being_made_is_no_way_to_another_file(
    owned: Path, victim: Path, dgx: Any, monkeypatch: pytest.MonkeyPatch, part: str, place: int
) -> None:
    if part == "entry":
        calls = exchange_after(place, owned / "claims", "." + "[0-9a-f]" * 16, victim, monkeypatch)
    else:
        remove(owned / part)
        calls = exchange_after(place, owned, f".{part}.*", victim, monkeypatch)
    with suppress(api.StateDirError):
        claim().release_gpus()
    assert len(calls) >= place, "the exchange took place"
    assert victim.stat().st_mode == PRIVATE
    assert victim.read_text() == "precious"


ATTACK = """
import ctypes, os, struct
from contextlib import suppress
state, victim = os.environ["STATE"], os.environ["VICTIM"]
libc = ctypes.CDLL(None, use_errno=True)
os.setresgid(4711, 4711, 4711); os.setresuid(4711, 4711, 4711)
os.chdir(state)
watch = libc.inotify_init1(os.O_CLOEXEC)
libc.inotify_add_watch(watch, b".", 0x100)  # IN_CREATE
os.symlink(victim, "trap")
say("ready")
while True:
    data = os.read(watch, 65536)
    while data:
        length = struct.unpack_from("iIII", data)[3]
        name, data = data[16:16 + length].rstrip(b"\\0"), data[16 + length:]
        if name.startswith((b".queue.", b".claims.", b".history.", b".host.lock.")):
            libc.renameat2(-100, name, -100, b"trap", 2)
            for left in (name, b"trap"):
                for remove in (os.unlink, os.rmdir):
                    with suppress(OSError):
                        remove(left)
            with suppress(FileExistsError):
                os.symlink(victim, "trap")
"""


@needs_root
def test_a_race_with_the_owner_is_never_lost(owned: Path, victim: Path, child: Any) -> None:
    """The code that set modes by path lost it within some dozen rounds."""
    child(ATTACK, says="ready", env={"STATE": str(owned), "VICTIM": str(victim)})
    until = time.monotonic() + RACE
    rounds = made = 0
    while time.monotonic() < until or rounds < 200 or not made:  # until somebody gets through
        rounds += 1
        for part in ("claims", "queue", "history", "host.lock"):
            remove(owned / part)
        with suppress(api.StateDirError), locked_host():
            made += 1
        api.history.append([b"{}\n"], time.time())
        assert victim.stat().st_mode == PRIVATE, f"lost in round {rounds}"
    assert victim.read_text() == "precious"


@needs_root
@pytest.mark.parametrize("owner", [OWNER, 0])
@pytest.mark.parametrize("name", ["host.lock", "claims/1.{zeros}", "history/{month}.jsonl", "queue/1.{zeros}"])
def test_a_file_that_was_moved_here_is_not_written(owned: Path, victim: Path, dgx, name: str, owner: int) -> None:
    """Also in a directory of root's: who owns the directory in which root has made a file may move it away. At most
    that name of it is removed, as that of an entry of root's that is dead."""
    place = owned / name.format(zeros="0" * 16, month=api.history.month_of(time.time()))
    place.parent.mkdir(exist_ok=True)
    for directory in (owned, place.parent):
        os.chown(directory, owner, owner)
    place.unlink(missing_ok=True)
    os.link(victim, place)
    try:
        claim().release_gpus()
    except api.StateDirError:
        assert name == "host.lock"
    assert victim.read_text() == "precious"
    assert victim.stat().st_mode == PRIVATE


# What is said


@needs_root
@pytest.mark.parametrize("sees_devices", [True, False])
def test_a_claim_whose_entry_alone_counts_says_once_who_can_remove_it(
    owned: Path, dgx: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, sees_devices: bool
) -> None:
    monkeypatch.setattr(api.checks, "given_doubts", set())
    if sees_devices:
        monkeypatch.setattr(api.procfs, "sees_network_devices", lambda: True)
    with own_network():
        for _ in range(2):
            claim().release_gpus()
    assert caplog.text.count(f"{OWNER} can remove the entries of this claim in {owned}") == (not sees_devices)
    assert caplog.text.count(f": as root: safe-gpu setup --state-dir {owned}") == (not sees_devices)


# Who only looks


@pytest.mark.parametrize("look", ["status", "status --prometheus", "doctor", "history", "policy"])
def test_who_looks_makes_nothing(state_dir: Path, dgx: Any, run_here: Any, look: str) -> None:
    assert run_here(*look.split()).returncode in (0, 1)
    assert not state_dir.exists()
    state_dir.mkdir(mode=0o755)
    assert run_here(*look.split()).returncode in (0, 1)
    assert (os.listdir(state_dir), stat.S_IMODE(state_dir.stat().st_mode)) == ([], 0o755)
    with claim():
        shutil.rmtree(state_dir / "history")
        assert run_here(*look.split()).returncode in (0, 1)
        assert not (state_dir / "history").exists()


# ``safe-gpu setup``


ANNA, ATTACKER = 4711, 65534

GPU = "GPU-5c89852c"
"""One that this host does not have."""

UUIDS = [gpu.uuid for gpu in api.find_preset("dgx-a100").gpus]


class Host:
    """A host whose state directory is ``path``; ``run`` is ``safe-gpu setup`` for it."""

    def __init__(self, place: Path, run_here: Callable[..., subprocess.CompletedProcess[str]]) -> None:
        self.place, self.path, self._run_here = place, place / "state", run_here
        self.config, self.rule = place / "etc" / "config.ini", place / "rules" / "safe-gpu.conf"

    def run(self, *options: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
        return self._run_here("setup", "--state-dir", path or self.path, *options)

    def done(self, *options: str) -> list[str]:
        """The lines of a run that leaves nothing to do."""
        done = self.run(*options)
        assert done.returncode == 0, done
        return done.stdout.splitlines()

    def tree(self) -> dict[str, tuple[int, int, int]]:
        """Everything there, by its path -> mode, owner and inode."""
        found = ((path, path.lstat()) for path in sorted(self.place.rglob("*")))
        return {str(path): (one.st_mode, one.st_uid, one.st_ino) for path, one in found}


@pytest.fixture
def host(open_tmp: Path, state_dir: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch) -> Host:
    if os.geteuid():
        pytest.skip("needs root, whose directory it is")
    host = Host(open_tmp, run_here)
    monkeypatch.setenv("SAFE_GPU_POLICY", str(host.config))
    monkeypatch.setattr(api.cli_setup, "RULE", str(host.rule))
    monkeypatch.setattr(api.cli_setup, "SIGNS_OF_SYSTEMD", ("/",))
    return host


def dead_entry(say: Callable[[object], None], listen: Callable[[], str]) -> None:
    """Leave an entry as a process that was killed does."""
    with api.Directory(os.environ["SAFE_GPU_DIR"], "claims") as directory:
        api.make_entry(directory, 7, {"gpus": {GPU: None}}, by_children=True)[1].release()
    say("left")


# What it makes


def test_a_dry_run_prints_what_a_run_does_and_changes_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "nvidia-smi")  # there is none, as in the build of an image
    monkeypatch.setenv("PATH", str(host.place))
    before = host.tree()
    *would, last = host.done("--dry-run")
    assert last == "nothing was changed (--dry-run)"
    assert host.tree() == before
    *did, last = host.done()
    assert did == would
    assert last == f"nothing is left to do: the state directory {host.path} is root's"
    parts = ("", "claims", "queue", "faults", "history", "host.lock")
    made = [*(host.path / part for part in parts), host.rule, host.config]
    assert [line.split()[1] for line in did] == [*map(str, made)]
    assert sorted(path.name for path in host.path.iterdir()) == sorted(parts[1:])
    for path, (mode, uid, _) in host.tree().items():
        if Path(path).is_relative_to(host.path):
            assert (mode, uid) == (0o41777 if stat.S_ISDIR(mode) else 0o100666, 0), path
    assert host.config.read_text() == f"[host]\nstate_dir = {host.path}\n"
    before = host.tree()
    assert host.done() == [last]
    assert host.done("--dry-run") == ["nothing was changed (--dry-run)"]
    assert host.tree() == before
    (host.path / "faults").rmdir()
    assert host.done() == [f"make {host.path}/faults", last]


def test_the_rule_makes_the_same_again(host: Host) -> None:
    if shutil.which("systemd-tmpfiles") is None:
        pytest.skip("there is no systemd-tmpfiles")
    host.done()
    shutil.rmtree(host.path)
    subprocess.run(["systemd-tmpfiles", "--create", host.rule], check=True, timeout=60)
    assert host.done() == [f"nothing is left to do: the state directory {host.path} is root's"]


def test_files_of_the_administrator_are_left_alone(host: Host) -> None:
    texts = {host.config: "[host]\nstate_dir = /srv/other\n", host.rule: "x /tmp/safe-gpu\n"}
    for path, text in texts.items():
        path.parent.mkdir()
        path.write_text(text)
    done = host.run()
    assert done.returncode == 1
    assert f"to do: write state_dir = {host.path} below [host] in {host.config}" in done.stdout
    assert f"{host.rule} has other lines: remove it" in done.stdout
    assert {path: path.read_text() for path in texts} == texts


def test_only_root(host: Host, as_user: Any) -> None:
    setup = ["setup", "--state-dir", str(host.path)]
    assert as_user(lambda say, listen: say(api.main(setup)), uid=ANNA).hear() == "78"
    assert not host.path.exists()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("{}/a\nd x", "write an absolute path"),
        ("{}/missing/state", "there is no directory"),
        ("{}/anna/state", "users other than root can change"),
        ("{}/link", "is not a directory with mode 1777"),
    ],
)
def test_places_that_are_refused(host: Host, path: str, words: str) -> None:
    (host.place / "anna").mkdir()
    os.chown(host.place / "anna", ANNA, ANNA)
    (host.place / "link").symlink_to("anna")
    before = host.tree()
    done = host.run(path=path.format(host.place))  # type: ignore[arg-type]
    assert (done.returncode, words in done.stderr) == (73, True), done
    assert host.tree() == before


# What it protects


def attack(say: Callable[[object], None], listen: Callable[[], str]) -> None:
    """Remove, rename, close and replace all that can be reached."""
    top = Path(os.environ["SAFE_GPU_DIR"])
    done = []
    for path in [*sorted(top.rglob("*"), reverse=True), top]:
        for act, *more in ((os.chmod, 0o600), (os.chown, 1, 1), (os.rename, f"{path}.x"), (os.rmdir,), (os.unlink,)):
            with suppress(OSError):
                act(path, *more)
                done.append(str(path))
    say(done)


def test_a_neighbour_can_neither_remove_nor_close_it(host: Host, entry_of: Any, as_user: Any) -> None:
    host.done()
    entry_of(ANNA, {"gpus": {GPU: None}})
    before = host.tree()
    assert as_user(attack, uid=ATTACKER).hear() == "[]"
    assert host.tree() == before
    assert [one.uid for one in api.living_claims()] == [ANNA]


# What others made


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        ("chmod 755 .", " is not a directory with mode 1777"),
        ("chown 4711 queue", "/queue belongs to 4711"),
        ("chmod 600 host.lock", "/host.lock is not a file with mode 0666 and one name"),
        ("mv host.lock ..; ln -s ../host.lock .", "/host.lock is not a file with mode 0666 and one name"),
        ("ln host.lock ..", "/host.lock is not a file with mode 0666 and one name"),
    ],
)
def test_what_setup_did_not_make_is_refused(host: Host, spoil: str, why: str) -> None:
    """Nothing of it is changed. Once it is moved away, as the error says, all is made."""
    host.done()
    subprocess.run(spoil, shell=True, check=True, cwd=host.path)
    before = host.tree()
    for options in ([], ["--dry-run"]):
        done = host.run(*options)
        assert (done.returncode, done.stdout) == (73, ""), done
        assert f"{host.path}{why}: name another directory, or " in done.stderr
    assert host.tree() == before
    move = done.stderr.partition("(")[2].partition(")")[0]
    assert move == f"mv {host.path} {host.path}.old"
    subprocess.run(move, shell=True, check=True)
    host.done()


def test_gpus_that_another_directory_closes_are_named(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the word of its owner, which does not count for root's directory."""
    other = host.place / "anna"
    other.mkdir()
    lines = [f"{GPU} - - - a fan is broken\n", f"{UUIDS[4]} 1 4e9 - \n", f"{UUIDS[5]} 1 2 - over\n"]
    (other / "closed").write_text("".join(lines))
    for path in (other, other / "closed"):
        os.chown(path, ANNA, ANNA)
    with monkeypatch.context() as patch:
        patch.setenv("SAFE_GPU_DIR", str(other))
        done = host.run()
    assert done.returncode == 1
    assert f"to do: drain or reserve GPU 4, {GPU} again: {other}/closed, which" in done.stdout
    host.done()


# Where GPUs are claimed or waited for


HELD = {
    "claims": ({"gpus": dict.fromkeys([GPU, *UUIDS[2:5]])}, f"GPU 2-4, {GPU}"),
    "queue": ({"gpus": [GPU], "nb_gpus": 1}, "1 waiter"),
}


@pytest.mark.parametrize("remove", [False, True])
@pytest.mark.parametrize("part", HELD)
def test_it_refuses_while_somebody_claims_or_waits(host: Host, entry_of: Any, part: str, remove: bool) -> None:
    """In the directory that is to be removed, or in the one that is used now."""
    if remove:
        host.done()
    said, told = HELD[part]
    held = entry_of(ANNA, said, part)
    before = host.tree()

    def run() -> subprocess.CompletedProcess[str]:
        return host.run("--remove") if remove else host.run(path=host.place / "new")

    done = run()
    assert done.returncode == 75
    assert f"GPUs are claimed or waited for in {host.path}: {told}: " in done.stderr
    assert host.tree() == before
    held.unlink()
    assert run().returncode == 0


# Directories that have become slow


def fill(directory: Path, number: int) -> None:
    """Make that many dead entries of an attacker."""
    first = directory / f"{10**6}.{'0' * 16}"
    first.touch()
    os.chown(first, ATTACKER, ATTACKER)
    for one in range(1, number):
        os.link(first, directory / f"{10**6 + one}.{'0' * 16}")


@pytest.fixture
def slow(host: Host, entry_of: Any) -> Path:
    """The directory of claims with very many names, a directory in it, and an entry that lives, whose path it is."""
    host.done()
    claims = host.path / "claims"
    fill(claims, 6000)
    (claims / "directory" / "in it").mkdir(parents=True)
    return Path(entry_of(ANNA, {"gpus": {GPU: None}}))


def test_a_directory_with_very_many_names_is_made_anew_with_those_that_live(host: Host, slow: Path) -> None:
    file, before = slow.stat(), slow.parent.stat()
    assert host.done("--dry-run") == [f"make anew {slow.parent}", "nothing was changed (--dry-run)"]
    now = slow.parent.stat()
    assert (now.st_ino, now.st_mode, now.st_ctime_ns) == (before.st_ino, before.st_mode, before.st_ctime_ns)
    last = f"nothing is left to do: the state directory {host.path} is root's"
    assert host.done() == [f"make anew {slow.parent}", last]
    assert [(one.name, one.uid) for one in api.living_claims()] == [(slow.name, ANNA)]
    assert os.listdir(slow.parent) == [slow.name]
    assert (slow.stat().st_ino, slow.stat().st_nlink) == (file.st_ino, 1)
    now = slow.parent.stat()
    assert (now.st_mode, now.st_uid) == (before.st_mode, 0)
    assert now.st_ino != before.st_ino
    assert sorted(os.listdir(host.path)) == ["claims", "faults", "history", "host.lock", "queue"]
    assert host.done() == [last]


def test_all_that_live_are_there_at_any_moment(host: Host, slow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a kill: what it leaves is removed by the next run."""
    seen = []

    def exchange(one: str, other: str, parent: int) -> None:
        seen.append([entry.name for entry in api.living_claims()])
        real(one, other, parent)
        seen.append([entry.name for entry in api.living_claims()])
        raise KeyboardInterrupt

    real = api.directory.exchange
    with monkeypatch.context() as patch:
        patch.setattr(api.setup, "exchange", exchange)
        with pytest.raises(KeyboardInterrupt):
            api.setup.make_anew(str(host.path), "claims")
    assert seen == [[slow.name], [slow.name]]
    assert [entry.name for entry in api.living_claims()] == [slow.name]
    assert len(os.listdir(host.path)) == 6
    host.done()
    assert sorted(os.listdir(host.path)) == ["claims", "faults", "history", "host.lock", "queue"]


def test_waiters_keep_their_places(host: Host, slow: Path, entry_of: Any) -> None:
    entry_of(ANNA, *HELD["queue"][:1], "queue")
    before = host.tree()
    done = host.run()
    assert done.returncode == 1
    assert (
        f"to do: {slow.parent} with very many names, or room for them: run setup again when nobody waits" in done.stdout
    )
    assert host.tree() == before


def test_a_directory_that_had_very_many_names_is_told_and_made_anew(host: Host) -> None:
    """Where the file system keeps the room of names that are gone."""
    host.done()
    claims = host.path / "claims"
    names = [f"{number}.".ljust(255, "x") for number in range(8000)]
    for name in names:
        (claims / name).touch()
    for name in names:
        (claims / name).unlink()
    if claims.stat().st_size < 1 << 20:
        pytest.skip("this file system keeps no room of names that are gone")
    (told,) = [one for one in api.run_checks() if one.name == "entries"]
    assert re.search(rf"{claims} takes \d MiB for 0 names, which slows everybody down", told.detail)
    assert f"safe-gpu setup --state-dir {host.path}" in told.fix
    assert f"make anew {claims}" in host.done()
    assert claims.stat().st_size < 1 << 20


# Removal


def test_removal_leaves_no_trace_of_what_it_made(host: Host, as_user: Any) -> None:
    before = host.tree()
    assert as_user(dead_entry, uid=ANNA).hear() == "left"
    assert host.done("--remove") == [f"left, since setup did not write it: {host.path}"], "it is Anna's"
    shutil.rmtree(host.path)
    assert host.tree() == before
    host.done()
    assert as_user(dead_entry, uid=ANNA).hear() == "left"
    *would, last = host.done("--remove", "--dry-run")
    assert last == "nothing was changed (--dry-run)"
    assert os.listdir(host.path / "claims") != []
    assert host.done("--remove") == would == [f"remove {path}" for path in (host.config, host.rule, host.path)]
    host.rule.parent.rmdir()
    assert host.tree() == before
    assert host.done("--remove") == []


def test_removal_takes_the_empty_file_that_resume_leaves(host: Host) -> None:
    host.done()
    closed = host.config.parent / "closed"
    closed.touch()
    assert f"remove {closed}" in host.done("--remove")
    assert not host.config.parent.exists()


def test_removal_leaves_what_others_wrote_and_names_it(host: Host, as_user: Any) -> None:
    host.done()
    assert as_user(dead_entry, uid=ANNA).hear() == "left"
    names = ("claims/1.txt", "faults/notes", "history/.made", "history/2026-11.jsonl", "notes.txt")
    kept = [host.config, host.config.parent / "closed", *(host.path / name for name in names)]
    gone = [host.path / name for name in (f"faults/{GPU}.4711", f"history/{GPU}.seen", "history/.x")]
    kept[4].mkdir()
    files = [path for path in kept[1:] if not path.exists()]
    for path in (*files, *gone):
        path.write_text("of use")
    host.config.write_text(host.config.read_text() + "vendor = nvidia\n")
    would = [line for line in host.done("--remove", "--dry-run") if line.startswith("left")]
    left = [line for line in host.done("--remove") if line.startswith("left")]
    assert would == left == [f"left, since setup did not write it: {path}" for path in kept]
    assert {path for path in host.path.rglob("*") if path.is_file()} == {*files[1:]}
