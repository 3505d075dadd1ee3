"""Claims of NVIDIA, AMD and Intel GPUs on fake libraries and saved trees: runtimes initialised too early or in another
order, what a claim asks NVML, and two vendors on one host; simulated AMD hosts are in tests/cli/test_run.py."""

import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.forks import VARIABLES, out_of_child
from support.gpus import run_python
from support.vendor_hosts import HipHost, IntelHost, without_hip

import safe_gpu

HOSTS = {vendor: api.SimulatedDriver("two-vendors", "/nowhere", vendor=vendor) for vendor in ("nvidia", "amd")}
UUIDS = {vendor: [gpu.uuid for gpu in host.idle.gpus] for vendor, host in HOSTS.items()}


@pytest.fixture
def two_vendors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:two-vendors")


def claim(nb_gpus: int = 1, **options: Any) -> safe_gpu.GPUOwner:
    return safe_gpu.GPUOwner(nb_gpus, timeout=0, affinity=None, **options)


def refused(host: Any, code: str, kind: str, *parts: str, **environment: str) -> dict[str, Any]:
    """What an error of this kind, with these words in its text, says besides: ``code`` leads to it in a child."""
    name, message, attributes = out_of_child(host, code, **environment)
    assert (name, [part for part in parts if part not in message]) == (kind, []), message
    return attributes


def test_nvidia_is_the_first_and_the_variables_are_those_of_the_vendor(two_vendors: None) -> None:
    for options, vendor, values in (
        ({}, "nvidia", ["0,1", None, None]),
        ({"vendor": "amd"}, "amd", ["0,1", ",".join(UUIDS["amd"][:2]), "0,1"]),
    ):
        with claim(2, **options) as owner:
            assert [gpu.uuid for gpu in owner.gpus] == UUIDS[vendor][:2]
            assert [os.environ.get(name) for name in VARIABLES[:3]] == values
    assert not os.environ.keys() & set(VARIABLES)


def test_the_order_of_a_list_of_amd_gpus_is_kept(two_vendors: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1,0")
    with claim(2, vendor="amd") as owner:
        assert owner.devices_taken == [1, 0]
        assert os.environ["ROCR_VISIBLE_DEVICES"] == f"{UUIDS['amd'][1]},{UUIDS['amd'][0]}"
        assert os.environ["HIP_VISIBLE_DEVICES"] == "0,1"


def test_intel_gpus_stay_in_index_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Level Zero numbers them so, whatever the order of its mask."""
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:max1550")
    with claim(2, only="1,0") as owner:
        assert owner.devices_taken == [0, 1]


def test_both_can_be_held_at_once_and_all_busy_is_all_busy(two_vendors, command: Any) -> None:
    code = "import safe_gpu; print(safe_gpu.claim_gpus(4, vendor='AMD', timeout=0).gpus[0].uuid)"
    outside = {**os.environ}
    with claim(4):
        assert run_python("-c", code, env=outside) == f"{UUIDS['amd'][0]}\n"
        assert safe_gpu.get_free_gpus() == []
        assert safe_gpu.get_free_gpus(vendor="amd") == ["0", "1", "2", "3"]
        assert command.run("run", "--timeout", "0", "--", "true").returncode == 75, "no AMD GPU in place of a busy one"
        assert command.run("wait", "--timeout", "0", "--vendor", "amd").stdout == "0\n"


def test_a_wrong_vendor(two_vendors: None) -> None:
    for vendor, ask in (("matrox", claim), ("", safe_gpu.get_free_gpus), (["amd"], api.wait_for_gpus)):
        with pytest.raises(safe_gpu.UnsatisfiableRequestError, match="choose 'nvidia' or 'amd' or 'intel'"):
            ask(vendor=vendor)


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_a_claim_inside_a_claim_keeps_the_vendor(two_vendors, vendor: str, command: Any, monkeypatch: Any) -> None:
    """Also where the program has cleared the variable that names AMD GPUs, and where it is left from elsewhere."""
    for stale in (None, UUIDS["amd"][3]):
        with claim(2, vendor=vendor, delegate=True) as owner, monkeypatch.context() as patch:
            if vendor == "nvidia" and stale:
                patch.setenv("ROCR_VISIBLE_DEVICES", stale)
            if vendor == "amd" and stale is None:
                patch.delenv("ROCR_VISIBLE_DEVICES")
                patch.setenv("SAFE_GPU_FENCE", "ignore")
            inner = command.run("run", "-q", "--", "env").stdout.splitlines()
            name = "ROCR_VISIBLE_DEVICES" if vendor == "amd" else "CUDA_VISIBLE_DEVICES"
            assert {f"{name}=0", f"{name}={owner.gpus[0].uuid}"} & {*inner}
            assert ("HIP_VISIBLE_DEVICES=0" in inner) == (vendor == "amd")
            if stale is None:
                child = command.run("run", "--vendor", "nvidia" if vendor == "amd" else "amd", "--", "true")
                why = f"the enclosing claim (SAFE_GPU_SCOPE) holds {vendor.upper()} GPUs"
                assert (child.returncode, why in child.stderr) == (78, True)
            token = os.environ["SAFE_GPU_SCOPE"]
    monkeypatch.setenv("SAFE_GPU_SCOPE", token)  # of a claim that has ended, which decides nothing
    with claim() as owner:
        assert api.vendor_of(owner.gpus[0].uuid) == "nvidia"


def test_waiters_of_two_vendors_do_not_wait_for_each_other(two_vendors, command, child, dgx, eventually) -> None:
    """A waiter for all NVIDIA GPUs keeps nobody from AMD's, and its place among NVIDIA's."""
    holder = child("import safe_gpu; say(safe_gpu.claim_gpus().devices_taken); listen()")
    assert holder.hear() == "[0]"
    waiter = command.start("run", "-q", "-n", "4", "--", "true")
    eventually(dgx.tickets)
    assert command.run("run", "--timeout", "0", "--", "true").returncode == 75, "strict order among NVIDIA GPUs"
    assert command.run("run", "--timeout", "0", "--vendor", "amd", "-n", "4", "--", "true").returncode == 0
    assert waiter.poll() is None
    holder.tell()
    assert waiter.wait(60) == 0


# AMD GPUs, on a fake libamdhip64 over a saved sysfs tree


@pytest.fixture
def hip(tmp_path: Path, build_library: Callable[..., Path]) -> HipHost:
    return HipHost(tmp_path, build_library("hip.c", "libamdhip64.so"))


def test_a_claim_holds_its_gpus_and_lets_them_go(hip: HipHost) -> None:
    code = """
out["taken"], out["set"] = claim(2), variables()
out["free"] = safe_gpu.get_free_gpus()
proc = os.environ["SAFE_GPU_FSROOT"] + f"/sys/class/kfd/kfd/proc/{os.getpid()}/vram_"
out["held"] = [n for n in range(8) if os.path.exists(proc + str(100 + n))]
safe_gpu.release_gpus()
out["after"] = variables()
"""
    found = out_of_child(hip, code)
    assert found.pop("set") == dict(zip(VARIABLES, ["0,1", ",".join(hip.uuids[:2]), "0,1"], strict=False))
    assert found == {"taken": [0, 1], "held": [0, 1], "free": ["2", "3", "4", "5", "6", "7"], "after": {}}
    assert hip.users() == {}


@pytest.mark.parametrize("others", [{}, {"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "1"}])
def test_inherited_variables_come_back(hip: HipHost, others: dict[str, str]) -> None:
    environment = {"ROCR_VISIBLE_DEVICES": "5,3", **others}
    code = 'out["taken"] = claim(1); out["set"] = variables(); safe_gpu.release_gpus(); out["after"] = variables()'
    set_ = dict(zip(VARIABLES, ["0", hip.uuids[3], "0"], strict=False))
    assert out_of_child(hip, code, **environment) == {"taken": [3], "set": set_, "after": environment}


def test_another_device_than_the_claimed_one_is_caught(hip: HipHost) -> None:
    """GPUs without a UUID are named by index, and HIP has another order than the kernel."""
    for file in hip.kfd.glob("topology/nodes/*/properties"):
        file.write_text(re.sub("unique_id .*", "unique_id 0", file.read_text()))
    assert out_of_child(hip, "out = [claim(1), variables()]; safe_gpu.release_gpus()") == [
        [0],
        dict.fromkeys(VARIABLES[:3], "0"),
    ]
    hip.uuids = ["GPU-XX"] * 8
    hip.describe(order=[7, 6, 5, 4, 3, 2, 1, 0])
    said = "HIP device 0 is /0000:c8:00.0, but GPU 0 (AMD-0000:c1:00.0-0) was claimed"
    refused(hip, "out = claim(1)", "WrongDeviceError", said)


def test_hip_that_is_initialised_or_refuses(hip: HipHost) -> None:
    initialize = "ctypes.CDLL('libamdhip64.so').hipGetDeviceCount(ctypes.byref(ctypes.c_int())); "
    said = "HIP is already initialised in this process and sees 8 GPU(s)"
    refused(hip, initialize + "out = claim(1)", "CudaInitializedError", said)
    assert out_of_child(hip, initialize + "out = claim(2)", ROCR_VISIBLE_DEVICES="5,3") == [5, 3]
    hip.fail("hipMalloc", 2)
    said = "hipMalloc failed with hipErrorOutOfMemory (2)"
    refused(hip, "out = claim(1)", "PlaceholderError", said, "HipPlaceholder")


def test_a_host_without_hip(hip: HipHost, tmp_path: Path) -> None:
    libraries = str(without_hip(tmp_path))
    refused(hip, "out = claim(1)", "NoDriverError", "HIP", LD_LIBRARY_PATH=libraries)
    assert out_of_child(hip, "out = claim(1, NoPlaceholder())", LD_LIBRARY_PATH=libraries) == [0]


# Intel GPUs, over a saved sysfs tree


MASK, HIERARCHY, ORDER = "ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY", "ZE_ENABLE_PCI_ID_DEVICE_ORDER"
START = """
def ze(): return {name: value for name, value in os.environ.items() if name.startswith(("ZE_", "ONEAPI_"))}
"""


@pytest.fixture
def intel(tmp_path: Path) -> IntelHost:
    """An integrated GPU, and two cards of two tiles. Their names are for this test alone on the whole machine."""
    host = IntelHost(tmp_path)
    domain = f"{int.from_bytes(os.urandom(4), 'big') | 1 << 28:08x}"
    host.gpu("0000:00:02.0", 0x46A6, driver="i915")
    for bus in (0x18, 0x42):
        host.gpu(f"{domain}:{bus:02x}:00.0", tiles=2)
    return host


def test_a_claim_takes_a_card_with_all_its_tiles_and_puts_nothing_on_it(intel: IntelHost) -> None:
    code = """
out = [claim(1, vendor="intel", only="2"), ze(), safe_gpu.gpu_owner.placeholders]
safe_gpu.release_gpus()
out.append(ze())
"""
    assert out_of_child(intel, START + code) == [[2], {MASK: "3,4", HIERARCHY: "FLAT", ORDER: "1"}, [], {}]
    for hierarchy, mask, left in (("COMPOSITE", "2", "2"), ("FLAT", "2,3,4", "3,4")):
        taken, ze = out_of_child(intel, START + "out = [claim(1), ze()]", **{HIERARCHY: hierarchy, MASK: mask})
        assert (taken, ze[MASK]) == ([2], left), "what is inherited is the limit"


def test_a_mask_without_a_hierarchy_is_refused_with_the_way_out(intel: IntelHost) -> None:
    said = (f"{MASK}=1,2 is ambiguous", f"set {HIERARCHY} and {ORDER}=1")
    refused(intel, "out = claim(1)", "UnsatisfiableRequestError", *said, **{MASK: "1,2"})


def test_a_claim_says_once_that_others_cannot_be_seen(intel: IntelHost) -> None:
    intel.private(1)
    code = """
import io, logging
text = io.StringIO()
logging.basicConfig(stream=text, force=True)
out["taken"], out["told"] = claim(2), text.getvalue().count("to root only")
"""
    assert out_of_child(intel, code) == {"taken": [1, 2], "told": 1}


# CUDA initialised too early or in the wrong order, and what a claim asks NVML


def holders(gpus: Any) -> list[str]:
    return sorted(path.parent.name for path in gpus.directory.glob("procs/*/[0-9]*"))


def mix(gpus: Any) -> None:
    """A slow GPU first on the bus, then two fast ones: CUDA's own order is 1, 2, 0."""
    gpus.write({"name": "NVIDIA_T4", "speed": 1}, {"name": "NVIDIA_A100", "speed": 9}, {"speed": 8})


def test_cuda_initialized_before_the_claim_is_refused_before_anything_is_touched(fake_gpus, tmp_path: Path) -> None:
    code = "initialize(); out = claim(1); assert not variables()"
    said, state = ("8 GPU(s)", "call claim_gpus() before"), tmp_path / "state"
    found = refused(fake_gpus, code, "CudaInitializedError", *said, SAFE_GPU_DIR=str(state))
    assert (found["visible"], state.exists(), holders(fake_gpus)) == (fake_gpus.uuids, False, [])


def test_cuda_initialized_is_fine_where_a_claim_takes_what_it_sees(fake_gpus: Any) -> None:
    for arguments, kind in (("2", "CudaInitializedError"), ("1, only=4", "UnsatisfiableRequestError")):
        refused(fake_gpus, f"initialize(); out = claim({arguments})", kind, CUDA_VISIBLE_DEVICES="3")
    assert holders(fake_gpus) == []
    for visible, arguments in (("3", "1"), ("2,0", "2"), ("2,0", "2, NoPlaceholder()")):
        taken = out_of_child(fake_gpus, f"initialize(); out = claim({arguments})", CUDA_VISIBLE_DEVICES=visible)
        assert taken == [int(number) for number in visible.split(",")]


def test_with_cuda_initialized_its_own_order_counts_and_a_fence_that_is_ignored(fake_gpus: Any) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "3", "SAFE_GPU_FENCE": "ignore"}
    assert out_of_child(fake_gpus, "initialize(); out = claim(1)", **environment) == [3]
    refused(fake_gpus, "initialize(); out = claim(2)", "CudaInitializedError", **environment)
    mix(fake_gpus)
    assert out_of_child(fake_gpus, "initialize(); out = claim(3)") == [1, 2, 0]


def test_a_notebook_claims_the_same_again_after_release_and_is_told_who_initialized_cuda(fake_gpus: Any) -> None:
    start = "assert claim(1, only=5) == [5]; safe_gpu.release_gpus(); "
    assert out_of_child(fake_gpus, start + "out = claim(1)") == [5]
    parts = ("placeholder of an earlier claim (CudaPlaceholder)", "one claim of 2", "NoPlaceholder()", "release_")
    found = refused(fake_gpus, start + "out = claim(2); assert not variables()", "CudaInitializedError", *parts)
    assert found["visible"] == [fake_gpus.uuids[5]]
    said = "CUDA, already initialised in this process, limits this process to "
    refused(fake_gpus, start + "out = claim(1, only=4)", "UnsatisfiableRequestError", said)


def test_prepare_must_not_wake_cuda(fake_gpus: Any) -> None:
    code = "CudaPlaceholder.prepare = lambda self: initialize()\n"
    code += "out = claim(1, CudaPlaceholder()); assert not variables()"
    refused(fake_gpus, code, "CudaInitializedError", "prepare()")


def test_a_placeholder_that_moves_devices_is_noticed(fake_gpus: Any) -> None:
    mix(fake_gpus)
    zero, one, two = fake_gpus.uuids
    for tampering, number, only, told in (
        ('["CUDA_DEVICE_ORDER"] = "FASTEST_FIRST"', 1, "0", {"device_no": 0, "expected": zero, "actual": one}),
        ('["CUDA_VISIBLE_DEVICES"] += ",1"', 1, "2", {"device_no": 1, "expected": "", "actual": one}),  # more
        ('["CUDA_VISIBLE_DEVICES"] = "1"', 2, "1,2", {"device_no": 1, "expected": two, "actual": ""}),  # fewer
    ):
        code = f"""
def tamper(device_no):
    os.environ{tampering}
    initialize()
out = claim({number}, tamper, only={only!r})
assert safe_gpu.get_free_gpus() == ["0", "1", "2"]
"""
        assert refused(fake_gpus, code, "WrongDeviceError", told["expected"], told["actual"]) == told


@pytest.mark.parametrize("index", range(3))
def test_the_claimed_gpu_is_the_one_that_cuda_opens_on_mixed_hosts(fake_gpus: Any, index: int) -> None:
    mix(fake_gpus)
    uuid = fake_gpus.uuids[index]
    by_index = {"CUDA_VISIBLE_DEVICES": str(index), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    for visible_as, values in (("index", by_index), ("uuid", {"CUDA_VISIBLE_DEVICES": uuid})):
        code = f"taken = claim(1, only={index}, visible_as={visible_as!r})\n"
        code += "out = [taken, safe_gpu.gpu_owner.placeholders[0].uuid, variables()]"
        assert out_of_child(fake_gpus, code) == [[index], uuid, values]


def test_an_ambiguous_fence_is_refused_with_the_way_out(fake_gpus: Any) -> None:
    mix(fake_gpus)
    fence = {"CUDA_VISIBLE_DEVICES": "0"}
    assert out_of_child(fake_gpus, "out = claim(1)", **fence, CUDA_DEVICE_ORDER="PCI_BUS_ID") == [0]
    assert out_of_child(fake_gpus, "out = claim(1, NoPlaceholder())", **fence, SAFE_GPU_FENCE="ignore") == [0]
    parts = ("CUDA_VISIBLE_DEVICES=0 is ambiguous", "CUDA_DEVICE_ORDER=PCI_BUS_ID", "SAFE_GPU_FENCE=ignore")
    refused(fake_gpus, "out = claim(1)", "UnsatisfiableRequestError", *parts, **fence)


def test_a_mig_instance_is_claimed_by_its_uuid(fake_gpus: Any) -> None:
    instances = [fake_gpus.uuid("MIG", number) for number in range(2)]
    divided = {"mig": 1, "instances": ",".join(instances), "imem": 40 << 30}
    fake_gpus.write(divided, {}, {})
    taken, values = out_of_child(fake_gpus, "out = [claim(2), variables()]")
    assert (taken, values["CUDA_VISIBLE_DEVICES"]) == ([1, 2], ",".join(fake_gpus.uuids[1:])), "whole ones"
    fake_gpus.write(divided)
    refused(fake_gpus, "out = claim(2)", "UnsatisfiableRequestError", "one MIG instance")
    code = "out = [claim(1), variables(), safe_gpu.gpu_owner.placeholders[0].uuid, safe_gpu.get_free_gpus()]"
    assert out_of_child(fake_gpus, code) == [[0], {"CUDA_VISIBLE_DEVICES": instances[0]}, instances[0], ["0:1"]]


@pytest.mark.parametrize("option", ["ctx_error", "alloc_error", "cuda_init_error"])
def test_a_context_that_fails_leaves_nothing(fake_gpus: Any, option: str) -> None:
    fake_gpus.options(**{option: 2})
    code = "out = claim(2); assert not variables() and len(safe_gpu.get_free_gpus()) == 8"
    found = refused(fake_gpus, code, "PlaceholderError", "(2)")
    assert found == {"device_no": 0, "uuid": fake_gpus.uuids[0]}
    assert holders(fake_gpus) == []


def test_a_driver_without_cuda_or_without_gpus_is_told_before_any_lock(fake_gpus: Any, tmp_path: Path) -> None:
    nvml, state = "libnvidia-ml.so.1", str(tmp_path / "state")
    (tmp_path / nvml).symlink_to(Path(fake_gpus.env["LD_LIBRARY_PATH"]) / nvml)
    (tmp_path / "libcuda.so.1").touch()  # the loader stops here and looks no further
    refused(fake_gpus, "out = claim(1)", "NoDriverError", SAFE_GPU_DIR=state, LD_LIBRARY_PATH=str(tmp_path))
    fake_gpus.write()
    refused(fake_gpus, "out = claim(1)", "NoDriverError", "--gpus all", SAFE_GPU_DIR=state)
    assert not os.path.exists(state)


# What NVML is asked, call by call: on a real driver each is a system call or worse


# Claims twice, and says which NVML functions were called before the GPUs were held and after, each time.
CLAIMS = """
import logging
from safe_gpu.claim import polls

polls.RECENT = 1e9  # on a busy machine a poll may be old by the time it is used
calls, out = os.path.join(os.environ["FAKE_GPU_DIR"], "calls"), []

def note(*_):
    with open(calls) as file:
        out.append(file.read().split())
    os.unlink(calls)

logger = logging.getLogger("safe_gpu")
logger.setLevel(logging.INFO)
logger.addFilter(lambda record: record.getMessage() == "lock released" and note())
for _ in range(2):
    owner = safe_gpu.claim_gpus(1, timeout=0)
    note()
    owner.release_gpus()
    assert not os.path.exists(calls), "a release asks nothing"
"""


def calls(gpus: Any) -> list[Counter[str]]:
    """Those of a first claim before and after its GPUs are held, and those of a second one."""
    gpus.options(log=1)
    phases: list[list[str]] = out_of_child(gpus, CLAIMS)
    assert len(phases) == 4
    return [Counter(name.partition("_v")[0].removeprefix("nvml") for name in phase) for phase in phases]


def test_what_is_asked_about_one_gpu_of_eight(fake_gpus: Any) -> None:
    fake_gpus.set(8, mig=0)
    before, after, *again = calls(fake_gpus)
    for name in ("GraphicsRunningProcesses", "MPSComputeRunningProcesses", "P2PStatus"):
        assert not before[f"DeviceGet{name}"] + after[f"DeviceGet{name}"], name  # nothing that no claim decides by
    for name in ("UtilizationRates", "FieldValues", "RemappedRows"):  # whether a GPU is ill: only the claimed one
        assert (before[f"DeviceGet{name}"], after[f"DeviceGet{name}"]) == (0, 1), name
    assert set(before.values()) == {1, 8}, "each question once, of the host or of each GPU"
    for name in ("MemoryInfo", "ComputeRunningProcesses", "MigMode"):
        assert 2 <= after[f"DeviceGet{name}"] <= 3, name  # the second and the third poll are about the claimed GPU only
    for uuid in fake_gpus.uuids[:7]:
        fake_gpus.process(uuid, os.getpid(), 1 << 30)
    _, held, _, held_again = calls(fake_gpus)
    assert held == held_again == after == again[1], "others on other GPUs change nothing"


def test_descriptors_and_threads_are_as_before(fake_gpus: Any) -> None:
    code = """
out = []
for _ in range(4):
    claim(1); safe_gpu.release_gpus()
    claim(9)
    safe_gpu.get_free_gpus()
    out.append([os.listdir("/proc/self/fd"), threading.active_count()])
"""
    first, *others = out_of_child(fake_gpus, code)
    assert others == [first] * 3
