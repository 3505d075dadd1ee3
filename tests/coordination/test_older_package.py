"""The older package's lock: shared by ours, waited for, warned of where it cannot be reached."""

import fcntl
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from safe_gpu.coordination import older_package
from safe_gpu.coordination.older_package import take_older_package_lock
from safe_gpu.errors import LockTimeout, StateDirError, UnsatisfiableRequestError
from safe_gpu.host.locks import ReadLock
from safe_gpu.host.signals import DeferredSignals


def take(deadline: float | None, logger: Any = logging) -> ReadLock | None:
    with DeferredSignals() as signals:
        return take_older_package_lock(deadline, logger, signals)


THEIRS = """
import fcntl, os, sys
f = open(os.open(sys.argv[1] if len(sys.argv) > 1 else PATH, os.O_CREAT | os.O_WRONLY, 0o666), "w")
fcntl.lockf(f, fcntl.LOCK_EX)
say("theirs"); listen()
f.close(); say("released"); listen()
"""


@pytest.fixture(autouse=True)
def lock_file(open_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = open_tmp / "safe_gpu" / "gpu-lock"
    monkeypatch.setattr(older_package, "LOCK_FILE", str(path))
    monkeypatch.delenv("SAFE_GPU_LEGACY_LOCK", raising=False)
    return path


@pytest.fixture
def present(lock_file: Path) -> Path:
    lock_file.parent.mkdir()
    lock_file.touch(0o666)
    return lock_file


def theirs(child, path: Path):
    process = child(THEIRS.replace("PATH", repr(str(path))))
    assert process.hear() == "theirs"
    return process


def test_absent_or_never_means_nothing_to_do(lock_file: Path, monkeypatch: pytest.MonkeyPatch, child) -> None:
    assert not older_package.older_package_counts()
    assert take(0.0) is None
    assert not lock_file.parent.exists()
    lock_file.parent.mkdir()
    theirs(child, lock_file)
    assert older_package.older_package_counts()
    monkeypatch.setenv("SAFE_GPU_LEGACY_LOCK", "never")
    assert not older_package.older_package_counts()
    monkeypatch.setenv("SAFE_GPU_LEGACY_LOCK", "sometimes")
    with pytest.raises(UnsatisfiableRequestError, match=r"SAFE_GPU_LEGACY_LOCK=sometimes.*auto, always or never"):
        take(0.0)


def test_always_makes_it_open_to_all(lock_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_LEGACY_LOCK", "always")
    before = os.umask(0o077)
    try:
        lock = take(0.0)
    finally:
        os.umask(before)
    assert lock is not None
    lock.release()
    assert lock_file.stat().st_mode & 0o777 == 0o666
    assert lock_file.parent.stat().st_mode & 0o7777 == 0o1777


def test_ours_pass_side_by_side_and_keep_theirs_out(present: Path, child) -> None:
    mine = take(0.0)
    other = ours(child, present, "lock = take(0)\nsay('shared' if lock else 'none'); listen(); lock.release()")
    assert other.hear() == "shared"
    assert not is_free(present)
    other.tell()
    other.process.wait(30)
    assert not is_free(present)
    mine.release()
    mine.release()
    assert is_free(present)


def test_theirs_keeps_us_out_until_the_deadline(present: Path, child) -> None:
    holder = theirs(child, present)
    with pytest.raises(LockTimeout, match=r"older safe-gpu package") as caught:
        take(time.monotonic())
    assert caught.value.pid == holder.pid
    assert str(holder.pid) in str(caught.value)


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


def ours(child, path: Path, code: str):
    return child(f"PATH = {str(path)!r}\n{OURS}\n{code}")


def waiting_for(path: Path) -> int:
    """How many wait in the kernel's queue for this file."""
    inode = f":{path.stat().st_ino}"
    return sum(
        "->" in line and line.split()[-3].endswith(inode) for line in Path("/proc/locks").read_text().splitlines()
    )


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
    one = ours(
        child,
        present,
        """
try: take()
except KeyboardInterrupt: say("interrupted")
listen()
while threading.active_count() > 1: time.sleep(0.01)
say("alone"); listen()
""",
    )
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


def test_a_forked_child_does_not_keep_the_lock(present: Path, child) -> None:
    one = ours(
        child,
        present,
        """
lock = take(0)
inside, outside = os.pipe()
if os.fork() == 0:
    os.close(outside)   # so that the end of the parent ends it
    lock.release()      # not the child's to give back
    say("there"); os.read(inside, 1); os._exit(0)
listen(); lock.release(); say("released"); listen()
""",
    )
    assert one.hear() == "there"
    assert not is_free(present)
    one.tell()
    assert one.hear() == "released"
    assert is_free(present)
    one.tell()


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
    one = ours(
        child,
        present,
        f"{without}\nfor _ in range(3):\n    try: take(0.01)\n    except Exception as err: late = type(err).__name__\n"
        "say(late, threading.active_count())\n"
        "lock = take(); say('got it'); listen(); lock.release(); end = time.monotonic() + 30\n"
        # The lock may have been free before the thread that was left behind has seen it.
        "while locks._left_behind and time.monotonic() < end: time.sleep(0.001)\n"
        "for thread in threading.enumerate()[1:]: thread.join(30)\n"
        "say(threading.active_count(), locks._left_behind); listen()",
    )
    assert one.hear() == f"LockTimeout {1 if without else 2}", "one thread is left behind"
    holder.tell()
    assert one.hear() == "got it"
    assert not is_free(present)
    one.tell()
    assert one.hear() == "1 []"
    assert is_free(present)


def test_a_file_lease_blocks_nobody_and_its_owner_is_named(present: Path, file_lease) -> None:
    file_lease(present, 54321)
    with pytest.raises(StateDirError, match=r"file lease \(F_SETLEASE\): ask its owner or root"):
        take(None)


@pytest.mark.parametrize("what", ["fifo", "directory", "link", "link above"])
def test_what_is_no_file_is_not_opened(lock_file: Path, tmp_path: Path, what: str, caplog) -> None:
    (tmp_path / lock_file.name).touch()
    if what == "link above":
        lock_file.parent.symlink_to(tmp_path)
    else:
        lock_file.parent.mkdir()
        make = {"fifo": os.mkfifo, "directory": os.mkdir}
        make.get(what, lambda path: os.symlink(tmp_path / lock_file.name, path))(lock_file)
    assert take(0.0) is None
    assert ("cannot be taken" if "link" in what else "is not a regular file") in caplog.text
