"""Which processes and how much memory make a GPU busy, and what a driver shows of this process."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from safe_gpu.errors import UnsatisfiableRequestError
from safe_gpu.gpus.devices import Gpu, GpuProcess, GpuVerdict, HostSnapshot, ProcessKind
from safe_gpu.selection.choice import candidates, check_possible
from safe_gpu.selection.request import Selection, parse_request
from safe_gpu.selection.verdicts import (
    DEFAULT_RULES,
    HIDDEN,
    NOT_YET,
    SHOWN,
    UNKNOWN,
    UNWATCHABLE,
    Rules,
    computes,
    judge,
    presence,
)

MIB, GIB = 1 << 20, 1 << 30
LIMIT = "SAFE_GPU_UNEXPLAINED_MEMORY"
ANY = Selection()
OWN = 4711


def gpu(used: int | None, **changes: Any) -> Gpu:
    free = None if used is None else 80 * GIB - used
    plain = Gpu(0, "GPU-00", "A100", memory_total=80 * GIB, memory_used=used, memory_free=free, counts_reserved=False)
    return plain._replace(**changes)


def process(pid: int, mib: float | None = 300, kind: str = ProcessKind.COMPUTE, **changes: Any) -> GpuProcess:
    return GpuProcess(pid, kind, None if mib is None else int(mib * MIB))._replace(**changes)


def verdict(device: Gpu, beside: Gpu | None = None, request: Selection = ANY, **options: Any) -> GpuVerdict:
    other = beside or gpu(0, index=1, uuid="GPU-01")
    return judge(HostSnapshot((device, other)), request, claimed={}, **options)[0]


# Memory that no visible process explains


def test_how_much_memory_without_a_process_makes_a_gpu_busy() -> None:
    for device, free in (
        (gpu(128 * MIB), True),
        (gpu(129 * MIB), False),
        (gpu(400 * MIB, processes=(process(1, 300, ProcessKind.GRAPHICS),)), True),
        (gpu(600 * MIB, processes=(process(1, 300, ProcessKind.GRAPHICS),)), False),
    ):
        found = verdict(device)
        assert found.free is free
        assert free or found.state == "busy"


@pytest.mark.parametrize(
    ("environ", "mib", "free"),
    [
        ({}, 128, True),
        ({LIMIT: "300MiB"}, 300, True),
        ({LIMIT: "300MiB"}, 301, False),
        ({LIMIT: "32MiB"}, 33, False),
        ({LIMIT: "1MiB"}, 16, True),  # NVML is asked who draws only above that
        ({LIMIT: "0"}, 17, False),
    ],
)
@pytest.mark.parametrize("counts_reserved", [False, True])
def test_the_limit_that_the_user_sets(environ: Mapping[str, str], mib: int, free: bool, counts_reserved: bool) -> None:
    device = gpu(mib * MIB, counts_reserved=counts_reserved)
    if environ.get(LIMIT) or not counts_reserved:
        assert verdict(device, rules=Rules.of(environ)).free is free
    assert verdict(device._replace(memory_shared=True), rules=Rules.of(environ)).free


def test_a_limit_that_is_no_size_is_refused() -> None:
    for value in ("much", "-1", "128", "MiB"):
        with pytest.raises(UnsatisfiableRequestError, match=LIMIT):
            Rules.of({LIMIT: value})


def test_memory_of_processes_that_are_not_listed_counts_not_on_the_gpus_of_an_outer_claim() -> None:
    device = gpu(20 * GIB)
    assert not verdict(device).free
    assert verdict(device, explained={device.uuid: ()}).free
    assert not verdict(device, explained={"GPU-01": (1,)}).free


# Process lists that the driver can never give

MUTE = gpu(4 * MIB, processes=None, processes_supported=False)
OPTIONAL = Rules.of({"SAFE_GPU_PROCESS_LIST": "optional"})


def test_without_process_lists_leases_and_memory_decide_where_that_is_allowed() -> None:
    for device, rules, state in (
        (MUTE, DEFAULT_RULES, "unusable"),
        (MUTE, OPTIONAL, "free"),
        (MUTE._replace(memory_used=600 * MIB), OPTIONAL, "busy"),
        (MUTE._replace(processes_supported=True), OPTIONAL, "busy"),  # a list that fails this time
    ):
        assert verdict(device, rules=rules).state == state
        possible = state != "unusable"
        assert bool(candidates(HostSnapshot((device,)), ANY, rules=rules)) is possible
        if possible:
            check_possible(HostSnapshot((device,)), ANY, rules=rules)
        else:
            with pytest.raises(UnsatisfiableRequestError, match=re.escape(UNWATCHABLE)):
                check_possible(HostSnapshot((device,)), ANY, rules=rules)


def test_memory_that_is_unknown_is_not_waited_for() -> None:
    for total in (None, 80 * GIB):
        unknown = gpu(None, memory_total=total)
        request = parse_request(1, min_memory=GIB)
        with pytest.raises(UnsatisfiableRequestError, match=r"none fits .* not tell its memory: leave min_memory= out"):
            check_possible(HostSnapshot((unknown,)), request)
        assert not candidates(HostSnapshot((unknown,)), request)
        check_possible(HostSnapshot((unknown, gpu(0, index=1, uuid="GPU-01"))), request)


# Processes


described = {5: ("alice", "python train.py"), 6: ("root", "/usr/bin/nvidia-cuda-mps-server"), 7: ("bob", " ")}.get


def test_an_mps_server_whose_name_is_hidden() -> None:
    for one, alone, beside_clients in (
        (process(99, 64), True, False),
        (process(99, 65), True, True),
        (process(5, 30), True, True),
        (process(6, 300), False, False),
        (process(99, 30, ProcessKind.MPS), True, True),
        (process(99, 30, ProcessKind.GRAPHICS), False, False),
        (process(5, 30, elsewhere=True), True, False),
        (process(6, 300, elsewhere=True), True, True),  # it is not the server here
    ):
        assert computes(one, described) is alone
        assert computes(one, described, mps_clients=True) is beside_clients
        clients = gpu(GIB, index=1, uuid="GPU-01", processes=(process(5, kind=ProcessKind.MPS),))
        device = gpu((one.memory_used or 0), processes=(one,))
        assert verdict(device, describe=described).free is not alone
        assert verdict(device, clients, describe=described).free is not beside_clients


def draws(pid: int, mib: float | None, **changes: Any) -> GpuProcess:
    return process(pid, mib, ProcessKind.GRAPHICS, **changes)


@pytest.mark.parametrize(
    ("processes", "display", "busy"),
    [
        pytest.param([draws(5, 1024)], False, set(), id="the most that counts as free"),
        pytest.param([draws(5, 1025)], False, {5}, id="a MiB more"),
        pytest.param([draws(5, 40 * 1024)], True, set(), id="a desktop"),
        pytest.param([draws(pid, 300) for pid in (5, 97, 98, 99)], False, {5, 97, 98, 99}, id="one more"),
        pytest.param([process(5, 600), draws(5, 600)], True, {5}, id="it computes too"),
        pytest.param([process(5, 600), draws(5, 600), draws(99, 600)], False, {5}, id="and is counted once"),
        pytest.param([process(6, 30), draws(99, 1000)], False, set(), id="an MPS server, and one below the bound"),
        pytest.param([draws(99, 2048, elsewhere=True)], False, {99}, id="of another namespace"),
    ],
)
def test_what_draws_makes_a_gpu_busy_by_its_memory(processes: list[GpuProcess], display: bool, busy: set[int]) -> None:
    used = int(sum({one.pid: one.memory_used or 0 for one in processes}.values()))
    device = gpu(used, processes=tuple(processes), display_active=display)
    found = verdict(device, describe=described, own={OWN})
    assert found.state == ("busy" if busy else "free"), found.reason
    assert found.pid in busy or not busy
    assert ("more process" in found.reason) == (len(busy) > 1)
    assert device.draws == (display or any(one.kind == ProcessKind.GRAPHICS for one in processes))


def test_a_renderer_is_named_like_others() -> None:
    found = verdict(gpu(5 * GIB, processes=(draws(5, 2048), draws(99, 3072))), describe=described)
    assert (found.pid, found.user) == (99, None)
    assert found.reason == "process 99 uses 3 GiB, and 1 more process"
    found = verdict(gpu(5 * GIB, processes=(draws(5, 5120),)), describe=described)
    assert (found.user, found.reason) == ("alice", "process 5 (alice, python train.py) uses 5 GiB")


def test_a_process_of_another_namespace_is_not_called_by_the_name_of_one_here() -> None:
    text = verdict(gpu(GIB, processes=(process(5, 1024, elsewhere=True),)), describe=described).reason
    assert text == "process 5 (a number of another PID namespace) uses 1 GiB"


# Whether the driver shows this process

IDLE = gpu(4 * MIB)


def test_what_a_driver_shows_of_this_process() -> None:
    for before, now, expected in (
        (IDLE, gpu(304 * MIB, processes=(process(OWN),)), SHOWN),
        (IDLE, gpu(304 * MIB), HIDDEN),
        (IDLE, gpu(19 * MIB), NOT_YET),
        (IDLE, gpu(304 * MIB, processes=(process(1),)), NOT_YET),  # that is the other one's memory
        (IDLE, gpu(304 * MIB, processes=None), UNKNOWN),
        (MUTE, MUTE, HIDDEN),
    ):
        assert presence(before, now, {OWN, 1000000}) == expected
