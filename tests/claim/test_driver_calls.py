"""What a claim asks NVML, call by call: on a real driver each call is a system call or worse."""

import os
from collections import Counter
from typing import Any

import pytest
from support.forks import forked

# Claims twice, and says which NVML functions were called before the GPUs were held and after, each time.
CLAIMS = """
import logging
from safe_gpu.claim import view as host_view; from safe_gpu.claim import functions as owner

owner._STALE = host_view._RECENT = 1e9  # on a busy machine a poll may be old by the time it is used
calls, phases = os.path.join(os.environ["FAKE_GPU_DIR"], "calls"), []

def new_calls():
    with open(calls) as file:
        names = file.read().split()
    os.unlink(calls)
    return names

class AtClaim(logging.Handler):
    def emit(self, record):
        if record.getMessage() == "lock released":
            phases.append(new_calls())

logger = logging.getLogger("safe_gpu")
logger.setLevel(logging.INFO)
logger.addHandler(AtClaim())
for _ in range(2):
    owner = safe_gpu.claim_gpus({nb_gpus}, timeout=0)
    phases.append(new_calls())
    owner.release_gpus()
    assert not os.path.exists(calls), "a release asks nothing"
out = phases
"""


def claims(fake_gpus: Any, nb_gpus: int = 1) -> list[Counter[str]]:
    """The calls of a first claim before and after its GPUs are held, and those of a second one."""
    fake_gpus.options(log=1)
    phases: list[list[str]] = forked(fake_gpus, CLAIMS.format(nb_gpus=nb_gpus))
    assert len(phases) == 4
    return [Counter(name.partition("_v")[0].removeprefix("nvml") for name in phase) for phase in phases]


def idle(fake_gpus: Any) -> None:
    pass


def known_cpus(fake_gpus: Any) -> None:
    fake_gpus.set(8, node_cpus="0-3")


def seven_busy(fake_gpus: Any) -> None:
    for uuid in fake_gpus.uuids[:7]:
        fake_gpus.process(uuid, os.getpid(), 1 << 30)


@pytest.mark.parametrize("host", [idle, known_cpus, seven_busy])
def test_a_claim_of_one_gpu_of_eight(fake_gpus: Any, host: Any) -> None:
    host(fake_gpus)
    before, after, before_again, after_again = claims(fake_gpus)
    assert before.total() + after.total() <= 100
    assert after.total() <= 20
    assert before_again.total() + after_again.total() <= 62
    assert after_again.total() <= 20


def test_what_is_asked_on_an_idle_host(fake_gpus: Any) -> None:
    phases = _, after, before_again, after_again = claims(fake_gpus)
    for phase in phases:  # nothing that no claim decides by
        for name in ("UtilizationRates", "GraphicsRunningProcesses", "P2PStatus"):
            assert not phase[f"DeviceGet{name}"], name
        assert phase["DeviceGetDisplayActive"] in (0, 8)
    for name in ("Name", "PciInfo", "MigMode", "HandleByIndex"):  # facts, once
        assert [phase[f"DeviceGet{name}"] for phase in phases] == [8, 0, 0, 0], name
    assert before_again["DeviceGetHandleByUUID"] == 8
    for phase in (after, after_again):  # the second and the third poll are about the claimed GPUs only
        for name in ("UUID", "MemoryInfo", "ComputeRunningProcesses", "MPSComputeRunningProcesses"):
            assert phase[f"DeviceGet{name}"] == 2, name


def test_gpus_that_can_have_mig_are_asked_each_time(fake_gpus: Any) -> None:
    fake_gpus.set(8, mig=0)
    before, after, before_again, after_again = claims(fake_gpus)
    assert [phase["DeviceGetMigMode"] for phase in (before, after, before_again, after_again)] == [8, 2, 8, 2]
    assert before.total() + after.total() <= 100
    assert before_again.total() + after_again.total() <= 62


def test_links_are_asked_for_claims_of_several_gpus(fake_gpus: Any) -> None:
    before, after, before_again, after_again = claims(fake_gpus, 2)
    assert [phase["DeviceGetP2PStatus"] for phase in (before, after, before_again, after_again)] == [28, 0, 0, 0]


def test_what_draws_is_asked_for_where_memory_is_unexplained(fake_gpus: Any) -> None:
    fake_gpus.change(0, used=40 << 20)
    fake_gpus.change(1, used=8 << 20)
    before, *_ = claims(fake_gpus)
    assert before["DeviceGetGraphicsRunningProcesses"] == 1
