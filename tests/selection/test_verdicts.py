"""Which devices count as free, for a whole claim or a share, what could ever be free, and who is told why not."""

import math
import re
import time
from typing import Any

import pytest
from support import api

MIB, GIB = 1 << 20, 1 << 30
TOTAL, RESERVED = 80 * GIB, GIB // 2
ANY = api.Selection()
A100 = "NVIDIA A100-SXM4-80GB"


def gpu(index: int = 0, **changes: Any) -> api.Gpu:
    used, total = changes.get("memory_used", 0), changes.get("memory_total", TOTAL)
    left = None if used is None or total is None else total - RESERVED - used
    plain = api.Gpu(index, f"GPU-{index:x}0000000", A100, memory_total=TOTAL, memory_used=0, counts_reserved=False)
    return plain._replace(**{"processes": (), "memory_free": left, **changes})


def host(count: int = 8, **changed: api.Gpu) -> api.HostSnapshot:
    """``count`` GPUs, those given as ``_3=gpu(3, ...)`` in place of the plain ones."""
    return api.HostSnapshot(tuple(changed.get(f"_{index}", gpu(index)) for index in range(count)))


def mig_host() -> api.HostSnapshot:
    parent = gpu(0, mig_enabled=True)
    instances = (
        gpu(0, uuid=f"MIG-{number}", name="NVIDIA A100 MIG 1g.10gb", mig_parent=parent.uuid, mig_instance=number)
        for number in range(3)
    )
    return api.HostSnapshot((parent, *instances, gpu(1)))


def verdict_on(
    device: api.Gpu, request: api.Selection = ANY, beside: api.Gpu | None = None, **options: Any
) -> api.GpuVerdict:
    """The verdict on one device that is not alone in its host."""
    snapshot = api.HostSnapshot((device, beside or gpu(device.index + 1)))
    return api.judge(snapshot, request, api.Known(**options))[0]


people = {
    4242: ("alice", "python train.py"),
    4300: ("bob", "/opt/bin/sim -x"),
    7: ("root", "/usr/bin/nvidia-cuda-mps-server"),
}.get


def process(
    pid: int = 4242, gib: float | None = 2, kind: str = api.ProcessKind.COMPUTE, **changes: Any
) -> api.GpuProcess:
    return api.GpuProcess(pid, kind, None if gib is None else int(gib * GIB))._replace(**changes)


def draws(pid: int, gib: float, **changes: Any) -> api.GpuProcess:
    return process(pid, gib, api.ProcessKind.GRAPHICS, **changes)


MUTE = gpu(memory_used=4 * MIB, processes=None, processes_supported=False)
ELSEWHERE = process(gib=1, elsewhere=True)


@pytest.mark.parametrize(
    ("device", "request_", "state", "words"),
    [
        (gpu(processes=(process(gib=31.2),)), ANY, "busy", "process 4242 (alice, python train.py) uses 31.2 GiB"),
        (gpu(processes=(process(99),)), ANY, "busy", "process 99 uses 2 GiB"),  # a pid that does not resolve
        (gpu(processes=(ELSEWHERE,)), ANY, "busy", "process 4242 (a number of another PID namespace) uses 1 GiB"),
        (gpu(processes=(process(), process(4300, 9))), ANY, "busy", "(bob, /opt/bin/sim -x) uses 9 GiB, and 1 more"),
        (gpu(processes=None, process_error="Timeout"), ANY, "busy", "process list failed: Timeout"),
        (gpu(compute_mode=api.ComputeMode.PROHIBITED), ANY, "unusable", "PROHIBITED"),
        (gpu(memory_used=12 * GIB), ANY, "busy", "12 GiB of memory in use by no process"),
        (gpu(memory_used=3 * GIB // 2, display_active=True), ANY, "busy", "1.5 GiB of memory in use by no process"),
        (gpu(memory_used=GIB), api.parse_request(min_memory=80 * GIB), "busy", "78.5 GiB of memory free"),
        (gpu(), api.parse_request(model="H100"), "outside", "A100-SXM4-80GB"),
        (gpu(mig_enabled=True), ANY, "unusable", "MIG mode is on"),
        (gpu(lost=True), ANY, "unusable", "lost"),
        (gpu(processes_supported=False), ANY, "unusable", "cannot list processes"),
        (gpu(processes=(process(99, name="nvidia-cuda-mps-server"),)), ANY, "free", ""),
        (gpu(memory_used=40 * GIB, processes=(draws(9, 0)._replace(memory_used=None),)), ANY, "free", ""),
    ],
)
def test_what_stands_in_the_way(device: api.Gpu, request_: api.Selection, state: str, words: str) -> None:
    verdict = verdict_on(device, request_, describe=people)
    assert (verdict.state, verdict.free) == (state, state == "free")
    assert words in verdict.reason
    assert bool(words) == bool(verdict.reason)


def test_of_two_reasons_the_one_that_lasts_longer_is_told() -> None:
    zero = gpu(0).uuid
    drained = api.Rules(closed={zero: "a fan is broken"})
    held = {zero: api.Holder(7)}
    in_use = gpu(processes=(process(),), utilization=90)
    assert verdict_on(gpu(lost=True), api.parse_request(exclude="0")).state == "unusable"
    assert verdict_on(gpu(), api.parse_request(exclude="0"), rules=drained).state == "outside"
    assert verdict_on(gpu(), claimed=held, rules=drained).state == "claimed", "who holds it says more"
    assert verdict_on(gpu(processes_supported=False), claimed=held).state == "claimed"
    assert verdict_on(in_use, api.parse_request(max_utilization=10)).pid == 4242
    desktop = api.HostSnapshot((gpu(display_active=True),))
    (verdict,) = api.judge(desktop, ANY, api.Known(rules=drained))
    assert (verdict.state, verdict.reason) == ("unusable", "a fan is broken")


def test_a_claimed_gpu_says_by_whom_and_since_when() -> None:
    holder = api.Holder(4242, "alice", "1717", "python train.py", 1_700_000_000.0)
    verdict = verdict_on(gpu(), claimed={gpu().uuid: holder})
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1_700_000_000))
    assert verdict.state == "claimed"
    assert verdict.reason == f"claimed by process 4242 (alice, job 1717, python train.py) since {since}"
    assert (verdict.pid, verdict.user) == (4242, "alice")
    assert verdict_on(gpu(), claimed={gpu().uuid: api.Holder()}).reason == "claimed"
    busy = verdict_on(gpu(processes=(process(),)), describe=people)
    assert (busy.pid, busy.user) == (4242, "alice")


def test_processes_of_ones_own_and_of_an_outer_claim_are_disregarded() -> None:
    ours = gpu(memory_used=70 * GIB, processes=(process(11, 70),))
    assert not verdict_on(ours).free
    assert verdict_on(ours, own={11}).free
    assert verdict_on(ours, api.parse_request(min_memory=78 * GIB), own={11}).free
    assert not verdict_on(ours, own={12}).free
    both = ours._replace(processes=(process(11, 40), process(4242, 30)))
    assert verdict_on(both, own={11}).pid == 4242
    for device, pids in ((gpu(processes=(process(11),)), (11,)), (gpu(memory_used=20 * GIB), ())):
        assert verdict_on(device, explained={device.uuid: pids}).free
        assert not verdict_on(device, explained={gpu(1).uuid: (1, *pids)}).free, "on its own GPUs only"


def test_a_single_gpu_with_a_display_is_shared() -> None:
    used = gpu(display_active=True, memory_used=4 * GIB, processes=(process(),), processes_supported=False)
    snapshot = api.HostSnapshot((used,))
    (verdict,) = api.judge(snapshot, ANY, api.Known({used.uuid: api.Holder(1)}))
    assert (verdict.state, verdict.reason, verdict.free) == ("display", "", True)
    api.check_possible(snapshot, ANY)
    assert api.candidates(snapshot, ANY) == (used,)
    assert not api.judge(snapshot, api.parse_request(min_memory=79 * GIB))[0].free
    assert not api.judge(api.HostSnapshot((used._replace(display_active=False),)), ANY)[0].free
    (verdict,) = api.judge(api.HostSnapshot((gpu(memory_used=70 * GIB, display_active=True),)), SHARE)
    assert (verdict.state, verdict.reason) == ("display", "9.5 GiB of memory free, 20 GiB asked for")


def test_cuda_visible_devices_limits_which_gpus_are_free() -> None:
    verdicts = api.judge(host(), ANY, api.Known(visible_limit=api.parse_cuda("2,5", host())))
    assert [verdict.gpu.index for verdict in verdicts if verdict.free] == [2, 5]
    assert "CUDA_VISIBLE_DEVICES=2,5" in verdicts[0].reason
    claimed = {gpu(index).uuid: api.Holder(1) for index in range(3, 8)}
    limit = api.VisibleLimit("0", (gpu(0).uuid,))
    with pytest.raises(api.UnsatisfiableRequestError, match="2 others are free"):
        api.check_possible(host(), api.Selection(2), limit, claimed=lambda: claimed)
    assert api.fence_hint(api.judge(host(), ANY, api.Known(claimed)), limit).endswith("1 of 8 GPUs; 2 others are free")
    verdicts = api.judge(host(), api.parse_request(only=("0",)))
    assert api.fence_hint(verdicts, limit) == "", "the others would not be chosen without the limit either"
    verdicts = api.judge(host(2), ANY)
    assert api.fence_hint(verdicts, None) == api.fence_hint(verdicts, api.parse_cuda("1,0", host(2))) == ""


SHARE = api.parse_request(share="20GiB")
EXCLUSIVE = gpu(compute_mode=api.ComputeMode.EXCLUSIVE_PROCESS)
UNKNOWN_MEMORY = gpu(memory_total=None, memory_used=None)
HALF = gpu(1, memory_total=TOTAL // 2, memory_free=TOTAL // 4)


@pytest.mark.parametrize(
    ("snapshot", "request_", "visible", "words"),
    [
        (host(), api.Selection(9), None, ["9 GPUs are asked for", "this host has only 8 NVIDIA GPUs"]),
        (host(0), api.Selection(1), None, ["1 GPU is asked for", "this host has none"]),
        (
            host(8, _3=gpu(3, lost=True)),
            api.Selection(8),
            None,
            ["only 7 of the 8 NVIDIA GPUs", "GPU 3: lost by the driver"],
        ),
        (host(), api.parse_request(model="H100"), None, ["none fits", f"GPU 0-7: {A100} does not match model='H100'"]),
        (host(2), api.parse_request(2, exclude=("1",)), None, ["only 1 of the 2", "GPU 1: listed in exclude=1"]),
        (host(), api.parse_request(min_memory=100 * GIB), None, ["80 GiB in all", "100 GiB asked for"]),
        (host(), api.parse_request(only=("8",)), None, ["only=8: there is no NVIDIA GPU 8 here (GPU 0-7)"]),
        (mig_host(), api.Selection(2), None, ["one MIG instance", "ask for 1"]),
        (host(1, _0=gpu(compute_mode=api.ComputeMode.PROHIBITED)), ANY, None, ["PROHIBITED", "nvidia-smi -c DEFAULT"]),
        (
            host(),
            api.Selection(2),
            "0",
            ["CUDA_VISIBLE_DEVICES=0 limits this process to 1 of 8 GPUs; 7 others are free"],
        ),
        (host(), api.Selection(1), "", ["='' (set, but empty) limits", "0 of 8 GPUs", "unset CUDA_VISIBLE_DEVICES"]),
        (host(1, _0=UNKNOWN_MEMORY), api.parse_request(min_memory=GIB), None, ["none fits", "leave min_memory= out"]),
        (host(1), api.parse_request(share="90GiB"), None, ["79.5 GiB can be shared, 90 GiB asked for"]),
        (host(1, _0=EXCLUSIVE), SHARE, None, ["EXCLUSIVE_PROCESS"]),
        (host(2, _1=HALF), api.parse_request(share="25%"), None, ["from 20 GiB to 79.5"]),
    ],
)
def test_what_this_host_can_never_do(
    snapshot: api.HostSnapshot, request_: api.Selection, visible: str | None, words: list[str]
) -> None:
    with pytest.raises(api.UnsatisfiableRequestError) as caught:
        api.check_possible(snapshot, request_.resolved(snapshot), api.parse_cuda(visible, snapshot))
    for word in words:
        assert word in str(caught.value)
    assert caught.value.value is not None


def test_a_variable_that_is_no_list() -> None:
    """What CUDA makes of it is PyTorch's reading, and that of the manual."""
    for value, seen in (
        *((value, "GPU 0") for value in ("0 1", "0;1", "0\u3001 1", "0,,1", "0,cuda:1")),
        *((value, "no GPU") for value in ("cuda:0", "gpu-000000", "[0]", ",0", "0,0", "99", "-1,0")),
        *((value, "GPU 0,1") for value in ("0,1 2", "0,1,GPU-000002")),
        ("GPU-000001;GPU-000002", "no GPU"),
        *((value, "") for value in ("0", "0,1,", " 0, 1 ", "+0", "-1", "", "none", "GPU-000001, GPU-000002")),
    ):
        snapshot = api.HostSnapshot(tuple(gpu(index, uuid=f"GPU-00000{index}") for index in range(8)))
        with pytest.raises(api.UnsatisfiableRequestError) as caught:
            api.check_possible(snapshot, api.Selection(3), api.parse_cuda(value, snapshot))
        said = (
            f"(CUDA reads {value!r} as {seen}: name GPUs of this host by index or UUID, each once, with commas between)"
        )
        assert (said in str(caught.value)) == ("CUDA reads" in str(caught.value)) == bool(seen)


def test_other_libraries_read_lists_too() -> None:
    hip = api.VisibleLimit("0 1", name="ROCR_VISIBLE_DEVICES", library="HIP")
    for limit, said in (
        (hip, "HIP reads '0 1' as no GPU"),
        (hip._replace(value="0,1 HIP_VISIBLE_DEVICES=0 1"), "HIP reads '0,1 HIP_"),
        (api.VisibleLimit("0.0,1.1", (A100,), name="ZE_AFFINITY_MASK", library="Level Zero"), ""),
        (api.VisibleLimit("0 1", frozen=True), ""),
    ):
        assert api.how_misread(limit, host().gpus).startswith(said)
        assert bool(said) == bool(api.how_misread(limit, host().gpus))


def test_candidates() -> None:
    snapshot = host(4, _1=gpu(1, lost=True), _2=gpu(2, processes=(process(),)))
    assert [device.index for device in api.candidates(snapshot, ANY)] == [0, 2, 3]
    assert [device.index for device in api.candidates(snapshot, api.parse_request(exclude=("0",)))] == [2, 3]
    assert [device.index for device in api.candidates(snapshot, ANY, api.parse_cuda("0", snapshot))] == [0]
    assert [device.label for device in api.candidates(mig_host(), api.Selection(1))] == ["0:0", "0:1", "0:2", "1"]
    assert [device.label for device in api.candidates(mig_host(), api.Selection(2))] == ["1"]
    request = api.parse_request(1, min_memory=GIB)
    for unknown in (UNKNOWN_MEMORY, gpu(memory_used=None)):  # it is not waited for
        assert not api.candidates(api.HostSnapshot((unknown,)), request)
        api.check_possible(api.HostSnapshot((unknown, gpu(1))), request)


def test_what_releases_alone_can_satisfy() -> None:
    snapshot = host(4, _1=gpu(1, processes=(process(),)), _2=gpu(2, processes=(process(),)))
    verdicts = api.judge(snapshot, ANY, api.Known({gpu(0).uuid: api.Holder(1)}))  # claimed, busy, busy, free
    everything = {device.uuid for device in snapshot.gpus}
    assert api.can_be_met_by_releases(everything, api.Selection(2), verdicts)
    assert not api.can_be_met_by_releases(everything, api.Selection(3), verdicts)
    assert api.can_be_met_by_releases(everything, api.Selection(3), verdicts, leaving={gpu(2).uuid})
    instances = {device.uuid for device in mig_host().gpus if device.is_mig_instance}
    assert not api.can_be_met_by_releases(instances, api.Selection(2), api.judge(mig_host(), ANY))


# Names


def test_a_model_is_no_part_of_another_that_the_host_has() -> None:
    for pattern, fits in (("a100", True), ("NVIDIA A100*", True), ("100*", False), ("A100?", False)):
        assert bool(api.model_pattern(pattern, [A100]).match(A100)) is fits
    models = "NVIDIA A10", A100, "NVIDIA A100 80GB PCIe", "NVIDIA A10G", "NVIDIA L4", "NVIDIA L40", "Tesla T4"
    snapshot = api.HostSnapshot(tuple(gpu(index, name=name) for index, name in enumerate(models)))
    for text, meant in (("A10", [0]), ("A100", [1, 2]), ("A10*", [0, 1, 2, 3]), ("L4", [4]), ("T4", [6])):
        asked = api.parse_request(1, model=text, prefer=f"nothing,{text}").resolved(snapshot)
        assert [one.gpu.index for one in api.judge(snapshot, asked) if one.free] == meant
        _, preferred = asked.preferred
        assert [index for index, name in enumerate(models) if preferred.match(name)] == meant


def test_what_a_name_means() -> None:
    parent, *instances, other = mig_host().gpus
    for name, meant in (
        ("0", (parent, *instances)),
        ("0:1", (instances[1],)),
        (parent.uuid, (parent, *instances)),
        ("MIG-1", (instances[1],)),
    ):
        assert tuple(device for device in mig_host().gpus if api.names_device(name, device)) == meant
    wrong = ("MIG-", "GPU-", "2", "0:3", "GPU-x")
    assert api.unknown_names(("0", "0:1", "1", other.uuid, *wrong), mig_host()) == wrong


# Notes on GPUs where a claim failed

DAY = 86400.0


def test_a_note_counts_for_a_day() -> None:
    for when, counts in ((1.0, True), (0.0, False), (2 * DAY - 1, True), (2 * DAY, False), (math.nan, False)):
        faults = {"GPU-1": api.GpuFault(when, "bad")}
        assert api.recent_faults(faults, DAY) == (faults if counts else {})
    hour = {"GPU-1": api.GpuFault(DAY, "bad", 3600)}
    assert api.recent_faults(hour, DAY + 3599) == hour
    assert api.recent_faults(hour, DAY + 3600) == {}
    until = time.strftime("%a %H:%M", time.localtime(1000 + DAY))
    assert api.GpuFault(1000.0, "ECC").why_last == f"taken last until {until}, since a claim failed there: ECC"


# GPUs that compute for nobody


def test_what_seems_wedged() -> None:
    hangs = gpu(utilization=91, memory_used=100 * MIB)
    assert api.why_wedged(hangs, api.DEFAULT_RULES).startswith("it shows 91% utilisation without a process")
    for may_work in (
        {"utilization": 90},
        {"utilization": None},
        {"memory_used": 129 * MIB},
        {"memory_used": None},
        {"memory_shared": True},
        {"processes": None},
        {"processes": (process(),)},
        {"processes_private": True},
        {"display_active": True},
    ):
        assert api.why_wedged(hangs._replace(**may_work), api.DEFAULT_RULES) == "", may_work


# Memory that no visible process explains, and processes that are not shown

LIMIT = "SAFE_GPU_UNEXPLAINED_MEMORY"


@pytest.mark.parametrize("counts_reserved", [False, True])
def test_how_much_memory_without_a_process_makes_a_gpu_busy(counts_reserved: bool) -> None:
    for limit, mib, free in (
        ("", 128, True),
        ("", 129, False),
        ("300MiB", 300, True),
        ("300MiB", 301, False),
        ("1MiB", 16, True),  # NVML is asked who draws only above that
        ("0", 17, False),
    ):
        rules = api.Rules.of({LIMIT: limit} if limit else {})
        device = gpu(memory_used=mib * MIB, counts_reserved=counts_reserved)
        if limit or not counts_reserved:
            assert verdict_on(device, rules=rules).free is free
        drawn = device._replace(memory_used=(300 + mib) * MIB, processes=(draws(1, 300 / 1024),))
        assert counts_reserved or verdict_on(drawn, rules=rules).free is free
        assert verdict_on(device._replace(memory_shared=True), rules=rules).free
    for value in ("much", "-1", "128", "MiB"):
        with pytest.raises(api.UnsatisfiableRequestError, match=LIMIT):
            api.Rules.of({LIMIT: value})


def test_without_process_lists_claims_and_memory_decide_where_that_is_allowed() -> None:
    optional = api.Rules.of({"SAFE_GPU_PROCESS_LIST": "optional"})
    for device, rules, state in (
        (MUTE, api.DEFAULT_RULES, "unusable"),
        (MUTE, optional, "free"),
        (MUTE._replace(memory_used=600 * MIB), optional, "busy"),
        (MUTE._replace(processes_supported=True), optional, "busy"),  # a list that fails this time
    ):
        assert verdict_on(device, rules=rules).state == state
        possible = state != "unusable"
        assert bool(api.candidates(api.HostSnapshot((device,)), ANY, rules=rules)) is possible
    api.check_possible(api.HostSnapshot((MUTE,)), ANY, rules=optional)
    with pytest.raises(api.UnsatisfiableRequestError, match=re.escape(api.UNWATCHABLE)):
        api.check_possible(api.HostSnapshot((MUTE,)), ANY)


def test_an_mps_server_whose_name_is_hidden() -> None:
    for one, alone, beside_clients in (
        (process(99, 64 / 1024), True, False),
        (process(99, 65 / 1024), True, True),
        (process(7, 300 / 1024), False, False),
        (process(99, 30 / 1024, api.ProcessKind.GRAPHICS), False, False),
        (process(4242, 30 / 1024, elsewhere=True), True, False),
        (process(7, 300 / 1024, elsewhere=True), True, True),  # it is not the server here
    ):
        assert api.computes(one, people) is alone
        assert api.computes(one, people, mps_servers={one.pid}) is beside_clients
        clients = gpu(1, memory_used=GIB, processes=(process(kind=api.ProcessKind.MPS),))
        device = gpu(memory_used=one.memory_used or 0, processes=(one,))
        assert verdict_on(device, describe=people).free is not alone
        assert verdict_on(device, beside=clients, describe=people).free is not beside_clients


def busy_on(*processes_of: list[api.GpuProcess]) -> list[int]:
    """Indices of the busy GPUs of a host on which these processes are, GPU by GPU."""
    gpus = [gpu(index, memory_used=GIB, processes=tuple(found)) for index, found in enumerate(processes_of)]
    verdicts = api.judge(api.HostSnapshot(tuple(gpus)), ANY, api.Known(describe=people, rules=LENIENT))
    return [verdict.gpu.index for verdict in verdicts if not verdict.free]


LENIENT = api.Rules(unexplained_limit=TOTAL)
IDLE_SERVER = process(99, 27 / 1024)


def test_an_idle_mps_server_whose_name_is_hidden_is_on_every_gpu() -> None:
    assert busy_on([IDLE_SERVER], [IDLE_SERVER], [IDLE_SERVER]) == []
    assert busy_on([IDLE_SERVER], [IDLE_SERVER, process()], [IDLE_SERVER]) == [1]
    assert busy_on([IDLE_SERVER], [process(99, 65 / 1024)], [IDLE_SERVER]) == [0, 1, 2], "a program has more"
    assert busy_on([IDLE_SERVER], [IDLE_SERVER], []) == [0, 1], "a program may be on some GPUs"
    assert busy_on([IDLE_SERVER], [process(98, 27 / 1024)]) == [0, 1], "two programs"
    assert busy_on([IDLE_SERVER]) == [0], "on a host with one GPU nothing tells it from a program"
    assert busy_on([process(99, None)], [process(99, None)]) == [0, 1]


@pytest.mark.parametrize(
    ("processes", "display", "busy"),
    [
        pytest.param([draws(4242, 1)], False, set(), id="the most that counts as free"),
        pytest.param([draws(4242, 1 + 1 / 1024)], False, {4242}, id="a MiB more"),
        pytest.param([draws(4242, 40)], True, set(), id="a desktop"),
        pytest.param([draws(pid, 0.3) for pid in (5, 97, 98, 99)], False, {5, 97, 98, 99}, id="together"),
        pytest.param([process(5, 0.6), draws(5, 0.6), draws(99, 0.6)], False, {5}, id="and is counted once"),
        pytest.param([process(7, 0.03), draws(99, 0.99)], False, set(), id="an MPS server, and one below the bound"),
        pytest.param([draws(99, 2, elsewhere=True)], False, {99}, id="of another namespace"),
    ],
)
def test_what_draws_makes_a_gpu_busy_by_its_memory(
    processes: list[api.GpuProcess], display: bool, busy: set[int]
) -> None:
    used = sum({one.pid: one.memory_used or 0 for one in processes}.values())
    device = gpu(memory_used=used, processes=tuple(processes), display_active=display)
    found = verdict_on(device, describe=people)
    assert found.state == ("busy" if busy else "free"), found.reason
    assert found.pid in busy or not busy
    assert ("more process" in found.reason) == (len(busy) > 1)
    assert device.draws == (display or any(one.kind == api.ProcessKind.GRAPHICS for one in processes))


def test_what_a_driver_shows_of_this_process() -> None:
    for before, used, processes, expected in (
        (gpu(), 300, (process(4711, 0.3),), api.SHOWN),
        (gpu(), 300, (), api.HIDDEN),
        (gpu(), 300, (process(1, 0.3),), api.NOT_YET),  # that is the other one's memory
        (gpu(), 300, None, api.UNKNOWN),
        (MUTE, 4, None, api.HIDDEN),
    ):
        now = before._replace(memory_used=used * MIB, processes=processes)
        assert api.presence(before, now, {4711, 1000000}) == expected


# Shares


def sharer(pid: int, share: int | None = 20 * GIB, uid: int = 1, user: str = "anna", **facts: Any) -> api.Holder:
    return api.Holder(pid, user, uid=uid, share=share, **facts)


def share_verdict(one: api.Gpu, *sharers: api.Holder) -> api.GpuVerdict:
    claimed = {one.uuid: api.Holder.of_sharers(sharers)} if sharers else {}
    return verdict_on(one, SHARE, claimed=claimed, family_of=FAMILIES.get)


OWN, CHILD, OTHER, UNSEEN = 10, 11, 20, 30
FAMILIES = {OWN: (1, (OWN,)), CHILD: (3, (CHILD, OWN)), OTHER: (2, (OTHER, 1))}


def test_how_much_a_share_is() -> None:
    """Shares are whole MiB, four quarters fit, and percent are of the GPUs that the request means."""
    assert api.share_capacity(gpu()) == TOTAL - RESERVED
    assert api.share_capacity(gpu(counts_reserved=True)) == TOTAL - GIB, "the reserve counts as used"
    assert api.share_capacity(UNKNOWN_MEMORY) is None
    t4 = gpu(1, name="T4", memory_total=16 * GIB, memory_free=15 * GIB)
    assert api.parse_request(1, share="50%", model="T4").resolved(host(2, _1=t4)).share == 15 * GIB // 2
    quarter = (TOTAL - RESERVED) // 4 >> 20 << 20
    for given_share, expected in ((20 * GIB - 1, 20 * GIB), ("25%", quarter)):
        assert api.parse_request(1, share=given_share).resolved(host(1)).share == expected
    # Frameworks may allocate the rest of it, by the largest GPU.
    assert api.share_fraction(20 * GIB, [gpu()]) == pytest.approx(19.5 / 80)
    assert api.share_fraction(20 * GIB, [gpu(), gpu(1, memory_total=TOTAL * 2)]) == pytest.approx(19.5 / 160)


def test_shares_count_as_their_part_of_the_smallest_gpu_that_has_them() -> None:
    gpus = [gpu(n, memory_total=size * GIB + RESERVED, memory_free=size * GIB) for n, size in enumerate((80, 40, 10))]

    def amount(count: int, share: int) -> float:
        return api.Selection.from_ticket(count, (("share", share * GIB),) if share else ())[0].amount(gpus)

    assert [amount(1, share) for share in (10, 20, 40, 60, 0)] == [1.0, 0.5, 1.0, 0.75, 1.0]
    assert amount(3, 20) == 1.5


def test_what_is_left_for_a_share() -> None:
    three = [sharer(1), sharer(2, 30 * GIB, user="ben"), sharer(3, 15 * GIB)]
    little = "shared: 65 of 79.5 GiB promised to 3 claims (anna 20 GiB, ben 30 GiB, ...), 14.5 left, 20 asked for"
    for one, sharers, expected in (
        (gpu(), [sharer(1), sharer(2)], ""),
        (gpu(), three, little),
        (gpu(), [sharer(n, GIB) for n in range(16)], "16 claims share it already"),
        (gpu(memory_used=70 * GIB), [], "of memory in use by no process"),
        (gpu(memory_used=60 * GIB, memory_shared=True), [sharer(1)], ""),  # it may be nobody's
    ):
        found = share_verdict(one, *sharers)
        assert expected in found.reason
        assert (found.free, found.state == "claimed") == (not expected, bool(sharers and expected))
    claimed = {gpu().uuid: api.Holder.of_sharers([sharer(2, since=7.0), sharer(1, since=5.0)])}
    found = verdict_on(gpu(), claimed=claimed)
    assert (found.state, found.reason, found.pid) == ("claimed", "shared by 2 claims", 1)
    # Of 40 GiB that are promised, one holder and its child use 25 instead of 20: newcomers get what is left of 45.
    one = gpu(memory_used=25 * GIB, processes=(process(OWN, 20), process(CHILD, 5)))
    assert api.room(one, [sharer(OWN), sharer(99)], FAMILIES.get, unexplained=0) == TOTAL - RESERVED - 45 * GIB


def test_a_certain_stranger_makes_a_shared_gpu_busy() -> None:
    """Neither a holder, nor who can tell, nor another process of a sharer's user."""
    for pid, uid in ((OWN, 1), (UNSEEN, 1), (OTHER, 2)):
        assert share_verdict(gpu(memory_used=GIB, processes=(process(pid, 1),)), sharer(OWN, uid=uid)).free
    unseen = gpu(memory_used=GIB, processes=(process(UNSEEN, 1),))
    assert share_verdict(unseen).state == "busy", "the first sharer follows the rules of whole claims"
    found = share_verdict(gpu(memory_used=GIB, processes=(process(OTHER, 1),)), sharer(OWN))
    assert (found.state, found.pid) == ("busy", OTHER)
    assert "process 20" in found.reason
    assert "without a share" in found.reason
    for pid, gib, state in ((OTHER, 2, "busy"), (OTHER, 1, "free"), (CHILD, 2, "free")):
        # A sharer's own program may draw as well, and is not added to a stranger's.
        one = gpu(memory_used=(10 + gib) * GIB, processes=(draws(OWN, 10), draws(pid, gib)))
        assert share_verdict(one, sharer(OWN)).state == state


def test_which_gpus_are_shared() -> None:
    for nb, free, rooms, near, last, chosen in (
        (1, 3, {1: 50, 2: 30}, None, (), [2]),  # the least room
        (2, 3, {2: 30}, None, (), [0, 2]),  # and one more
        (1, 2, {7: 30}, None, (), [0]),  # the shared one is not to be had
        (3, 2, {0: 30}, None, (), None),
        (2, 4, {1: 10, 2: 20, 3: 30}, "numa", (), [2, 3]),
        (1, 2, {1: 30}, None, (1,), [0]),  # one that failed is shared last
    ):
        verdicts = [api.GpuVerdict(gpu(number, numa_node=number // 2), "free") for number in range(free)]
        left = {gpu(number).uuid: size for number, size in rooms.items()}
        request = api.parse_request(nb, share="20GiB", near=near)
        found = api.choose_shares(verdicts, request, left, last=tuple(gpu(number).uuid for number in last))
        assert (found and [one.index for one in found]) == chosen
