"""What a caller may write, and what every condition of a request owes its callers and other waiters."""

import argparse
import inspect
import json
import math
from itertools import combinations
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safe_gpu import GPUOwner, claim_gpus
from safe_gpu.cli.arguments import add_request
from safe_gpu.errors import UnsatisfiableRequestError
from safe_gpu.gpus.devices import Gpu, GpuVerdict, HostSnapshot
from safe_gpu.selection.backfill import BackfillRequest, dates, open_gpus, starts
from safe_gpu.selection.choice import candidates, check_possible, choose
from safe_gpu.selection.request import (
    CONDITIONS,
    Condition,
    Conditions,
    MinMemory,
    Near,
    Selection,
    Share,
    parse_request,
)
from safe_gpu.selection.values import parse_size
from safe_gpu.selection.verdicts import judge
from safe_gpu.wording.text import as_option

SAMPLES: dict[str, Any] = {
    "only": "1,3",
    "exclude": "0-2",
    "model": "A100",
    "min_memory": "20GiB",
    "max_utilization": 10,
    "near": "numa",
    "share": "20GiB",
    "prefer": "H100,A100",
}

every = pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.argument)


def gpu(index: int, **values: Any) -> Gpu:
    return Gpu(index, f"GPU-{index}", **{"processes": (), "memory_used": 0, **values})


@every
def test_it_is_an_argument_and_an_option(condition: type[Condition]) -> None:
    hints = get_type_hints(Conditions)
    assert set(hints) == {one.argument for one in CONDITIONS}
    for claim in (claim_gpus, GPUOwner):
        assert inspect.signature(claim).parameters[condition.argument].default in (None, ())
    parser = argparse.ArgumentParser()
    add_request(parser)
    option = as_option(condition.argument)
    text = str(SAMPLES[condition.argument])
    given_there = getattr(parser.parse_args([option, text]), condition.argument)
    assert parse_request(1, **{condition.argument: given_there}) == parse_request(1, **{condition.argument: text})
    assert condition.metavar in parser.format_help()


@every
def test_what_changes_stands_in_the_ticket(condition: type[Condition]) -> None:
    """Others judge GPUs for a waiter: by its ticket, where it depends on more than which GPU it is."""
    changes = condition.why_not_now is not Condition.why_not_now or condition.groups is not Condition.groups
    changes = changes or condition is Share  # judged with the claims that share the GPU
    asked = parse_request(2, **{condition.argument: SAMPLES[condition.argument]})
    assert changes == bool(asked.ticket)
    said = json.loads(json.dumps(dict(asked.ticket)))
    assert Selection.from_ticket(2, said.items()) == (Selection(2, asked.conditions if changes else ()), True)


def test_a_condition_that_is_not_known() -> None:
    for strange in (("colour", "red"), ("near", "by"), ("min_memory", -1), ("max_utilization", 101)):
        assert Selection.from_ticket(1, [strange, ("min_memory", 5)]) == (Selection(1, (MinMemory(5),)), False)


def test_bad_percentages() -> None:
    for value in (101, -1, "ten", "1000", True, 3.5, ""):
        with pytest.raises(UnsatisfiableRequestError, match=r"max_utilization=.* makes no sense: give percent"):
            parse_request(max_utilization=value)


@pytest.mark.parametrize(
    ("utilization", "state"),
    [(0, "free"), (10, "free"), (11, "busy"), (None, "busy")],
    ids=["idle", "at it", "above", "?"],
)
def test_a_busy_gpu(utilization: int | None, state: str) -> None:
    asked = parse_request(max_utilization="10%")
    (verdict,) = judge(HostSnapshot((gpu(0, utilization=utilization),)), asked, claimed={})
    assert verdict.state == state
    assert state == "free" or "at most 10% asked for" in verdict.reason


def linked(*pairs: tuple[int, int], count: int = 6) -> list[Gpu]:
    """GPUs with these links, each known to one end only."""
    return [
        gpu(i, nvlink_peers=frozenset(f"GPU-{b}" for a, b in pairs if a == i), numa_node=i % 2) for i in range(count)
    ]


def indices(groups: list[list[Gpu]]) -> list[list[int]]:
    return sorted([one.index for one in group] for group in groups)


def test_numa_nodes() -> None:
    assert indices(Near("numa").groups([*linked(), gpu(6)])) == [[0, 2, 4], [1, 3, 5]]


@given(st.sets(st.sampled_from(list(combinations(range(6), 2)))))
def test_each_linked_to_each(pairs: set[tuple[int, int]]) -> None:
    def together(group: tuple[int, ...]) -> bool:
        return all(pair in pairs for pair in combinations(sorted(group), 2))

    sets = [set(one) for size in range(1, 7) for one in combinations(range(6), size) if together(one)]
    largest = sorted(sorted(one) for one in sets if not any(one < other for other in sets))
    assert indices(Near("nvlink").groups(linked(*pairs))) == largest


def test_the_best_set_is_of_one_group() -> None:
    gpus = linked((0, 3), (1, 2))
    free = [GpuVerdict(one, "free") for one in gpus]
    asked = parse_request(2, near="nvlink")
    assert [one.index for one in choose(free, 2, groups=asked.groups) or ()] == [0, 3]
    assert [one.index for one in choose(free, 2, groups=asked.groups, last={"GPU-0"}) or ()] == [1, 2]
    assert choose(free, 3, groups=parse_request(3, near="nvlink").groups) is None
    assert [one.index for one in choose(free, 3, groups=parse_request(3, near="numa").groups) or ()] == [0, 2, 4]


def test_what_can_never_be_together() -> None:
    host = HostSnapshot(tuple(linked((0, 1))))
    check_possible(host, parse_request(3, near="numa"))
    check_possible(host, parse_request(1, near="nvlink"))
    with pytest.raises(
        UnsatisfiableRequestError, match="4 GPUs are asked for, but only 3 of this host are on one NUMA node: ask for"
    ):
        check_possible(host, parse_request(4, near="numa"))
    with pytest.raises(UnsatisfiableRequestError, match="only 2 of this host are all connected"):
        check_possible(host, parse_request(3, near="nvlink"))


def test_an_unknown_node_is_said_to_be_unknown() -> None:
    for nodes, unknown in (([None] * 4, "0-3"), ([0, None, 1, None], "1,3"), ([0, 0, 0, None], "3")):
        host = HostSnapshot(tuple(gpu(number)._replace(numa_node=node) for number, node in enumerate(nodes)))
        with pytest.raises(
            UnsatisfiableRequestError, match=f"but the NUMA node of GPU {unknown} is not known: leave near= out"
        ):
            check_possible(host, parse_request(4, near="numa"))


def test_a_lost_gpu_may_come_back() -> None:
    host = HostSnapshot((gpu(0), gpu(1, lost=True), gpu(2, lost=True)))
    asked = parse_request(exclude="2")
    assert [one.index for one in candidates(host, asked)] == [0]
    assert [one.index for one in candidates(host, asked, lost=True)] == [0, 1]


GPUS = [f"GPU-{number}" for number in range(6)]
parts = st.lists(st.frozensets(st.sampled_from(GPUS), min_size=1), min_size=1, max_size=4).map(tuple)
times = st.lists(st.sampled_from([0.0, 5.0, 9.0, math.inf]), min_size=6, max_size=6)


@given(parts, times, st.integers(1, 3), st.sampled_from([4.0, math.inf]), st.frozensets(st.sampled_from(GPUS)))
def test_a_set_is_dated_by_the_earliest_of_its_groups(
    groups: tuple[frozenset[str], ...], moments: list[float], nb: int, hold_for: float, gone: frozenset[str]
) -> None:
    free = dict(zip(GPUS, moments, strict=True))
    want = BackfillRequest(nb, frozenset().union(*groups), hold_for, groups)
    alone = [BackfillRequest(nb, group, hold_for) for group in groups]
    assert [date for _, date in dates([want], free)] == [min(date for one in alone for _, date in dates([one], free))]
    assert starts([want], free) == [min(starts([one], free)[0] for one in alone)]
    assert want.without(gone).fits(GPUS) == any(one.without(gone).fits(GPUS) for one in alone)
    now = {gpu for gpu, when in free.items() if when == 0.0}
    assert want.fits(open_gpus(want, [], now, free, 0.0)) == any(one.fits(now) for one in alone)
    assert starts([want._replace(groups=(want.gpus,))] * 2, free) == starts([want._replace(groups=None)] * 2, free)


FREE = [gpu(0, name="A100"), gpu(1, name="H100"), gpu(2, name="A100"), gpu(3, name="V100"), gpu(4, name="H100")]


def test_the_first_model_of_which_there_are_enough() -> None:
    for nb_gpus, prefer, last, chosen in (
        (1, ("H100", "A100"), (), (1,)),
        (1, ("H100", "A100"), ("GPU-1", "GPU-4"), (0,)),
        (2, ("V100", "A100"), (), (0, 2)),
        (3, ("H100", "A100"), (), (0, 1, 2)),
        (6, ("H100",), (), None),
    ):
        preferred = parse_request(1, prefer=prefer).preferred
        found = choose([GpuVerdict(one, "free") for one in FREE], nb_gpus, prefer=preferred, last=last)
        assert (found and tuple(one.index for one in found)) == chosen


def test_a_preference_that_makes_no_sense() -> None:
    for value in ("", "H100,", ["H100", 3], 5):
        with pytest.raises(
            UnsatisfiableRequestError, match=r"prefer=.*list parts of names, the best first, such as 'H100,A1"
        ):
            parse_request(1, prefer=value)


GIB = 1 << 30


class Index:
    """Like a numpy integer."""

    def __index__(self) -> int:
        return 3


def test_the_plainest_request() -> None:
    assert parse_request(1) == Selection()
    assert parse_request(Index()).nb_gpus == 3


def test_numbers_that_make_no_sense() -> None:
    for nb_gpus in (0, -1, 2.5, 2.0, "two", "2", True, False, None, [1], float("nan"), b"1"):
        with pytest.raises(UnsatisfiableRequestError) as caught:
            parse_request(nb_gpus)
        assert f"nb_gpus={nb_gpus!r}" in str(caught.value)
        assert "whole number" in str(caught.value)
        assert caught.value.value is nb_gpus


def test_devices_by_name() -> None:
    for value, names in (
        (None, ()),
        (3, ("3",)),
        ("0-3", ("0", "1", "2", "3")),
        ("0-1, 7 ,GPU-ab", ("0", "1", "7", "GPU-ab")),
        (["2", 0, "2"], ("2", "0")),
        ("1:02", ("1:2",)),
        ("MIG-GPU-ab/1/0", ("MIG-GPU-ab/1/0",)),
    ):
        assert (parse_request(1, only=value).value_of("only") or ()) == names
        if not hasattr(value, "__next__"):
            assert (parse_request(1, exclude=value).value_of("exclude") or ()) == names


def test_devices_that_make_no_sense() -> None:
    for value in (
        "", ",", "0,", "x", "-1", -1, True, 2.5, [2.5], "3-0", "1:", [[1]], [None], b"0", "cuda:0", 99999, "54d0709b",
    ):  # fmt: skip
        for argument in ("only", "exclude"):
            with pytest.raises(UnsatisfiableRequestError, match=argument) as caught:
                parse_request(1, **{argument: value})
            assert repr(value).strip("[]") in str(caught.value)


@given(st.integers(1 << 20, 1 << 50))
def test_sizes(count: int) -> None:
    """Bytes are exact."""
    assert parse_size(count) == parse_size(str(count)) == count
    assert parse_size(f"{count}KiB") == count * 1024
    for text, size in (("20G", 20 * GIB), ("20GB", 20 * 10**9), ("1.5 TiB", 1536 * GIB), (" 512 MiB ", GIB // 2)):
        assert parse_size(text) == size
    assert [parse_size(text) for text in ("64kb", ".5G", 0)] == [64000, GIB // 2, 0]


def test_sizes_that_make_no_sense() -> None:
    senseless: tuple[Any, ...] = (
        "", "GiB", "twenty", "20 potatoes", "-1G", "1e9", "20Gi B", -1, 2.5, True, None, [1],
    )  # fmt: skip
    for value in senseless:
        with pytest.raises(UnsatisfiableRequestError) as caught:
            parse_size(value, name="--min-memory")
        assert f"--min-memory={value!r}" in str(caught.value)
        assert "20GiB" in str(caught.value)
    little: tuple[tuple[Any, str], ...] = (("20", "20GiB"), (" 8 ", "8GiB"), (20480, "20480MiB"), (1, "1GiB"))
    for value, meant in little:  # so little that a unit is missing
        with pytest.raises(UnsatisfiableRequestError, match=f"{int(value)} bytes\\? write '{meant}'") as caught:
            parse_request(1, min_memory=value)
        assert caught.value.value is value
    assert parse_request(1, min_memory="20K").value_of("min_memory") == 20 << 10
