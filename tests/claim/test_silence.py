"""A driver, a context or a placeholder that takes long: two lines say so, a claim gives up in time, signals arrive."""

import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.claims import claim

import safe_gpu

AT_ONCE = "import safe_gpu.host.awaiting as awaiting; awaiting.FIRST, awaiting.LATE = 0.05, 0.1\n"


class Lines:
    """A logger of which nobody hears INFO: it keeps the warnings, and ``react`` is called with each."""

    def __init__(self, react: Callable[[str], object] = lambda line: None) -> None:
        self.told: list[str] = []
        self._react = react

    def info(self, message: str, *arguments: object, **_: object) -> None:
        pass

    def warning(self, message: str, *arguments: object, **_: object) -> None:
        self.told.append(message % arguments)
        self._react(self.told[-1])


def has_called(gpus: Any, function: str) -> bool:
    """Whether a function of NVML has been called; needs the option ``log=1``."""
    calls = gpus.directory / "calls"
    return calls.exists() and function in calls.read_text().split()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines are due almost at once."""
    monkeypatch.setattr(api.awaiting, "FIRST", 0.05)
    monkeypatch.setattr(api.awaiting, "LATE", 0.1)


@pytest.fixture
def gpus(fake_gpus: Any) -> Any:
    """Fake GPUs in this process, whose driver answers again at the end."""
    fake_gpus.use_nvml_here()
    yield fake_gpus
    fake_gpus.options()


# The driver


@pytest.mark.parametrize(
    ("function", "driver", "call"),
    [
        ("nvmlInitWithFlags", "the GPU driver", "nvmlInit"),
        ("nvmlDeviceGetCount_v2", "the GPU driver (nvml)", "nvmlDeviceGetCount"),
        ("nvmlDeviceGetP2PStatus", "the GPU driver (nvml)", "nvmlDeviceGetP2PStatus"),
        ("nvmlDeviceGetCpuAffinityWithinScope", "the GPU driver (nvml)", "nvmlDeviceGetCpuAffinityWithinScope"),
    ],
)
def test_a_driver_that_does_not_answer_is_told_of(gpus: Any, soon: None, function: str, driver: str, call: str) -> None:
    """What is awaited and since when; then the call, and what usually is the cause. Then it answers."""
    gpus.set(8, node_cpus="0-3")
    named = f": {call} does not return; if this ends after "
    lines = Lines(lambda line: gpus.options() if named in line else None)
    gpus.options(hangs=function)
    with claim(2, logger=lines, affinity="node") as owner:
        assert owner.devices_taken == [0, 1]
    at = next(number for number, line in enumerate(lines.told) if named in line)
    first, late = lines.told[at - 1 : at + 1]
    assert first.startswith(f"waiting for {driver} since ")
    assert late.startswith(f"still waiting for {driver} since {first[-8:]}{named}")
    assert "persistence mode" in late
    assert "dmesg" in late


def test_one_that_answers_is_not_told_of(gpus: Any, eventually: Any) -> None:
    """The thread that asks it, as that of the test before, may stand in the list of the kernel for a moment more."""
    lines = Lines()
    tasks = len(os.listdir("/proc/self/task"))
    claim(2, logger=lines).release_gpus()
    assert lines.told == []
    eventually(lambda: len(os.listdir("/proc/self/task")) <= tasks)


class Records(logging.Handler):
    """Keeps the lines about a driver with their levels, and lets the driver answer."""

    def __init__(self, gpus: Any) -> None:
        super().__init__()
        self.gpus = gpus
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "waiting for the GPU driver" in record.getMessage():
            self.told.append(record.levelname)
            self.gpus.options()


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_lines_are_warnings_only_where_nobody_hears_info(gpus: Any, soon: None, level: str) -> None:
    records = Records(gpus)
    logger = logging.Logger("a program", level)
    logger.addHandler(records)
    gpus.options(hangs="nvmlDeviceGetCount_v2")
    claim(logger=logger).release_gpus()
    assert records.told[0] == level


def test_a_claim_gives_up_when_its_time_is_over(gpus: Any, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next one succeeds when the driver answers again."""
    for function in ("nvmlInitWithFlags", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByUUID"):
        claim().release_gpus()
        gpus.options(hangs=function)
        with monkeypatch.context() as patch:
            patch.setattr(api.patience, "AT_LEAST", 0.3)
            patch.setattr(api.patience, "TO_CLOSE", 0.1)
            with pytest.raises(safe_gpu.ClaimTimeout, match=r"the time to wait is over, .* does not return") as caught:
                claim()
        assert caught.value.timeout >= 0.3
        assert list((state_dir / "claims").iterdir()) == list((state_dir / "queue").iterdir()) == []
        gpus.options()
    claim().release_gpus()


def test_a_question_has_its_time_even_without_a_wait(gpus: Any) -> None:
    """Without persistence mode, the first one takes seconds for each GPU."""
    gpus.options(call_ms=20)
    with claim(timeout=0) as owner:
        assert owner.devices_taken == [0]


def test_a_command_gives_up_when_its_time_is_over(child: Any, fake_gpus: Any, state_dir: Path) -> None:
    fake_gpus.options(hangs="nvmlDeviceGetCount_v2")
    main = "import pynvml, safe_gpu.drivers.nvml, safe_gpu.drivers.patience as patience; "  # not within the time
    main += "patience.AT_LEAST = patience.TO_CLOSE = 1.0; from safe_gpu.cli import main; "
    for command in (["run", "-q", "--timeout", "0.1", "--", "true"], ["wait", "-q", "--timeout", "0.1"]):
        started = child(f"{main} sys.exit(main({command}))", env=fake_gpus.env)
        out, err = started.process.communicate(timeout=60)
        assert (started.process.returncode, out) == (75, "")
        assert err.startswith("safe-gpu: the time to wait is over, and the GPU driver (nvml) has not answered for ")
        assert "nvmlDeviceGetCount does not return" in err
        assert [*state_dir.glob("claims/*"), *state_dir.glob("queue/*")] == []


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_signals_end_a_command_whose_driver_hangs(
    fake_gpus: Any, command: Any, eventually: Any, function: str, number: int, code: int
) -> None:
    fake_gpus.options(hangs=function, log=1)
    started = command.start("run", "--", "true", env=fake_gpus.env)
    eventually(lambda: has_called(fake_gpus, function))
    started.send_signal(number)
    assert started.wait(60) == code


class Interrupt(RuntimeError):
    """What a handler of a program raises. Where no thread can be started, Python raises a RuntimeError too."""


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2"])
def test_the_session_of_an_interrupted_claim_is_ended_when_the_driver_answers(
    gpus: Any, state_dir: Path, monkeypatch: Any, eventually: Any, function: str
) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise Interrupt

    def signal_when_it_hangs() -> None:
        eventually(lambda: has_called(gpus, function))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    monkeypatch.setattr(api.patience, "TO_CLOSE", 0.1)
    gpus.options(hangs=function, log=1)
    before = signal.signal(signal.SIGUSR1, interrupt)
    thread = threading.Thread(target=signal_when_it_hangs)
    try:
        thread.start()
        with pytest.raises(Interrupt):
            claim()
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not has_called(gpus, "nvmlShutdown")
    assert [*state_dir.glob("claims/*"), *state_dir.glob("queue/*")] == []
    gpus.options(log=1)
    eventually(lambda: has_called(gpus, "nvmlShutdown"))
    gpus.options()
    claim().release_gpus()


def test_where_no_thread_can_be_started_the_driver_is_asked_all_the_same(gpus: Any, monkeypatch: Any) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(api.patience, "start_new_thread", refuse)
    with claim(2) as owner:
        assert owner.devices_taken == [0, 1]


# Contexts, and placeholders of the program's own


def test_a_placeholder_of_the_programs_own_is_told_of(host: Any, soon: None) -> None:
    told_twice = threading.Event()
    lines = Lines(lambda line: told_twice.set() if line.startswith("still") else None)

    def slow(device_no: int) -> object:
        assert device_no == 0 or told_twice.wait(60)
        return object()

    threads = threading.active_count()
    with safe_gpu.claim_gpus(2, slow, lines, timeout=0, affinity=None):
        first, late = lines.told[:2]
    assert first.startswith(f"waiting for {slow.__qualname__} to hold GPU 1 since ")
    assert late == f"still {first}: it has not returned"
    assert threading.active_count() == threads


def test_a_context_that_takes_long_is_told_of(fake_gpus: Any) -> None:
    fake_gpus.options(ctx_ms=1500)
    lines = fake_gpus.python(f"""{AT_ONCE}
import safe_gpu
class Lines:
    def info(self, message, *arguments, **_): pass
    def warning(self, message, *arguments, **_): print(message % arguments)
safe_gpu.claim_gpus(1, logger=Lines(), timeout=0)
""").splitlines()
    first, late = [line for line in lines if "CudaPlaceholder" in line]
    assert first.startswith("waiting for CudaPlaceholder to hold GPU 0 since ")
    assert late.startswith(f"still {first}: if this ends after seconds, turn persistence mode on")


def test_a_child_that_is_forked_in_a_placeholder_can_leave_the_claim(child: Any) -> None:
    """It has none of its parent's threads."""
    code = """
import os, safe_gpu
def placeholder(device_no):
    pid = os.fork()
    if pid == 0:
        raise SystemExit
    say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return pid
safe_gpu.claim_gpus(1, placeholder, timeout=0, affinity=None)
say("claimed")
"""
    assert child(code).finish().split() == ["0", "claimed"]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_watches_a_claim_any_longer_than_its_placeholders(host: Any, fails: bool) -> None:
    """Then the program may fork."""
    watching: list[str] = []

    def placeholder(device_no: int) -> None:
        watching.extend(thread.name for thread in threading.enumerate())
        if fails:
            raise ValueError("no memory")

    threads = threading.active_count()
    try:
        safe_gpu.claim_gpus(1, placeholder, timeout=0, affinity=None)
    except safe_gpu.PlaceholderError:
        assert fails
    assert "safe_gpu-watchdog" in watching
    assert threading.active_count() == threads


def test_a_handler_that_raises_while_a_watchdog_starts_is_heard(monkeypatch: Any) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise Interrupt

    begin = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        signal.raise_signal(signal.SIGUSR1)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupt), api.Watchdog(api.Awaited("a test", print)):
            pytest.fail("the block is not entered")
    finally:
        signal.signal(signal.SIGUSR1, before)


# Commands


def test_commands_tell_what_they_wait_for(fake_gpus: Any, command: Any, state_dir: Path) -> None:
    """And --quiet tells nothing."""
    fake_gpus.options(hangs="nvmlDeviceGetCount_v2")
    words = ["status"], ["wait"], ["doctor"], ["run", "--", "true"], ["bind", "--gpu", "0", "--", "true"]
    started = [command.start(*line, env=fake_gpus.env) for line in (*words, ["run", "-q", "--", "true"])]
    told = [one.stderr.readline() for one in started[:-1]]
    assert all(": waiting for the GPU driver" in line for line in told), told
    fake_gpus.options()
    rest = [one.communicate(timeout=60) for one in started]
    assert [one.returncode for one in started if one.args[3] != "doctor"] == [0] * 5
    assert rest[-1] == ("", "")
    assert "of 8 GPUs free" in rest[0][0]  # the two that run may hold theirs just then


def test_a_status_that_is_watched_shows_the_line_above_the_picture(fake_gpus: Any, command: Any) -> None:
    started = command.start("status", "--watch", "--interval", "0.1", env=fake_gpus.env)
    assert " (Ctrl-C ends)" in started.stdout.readline()
    fake_gpus.options(hangs="nvmlDeviceGetCount_v2")
    line = ""
    while not line.startswith("waiting for the GPU driver (nvml) since "):
        line = started.stdout.readline()
        assert line
    assert "8 of 8 GPUs free" in started.stdout.readline()


# The session of who waits


@pytest.mark.parametrize(("persistence", "sessions"), [(0, 1), (1, 2)])
def test_who_waits_keeps_no_session_where_gpus_stay_initialized_without_it(
    fake_gpus: Any, child: Any, eventually: Any, persistence: int, sessions: int
) -> None:
    """Behind a claim, so that the pauses between its polls are long."""
    fake_gpus.set(1, persistence=persistence)
    code = "import safe_gpu; safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), timeout=None, affinity=None); "
    holder = child(f"{code} say('claimed'); listen()", says="claimed", env=fake_gpus.env)
    fake_gpus.options(log=1)
    waiter = child(f"{code} say('got')", env=fake_gpus.env)
    eventually(lambda: has_called(fake_gpus, "nvmlDeviceGetPersistenceMode"))
    if sessions > 1:
        eventually(lambda: has_called(fake_gpus, "nvmlShutdown"))
    holder.kill()
    assert waiter.hear() == "got"
    assert min(fake_gpus.calls().count("nvmlInitWithFlags"), 2) == sessions
