"""What /proc says of a process that is on its way out."""

import ctypes
import fcntl
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safe_gpu.host import procfs

PTRACE_SEIZE = 0x4206

# The first process of a PID namespace, when it ends, closes its files, ends the others there, and waits until all of
# them have been waited for. One that is traced from outside waits for its tracer.
FIRST = """
import ctypes, fcntl, os, signal, sys
if ctypes.CDLL(None).unshare(0x20000000):  # CLONE_NEWPID
    say("cannot"), listen()
locked, lock = os.pipe()
first = os.fork()
if not first:
    file = open(PATH, "w")
    fcntl.flock(file, fcntl.LOCK_EX)
    if not os.fork():
        signal.pause()
    os.write(lock, b"!")
    signal.pause()
os.read(locked, 1)
say(first)
listen()
"""


def test_a_process_that_is_held_while_it_exits(tmp_path: Path, child: Callable[..., Any], eventually: Any) -> None:
    """Its locks are free, and it has not ended: nobody waits for it in vain, nobody takes it for a stranger."""
    path = tmp_path / "lock"
    started = child(FIRST.replace("PATH", repr(str(path))))
    heard = started.hear()
    if heard == "cannot":
        pytest.skip("no PID namespaces for this user")
    first = int(heard)
    try:
        eventually(lambda: len(procfs.descendants(first)) == 1)
        (traced,) = procfs.descendants(first)
        ptrace = ctypes.CDLL(None).ptrace
        ptrace.argtypes = [ctypes.c_long] * 4
        if ptrace(PTRACE_SEIZE, traced, 0, 0):
            pytest.skip("no ptrace here")
        assert not procfs.is_exiting(first)
    finally:
        os.kill(first, signal.SIGKILL)
    try:
        with open(path) as file:
            eventually(lambda: _is_free(file.fileno()))
        assert procfs.is_exiting(first)
        assert not procfs.has_ended(first)
    finally:
        os.waitid(os.P_PID, traced, os.WEXITED)
    eventually(lambda: procfs.has_ended(first))
    assert procfs.is_exiting(first), "a zombie"


@pytest.mark.parametrize(("flags", "exits"), [(4, True), (0x400044, True), (0x400040, False)])
def test_a_process_exits_when_its_last_thread_does(monkeypatch: pytest.MonkeyPatch, flags: int, exits: bool) -> None:
    """The first is a zombie already, and the other may still free memory of a GPU, or live on."""

    def stat(path: str, limit: int = 0) -> bytes:
        state, flag = ("Z", 4) if path.endswith(f"/proc/{os.getpid()}/stat") else ("D", flags)
        return f"1 (a b) {state}{' 0' * 5} {flag}{' 0' * 10} 2".encode()

    thread = threading.Event()
    other = threading.Thread(target=thread.wait)
    other.start()
    try:
        monkeypatch.setattr(procfs, "read_start", stat)
        assert procfs.is_exiting(os.getpid()) is exits
        assert not procfs.has_ended(os.getpid())
    finally:
        thread.set()
        other.join()


def _is_free(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
