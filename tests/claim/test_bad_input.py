"""Nonsense in arguments, environment and state directory: a clear error at once that names it, and nothing left."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu.drivers.presets import preset
from safe_gpu.errors import GPUAffinityError, PlaceholderError, SafeGpuError, UnsatisfiableRequestError
from safe_gpu.runtimes.placeholders import Base

# One of each kind, through a whole claim; all values are refused where they are parsed, and the messages are a table in
# tests/cli/test_mistakes.py.


class OfFramework(Base):
    """A framework that finds no GPU."""

    _module = "math"

    def _allocate(self, device_no: int) -> Any:
        raise RuntimeError("No CUDA GPUs are available")


REFUSED = UnsatisfiableRequestError
ARGUMENTS: list[tuple[dict[str, Any], type[SafeGpuError], str]] = [
    ({"nb_gpus": "job"}, REFUSED, "SAFE_GPU_NB_GPUS"),
    ({"nb_gpus": 10**30}, REFUSED, "only 8"),
    ({"timeout": float("nan")}, REFUSED, "timeout=nan"),
    ({"affinity": 3}, GPUAffinityError, "node"),
    ({"memory": "interleave"}, GPUAffinityError, "preferred"),
    ({"model": "H100"}, REFUSED, "A100"),
    ({"nb_gpus": 2, "only": "3"}, REFUSED, "only 1 of the 8"),
    ({"exclude": "0-7"}, REFUSED, "none fits"),
    ({"debug_sleep": -1}, REFUSED, "debug_sleep=-1"),
    ({"debug_sleep": float("inf")}, REFUSED, "debug_sleep=inf"),
    ({"debug_sleep": None}, REFUSED, "debug_sleep=None"),
    ({"only": "9"}, REFUSED, "has GPU 0-7"),
    ({"only": "GPU-"}, REFUSED, preset("dgx-a100").gpus[0].uuid),
    ({"logger": "print"}, REFUSED, "logger='print'"),
    ({"placeholder_fn": safe_gpu.PytorchPlaceholder}, PlaceholderError, "PytorchPlaceholder()"),
]


def test_a_framework_is_told_that_the_gpus_are_simulated(host: Any) -> None:
    with pytest.raises(PlaceholderError, match="those of simulated:dgx-a100 are simulated: "):
        safe_gpu.claim_gpus(placeholder_fn=OfFramework())


def refused(kind: type[SafeGpuError], part: str, **arguments: Any) -> SafeGpuError:
    with pytest.raises(SafeGpuError) as caught:
        safe_gpu.claim_gpus(**arguments)
    assert type(caught.value) is kind, caught.value
    assert part in str(caught.value)
    return caught.value


@pytest.mark.parametrize(("arguments", "kind", "part"), ARGUMENTS, ids=lambda value: str(value)[:40])
def test_arguments(host, arguments: dict[str, Any], kind: type[SafeGpuError], part: str, untouched) -> None:
    with untouched():
        # For ever, unless the argument says otherwise: what makes no sense is not waited for.
        refused(kind, part, **{"timeout": None, **arguments})
    assert host.polls <= 1
    assert not Path(os.environ["SAFE_GPU_DIR"]).exists(), "no lock was needed to see that"
    assert safe_gpu.claim_gpus(1, timeout=0).devices_taken == [0]


# The state directory


def test_a_disk_quota_that_ends_in_the_middle_of_an_entry(host: Any, child: Any) -> None:
    # Any user can play that: no file may grow beyond ten bytes.
    code = """
import os, resource, signal, safe_gpu
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
try:
    safe_gpu.claim_gpus(2, timeout=None)
except safe_gpu.StateDirError as err:
    say(err)
say(os.environ.get("CUDA_VISIBLE_DEVICES"))
listen()
"""
    process = child(code)
    assert re.search(r"claims/\..*free some space", process.hear())
    assert process.hear() == "None"
    assert len(safe_gpu.get_free_gpus()) == 8


def test_no_descriptors_left(host: Any, child: Any) -> None:
    code = """
import os, resource, safe_gpu
safe_gpu.claim_gpus(1, timeout=0)
safe_gpu.release_gpus()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
before, results = os.listdir("/proc/self/fd"), []
for room in range(3, 45):
    resource.setrlimit(resource.RLIMIT_NOFILE, (room, hard))
    try:
        results.append(len(safe_gpu.claim_gpus(8, timeout=0).devices_taken))
        safe_gpu.release_gpus()
    except Exception as err:
        results.append(type(err).__name__)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert os.listdir("/proc/self/fd") == before, (room, os.listdir("/proc/self/fd"))
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
say(*results)
"""
    results = child(code).hear().split()
    assert results[-1] == "8"
    assert "StateDirError" in results
