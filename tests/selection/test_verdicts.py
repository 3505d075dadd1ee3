"""Which devices count as free, what could ever be free, and who is told why not."""

import math
import time
from typing import Any

import pytest

from safe_gpu.errors import UnsatisfiableRequestError
from safe_gpu.gpus.devices import (
    ComputeMode,
    Gpu,
    GpuFault,
    GpuProcess,
    GpuVerdict,
    Holder,
    HostSnapshot,
    ProcessKind,
    VisibleLimit,
    recent_faults,
)
from safe_gpu.runtimes import visible_devices as visibility
from safe_gpu.selection.choice import can_be_met_by_releases, candidates, check_possible
from safe_gpu.selection.request import Selection, parse_request
from safe_gpu.selection.values import model_pattern, names_device, unknown_names
from safe_gpu.selection.verdicts import fence_hint, how_misread, judge

GIB = 1 << 30
ANY = Selection()
A100 = "NVIDIA A100-SXM4-80GB"


def gpu(index: int = 0, **changes: Any) -> Gpu:
    used = changes.get("memory_used", 0)
    plain = Gpu(index, f"GPU-{index:x}0000000", A100, memory_total=80 * GIB, memory_used=0, memory_free=80 * GIB - used)
    return plain._replace(**changes)


def host(count: int = 8, **changed: Gpu) -> HostSnapshot:
    """``count`` GPUs, those given as ``_3=gpu(3, ...)`` in place of the plain ones."""
    return HostSnapshot(tuple(changed.get(f"_{index}", gpu(index)) for index in range(count)))


def mig_host() -> HostSnapshot:
    parent = gpu(0, mig_enabled=True)
    instances = (
        gpu(0, uuid=f"MIG-{number}", name="NVIDIA A100 MIG 1g.10gb", mig_parent=parent.uuid, mig_instance=number)
        for number in range(3)
    )
    return HostSnapshot((parent, *instances, gpu(1)))


def verdict_on(device: Gpu, request: Selection = ANY, beside: int = 1, **options: Any) -> GpuVerdict:
    """The verdict on one device that is not alone in its host."""
    others = tuple(gpu(device.index + number) for number in range(1, beside + 1))
    return judge(HostSnapshot((device, *others)), request, claimed=options.pop("claimed", {}), **options)[0]


people = {
    4242: ("alice", "python train.py"),
    4300: ("bob", "/opt/bin/sim -x"),
    7: ("root", "/usr/bin/nvidia-cuda-mps-server"),
}.get


def process(
    pid: int = 4242, gib: float | None = 2, kind: str = ProcessKind.COMPUTE, name: str | None = None
) -> GpuProcess:
    return GpuProcess(pid, kind, None if gib is None else int(gib * GIB), name)


DESKTOP = process(9, 3, ProcessKind.GRAPHICS)


def test_what_stands_in_the_way() -> None:
    for device, request_, state, words in (
        (gpu(processes=(process(gib=31.2),)), ANY, "busy", "process 4242 (alice, python train.py) uses 31.2 GiB"),
        (gpu(processes=(process(99),)), ANY, "busy", "process 99 uses 2 GiB"),  # a pid that does not resolve
        (gpu(processes=(process(kind=ProcessKind.MPS),)), ANY, "busy", "process 4242"),
        (gpu(processes=(process(), process(4300, 9))), ANY, "busy", "(bob, /opt/bin/sim -x) uses 9 GiB, and 1 more"),
        (gpu(processes=None, process_error="Timeout"), ANY, "busy", "process list failed: Timeout"),
        (gpu(compute_mode=ComputeMode.PROHIBITED), ANY, "unusable", "PROHIBITED"),
        (gpu(memory_used=12 * GIB), ANY, "busy", "12 GiB of memory in use by no process"),
        (gpu(memory_used=5 * GIB, processes=(DESKTOP,), display_active=True), ANY, "busy", "2 GiB of memory in use"),
        (gpu(memory_used=5 * GIB, processes=(DESKTOP,)), ANY, "busy", "process 9 uses 3 GiB"),
        (gpu(memory_used=GIB), parse_request(min_memory=80 * GIB), "busy", "79 GiB of memory free"),
        (gpu(memory_free=None), parse_request(min_memory=GIB), "busy", "unknown"),
        (gpu(), parse_request(min_memory=81 * GIB), "outside", "80 GiB in all"),
        (gpu(), parse_request(only=("1", "2")), "outside", "only=1,2"),
        (gpu(), parse_request(exclude=("1", "0")), "outside", "exclude=1,0"),
        (gpu(), parse_request(model="H100"), "outside", "A100-SXM4-80GB"),
        (gpu(mig_enabled=True), ANY, "unusable", "MIG mode is on"),
        (gpu(lost=True), ANY, "unusable", "lost"),
        (gpu(processes_supported=False), ANY, "unusable", "cannot list processes"),
    ):
        verdict = verdict_on(device, request_, describe=people)
        assert verdict.state == state
        assert words in verdict.reason
        assert not verdict.free


def test_what_does_not() -> None:
    for device in (
        gpu(),
        gpu(processes=(process(99, name="nvidia-cuda-mps-server"),)),
        gpu(memory_used=40 * GIB, processes=(process(9, None, ProcessKind.GRAPHICS),)),
    ):
        assert verdict_on(device, describe=people) == GpuVerdict(device, "free")


def test_a_lease_says_who_and_since_when() -> None:
    holder = Holder(4242, "alice", "1717", "python train.py", 1_700_000_000.0)
    verdict = verdict_on(gpu(), claimed={gpu().uuid: holder})
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1_700_000_000))
    assert verdict.state == "claimed"
    assert verdict.reason == f"claimed by process 4242 (alice, job 1717, python train.py) since {since}"
    assert (verdict.pid, verdict.user) == (4242, "alice")
    assert verdict_on(gpu(), claimed={gpu().uuid: Holder()}).reason == "claimed"
    busy = verdict_on(gpu(processes=(process(),)), describe=people)
    assert (busy.pid, busy.user) == (4242, "alice")
    assert verdict_on(gpu(), claimed={gpu(1).uuid: holder}).free


def test_processes_of_ones_own_are_disregarded() -> None:
    ours = gpu(memory_used=70 * GIB, processes=(process(11, 69),))
    assert not verdict_on(ours).free
    assert verdict_on(ours, own={11}).free
    assert verdict_on(ours, parse_request(min_memory=79 * GIB), own={11}).free
    assert not verdict_on(ours, own={12}).free
    both = ours._replace(processes=(process(11, 40), process(4242, 29)))
    assert verdict_on(both, own={11}).pid == 4242


def test_an_outer_claims_processes_are_disregarded_on_its_own_gpus_only() -> None:
    snapshot = host(2, _0=gpu(0, processes=(process(11),)), _1=gpu(1, processes=(process(11),)))
    verdicts = judge(snapshot, ANY, claimed={}, explained={gpu(0).uuid: (11,)})
    assert [verdict.state for verdict in verdicts] == ["free", "busy"]


def test_a_single_gpu_with_a_display_is_shared() -> None:
    used = gpu(display_active=True, memory_used=4 * GIB, processes=(process(),), processes_supported=False)
    snapshot = HostSnapshot((used,))
    (verdict,) = judge(snapshot, ANY, claimed={used.uuid: Holder(1)})
    assert (verdict.state, verdict.reason, verdict.free) == ("display", "", True)
    check_possible(snapshot, ANY)
    assert candidates(snapshot, ANY) == (used,)
    assert not judge(snapshot, parse_request(min_memory=79 * GIB), claimed={})[0].free
    assert not judge(HostSnapshot((used._replace(display_active=False),)), ANY, claimed={})[0].free


def test_the_fence() -> None:
    verdicts = judge(host(), ANY, claimed={}, visible_limit=visibility.parse_cuda("2,5", host()))
    assert [verdict.gpu.index for verdict in verdicts if verdict.free] == [2, 5]
    assert "CUDA_VISIBLE_DEVICES=2,5" in verdicts[0].reason


def test_what_this_host_can_never_do() -> None:
    for snapshot, request_, visible_limit, words in (
        (host(), Selection(9), None, ["9 GPUs are asked for", "this host has only 8 NVIDIA GPUs"]),
        (host(0), Selection(1), None, ["1 GPU is asked for", "this host has none"]),
        (host(8, _3=gpu(3, lost=True)), Selection(8), None, ["only 7 of the 8 NVIDIA GPUs", "GPU 3: the driver lost"]),
        (host(), parse_request(model="H100"), None, ["none fits", f"GPU 0-7: {A100} does not match model='H100'"]),
        (host(), parse_request(3, only=("0", "1")), None, ["only 2 of the 8", "only=0,1"]),
        (host(2), parse_request(2, exclude=("1",)), None, ["only 1 of the 2", "GPU 1: listed in exclude=1"]),
        (host(), parse_request(min_memory=100 * GIB), None, ["80 GiB in all", "100 GiB asked for"]),
        (host(), parse_request(only=("8",)), None, ["only=8 names no single NVIDIA GPU of this host", "has GPU 0-7"]),
        (host(), parse_request(exclude=("GPU-",)), None, ["exclude=GPU- names no single NVIDIA GPU"]),
        (mig_host(), Selection(2), None, ["one MIG instance", "ask for 1"]),
        (host(1, _0=gpu(compute_mode=ComputeMode.PROHIBITED)), ANY, None, ["PROHIBITED", "nvidia-smi -c DEFAULT"]),
        (host(), Selection(2), "0", ["CUDA_VISIBLE_DEVICES=0 limits this process to 1 of 8 GPUs; 7 others are free"]),
        (host(), Selection(1), "", ["='' (set, but empty) limits", "0 of 8 GPUs", "SAFE_GPU_FENCE=ignore"]),
        (host(2, _0=gpu(processes=(process(),))), Selection(2), "1", ["none of the others are free"]),
    ):
        with pytest.raises(UnsatisfiableRequestError) as caught:
            check_possible(snapshot, request_, visibility.parse_cuda(visible_limit, snapshot))
        for word in words:
            assert word in str(caught.value)
        assert caught.value.value is not None


def test_leases_beyond_the_fence_are_not_called_free() -> None:
    claimed = {gpu(index).uuid: Holder(1) for index in range(3, 8)}
    visible_limit = VisibleLimit("0", (gpu(0).uuid,))
    with pytest.raises(UnsatisfiableRequestError, match="2 others are free"):
        check_possible(host(), Selection(2), visible_limit, claimed=lambda: claimed)
    assert fence_hint(judge(host(), ANY, claimed=claimed), visible_limit).endswith("1 of 8 GPUs; 2 others are free")


def test_no_hint_where_the_fence_leaves_nothing_out() -> None:
    verdicts = judge(host(2), ANY, claimed={})
    assert fence_hint(verdicts, None) == fence_hint(verdicts, visibility.parse_cuda("1,0", host(2))) == ""


def test_a_variable_that_is_no_list() -> None:
    """What CUDA makes of it is PyTorch's reading, and that of the manual."""
    for value, seen in (
        *((value, "GPU 0") for value in ("0 1", "0;1", "0-1", "0\u3001 1", "0,,1", "0,cuda:1")),
        *((value, "no GPU") for value in ("cuda:0", "GPU 0", "gpu-000000", "[0]", "all", ",0", "0,0", "99", "-1,0")),
        *((value, "GPU 0,1") for value in ("0,1 2", "0,1,GPU-000002")),
        ("GPU-000001;GPU-000002", "no GPU"),
        ("GPU-000001,2", "GPU 1"),
        *((value, "") for value in ("0", "0,1,", " 0, 1 ", "+0", "-1", "", "none", "GPU-000001, GPU-000002")),
    ):
        snapshot = HostSnapshot(tuple(gpu(index, uuid=f"GPU-00000{index}") for index in range(8)))
        with pytest.raises(UnsatisfiableRequestError) as caught:
            check_possible(snapshot, Selection(3), visibility.parse_cuda(value, snapshot))
        said = (
            f"(CUDA reads {value!r} as {seen}: name GPUs of this host by index or UUID, each once, with commas between)"
        )
        assert (said in str(caught.value)) == bool(seen)
        assert ("CUDA reads" in str(caught.value)) == bool(seen)


def test_other_libraries_read_lists_too() -> None:
    for limit, said in (
        (VisibleLimit("0 1", name="ROCR_VISIBLE_DEVICES", library="HIP"), "HIP reads '0 1' as no GPU"),
        (
            VisibleLimit("0,1 HIP_VISIBLE_DEVICES=0 1", name="ROCR_VISIBLE_DEVICES", library="HIP"),
            "HIP reads '0,1 HIP_",
        ),
        (VisibleLimit("0,1 HIP_VISIBLE_DEVICES=0", (A100,), name="ROCR_VISIBLE_DEVICES", library="HIP"), ""),
        (VisibleLimit("0.0,1.1", (A100,), name="ZE_AFFINITY_MASK", library="Level Zero"), ""),
        (VisibleLimit("0 1", frozen=True), ""),
    ):
        assert how_misread(limit, host().gpus).startswith(said)
        assert bool(said) == bool(how_misread(limit, host().gpus))


def test_candidates() -> None:
    snapshot = host(4, _1=gpu(1, lost=True), _2=gpu(2, processes=(process(),)))
    assert [device.index for device in candidates(snapshot, ANY)] == [0, 2, 3]
    assert [device.index for device in candidates(snapshot, parse_request(exclude=("0",)))] == [2, 3]
    assert [device.index for device in candidates(snapshot, ANY, visibility.parse_cuda("0", snapshot))] == [0]
    assert [device.label for device in candidates(mig_host(), Selection(1))] == ["0:0", "0:1", "0:2", "1"]
    assert [device.label for device in candidates(mig_host(), Selection(2))] == ["1"]


def test_what_releases_alone_can_satisfy() -> None:
    snapshot = host(4, _1=gpu(1, processes=(process(),)), _2=gpu(2, processes=(process(),)))
    verdicts = judge(snapshot, ANY, claimed={gpu(0).uuid: Holder(1)})  # claimed, busy, busy, free
    everything = {device.uuid for device in snapshot.gpus}
    assert can_be_met_by_releases(everything, Selection(2), verdicts)
    assert not can_be_met_by_releases(everything, Selection(3), verdicts)
    assert can_be_met_by_releases(everything, Selection(3), verdicts, leaving={gpu(2).uuid})
    assert not can_be_met_by_releases({gpu(1).uuid, gpu(3).uuid}, Selection(2), verdicts)
    instances = {device.uuid for device in mig_host().gpus if device.is_mig_instance}
    assert not can_be_met_by_releases(instances, Selection(2), judge(mig_host(), ANY, claimed={}))


def test_models() -> None:
    for pattern, fits in (
        *((fit, True) for fit in ("a100", A100, "NVIDIA A100*", "*80gb", "A1?0*", "A[12]00*")),
        *((other, False) for other in ("H100", "A100*40GB", "100*", "A100?")),
    ):
        assert bool(model_pattern(pattern, [A100]).match(A100)) is fits


MODELS = (
    ("NVIDIA A10", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "NVIDIA A10G"),
    ("NVIDIA L4", "NVIDIA L40", "NVIDIA L40S", "Tesla T4", "NVIDIA T400 4GB"),
    ("Quadro RTX 6000", "NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX A6000", "NVIDIA GeForce RTX 4090 D"),
    ("NVIDIA H100 NVL", "NVIDIA H200", "NVIDIA GH200 480GB", "AMD Instinct MI250", "AMD Instinct MI250X"),
)


def test_a_model_is_no_part_of_another_that_the_host_has() -> None:
    for host, text, meant in (
        (0, "A10", [0]),
        (0, "A100", [1, 2]),
        (0, "A10*", [0, 1, 2, 3]),
        (1, "L4", [0]),
        (3, "A10", []),
    ):
        snapshot = HostSnapshot(tuple(gpu(index, name=name) for index, name in enumerate(MODELS[host])))
        asked = parse_request(1, model=text, prefer=f"nothing,{text}").resolved(snapshot)
        assert [one.gpu.index for one in judge(snapshot, asked, claimed={}) if one.free] == meant
        _, preferred = asked.preferred
        assert [index for index, name in enumerate(MODELS[host]) if preferred.match(name)] == meant


PARENT = Gpu(0, "GPU-aa", mig_enabled=True)
FIRST = Gpu(0, "MIG-11", mig_parent="GPU-aa", mig_instance=0)
SECOND = Gpu(0, "MIG-12", mig_parent="GPU-aa", mig_instance=1)
WHOLE = Gpu(10, "GPU-ab")
NAMED = HostSnapshot((PARENT, FIRST, SECOND, WHOLE))


def test_what_a_name_means() -> None:
    for name, meant in (
        ("0", (PARENT, FIRST, SECOND)),
        ("1", ()),
        ("0:1", (SECOND,)),
        ("GPU-aa", (PARENT, FIRST, SECOND)),
        ("MIG-11", (FIRST,)),
    ):
        assert tuple(gpu for gpu in NAMED.gpus if names_device(name, gpu)) == meant


def test_names_of_nothing_or_of_several() -> None:
    wrong = ("MIG-1", "GPU-", "1", "0:2", "GPU-x")
    assert unknown_names(("0", "0:1", "10", "GPU-ab", *wrong), NAMED) == wrong


# Notes on GPUs where a claim failed

DAY = 86400.0


def test_a_note_counts_for_a_day() -> None:
    for when, counts in (
        (1.0, True),
        (0.0, False),
        (2 * DAY - 1, True),
        (2 * DAY, False),
        (math.inf, False),
        (math.nan, False),
    ):
        faults = {"GPU-1": GpuFault(when, "bad")}
        assert recent_faults(faults, DAY) == (faults if counts else {})


def test_people_read_until_when_and_why() -> None:
    until = time.strftime("%a %H:%M", time.localtime(1000 + DAY))
    assert GpuFault(1000.0, "ECC").why_last == f"taken last until {until}, since a claim failed on it: ECC"
