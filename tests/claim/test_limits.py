"""Limits and turns of users who claim and wait, where root's file says so, with real users and tickets."""

import os
import re
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.claims import claim
from support.forks import in_fork
from support.guard import is_locked

from safe_gpu import ClaimTimeout, NotEnoughGpusError, PolicyError, UnsatisfiableRequestError
from safe_gpu.claim import report, search
from safe_gpu.claim.functions import wait_for_gpus
from safe_gpu.claim.limits import quota_of, remaining_quota
from safe_gpu.claim.report import waiting_message
from safe_gpu.coordination import queue
from safe_gpu.coordination.entry import make_entry
from safe_gpu.coordination.holders import living_claims
from safe_gpu.coordination.host_lock import Host
from safe_gpu.coordination.queue import waiting_tickets
from safe_gpu.coordination.turns import turn_of
from safe_gpu.drivers.simulated import SimulatedDriver
from safe_gpu.engines.holder import ClaimArguments, HolderProcess
from safe_gpu.host import procfs
from safe_gpu.settings import config as policy
from safe_gpu.status.gather import gather

ANNA, BEN, CARLA = 4711, 4712, 4713

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose file a policy must be")


def held_by(uid: int) -> int:
    return len({uuid for one in living_claims() if one.uid == uid for uuid in one.gpus})


def test_a_limit_at_its_edges(rules: Any, user: Any) -> None:
    rules("[default]\nmax_gpus = 3")
    assert "4 GPUs asked for, and " in (refused := user(ANNA, 4, timeout=None).hear())
    assert "allows you 3 at once on this host ([default]): ask for fewer" in refused
    first = user(ANNA, 2)
    assert first.hear() == "2"
    assert "you hold 2 of your 3 GPUs: wait for them (timeout=" in user(ANNA, 2).hear()
    assert user(ANNA, 1).hear() == "1"
    assert "1 GPU asked for, 5 free, and you hold 3 of your 3 GPUs" in user(ANNA, 1).hear()
    assert user(BEN, 3).hear() == "3"  # limits are for each user
    first.tell()
    assert first.hear() == "released"
    assert user(ANNA, 2).hear() == "2"


def test_claims_at_the_same_moment_never_exceed_it(rules: Any, user: Any) -> None:
    """Six processes of one user claim two GPUs each, and four are allowed."""
    rules("[default]\nmax_gpus = 4")
    crowd = [user(ANNA, 2, gate=True) for _ in range(6)]
    assert [one.hear() for one in crowd] == ["ready"] * 6
    for one in crowd:
        one.tell()
    answers = [one.hear() for one in crowd]
    assert answers.count("2") == 2
    assert sum("you hold 4 of your 4 GPUs" in answer for answer in answers) == 4


def test_others_pass_a_waiter_whose_user_is_at_the_limit(rules: Any, user: Any, waiting: Any, eventually: Any) -> None:
    rules("[user 4711]\nmax_gpus = 2")
    first = user(ANNA, 2)
    assert first.hear() == "2"
    in_front = waiting(ANNA, 1)
    passing = [user(BEN, 2), user(CARLA, 3)]
    assert [one.hear() for one in passing] == ["2", "3"]
    assert "you hold 2 of your 2 GPUs" in user(ANNA, 1).hear()
    first.tell()  # and she gets hers
    assert first.hear() == "released"
    assert in_front.hear() == "1"


def test_a_waiter_below_the_limit_is_not_passed(rules: Any, user: Any, waiting: Any, ground: Any) -> None:
    rules("[default]\nmax_gpus = 7\n[user 4712]\nmax_gpus = 8")
    assert user(ANNA, 2).hear() == "2"
    in_front = waiting(BEN, 8)  # he holds nothing
    refused = user(CARLA, 1).hear()
    assert f"behind {procfs.user_name(BEN)} (pid {in_front.pid}" in refused


def test_claims_of_the_same_user_keep_their_order(rules: Any, user: Any, waiting: Any) -> None:
    """The first wants more than is left to her, the second does not. Else her large requests would starve."""
    rules("[default]\nmax_gpus = 4")
    assert user(ANNA, 2).hear() == "2"
    in_front = waiting(ANNA, 3)
    assert f"(pid {in_front.pid}" in user(ANNA, 1).hear()
    assert user(BEN, 1).hear() == "1"


def test_limits_of_those_who_wait_are_known_before_the_look(rules: Any, ground: Any, waiting: Any) -> None:
    """Whose limit is not known yet, since he came meanwhile, is not passed, and the look is made again at once."""
    path = rules("[default]\nmax_gpus = 1\n[user 4712]\nmax_gpus = 5\nmax_wait = 1h")
    found = quota_of(str(path), pytest.fail)
    assert found is not None
    with Host() as host:
        host.look()
        found.prepare(host)
        assert (found.most_of(BEN), found.unresolved) == (None, True)
        ground.hold(0)
        waiting(BEN, only=0)
        host.look()
        found.prepare(host)
        assert (found.most_of(BEN), found.unresolved) == (5, False)


def test_inner_claims_are_neither_counted_nor_limited(rules: Any, as_user: Any) -> None:
    rules("[default]\nmax_gpus = 2\nmax_hold = 5\nmax_wait = 0")

    def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        with claim(2, delegate=True):
            say(in_fork(lambda: [len(claim(2, timeout=9, hold_for=99).gpus), held_by(ANNA)]))

    assert as_user(work, uid=ANNA).hear() == "[2, 2]"


NAMED = "[user root]\n"


@pytest.mark.parametrize(
    ("text", "said", "seconds"),
    [
        ("default_hold = 60", None, 60.0),
        ("default_hold = 60", "90", 90.0),
        ("default_hold = 60\nmax_hold = 30", None, 30.0),
        ("max_hold = 30", None, 30.0),
        ("max_hold = 30", "20", 20.0),
        ("max_gpus = 8", None, None),
    ],
)
def test_how_long_a_claim_will_hold(rules, monkeypatch, text: str, said: str | None, seconds: float | None) -> None:
    rules(NAMED + text)
    if said is not None:
        monkeypatch.setenv("SAFE_GPU_FOR", said)
    with claim():
        (entry,) = living_claims()
        assert (None if entry.until is None else round(entry.until - entry.since, 1)) == seconds


def test_what_is_said_in_the_call(rules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rules(NAMED + "max_hold = 1h\ndefault_hold = 5m")
    with pytest.raises(
        UnsatisfiableRequestError, match=r"hold_for= says 1 h 1 min, and .* allows you 1 h \(\[user root"
    ):
        claim(hold_for=3660)
    monkeypatch.setenv("SAFE_GPU_FOR", "2h")
    with pytest.raises(UnsatisfiableRequestError, match="SAFE_GPU_FOR says 2 h"):
        claim()


def test_max_wait_ends_a_wait(rules: Any, ground: Any, command: Any) -> None:
    path = rules(NAMED + "max_wait = 0")
    ground.hold(*range(8))
    done = command.run("run", "--timeout", "inf", "--", "true")
    assert done.returncode == 75
    assert f"1 GPU asked for, 0 free: try again ({path} limits the wait)." in done.stderr


def test_nothing_is_taken_in_a_foreseen_claim_beyond_the_limit(rules: Any, user: Any) -> None:
    rules(NAMED + "max_gpus = 1")
    assert len(wait_for_gpus(1, timeout=0)) == 1
    assert user(0).hear() == "1"
    with pytest.raises(NotEnoughGpusError, match="you hold 1 of your 1 GPU"):
        wait_for_gpus(1, timeout=0)


def test_a_wrong_line_fails_claims(rules: Any, command: Any) -> None:
    path = rules("[default]\nmax_gpus = many")
    with pytest.raises(PolicyError, match=f"{path}:2: max_gpus = many"):
        claim()
    done = command.run("run", "--", "true")
    assert (done.returncode, done.stderr.startswith(f"safe-gpu: {path}:2: ")) == (78, True)


def test_a_file_that_others_may_write_or_that_is_missing_limits_nothing(rules: Any, caplog: Any) -> None:
    path = rules(NAMED + "max_gpus = 0")
    path.chmod(0o666)
    claim().release_gpus()
    assert "can be written by others than root (mode 0666): it is ignored" in caplog.text
    path.unlink()
    claim().release_gpus()
    assert f"SAFE_GPU_POLICY={path} does not exist: nothing is limited" in caplog.text


def test_groups_are_resolved_before_the_lock(rules: Any, monkeypatch: pytest.MonkeyPatch, state_dir: Path) -> None:
    """A directory service may take seconds to answer."""
    rules(NAMED + "max_gpus = 3\n[group staff]\nmax_gpus = 2")
    asked = []

    def gid(group: str) -> int:
        asked.append((group, is_locked(state_dir / "host.lock")))
        return 1

    monkeypatch.setattr(policy, "gid_of", gid)
    claim().release_gpus()
    assert asked == [("staff", False)]


def test_room_for_claims_across_hosts(rules: Any, user: Any) -> None:
    path = rules(NAMED + "max_gpus = 3")
    snapshot = SimulatedDriver("dgx-a100").snapshot()
    holder = HolderProcess(ClaimArguments(), "a test")
    assert holder.report(1).free == 3
    assert holder.report(4).free == -1
    assert user(0, 2).hear() == "2"
    assert remaining_quota(snapshot, 1) == 1
    assert holder.report(1).free == 1
    assert user(0).hear() == "1"
    assert holder.report(1).free == 0
    path.unlink()
    assert holder.report(1).free == 5


def test_a_share_counts_as_its_part_of_a_gpu(rules: Any, user: Any) -> None:
    rules("[default]\nmax_gpus = 1")
    assert user(ANNA, 2, share="20GiB").hear() == "2"
    assert "you hold 0.5 of your 1 GPU" in user(ANNA, 3, share="20GiB").hear()
    assert "you hold 0.5 of your 1 GPU" in user(ANNA).hear()
    assert "1.2 GPUs asked for" in user(BEN, 5, share="20GiB").hear()
    assert user(BEN).hear() == "1"
    assert user(ANNA, 2, share="20GiB").hear() == "2"
    assert "you hold 1 of your 1 GPU" in user(ANNA, share="1GiB").hear()


def test_a_raised_limit_reaches_those_who_wait(rules: Any, user: Any, eventually: Any) -> None:
    rules("[default]\nmax_gpus = 1")
    assert user(ANNA).hear() == "1"
    waiter = user(ANNA, timeout=None)
    eventually(lambda: bool(gather().queue))
    rules("[default]\nmax_gpus = 2")
    assert waiter.hear() == "1"


def test_a_killed_claim_counts_no_more_whatever_gpu_it_had(rules: Any, user: Any, waiting: Any) -> None:
    """Who waits at the limit for another GPU asks it again, and nobody else has removed its entry."""
    rules("[default]\nmax_gpus = 1")
    holder = user(ANNA, only=7)
    assert holder.hear() == "1"
    waiter = waiting(ANNA, only=0)
    holder.end()
    assert waiter.hear() == "1"


# Users who wait are served by turns


def served(holder: Any, crowd: list[Any]) -> Any:
    """Let a holder go, and return who of a crowd gets its GPUs."""
    holder.tell()
    assert holder.hear() == "released"
    ready = select.select([one.line for one in crowd], [], [], 60)[0]
    assert len(ready) == 1, "nobody, or more than one, was served"
    one = next(one for one in crowd if one.line in ready)
    one.hear()
    crowd.remove(one)
    return one


@pytest.mark.parametrize("order", ["fifo", "fair"])
def test_one_request_does_not_wait_for_a_sweep(
    rules: Any, user: Any, waiting: Any, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_EARLY_INTERVAL", 1e6)  # each is woken by whom it waits for, or never
    rules(f"[host]\norder = {order}")
    holders = [user(ANNA, 1) for _ in range(8)]
    assert [one.hear() for one in holders] == ["1"] * 8
    sweep = [waiting(ANNA) for _ in range(4)]
    ben = waiting(BEN)
    crowd = [*sweep, ben]
    # Anna holds eight, so her first ticket has the turn 8.5; Ben comes after that one and before her next.
    expected = [sweep[0], ben, *sweep[1:]] if order == "fair" else [*sweep, ben]
    assert [one.pid for one in waiting_tickets()] == [one.pid for one in expected]
    assert [served(holder, crowd) for holder in holders[:5]] == expected


@pytest.mark.parametrize(("before", "after", "turns"), [("fifo", "fair", [None]), ("fair", "fifo", [1.0])])
def test_a_claim_keeps_the_order_in_which_it_began(
    rules: Any, line: Any, stranger: Any, monkeypatch: pytest.MonkeyPatch, before: str, after: str, turns: list[Any]
) -> None:
    """Else it could wait for one who waits for it. Root changes the order between two looks."""
    rules(f"[host]\norder = {before}")
    line(1, (0,))
    written, confirm = list[Any](), search.confirm

    def changing(*arguments: Any) -> bool:
        rules(f"[host]\norder = {after}")
        stranger(*range(8))
        return confirm(*arguments)

    def writing(directory: Any, number: int, said: Any, **more: Any) -> Any:
        written.append(said.get("turn"))
        return make_entry(directory, number, said, **more)

    monkeypatch.setattr(search, "confirm", changing)
    monkeypatch.setattr(queue, "make_entry", writing)
    with pytest.raises(ClaimTimeout):
        claim(1, only=range(1, 8), timeout=2)
    assert written == turns


def test_tickets_have_turns_only_where_the_order_is_fair(rules: Any, user: Any, waiting: Any) -> None:
    """Who changes the order while some wait changes nobody's place."""
    rules("[host]\norder = fifo")
    holder = user(ANNA, 8)
    assert holder.hear() == "8"
    first = waiting(ANNA, 8)
    rules("[host]\norder = fair\n[user 4712]\nweight = 2")
    second = waiting(BEN, 8)
    third = waiting(BEN, 8)
    fourth = waiting(CARLA, 8)
    turns = {one.pid: turn_of(one) for one in waiting_tickets()}
    assert [turns[one.pid] for one in (first, second, third, fourth)] == [None, 0.5, 4.5, 0.5]
    crowd = [first, second, third, fourth]
    for one in (first, second, fourth, third):
        assert served(holder, crowd) is one
        holder = one


def test_a_shares_turn_is_its_part_of_a_gpu(rules: Any, user: Any, waiting: Any) -> None:
    rules("[host]\norder = fair")
    assert user(BEN, 1, share="25%").hear() == "1"
    assert user(BEN, 7).hear() == "7"
    waiting(BEN, 1, share="80%")
    waiting(BEN, 1, share="50%")
    turns = [turn_of(one) for one in sorted(waiting_tickets(), key=lambda one: one.number)]
    assert turns == pytest.approx([7.75, 7.75 + 7.75], abs=0.001)


def test_who_is_passed_is_told_who_is_in_turn(
    rules: Any, user: Any, as_user: Any, waiting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_EARLY_INTERVAL", 0.1)
    rules("[host]\norder = fair")
    assert user(ANNA, 8, hold_for=3600).hear() == "8"
    first = waiting(ANNA, 8, hold_for=60)

    def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        wait_for_gpus(8, hold_for=60, on_wait=lambda status: say(waiting_message(status, holders=False)))

    passed = as_user(work, uid=ANNA)  # has the turn 16.5, and Ben, who comes when it waits, 9

    def told(text: str) -> None:
        assert any(re.search(text, line) for line in iter(passed.hear, ""))

    told(r", #2 in the queue, starts .* or later; behind \S+ \(pid ")
    ben = waiting(BEN, 8, hold_for=60)
    assert [one.pid for one in gather().queue] == [first.pid, ben.pid, passed.pid]
    told(rf", #3 in the queue, starts .* or later; behind \S+ \(pid {ben.pid}, wants 8 GPUs, ")
    first.end()
    ben.end()
    told(r"0 free\), starts about ")
