"""Who holds what, who is in whose way, and whom an entry names."""

import json
import os
import shutil
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safe_gpu.coordination import holders
from safe_gpu.coordination.directory import Directory
from safe_gpu.coordination.doors import Doors, digest
from safe_gpu.coordination.entry import Entry, make_entry
from safe_gpu.coordination.holders import Claims
from safe_gpu.host import procfs

ANNA, BEN = 4711, 4712
GIB = 1 << 30


def entry(number: int, gpus: Any = ("a",), uid: int = ANNA, **said: Any) -> Entry:
    """A claim as it is read back: of whole GPUs, or of the shares that are given."""
    shares = gpus if isinstance(gpus, dict) else dict.fromkeys(gpus)
    data = json.dumps({"v": 1, "gpus": shares, **said}).encode()
    return Entry.read(f"{number}.{number:016x}", uid, (1, number), data)


# In whose way


AROUND = entry(1, "ab", token="t")
INSIDE = entry(2, "a", inside="t")
FORGED = entry(4, "a", BEN, inside="t")
SHARE = entry(5, {"a": GIB})
TICKET = entry(6, [], nb_gpus=1)
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
    ],
)
def test_who_takes_room_from_a_claim(
    living: list[Entry], uuid: str, inside: str, in_the_way: list[Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: ANNA)
    assert Claims(living).on(uuid, inside) == in_the_way


def test_parts_of_what_takes_room_are_known_and_of_sharers_each_is_told() -> None:
    parts = [entry(1, "ab", parts={"a": 3}), entry(2, {"a": GIB}, parts={"a": 0}), entry(3, "b", parts={"b": 1})]
    assert Claims(parts).parts("a") == {0, 3}
    assert Claims(parts).parts("c") == set()
    inside = [entry(4, "a", parts={"a": 0}, token="t"), entry(5, "a", parts={"a": 1}, inside="t")]
    assert Claims(inside).parts("a") == {0}
    shares = [entry(1, {"a": GIB, "b": 2 * GIB}), entry(2, {"a": 3 * GIB}, BEN)]
    found = Claims(shares).holders(told=False)
    assert [(one.uid, one.share) for one in found["a"].sharers] == [(ANNA, GIB), (BEN, 3 * GIB)]
    assert [one.share for one in found["b"].sharers] == [2 * GIB]
    whole = Claims([*shares, entry(3, "a", BEN)]).holders(told=False)["a"]
    assert (whole.uid, whole.sharers) == (BEN, ())


class World:
    """Claims that are made by the rule alone, and end at any time. A GPU has one claim, or shares that fit."""

    CAPACITY = 4

    def __init__(self) -> None:
        self.living: list[Entry] = []
        self.made = 0

    def claim(self, uid: int, gpus: str, share: int | None, around: int) -> None:
        """One more claim, inside a living claim of that user or beside all, if there is room."""
        claims, inside = Claims(self.living), ""
        open_to = [one for one in self.living if one.token and one.uid == uid]
        if open_to and around:
            outer = open_to[around % len(open_to)]
            inside, share, gpus = outer.token, None, [uuid for uuid in gpus if uuid in outer.gpus]
        needs = self.CAPACITY if share is None else share
        if gpus and all(self.room(claims, uuid, inside) >= needs for uuid in gpus):
            self.made += 1
            token = f"t{self.made}" if share is None and not inside else ""
            self.living.append(entry(self.made, dict.fromkeys(gpus, share), uid, token=token, inside=inside))

    def room(self, claims: Claims, uuid: str, inside: str) -> int:
        taken = (one.gpus[uuid] for one in claims.on(uuid, inside))
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


@settings(max_examples=300)
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


def this_process(pid: int, **said: Any) -> Entry:
    start = procfs.start_time(pid)
    return entry(pid, "a", os.geteuid(), **{"pid": pid, "start": start, "pidns": procfs.pid_namespace(), **said})


def test_of_a_process_its_own_claim_counts_then_its_nearest_ancestors() -> None:
    scoped = entry(1, "a", os.geteuid(), pid=999_999_999, start=1, token=digest("secret"))
    me = this_process(os.getpid())
    parents = [this_process(pid) for pid in procfs.ancestors(os.getpid())]
    assert holders.claim_around([*reversed(parents), scoped, me], "secret") == me
    if parents:
        assert holders.claim_around([*reversed(parents), scoped], "secret") == parents[0]
    assert holders.claim_around([scoped], "secret") == scoped
    assert holders.claim_around([scoped], "other") is None
    assert holders.claim_around([me._replace(start=me.start + 1)], "") is None, "a recycled pid is another process"
    assert holders.claim_around([me._replace(pidns=me.pidns + 1)], "") is None, "nor is one of another namespace"


def test_a_scope_names_its_gpus(state_dir: Path) -> None:
    with Directory(str(state_dir), "claims") as claims:
        said = {"gpus": {"b": None, "a": None}, "token": digest("secret")}
        _, held = make_entry(claims, 1, said, by_children=False)
        assert holders.gpus_of_scope("secret") == ("a", "b")
        assert holders.gpus_of_scope(digest("secret")) == holders.gpus_of_scope("") == ()
        held.release()
        assert holders.gpus_of_scope("secret") == ()
    shutil.rmtree(state_dir)
    state_dir.write_text("no directory")
    assert holders.gpus_of_scope("secret") == ()


# Whom an entry names


def test_a_living_process_is_named_with_the_owner_of_the_file() -> None:
    mine = this_process(os.getpid(), command="train", job="sge:1", since=5.0, until=9.0, queued=2.0)
    told = holders.holder_of(mine)
    assert (told.pid, told.uid, told.user) == (os.getpid(), os.geteuid(), procfs.user_name(os.geteuid()))
    assert (told.job, told.since, told.until, told.queued, told.left_by) == ("sge:1", 5.0, 9.0, 2.0, None)
    assert told.command not in (None, "train"), "what it runs now"


@pytest.mark.parametrize("changes", [{"start": 1}, {"pid": 0}, {"uid": -1}], ids=str)
def test_a_process_that_is_not_that_one_is_not_named(changes: dict[str, int]) -> None:
    """A pid that is used again, one that was never there, one of nobody knows whom."""
    other = this_process(os.getpid())._replace(**changes)
    assert not holders.lives_here(other)
    told = holders.holder_of(other)
    assert (told.pid, told.start) == (None, None)
    assert told.left_by == other.pid
    there = this_process(os.getpid())._replace(pidns=7, pid=12)
    told = holders.holder_of(there)
    assert not holders.lives_here(there)
    assert (told.pid, told.start, told.left_by) == (12, None, None), "its number in another namespace"
    assert told.namespace
    assert holders.said_by(there).pid is None


# Elsewhere


def test_what_another_state_directory_holds_is_seen_by_its_doors() -> None:
    uuids = [f"GPU-{os.urandom(8).hex()}" for _ in range(3)]
    whole, shared, free = uuids
    doors, own = Doors(), Doors()
    try:
        assert doors.take_whole(whole, ())
        assert doors.take_share(shared, ())
        assert own.take_whole(free, ())
        here = [entry(1, [free], parts={})]
        assert holders.claims_now(uuids, "", lambda: here)[1] == {whole, shared}
        known = [*here, entry(2, {shared: GIB}, parts={shared: doors.parts[shared]}), entry(3, [whole])]
        assert holders.claims_now(uuids, "", lambda: known)[1] == set()
    finally:
        doors.release()
        own.release()


def test_without_sockets_nothing_is_held_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Doors, "are_taken", Mock(side_effect=PermissionError("no sockets")))
    assert holders.claims_now(["GPU-a"], "", list)[1] == set()
