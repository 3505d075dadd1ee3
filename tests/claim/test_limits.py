"""Limits and turns of users, where root's file says so, and how long claims wait and will hold their GPUs."""

import json
import math
import os
import re
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.claims import claim
from support.forks import json_from_child
from support.guard import is_locked

from safe_gpu import ClaimTimeout, NotEnoughGpusError, PolicyError, UnsatisfiableRequestError

ANNA, BEN, CARLA = 4711, 4712, 4713
NAMED = "[user root]\n"


@pytest.fixture
def rules(rules: Callable[[str], Path]) -> Callable[[str], Path]:
    """Write the policy of this test's host."""
    if os.geteuid() != 0:
        pytest.skip("needs root, whose file a policy must be")
    return rules


def let_go(holder: Any) -> None:
    holder.tell()
    assert holder.hear() == "released"


def test_a_limit_at_its_edges(rules: Any, claim_as: Any) -> None:
    rules("[default]\nmax_gpus = 3")
    assert "4 GPUs asked for, and " in (refused := claim_as(ANNA, 4, timeout=None).hear())
    assert "allows you 3 at once on this host ([default]): ask for fewer" in refused
    first = claim_as(ANNA, 2, gets=True)
    assert "you hold 2 of your 3 GPUs: wait for them (timeout=" in claim_as(ANNA, 2).hear()
    claim_as(ANNA, 1, gets=True)
    assert "1 GPU asked for, 5 free, and you hold 3 of your 3 GPUs" in claim_as(ANNA, 1).hear()
    claim_as(BEN, 3, gets=True)  # limits are for each user
    let_go(first)
    claim_as(ANNA, 2, gets=True)


def test_claims_at_the_same_moment_never_exceed_it(rules: Any, claim_as: Any) -> None:
    """Six processes of one user claim two GPUs each, and four are allowed."""
    rules("[default]\nmax_gpus = 4")
    crowd = [claim_as(ANNA, 2, gate=True) for _ in range(6)]
    assert [one.hear() for one in crowd] == ["ready"] * 6
    for one in crowd:
        one.tell()
    answers = sorted(one.hear() for one in crowd)
    assert answers[:2] == ["2", "2"]
    assert all("you hold 4 of your 4 GPUs" in answer for answer in answers[2:])


def test_others_pass_a_waiter_whose_user_is_at_the_limit(
    rules: Any, claim_as: Any, wait_as: Any, eventually: Any
) -> None:
    rules("[user 4711]\nmax_gpus = 2")
    first = claim_as(ANNA, 2, gets=True)
    in_front = wait_as(ANNA, 1)
    passing = [claim_as(BEN, 2), claim_as(CARLA, 3)]
    assert [one.hear() for one in passing] == ["2", "3"]
    assert "you hold 2 of your 2 GPUs" in claim_as(ANNA, 1).hear()
    let_go(first)  # and she gets hers
    assert in_front.hear() == "1"


def test_a_waiter_is_passed_neither_by_the_same_user_nor_below_the_limit(
    rules: Any, claim_as: Any, wait_as: Any
) -> None:
    """The first claim of hers wants more than is left to her, the second does not: else large requests would starve."""
    rules("[default]\nmax_gpus = 4\n[user 4712]\nmax_gpus = 9")
    claim_as(ANNA, 2, gets=True)
    in_front = wait_as(ANNA, 3)
    assert f"(pid {in_front.pid}" in claim_as(ANNA, 1).hear()
    claim_as(BEN, 1, gets=True)
    in_front = wait_as(BEN, 8)
    assert f"behind {api.procfs.user_name(BEN)} (pid {in_front.pid}" in claim_as(CARLA, 1).hear()


def test_limits_of_those_who_wait_are_known_before_the_look(rules: Any, dgx: Any, wait_as: Any) -> None:
    """Whose limit is not known yet, since he came meanwhile, is not passed, and the look is made again at once."""
    path = rules("[default]\nmax_gpus = 1\n[user 4712]\nmax_gpus = 5\nmax_wait = 1h")
    found = api.quota_of(str(path), pytest.fail)
    assert found is not None
    with api.Host() as host:
        host.prepare()
        found.prepare(host)
        assert (found.most_of(BEN), found.unresolved) == (None, True)
        dgx.hold(0)
        wait_as(BEN, only=0)
        host.prepare()
        found.prepare(host)
        assert (found.most_of(BEN), found.unresolved) == (5, False)


def test_inner_claims_are_neither_counted_nor_limited(rules: Any, as_user: Any) -> None:
    rules("[default]\nmax_gpus = 2\nmax_hold = 5\nmax_wait = 0")

    def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        with claim(2, delegate=True):
            say(json_from_child(lambda: len(claim(2, timeout=9, hold_for=99).gpus)))

    assert as_user(work, uid=ANNA).hear() == "2"


def lasts() -> float | None:
    """For how many seconds a claim says that it will last."""
    with claim():
        (entry,) = api.living_claims()
        return None if entry.until is None else round(entry.until - entry.since, 1)


def test_how_long_a_claim_will_hold(rules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, said, seconds in (
        ("default_hold = 60", "90", 90.0),
        ("default_hold = 60\nmax_hold = 30", "", 30.0),
        ("max_hold = 30", "", 30.0),
        ("max_hold = 30", "20", 20.0),
    ):
        rules(NAMED + text)
        monkeypatch.setenv("SAFE_GPU_FOR", said)
        assert lasts() == seconds


def test_what_is_said_in_the_call(rules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rules(NAMED + "max_hold = 1h\ndefault_hold = 5m")
    with pytest.raises(UnsatisfiableRequestError, match=r"hold_for= says 1 h 1 min, and .* allows you 1 h \(\[user"):
        claim(hold_for=3660)
    monkeypatch.setenv("SAFE_GPU_FOR", "2h")
    with pytest.raises(UnsatisfiableRequestError, match="SAFE_GPU_FOR says 2 h"):
        claim()


def test_max_wait_ends_a_wait(rules: Any, dgx: Any, command: Any) -> None:
    path = rules(NAMED + "max_wait = 0")
    dgx.hold(*range(8))
    done = command.run("run", "--timeout", "inf", "--", "true")
    said = f"1 GPU asked for, 0 free: try again ({path} limits the wait)\n"
    assert (done.returncode, said in done.stderr) == (75, True)


def test_wait_for_gpus_takes_nothing_and_keeps_to_the_limit(rules: Any, claim_as: Any) -> None:
    rules(NAMED + "max_gpus = 1")
    assert len(api.wait_for_gpus(1, timeout=0)) == 1
    claim_as(0, gets=True)
    with pytest.raises(NotEnoughGpusError, match="you hold 1 of your 1 GPU"):
        api.wait_for_gpus(1, timeout=0)


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

    monkeypatch.setattr("safe_gpu.settings.config.gid_of", gid)
    claim().release_gpus()
    assert asked == [("staff", False)]


def test_room_for_claims_across_hosts(rules: Any, claim_as: Any) -> None:
    path = rules(NAMED + "max_gpus = 3")
    holder = api.HolderProcess(api.ClaimArguments(), "a test")
    assert holder.report(1).free == 3
    assert holder.report(4).free == -1
    claim_as(0, 2, gets=True)
    assert holder.report(1).free == 1
    path.unlink()
    assert holder.report(1).free == 6


def test_a_share_counts_as_its_part_of_a_gpu(rules: Any, claim_as: Any) -> None:
    rules("[default]\nmax_gpus = 1")
    claim_as(ANNA, 2, share="20GiB", gets=True)
    assert "you hold 0.5 of your 1 GPU" in claim_as(ANNA, 3, share="20GiB").hear()
    assert "you hold 0.5 of your 1 GPU" in claim_as(ANNA).hear()
    assert "1.2 GPUs asked for" in claim_as(BEN, 5, share="20GiB").hear()
    claim_as(ANNA, 2, share="20GiB", gets=True)
    assert "you hold 1 of your 1 GPU" in claim_as(ANNA, share="1GiB").hear()


# What the entries of a user say of themselves never lowers what they count


def entry_of(uid: int, number: int, gpus: Any, **said: Any) -> api.Entry:
    data = json.dumps({"v": 1, "gpus": gpus, **said}).encode()
    return api.Entry.read(f"{number}.{number:016x}", uid, (1, number), data)


def by_user(rules: Any, *claims: api.Entry) -> Any:
    """What users hold by these claims on a host whose GPUs have no display."""
    quota = api.quota_of(str(rules(f"{NAMED}max_gpus = 1")), print)
    snapshot = api.SimulatedDriver("dgx-a100").snapshot()
    return quota.held(snapshot, api.Claims(claims, snapshot.gpus))


def test_who_is_at_the_limit_gets_no_share_however_small(rules: Any, dgx: Any) -> None:
    by_claims = by_user(rules, entry_of(0, 1, {dgx.uuids[0]: None}))
    for share in (1, 1 << 30):
        request, _ = api.Selection.from_ticket(1, (("share", share),))
        assert str(by_claims.limit_of(0, request)) == "you hold 1 of your 1 GPU"


def test_a_display_that_the_host_does_not_share_counts(rules: Any, dgx: Any) -> None:
    by_claims = by_user(rules, entry_of(ANNA, 1, {dgx.uuids[0]: None}, display=True))
    assert [*by_claims.held_by(ANNA).values()] == [1.0]


def test_made_up_names_hide_no_gpu_that_the_driver_does_not_show(rules: Any, dgx: Any) -> None:
    lost = entry_of(ANNA, 9, {"GPU-00000000-0000-0000-0000-000000000000": None})
    others = [entry_of(ANNA, 1 + place, {f"AMD-{place}-{number}": None for number in range(200)}) for place in range(2)]
    assert by_user(rules, lost).held_by(ANNA) == {lost.name: 1.0}
    held = by_user(rules, *others, lost).held_by(ANNA)
    assert held[lost.name] == 1.0
    assert sum(held.values()) > 100, "who names so many is beyond every limit"


@pytest.mark.parametrize("change", ["raised", "killed"])
def test_who_waits_at_the_limit_is_served_when_it_changes(rules: Any, claim_as: Any, wait_as: Any, change: str) -> None:
    """Also where the claim that was killed had another GPU, and nobody else has removed its entry."""
    rules("[default]\nmax_gpus = 1")
    holder = claim_as(ANNA, only=7, gets=True)
    waiter = wait_as(ANNA, only=0)
    if change == "raised":
        rules("[default]\nmax_gpus = 2")
    else:
        holder.end()
    assert waiter.hear() == "1"


# Users who wait are served by turns


def served(holder: Any, crowd: list[Any]) -> Any:
    """Let a holder go, and return who of a crowd gets its GPUs."""
    let_go(holder)
    ready = select.select([one.line for one in crowd], [], [], 60)[0]
    assert len(ready) == 1, "nobody, or more than one, was served"
    one = next(one for one in crowd if one.line in ready)
    one.hear()
    crowd.remove(one)
    return one


@pytest.mark.parametrize("order", ["fifo", "fair"])
def test_one_request_does_not_wait_for_a_sweep(rules, claim_as, wait_as, order: str, monkeypatch) -> None:
    monkeypatch.setattr("safe_gpu.claim.report.EARLY_INTERVAL", 1e6)  # each is woken by whom it waits for, or never
    rules(f"[host]\norder = {order}")
    holders = [claim_as(ANNA, 1) for _ in range(8)]
    assert [one.hear() for one in holders] == ["1"] * 8
    sweep = [wait_as(ANNA) for _ in range(4)]
    ben = wait_as(BEN)
    crowd = [*sweep, ben]
    # Anna holds eight, so her first ticket has the turn 8.5; Ben comes after that one and before her next.
    expected = [sweep[0], ben, *sweep[1:]] if order == "fair" else [*sweep, ben]
    assert [one.pid for one in api.waiting_tickets()] == [one.pid for one in expected]
    assert [served(holder, crowd) for holder in holders[:5]] == expected


@pytest.mark.parametrize(("before", "after", "turns"), [("fifo", "fair", [None]), ("fair", "fifo", [1.0])])
def test_a_claim_keeps_its_first_order(rules, join_queue, dgx, stranger_pid, monkeypatch, before, after, turns) -> None:
    """Else it could wait for one who waits for it. Root changes the order between two looks."""
    rules(f"[host]\norder = {before}")
    join_queue(1, (0,))
    written, confirm = [], api.search.confirm

    def changing(*arguments: Any) -> bool:
        rules(f"[host]\norder = {after}")
        dgx.occupy(*range(8), pid=stranger_pid)
        return confirm(*arguments)

    def writing(directory: Any, number: int, said: Any, **more: Any) -> Any:
        if "nb_gpus" in said:  # a ticket
            written.append(said.get("turn"))
        return api.make_entry(directory, number, said, **more)

    monkeypatch.setattr(api.search, "confirm", changing)
    monkeypatch.setattr("safe_gpu.coordination.own_entry.make_entry", writing)
    with pytest.raises(ClaimTimeout):
        claim(1, only=range(1, 8), timeout=2)
    assert written == turns


def test_tickets_have_turns_only_where_the_order_is_fair(rules: Any, claim_as: Any, wait_as: Any) -> None:
    """Who changes the order while some wait changes nobody's place."""
    rules("[host]\norder = fifo")
    holder = claim_as(ANNA, 8, gets=True)
    first = wait_as(ANNA, 8)
    rules("[host]\norder = fair\n[user 4712]\nweight = 2")
    second = wait_as(BEN, 8)
    third = wait_as(BEN, 8)
    fourth = wait_as(CARLA, 8)
    turns = {one.pid: api.turn_of(one) for one in api.waiting_tickets()}
    assert [turns[one.pid] for one in (first, second, third, fourth)] == [None, 0.5, 4.5, 0.5]
    crowd = [first, second, third, fourth]
    for one in (first, second, fourth, third):
        assert served(holder, crowd) is one
        holder = one


def test_who_is_passed_is_told_who_is_in_turn(
    rules, claim_as, as_user, wait_as, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("safe_gpu.claim.report.EARLY_INTERVAL", 0.1)
    rules("[host]\norder = fair")
    claim_as(ANNA, 8, hold_for=3600, gets=True)
    first = wait_as(ANNA, 8, hold_for=60)

    def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        api.wait_for_gpus(8, hold_for=60, on_wait=lambda status: say(api.waiting_message(status, holders=False)))

    passed = as_user(work, uid=ANNA)  # has the turn 16.5, and Ben, who comes when it waits, 9

    def hear_line_with(text: str) -> None:
        assert any(re.search(text, line) for line in iter(passed.hear, ""))

    hear_line_with(r", #2 in the queue, starts .* or later; behind \S+ \(pid ")
    ben = wait_as(BEN, 8, hold_for=60)
    assert [one.pid for one in api.gather().queue] == [first.pid, ben.pid, passed.pid]
    hear_line_with(rf", #3 in the queue, starts .* or later; behind \S+ \(pid {ben.pid}, wants 8 GPUs, ")
    first.end()
    ben.end()
    hear_line_with(r"0 free\), starts about ")


# How long a claim waits and will hold its GPUs: what may be said, and what counts where nothing is


DURATIONS = {
    0.0: "0 0s",
    900.0: "15m 15min",
    1000.0: "1e3",
    5400.0: "1.5h 1h30m 01:30:00",
    216000.0: "2d12h 2-12:00:00 2-12",
    217800.0: "2-12:30",
    None: "inf INF infinity forever none",
}


def test_durations() -> None:
    words = [(word, seconds) for seconds, line in DURATIONS.items() for word in line.split()]
    for text, seconds in [*words, (" 10 M ", 600.0)]:
        assert api.parse_duration(text) == seconds
        assert api.parse_timeout(text, {}, in_batch_job=False) == seconds
        assert api.parse_timeout(api.DEFAULT, {"SAFE_GPU_TIMEOUT": text}, in_batch_job=True) == seconds


NO_DURATIONS = "soon -1h nan 1w s 1_000 1h30 30m1h 1h1h 1.5h30m -inf 1,5 1:2:3:4 -1:00:00 1--2 1:30 \u0663m".split()


@pytest.mark.parametrize("text", ["", " ", *NO_DURATIONS])
def test_what_is_no_duration_names_itself_and_what_would_be(text: str) -> None:
    with pytest.raises(UnsatisfiableRequestError) as caught:
        api.parse_duration(text, "SAFE_GPU_TIMEOUT")
    message = str(caught.value)
    assert (caught.value.value, message.startswith(f"SAFE_GPU_TIMEOUT={text!r} ")) == (text, True)
    assert ("write 1h30m or 1m30s" if text == "1:30" else "15m") in message


def test_numbers_are_seconds_and_the_default_fits_where_the_process_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for timeout, seconds in ((0, 0.0), (0.25, 0.25), (None, None), (float("inf"), None), (1e300, 1e300)):
        assert api.parse_timeout(timeout, {"SAFE_GPU_TIMEOUT": "77"}, in_batch_job=True) == seconds
    assert api.read_options().timeout == 10.0
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert api.read_options().timeout == 300.0


@pytest.mark.parametrize("said", [-0.5, math.nan, -math.inf, True, [], b"5", 10**400, "soon"])
def test_what_is_no_number_of_seconds_is_refused(said: Any) -> None:
    with pytest.raises(UnsatisfiableRequestError, match="timeout=") as caught:
        api.parse_timeout(said, {}, in_batch_job=False)
    assert caught.value.value is said
    for least in (said, 0, 0.9, "0.5s", ""):
        with pytest.raises(UnsatisfiableRequestError, match="hold_for=") as caught:
            api.parse_hold_for(least, {}, api.JobContext())
        assert caught.value.value is least


def test_what_is_said_counts_and_the_variable_stands_in_for_it() -> None:
    job = api.JobContext("slurm", ends=int(time.time()) + 60)
    for said, seconds in ((1, 1.0), (90.5, 90.5), ("2h", 7200.0), (None, None), ("unknown", None), (math.inf, None)):
        assert api.parse_hold_for(said, {"SAFE_GPU_FOR": "5h"}, job) == api.HoldTime(seconds, stated=True)
    for text, hold in (
        ("20m", api.HoldTime(1200.0)),
        ("unknown", api.HoldTime(None)),
        ("", api.HoldTime(end=float(job.ends))),
    ):
        assert api.parse_hold_for(api.DEFAULT, {"SAFE_GPU_FOR": text}, job) == hold
    assert api.parse_hold_for(api.DEFAULT, {"SAFE_GPU_FOR": ""}, api.JobContext()) == api.UNKNOWN_HOLD
    with pytest.raises(UnsatisfiableRequestError, match=r"SAFE_GPU_FOR='0\.2'"):
        api.parse_hold_for(api.DEFAULT, {"SAFE_GPU_FOR": "0.2"}, job)


def test_a_batch_job_ends_where_its_scheduler_says() -> None:
    for ends_in, known in ((86000, True), (87000, False), (-5, False)):
        ends = int(time.time()) + ends_in
        hold = api.parse_hold_for(api.DEFAULT, {}, api.current({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(ends)}))
        assert hold == api.HoldTime(end=ends if known else None)


def test_a_pbs_job_ends_a_walltime_after_its_session_began(child: Any) -> None:
    code = "import safe_gpu\nfrom safe_gpu.claim.arguments import read_options\nsay(read_options().hold.end)"
    began = time.time()
    job = child(code, env={"PBS_JOBID": "12.server", "PBS_WALLTIME": "3600"}, start_new_session=True)
    assert began + 3600 - 1 <= float(job.hear()) <= time.time() + 3600


def test_seconds_from_now() -> None:
    """Those from 1000, where the claim around it, if it is inside one, ends then."""
    for hold, outer_end, seconds in (
        (api.HoldTime(60.0, stated=True), 1500.0, 60.0),
        (api.HoldTime(60.0), 1500.0, 500.0),  # it ends with the one around it
        (api.HoldTime(end=1300.0), 1100.0, 100.0),
        (api.HoldTime(end=1000.5), None, 1.0),
        (api.HoldTime(end=999.0), None, None),  # overdue
    ):
        assert hold.at(1000.0, outer_end) == seconds


def test_the_entry_says_until_when(command: Any) -> None:
    done = command.run("run", "--for", "1h30m", "--", "sh", "-c", 'cat "$SAFE_GPU_DIR"/claims/*')
    written = json.loads(done.stdout)
    assert written["until"] - written["since"] == pytest.approx(5400)
