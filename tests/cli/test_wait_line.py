"""What a waiter shows: a line a minute in a file, one live line in a real pseudo-terminal."""

import fcntl
import io
import re
import signal
import subprocess
import termios
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.terminals import Screen, Terminal

from safe_gpu.claim.report import ClaimAhead, Forecast, WaitStatus
from safe_gpu.cli.output import WaitLine
from safe_gpu.drivers.presets import preset
from safe_gpu.gpus.devices import GpuVerdict, Holder

GPUS = preset("dgx-a100").gpus


def status(free: int = 0, position: int = 1) -> WaitStatus:
    holder = Holder(pid=77, user="eva", job="4711", command="train", since=1.0)
    verdicts = tuple(
        GpuVerdict(gpu, "free", "") if gpu.index < free else GpuVerdict(gpu, "claimed", "claimed", 77, "eva", holder)
        for gpu in GPUS
    )
    return WaitStatus(position, free, 2, verdicts)


# Without a terminal


def test_a_line_for_every_piece_of_news() -> None:
    stream = io.StringIO()
    with WaitLine(stream) as line:
        line.show(status())
        line.show(status(free=1))
    first, second = stream.getvalue().splitlines()
    assert first.startswith("safe-gpu: waiting 0:00 for 2 GPUs (0 free); GPU 0-7: eva (pid 77, job 4711) for ")
    assert second.startswith("safe-gpu: waiting 0:00 for 2 GPUs (1 free); GPU 1-7: eva (pid 77, job 4711) for ")
    assert "\x1b" not in stream.getvalue()


def queued() -> WaitStatus:
    """Behind a waiter of a minute."""
    ahead = ClaimAhead(1_048_576, "eva", 8, time.time() - 60)
    return WaitStatus(3, 0, 8, ahead=ahead, expected=Forecast(time.time() + 7200))


@given(st.integers(0, 200), st.integers(0, 10**6), st.sampled_from([status(), status(free=7), queued()]))
def test_the_line_is_never_wider_than_the_terminal(width: int, seconds: int, told: WaitStatus) -> None:
    line = WaitLine(io.StringIO())
    line._status = told
    line._began -= seconds
    shown = line._line(width)
    assert max(map(len, shown.split("\n"))) <= width
    if width >= 79:
        place = r", #3( in the queue)?, starts about \S+( \S+)?(; |$)" if told.ahead else r"(\n +|; )GPU "
        assert re.match(rf"safe-gpu: waiting \d+(:\d\d)+ for \d GPUs \([07] free\){place}", shown)


# In a terminal


COMMAND = "$ safe-gpu run -n"

LIVE = ["safe-gpu: waiting", "          GPU 0-7"]


class Shown(io.StringIO):
    """A stream that is a terminal of 80 columns, on which the user has typed a command."""

    def __init__(self) -> None:
        super().__init__()
        self.screen = Screen()
        self.screen.write(f"{COMMAND}\n")
        self.before: Callable[[], None] = lambda: None  # is called once, before the next text is written

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        before, self.before = self.before, lambda: None
        before()
        self.screen.write(text)
        return len(text)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    monkeypatch.setenv("TERM", "xterm")
    return Shown()


def test_a_tip_at_the_same_moment_erases_nothing_of_the_users(shown: Shown) -> None:
    line, started = WaitLine(shown), threading.Event()
    tip = threading.Thread(target=line._draw, args=("safe-gpu: a tip\n",))

    def give_it() -> None:
        tip.start()
        started.set()
        tip.join(0.2)  # it has to wait for its turn

    shown.before = give_it
    with line:
        line.show(status())
        assert started.wait(60)
        tip.join()
        assert [row[:17] for row in shown.screen.shown] == [COMMAND, "safe-gpu: a tip", *LIVE]
    assert shown.screen.shown == [COMMAND, "safe-gpu: a tip"]


@pytest.mark.parametrize("tips", [0, 1, 3])
def test_nothing_is_erased_that_was_not_written(shown: Shown, tips: int) -> None:
    """Neither before the first tick, nor after a stop, during which the shell had the terminal."""
    line = WaitLine(shown)
    line._status = status()
    for _ in range(tips):
        line._draw("safe-gpu: a tip\n")
    line._draw()
    line._draw()
    before = [COMMAND, *["safe-gpu: a tip"] * tips, *LIVE]
    assert [row[:17] for row in shown.screen.shown] == before
    shown.screen.write("\n$ fg\n")
    line._drawn -= 60
    line._draw()
    assert [row[:17] for row in shown.screen.shown] == [*before, "$ fg", *LIVE]


def test_a_job_in_the_background_leaves_the_line_to_its_shell(command: Any, ground: Any, terminal: Terminal) -> None:
    ground.hold(*range(8))
    shell = subprocess.Popen(
        ["bash", "-mc", f"{command.path} run --timeout 1 -- true & wait"],
        **dict.fromkeys(("stdin", "stdout", "stderr"), terminal.slave),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    terminal.read_to_the_end()
    shell.wait(60)
    assert "safe-gpu: waiting 0:00 for 1 GPU" in terminal.raw
    assert "\x1b[K" not in terminal.raw


@pytest.mark.parametrize(("terminal", "piped"), [(80, False), (40, True), (12, True), (0, True)], indirect=["terminal"])
def test_one_line_that_is_wiped_at_the_end(command, ground, terminal: Terminal, piped: bool) -> None:
    ground.hold(*range(7))
    ground.occupy(7)  # so that the line is longer than 80 columns
    options = {} if piped else {"stdout": terminal.slave}
    started = command.start("run", "-n", 2, "--", "echo", "started", stderr=terminal.slave, **options)
    terminal.read_until("waiting" if terminal.columns != 12 else "safe-gpu: .")
    terminal.read_until(lambda: len(terminal.shown) == 1 + (terminal.columns in (80, 0)))
    assert terminal.widest < (terminal.columns or 80)
    ground.let_go()
    out, _ = started.communicate(timeout=60)
    terminal.read_to_the_end()
    text = " ".join(line.strip() for line in terminal.shown)
    rest = "" if piped else " started"
    assert re.fullmatch(rf"safe-gpu: got GPU 0,1 \(2 x NVIDIA A100-SXM4-80GB, simulated\) after \d+ s{rest}", text)
    assert out == ("started\n" if piped else None)
    if terminal.columns == 80:
        assert re.search(r"waiting 0:\d\d for 2 GPUs \(0 free\)\r\n {10}GPU 0-7 \w+\r", terminal.raw)


def test_who_comes_to_be_the_head_says_whom_it_waits_for_now(command, ground, terminal: Terminal) -> None:
    ground.hold(*range(8))
    head = command.start("run", "--", "true")
    head.stderr.readline()
    behind = command.start("run", "--", "true", stderr=terminal.slave)
    terminal.read_until(", #2")
    head.terminate()
    terminal.read_until("for 1 GPU (0 free); GPU 0-7: ")
    ground.let_go()
    assert behind.wait(60) == 0


def test_it_is_wiped_when_the_wait_is_ended(command, ground, terminal: Terminal) -> None:
    ground.hold(*range(8))
    started = command.start("run", "--", "true", stderr=terminal.slave)
    terminal.read_until("waiting")
    started.send_signal(signal.SIGINT)
    started.wait(60)
    terminal.read_to_the_end()
    assert terminal.shown == []
