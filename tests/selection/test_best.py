"""The choice among the free: rules one by one, and against brute force."""

import sys
from collections.abc import Callable, Collection, Sequence
from itertools import combinations
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safe_gpu.gpus.devices import Gpu, GpuProcess, GpuVerdict, ProcessKind
from safe_gpu.selection import choice
from safe_gpu.selection.choice import choose


def uuid(index: int) -> str:
    return f"GPU-{index:02d}"


def gpu(index: int, node: int | None = None, links: Sequence[int] = (), display: bool = False) -> Gpu:
    peers = frozenset(uuid(peer) for peer in links)
    return Gpu(index, uuid(index), numa_node=node, nvlink_peers=peers, display_active=display)


def instance(index: int, number: int) -> Gpu:
    return Gpu(index, f"MIG-{index}-{number}", mig_parent=uuid(index), mig_instance=number)


def pick(
    gpus: Sequence[Gpu], count: int, near: frozenset[int] | None = None, last: Collection[str] = ()
) -> list[str] | None:
    chosen = choose([GpuVerdict(device, "free") for device in gpus], count, near=near, last=last)
    return None if chosen is None else [device.label for device in chosen]


def test_only_the_free_ones_count() -> None:
    verdicts = [
        GpuVerdict(gpu(0), "busy", "process 1"),
        GpuVerdict(gpu(1), "free"),
        GpuVerdict(gpu(2), "display"),
        GpuVerdict(gpu(3), "display", "too full"),
        GpuVerdict(gpu(4), "outside", "exclude"),
    ]
    assert choose(verdicts, 2) == (gpu(1), gpu(2))
    assert choose(verdicts, 3) is None
    assert pick([instance(0, 0), instance(0, 1)], 2) is None
    drawn = gpu(0)._replace(processes=(GpuProcess(9, ProcessKind.GRAPHICS, 300 << 20),))
    assert pick([drawn, gpu(1, display=True), gpu(2)], 2) == ["0", "2"], "it counts as a display"


def by_brute_force(gpus: Sequence[Gpu], count: int, near: frozenset[int], last: frozenset[str]) -> list[str]:
    def rank(chosen: Sequence[Gpu]) -> tuple[object, ...]:
        nodes = {device.numa_node for device in chosen}
        links = sum(
            one.uuid in other.nvlink_peers or other.uuid in one.nvlink_peers for one, other in combinations(chosen, 2)
        )
        return (
            sum(device.uuid in last for device in chosen),
            sum(device.draws for device in chosen),
            len(nodes),
            -links,
            -sum(device.numa_node in near for device in chosen),
            sum(device.numa_node in nodes for device in gpus),
            [device.index for device in chosen],
        )

    ordered = sorted(gpus, key=lambda device: device.index)
    return [device.label for device in min(combinations(ordered, count), key=rank)]


@st.composite
def hosts(draw: st.DrawFn) -> list[Gpu]:
    size = draw(st.integers(1, 8))
    nodes = draw(st.lists(st.sampled_from([None, 0, 1, 2]), min_size=size, max_size=size))
    pairs = list(combinations(range(size), 2))
    links = (
        draw(st.sampled_from([[], pairs])) if draw(st.booleans()) else [pair for pair in pairs if draw(st.booleans())]
    )
    displays = draw(st.sets(st.integers(0, size - 1), max_size=2))
    return [gpu(index, nodes[index], [b for a, b in links if a == index], index in displays) for index in range(size)]


@settings(max_examples=150)
@given(hosts(), st.data(), st.frozensets(st.integers(0, 2)), st.frozensets(st.integers(0, 7).map(uuid), max_size=3))
def test_as_good_as_brute_force(gpus: list[Gpu], data: st.DataObject, near: Any, last: frozenset[str]) -> None:
    count = data.draw(st.integers(1, len(gpus)))
    assert pick(gpus, count, near, last) == by_brute_force(gpus, count, near, last)


def test_gpus_in_groups_may_be_those_taken_last() -> None:
    """The sound ones would be enough, but not together."""
    pair = [gpu(0, 0), gpu(1, 0), gpu(2, 1), gpu(3, 2)]
    verdicts = [GpuVerdict(device, "free") for device in pair]
    chosen = choose(verdicts, 2, last={uuid(1)}, groups=lambda gpus: [list(gpus[:2]), list(gpus[2:3]), list(gpus[3:])])
    assert chosen == tuple(pair[:2])


def calls_of(work: Callable[[], object]) -> int:
    """How often functions of the choice are called in it: few, since other claims wait meanwhile."""
    number = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal number
        number += event == "call" and frame.f_code.co_filename == choice.__file__

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return number


@pytest.mark.parametrize("count", [1, 2, 7, 8, 15, 16])
def test_sixteen_alike_are_chosen_exactly_with_little_work(count: int) -> None:
    switched = [gpu(index, index // 8, [peer for peer in range(16) if peer != index]) for index in range(16)]
    free = switched[1:] if count < 16 else switched
    assert pick(free, count) == by_brute_force(free, count, frozenset(), frozenset())
    assert calls_of(lambda: pick(free, count)) < 1_500


def test_an_irregular_host_of_sixteen_is_bounded_and_still_good() -> None:
    ring = [gpu(index, 0, [(index + 5) % 16, (index + 7) % 16]) for index in range(16)]
    chosen = pick(ring, 8)
    assert chosen is not None
    taken = [ring[int(label)] for label in chosen]
    assert len({device.uuid for device in taken}) == 8
    assert calls_of(lambda: pick(ring, 8)) < 30_000
    links = sum(one.uuid in other.nvlink_peers for one in taken for other in taken)
    assert links >= 10  # of 32 in the whole ring; eight GPUs picked blindly share 7


def test_few_nodes_are_used_where_there_are_too_many_sets() -> None:
    nodes = [0, 1, 2, 3, 4, 5, *(6, 6), *(7, 7), *(8, 8), *(9, 9)]
    chosen = choose([GpuVerdict(gpu(index, node), "free") for index, node in enumerate(nodes)], 6)
    assert chosen is not None
    assert len({device.numa_node for device in chosen}) == 3
