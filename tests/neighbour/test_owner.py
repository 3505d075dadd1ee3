"""The owner of the state directory is its first user: he may rename and remove what others make there, sticky bit or
not. Nobody, root above all, is led to change, write or make anything elsewhere by that."""

import contextlib
import errno
import json
import logging
import os
import re
import select
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safe_gpu.coordination.leases.file_names import lease_name
from safe_gpu.coordination.locks.host_lock import HostLock
from support.claims import claim
from support.processes import own_network

import safe_gpu
from safe_gpu.coordination import history, socket_names
from safe_gpu.coordination import state_dir as files
from safe_gpu.coordination import state_dir as owners
from safe_gpu.errors import StateDirError

from .conftest import exchange

OWNER, OTHER = 4711, 4712
PRIVATE = 0o100600
RACE = 60.0 if os.environ.get("SAFE_GPU_REQUIRE_REAL") == "1" else 0.5  # seconds; tests run without the variable

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be the victim")


@pytest.fixture
def owned(state_dir: Path) -> Path:
    """A state directory of another user, which is used already."""
    with HostLock(time.monotonic() + 30):
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
def exchanged_after(monkeypatch: pytest.MonkeyPatch, owned: Path, victim: Path) -> Callable[..., list[str]]:
    """Put a link to the victim in the place of a new directory, after the n-th system call that concerns it."""

    def arrange(place: int, part: str) -> list[str]:
        trap = owned / "trap"
        trap.symlink_to(victim)
        calls: list[str] = []
        own: list[bool] = []

        def after(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                result = function(*args, **kwargs)
                if own:
                    return result
                own.append(True)
                if made := [entry for entry in owned.glob(f".{part}.*") if not entry.is_symlink()]:
                    calls.append(name)
                    if len(calls) == place:
                        assert exchange(made[0], trap) == 0
                own.clear()
                return result

            return call

        for name in ("mkdir", "open", "fstat", "listdir", "fchmod", "stat"):
            monkeypatch.setattr(os, name, after(name, getattr(os, name)))
        return calls

    return arrange


@needs_root
@pytest.mark.parametrize("part", ["leases", "queue", "history"])
@pytest.mark.parametrize("place", range(1, 8))
def test_a_directory_in_the_making_is_no_way_to_another_file(
    owned: Path, victim: Path, exchanged_after: Any, part: str, place: int
) -> None:
    shutil.rmtree(owned / part, ignore_errors=True)
    calls = exchanged_after(place, part)
    try:
        if part == "history":
            history.append([b"{}\n"], time.time())
        else:
            with HostLock(time.monotonic() + 30):
                pass
    except StateDirError:
        pass
    assert len(calls) >= min(place, 4), "the exchange took place"
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
        if name.startswith((b".queue.", b".leases.", b".history.")):
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
        for part in ("leases", "queue", "history"):
            shutil.rmtree(owned / part, ignore_errors=True)
            (owned / part).unlink(missing_ok=True)
        try:
            with HostLock(time.monotonic() + 30):
                made += 1
        except StateDirError:
            pass
        history.append([b"{}\n"], time.time())
        assert victim.stat().st_mode == PRIVATE, f"lost in round {rounds}"
    assert victim.read_text() == "precious"


@needs_root
@pytest.mark.parametrize("owner", [OWNER, 0])
@pytest.mark.parametrize("name", ["host.lock", "leases/{lease}", "history/{month}.jsonl", "queue/1.ticket"])
def test_a_file_that_was_moved_here_is_not_written(
    owned: Path, victim: Path, ground: Any, name: str, owner: int
) -> None:
    """Also in a directory of root's: who owns the directory in which root has made a file may move it away."""
    place = owned / name.format(lease=lease_name(ground.uuids[0]), month=history.month_of(time.time()))
    place.parent.mkdir(exist_ok=True)
    for directory in (owned, place.parent):
        os.chown(directory, owner, owner)
    place.unlink(missing_ok=True)
    victim.rename(place)
    try:
        safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0).release_gpus()
    except StateDirError:
        assert name == "host.lock"
    assert place.read_text() == "precious"
    assert place.stat().st_mode == PRIVATE


def without_unnamed_files(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = os.open

    def no_tmpfile(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return genuine(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", no_tmpfile)


@needs_root
def test_root_makes_no_file_under_a_name_that_another_user_may_replace(owned: Path, monkeypatch) -> None:
    with HostLock(time.monotonic() + 30):
        pass  # as anybody does, where files without names can be made
    (owned / "host.lock").unlink()
    without_unnamed_files(monkeypatch)
    refusal = r"belongs to 4711, and root makes a file in there only before it has a name"
    with pytest.raises(StateDirError, match=refusal), HostLock(time.monotonic() + 30):
        pass
    assert sorted(os.listdir(owned)) == ["leases", "queue"]


# What is said


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "can remove the leases" in record.getMessage()]


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owners of no directory are known yet, and no claim was told."""
    files.owners_of.cache_clear()
    monkeypatch.setattr(files, "_told", set())


@pytest.fixture
def unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses names."""

    def refuse(name: str) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(socket_names, "take_name", refuse)


@needs_root
@pytest.mark.parametrize("place", [".", "leases", "lease"])
def test_a_claim_that_cannot_have_names_says_once_who_can_remove_its_lease(
    owned: Path, ground: Any, unseen: None, unnamed: None, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    claim().release_gpus()
    caplog.clear()
    files._told.clear()
    files.owners_of.cache_clear()
    lease = owned / "leases" / lease_name(ground.uuids[0])
    for part in (owned, *owned.iterdir(), lease):
        os.chown(part, 0, 0)
    claim().release_gpus()
    assert said(caplog) == []
    files.owners_of.cache_clear()
    os.chown(lease if place == "lease" else owned / place, OWNER, OWNER)
    claim().release_gpus()
    claim().release_gpus()
    (line,) = said(caplog)
    assert line.startswith(f"{OWNER} can remove the leases of this claim in {owned}, and nothing else keeps others off")
    assert line.endswith(f"since its names cannot be bound: as root: safe-gpu setup --state-dir {owned}")


@needs_root
def test_a_claim_that_has_names_says_nothing_of_it(owned: Path, ground: Any, unseen: None, caplog: Any) -> None:
    if not owners.sees_network_devices():
        pytest.skip("this network namespace has no network device")
    claim().release_gpus()
    assert said(caplog) == []


@needs_root
def test_doctor_says_it_too(owned: Path, ground: Any, command: Any) -> None:
    claim().release_gpus()
    out = " ".join(command.run("doctor").stdout.split())
    assert f"4711 can remove other users' files in {owned}, root's too" in out
    assert f"fix: as root: safe-gpu setup --state-dir {owned}" in out


@pytest.fixture
def namespace() -> Iterator[None]:
    """A network namespace of this process's own."""
    with own_network():
        yield


@needs_root
@pytest.mark.parametrize("owner", [OWNER, OTHER, 0])
@pytest.mark.parametrize("place", ["directories", "lease"])
def test_a_claim_in_a_network_of_its_own_says_who_can_remove_its_lease(
    owned: Path, ground: Any, namespace: None, unseen: None, as_user: Any, owner: int, place: str
) -> None:
    claim().release_gpus()
    for part in (owned, *owned.iterdir()):
        os.chown(part, owner if place == "directories" else 0, 0)
    os.chown(owned / "leases" / lease_name(ground.uuids[0]), owner if place == "lease" else 0, 0)

    def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        files.owners_of.cache_clear()
        files._told.clear()
        told: list[str] = []
        log = logging.getLogger("safe_gpu")
        log.handlers = [logging.Handler()]
        log.handlers[0].emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
        claim().release_gpus()
        say([line for line in told if "can remove the leases of this claim" in line])

    heard = as_user(work, uid=OTHER).hear()
    assert (f"{OWNER} can remove the leases" in heard) is (owner == OWNER), heard
    assert ("seems not to be the host's" in heard) is (owner == OWNER), heard


@needs_root
@pytest.mark.parametrize("orphan", [False, True], ids=["another network", "a child of a dead claimer"])
def test_status_marks_a_claim_whose_lease_another_user_can_remove(
    owned: Path, ground: Any, as_user: Any, ask: Any, orphan: bool
) -> None:
    for part in (owned, *owned.iterdir()):
        os.chown(part, 0, 0)
    claim().release_gpus()  # makes the lease file
    os.chown(owned / "leases" / lease_name(ground.uuids[0]), OWNER, OWNER)

    def hold(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0)
        if orphan:
            claimer = os.pidfd_open(os.getpid())
            if os.fork():
                os._exit(0)
            select.select([claimer], [], [])  # it has ended
        say("held")
        listen()

    with contextlib.nullcontext() if orphan else own_network():
        holder = as_user(hold, uid=OTHER)
        assert holder.hear() == "held"
    try:
        table = ask("status").stdout
        assert re.search(r"^ *0 +at risk", table, re.MULTILINE), table
        assert "1 at risk" in table
        assert f"nothing but its lease keeps others off it, and {OWNER} can remove that" in " ".join(table.split())
        held = json.loads(ask("status", "--json").stdout)["gpus"][0]
        assert held["state"] == "claimed"
        assert held["claim"]["removable_by"] == str(OWNER)
        os.chown(owned / "leases" / lease_name(ground.uuids[0]), 0, 0)
        assert json.loads(ask("status", "--json").stdout)["gpus"][0]["claim"]["removable_by"] is None
        assert " at risk" not in ask("status").stdout
    finally:
        holder.tell()


@needs_root
def test_status_does_not_mark_a_claim_that_has_its_name(owned: Path, ground: Any, ask: Any) -> None:
    with safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0):
        assert " at risk" not in ask("status").stdout
        assert json.loads(ask("status", "--json").stdout)["gpus"][0]["claim"]["removable_by"] is None


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
    with safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0):
        shutil.rmtree(state_dir / "history")
        assert command.run("status").returncode == 0
        assert not (state_dir / "history").exists()
        (state_dir / "history").mkdir()
        assert command.run("status").returncode == 0
        assert {file.suffix for file in (state_dir / "history").iterdir()} == {".idle", ".seen"}
