"""Pseudo-terminals, where they can be made, and what they show."""

import codecs
import fcntl
import os
import pty
import re
import struct
import termios
from collections.abc import Callable, Iterator

import pytest


def open_terminal() -> tuple[int, int]:
    """Both ends, the caller's to close; skips the test in a container without /dev/pts."""
    try:
        return pty.openpty()
    except OSError as err:
        pytest.skip(f"no terminal can be made here (/dev/pts): {err}")


class Screen:
    """What a terminal shows that is written to as safe-gpu does it: no other escapes than these are understood."""

    def __init__(self, rows: int = 24) -> None:
        self.rows = rows
        self.lines: list[str] = [""] * rows
        self.whole: list[str] = []  # the latest picture that was followed by another, so that nothing of it is missing
        self.blanks = 0  # how often everything was cleared
        self.widest = 0
        self.raw = ""
        self.alternate = False
        self.cursor = True
        self._first: tuple[list[str], int] = ([], 0)  # the lines and the row of the screen behind the alternate one
        self._row = self._column = 0
        self._cut = ""  # the beginning of an escape whose end has not been read yet

    @property
    def shown(self) -> list[str]:
        """The lines that are not empty."""
        return [line for line in self.lines if line]

    def write(self, text: str) -> None:
        """What a program writes."""
        self.raw += text
        text = self._cut + text
        cut = re.search(r"\x1b(\[[0-9;?]*)?$", text)
        self._cut = cut[0] if cut else ""
        for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text.removesuffix(self._cut)):
            line = self.lines[self._row]
            if piece == "\x1b[H":
                self.whole = self.shown
                self._row = self._column = 0
            elif piece == "\x1b[2J":
                self.lines = [""] * self.rows
                self.blanks += 1
            elif piece in ("\x1b[?25h", "\x1b[?25l"):
                self.cursor = piece[-1] == "h"
            elif piece == "\x1b[?1049h":
                self.alternate, self._first = True, (self.lines, self._row)
                self.lines = [""] * self.rows
            elif piece == "\x1b[?1049l":
                self.alternate, (self.lines, self._row) = False, self._first
                self._column = 0
            elif piece == "\x1b[A":
                self._row -= 1
            elif piece == "\x1b[K":
                self.lines[self._row] = line[: self._column]
            elif piece == "\x1b[J":
                self.lines[self._row :] = [line[: self._column], *[""] * (self.rows - self._row - 1)]
            elif piece.endswith("m") and piece[0] == "\x1b":
                pass  # colours
            elif piece == "\r":
                self._column = 0
            elif piece == "\n":
                self._row, self._column = self._row + 1, 0
                assert self._row < self.rows, "it scrolled"
            else:
                assert "\x1b" not in piece, f"unexpected {piece!r}"
                self.lines[self._row] = line[: self._column] + piece + line[self._column + len(piece) :]
                self._column += len(piece)
                self.widest = max(self.widest, self._column)


class Terminal(Screen):
    """A pseudo-terminal of that many columns; a program gets ``slave``."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        super().__init__(rows)
        self._decode = codecs.getincrementaldecoder("utf-8")().decode  # a read may end within a character
        self.columns = columns
        self.master, self.slave = open_terminal()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", self.rows, columns, 0, 0))

    def read_until(self, found: str | Callable[[], bool]) -> None:
        """Show what is written, until this has been written, or is so."""
        while not (found() if callable(found) else found in self.raw):
            self.write(self._decode(os.read(self.master, 65536)))

    def read_to_the_end(self) -> None:
        """Show whatever is still to come, once no program has it open any more."""
        os.close(self.slave)
        self.slave = -1
        try:
            while data := os.read(self.master, 65536):
                self.write(self._decode(data))
        except OSError:  # how Linux says that the other end is closed
            pass

    def close(self) -> None:
        """Both ends."""
        for fd in (self.master, self.slave):
            if fd >= 0:
                os.close(fd)
        self.master = self.slave = -1


@pytest.fixture
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Of 80 columns, or as many as the parameter says."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("COLUMNS", raising=False)
    terminal = Terminal(getattr(request, "param", 80))
    yield terminal
    terminal.close()
