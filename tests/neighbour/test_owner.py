"""The owner of the state directory is its first user: he may rename and remove what others make there, sticky bit or
not. Nobody, root above all, is led to change, write or make anything elsewhere by that."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu.coordination import files, history
from safe_gpu.coordination.leases import lease_name
from safe_gpu.coordination.locks import HostLock
from safe_gpu.errors import StateDirError

OWNER, OTHER = 4711, 4712
PRIVATE = 0o100600
RACE = 60.0 if os.environ.get("SAFE_GPU_REQUIRE_REAL") == "1" else 0.5  # seconds; tests run without the variable
RENAME_EXCHANGE = 2

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


def exchange(one: Path, other: Path) -> int:
    """renameat2(2) with RENAME_EXCHANGE; returns 0 or the error number."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.renameat2(-100, bytes(one), -100, bytes(other), RENAME_EXCHANGE) and ctypes.get_errno()


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
@pytest.mark.parametrize(
    "name", ["host.lock", "leases/{lease}", "leases/{fault}", "history/{month}.jsonl", "queue/1.ticket"]
)
def test_a_file_that_was_moved_here_is_not_written(owned: Path, victim: Path, ground: Any, name: str) -> None:
    place = owned / name.format(
        lease=lease_name(ground.uuids[0]), fault=f"{ground.uuids[0]}.fault", month=history.month_of(time.time())
    )
    place.parent.mkdir(exist_ok=True)
    os.chown(place.parent, OWNER, OWNER)
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
    return [record.getMessage() for record in caplog.records if "belongs to" in record.getMessage()]


def claim() -> None:
    safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0).release_gpus()


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owners of no directory are known yet."""
    monkeypatch.setattr(files, "_looked_at", set())


@needs_root
def test_a_claim_of_root_says_once_that_the_owner_can_remove_its_files(owned: Path, ground, unseen, caplog) -> None:
    claim()
    claim()
    (line,) = said(caplog)
    assert "belongs to 4711, who can remove root's files in it: as root: chown -h root:root" in line
    assert "d %s 1777 root root -" in line
    for part in ("leases", "queue", "history"):
        assert f"{owned}/{part}" in line


@needs_root
def test_doctor_says_it_too(owned: Path, command: Any) -> None:
    out = command.run("doctor").stdout
    assert "4711" in out
    assert "root's too" in " ".join(out.split())
    assert f"{owned}/history" in out


@pytest.fixture
def namespace() -> Iterator[None]:
    """A network namespace of this process's own."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net", "rb") as before:
        if libc.unshare(0x40000000):
            pytest.skip("cannot make a network namespace here")
        yield
        assert libc.setns(before.fileno(), 0x40000000) == 0


@needs_root
@pytest.mark.parametrize("owner", [OWNER, OTHER, 0])
def test_a_claim_in_a_network_of_its_own_says_who_can_remove_its_lease(
    owned: Path, ground: Any, namespace: None, unseen: None, as_user: Any, owner: int
) -> None:
    for part in (owned, *owned.iterdir()):
        os.chown(part, owner, owner)

    def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        claim()
        with files.StateDir(str(owned)) as root:
            files._looked_at.clear()
            files.look_at_owners(root)
        say(files.state_dir_warnings())

    heard = as_user(work, uid=OTHER).hear()
    assert ("who can remove the leases in it" in heard) is (owner == OWNER), heard


@needs_root
def test_a_claim_in_the_network_of_the_host_says_nothing(owned: Path, unseen: None, monkeypatch, as_user) -> None:
    if not files._sees_network_devices():
        pytest.skip("this network namespace has no network device")

    def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        with files.StateDir(str(owned)) as root:
            files.look_at_owners(root)
        say(files.state_dir_warnings())

    assert as_user(work, uid=OTHER).hear() == "[]"


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
        assert [file.suffix for file in (state_dir / "history").iterdir()] == [".idle"]
