"""The owner of the state directory is its first user: he may rename and remove what others make there, sticky bit or
not. Nobody, root above all, is led to change, write or make anything elsewhere by that."""

import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.claims import claim
from support.ground import locked_host
from support.processes import own_network

from safe_gpu.claim import checks
from safe_gpu.coordination import history
from safe_gpu.coordination.doors import Doors
from safe_gpu.errors import StateDirError
from safe_gpu.host import procfs

from .conftest import exchange

OWNER = 4711
PRIVATE = 0o100600
RACE = 30.0 if os.environ.get("SAFE_GPU_REQUIRE_REAL") == "1" else 0.5  # seconds; tests run without the variable

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


@pytest.fixture
def exchanged_after(monkeypatch: pytest.MonkeyPatch, victim: Path) -> Callable[..., list[str]]:
    """Put a link to the victim in the place of what is being made, after the n-th system call that concerns it."""

    def arrange(place: int, directory: Path, pattern: str) -> list[str]:
        trap = directory / "trap"
        trap.symlink_to(victim)
        calls: list[str] = []
        own: list[bool] = []

        def after(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                result = function(*args, **kwargs)
                if own:
                    return result
                own.append(True)
                if made := [entry for entry in directory.glob(pattern) if not entry.is_symlink()]:
                    calls.append(name)
                    if len(calls) == place:
                        assert exchange(made[0], trap) == 0
                own.clear()
                return result

            return call

        for name in ("mkdir", "open", "fstat", "listdir", "fchmod", "stat", "write"):
            monkeypatch.setattr(os, name, after(name, getattr(os, name)))
        return calls

    return arrange


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)


CALLS = {"claims": 5, "queue": 5, "history": 5, "host.lock": 2, "entry": 4}
"""How many system calls concern what is being made."""


@needs_root
@pytest.mark.parametrize(("part", "place"), [(part, n + 1) for part, most in CALLS.items() for n in range(most)])
def test_what_is_being_made_is_no_way_to_another_file(
    owned: Path, victim: Path, ground: Any, exchanged_after: Any, part: str, place: int
) -> None:
    if part == "entry":
        calls = exchanged_after(place, owned / "claims", "." + "[0-9a-f]" * 16)
    else:
        remove(owned / part)
        calls = exchanged_after(place, owned, f".{part}.*")
    try:
        claim().release_gpus()
    except StateDirError:
        pass
    assert len(calls) >= place, "the exchange took place"
    assert victim.stat().st_mode == PRIVATE
    assert victim.read_text() == "precious"


ATTACK = """
import ctypes, os, struct
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
                try:
                    os.unlink(left)
                except OSError:
                    try:
                        os.rmdir(left)
                    except OSError:
                        pass
            try:
                os.symlink(victim, "trap")
            except FileExistsError:
                pass
"""


@needs_root
def test_a_race_with_the_owner_is_never_lost(owned: Path, victim: Path, child: Any) -> None:
    """The code that set modes by path lost it within some dozen rounds."""
    attacker = child(ATTACK, env={"STATE": str(owned), "VICTIM": str(victim)})
    assert attacker.hear() == "ready"
    until = time.monotonic() + RACE
    rounds = made = 0
    while time.monotonic() < until or rounds < 200 or not made:  # until somebody gets through
        rounds += 1
        for part in ("claims", "queue", "history", "host.lock"):
            remove(owned / part)
        try:
            with locked_host():
                made += 1
        except StateDirError:
            pass
        history.append([b"{}\n"], time.time())
        assert victim.stat().st_mode == PRIVATE, f"lost in round {rounds}"
    assert victim.read_text() == "precious"


@needs_root
@pytest.mark.parametrize("owner", [OWNER, 0])
@pytest.mark.parametrize("name", ["host.lock", "claims/1.{zeros}", "history/{month}.jsonl", "queue/1.{zeros}"])
def test_a_file_that_was_moved_here_is_not_written(
    owned: Path, victim: Path, ground: Any, name: str, owner: int
) -> None:
    """Also in a directory of root's: who owns the directory in which root has made a file may move it away. At most
    that name of it is removed, as that of an entry of root's that is dead."""
    place = owned / name.format(zeros="0" * 16, month=history.month_of(time.time()))
    place.parent.mkdir(exist_ok=True)
    for directory in (owned, place.parent):
        os.chown(directory, owner, owner)
    place.unlink(missing_ok=True)
    os.link(victim, place)
    try:
        claim().release_gpus()
    except StateDirError:
        assert name == "host.lock"
    assert victim.read_text() == "precious"
    assert victim.stat().st_mode == PRIVATE


# What is said


@needs_root
@pytest.mark.parametrize("why", ["", "it has no doors", "this network namespace seems not to be the host's"])
def test_a_claim_whose_entry_alone_counts_says_once_who_can_remove_it(
    owned: Path, ground: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(checks, "_told", set())
    if not why:
        monkeypatch.setattr(procfs, "sees_network_devices", lambda: True)
    elif "doors" in why:
        monkeypatch.setattr(Doors, "take_whole", refuse)
    with own_network():
        for _ in range(2):
            claim().release_gpus()
    told = [line for record in caplog.records if "can remove the entries" in (line := record.getMessage())]
    assert len(told) == bool(why)
    assert all(line.startswith(f"{OWNER} can remove the entries of this claim in {owned}") for line in told)
    assert all(why in line and line.endswith(f": as root: safe-gpu setup --state-dir {owned}") for line in told)


# Who only looks


LOOKS = [("status",), ("status", "--json"), ("status", "--prometheus"), ("doctor",), ("history",), ("policy",)]


@pytest.mark.parametrize("look", LOOKS, ids=" ".join)
@pytest.mark.parametrize("there", [False, True])
def test_who_looks_makes_nothing(state_dir: Path, command: Any, look: tuple[str, ...], there: bool) -> None:
    if there:
        state_dir.mkdir(mode=0o755)
    assert command.run(*look).returncode in (0, 1)
    assert (os.listdir(state_dir) if there else state_dir.exists()) == ([] if there else False)
    if there:
        assert stat.S_IMODE(state_dir.stat().st_mode) == 0o755


def test_status_notes_idle_gpus_only_where_there_is_a_history(state_dir: Path, ground: Any, command: Any) -> None:
    with claim():
        shutil.rmtree(state_dir / "history")
        assert command.run("status").returncode == 0
        assert not (state_dir / "history").exists()
        (state_dir / "history").mkdir()
        assert command.run("status").returncode == 0
        assert {file.suffix for file in (state_dir / "history").iterdir()} == {".idle", ".seen"}
