"""CUDA initialised too early or in the wrong order, and what a claim asks NVML, on fake GPUs behind real libraries."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.forks import forked


def holders(gpus: Any) -> list[str]:
    return sorted(path.parent.name for path in gpus.directory.glob("procs/*/[0-9]*"))


def mix(gpus: Any) -> None:
    """A slow GPU first on the bus, then two fast ones: CUDA's own order is 1, 2, 0."""
    gpus.write({"name": "NVIDIA_T4", "speed": 1}, {"name": "NVIDIA_A100", "speed": 9}, {"speed": 8})


# Before the claim


def test_cuda_initialized_before_the_claim_is_refused_before_anything_is_touched(fake_gpus, tmp_path: Path) -> None:
    state = tmp_path / "state"
    out = forked(fake_gpus, "initialize(); out['claim'] = claim(1); out['set'] = variables()", SAFE_GPU_DIR=str(state))
    name, message, attributes = out["claim"]
    assert name == "CudaInitializedError"
    assert "8 GPU(s)" in message
    assert "call claim_gpus() before" in message
    assert attributes["visible"] == fake_gpus.uuids
    assert out["set"] == {}
    assert not state.exists()
    assert holders(fake_gpus) == []


EARLY, NEVER = "CudaInitializedError", "UnsatisfiableRequestError"


@pytest.mark.parametrize(
    ("visible", "arguments", "taken"),
    [
        ("3", "1", [3]),
        ("2,0", "2", [2, 0]),
        ("2,0", "2, NoPlaceholder()", [2, 0]),
        ("3", "2", EARLY),
        ("3", "1, only=4", NEVER),
    ],
)
def test_cuda_initialized_is_fine_where_the_claim_takes_exactly_what_it_sees(
    fake_gpus: Any, visible: str, arguments: str, taken: list[int] | str
) -> None:
    found = forked(fake_gpus, f"initialize(); out = claim({arguments})", CUDA_VISIBLE_DEVICES=visible)
    assert taken in (found, found[0])
    assert not isinstance(taken, str) or holders(fake_gpus) == []


def test_with_cuda_initialized_its_own_order_counts_and_a_fence_that_is_ignored(fake_gpus: Any) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "3", "SAFE_GPU_FENCE": "ignore"}
    assert forked(fake_gpus, "initialize(); out = claim(1)", **environment) == [3]
    assert forked(fake_gpus, "initialize(); out = claim(2)", **environment)[0] == "CudaInitializedError"
    mix(fake_gpus)
    assert forked(fake_gpus, "initialize(); out = claim(3)") == [1, 2, 0]


def test_a_notebook_claims_the_same_again_after_release_and_is_told_who_initialized_cuda(fake_gpus: Any) -> None:
    code = """
out["first"] = claim(1, only=5)
safe_gpu.release_gpus()
out["again"] = claim(1)
safe_gpu.release_gpus()
out["more"] = claim(2)
out["other"] = claim(1, only=4)[:2]
out["set"] = variables()
"""
    out = forked(fake_gpus, code)
    assert out["first"] == out["again"] == [5]
    name, message, attributes = out["more"]
    assert (name, attributes["visible"]) == ("CudaInitializedError", [fake_gpus.uuids[5]])
    for part in ("placeholder of an earlier claim (CudaPlaceholder)", "one claim of 2", "NoPlaceholder()", "release_"):
        assert part in message
    assert "is_available" not in message
    assert out["other"][0] == "UnsatisfiableRequestError"
    assert "CUDA, already initialised in this process, limits this process to " in out["other"][1]
    assert "SAFE_GPU_FENCE" not in out["other"][1]
    assert out["set"] == {}


def test_a_placeholder_that_did_not_initialize_cuda_is_not_named(fake_gpus: Any) -> None:
    code = "claim(1, lambda device_no: None); initialize(); safe_gpu.release_gpus(); out = claim(2)"
    name, message, _ = forked(fake_gpus, code)
    assert name == "CudaInitializedError"
    assert "call claim_gpus() before torch.cuda.is_available()" in message


def test_prepare_must_not_wake_cuda(fake_gpus: Any) -> None:
    code = """
class Eager(CudaPlaceholder):
    def prepare(self):
        initialize()
out["claim"] = claim(1, Eager())[:2]
out["set"] = variables()
"""
    out = forked(fake_gpus, code)
    assert out["claim"][0] == "CudaInitializedError"
    assert "prepare()" in out["claim"][1]
    assert out["set"] == {}


# The wrong device


@pytest.mark.parametrize(
    ("tampering", "number", "only", "device_no", "expected", "actual"),
    [
        pytest.param('["CUDA_DEVICE_ORDER"] = "FASTEST_FIRST"', 1, "0", 0, 0, 1, id="another order"),
        pytest.param('["CUDA_VISIBLE_DEVICES"] += ",1"', 1, "2", 1, None, 1, id="more devices"),
        pytest.param('["CUDA_VISIBLE_DEVICES"] = "1"', 2, "1,2", 1, 2, None, id="fewer devices"),
    ],
)
def test_a_placeholder_that_moves_the_devices_is_noticed(
    fake_gpus: Any, tampering: str, number: int, only: str, device_no: int, expected: int | None, actual: int | None
) -> None:
    mix(fake_gpus)
    code = f"""
def tamper(device_no):
    os.environ{tampering}
    initialize()
out["claim"] = claim({number}, tamper, only={only!r})
out["free"] = safe_gpu.get_free_gpus()
"""
    out = forked(fake_gpus, code)
    name, message, attributes = out["claim"]
    uuids = {"expected": expected, "actual": actual}
    told = {word: "" if index is None else fake_gpus.uuids[index] for word, index in uuids.items()}
    assert name == "WrongDeviceError"
    assert attributes == {"device_no": device_no, **told}
    assert all(uuid in message for uuid in told.values())
    assert out["free"] == ["0", "1", "2"]


@pytest.mark.parametrize("visible_as", ["index", "uuid"])
def test_the_claimed_gpu_is_the_one_that_cuda_opens_on_mixed_hosts(fake_gpus: Any, visible_as: str) -> None:
    mix(fake_gpus)
    for index in range(3):
        code = f"""
out["taken"] = claim(1, only={index}, visible_as={visible_as!r})
out["held"] = safe_gpu.gpu_owner.placeholders[0].uuid
out["set"] = variables()
"""
        out = forked(fake_gpus, code)
        assert out["taken"] == [index]
        assert out["held"] == fake_gpus.uuids[index]
        expected = str(index) if visible_as == "index" else fake_gpus.uuids[index]
        assert out["set"]["CUDA_VISIBLE_DEVICES"] == expected
        assert out["set"].get("CUDA_DEVICE_ORDER") == ("PCI_BUS_ID" if visible_as == "index" else None)


# Fences


def test_an_ambiguous_fence_is_refused_with_the_way_out(fake_gpus: Any) -> None:
    mix(fake_gpus)
    assert forked(fake_gpus, "out = claim(1)", CUDA_VISIBLE_DEVICES="0", CUDA_DEVICE_ORDER="PCI_BUS_ID") == [0]
    name, message, _ = forked(fake_gpus, "out = claim(1)", CUDA_VISIBLE_DEVICES="0")
    assert name == "UnsatisfiableRequestError"
    for part in ("CUDA_VISIBLE_DEVICES=0 is ambiguous", "CUDA_DEVICE_ORDER=PCI_BUS_ID", "SAFE_GPU_FENCE=ignore"):
        assert part in message
    in_job = forked(fake_gpus, "out = claim(1)", CUDA_VISIBLE_DEVICES="0", SLURM_JOB_ID="7")[1]
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in in_job
    assert "SAFE_GPU_FENCE" not in in_job
    assert forked(fake_gpus, "out = claim(1, NoPlaceholder())", CUDA_VISIBLE_DEVICES="0", SAFE_GPU_FENCE="ignore") == [
        0
    ]


# MIG


def test_a_mig_instance_is_claimed_by_its_uuid(fake_gpus: Any) -> None:
    instances = [fake_gpus.uuid("MIG", number) for number in range(2)]
    fake_gpus.write({"mig": 1, "instances": ",".join(instances), "imem": 40 << 30}, {}, {})
    out = forked(fake_gpus, "out['taken'] = claim(2); out['set'] = variables()")
    assert (out["taken"], out["set"]["CUDA_VISIBLE_DEVICES"]) == ([1, 2], ",".join(fake_gpus.uuids[1:])), "whole ones"
    fake_gpus.write({"mig": 1, "instances": ",".join(instances), "imem": 40 << 30})
    code = """
out["first"] = claim(1)
out["set"] = variables()
out["held"] = safe_gpu.gpu_owner.placeholders[0].uuid
out["free"] = safe_gpu.get_free_gpus()
"""
    name, message, _ = forked(fake_gpus, "out = claim(2)")
    assert name == "UnsatisfiableRequestError"
    assert "one MIG instance" in message
    out = forked(fake_gpus, code)
    assert out["first"] == [0]
    assert out["set"]["CUDA_VISIBLE_DEVICES"] == out["held"] == instances[0]
    assert "CUDA_DEVICE_ORDER" not in out["set"]
    assert out["free"] == ["0:1"]


# Placeholders that fail


@pytest.mark.parametrize("option", ["ctx_error", "alloc_error", "cuda_init_error"])
def test_a_context_that_fails_leaves_nothing(fake_gpus: Any, option: str) -> None:
    fake_gpus.options(**{option: 2})
    out = forked(fake_gpus, "out['claim'] = claim(2); out['set'] = variables(); out['free'] = safe_gpu.get_free_gpus()")
    name, message, attributes = out["claim"]
    assert name == "PlaceholderError"
    assert "out of memory" in message.lower() or "OUT_OF_MEMORY" in message
    assert attributes == {"device_no": 0, "uuid": fake_gpus.uuids[0]}
    assert out["set"] == {}
    assert len(out["free"]) == 8
    assert holders(fake_gpus) == []


def test_a_driver_library_without_cuda_is_told_before_any_lock(fake_gpus: Any, tmp_path: Path) -> None:
    state = tmp_path / "state"
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    nvml = "libnvidia-ml.so.1"
    (libraries / nvml).symlink_to(Path(fake_gpus.env["LD_LIBRARY_PATH"]) / nvml)
    (libraries / "libcuda.so.1").touch()  # the loader stops here and looks no further
    out = forked(fake_gpus, "out = claim(1)", SAFE_GPU_DIR=str(state), LD_LIBRARY_PATH=str(libraries))
    assert out[0] == "NoDriverError"
    assert not state.exists()


def test_descriptors_and_threads_are_as_before(fake_gpus: Any) -> None:
    code = """
import gc, threading
def state():
    paths = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sorted(os.readlink(path) for path in paths if os.path.exists(path)), threading.active_count()
claim(1); safe_gpu.release_gpus()
out["before"] = state()
for _ in range(3):
    claim(1); safe_gpu.release_gpus()
    claim(9)
    claim(0)
    claim(1, only=1)
    safe_gpu.get_free_gpus()
out["after"] = state()
"""
    out = forked(fake_gpus, code)
    assert out["before"] == out["after"]


# What NVML is asked, call by call: on a real driver each is a system call or worse


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


@pytest.fixture
def calls(fake_gpus: Any) -> Any:
    """``calls()``: those of a first claim before and after its GPUs are held, and those of a second one."""

    def count(nb_gpus: int = 1) -> list[Counter[str]]:
        fake_gpus.options(log=1)
        phases: list[list[str]] = forked(fake_gpus, CLAIMS.format(nb_gpus=nb_gpus))
        assert len(phases) == 4
        return [Counter(name.partition("_v")[0].removeprefix("nvml") for name in phase) for phase in phases]

    return count


@pytest.mark.parametrize("busy", [0, 7])
def test_a_claim_of_one_gpu_of_eight(calls: Any, fake_gpus: Any, busy: int) -> None:
    for uuid in fake_gpus.uuids[:busy]:
        fake_gpus.process(uuid, os.getpid(), 1 << 30)
    before, after, before_again, after_again = calls()
    assert (before.total() <= 85, before_again.total() <= 62) == (True, True)
    assert max(after.total(), after_again.total()) <= 15


def test_what_is_asked_on_an_idle_host(calls: Any, fake_gpus: Any) -> None:
    fake_gpus.set(8, mig=0)
    before, after, *_ = calls()
    for name in ("UtilizationRates", "GraphicsRunningProcesses", "MPSComputeRunningProcesses", "P2PStatus"):
        assert not before[f"DeviceGet{name}"] + after[f"DeviceGet{name}"], name  # nothing that no claim decides by
    assert set(before.values()) == {1, 8}, "each question once, of the host or of each GPU"
    for name in ("HandleByUUID", "MemoryInfo", "ComputeRunningProcesses", "MigMode"):
        assert 2 <= after[f"DeviceGet{name}"] <= 3, name  # the second and the third poll are about the claimed GPU only


def test_links_are_asked_for_claims_of_several_gpus_and_what_draws_where_memory_is_unexplained(
    calls: Any, fake_gpus: Any
) -> None:
    fake_gpus.change(0, used=40 << 20)
    fake_gpus.change(1, used=8 << 20)
    before, after, *_ = calls(2)
    assert before["DeviceGetGraphicsRunningProcesses"] == 1
    assert (before["DeviceGetP2PStatus"], after["DeviceGetP2PStatus"]) == (28, 0)
