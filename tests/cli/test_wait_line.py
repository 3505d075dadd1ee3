"""What a waiter shows: a line a minute in a file, one live line in a real pseudo-terminal."""

from __future__ import annotations

import io
import re
import signal
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.terminals import Terminal

from safe_gpu.claim.messages import ClaimAhead, WaitStatus
from safe_gpu.cli.run import WaitLine
from safe_gpu.devices import GpuVerdict, LeaseHolder
from safe_gpu.drivers.presets import preset
from safe_gpu.text import format_age

GPUS = preset("dgx-a100").gpus()


def status(free: int = 0, position: int = 1) -> WaitStatus:
    holder = LeaseHolder(pid=77, user="eva", job="4711", command="train", since=1.0)
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
    assert first.startswith("safe-gpu: waiting for 2 GPUs, 0 free; GPU 0-7: eva (pid 77, job 4711) for ")
    assert second.startswith("safe-gpu: waiting for 2 GPUs, 1 free; GPU 1-7: eva (pid 77, job 4711) for ")
    assert "\x1b" not in stream.getvalue()


def queued(pid: int = 1_048_576, user: str = "eva", position: int = 3) -> WaitStatus:
    """Behind a waiter of a minute."""
    return WaitStatus(position, None, 8, ahead=ClaimAhead(pid, user, 8, time.time() - 60))


@given(st.integers(0, 200), st.integers(0, 10**6), st.sampled_from([status(), status(free=7), queued()]))
def test_the_line_is_never_wider_than_the_terminal(width: int, seconds: int, told: WaitStatus) -> None:
    line = WaitLine(io.StringIO())
    line._status = told
    line._began -= seconds
    shown = line._line(width)
    assert len(shown) <= width
    if width >= 75:
        assert re.search(r" \(\d+ (s|min|h|d)( \d+ (min|h))?\)$", shown)


@pytest.mark.parametrize("seconds", [5, 3599, 12_000, 187_200])
@pytest.mark.parametrize(
    ("told", "who"), [(queued(user="a" * 8), "behind aaaaaaaa (pid 1048576"), (status(), "GPU 0-7: eva (pid 77")]
)
def test_at_80_columns_user_and_pid_stay(seconds: int, told: WaitStatus, who: str) -> None:
    line = WaitLine(io.StringIO())
    line._status = told
    line._began -= seconds
    assert who in line._line(79)
    assert line._line(79).endswith(f" ({format_age(seconds)})")


# In a terminal


@pytest.mark.parametrize(("terminal", "piped"), [(80, False), (40, True), (12, True), (0, True)], indirect=["terminal"])
def test_one_line_that_is_wiped_at_the_end(command, ground, terminal: Terminal, piped: bool) -> None:
    ground.hold(*range(7))
    ground.occupy(7)  # so that the line is longer than 80 columns
    options = {} if piped else {"stdout": terminal.slave}
    started = command.start("run", "-n", 2, "--", "echo", "started", stderr=terminal.slave, **options)
    terminal.read_until("waiting" if terminal.columns != 12 else "...")
    assert len(terminal.shown) == 1
    assert terminal.widest < (terminal.columns or 80)
    ground.let_go()
    out, _ = started.communicate(timeout=60)
    terminal.read_to_the_end()
    got, *rows = terminal.shown
    assert re.fullmatch(r"safe-gpu: got GPU 0,1 \(2 x NVIDIA A100-SXM4-80GB\) after \d+ s", got)
    assert rows == ([] if piped else ["started"])
    assert out == ("started\n" if piped else None)
    if terminal.columns == 80:
        assert re.search(r"waiting for 2 GPUs, 0 free; GPU 0-6: .*; 1 more \(\d+ s\)", terminal.raw)


def test_who_comes_to_be_the_head_says_whom_it_waits_for_now(command, ground, terminal: Terminal) -> None:
    ground.hold(*range(8))
    head = command.start("run", "--", "true")
    head.stderr.readline()
    behind = command.start("run", "--", "true", stderr=terminal.slave)
    terminal.read_until(f"(pid {head.pid}, ")
    head.terminate()
    terminal.read_until("GPU 0-7: unknown holder")
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


def test_a_refusal_follows_on_an_empty_line(command, ground, terminal: Terminal) -> None:
    ground.hold(*range(8))
    started = command.start("wait", "--timeout", "1", stderr=terminal.slave)
    assert started.wait(60) == 75
    terminal.read_to_the_end()
    assert terminal.shown[0].startswith("safe-gpu: 1 GPU asked for, 0 free")
    assert "waiting" in terminal.raw


def test_a_terminal_that_cannot_move_its_cursor(command, ground, terminal: Terminal, monkeypatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    ground.hold(*range(8))
    started = command.start("run", "--", "true", stderr=terminal.slave)
    terminal.read_until("\n")
    ground.let_go()
    started.wait(60)
    terminal.read_to_the_end()
    assert "\x1b" not in terminal.raw
    assert [row.split()[1] for row in terminal.shown] == ["waiting", "got"]


def test_a_terminal_that_is_closed_costs_no_place(command, ground, terminal: Terminal) -> None:
    """Closed without a hang-up, as where the command runs in a session of its own."""
    ground.hold(*range(8))
    started = command.start("run", "--", "echo", "started", stderr=terminal.slave, start_new_session=True)
    terminal.read_until("waiting")
    terminal.close()
    assert ground.tickets() == ["1.ticket"]
    ground.let_go()
    assert started.communicate(timeout=60)[0] == "started\n"
