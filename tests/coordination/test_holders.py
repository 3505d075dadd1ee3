"""Who holds what, who is in whose way, and whom an entry names. Doors: real sockets of real processes, which are asked
from other processes and die in any order."""

import itertools
import json
import os
import resource
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import api
from support.actor import Actor
from support.forks import CAN_TRACE, each_point
from support.processes import own_network
from support.real import long

ANNA, BEN = 4711, 4712
GIB = 1 << 30


def entry(number: int, gpus: Any = ("a",), uid: int = ANNA, **said: Any) -> api.Entry:
    """A claim as it is read back: of whole GPUs, or of the shares that are given."""
    shares = gpus if isinstance(gpus, dict) else dict.fromkeys(gpus)
    data = json.dumps({"v": 1, "gpus": shares, **said}).encode()
    return api.Entry.read(f"{number}.{number:016x}", uid, (1, number), data)


# In whose way


AROUND = entry(1, "ab", token="t")
INSIDE = entry(2, "a", inside="t")
FORGED = entry(4, "a", BEN, inside="t")
SHARE = entry(5, {"a": GIB})
TICKET = entry(6, [], nb_gpus=1)
ITSELF = entry(8, "a", token="t", inside="t")
SECOND, THIRD = entry(9, "a", token="u", inside="t"), entry(10, "a", inside="u")
UNKNOWN = entry(7, "a", -1, token="t")


@pytest.mark.parametrize(
    ("living", "uuid", "inside", "in_the_way"),
    [
        ([AROUND], "a", "", [AROUND]),
        ([AROUND, INSIDE], "a", "t", [INSIDE]),
        ([INSIDE], "a", "", [INSIDE]),  # the claim around it has ended
        ([AROUND, FORGED], "a", "", [AROUND, FORGED]),  # another user's word opens no claim
        ([UNKNOWN, INSIDE], "a", "", [UNKNOWN, INSIDE]),  # of nobody, so nothing is inside it
        ([SHARE, TICKET], "a", "", [SHARE]),
        ([ITSELF], "a", "", [ITSELF]),  # inside itself, and so in nobody's way
        ([AROUND, SECOND, THIRD], "a", "", [AROUND, THIRD]),  # there is one level
    ],
)
def test_who_takes_room_from_a_claim(
    living: list[api.Entry], uuid: str, inside: str, in_the_way: list[api.Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: ANNA)
    assert api.Claims(living).in_the_way(uuid, inside) == in_the_way


def test_parts_of_what_takes_room_are_known() -> None:
    parts = [entry(1, "ab", parts={"a": 3}), entry(2, {"a": GIB}, parts={"a": 0}), entry(3, "b", parts={"b": 1})]
    assert api.Claims(parts).parts("a") == {0, 3}
    assert api.Claims(parts).parts("c") == set()
    inside = [entry(4, "a", parts={"a": 0}, token="t"), entry(5, "a", parts={"a": 1}, inside="t")]
    assert api.Claims(inside).parts("a") == {0}


class World:
    """Claims that are made by the rule alone, and end at any time. A GPU has one claim, or shares that fit."""

    CAPACITY = 4

    def __init__(self) -> None:
        self.living: list[api.Entry] = []
        self.made = 0

    def claim(self, uid: int, gpus: str, share: int | None, around: int) -> None:
        """One more claim, inside a living claim of that user or beside all, if there is room."""
        claims, inside = api.Claims(self.living), ""
        open_to = [one for one in self.living if one.token and one.uid == uid]
        if open_to and around:
            outer = open_to[around % len(open_to)]
            inside, share, gpus = outer.token, None, [uuid for uuid in gpus if uuid in outer.gpus]
        needs = self.CAPACITY if share is None else share
        if gpus and all(self.room(claims, uuid, inside) >= needs for uuid in gpus):
            self.made += 1
            token = f"t{self.made}" if share is None and not inside else ""
            self.living.append(entry(self.made, dict.fromkeys(gpus, share), uid, token=token, inside=inside))

    def room(self, claims: api.Claims, uuid: str, inside: str) -> int:
        taken = (one.gpus[uuid] for one in claims.in_the_way(uuid, inside))
        return self.CAPACITY - sum(self.CAPACITY if share is None else share for share in taken)

    def check(self) -> None:
        for uuid in "ab":
            on = [one for one in self.living if uuid in one.gpus]
            for first, second in combinations(on, 2):
                nested = {(first.token, second.inside), (second.token, first.inside)}
                around = first.uid == second.uid and any(token and token == inside for token, inside in nested)
                assert around or None not in (first.gpus[uuid], second.gpus[uuid]), (first, second)
            assert sum(one.gpus[uuid] or 0 for one in on) <= self.CAPACITY


USERS, GPUS = st.sampled_from([ANNA, BEN]), st.sampled_from(["a", "b", "ab"])
SHARES = st.sampled_from([None, None, 1, 2])


@settings(max_examples=100)
@given(st.lists(st.tuples(USERS, GPUS, SHARES, st.integers(0, 2)) | st.integers(0, 9), max_size=30))
def test_by_the_rule_no_gpu_has_two_users(steps: list[Any]) -> None:
    """But for a claim and those inside it."""
    world = World()
    for step in steps:
        if not isinstance(step, int):
            world.claim(*step)
        elif world.living:
            world.living.pop(step % len(world.living))
        world.check()


# The claim around a process


def this_process(pid: int, **said: Any) -> api.Entry:
    start = api.procfs.start_time(pid)
    return entry(pid, "a", os.geteuid(), **{"pid": pid, "start": start, "pidns": api.procfs.pid_namespace(), **said})


def test_of_a_process_its_own_claim_counts_then_its_nearest_ancestors() -> None:
    scoped = entry(1, "a", os.geteuid(), pid=999_999_999, start=1, token=api.digest("secret"))
    me = this_process(os.getpid())
    parents = [this_process(pid) for pid in api.procfs.ancestors(os.getpid())]
    assert api.holders.enclosing_claim([*reversed(parents), scoped, me], "secret") == me
    if parents:
        assert api.holders.enclosing_claim([*reversed(parents), scoped], "secret") == parents[0]
    assert api.holders.enclosing_claim([scoped], "secret") == scoped
    assert api.holders.enclosing_claim([scoped], "other") is None
    assert api.holders.enclosing_claim([me._replace(start=me.start + 1)], "") is None, (
        "a recycled pid is another process"
    )
    assert api.holders.enclosing_claim([me._replace(pidns=me.pidns + 1)], "") is None, "nor is one of another namespace"


def test_a_scope_names_its_gpus(state_dir: Path) -> None:
    with api.Directory(str(state_dir), "claims") as claims:
        said = {"gpus": {"b": None, "a": None}, "token": api.digest("secret")}
        _, held = api.make_entry(claims, 1, said, by_children=False)
        assert api.holders.gpus_of_scope("secret") == ("a", "b")
        assert api.holders.gpus_of_scope(api.digest("secret")) == api.holders.gpus_of_scope("") == ()
        held.release()
        assert api.holders.gpus_of_scope("secret") == ()


# Whom an entry names


def test_a_living_process_is_named_with_the_owner_of_the_file() -> None:
    mine = this_process(os.getpid(), command="train", job="sge:1", since=5.0, until=9.0, queued=2.0)
    told = api.holders.holder_of(mine)
    assert (told.pid, told.uid, told.user) == (os.getpid(), os.geteuid(), api.procfs.user_name(os.geteuid()))
    assert (told.job, told.since, told.until, told.queued, told.left_by) == ("sge:1", 5.0, 9.0, 2.0, None)
    assert told.command not in (None, "train"), "what it runs now"


@pytest.mark.parametrize("changes", [{"start": 1}, {"pid": 0}, {"uid": -1}], ids=str)
def test_a_process_that_is_not_that_one_is_not_named(changes: dict[str, int]) -> None:
    """A pid that is used again, one that was never there, one of nobody knows whom."""
    other = this_process(os.getpid())._replace(**changes)
    assert not api.holders.lives_here(other)
    told = api.holders.holder_of(other)
    assert (told.pid, told.start) == (None, None)
    assert told.left_by == other.pid
    there = this_process(os.getpid())._replace(pidns=7, pid=12)
    told = api.holders.holder_of(there)
    assert not api.holders.lives_here(there)
    assert (told.pid, told.start, told.left_by) == (12, None, None), "its number in another namespace"
    assert told.namespace
    assert api.holders.holder_as_written(there).pid is None


# Doors


TOKEN = "0123456789abcdef"


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> str:
    """A GPU that no other test has."""
    return f"GPU-{os.getpid()}-{abs(hash(request.node.nodeid)) % 10**9}"


@pytest.fixture
def make() -> Iterator[Callable[..., api.Doors]]:
    """Make doors that do not outlive the test."""
    with ExitStack() as made:

        def one(tree: str = "") -> api.Doors:
            doors = api.Doors(tree)
            made.callback(doors.release)
            return doors

        yield one


@pytest.fixture
def doors(make: Callable[..., api.Doors]) -> api.Doors:
    return make()


def is_free(gpu: str, known: Collection[int] = (), *, share: bool = False) -> bool:
    """Whether another claim could have a GPU, or a part of it."""
    other = api.Doors()
    try:
        return other.take_share(gpu, known) if share else other.take_whole(gpu, known)
    finally:
        other.release()


def test_a_whole_gpu_is_held_once(gpu: str, doors: api.Doors, make: Callable[..., api.Doors]) -> None:
    assert doors.take_whole(gpu, ())
    assert not is_free(gpu)
    assert not is_free(gpu, share=True)
    assert make("sim-1/").take_whole(gpu, ())
    doors.release()
    doors.release()
    assert is_free(gpu)


def test_shares_have_a_part_each(gpu: str, make: Callable[..., api.Doors]) -> None:
    sharers = [make() for _ in range(api.MOST_PARTS)]
    for number, sharer in enumerate(sharers):
        assert is_free(gpu, range(number - 1), share=True) == (number == 0), "one is of another directory"
        assert sharer.take_share(gpu, range(number))
        assert sharer.parts == {gpu: number}
    assert not is_free(gpu, range(api.MOST_PARTS), share=True)
    assert not is_free(gpu)
    sharers[3].release()
    assert is_free(gpu, [part for part in range(api.MOST_PARTS) if part != 3], share=True)


def test_doors_inside_another_claim(gpu: str, doors: api.Doors, make: Callable[..., api.Doors]) -> None:
    assert doors.take_whole(gpu, (), TOKEN)
    inner, second, late = make(), make(), make()
    assert inner.take_inside(gpu, {0}, TOKEN)
    assert second.take_inside(gpu, {0, 1}, TOKEN)
    assert not late.take_inside(gpu, {0}, "another token")
    doors.release()
    assert not late.take_inside(gpu, {0}, TOKEN)
    assert not is_free(gpu), "who is inside keeps other directories off"
    inner.release()
    second.release()
    assert is_free(gpu)


@long
@pytest.mark.skipif(not CAN_TRACE, reason="cannot trace processes here")
def test_whichever_way_they_are_closed_one_of_the_token_goes_before_the_gpu(gpu: str) -> None:
    """As a process is killed, released or ends at any system call, nobody is inside once the GPU could be had."""

    def work() -> None:
        mine = api.Doors()
        assert mine.take_whole(gpu, (), TOKEN)
        mine.keep_across_exec()
        mine.release()

    for stop in each_point(work):
        assert not api.Doors().is_inside(gpu, TOKEN), stop
        assert is_free(gpu), stop


@pytest.mark.parametrize("lowest_first", [True, False])
def test_descriptors_of_a_delegating_claim_stand_in_order(gpu: str, doors: api.Doors, lowest_first: bool) -> None:
    """Also where a lower number becomes free meanwhile."""
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(6)]
    bound = api.doors.bind_name

    def bound_and_closed(name: bytes, above: int) -> Any:
        held = bound(name, above)
        if taken:
            os.close(taken.pop(0 if lowest_first else -1))
        return held

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api.doors, "bind_name", bound_and_closed)
        assert doors.take_whole(gpu, (), TOKEN)
    for fd in taken:
        os.close(fd)
    numbers = [held.fd for held in doors._held]
    assert numbers == sorted(numbers)
    doors.keep_across_exec()
    numbers = [held.fd for held in doors._held]
    assert numbers == sorted(numbers)
    assert min(numbers) >= 500
    assert api.Doors().is_inside(gpu, TOKEN)


def test_doors_belong_to_the_network_namespace(gpu: str, doors: api.Doors) -> None:
    assert doors.take_whole(gpu, ())
    with own_network():
        assert is_free(gpu)


@pytest.mark.parametrize("room", [1, 5])
def test_descriptors_of_doors_stay_in_order_below_a_low_limit(gpu: str, doors: api.Doors, room: int) -> None:
    """The limit is so low that they are moved to numbers next to their own, or not at all."""
    assert doors.take_whole(gpu, (), TOKEN)
    last = doors._held[-1].fd
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + room, hard))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "sysconf", lambda name: 2 * (last - 1))
            doors.keep_across_exec()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    numbers = [held.fd for held in doors._held]
    assert numbers == sorted(numbers)
    assert all(map(os.get_inheritable, numbers))


def test_forked_children_close_the_doors(gpu: str, doors: api.Doors, eventually: Any) -> None:
    assert doors.take_whole(gpu, ())
    child = Actor(lambda line: (line.send("up"), line.recv()))
    assert child.hear() == "up"
    doors.release()
    assert doors.take_whole(gpu, ())
    child.end()


def test_without_sockets_the_error_comes_up_and_nothing_stays(gpu: str, doors: api.Doors) -> None:
    made, calls = api.doors.socket, itertools.count()

    def refuse(*arguments: int) -> Any:
        if next(calls) == 3:
            raise PermissionError(1, "Operation not permitted")
        return made(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api.doors, "socket", refuse)
        with pytest.raises(PermissionError):
            doors.take_whole(gpu, (), TOKEN)
    assert is_free(gpu)


def test_without_sockets_nothing_is_held_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.Doors, "are_taken", Mock(side_effect=PermissionError("no sockets")))
    assert api.holders.claims_now([api.Gpu(0, "GPU-a")], "", list)[1] == {}


# Who keeps an entry whose process has ended


def test_who_keeps_an_entry_is_found_by_its_file(open_tmp: Path) -> None:
    """It stands under the lowest of its names, and other files may have the name of an entry."""
    with api.Directory(str(open_tmp), "claims") as claims:
        keeper = Actor(
            lambda line: (line.send(api.make_entry(claims, 7, {"gpus": {}}, by_children=True)[0]), line.recv())
        )
        name = keeper.hear()
        first = f"1.{'0' * 16}"
        os.link(name, first, src_dir_fd=claims.fd, dst_dir_fd=claims.fd)
        (living,) = api.Entries(claims).look()
        assert living.name == first
        other = open_tmp / first
        with other.open("w") as file:
            api.entry.lock(file.fileno())
            assert api.keepers_of([living]) == {first: [keeper.pid]}
        keeper.end()
        assert api.keepers_of([living]) == {}


def test_of_each_owner_some_thousand_descriptors_are_looked_at(open_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each process some, however many it has: a neighbour may say that one that is gone has made its entry."""
    looked_at: list[str] = []
    many = [str(number) for number in range(9000)]
    monkeypatch.setattr(api.procfs, "pids", lambda: range(1, 60))
    monkeypatch.setattr(api.procfs, "uid_of", lambda pid: ANNA)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(api.procfs, "descriptors", lambda pid: iter(many))
    monkeypatch.setattr(os, "readlink", lambda path: looked_at.append(path) or "/dev/null")
    assert api.keepers_of([entry(1)]) == {}
    assert len(looked_at) == 20_000
