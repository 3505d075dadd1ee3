"""Host: both directories of entries while a process claims, and host.lock, which the kernel gives back."""

import errno
import fcntl
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from safe_gpu import errors
from safe_gpu.coordination import host_lock
from safe_gpu.coordination.directory import Directory
from safe_gpu.coordination.entry import make_entry
from safe_gpu.coordination.holders import living_claims
from safe_gpu.coordination.host_lock import Host
from safe_gpu.host import procfs
from safe_gpu.host.signals import DeferredSignals

HOLD = """
from safe_gpu.coordination.host_lock import Host
from safe_gpu.host.signals import DeferredSignals
with DeferredSignals() as signals, Host() as host:
    host.look()
    with host.locked(None, signals):
        say("held")
        listen()
say("released")
"""


@contextmanager
def locked(seconds: float | None = 30.0) -> Iterator[Host]:
    deadline = None if seconds is None else time.monotonic() + seconds
    with DeferredSignals() as signals, Host() as host:
        host.look()
        with host.locked(deadline, signals):
            yield host


def test_a_timeout_names_the_holder_and_who_only_looks_is_not_kept(
    state_dir: Path, child: Any, eventually: Any
) -> None:
    assert living_claims() == []
    assert not state_dir.exists(), "who reads makes no directory"
    holder = child(HOLD)
    assert holder.hear() == "held"
    eventually(lambda: not procfs.is_running(holder.pid))  # else the host may be overloaded
    numbers = random.getstate()
    with pytest.raises(errors.LockTimeout) as caught, locked(0):
        pass
    assert caught.value.pid == holder.pid
    assert caught.value.user
    assert str(holder.pid) in str(caught.value)
    assert isinstance(caught.value, TimeoutError)
    assert random.getstate() == numbers, "the program's own random numbers stay"
    os.kill(holder.pid, signal.SIGSTOP)
    eventually(lambda: procfs.is_stopped(holder.pid))
    with pytest.raises(errors.LockTimeout, match="which is stopped"), locked(0):
        pass
    assert living_claims() == []
    with Host() as host:
        host.look()


@pytest.mark.parametrize("held_by", ["others in turn", "one that gets no CPU", "one that has ended"])
def test_nobody_is_blamed_on_an_overloaded_host(
    state_dir: Path, child: Any, monkeypatch: pytest.MonkeyPatch, held_by: str
) -> None:
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
    monkeypatch.setattr(os, "getloadavg", lambda: (8.0 * (os.cpu_count() or 1), 0.0, 0.0))
    with pytest.raises(errors.LockTimeout, match="no process keeps it: the host is overloaded") as caught, locked(0):
        pass
    assert (caught.value.pid, caught.value.overloaded) == (None, True)
    assert str(holder.pid) not in str(caught.value)


def test_a_forked_child_does_not_keep_it(state_dir: Path) -> None:
    """The parent is killed inside; its child lives on, and must not hold the host for everybody."""
    ready, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        with locked(None):
            survivor = os.fork()
            if survivor == 0:
                os.write(write, b"%d\n" % os.getpid())
                signal.pause()
            signal.pause()
    survivor = int(os.read(ready, 20))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    try:
        with locked():
            pass
        os.kill(survivor, 0)
    finally:
        os.kill(survivor, signal.SIGKILL)
        os.close(ready)
        os.close(write)


def test_a_file_that_was_cleaned_away_meanwhile_is_not_locked(state_dir: Path, child: Any) -> None:
    """A cleaner of /tmp unlinks host.lock while somebody waits for it: the waiter must end with the new file."""
    holder = child(HOLD)
    assert holder.hear() == "held"
    spy = """
from safe_gpu.coordination import host_lock
real, told = host_lock.lock_file, []
def lock_file(fd, path):
    got = real(fd, path)
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
    with pytest.raises(errors.LockTimeout), locked(0):
        pass  # so the waiter holds the file that stands there now


@pytest.mark.parametrize("removed", ["", "claims", "queue"])
def test_directories_that_were_replaced_are_opened_anew_by_a_look(state_dir: Path, removed: str) -> None:
    """An entry in a removed directory is seen by nobody, and no file can be made there."""
    before = len(os.listdir("/proc/self/fd"))
    with Host() as host:
        host.look()
        assert host.is_current()
        shutil.rmtree(state_dir / removed)
        assert not host.is_current()
        with Directory(str(state_dir), "claims") as anew:
            _, held = make_entry(anew, 5, {"gpus": {"GPU-1": None}}, by_children=False)
            host.look()
            assert host.is_current()
            assert [one.number for one in host.claims.look(())] == [5]
            held.release()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_state_directory_that_goes_away_before_the_lock_is_told(state_dir: Path) -> None:
    with DeferredSignals() as signals, Host() as host:
        host.look()
        shutil.rmtree(state_dir)
        with pytest.raises(errors.StateDirError) as caught, host.locked(time.monotonic() + 30, signals):
            pass
        assert caught.value.errno == errno.ENOENT
        assert not host.is_current()


def test_a_file_that_cannot_be_locked_is_a_state_dir_error(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, operation: int) -> None:
        if operation != fcntl.LOCK_UN:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with Host() as host:
        host.look()
        monkeypatch.setattr(fcntl, "flock", refuse)
        with (
            pytest.raises(errors.StateDirError, match="cannot be locked"),
            DeferredSignals() as signals,
            host.locked(time.monotonic() + 30, signals),
        ):
            pass


def test_a_handler_that_raises_while_it_waits_passes_and_leaves_nothing(
    state_dir: Path, child: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = child(HOLD)
    assert holder.hear() == "held"
    before = os.listdir("/proc/self/fd")

    def interrupted(seconds: float) -> None:
        raise BlockingIOError("of a handler")

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", interrupted)
        with pytest.raises(BlockingIOError, match="of a handler"), locked():
            pass
    assert os.listdir("/proc/self/fd") == before
