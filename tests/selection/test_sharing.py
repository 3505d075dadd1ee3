"""How much of a GPU a share may have, who stands in its way, and when it can expect to start: pure decisions."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safe_gpu import UnsatisfiableRequestError
from safe_gpu.gpus.devices import ComputeMode, Gpu, GpuProcess, GpuVerdict, Holder, HostSnapshot, ProcessKind
from safe_gpu.selection.backfill import BackfillRequest, ready, starts, when_free
from safe_gpu.selection.choice import check_possible, choose_shares
from safe_gpu.selection.request import Selection, parse_request
from safe_gpu.selection.sharing import room, share_capacity, share_fraction
from safe_gpu.selection.verdicts import judge

GIB = 1 << 30
TOTAL, RESERVED = 80 * GIB, GIB // 2


def gpu(index: int = 0, used: int = 0, **values: Any) -> Gpu:
    memory: dict[str, Any] = {"memory_total": TOTAL, "memory_used": used, "memory_free": TOTAL - RESERVED - used}
    return Gpu(index, f"GPU-{index}", **{**memory, "counts_reserved": False, "processes": (), **values})


def sharer(pid: int, share: int | None = 20 * GIB, uid: int = 1, user: str = "anna", **facts: Any) -> Holder:
    return Holder(pid, user, uid=uid, share=share, **facts)


def verdict(one: Gpu, share: str, *sharers: Holder, families: dict[int, Any] | None = None) -> GpuVerdict:
    claimed = {one.uuid: Holder.of_sharers(sharers)} if sharers else {}
    request = parse_request(1, share=share).resolved(HostSnapshot((one,)))
    return judge(HostSnapshot((one, gpu(1))), request, claimed=claimed, family_of=(families or {}).get)[0]


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        pytest.param(gpu(), TOTAL - RESERVED, id="without what the driver reserves"),
        pytest.param(gpu(counts_reserved=True), TOTAL - GIB, id="the reserve counts as used"),
        pytest.param(gpu(memory_total=None), None, id="unknown"),
    ],
)
def test_what_can_be_shared_of_a_gpu(one: Gpu, expected: int | None) -> None:
    assert share_capacity(one) == expected


def test_shares_count_as_their_part_of_the_smallest_gpu_that_has_them() -> None:
    gpus = [gpu(n, memory_total=size * GIB + RESERVED, memory_free=size * GIB) for n, size in enumerate((80, 40, 10))]

    def amount(count: int, share: int | None) -> float:
        return Selection.from_ticket(count, (("share", share),) if share else ())[0].amount(gpus)

    assert [amount(1, share and share * GIB) for share in (10, 20, 40, 60, None)] == [1.0, 0.5, 1.0, 0.75, 1.0]
    assert amount(3, 20 * GIB) == 1.5
    assert amount(2, 100 * GIB) == 2.0, "none has it"


def test_a_share_that_makes_no_sense_is_refused() -> None:
    for value in ("0%", "101%", "-5%", "1.5.2GiB", "512MiB", 5, "x", "%", True, "²%"):
        with pytest.raises(UnsatisfiableRequestError, match="share="):
            parse_request(1, share=value)
        with pytest.raises(UnsatisfiableRequestError, match="min_memory= and share= do not go together"):
            parse_request(1, share="20GiB", min_memory="30GiB")


def test_what_this_host_can_never_give() -> None:
    for arguments, gpus, message in (
        ({"share": "90GiB"}, [gpu()], "79.5 GiB can be shared, 90 GiB asked for"),
        ({"share": "20GiB"}, [gpu(compute_mode=ComputeMode.EXCLUSIVE_PROCESS)], "EXCLUSIVE_PROCESS"),
        ({"share": "20GiB"}, [gpu(memory_total=None, memory_free=None, memory_used=None)], "leave share= out"),
        ({"share": "25%"}, [gpu(), gpu(1, memory_total=TOTAL // 2, memory_free=TOTAL // 4)], "from 20 GiB to 79.5"),
        ({"share": "1%"}, [gpu()], "1 GiB is the least"),
    ):
        snapshot = HostSnapshot(tuple(gpus))
        with pytest.raises(UnsatisfiableRequestError, match=message):
            check_possible(snapshot, parse_request(1, **arguments).resolved(snapshot))


def test_percent_count_the_gpus_that_the_request_means() -> None:
    """Shares are whole MiB, and four quarters fit."""
    snapshot = HostSnapshot((gpu(name="A100"), gpu(1, name="T4", memory_total=16 * GIB, memory_free=15 * GIB)))
    assert parse_request(1, share="50%", model="T4").resolved(snapshot).share == 15 * GIB // 2
    for given_share, expected in (
        ("20GiB", 20 * GIB),
        (20 * GIB - 1, 20 * GIB),
        ("25%", (TOTAL - RESERVED) // 4 >> 20 << 20),
    ):
        assert parse_request(1, share=given_share).resolved(HostSnapshot((gpu(),))).share == expected


def test_what_is_left_for_a_share() -> None:
    three = [sharer(1), sharer(2, 30 * GIB, user="ben"), sharer(3, 15 * GIB)]
    little = "shared: 65 of 79.5 GiB promised to 3 claims (anna 20 GiB, ben 30 GiB, ...), 14.5 left, 20 asked for"
    for one, sharers, expected in (
        (gpu(), [sharer(1), sharer(2)], ""),
        (gpu(), three, little),
        (gpu(), [sharer(n, GIB) for n in range(16)], "16 claims share it already"),
        (gpu(used=70 * GIB), [], "of memory in use by no process"),
        (gpu(used=60 * GIB, memory_shared=True), [sharer(1)], ""),  # it may be nobody's
    ):
        found = verdict(one, "20GiB", *sharers)
        assert expected in found.reason
        assert (found.free, found.state == "claimed") == (not expected, bool(sharers and expected))
    claimed = {"GPU-0": Holder.of_sharers([sharer(2, since=7.0), sharer(1, since=5.0)])}
    found = judge(HostSnapshot((gpu(),)), Selection(), claimed=claimed)[0]
    assert (found.state, found.reason, found.pid) == ("claimed", "shared by 2 claims", 1)


OWN, CHILD, OTHER, HIDDEN = 10, 11, 20, 30
FAMILIES = {OWN: (1, (OWN,)), CHILD: (3, (CHILD, OWN)), OTHER: (2, (OTHER, 1))}


def test_a_certain_stranger_makes_a_shared_gpu_busy() -> None:
    """Neither a holder, nor who can tell, nor another process of a sharer's user."""
    for pid, uid in ((OWN, 1), (HIDDEN, 1), (OTHER, 2)):
        one = gpu(used=GIB, processes=(GpuProcess(pid, memory_used=GIB),))
        assert verdict(one, "20GiB", sharer(OWN, uid=uid), families=FAMILIES).free
        if pid == HIDDEN:
            assert verdict(one, "20GiB").state == "busy", "the first sharer follows the rules of whole claims"
    one = gpu(used=GIB, processes=(GpuProcess(OTHER, memory_used=GIB),))
    found = verdict(one, "20GiB", sharer(OWN), families=FAMILIES)
    assert (found.state, found.pid) == ("busy", OTHER)
    assert "process 20" in found.reason
    assert "without a share" in found.reason


def test_what_draws_beside_shares() -> None:
    """A sharer's own program may draw as well, and is not added to a stranger's."""
    for pid, gib, busy in ((OTHER, 2, True), (OTHER, 1, False), (CHILD, 2, False)):
        own = GpuProcess(OWN, ProcessKind.GRAPHICS, 10 * GIB)
        one = gpu(used=(10 + gib) * GIB, processes=(own, GpuProcess(pid, ProcessKind.GRAPHICS, gib * GIB)))
        found = verdict(one, "20GiB", sharer(OWN), families=FAMILIES)
        assert (found.state, found.pid) == (("busy", OTHER) if busy else ("free", None))


def test_who_uses_more_than_promised_keeps_newcomers_off() -> None:
    """The driver counts 45 GiB; promised are 40, of which one holder and its child use 25 instead of 20."""
    processes = (GpuProcess(OWN, memory_used=20 * GIB), GpuProcess(CHILD, memory_used=5 * GIB))
    one = gpu(used=25 * GIB, processes=processes)
    left = room(one, [sharer(OWN), sharer(99)], FAMILIES.get, unexplained=0)
    assert left == TOTAL - RESERVED - 45 * GIB


def test_on_a_shared_display_a_share_is_free_memory() -> None:
    one = gpu(used=70 * GIB, display_active=True)
    request = parse_request(1, share="20GiB")
    (found,) = judge(HostSnapshot((one,)), request, claimed={})
    assert (found.state, found.reason) == ("display", "9.5 GiB of memory free, 20 GiB asked for")


def free(*numbers: int) -> list[GpuVerdict]:
    return [GpuVerdict(gpu(number, numa_node=number // 2), "free") for number in numbers]


def test_which_gpus_are_shared() -> None:
    def chosen(nb: int, numbers: list[int], rooms: dict[int, int], **more: Any) -> list[int] | None:
        left = {f"GPU-{number}": size for number, size in rooms.items()}
        request = parse_request(nb, share="20GiB", near=more.get("near"))
        found = choose_shares(free(*numbers), request, left, last=more.get("last", ()))
        return None if found is None else [one.index for one in found]

    assert chosen(1, [0, 1, 2], {1: 50, 2: 30}) == [2], "the least room"
    assert chosen(2, [0, 1, 2], {2: 30}) == [0, 2], "and one more"
    assert chosen(2, [0, 1, 2, 3], {}) == [0, 1], "none is shared yet"
    assert chosen(1, [0, 1], {7: 30}) == [0], "the shared one is not to be had"
    assert chosen(3, [0, 1], {0: 30}) is None
    assert chosen(2, [0, 1, 2, 3], {1: 10, 2: 20, 3: 30}, near="numa") == [2, 3]
    assert chosen(1, [0, 1], {1: 30}, last=("GPU-1",)) == [0], "one that failed is shared last"


def test_what_frameworks_may_allocate() -> None:
    assert share_fraction(20 * GIB, [gpu()]) == pytest.approx(19.5 / 80)
    assert share_fraction(20 * GIB, [gpu(), gpu(1, memory_total=TOTAL * 2)]) == pytest.approx(19.5 / 160)


# The queue


def test_a_holder_that_does_not_say_how_much_counts_as_all() -> None:
    holder = Holder.of_sharers([sharer(1, 20 * GIB, until=50.0, since=1.0), sharer(2, None, until=90.0, since=1.0)])
    when = when_free(gpu(), holder, 10.0, free=False)
    assert [ready(when, share) for share in (20 * GIB, 30 * GIB, math.inf)] == [50, 90, 90]


def want(nb: int, share: float = math.inf, hold_for: float = math.inf, gpus: str = "0") -> BackfillRequest:
    return BackfillRequest(nb, frozenset(gpus), hold_for, share=share)


def test_expected_starts_fill_a_gpu_up_and_no_further() -> None:
    free_now = {"0": ((0.0, 80.0),)}
    assert starts([want(1, 40, 10), want(1, 40, 20), want(1, 40, 5), want(1, hold_for=5)], free_now) == [0, 0, 10, 20]


sizes = st.integers(1, 80)


@given(st.lists(st.tuples(st.integers(0, 50), sizes), max_size=6), sizes)
def test_whole_requests_wait_for_all_and_shares_for_what_they_need(parts: list[tuple[int, int]], share: int) -> None:
    when = (*parts, (0, 0))
    moment = ready(when, share)
    assert moment == math.inf or sum(size for end, size in when if end <= moment) >= share
    assert all(sum(size for end, size in when if end <= earlier) < share for earlier, _ in when if earlier < moment)
    assert ready(when, math.inf) == max(end for end, _ in when)
