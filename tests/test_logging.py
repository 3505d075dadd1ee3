"""The logger ``safe_gpu``: silent unless asked, one line a step, and the same facts as data."""

from __future__ import annotations

import logging
import os

import pytest

import safe_gpu
from safe_gpu import NoPlaceholder, NotEnoughGpusError, claim_gpus


@pytest.fixture(autouse=True)
def _no_claim_left():
    yield
    safe_gpu.release_gpus()


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert {record.name for record in caplog.records} <= {"safe_gpu"}
    return [record.getMessage() for record in caplog.records]


STEPS = """
import safe_gpu
with safe_gpu.GPUOwner(2) as owner: pass
safe_gpu.claim_gpus({arguments})
print(safe_gpu.get_free_gpus())
safe_gpu.release_gpus()
"""


@pytest.mark.parametrize("arguments", ["", "timeout=0", "8", "1, affinity='socket'", "1, memory='preferred'"])
def test_a_bare_script_hears_nothing(child, arguments: str) -> None:
    one = child(STEPS.format(arguments=arguments))
    out, err = one.process.communicate(timeout=60)
    assert one.process.returncode == 0
    assert err == ""
    assert len(out.splitlines()) == 1


def test_a_bare_script_that_waits_hears_nothing(child, ground, eventually) -> None:
    ground.hold(*range(8))
    one = child("import safe_gpu; safe_gpu.claim_gpus(timeout=None); say('has')")
    eventually(lambda: bool(ground.tickets()))
    ground.let_go()
    out, err = one.process.communicate(timeout=60)
    assert (out, err) == ("has\n", "")


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
        f"Leased GPU 0,1 ({uuids})",
        "Set CUDA_VISIBLE_DEVICES=0,1",
        "Placeholder holds GPU 0,1",
        "Releasing placeholder on CUDA device: 0",
        "Releasing placeholder on CUDA device: 1",
    ]
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_the_same_facts_as_data(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "safe_gpu")
    with claim_gpus(2, NoPlaceholder(), affinity=None, delegate=True) as owner:
        uuids = [gpu.uuid for gpu in owner.gpus]
        token = os.environ["SAFE_GPU_SCOPE"]
    leased = next(record for record in caplog.records if record.msg.startswith("Leased"))
    assert leased.safe_gpu_uuids == uuids
    assert leased.safe_gpu_devices == [0, 1]
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
        claim_gpus(2, NoPlaceholder(), affinity=None, timeout=0.05)
    waiting = [record for record in caplog.records if record.getMessage().startswith("waiting for 2 GPUs")]
    assert len(waiting) == 1
    assert "position 1, 1 of 2 free" in waiting[0].getMessage()
    assert (waiting[0].safe_gpu_position, waiting[0].safe_gpu_free, waiting[0].safe_gpu_needed) == (1, 1, 2)
    assert len(waiting[0].safe_gpu_verdicts) == 8


def test_a_logger_of_the_caller_s_gets_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    mine = logging.getLogger("mine")
    with claim_gpus(1, None, mine, affinity=None):
        pass
    assert {record.name for record in caplog.records} == {"mine"}
    assert len(caplog.records) >= 6


def test_a_logger_that_is_closed_to_info_costs_nothing(ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds what is looked up for the log only where somebody reads it."""
    made = []
    monkeypatch.setattr("safe_gpu.report.waiting_message", lambda news: made.append(news) or "")
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
