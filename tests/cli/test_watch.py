"""``safe-gpu status --watch``: redrawn in place in a real terminal, one after the other elsewhere."""

import json
import os
import re
import signal
import termios
from typing import Any

import pytest
from support.terminals import Screen, Terminal

from safe_gpu.cli.output import redrawn

CLOCK = r"\d\d:\d\d:\d\d, every {} s \(Ctrl-C ends\)"


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
def test_a_picture_that_is_too_tall_does_not_scroll(rows: int) -> None:
    screen = Screen(rows)
    screen.write(redrawn("".join(f"line {number}\n" for number in range(20)), rows))
    if rows > 2:
        assert screen.shown == [*(f"line {number}" for number in range(rows - 2)), f"... {20 - rows + 2} more lines"]


def watch(command: Any, terminal: Terminal, *, keys: bool = False) -> Any:
    """The command, once it shows eight free GPUs; with ``keys`` its stdin is the terminal too."""
    # In a group of its own, with a parent outside it: an orphaned group cannot be suspended.
    words = ("status", "--watch", "--interval", "0.1")
    options = {"stdin": terminal.slave} if keys else {}
    started = command.start(*words, stdout=terminal.slave, preexec_fn=os.setpgrp, **options)
    until_free(terminal, 8)
    return started


def until_free(terminal: Terminal, number: int) -> None:
    terminal.read_until(lambda: any(f"{number} of 8 GPUs free" in line for line in terminal.whole))


def test_it_is_redrawn_in_place(command, ground, terminal: Terminal) -> None:
    started = watch(command, terminal)
    assert re.fullmatch(CLOCK.format(0.1), terminal.whole[0])
    with_all_free = len(terminal.whole)
    ground.hold(0, 1)
    until_free(terminal, 6)
    ground.let_go()
    until_free(terminal, 8)
    assert len(terminal.whole) == with_all_free
    assert terminal.blanks == 1  # at the start
    assert (terminal.alternate, terminal.cursor) == (True, False)
    started.kill()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGHUP, -signal.SIGHUP)]
)
def test_the_last_picture_stays_on_the_first_screen(command, terminal: Terminal, number: int, code: int) -> None:
    terminal.write("$ what stood there\n")
    started = watch(command, terminal)
    assert "$ what stood there" not in terminal.shown
    started.send_signal(number)
    assert started.wait(60) == code
    terminal.read_to_the_end()
    assert (terminal.alternate, terminal.cursor) == (False, True)
    assert terminal.shown[0] == "$ what stood there"
    assert "8 of 8 GPUs free" in terminal.shown[1]
    assert terminal.shown[-1].split()[:2] == ["7", "free"]


@pytest.mark.parametrize("keys", [b"q", b"Q", b"~ \r\x1b[Aq", b"\x03"])
def test_q_ends_it_and_the_terminal_is_as_before(command, terminal: Terminal, keys: bytes) -> None:
    before = termios.tcgetattr(terminal.slave)
    started = watch(command, terminal, keys=True)
    assert re.fullmatch(CLOCK.format(0.1), terminal.whole[0])
    assert termios.tcgetattr(terminal.slave) != before
    if keys == b"\x03":
        started.send_signal(signal.SIGINT)  # as the terminal does that controls it
    else:
        os.write(terminal.master, keys)
    assert started.wait(60) == 0
    assert termios.tcgetattr(terminal.slave) == before
    terminal.read_to_the_end()
    assert (terminal.alternate, terminal.cursor) == (False, True)
    assert "8 of 8 GPUs free" in terminal.shown[0]
    assert not re.search("[~^]", terminal.raw), "what was typed was shown"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_keys_are_given_back_however_it_ends(command, terminal: Terminal, number: int) -> None:
    before = termios.tcgetattr(terminal.slave)
    started = watch(command, terminal, keys=True)
    started.send_signal(signal.SIGTSTP)  # would leave the second screen to the shell
    started.send_signal(number)
    assert started.wait(60) == -number
    assert termios.tcgetattr(terminal.slave) == before
    terminal.read_until(lambda: not terminal.alternate)


def test_without_a_terminal_pictures_follow_each_other(command) -> None:
    started = command.start("status", "--watch", "--interval", "0.1s")
    text = ""
    while text.count("8 of 8 GPUs free") < 2:
        text += started.stdout.readline()
    assert len(re.findall(f"^{CLOCK.format(0.1)}$", text, re.MULTILINE)) == 2
    assert "\x1b" not in text
    started.send_signal(signal.SIGINT)
    assert started.wait(60) == 0


def test_json_again_and_again_is_a_line_each(command) -> None:
    started = command.start("status", "--watch", "--json", "--interval", "0.1")
    for _ in range(2):
        assert json.loads(started.stdout.readline())["schema"] == 2
    started.kill()
