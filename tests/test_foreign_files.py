"""Files that others write: read in bounded memory, without blocking, and no descriptor is left open."""

import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safe_gpu.host.foreign_files import open_to_read, read_bytes, read_start


def test_the_start_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789" * 20_000)
    assert read_bytes(str(path)) == path.read_bytes()[: 1 << 16]
    assert [read_start(str(path), limit) for limit in (0, 3, 100_000)] == [b"", b"012", path.read_bytes()[:100_000]]
    assert len(read_bytes("/dev/zero", 200_000)) == 200_000
    assert len(read_bytes("/proc/self/stat")) > 50


def test_what_cannot_be_read_leaves_no_descriptor(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    for path in (str(tmp_path / "missing"), str(tmp_path), "with\0NUL", "/proc/self/mem"):
        assert read_start(path) is None
        with pytest.raises((OSError, ValueError)):
            read_bytes(path)
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(OSError):
        open_to_read(str(tmp_path / "link"), os.O_NOFOLLOW)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_fifo_does_not_block(tmp_path: Path) -> None:
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    assert read_start(path) == b""
    writer = os.open(path, os.O_RDWR)
    try:
        assert read_start(path) == b"", "a writer that writes nothing"
        os.write(writer, b"some")
        assert read_start(path, 2) == b"so"
    finally:
        os.close(writer)


def test_a_file_lease_does_not_block(tmp_path: Path) -> None:
    """The kernel would wait for the holder of the lease, for 45 seconds."""
    path = tmp_path / "file"
    path.touch()
    with open(path, "wb") as file:
        kept = signal.signal(signal.SIGIO, signal.SIG_IGN)
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            with pytest.raises(BlockingIOError):
                read_bytes(str(path))
        finally:
            signal.signal(signal.SIGIO, kept)


INTERRUPTED = """
import os, signal, sys
from safe_gpu.host.foreign_files import read_start
raised = 0
class Interrupt(BaseException): pass
def handler(*_):
    global raised
    raised += 1
    raise Interrupt
signal.signal(signal.SIGALRM, handler)
before = len(os.listdir("/proc/self/fd"))
while raised < 300:
    try:
        signal.setitimer(signal.ITIMER_REAL, 20e-6 + raised % 50 * 1e-6)
        while True:
            read_start(PATH)
    except Interrupt:
        pass
say(len(os.listdir("/proc/self/fd")) - before)
"""


@pytest.mark.parametrize("path", ["/proc/self/stat", "/dev/null"])
def test_an_interrupt_leaves_no_descriptor(child: Callable[..., Any], path: str) -> None:
    """An exception of a signal handler may come after any call, and here it comes after each at some time."""
    assert child(INTERRUPTED.replace("PATH", repr(path))).hear() == "0"
