"""What is asked of a host in a race: pure, from presets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from safe_gpu.demo.racers import Plan, RacerRequest, plan_race
from safe_gpu.devices import GpuProcess, GpuRequest, HostSnapshot
from safe_gpu.drivers.presets import preset
from safe_gpu.runtimes.visible_devices import VisibleLimit
from safe_gpu.selection.verdicts import judge


def host(name: str, *indices: int) -> HostSnapshot:
    gpus = preset(name).gpus()
    return HostSnapshot(tuple(gpu for gpu in gpus if gpu.index in indices) if indices else gpus)


def busy(snapshot: HostSnapshot, *indices: int) -> HostSnapshot:
    stranger = (GpuProcess(1, memory_used=1 << 30),)
    gpus = [replace(gpu, processes=stranger) if gpu.index in indices else gpu for gpu in snapshot.gpus]
    return HostSnapshot(tuple(gpus))


def plan(snapshot: HostSnapshot, fence: VisibleLimit | None = None, racers: int | None = None) -> Plan | None:
    return plan_race(snapshot, judge(snapshot, GpuRequest(), leased={}, fence=fence), fence, racers)


def sizes(found: Plan | None) -> list[int]:
    assert found is not None
    return [ask.nb_gpus for ask in found.asks]


@pytest.mark.parametrize(
    ("snapshot", "expected"),
    [
        (host("dgx-a100", 3), [1, 1, 1, 1]),
        (host("dgx-a100", 3, 4), [1, 1, 1, 2]),
        (host("workstation-mixed"), [1, 1, 1, 2, 1, 1]),
        (host("dgx-a100"), [1, 1, 1, 2] * 4),
        (host("big-16"), [1, 1, 1, 2] * 8),
        (host("mig-h100"), [1] * 10),
        (busy(host("dgx-a100"), 0, 1, 2, 3, 4, 5, 6), [1, 1, 1, 2]),
    ],
)
def test_twice_as_many_racers_as_free_gpus_and_pairs_where_they_are_possible(
    snapshot: HostSnapshot, expected: list[int]
) -> None:
    found = plan(snapshot)
    assert sizes(found) == expected
    assert found is not None
    assert not found.shared


def test_no_race_where_nothing_is_free() -> None:
    snapshot = host("dgx-a100", 0, 1)
    assert plan(busy(snapshot, 0, 1)) is None
    assert plan(HostSnapshot(tuple(replace(gpu, lost=True) for gpu in snapshot.gpus))) is None
    assert plan(HostSnapshot(())) is None


def test_a_fence_leaves_no_pairs_where_it_leaves_one_gpu() -> None:
    snapshot = host("dgx-a100")
    one, two = (VisibleLimit("", tuple(gpu.uuid for gpu in snapshot.gpus[:count])) for count in (1, 2))
    assert sizes(plan(snapshot, one)) == [1, 1, 1, 1]
    assert sizes(plan(snapshot, two)) == [1, 1, 1, 2]


def test_the_number_of_racers_can_be_given() -> None:
    assert sizes(plan(host("dgx-a100"), racers=5)) == [1, 1, 1, 2, 1]


def test_a_display_is_shared_by_two_and_a_third_wants_all_of_its_memory() -> None:
    snapshot = host("laptop")
    total = snapshot.gpus[0].memory_total
    assert plan(snapshot) == Plan((RacerRequest(), RacerRequest(), RacerRequest(min_memory=total)), shared=True)


@pytest.mark.parametrize("free", [None, "total"])
def test_nobody_wants_memory_that_may_well_be_there(free: str | None) -> None:
    gpu = host("laptop").gpus[0]
    amount = None if free is None else gpu.memory_total
    assert plan(HostSnapshot((replace(gpu, memory_free=amount),))) == Plan(
        (RacerRequest(), RacerRequest()), shared=True
    )


def test_a_full_display_gpu_is_left_alone() -> None:
    assert plan(HostSnapshot((replace(host("laptop").gpus[0], memory_free=1 << 29),))) is None
