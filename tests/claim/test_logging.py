"""The logger ``safe_gpu``: silent unless asked, one line a step, and the same facts as data."""

import logging
import os
import re
import time
from typing import Any

import pytest

from safe_gpu import NoPlaceholder, NotEnoughGpusError, claim_gpus
from safe_gpu.claim.search import search, wait_reports
from safe_gpu.coordination.host_lock import Host
from safe_gpu.coordination.queue import Waiter
from safe_gpu.host import procfs


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert {record.name for record in caplog.records} <= {"safe_gpu"}
    return [record.getMessage() for record in caplog.records]


def test_a_bare_script_hears_nothing(child) -> None:
    one = child("""
import safe_gpu
with safe_gpu.GPUOwner(2) as owner: pass
for arguments in {}, {"timeout": 0}, {"nb_gpus": 8}, {"affinity": "socket"}, {"memory": "preferred"}:
    safe_gpu.claim_gpus(**arguments)
    say(safe_gpu.get_free_gpus())
    safe_gpu.release_gpus()
""")
    out, err = one.process.communicate(timeout=60)
    assert (one.process.returncode, len(out.splitlines()), err) == (0, 5, "")


WAITS = """
import safe_gpu
from safe_gpu.claim.search import wait_reports as news
news._WARNING_DELAY = {seconds}
safe_gpu.claim_gpus(timeout=None)
say('has')
"""


def test_a_bare_script_that_waits_a_moment_hears_nothing(child, ground, eventually) -> None:
    ground.hold(*range(8))
    one = child(WAITS.format(seconds=1e9))
    eventually(lambda: bool(ground.tickets()))
    ground.let_go()
    out, err = one.process.communicate(timeout=60)
    assert (out, err) == ("has\n", "")


def test_a_bare_script_that_waits_longer_hears_it_once(child, ground, eventually) -> None:
    ground.hold(*range(8))
    head = child(WAITS.format(seconds=0.01))
    user = re.escape(procfs.user_name(os.geteuid()))
    said = rf"safe_gpu: waiting for 1 GPU \(0 free\); GPU 0-7: {user} \(pid \d+\) for \d+ s\n"
    assert re.fullmatch(said, head.process.stderr.readline())
    who = rf"{user} \(pid {head.process.pid}, wants 1 GPU, queued for \d+ s\)"
    behind = child(WAITS.format(seconds=0.01))
    said = rf"safe_gpu: waiting for 1 GPU; behind {who}\n"
    assert re.fullmatch(said, behind.process.stderr.readline())
    ground.let_go()
    for one in (head, behind):
        assert one.process.communicate(timeout=60) == ("has\n", "")


@pytest.mark.parametrize(
    ("call", "environment", "text"),
    [
        ("claim_gpus(2)", {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "1"}, "This claim takes 2 GPUs, but"),
        ("bind(9, strict=False)", {}, "not bound: this host has no GPU 9"),
        ("wrap_command(['true'], gpu=9, mode='node', strict=False)", {}, "the command runs unbound: this host has"),
        ("claim_gpus()", {"SAFE_GPU_TIMOUT": "5"}, "SAFE_GPU_TIMOUT is not a variable of"),
    ],
)
@pytest.mark.parametrize(("configured", "sender"), [("", "safe_gpu: "), ("logging.basicConfig()", "WARNING:safe_gpu:")])
def test_every_warning_names_its_sender_once(
    child, call: str, environment: dict[str, str], text: str, configured: str, sender: str
) -> None:
    one = child(f"import logging; {configured}\nfrom safe_gpu import *\n{call}", env=environment)
    lines = one.process.communicate(timeout=60)[1].splitlines()
    assert lines
    assert all(line.startswith(sender) and line.count("safe_gpu: ") == (not configured) for line in lines)
    assert any(line.startswith(sender + text) for line in lines)


class Clock:
    """Time that passes in pauses, and by a third of a second where a log is made ready, as in a new process."""

    def __init__(self) -> None:
        self._now = time.monotonic()

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_a_wait_of_two_seconds_is_told_of_once(ground, level: int, caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    ground.hold(*range(8))
    clock, to_log = Clock(), wait_reports._to_log

    def slowly(logger: Any, *, late: bool) -> Any:
        clock.sleep(1 / 3)
        return to_log(logger, late=late)

    monkeypatch.setattr(wait_reports, "time", clock)
    monkeypatch.setattr(search, "time", clock)
    monkeypatch.setattr(wait_reports, "_to_log", slowly)
    caplog.set_level(level, "safe_gpu")
    with pytest.raises(NotEnoughGpusError):
        claim_gpus(1, NoPlaceholder(), affinity=None, timeout=1.9)
    waiting = [record for record in caplog.records if record.getMessage().startswith("waiting for 1 GPU (0 free)")]
    assert [record.levelno for record in waiting] == [level]


class Enough(Exception):
    """Instead of a second look."""


def enough(*_: object) -> bool:
    raise Enough


@pytest.mark.parametrize("queued", [False, True])
def test_the_warning_costs_no_look(host, ground, line, monkeypatch, caplog, queued: bool) -> None:
    """Neither at host.lock nor at the driver: hundreds may wait."""
    ground.hold(*range(8))
    if queued:
        line(8)
    taken = []

    locked = Host.locked

    def counted(*arguments: Any) -> Any:
        taken.append("host.lock")
        return locked(*arguments)

    def sleep(self: Waiter, ahead: object, seconds: float) -> bool:
        return seconds > 1 and enough()

    monkeypatch.setattr(Host, "locked", counted)
    monkeypatch.setattr(Waiter, "sleep_behind", sleep)
    monkeypatch.setattr(search, "is_alive", enough)
    monkeypatch.setattr(wait_reports, "_WARNING_DELAY", 0.0)
    seen = []
    for level in (logging.WARNING, logging.ERROR):
        logger = logging.Logger("safe_gpu", level)
        logger.addHandler(caplog.handler)
        caplog.clear()
        taken.clear()
        polls = host.polls
        with pytest.raises(Enough):
            claim_gpus(1, NoPlaceholder(), logger, affinity=None, timeout=None)
        seen.append((len(taken), host.polls - polls))
        assert len(caplog.records) == (level == logging.WARNING)
    assert seen[0] == seen[1]
    assert seen[0][0] == 1


def test_what_went_wrong_is_heard_without_any_set_up(child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_SCOPE", "0123456789abcdef")
    one = child("import safe_gpu; safe_gpu.claim_gpus()")
    _, err = one.process.communicate(timeout=60)
    assert err.count("\n") == 1
    assert "SAFE_GPU_SCOPE=0123456789abcdef" in err


def test_one_line_a_step(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "safe_gpu")
    with claim_gpus(2, affinity=None) as owner:
        uuids = ", ".join(gpu.uuid for gpu in owner.gpus)
    assert messages(caplog) == [
        "acquiring lock",
        "lock acquired",
        "lock released",
        f"Leased GPU 0,1 ({uuids}) (simulated)",
        "Set CUDA_VISIBLE_DEVICES=0,1",
        "Placeholder holds GPU 0,1",
        "Releasing placeholder on CUDA device: 0",
        "Releasing placeholder on CUDA device: 1",
    ]
    assert {record.levelno for record in caplog.records} == {logging.INFO}


DISPLAY = "Running on a machine with single GPU used for actual display"


def test_a_single_gpu_that_drives_a_display_is_told_as_by_the_older_package(caplog, monkeypatch) -> None:
    caplog.set_level(logging.INFO, "safe_gpu")
    with claim_gpus(1, affinity=None):
        pass
    assert DISPLAY not in messages(caplog)
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:laptop")
    with claim_gpus(1, affinity=None):
        pass
    assert messages(caplog).count(DISPLAY) == 1


def test_the_same_facts_as_data(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "safe_gpu")
    with claim_gpus(2, NoPlaceholder(), affinity=None, delegate=True) as owner:
        uuids = [gpu.uuid for gpu in owner.gpus]
        token = os.environ["SAFE_GPU_SCOPE"]
    claimed = next(record for record in caplog.records if record.msg.startswith("Leased"))
    assert claimed.safe_gpu_uuids == uuids
    assert claimed.safe_gpu_devices == [0, 1]
    assigned = next(record for record in caplog.records if record.msg.startswith("Set"))
    assert assigned.safe_gpu_environment == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "SAFE_GPU_SCOPE": token,
    }


def test_a_wait_is_told_with_its_data(ground, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "safe_gpu")
    ground.hold(*range(7))
    with pytest.raises(NotEnoughGpusError):
        claim_gpus(2, NoPlaceholder(), affinity=None, timeout=0.5)
    waiting = [record for record in caplog.records if record.getMessage().startswith("waiting for 2 GPUs")]
    assert len(waiting) == 1
    said = r"waiting for 2 GPUs \(1 free\); GPU 0-6: \S+ \(pid \d+\) for \d s"
    assert re.fullmatch(said, waiting[0].getMessage())
    assert waiting[0].levelno == logging.INFO
    assert (waiting[0].safe_gpu_position, waiting[0].safe_gpu_free, waiting[0].safe_gpu_needed) == (1, 1, 2)
    assert len(waiting[0].safe_gpu_verdicts) == 8
    assert waiting[0].safe_gpu_ahead is None


def test_whom_one_waits_behind_is_told_with_its_data(line, ground, caplog: pytest.LogCaptureFixture) -> None:
    line(8)
    ground.hold(0)
    caplog.set_level(logging.INFO, "safe_gpu")
    with pytest.raises(NotEnoughGpusError):
        claim_gpus(1, NoPlaceholder(), affinity=None, timeout=0.5)
    (waiting,) = [
        record
        for record in caplog.records
        if record.getMessage().startswith("waiting for 1 GPU (7 are free for 1 claim ahead), #2 in the queue; behind ")
    ]
    assert (waiting.safe_gpu_ahead.pid, waiting.safe_gpu_ahead.nb_gpus) == (os.getpid(), 8)
    assert not waiting.safe_gpu_ahead.stopped
    assert (waiting.safe_gpu_position, waiting.safe_gpu_free, waiting.safe_gpu_needed) == (2, 7, 1)


def test_a_logger_that_is_closed_to_info_costs_a_short_wait_nothing(ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds what is looked up for the log only where somebody reads it."""
    made = []
    monkeypatch.setattr("safe_gpu.claim.report.wait_status", lambda *arguments: made.append(arguments))
    ground.hold(*range(8))
    with pytest.raises(NotEnoughGpusError):
        claim_gpus(1, NoPlaceholder(), affinity=None, timeout=0.02)
    assert made == []


def test_importing_and_claiming_configures_no_logging() -> None:
    logger = logging.getLogger("safe_gpu")
    assert logger.level == logging.NOTSET
    assert logger.propagate
    before = list(logging.root.handlers)
    with claim_gpus(1, NoPlaceholder(), affinity=None):
        pass
    assert logging.root.handlers == before
    assert not logger.handlers


@pytest.mark.parametrize("taken", [1, 2])
def test_more_gpus_than_the_job_declared_are_warned_of(host: Any, taken: int, monkeypatch: Any, caplog: Any) -> None:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "1"}.items():
        monkeypatch.setenv(name, value)
    claim_gpus(taken, NoPlaceholder(), timeout=0)
    assert ("takes 2 GPUs, but the job asked its scheduler for 1" in caplog.text) == (taken == 2)
