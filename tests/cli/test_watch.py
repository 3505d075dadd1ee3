"""``safe-gpu status --watch``: redrawn in place in a real terminal, one after the other elsewhere."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import struct
import termios
from collections.abc import Iterator

import pytest
from support.terminals import open_terminal

from safe_gpu.cli.commands import main
from safe_gpu.cli.status import redrawn

CLOCK = r"\d\d:\d\d:\d\d, every {} s \(Ctrl-C ends\)"


class Screen:
    """What a terminal shows that is written to as --watch does it: no other escapes than these are understood."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.lines: list[str] = [""] * rows
        self.whole: list[str] = []  # the latest picture that was followed by another, so that nothing of it is missing
        self.blanks = 0  # how often everything was cleared
        self._row = self._column = 0
        self._cut = ""  # the beginning of an escape whose end has not been read yet

    def write(self, text: str) -> None:
        text = self._cut + text
        cut = re.search(r"\x1b(\[[0-9;?]*)?$", text)
        self._cut = cut[0] if cut else ""
        text = text.removesuffix(self._cut)
        for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
            if piece == "\x1b[H":
                self.whole = [line for line in self.lines if line]
                self._row = self._column = 0
            elif piece == "\x1b[2J":
                self.lines = [""] * self.rows
                self.blanks += 1
            elif piece == "\x1b[K":
                self.lines[self._row] = self.lines[self._row][: self._column]
            elif piece == "\x1b[J":
                self.lines[self._row :] = [self.lines[self._row][: self._column], *[""] * (self.rows - self._row - 1)]
            elif piece == "\r":
                self._column = 0
            elif piece == "\n":
                self._row, self._column = self._row + 1, 0
                assert self._row < self.rows, "it scrolled"
            else:
                assert "\x1b" not in piece, f"unexpected {piece!r}"
                line = self.lines[self._row]
                self.lines[self._row] = line[: self._column] + piece + line[self._column + len(piece) :]
                self._column += len(piece)


def shown(screen: Screen) -> list[str]:
    return [line for line in screen.lines if line]


def test_a_shorter_picture_leaves_nothing_of_the_one_before() -> None:
    screen = Screen(10)
    screen.write(redrawn("a long line\nsecond\nthird\n", 10))
    screen.write(redrawn("short\nsecond\n", 10))
    assert shown(screen) == ["short", "second"]
    assert screen.blanks == 0


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
def test_a_picture_that_is_too_tall_does_not_scroll(rows: int) -> None:
    screen = Screen(rows)
    screen.write(redrawn("".join(f"line {number}\n" for number in range(20)), rows))
    if rows > 2:
        assert shown(screen) == [*(f"line {number}" for number in range(rows - 2)), f"... {20 - rows + 2} more lines"]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("COLUMNS", raising=False)
    ends = open_terminal()
    fcntl.ioctl(ends[1], termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    yield ends
    for fd in ends:
        os.close(fd)


def test_it_is_redrawn_in_place(command, ground, terminal: tuple[int, int]) -> None:
    master, slave = terminal
    started = command.start("status", "--watch", "--interval", "0.1", stdout=slave)
    screen = Screen(24)

    def until(condition) -> None:
        while not condition():
            screen.write(os.read(master, 65536).decode())

    until(lambda: any("8 of 8 GPUs free" in line for line in screen.whole))
    assert re.fullmatch(CLOCK.format(0.1), screen.whole[0])
    with_all_free = len(screen.whole)
    ground.hold(0, 1)
    until(lambda: any("6 of 8 GPUs free" in line for line in screen.whole))
    ground.let_go()
    until(lambda: any("8 of 8 GPUs free" in line for line in screen.whole))
    assert len(screen.whole) == with_all_free
    assert screen.blanks == 1  # at the start
    started.send_signal(signal.SIGINT)
    assert started.wait(60) == 130


def test_without_a_terminal_pictures_follow_each_other(command) -> None:
    started = command.start("status", "--watch", "--interval", "0.1s")
    text = ""
    while text.count("8 of 8 GPUs free") < 2:
        text += started.stdout.readline()
    assert len(re.findall(f"^{CLOCK.format(0.1)}$", text, re.MULTILINE)) == 2
    assert "\x1b" not in text
    started.send_signal(signal.SIGINT)
    assert started.wait(60) == 130


def test_json_again_and_again_is_a_line_each(command) -> None:
    started = command.start("status", "--watch", "--json", "--interval", "0.1")
    for _ in range(2):
        assert json.loads(started.stdout.readline())["schema"] == 2
    started.kill()


@pytest.mark.parametrize("interval", ["0", "0.01", "-1", "inf", "soon", ""])
def test_intervals_that_cannot_be(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--watch", f"--interval={interval}"]) == 2
    assert "--interval" in capsys.readouterr().err
