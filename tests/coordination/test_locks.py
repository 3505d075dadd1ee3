"""host.lock, which the kernel gives back; the lock of the older package, which ours share; signals that come while they
are held."""

import errno
import fcntl
import logging
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support import api

from safe_gpu import errors

HOLD = """
from safe_gpu.coordination.host_lock import Host
from safe_gpu.host.signals import DeferredSignals
with DeferredSignals() as signals, Host() as host:
    host.prepare()
    with host.locked(None, signals):
        say("held")
        listen()
say("released")
"""


@contextmanager
def locked(seconds: float | None = 30.0) -> Iterator[api.Host]:
    deadline = None if seconds is None else time.monotonic() + seconds
    with api.DeferredSignals() as signals, api.Host() as host:
        host.prepare()
        with host.locked(deadline, signals):
            yield host


def test_a_timeout_names_the_holder_and_who_only_looks_is_not_kept(state_dir: Path, forked, eventually) -> None:
    assert api.living_claims() == []
    assert not state_dir.exists(), "who reads makes no directory"
    holder = forked(HOLD, says="held")
    eventually(lambda: not api.procfs.is_running(holder.pid))  # else the host may be overloaded
    numbers = random.getstate()
    with pytest.raises(errors.LockTimeout) as caught, locked(0):
        pass
    assert caught.value.pid == holder.pid
    assert caught.value.user
    assert str(holder.pid) in str(caught.value)
    assert isinstance(caught.value, TimeoutError)
    assert random.getstate() == numbers, "the program's own random numbers stay"
    os.kill(holder.pid, signal.SIGSTOP)
    eventually(lambda: api.procfs.is_stopped(holder.pid))
    with pytest.raises(errors.LockTimeout, match="which is stopped"), locked(0):
        pass
    assert api.living_claims() == []
    with api.Host() as host:
        host.prepare()


@pytest.mark.parametrize("held_by", ["others in turn", "one that gets no CPU"])
def test_nobody_is_blamed_on_an_overloaded_host(state_dir: Path, forked, monkeypatch, held_by: str) -> None:
    holder = forked(HOLD, says="held")
    if held_by == "others in turn":
        in_turn = Mock(side_effect=[[holder.pid], [os.getppid()]] * 3)
        monkeypatch.setattr(
            api.host_lock.procfs, "flock_holders", lambda inodes: {inode: in_turn() for inode in inodes}
        )
    else:
        monkeypatch.setattr(api.host_lock.procfs, "is_running", lambda pid: pid == holder.pid)
    monkeypatch.setattr(os, "getloadavg", lambda: (8.0 * (os.cpu_count() or 1), 0.0, 0.0))
    with pytest.raises(errors.LockTimeout, match="no process keeps it: the host is overloaded") as caught, locked(0):
        pass
    assert (caught.value.pid, caught.value.overloaded) == (None, True)
    assert str(holder.pid) not in str(caught.value)


def test_a_forked_child_does_not_keep_host_lock(state_dir: Path, child: Any) -> None:
    """The parent is killed inside; its child lives on, and must not hold the host for everybody."""
    forks = HOLD.replace('say("held")', "os.fork() or (say(os.getpid()), signal.pause())")
    parent = child(f"import os, signal\n{forks}")
    survivor = int(parent.hear())
    parent.kill()
    try:
        with locked():
            pass
        os.kill(survivor, 0)
    finally:
        os.kill(survivor, signal.SIGKILL)


def test_a_file_that_was_cleaned_away_meanwhile_is_not_locked(state_dir: Path, child: Any) -> None:
    """A cleaner of /tmp unlinks host.lock while somebody waits for it: the waiter must end with the new file."""
    holder = child(HOLD, says="held")
    spy = """
from safe_gpu.coordination import host_lock
real, told = host_lock.lock_file, []
def lock_file(fd, path):
    got = real(fd, path)
    if not told: told.append(say("waiting"))
    return got
host_lock.lock_file = lock_file
"""
    waiter = child(spy + HOLD, says="waiting")  # for the old file
    (state_dir / "host.lock").unlink()
    third = child(HOLD, says="held")  # on a new file
    for one in (holder, third):
        one.tell()
        assert one.hear() == "released"
    assert waiter.hear() == "held"
    with pytest.raises(errors.LockTimeout), locked(0):
        pass  # so the waiter holds the file that stands there now


@pytest.mark.parametrize("removed", ["", "claims", "queue"])
def test_directories_that_were_replaced_are_opened_anew_by_a_look(state_dir: Path, removed: str) -> None:
    """An entry in a removed directory is seen by nobody, and no file can be made there."""
    before = len(os.listdir("/proc/self/fd"))
    with api.Host() as host:
        host.prepare()
        assert host.is_current()
        shutil.rmtree(state_dir / removed)
        assert not host.is_current()
        with api.Directory(str(state_dir), "claims") as anew:
            _, held = api.make_entry(anew, 5, {"gpus": {"GPU-1": None}}, by_children=False)
            host.prepare()
            assert host.is_current()
            assert [one.number for one in host.claims.look(())] == [5]
            held.release()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_state_directory_that_goes_away_before_the_lock_is_told(state_dir: Path) -> None:
    with api.DeferredSignals() as signals, api.Host() as host:
        host.prepare()
        shutil.rmtree(state_dir)
        with pytest.raises(errors.StateDirError) as caught, host.locked(time.monotonic() + 30, signals):
            pass
        assert caught.value.errno == errno.ENOENT
        assert not host.is_current()


def test_a_file_that_cannot_be_locked_is_a_state_dir_error(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(errors.StateDirError, match="cannot be locked"), locked():
        pass


def test_a_handler_that_raises_while_it_waits_passes_and_leaves_nothing(state_dir: Path, child, monkeypatch) -> None:
    child(HOLD, says="held")
    before = os.listdir("/proc/self/fd")

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", Mock(side_effect=BlockingIOError("of a handler")))
        with pytest.raises(BlockingIOError, match="of a handler"), locked():
            pass
    assert os.listdir("/proc/self/fd") == before


# The older package's lock


def take(deadline: float | None) -> api.ReadLock | None:
    with api.DeferredSignals() as signals:
        return api.take_older_package_lock(deadline, logging, signals)


THEIRS = """
import fcntl, os
f = open(os.open(PATH, os.O_CREAT | os.O_WRONLY, 0o666), "w")
fcntl.lockf(f, fcntl.LOCK_EX)
say("theirs"); listen()
f.close(); say("released"); listen()
"""
OURS = """
import logging, os, signal, sys, threading, time
from safe_gpu.coordination import older_package
from safe_gpu.host import locks
from safe_gpu.host.signals import DeferredSignals
older_package.LOCK_FILE = PATH
def take(seconds=None):
    with DeferredSignals() as signals:
        deadline = None if seconds is None else time.monotonic() + seconds
        return older_package.take_older_package_lock(deadline, logging, signals)
"""


def theirs(child: Any, path: Path) -> Any:
    return child(f"PATH = {str(path)!r}\n{THEIRS}", says="theirs")


def ours(child: Any, path: Path, code: str, says: str = "") -> Any:
    return child(f"PATH = {str(path)!r}\n{OURS}\n{code}", says)


@pytest.fixture(autouse=True)
def lock_file(open_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = open_tmp / "safe_gpu" / "gpu-lock"
    monkeypatch.setattr(api.older_package, "LOCK_FILE", str(path))
    monkeypatch.delenv("SAFE_GPU_LEGACY_LOCK", raising=False)
    return path


@pytest.fixture
def present(lock_file: Path) -> Path:
    lock_file.parent.mkdir()
    lock_file.touch(0o666)
    return lock_file


def test_absent_or_never_means_nothing_to_do_and_always_makes_it_open_to_all(
    lock_file: Path, monkeypatch: pytest.MonkeyPatch, child: Any
) -> None:
    assert not api.checks.older_package_counts()
    assert take(0.0) is None
    assert not lock_file.parent.exists()
    monkeypatch.setenv("SAFE_GPU_LEGACY_LOCK", "always")
    before = os.umask(0o077)
    try:
        take(0.0).release()
    finally:
        os.umask(before)
    assert lock_file.stat().st_mode & 0o777 == 0o666
    assert lock_file.parent.stat().st_mode & 0o7777 == 0o1777
    monkeypatch.delenv("SAFE_GPU_LEGACY_LOCK")
    theirs(child, lock_file)
    assert api.checks.older_package_counts()
    monkeypatch.setenv("SAFE_GPU_LEGACY_LOCK", "never")
    assert not api.checks.older_package_counts()


def test_new_claims_share_the_lock_of_the_older_package_and_keep_that_out(present: Path, child: Any) -> None:
    """A forked child does not keep the lock, and cannot give it back."""
    mine = take(0.0)
    code = """
lock = take(0)
inside, outside = os.pipe()
if os.fork() == 0:
    os.close(outside)   # so that the end of the parent ends it
    lock.release()
    say("shared"); os.read(inside, 1); os._exit(0)
listen(); lock.release(); say("released"); listen()
"""
    other = ours(child, present, code, "shared")
    mine.release()
    mine.release()
    assert not is_free(present)
    other.tell()
    assert other.hear() == "released"
    assert is_free(present)
    other.tell()
    mine = take(0.0)
    assert not is_free(present)
    mine.release()


def test_the_older_package_keeps_new_claims_out_until_the_deadline(present: Path, child) -> None:
    holder = theirs(child, present)
    with pytest.raises(api.LockTimeout, match=r"older safe-gpu package") as caught:
        take(time.monotonic())
    assert caught.value.pid == holder.pid
    assert str(holder.pid) in str(caught.value)


def waiting_for(path: Path) -> int:
    """How many wait in the kernel's queue for this file."""
    inode, lines = f":{path.stat().st_ino} ", Path("/proc/locks").read_text().split("\n")
    return sum("->" in line and inode in line for line in lines)


def is_free(path: Path) -> bool:
    """Whether the older package could take its lock now: locks of descriptions keep out one of this process, too."""
    with path.open("r+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def test_an_interrupt_ends_the_wait_and_leaves_no_lock(present: Path, child, eventually) -> None:
    holder = theirs(child, present)
    code = """
try: take()
except KeyboardInterrupt: say("interrupted")
listen()
while threading.active_count() > 1: time.sleep(0.01)
say("alone"); listen()
"""
    one = ours(child, present, code)
    eventually(lambda: waiting_for(present) == 1)
    os.kill(one.pid, signal.SIGINT)
    assert one.hear() == "interrupted"
    holder.tell()
    assert holder.hear() == "released"
    one.tell()
    assert one.hear() == "alone"
    assert is_free(present)


def test_the_thread_does_not_hold_up_the_end_of_the_interpreter(present: Path, child) -> None:
    theirs(child, present)
    one = ours(child, present, "try: take(0.5)\nexcept Exception as err: say(threading.active_count())")
    assert one.finish() == "2\n"


@pytest.mark.parametrize(
    "without",
    [
        "",
        "def refuse(thread): raise RuntimeError('no thread')\nthreading.Thread.start = refuse",
        "locks.ofd_locks = lambda: False",
    ],
    ids=["nothing", "threads", "locks of descriptions"],
)
def test_a_wait_after_some_that_ended_early_gets_the_lock(present: Path, child, without: str) -> None:
    """Without threads, or without locks of descriptions, it is polled."""
    holder = theirs(child, present)
    code = (
        f"{without}\nfor _ in range(3):\n    try: take(0.2)\n    except Exception as err: late = type(err).__name__\n"
        "say(late, threading.active_count())\n"
        "lock = take(); say('got it'); listen(); lock.release(); end = time.monotonic() + 30\n"
        # The lock may have been free before the thread that was left behind has seen it.
        "while locks._left_behind and time.monotonic() < end: time.sleep(0.001)\n"
        "for thread in threading.enumerate()[1:]: thread.join(30)\n"
        "say(threading.active_count(), locks._left_behind); listen()"
    )
    one = ours(child, present, code)
    assert one.hear() == f"LockTimeout {1 if without else 2}", "one thread is left behind"
    holder.tell()
    assert one.hear() == "got it"
    assert not is_free(present)
    one.tell()
    assert one.hear() == "1 []"
    assert is_free(present)


def test_a_file_lease_blocks_nobody_and_its_owner_is_named(present: Path, file_lease) -> None:
    file_lease(present, 54321)
    with pytest.raises(api.StateDirError, match=r"file lease \(F_SETLEASE\): ask its owner or root"):
        take(None)


def test_what_is_no_file_is_not_opened(lock_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / lock_file.name).touch()
    lock_file.parent.symlink_to(tmp_path)
    assert take(0.0) is None
    lock_file.parent.unlink()
    lock_file.parent.mkdir()
    lock_file.symlink_to(tmp_path / lock_file.name)
    assert take(0.0) is None
    assert caplog.text.count("cannot be taken") == 2
    lock_file.unlink()
    os.mkfifo(lock_file)
    assert take(0.0) is None
    assert "is not a regular file" in caplog.text


# Handlers that raise at the worst moment: while others are being held back, or put back


NUMBERS = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGTERM)


class Interrupt(BaseException):
    pass


class Meddler:
    """The module ``_signal``, in which SIGUSR1 comes right after the call of this number."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __getattr__(self, name: str) -> Any:
        return getattr(signals_module, name)

    def signal(self, number: int, handler: Any) -> Any:
        former = signals_module.signal(number, handler)
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGUSR1)
        return former


signals_module = api.signals.c_signals


@pytest.fixture
def handlers() -> Iterator[dict[int, Any]]:
    former = {number: signal.getsignal(number) for number in NUMBERS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, interrupt)
    signal.signal(signal.SIGUSR2, lambda number, frame: None)
    yield {number: signal.getsignal(number) for number in NUMBERS}
    for number, handler in former.items():
        signal.signal(number, handler)


def interrupt(number: int, frame: object) -> None:
    raise Interrupt


# SIGINT, SIGUSR1 and SIGUSR2 have handlers: three calls hold them back, and three put them back.
@pytest.mark.parametrize("at", range(1, 7))
def test_what_was_held_back_is_put_back(monkeypatch: pytest.MonkeyPatch, handlers: dict[int, Any], at: int) -> None:
    """And what gives back is run in any case."""
    monkeypatch.setattr(api.signals, "c_signals", Meddler(at))
    held = api.DeferredSignals()
    inside = False
    with pytest.raises(Interrupt), held:
        inside = True
    assert inside == (at > 1)  # the first call was of SIGINT, and SIGUSR1 was not held back yet
    assert {number: signal.getsignal(number) for number in NUMBERS} == handlers
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    held.deliver()  # once more, as after an interrupt, and nothing comes back
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    signal.signal(signal.SIGUSR2, handlers[signal.SIGUSR2])
    monkeypatch.setattr(api.signals, "c_signals", Meddler(at))
    done: list[bool] = []
    with pytest.raises(Interrupt):
        api.DeferredSignals().run_deferred(lambda: done.append(True))
    assert done == [True]


def test_handlers_run_once_and_in_what_may_take_long(handlers: object) -> None:
    caught: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: caught.append(number))
    with api.DeferredSignals() as held:
        held.defer()
        signal.raise_signal(signal.SIGUSR1)
        assert caught == []
        with held.delivering():
            assert len(caught) == 1
            signal.raise_signal(signal.SIGUSR1)
            assert len(caught) == 2
        signal.raise_signal(signal.SIGUSR1)
        assert len(caught) == 2
    assert len(caught) == 3


# Two calls for SIGTERM and SIGHUP, and two to put them back.
@pytest.mark.parametrize("at", range(1, 5))
def test_sigterm_has_its_default_action_again(monkeypatch: pytest.MonkeyPatch, handlers, at: int) -> None:
    monkeypatch.setattr(api.signals, "c_signals", Meddler(at))
    with pytest.raises(Interrupt), api.unwind_on_signals():
        pass
    assert {number: signal.getsignal(number) for number in NUMBERS} == handlers
    caught: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
    with api.unwind_on_signals():  # a handler of the program is left alone
        signal.raise_signal(signal.SIGTERM)
    assert caught == [signal.SIGTERM]


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``refusing(errno.EACCES)``: flock(2) answers that from now on to who asks for a lock."""
    flock = fcntl.flock

    def install(code: int) -> None:
        def refuse(fd: int, how: int) -> None:
            if how == fcntl.LOCK_EX | fcntl.LOCK_NB:
                raise OSError(code, os.strerror(code))
            flock(fd, how)

        monkeypatch.setattr(fcntl, "flock", refuse)

    return install


@pytest.mark.parametrize(
    ("code", "patience", "deadline", "advice"),
    [
        (errno.EPERM, 3600, None, "in a sandbox, allow flock(2)"),  # they are known at once
        (errno.ENOSYS, 3600, None, "set SAFE_GPU_DIR"),
        (errno.EACCES, 0.2, None, "in a sandbox, allow flock(2)"),
        (errno.EACCES, 3600, 0.2, "in a sandbox, allow flock(2)"),
    ],
)
def test_a_lock_that_is_refused_is_not_taken_for_one_that_somebody_holds(
    tmp_path: Path, monkeypatch: Any, refusing: Any, code: int, patience: float, deadline: float | None, advice: str
) -> None:
    monkeypatch.setattr(api.host_lock, "MINIMUM_PATIENCE", patience)
    with api.DeferredSignals() as signals, api.Host(str(tmp_path / "state")) as host:
        host.prepare()
        refusing(code)
        until = None if deadline is None else time.monotonic() + deadline
        with (
            pytest.raises(api.StateDirError, match=r"host\.lock cannot be locked") as caught,
            host.locked(until, signals),
        ):
            pass
        monkeypatch.undo()
    assert advice in str(caught.value)
    assert caught.value.errno == code


def test_where_contention_is_told_as_eacces_a_holder_is_waited_for(
    tmp_path: Path, monkeypatch: Any, refusing: Any, child: Any
) -> None:
    """Some file systems tell it so. The holder is another process, which /proc/locks shows."""
    monkeypatch.setattr(api.host_lock, "MINIMUM_PATIENCE", 0.0)
    with api.DeferredSignals() as signals, api.Host(str(tmp_path / "state")) as host:
        host.prepare()
        with host.locked(None, signals):
            pass
        path = tmp_path / "state" / api.HOST_LOCK
        code = f"import fcntl; file = open('{path}', 'rb+'); fcntl.flock(file, fcntl.LOCK_EX); say('locked'); listen()"
        holder = child(code, says="locked")
        refusing(errno.EACCES)
        with pytest.raises(api.LockTimeout) as caught, host.locked(time.monotonic() + 0.5, signals):
            pass
        monkeypatch.undo()
    assert caught.value.pid == holder.pid
