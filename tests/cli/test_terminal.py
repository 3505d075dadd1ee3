"""In a real pseudo-terminal and elsewhere: the line of a waiter, and ``status --watch``, which is redrawn in place."""

import fcntl
import io
import json
import os
import re
import signal
import subprocess
import termios
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import api
from support.terminals import Screen, Terminal

GPUS = api.find_preset("dgx-a100").gpus


def status(free: int = 0, position: int = 1) -> api.WaitStatus:
    holder = api.Holder(pid=77, user="eva", job="4711", command="train", since=1.0)
    verdicts = tuple(
        api.GpuVerdict(gpu, "free", "")
        if gpu.index < free
        else api.GpuVerdict(gpu, "claimed", "claimed", 77, "eva", holder)
        for gpu in GPUS
    )
    return api.WaitStatus(position, free, 2, verdicts)


# Without a terminal


def test_a_line_for_every_piece_of_news() -> None:
    stream = io.StringIO()
    with api.WaitLine(stream) as told:
        told.show(status())
        told.show(status(free=1))
    lines = stream.getvalue().splitlines()
    for line, free in zip(lines, ("(0 free); GPU 0-7", "(1 free); GPU 1-7"), strict=True):
        assert line.startswith(f"safe-gpu: waiting 0:00 for 2 GPUs {free}: eva (pid 77, job 4711) for ")


def test_a_line_about_something_else_and_quiet() -> None:
    for quiet, expected in ((False, "safe-gpu: waiting for the GPU driver\n"), (True, "")):
        stream = io.StringIO()
        with api.WaitLine(stream, quiet=quiet) as told:
            told.note("waiting for the GPU driver")
        assert stream.getvalue() == expected


AHEAD = api.ClaimAhead(1_048_576, "eva", 8, time.time() - 60)
QUEUED = api.WaitStatus(3, 0, 8, ahead=AHEAD, expected=api.Forecast(time.time() + 7200))


@given(st.integers(0, 200), st.integers(0, 10**6), st.sampled_from([status(), status(free=7), QUEUED]))
def test_the_line_is_never_wider_than_the_terminal(width: int, seconds: int, told: api.WaitStatus) -> None:
    shown = api.text_for_terminal(told, waited=seconds, width=width)
    assert max(map(len, shown.split("\n"))) <= width
    if width >= 79:
        place = r", #3( in the queue)?, starts about \S+( \S+)?(; |$)" if told.ahead else r"(\n +|; )GPU "
        assert re.match(rf"safe-gpu: waiting \d+(:\d\d)+ for \d GPUs \([07] free\){place}", shown)


# In a terminal

COMMAND = "$ safe-gpu run -n"
LIVE = ["safe-gpu: waiting", "          GPU 0-7"]


def do_nothing() -> None:
    pass


class Shown(io.StringIO):
    """A terminal of 80 columns, on which the user has typed a command.

    ``before`` and ``after`` are called once, before and after the next text is written, by the thread that writes it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.screen = Screen()
        self.screen.write(f"{COMMAND}\n")
        self.before: Callable[[], None] = do_nothing
        self.after: Callable[[], None] = do_nothing

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        before, after = self.before, self.after
        self.before = self.after = do_nothing
        before()
        self.screen.write(text)
        after()
        return len(text)

    def rows(self) -> list[str]:
        return [row[:17] for row in self.screen.shown]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    monkeypatch.setenv("TERM", "xterm")
    return Shown()


def test_a_tip_at_the_same_moment_erases_nothing_of_the_users(shown: Shown) -> None:
    line, started = api.WaitLine(shown), threading.Event()
    tip = threading.Thread(target=line.note, args=("a tip",))

    def give_it() -> None:
        tip.start()
        started.set()
        tip.join(0.2)  # it has to wait for its turn

    shown.before = give_it
    with line:
        line.show(status())
        assert started.wait(60)
        tip.join()
        assert shown.rows() == [COMMAND, "safe-gpu: a tip", *LIVE]
    assert shown.screen.shown == [COMMAND, "safe-gpu: a tip"]


@pytest.mark.parametrize("live", [False, True])
def test_a_line_about_something_else_stands_above_the_live_ones(shown: Shown, live: bool) -> None:
    """And alone where nobody waits for GPUs yet."""
    with api.WaitLine(shown) as line:
        if live:
            line.show(status())
        line.note("waiting for it")
        assert shown.screen.shown[1] == "safe-gpu: waiting for it"
        assert shown.rows()[2:] == (LIVE if live else [])
    assert shown.screen.shown == [COMMAND, "safe-gpu: waiting for it"]


@pytest.mark.parametrize("tips", [0, 3])
def test_nothing_is_erased_that_was_not_written(shown: Shown, tips: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither before the first tick, nor after a stop, during which the shell had the terminal."""
    seconds = 100.0
    redrawn = threading.Event()
    clock = SimpleNamespace(monotonic=lambda: seconds, time=time.time)
    monkeypatch.setattr("safe_gpu.cli.wait_line.time", clock)
    before_the_stop: list[str] = []

    def stop_for_a_minute() -> None:
        nonlocal seconds
        before_the_stop.extend(shown.rows())
        seconds += 60
        shown.screen.write("\n$ fg\n")
        shown.after = redrawn.set

    with api.WaitLine(shown) as line:
        for _ in range(tips):
            line.note("a tip")
        shown.after = stop_for_a_minute
        line.show(status())
        assert redrawn.wait(60)
        assert before_the_stop == [COMMAND, *["safe-gpu: a tip"] * tips, *LIVE]
        assert shown.rows() == [*before_the_stop, "$ fg", *LIVE]


def test_a_job_in_the_background_leaves_the_line_to_its_shell(command: Any, dgx: Any, terminal: Terminal) -> None:
    dgx.hold(*range(8))
    shell = subprocess.Popen(
        ["bash", "-mc", f"{command.path} run -- true & wait"],
        **dict.fromkeys(("stdin", "stdout", "stderr"), terminal.slave),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    terminal.read_until("for 1 GPU (0 free)")
    dgx.let_go()
    terminal.read_to_the_end()
    shell.wait(60)
    assert "\x1b[K" not in terminal.raw


@pytest.mark.parametrize("terminal", [80, 40, 12, 0], indirect=True)
def test_one_line_that_is_wiped_at_the_end(command, dgx, terminal: Terminal) -> None:
    dgx.hold(*range(7))
    dgx.occupy(7)  # so that the line is longer than 80 columns
    started = command.start("run", "-n", 2, "--", "true", stderr=terminal.slave)
    terminal.read_until("waiting" if terminal.columns != 12 else "safe-gpu: .")
    terminal.read_until(lambda: len(terminal.shown) == 1 + (terminal.columns in (80, 0)))
    assert terminal.widest < (terminal.columns or 80)
    dgx.let_go()
    assert started.wait(60) == 0
    terminal.read_to_the_end()
    text = " ".join(line.strip() for line in terminal.shown)
    assert re.fullmatch(r"safe-gpu: got GPU 0,1 \(2 x NVIDIA A100-SXM4-80GB, simulated\) after \d+ s", text)
    if terminal.columns == 80:
        assert re.search(r"waiting 0:\d\d for 2 GPUs \(0 free\)\r\n {10}GPU 0-7 \w+\r", terminal.raw)


def test_it_is_wiped_when_the_wait_is_ended(command, dgx, terminal: Terminal) -> None:
    dgx.hold(*range(8))
    started = command.start("run", "--", "true", stderr=terminal.slave)
    terminal.read_until("waiting")
    started.send_signal(signal.SIGINT)
    started.wait(60)
    terminal.read_to_the_end()
    assert terminal.shown == []


@pytest.mark.parametrize("terminal", [40], indirect=True)
def test_an_error_is_broken_between_words(command, terminal: Terminal) -> None:
    started = command.start("resume", "99", stderr=terminal.slave)
    assert started.wait(60) == 78
    terminal.read_to_the_end()
    assert terminal.shown == ["safe-gpu: this host has no GPU 99: see", "    safe-gpu status"]


# status --watch

CLOCK = r"\d\d:\d\d:\d\d, every {} s \(Ctrl-C ends\)"


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_a_picture_that_is_too_tall_does_not_scroll(rows: int) -> None:
    screen = Screen(rows)
    screen.write(api.redrawn("".join(f"line {number}\n" for number in range(20)), rows))
    if rows > 2:
        assert screen.shown == [*(f"line {number}" for number in range(rows - 2)), f"... {20 - rows + 2} more lines"]


def watch(command: Any, terminal: Terminal, stdin: int = subprocess.DEVNULL) -> Any:
    """The command, once it shows eight free GPUs."""
    # In a group of its own, with a parent outside it: an orphaned group cannot be suspended.
    words = ("status", "--watch", "--interval", "0.1")
    started = command.start(*words, stdin=stdin, stdout=terminal.slave, preexec_fn=os.setpgrp)
    until_free(terminal, 8)
    return started


def until_free(terminal: Terminal, number: int) -> None:
    terminal.read_until(lambda: any(f"{number} of 8 GPUs free" in line for line in terminal.whole))


def test_it_is_redrawn_in_place(command, dgx, terminal: Terminal) -> None:
    started = watch(command, terminal)
    assert re.fullmatch(CLOCK.format(0.1), terminal.whole[0])
    with_all_free = len(terminal.whole)
    dgx.hold(0, 1)
    until_free(terminal, 6)
    dgx.let_go()
    until_free(terminal, 8)
    assert len(terminal.whole) == with_all_free
    assert terminal.blanks == 1  # at the start
    assert (terminal.alternate, terminal.cursor) == (True, False)
    started.kill()


@pytest.mark.parametrize("keys", [b"Q", b"~ \r\x1b[Aq", b"\x03"])
def test_q_ends_it_and_the_terminal_is_as_before(command, terminal: Terminal, keys: bytes) -> None:
    before = termios.tcgetattr(terminal.slave)
    terminal.write("$ what stood there\n")
    started = watch(command, terminal, terminal.slave)
    assert "$ what stood there" not in terminal.shown
    assert termios.tcgetattr(terminal.slave) != before
    if keys == b"\x03":
        started.send_signal(signal.SIGINT)  # as the terminal does that controls it
    else:
        os.write(terminal.master, keys)
    assert started.wait(60) == 0
    assert termios.tcgetattr(terminal.slave) == before
    terminal.read_to_the_end()
    assert (terminal.alternate, terminal.cursor, terminal.shown[0]) == (False, True, "$ what stood there")
    assert "8 of 8 GPUs free" in terminal.shown[1]
    assert terminal.shown[-1].split()[:2] == ["7", "free"], "the last picture stays"
    assert not re.search("[~^]", terminal.raw), "what was typed was shown"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_keys_are_given_back_however_it_ends(command, terminal: Terminal, number: int) -> None:
    before = termios.tcgetattr(terminal.slave)
    started = watch(command, terminal, terminal.slave)
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
    assert (len(re.findall(f"^{CLOCK.format(0.1)}$", text, re.MULTILINE)), "\x1b" in text) == (2, False)
    started.send_signal(signal.SIGINT)
    assert started.wait(60) == 0


def test_json_again_and_again_is_a_line_each(command) -> None:
    started = command.start("status", "--watch", "--json", "--interval", "0.1")
    for _ in range(2):
        assert json.loads(started.stdout.readline())["schema"] == 2
    started.kill()


def test_who_comes_to_be_the_head_says_whom_it_waits_for_now(command, dgx, terminal: Terminal) -> None:
    dgx.hold(*range(8))
    head = command.start("run", "--", "true")
    head.stderr.readline()
    behind = command.start("run", "--", "true", stderr=terminal.slave)
    terminal.read_until(", #2")
    head.terminate()
    terminal.read_until("for 1 GPU (0 free); GPU 0-7: ")
    dgx.let_go()
    assert behind.wait(60) == 0
