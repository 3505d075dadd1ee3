"""What a caller may write, what every condition of a request owes others, and which of the free GPUs it gets."""

import argparse
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Collection, Sequence
from itertools import combinations
from types import FrameType
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import api

from safe_gpu import GPUOwner, claim_gpus

GIB = 1 << 30
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

# What a GPU has that meets the sample, and one that does not: only what the condition is about.
MEETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "only": ({"index": 1}, {"index": 0}),
    "exclude": ({"index": 3}, {"index": 2}),
    "model": ({"name": "NVIDIA A100-SXM4-80GB"}, {"name": "NVIDIA A10"}),
    "min_memory": ({"memory_free": 20 * GIB}, {"memory_free": 20 * GIB - 1}),
    "max_utilization": ({"utilization": 10}, {"utilization": 11}),
    "share": ({"memory_total": 24 * GIB}, {"memory_total": 20 * GIB - 1}),
}
WITHOUT_ONE = {"near", "prefer"}  # which of several GPUs are together, and which come first

every = pytest.mark.parametrize("condition", api.CONDITIONS, ids=lambda condition: condition.argument)


@every
def test_a_condition_has_a_sample_a_key_and_words(condition: type[api.Condition]) -> None:
    assert condition.argument in SAMPLES, "write a value that a caller may give into SAMPLES of this file"
    assert condition.argument in get_type_hints(api.Conditions), "add its key to Conditions"
    assert {"metavar", "help"} <= set(dir(condition)), "give it a metavar and a help"
    assert "%" not in condition.help.replace("%%", ""), "write %% for % in its help"


def test_there_is_no_key_or_sample_without_a_condition() -> None:
    arguments = {one.argument for one in api.CONDITIONS}
    assert set(get_type_hints(api.Conditions)) - arguments == set(), "give the condition a place in CONDITIONS"
    assert set(SAMPLES) - arguments == set(), "give the condition a place in CONDITIONS"


def sample_of(condition: type[api.Condition]) -> Any:
    if condition.argument not in SAMPLES:
        pytest.fail(f"SAMPLES of {__file__} has no value of {condition.argument}=")
    return SAMPLES[condition.argument]


@every
def test_a_condition_is_an_argument_and_an_option(condition: type[api.Condition]) -> None:
    for claim in (GPUOwner, claim_gpus):
        parameters = inspect.signature(claim).parameters
        assert condition.argument in parameters, "add the argument to GPUOwner in safe_gpu/claim/owner.py"
        assert parameters[condition.argument].default in (None, ()), "without it there is no condition: None or ()"
    parser = argparse.ArgumentParser()
    api.add_request(parser)
    option = api.as_option(condition.argument)
    text = str(sample_of(condition))
    given_there = getattr(parser.parse_args([option, text]), condition.argument)
    assert api.parse_request(1, **{condition.argument: given_there}) == api.parse_request(
        1, **{condition.argument: text}
    )
    assert condition.metavar in parser.format_help()


@every
def test_claims_and_requests_take_values_of_the_same_types(condition: type[api.Condition]) -> None:
    of_claim = get_type_hints(GPUOwner.__init__).get(condition.argument)
    advice = "give it in safe_gpu/claim/owner.py the type that it has in Conditions"
    assert of_claim == get_type_hints(api.Conditions).get(condition.argument), advice


def test_no_word_of_other_tools_means_two_arguments() -> None:
    words = " ".join(api.words_elsewhere.WORDS_OF.values()).split()
    twice = {word for word in words if words.count(word) > 1}
    assert twice == set(), "they mean another argument already, in WORDS_OF of safe_gpu/wording/elsewhere.py"


def test_each_condition_has_a_word_of_other_tools() -> None:
    meant = {one.argument for one in api.words_elsewhere.ARGUMENTS.values()}
    without = {condition.argument for condition in api.CONDITIONS} - meant
    assert without == set(), "write into WORDS_OF of safe_gpu/wording/elsewhere.py what other tools call it"


@every
def test_a_value_of_another_type_is_refused(condition: type[api.Condition]) -> None:
    for value in (True, 2.5, b"0", object(), [2.5]):
        with pytest.raises(api.UnsatisfiableRequestError) as caught:
            api.parse_request(1, **{condition.argument: value})
        assert caught.value.value is value
        assert condition.argument in str(caught.value)


# Fields that are None for a whole GPU of which all is told, or where this machine has no NUMA nodes.
NONE_BY_RIGHT = {"unusable", "mig_parent", "mig_instance", "numa_node"}


@pytest.fixture
def told_later(fake_gpus: Any) -> dict[str, set[str]]:
    """The fields of a GPU that a poll does not have, by the method of the driver that adds them.

    Two GPUs, of which the driver tells all that it can of any.
    """
    first, second, *_ = fake_gpus.uuids
    fake_gpus.write({"util": 5, "fan": 30, "nvlink": second}, {"util": 5, "fan": 30, "nvlink": first})
    fake_gpus.use_nvml_here()
    with api.opened_driver() as driver:
        (polled, _) = driver.snapshot().gpus
        (detailed, _) = driver.detailed(driver.snapshot()).gpus
        (linked, _) = driver.linked(driver.snapshot()).gpus
    unknown = {field for field in api.Gpu._fields if getattr(detailed, field) is None}
    assert unknown <= NONE_BY_RIGHT, "the fake driver does not tell it"
    return {"detailed": different_fields(polled, detailed), "linked": different_fields(polled, linked)}


def different_fields(one: api.Gpu, other: api.Gpu) -> set[str]:
    return {field for field in api.Gpu._fields if getattr(one, field) != getattr(other, field)}


class ReadGpu:
    """A GPU that remembers which of its fields were read."""

    def __init__(self, told: api.Gpu) -> None:
        self._told = told
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self._told, name)


@pytest.mark.parametrize(("argument", "value"), [*SAMPLES.items(), ("near", "nvlink")])
def test_a_condition_needs_what_tells_the_fields_that_it_reads(
    argument: str, value: Any, told_later: dict[str, set[str]]
) -> None:
    """Without it they are not known in any poll, and no GPU meets the condition."""
    (condition,) = api.parse_request(1, **{argument: value}).conditions
    one: Any = ReadGpu(gpu(0))
    condition = condition.resolved([one])
    condition.why_outside(one)
    condition.why_unknowable(one)
    condition.why_not_now(one)
    condition.groups([one])
    needed = {method for method, fields in told_later.items() if fields & one.read}
    advice = (
        f"it reads {sorted(one.read)}, some of which only these methods of the driver tell: name the one in `needs`"
    )
    assert needed == {condition.needs} - {""}, advice


@every
def test_a_gpu_that_meets_a_condition_and_one_that_does_not(condition: type[api.Condition]) -> None:
    if condition.argument in WITHOUT_ONE:
        return
    advice = f"write into MEETS of {__file__} what a GPU has that meets the sample, and one that does not"
    assert condition.argument in MEETS, advice
    good, bad = [gpu(**{"index": 0, **fields}) for fields in MEETS[condition.argument]]
    (asked,) = api.parse_request(1, **{condition.argument: sample_of(condition)}).conditions
    asked = asked.resolved([gpu(index) for index in range(4)])
    assert why_not(asked, good) == ""
    assert why_not(asked, bad) != ""


def why_not(asked: api.Condition, device: api.Gpu) -> str:
    return asked.why_outside(device) or asked.why_unknowable(device) or asked.why_not_now(device)


@every
def test_nobody_waits_for_a_fact_that_the_driver_does_not_report(condition: type[api.Condition]) -> None:
    unknown = gpu(0)
    (asked,) = api.parse_request(1, **{condition.argument: sample_of(condition)}).conditions
    never = asked.why_outside(unknown) or asked.why_unknowable(unknown)
    if asked.why_not_now(unknown):
        assert never, "say in `why_unknowable` that the fact is not reported: claims would wait until their timeout"
    if asked.why_unknowable(unknown):
        with api.on_command_line():
            assert api.as_option(condition.argument) in asked.why_unknowable(unknown), "name it by style.option()"
        is_refused = asked.why_not_now(unknown) or condition is api.Share  # whose room is judged with its sharers
        assert is_refused, "let `why_not_now` refuse a GPU of which the fact is not known: a later poll may lack it"


@every
def test_what_changes_stands_in_the_ticket(condition: type[api.Condition]) -> None:
    """Others judge GPUs for a waiter: by its ticket, where it depends on more than which GPU it is."""
    changes = condition.why_not_now is not api.Condition.why_not_now or condition.groups is not api.Condition.groups
    changes = changes or condition is api.Share  # judged with the claims that share the GPU
    asked = api.parse_request(2, **{condition.argument: sample_of(condition)})
    advice = "leave `ticketed` out: nothing of it changes. What changes with time belongs into `why_not_now`"
    if changes:
        advice = "set `ticketed = True`"
    assert changes == bool(asked.ticket), advice
    said = json.loads(json.dumps(dict(asked.ticket)))
    assert api.Selection.from_ticket(2, said.items()) == (api.Selection(2, asked.conditions if changes else ()), True)


def test_a_condition_that_is_not_known() -> None:
    for strange in (("colour", "red"), ("near", "by"), ("min_memory", -1), ("max_utilization", 101)):
        assert api.Selection.from_ticket(1, [strange, ("min_memory", 5)]) == (
            api.Selection(1, (api.MinMemory(5),)),
            False,
        )


def test_a_number_of_gpus_that_is_text() -> None:
    """As ``sys.argv`` has it."""
    with pytest.raises(api.UnsatisfiableRequestError, match=re.escape("; '2' is text: pass int('2')")):
        api.parse_request("2")


GPU_NAMES = ("", ",", "0,", "-1", True, 2.5, "3-0", "1:", [[1]], [None], b"0", "cuda:0", 99999, "54d0709b")
SENSELESS: dict[str, tuple[tuple[Any, ...], str]] = {
    "nb_gpus": ((0, 2.0, "2", True, None, [1], math.inf, b"1"), "ask for a whole number of GPUs, 1 or more"),
    "only": (GPU_NAMES, "name GPUs by index, range or UUID"),
    "exclude": (GPU_NAMES, "name GPUs by index, range or UUID"),
    "max_utilization": ((101, -1, "ten", "1000", True, 3.5, ""), "give percent from 0 to 100"),
    "prefer": (("", "H100,", ["H100", 3], 5), "list parts of names, the best first, such as 'H100,A100'"),
    "min_memory": (("", "GiB", "20 potatoes", "-1G", "1e9", "20Gi B", -1, 2.5, True), "a size such as '20GiB'"),
    "share": (("0%", "101%", "-5%", "%", "²%"), "give percent from 1 to 100, such as '25%'"),
}


@every
def test_numbers_out_of_range_are_tried(condition: type[api.Condition]) -> None:
    (asked,) = api.parse_request(1, **{condition.argument: sample_of(condition)}).conditions
    if isinstance(asked.value, int):
        assert condition.argument in SENSELESS, "write values just out of its range into SENSELESS of this file"


@pytest.mark.parametrize("argument", SENSELESS)
def test_values_that_make_no_sense(argument: str) -> None:
    values, advice = SENSELESS[argument]
    for value in values:
        with pytest.raises(api.UnsatisfiableRequestError, match=re.escape(advice)) as caught:
            api.parse_request(**{"nb_gpus": 1, argument: value})
        assert str(caught.value).startswith(f"{argument}={value!r} is not valid: ")
        assert caught.value.value is value


def test_amounts_that_make_no_sense() -> None:
    """Some are so little that a unit is missing."""
    for argument, value, says in (
        *(("min_memory", value, "20 bytes? write '20GiB'") for value in ("20", " 20 ", 20)),
        ("min_memory", 20480, "20480 bytes? write '20480MiB'"),
        *(("share", value, "a size such as '20GiB'") for value in ("x", True, "1.5.2GiB")),
        ("share", "512MiB", "1 GiB is the least"),
    ):
        with pytest.raises(api.UnsatisfiableRequestError, match=re.escape(says)) as caught:
            api.parse_request(1, **{argument: value})
        assert caught.value.value is value
    with pytest.raises(api.UnsatisfiableRequestError, match="min_memory= and share= do not go together"):
        api.parse_request(1, share="20GiB", min_memory="30GiB")


def test_shares_in_percent() -> None:
    for text, value in (("1%", "1%"), ("100%", "100%"), (" 25 % ", "25%"), ("025%", "25%")):
        assert api.parse_request(1, share=text).value_of("share") == value


def test_a_condition_that_there_is_not() -> None:
    with pytest.raises(TypeError, match="there is no argument 'mem'"):
        api.parse_request(1, mem=1)


class Index:
    """Like a numpy integer."""

    def __index__(self) -> int:
        return 3


def test_numbers_and_names_of_gpus() -> None:
    assert api.parse_request(1) == api.Selection()
    assert api.parse_request(Index()).nb_gpus == 3
    for value, names in (
        (None, ()),
        (3, ("3",)),
        ("0-1, 7 ,GPU-ab", ("0", "1", "7", "GPU-ab")),
        (["2", 0, "2"], ("2", "0")),
        ("1:02", ("1:2",)),
    ):
        for argument in ("only", "exclude"):
            assert (api.parse_request(1, **{argument: value}).value_of(argument) or ()) == names


@given(st.integers(1 << 20, 1 << 50))
def test_sizes(count: int) -> None:
    """Bytes are exact."""
    assert api.parse_size(count) == api.parse_size(str(count)) == count
    assert api.parse_size(f"{count}KiB") == count * 1024
    for text, size in (("20G", 20 * GIB), ("20GB", 20 * 10**9), ("1.5 TiB", 1536 * GIB), (" 512 MiB ", GIB // 2)):
        assert api.parse_size(text) == size


# What stands in the way of a request for several


def uuid(index: int) -> str:
    return f"GPU-{index:02d}"


def gpu(index: int, node: int | None = None, links: Sequence[int] = (), **values: Any) -> api.Gpu:
    """A GPU with links, each of which is known to one end only."""
    peers = frozenset(map(uuid, links))
    return api.Gpu(
        index, uuid(index), **{"numa_node": node, "nvlink_peers": peers, "processes": (), "memory_used": 0, **values}
    )


def linked(*pairs: tuple[int, int]) -> list[api.Gpu]:
    """Six GPUs with these links, by turns on two nodes."""
    return [gpu(index, index % 2, [b for a, b in pairs if a == index]) for index in range(6)]


def indices(groups: list[list[api.Gpu]]) -> list[list[int]]:
    return sorted([one.index for one in group] for group in groups)


def test_a_busy_gpu() -> None:
    for utilization, state in ((10, "free"), (11, "busy"), (None, "busy")):
        host = api.HostSnapshot((gpu(0, utilization=utilization),))
        (verdict,) = api.judge(host, api.parse_request(max_utilization="10%"))
        assert verdict.state == state
        assert state == "free" or "at most 10% asked for" in verdict.reason


def test_a_utilization_that_is_never_reported() -> None:
    """A claim would wait for it until its timeout."""
    request = api.parse_request(max_utilization=10)
    silent = gpu(0)
    assert api.candidates(api.HostSnapshot((silent, gpu(1, utilization=90))), request) == (gpu(1, utilization=90),)
    with pytest.raises(api.UnsatisfiableRequestError, match=r"not report its utilisation: leave max_utilization= out"):
        api.check_possible(api.HostSnapshot((silent,)), request)


@given(st.sets(st.sampled_from(list(combinations(range(6), 2)))))
def test_each_linked_to_each(pairs: set[tuple[int, int]]) -> None:
    def together(group: tuple[int, ...]) -> bool:
        return all(pair in pairs for pair in combinations(sorted(group), 2))

    sets = [set(one) for size in range(1, 7) for one in combinations(range(6), size) if together(one)]
    largest = sorted(sorted(one) for one in sets if not any(one < other for other in sets))
    assert indices(api.Near("nvlink").groups(linked(*pairs))) == largest
    assert indices(api.Near("numa").groups([*linked(*pairs), gpu(6)])) == [[0, 2, 4], [1, 3, 5]]


def test_the_best_set_is_of_one_group() -> None:
    free = [api.GpuVerdict(one, "free") for one in linked((0, 3), (1, 2))]
    for number, near, last, expected in (
        (2, "nvlink", (), [0, 3]),
        (2, "nvlink", (0,), [1, 2]),
        (3, "nvlink", (), None),
        (3, "numa", (), [0, 2, 4]),
    ):
        groups = api.parse_request(number, near=near).groups
        chosen = api.choose(free, number, groups=groups, last=set(map(uuid, last)))
        assert (chosen and [one.index for one in chosen]) == expected


def test_what_can_never_be_together() -> None:
    host = api.HostSnapshot(tuple(linked((0, 1))))
    api.check_possible(host, api.parse_request(3, near="numa"))
    unknown = api.HostSnapshot(tuple(gpu(number, node) for number, node in enumerate((0, None, 1, None))))
    for snapshot, number, near, says in (
        (host, 4, "numa", "4 GPUs are asked for, but only 3 of this host are on one NUMA node: ask for"),
        (host, 3, "nvlink", "only 2 of this host are all connected"),
        (unknown, 4, "numa", "but the NUMA node of GPU 1,3 is not known: leave near= out"),
    ):
        with pytest.raises(api.UnsatisfiableRequestError, match=says):
            api.check_possible(snapshot, api.parse_request(number, near=near))


def test_a_name_that_may_be_of_an_instance_which_is_not_read() -> None:
    unread = gpu(1, mig_enabled=True, unusable="its instances are not read here")
    for card, says in ((unread, "; GPU 1: its instances are not read here"), (gpu(1), "GPU-01)")):
        with pytest.raises(api.UnsatisfiableRequestError, match=rf"{re.escape(says)}$"):
            api.check_possible(api.HostSnapshot((gpu(0), card)), api.parse_request(only="MIG-5c89852c"))


def test_a_lost_gpu_may_come_back() -> None:
    host = api.HostSnapshot((gpu(0), gpu(1, lost=True), gpu(2, lost=True)))
    asked = api.parse_request(exclude="2")
    assert [one.index for one in api.candidates(host, asked)] == [0]
    assert [one.index for one in api.candidates(host, asked, lost=True)] == [0, 1]


GPUS = [f"GPU-{number}" for number in range(6)]
parts = st.lists(st.frozensets(st.sampled_from(GPUS), min_size=1), min_size=1, max_size=4).map(tuple)
times = st.lists(st.sampled_from([0.0, 5.0, 9.0, math.inf]), min_size=6, max_size=6)


@given(parts, times, st.integers(1, 3), st.sampled_from([4.0, math.inf]), st.frozensets(st.sampled_from(GPUS)))
def test_a_set_is_dated_by_the_earliest_of_its_groups(
    groups: tuple[frozenset[str], ...], moments: list[float], nb: int, hold_for: float, gone: frozenset[str]
) -> None:
    free = dict(zip(GPUS, moments, strict=True))
    want = api.BackfillRequest(nb, frozenset().union(*groups), hold_for, groups)
    alone = [api.BackfillRequest(nb, group, hold_for) for group in groups]
    assert [date for _, date in api.latest_harmless_ends([want], free)] == [
        min(date for one in alone for _, date in api.latest_harmless_ends([one], free))
    ]
    assert api.starts([want], free) == [min(api.starts([one], free)[0] for one in alone)]
    assert want.without(gone).fits(GPUS) == any(one.without(gone).fits(GPUS) for one in alone)
    now = {gpu for gpu, when in free.items() if when == 0.0}
    assert want.fits(api.open_gpus(want, [], now, free, 0.0)) == any(one.fits(now) for one in alone)
    assert api.starts([want._replace(groups=(want.gpus,))] * 2, free) == api.starts(
        [want._replace(groups=None)] * 2, free
    )


# The choice among the free


def pick(
    gpus: Sequence[api.Gpu], count: int, near: frozenset[int] | None = None, last: Collection[str] = ()
) -> list[str] | None:
    chosen = api.choose([api.GpuVerdict(device, "free") for device in gpus], count, near_nodes=near, last=last)
    return None if chosen is None else [device.label for device in chosen]


def test_a_gpu_and_a_piece_of_it_are_never_chosen_together() -> None:
    cards = [gpu(0), gpu(3)]
    functions = [gpu(index, place=uuid(0), partition=True) for index in (1, 2)]
    assert pick([*cards, *functions], 2) == ["0", "3"]
    assert pick([*cards, *functions], 3) is None
    assert pick([cards[1], *functions], 3) == ["1", "2", "3"]
    request = api.parse_request(3, share="1GiB")
    verdicts = [api.GpuVerdict(device, "free") for device in (*cards, *functions)]
    assert api.choose_shares(verdicts, request, {}) is None


def test_only_the_free_ones_count() -> None:
    states = ("busy", ""), ("free", ""), ("display", ""), ("display", "too full"), ("outside", "exclude")
    verdicts = [api.GpuVerdict(gpu(index), *words) for index, words in enumerate(states)]
    assert api.choose(verdicts, 2) == (gpu(1), gpu(2))
    instances = [api.Gpu(0, f"MIG-0-{number}", mig_parent=uuid(0), mig_instance=number) for number in range(2)]
    assert pick(instances, 2) is None
    drawn = gpu(0, processes=(api.GpuProcess(9, api.ProcessKind.GRAPHICS, 300 << 20),))
    assert pick([drawn, gpu(1, display_active=True), gpu(2)], 2) == ["0", "2"], "it counts as a display"


def test_the_first_model_of_which_there_are_enough() -> None:
    models = ("A100", "H100", "A100", "V100", "H100")
    free = [api.GpuVerdict(gpu(index, name=model), "free") for index, model in enumerate(models)]
    for nb_gpus, prefer, last, chosen in (
        (1, ("H100", "A100"), (), (1,)),
        (1, ("H100", "A100"), (uuid(1), uuid(4)), (0,)),
        (2, ("V100", "A100"), (), (0, 2)),
        (3, ("H100", "A100"), (), (0, 1, 2)),
    ):
        found = api.choose(free, nb_gpus, prefer=api.parse_request(1, prefer=prefer).preferred, last=last)
        assert (found and tuple(one.index for one in found)) == chosen


def by_brute_force(gpus: Sequence[api.Gpu], count: int, near: frozenset[int], last: frozenset[str]) -> list[str]:
    def rank(chosen: Sequence[api.Gpu]) -> tuple[object, ...]:
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

    return [device.label for device in min(combinations(gpus, count), key=rank)]


@st.composite
def hosts(draw: st.DrawFn) -> list[api.Gpu]:
    size = draw(st.integers(1, 8))
    nodes = draw(st.lists(st.sampled_from([None, 0, 1, 2]), min_size=size, max_size=size))
    pairs = list(combinations(range(size), 2))
    some = [pair for pair in pairs if draw(st.booleans())]
    links = draw(st.sampled_from([[], some, some, pairs]))
    displays = draw(st.sets(st.integers(0, size - 1), max_size=2))
    return [
        gpu(index, nodes[index], [b for a, b in links if a == index], display_active=index in displays)
        for index in range(size)
    ]


@settings(max_examples=60)
@given(hosts(), st.data(), st.frozensets(st.integers(0, 2)), st.frozensets(st.integers(0, 7).map(uuid), max_size=3))
def test_as_good_as_brute_force(gpus: list[api.Gpu], data: st.DataObject, near: Any, last: frozenset[str]) -> None:
    count = data.draw(st.integers(1, len(gpus)))
    assert pick(gpus, count, near, last) == by_brute_force(gpus, count, near, last)


def calls_of(work: Callable[[], object]) -> int:
    """How often functions of the choice are called in it: few, since other claims wait meanwhile."""
    number = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal number
        number += event == "call" and frame.f_code.co_filename == api.choice.__file__

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return number


@pytest.mark.parametrize("count", [2, 8, 16])
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
    chosen = api.choose([api.GpuVerdict(gpu(index, node), "free") for index, node in enumerate(nodes)], 6)
    assert chosen is not None
    assert len({device.numa_node for device in chosen}) == 3
