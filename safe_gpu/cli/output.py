"""The standard streams of a command: its errors, the line of a wait, a second screen, and files replaced whole."""

from __future__ import annotations

import os
import stat
import sys
import time
from _thread import allocate_lock
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from errno import EBADF, EDQUOT, EFBIG, EIO, ENOSPC
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import SafeGpuError
from ..host.foreign_files import printable_lines
from ..host.procfs import open_files
from ..wording.text import cut, in_brackets

if TYPE_CHECKING:
    from threading import Event, Thread

    from ..claim.report import WaitStatus


EX_USAGE = 2


class CommandError(SafeGpuError):
    """The command cannot be run; ``code`` is what shells exit with: 127 not found, 126 found and not runnable."""

    def __init__(self, message: str = "", *, code: int = 127) -> None:
        super().__init__(message)
        self.code = code


def open_standard_streams() -> None:
    """Open the numbers 0 to 2 where they are closed: an entry would take one of them, and be printed to.

    A line is one write(2), with PYTHONUNBUFFERED too, so that the lines of parallel jobs do not run together.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    for stream in (sys.__stdout__, sys.__stderr__):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def drop(stream: TextIO) -> None:
    """Discard what a stream still buffers and cannot write; the interpreter would try once more at exit."""
    fd = os.open(os.devnull, os.O_WRONLY)
    os.dup2(fd, stream.fileno())
    os.close(fd)


def why_unwritten(err: OSError) -> str:
    """Return the text of an error; of a failed write without the name of a file, with that of standard output."""
    if err.filename is not None or err.errno not in (ENOSPC, EDQUOT, EFBIG, EIO, EBADF):
        return str(err)
    file = (open_files(os.getpid()) or {}).get(1)
    return f"standard output{in_brackets(file)} cannot be written: {err.strerror}"


def drop_errors() -> None:
    """Flush stderr, or discard what it buffers: with a broken stderr the interpreter would end with exit code 120."""
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        drop(sys.stderr)


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can move its cursor."""
    with suppress(ValueError):  # closed
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    return False


def in_color(stream: TextIO) -> bool:
    """Return whether a stream is such a terminal, and the user wants colours."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


class Log:
    """The logger of a claim that a command makes: it prints warnings on stderr, and no steps."""

    def isEnabledFor(self, level: int) -> bool:
        """Return whether messages of a level are printed."""
        return level >= 30

    def info(self, message: str, *args: object, **_: object) -> None:
        """Do nothing."""

    def warning(self, message: str, *args: object, **_: object) -> None:
        """Print it on stderr."""
        say(f"warning: {message % args if args else message}")

    error = warning


def say(text: str) -> None:
    """Print a line, or a sentence and a list, on stderr; on a terminal its lines are broken between words."""
    lines = f"safe-gpu: {printable_lines(text)}".split("\n")
    with suppress(OSError, ValueError):  # nobody reads it
        if is_terminal(sys.stderr) and max(map(len, lines)) > (width := width_of(sys.stderr)):
            from textwrap import TextWrapper

            wrapper = TextWrapper(width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
            lines = [part for line in lines for part in wrapper.wrap(line)]
        print_lines("\n".join(lines), sys.stderr)


def print_lines(text: str, stream: TextIO | None = None) -> None:
    """Print lines on stdout or this stream with one write(2), where print() makes two: text and newline."""
    (stream or sys.stdout).write(f"{text}\n")


def print_json(value: object) -> None:
    """Print a document for programs; sets become sorted lists."""
    import json

    print_lines(json.dumps(value, indent=2, default=sorted))


def columns() -> int:
    """Return the value of COLUMNS, else the width of the terminal that stdout is, else 80."""
    text = os.environ.get("COLUMNS", "")
    if text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0:
        return int(text)
    return width_of(sys.stdout)


def width_of(stream: TextIO) -> int:
    """Return the width of the terminal that a stream is, else 80."""
    with suppress(OSError, ValueError):
        return os.get_terminal_size(stream.fileno()).columns or 80
    return 80


_ENTER = "\x1b[?1049h\x1b[?25l\x1b[H\x1b[2J"  # the second screen, without a cursor

_LEAVE = "\x1b[?25h\x1b[?1049l"


def watching(interval: float, *, as_lines: bool) -> AbstractContextManager[Callable[[str], None]]:
    """Give a function that shows one picture after the other: on a terminal in place, elsewhere with a line above.

    Args:
        interval: seconds between two of them.
        as_lines: print nothing but what is given, such as documents for programs.
    """

    def head() -> str:
        return cut(f"{time.strftime('%H:%M:%S')}, every {interval:g} s (Ctrl-C ends)", columns())

    if as_lines:
        return nullcontext(print_lines)
    if not is_terminal(sys.stdout):
        return nullcontext(lambda text: print_lines(f"{head()}\n{text}\n"))
    return _second_screen(head)


@contextmanager
def _second_screen(head: Callable[[], str]) -> Iterator[Callable[[str], None]]:
    """Show pictures on the terminal's second screen, where ``q`` is as Ctrl-C.

    However that ends, the first screen is back, and the last picture stays there. It cannot be suspended.
    """
    import signal
    import termios
    from threading import Thread

    from ..host.signals import unwind_on_signals

    last = ""
    before = termios.tcgetattr(1)
    keys = [*before[:3], before[3] & ~(termios.ICANON | termios.ECHO), *before[4:]]

    def write(text: str) -> None:  # past the buffer of stdout, in which an exception would leave a part
        data = text.encode(sys.stdout.encoding, "replace")
        while data:
            data = data[os.write(1, data) :]

    def show(text: str) -> None:
        nonlocal last
        last = f"{text}\n"
        write(redrawn(f"{head()}\n{text}", os.get_terminal_size(1).lines or 24))

    def switch(mode: list[Any], text: str) -> None:
        with suppress(termios.error):  # in the background of a shell that has gone
            termios.tcsetattr(1, termios.TCSAFLUSH, mode)
        write(text)

    def wait_for_q() -> None:
        with suppress(OSError):
            while os.read(1, 1) not in (b"q", b"Q", b""):
                pass
            os.kill(os.getpid(), signal.SIGINT)

    with unwind_on_signals():
        try:
            signal.signal(signal.SIGTSTP, signal.SIG_IGN)
            switch(keys, _ENTER)
            Thread(target=wait_for_q, daemon=True).start()
            yield show
        finally:
            switch(before, _LEAVE + last)


def redrawn(text: str, rows: int) -> str:
    """Return what puts this text over the one before it on a terminal with that many rows, without clearing it first:
    an empty screen between two pictures flickers.
    """
    lines = text.removesuffix("\n").split("\n")
    if len(lines) >= rows:
        kept = max(0, rows - 2)
        lines = [*lines[:kept], f"... {len(lines) - kept} more lines"][: rows - 1]
    return "\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J"


def write_whole(path: str, content: str | bytes) -> None:
    """Write a file of mode 0644 under another name in the same directory, and rename it into place.

    Raises:
        OSError: it cannot be written there, or would replace what is no regular file; nothing is left behind.
    """
    from tempfile import mkstemp

    path = os.path.abspath(path)
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise OSError(f"{path} is there and is no regular file, so it is not replaced: name another file")
    directory, name = os.path.split(path)
    try:
        fd, temporary = mkstemp(".tmp", f".{name}.", directory)  # no reader takes it for a metrics file
        try:
            with os.fdopen(fd, "wb") as file:
                os.fchmod(fd, 0o644)
                file.write(content.encode() if isinstance(content, str) else content)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as err:
        raise OSError(f"{path} cannot be written: {err.strerror}") from err


def write_output(text: str, path: str | None) -> None:
    """Write a file whole, the value of ``--output``; print the text for None and ``-``.

    Raises:
        OSError: as of :func:`write_whole`.
    """
    if path in (None, "-"):
        sys.stdout.write(text)
    else:
        write_whole(path, text)


_PROGRAM = "safe-gpu: "

_ERASE = "\r\x1b[K"

_ERASE_ABOVE = "\x1b[A\x1b[K"

_LEAST_FOR_HOLDERS = 40  # columns

_STOPPED = 3.0  # seconds without a tick, which a process has that was stopped


class WaitLine:
    """Shows the news of a wait on a stream; on a terminal as a line with a running clock, and a second one of holders
    where they do not fit, wiped at the end. A job in the background writes lines there as into a file.

    A stream that fails (a terminal that was closed, a pipe that nobody reads) costs the news, not the place in the
    queue.

    Args:
        quiet: show nothing.
        hint: mention --for once.

    Attributes:
        waited: whether there was any news.
    """

    def __init__(self, stream: TextIO, *, quiet: bool = False, hint: bool = False) -> None:
        self.waited = False
        self._stream = stream
        self._quiet = quiet
        self._hint = hint
        self._live = is_terminal(stream) and _is_in_front(stream)
        self._began = self._drawn = time.monotonic()
        self._status: WaitStatus | None = None
        self._thread: Thread | None = None
        self._ended: Event | None = None
        self._lock = allocate_lock()  # held from erasing to writing
        self._rows = 0  # of the terminal, that show the news

    def __enter__(self) -> WaitLine:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._ended is not None and self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._draw(live=False)

    @property
    def seconds(self) -> float:
        """Since the wait began."""
        return time.monotonic() - self._began

    def show(self, status: WaitStatus) -> None:
        """Tell the user where the wait stands."""
        first, self.waited = not self.waited, True
        if self._quiet:
            return
        from ..claim.report import waiting_message

        self._status = status
        if not self._live:
            self._draw(f"{_PROGRAM}{waiting_message(status, waited=self.seconds)}\n")
        elif self._thread is None:
            import threading

            self._ended = threading.Event()
            self._thread = threading.Thread(target=self._tick, name="safe_gpu-waitline", daemon=True)
            self._thread.start()
        # Not at once, as most waits are short; but behind another waiter it may help at once.
        if self._hint and (not first or status.ahead is not None):
            self._hint = False
            if _hold_is_unknown():
                self._draw(f"{_PROGRAM}short jobs get in earlier if they say for how long: --for 30m\n")

    def _draw(self, note: str = "", *, live: bool = True) -> None:
        """Erase the live line where it was written, and write a note, as a line of its own, and the live line.

        A shell shares the terminal's lines with a job in the background, and has used them while a job was stopped:
        what is there then is not ours to erase.
        """
        with self._lock:
            front, now = self._live and _is_in_front(self._stream), time.monotonic()
            rows = self._rows if front and now - self._drawn < _STOPPED else 0
            text = self._line(width_of(self._stream) - 1) if live and front else ""
            self._rows, self._drawn = text.count("\n") + 1 if text else 0, now
            with suppress(OSError, ValueError):
                self._stream.write((_ERASE + _ERASE_ABOVE * (rows - 1) if rows else "") + note + text)
                self._stream.flush()

    def _tick(self) -> None:
        assert self._ended is not None
        self._draw()
        while not self._ended.wait(1.0):
            self._draw()

    def _line(self, width: int) -> str:
        """Return what a terminal of this width shows without breaking the line."""
        from ..claim.report import holders_line, waiting_message

        assert self._status is not None
        status, waited, room = self._status, self.seconds, width - len(_PROGRAM)
        apart = holders_line(status, time.time()) if room >= _LEAST_FOR_HOLDERS else ""
        if not apart or len(waiting_message(status, waited=waited)) <= room:
            return (_PROGRAM + waiting_message(status, waited=waited, width=room))[: max(0, width)]
        text = waiting_message(status, waited=waited, width=room, holders=False)
        return f"{_PROGRAM}{text}\n{' ' * len(_PROGRAM)}{cut(apart, room)}"


def _is_in_front(stream: TextIO) -> bool:
    """Return whether this process may use a terminal's lines: it is no job in the background of a shell there."""
    with suppress(OSError, ValueError):  # not the terminal of this session, or closed
        return os.tcgetpgrp(stream.fileno()) == os.getpgrp()
    return True


def _hold_is_unknown() -> bool:
    """Return whether neither a variable nor a batch job tells for how long the GPUs will be held."""
    from ..claim.arguments import DEFAULT, parse_hold_for
    from ..schedulers.job import current

    return parse_hold_for(DEFAULT, os.environ, current(os.environ)).at(time.time()) is None
