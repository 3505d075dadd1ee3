"""What a claim asks NVML, call by call: on a real driver each call is a system call or worse."""

import os
from collections import Counter
from typing import Any

import pytest
from support.forks import forked

# Claims twice, and says which NVML functions were called before the GPUs were held and after, each time.
CLAIMS = """
import logging
from safe_gpu.claim import view as host_view

host_view._RECENT = 1e9  # on a busy machine a poll may be old by the time it is used
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
    assert (before.total() <= 85, before_again.total() <= 62) == (True, True)
    assert max(after.total(), after_again.total()) <= 15


def test_what_is_asked_on_an_idle_host(fake_gpus: Any) -> None:
    fake_gpus.set(8, mig=0)
    before, after, *_ = claims(fake_gpus)
    for name in ("UtilizationRates", "GraphicsRunningProcesses", "MPSComputeRunningProcesses", "P2PStatus"):
        assert not before[f"DeviceGet{name}"] + after[f"DeviceGet{name}"], name  # nothing that no claim decides by
    assert set(before.values()) == {1, 8}, "each question once, of the host or of each GPU"
    for name in ("HandleByUUID", "MemoryInfo", "ComputeRunningProcesses", "MigMode"):
        assert 2 <= after[f"DeviceGet{name}"] <= 3, name  # the second and the third poll are about the claimed GPU only


def test_links_are_asked_for_claims_of_several_gpus(fake_gpus: Any) -> None:
    before, after, *_ = claims(fake_gpus, 2)
    assert (before["DeviceGetP2PStatus"], after["DeviceGetP2PStatus"]) == (28, 0)


def test_what_draws_is_asked_for_where_memory_is_unexplained(fake_gpus: Any) -> None:
    fake_gpus.change(0, used=40 << 20)
    fake_gpus.change(1, used=8 << 20)
    before, *_ = claims(fake_gpus)
    assert before["DeviceGetGraphicsRunningProcesses"] == 1
