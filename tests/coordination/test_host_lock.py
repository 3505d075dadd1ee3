"""The host lock: exclusive, given back by the kernel, its holder named."""

import fcntl
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from safe_gpu import errors
from safe_gpu.coordination.files.descriptors import fork_guard
from safe_gpu.coordination.files.state_dir import StateDir
from safe_gpu.coordination.holders.of_gpus import lease_holders
from safe_gpu.coordination.leases import watcher
from safe_gpu.coordination.locks import flock, host_lock
from safe_gpu.coordination.locks.host_lock import HostLock, _pauses
from safe_gpu.coordination.scope import gpus_of_scope
from safe_gpu.host import procfs

HOLD = """
from safe_gpu.coordination.locks.host_lock import HostLock
with HostLock(None) as host:
    say("held")
    listen()
say("released")
"""


def soon() -> float:
    return time.monotonic() + 30


def test_directories_are_there_while_it_is_held(state_dir: Path) -> None:
    before = set(fork_guard._fds)  # a thread of an earlier test may still sleep on a ticket
    with HostLock(soon()) as host:
        assert os.path.samestat(os.fstat(host.leases.fd), (state_dir / "leases").stat())
        assert os.path.samestat(os.fstat(host.queue.fd), (state_dir / "queue").stat())
    assert sorted(os.listdir(state_dir)) == ["host.lock", "leases", "queue"]
    assert fork_guard._fds.keys() <= before


def test_a_timeout_names_the_holder(state_dir: Path, child, eventually) -> None:
    holder = child(HOLD)
    assert holder.hear() == "held"
    eventually(lambda: not procfs.is_running(holder.pid))  # else the host may be overloaded
    with pytest.raises(errors.LockTimeout) as caught, HostLock(time.monotonic()):
        pass
    assert caught.value.pid == holder.pid
    assert caught.value.user
    assert str(holder.pid) in str(caught.value)
    assert isinstance(caught.value, TimeoutError)


def test_who_reads_the_leases_waits_for_a_lock_that_is_held_for_a_moment(state_dir, monkeypatch) -> None:
    tries: list[int] = []
    genuine = flock.lock_file
    monkeypatch.setattr(host_lock, "lock_file", lambda fd: tries.append(fd) or (len(tries) > 1 and genuine(fd)))
    monkeypatch.setattr(watcher, "lock_file", lambda fd: tries.append(fd) or (len(tries) > 1 and genuine(fd)))
    assert lease_holders((), prefix="") == {}
    assert len(tries) == 2


def test_who_reads_makes_no_directory(state_dir: Path) -> None:
    assert gpus_of_scope("0123456789abcdef") == ()
    assert not state_dir.exists()


def test_a_stopped_holder_is_called_stopped(state_dir: Path, child, eventually) -> None:
    holder = child(HOLD)
    assert holder.hear() == "held"
    os.kill(holder.pid, signal.SIGSTOP)
    eventually(lambda: Path(f"/proc/{holder.pid}/stat").read_text().split()[2] == "T")
    with pytest.raises(errors.LockTimeout, match="which is stopped"), HostLock(time.monotonic()):
        pass


@pytest.mark.parametrize("held_by", ["others in turn", "one that gets no CPU", "one that has ended"])
def test_nobody_is_blamed_on_an_overloaded_host(state_dir: Path, child, monkeypatch, held_by: str) -> None:
    holder = child(HOLD)
    assert holder.hear() == "held"
    ended = os.fork()
    if not ended:
        os._exit(0)
    os.waitpid(ended, 0)
    holders = iter([holder.pid, os.getppid()] * 3)
    shown = {"others in turn": lambda: next(holders), "one that has ended": lambda: ended}.get(held_by)
    if shown is not None:
        monkeypatch.setattr(host_lock.procfs, "flock_holders", lambda inodes: {inode: [shown()] for inode in inodes})
    else:
        monkeypatch.setattr(host_lock.procfs, "is_running", lambda pid: pid == holder.pid)
    monkeypatch.setattr(os, "getloadavg", lambda: (8.0 * os.cpu_count(), 0.0, 0.0))
    with pytest.raises(errors.LockTimeout, match="no process keeps it: the host is overloaded") as caught:
        HostLock(time.monotonic()).__enter__()
    assert (caught.value.pid, caught.value.overloaded) == (None, True)
    assert str(holder.pid) not in str(caught.value)


def test_a_forked_child_does_not_keep_it(state_dir: Path) -> None:
    """The parent is killed inside; its child lives on, and must not hold the host for everybody."""
    ready, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        with HostLock(None):
            survivor = os.fork()
            if survivor == 0:
                os.write(write, b"%d\n" % os.getpid())
                signal.pause()
            signal.pause()
    survivor = int(os.read(ready, 20))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    try:
        with HostLock(soon()):
            pass
        os.kill(survivor, 0)
    finally:
        os.kill(survivor, signal.SIGKILL)
        os.close(ready)
        os.close(write)


def test_a_file_that_was_cleaned_away_meanwhile_is_not_locked(state_dir: Path, child) -> None:
    """A cleaner of /tmp unlinks host.lock while somebody waits for it: the waiter must end with the new file."""
    holder = child(HOLD)
    assert holder.hear() == "held"
    spy = """
from safe_gpu.coordination.locks import host_lock
real, told = host_lock.lock_file, []
def lock_file(fd):
    got = real(fd)
    if not told: told.append(say("waiting"))
    return got
host_lock.lock_file = lock_file
"""
    waiter = child(spy + HOLD)
    assert waiter.hear() == "waiting"  # for the old file
    (state_dir / "host.lock").unlink()
    third = child(HOLD)
    assert third.hear() == "held"  # on a new file
    holder.tell()
    assert holder.hear() == "released"
    third.tell()
    assert third.hear() == "released"
    assert waiter.hear() == "held"
    with pytest.raises(errors.LockTimeout), HostLock(time.monotonic()):
        pass  # so the waiter holds the file that stands there now


@pytest.mark.parametrize("removed", ["", "leases", "queue"])
@pytest.mark.parametrize("step", ["open_or_create", "is_current"])
def test_directories_that_are_removed_meanwhile_are_not_used(state_dir, monkeypatch, removed: str, step: str) -> None:
    """A lease or ticket in a removed directory is seen by nobody, and no file can be made there."""
    real = getattr(StateDir, step)
    cleaned = []
    before = len(os.listdir("/proc/self/fd"))

    def clean_once(self: StateDir, *args: object) -> object:
        if not cleaned:
            cleaned.append(True)
            shutil.rmtree(state_dir / removed)
        return real(self, *args)

    monkeypatch.setattr(StateDir, step, clean_once)
    with HostLock(time.monotonic() + 30) as host:
        assert cleaned
        for name, directory in ("leases", host.leases), ("queue", host.queue):
            assert os.path.samestat(os.stat(state_dir / name), os.fstat(directory.fd))
            os.close(directory.open_or_create("file"))
        assert (state_dir / "host.lock").exists()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_cannot_be_locked_is_a_state_dir_error(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(errors.StateDirError, match="cannot be locked"), HostLock(soon()):
        pass


def test_only_one_at_a_time(state_dir: Path, child, tmp_path: Path) -> None:
    """A marker must not be there on entry."""
    code = f"""
import os
from safe_gpu.coordination.locks.host_lock import HostLock
say("ready"); listen()
for _ in range(200):
    with HostLock(None):
        os.close(os.open({str(tmp_path / "occupied")!r}, os.O_CREAT | os.O_EXCL))
        os.unlink({str(tmp_path / "occupied")!r})
"""
    workers = [child(code) for _ in range(4)]
    for worker in workers:
        assert worker.hear() == "ready"
    for worker in workers:
        worker.tell()
    for worker in workers:
        worker.finish()


def test_pauses_are_uneven_and_the_programs_own_random_numbers_stay() -> None:
    before = random.getstate()
    one, other = ([next(pauses) for _ in range(20)] for pauses in (_pauses(), _pauses()))
    assert one != other
    assert all(0.001 <= pause <= 0.1 for pause in one + other)
    assert random.getstate() == before
