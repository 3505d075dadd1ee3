"""The queue: who stands before whom, who may pass, and how the dead fall out."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from safe_gpu.coordination.files import StateDir
from safe_gpu.coordination.host_lock import HostLock, fork_guard
from safe_gpu.coordination.waiting import Demand, Waiter, live_tickets
from safe_gpu.errors import StateDirError

ANY = frozenset({"GPU-0", "GPU-1"})


def host() -> HostLock:
    return HostLock(time.monotonic() + 30)


def never(demand: Demand) -> bool:
    return False


def queue(state_dir: Path) -> list[str]:
    return sorted(os.listdir(state_dir / "queue"), key=lambda name: int(name.split(".")[0]))


@pytest.fixture
def join():
    """Waiters of this process, each with a ticket."""
    joined: list[Waiter] = []

    def make(gpus: frozenset[str] = ANY, nb_gpus: int = 1, *, ticket: bool = True) -> Waiter:
        waiter = Waiter(Demand(nb_gpus, gpus))
        if ticket:
            with host() as locked:
                waiter.join(locked)
        joined.append(waiter)
        return waiter

    yield make
    for waiter in joined:
        waiter.leave()


def ahead_of(waiter: Waiter, may_pass=never) -> int | None:
    with host() as locked:
        found = waiter.ahead(locked, may_pass)
    if found is None:
        return None
    os.close(found.fd)
    return found.ticket.seq


def test_tickets_are_numbered_in_order_and_say_who_waits(state_dir: Path, join) -> None:
    join()
    join(nb_gpus=8)
    assert queue(state_dir) == ["1.ticket", "2.ticket"]
    raw = json.loads((state_dir / "queue" / "2.ticket").read_text())
    assert set(raw) == {"pid", "user", "request", "since"}
    assert raw["pid"] == os.getpid()
    assert raw["request"]["nb_gpus"] == 8
    assert raw["request"]["gpus"] == ["GPU-0", "GPU-1"]
    assert (state_dir / "queue" / "2.ticket").stat().st_mode & 0o777 == 0o666


def test_a_number_is_one_above_the_highest_that_exists(state_dir: Path, join) -> None:
    first, second, third = join(), join(), join()
    second.leave()
    assert queue(state_dir) == ["1.ticket", "3.ticket"]
    join()
    assert queue(state_dir)[-1] == "4.ticket"
    first.leave()
    third.leave()


def test_leaving_leaves_nothing(state_dir: Path, join) -> None:
    waiter = join()
    waiter.leave()
    waiter.leave()
    assert queue(state_dir) == []
    assert not fork_guard._fds


@pytest.mark.parametrize(
    ("ahead", "mine", "waits"),
    [
        (ANY, ANY, True),
        (frozenset({"GPU-0"}), frozenset({"GPU-0", "GPU-1"}), True),
        (frozenset({"GPU-0"}), frozenset({"GPU-1"}), False),  # only=, model=: another part of the host
        (frozenset({"GPU-0"}), frozenset({"GPU-0.inner"}), False),  # inside a claim
        (frozenset({"GPU-0.inner"}), frozenset({"GPU-0.inner"}), True),
        (frozenset(), ANY, False),
    ],
)
@pytest.mark.parametrize("ticket", [True, False])
def test_only_competitors_stand_in_the_way(state_dir: Path, join, ahead, mine, waits: bool, ticket: bool) -> None:
    join(ahead)
    assert ahead_of(join(mine, ticket=ticket)) == (1 if waits else None)


def test_the_nearest_competitor_counts_and_nobody_behind(state_dir: Path, join) -> None:
    first, _other, second = join(), join(frozenset({"GPU-9"})), join()
    third = join()
    join()
    assert ahead_of(third) == 3
    assert ahead_of(second) == 1
    assert ahead_of(first) is None
    assert third.position() == 3
    assert first.position() == 1


def test_a_ticket_that_may_be_passed_is_passed_and_the_next_counts(state_dir: Path, join) -> None:
    join(nb_gpus=1)
    join(nb_gpus=8)  # say: a stranger sits on one of its eight
    mine = join()
    assert ahead_of(mine, lambda demand: demand.nb_gpus == 8) == 1
    assert ahead_of(mine, lambda demand: True) is None


WAIT = """
import os, time
from safe_gpu.coordination.host_lock import HostLock
from safe_gpu.coordination.waiting import Demand, Waiter
waiter = Waiter(Demand(1, frozenset({"GPU-0"})))
with HostLock(None) as host:
    waiter.join(host)
say("queued")
"""


def test_the_dead_fall_out(state_dir: Path, join, child) -> None:
    dead = child(WAIT + "listen()")
    assert dead.hear() == "queued"
    mine = join()
    assert ahead_of(mine) == 1
    dead.kill()
    assert ahead_of(mine) is None
    assert queue(state_dir) == ["2.ticket"]


def test_a_dead_ticket_that_may_not_be_unlinked_is_skipped(state_dir: Path, as_user) -> None:
    def waiter_work(say, listen) -> None:
        waiter = Waiter(Demand(1, ANY))
        with host() as locked:
            waiter.join(locked)
        say("queued")
        listen()

    first = as_user(waiter_work, uid=12345, umask=0o077)
    assert first.hear() == "queued"
    os.chown(state_dir, 0, 0)
    os.chown(state_dir / "queue", 0, 0)  # sticky: only root and the ticket's owner may unlink there

    def other_work(say, listen) -> None:
        waiter = Waiter(Demand(1, ANY))
        with host() as locked:
            waiter.join(locked)
        say(ahead_of(waiter))
        listen()
        say(ahead_of(waiter))
        say(waiter.position())
        waiter.leave()
        say(os.listdir(state_dir / "queue"))

    second = as_user(other_work, uid=65534)
    assert second.hear() == "1"
    first.end()
    second.tell()
    assert [second.hear(), second.hear(), second.hear()] == ["None", "1", "['1.ticket']"]
    assert live_in(state_dir) == []  # root sweeps in passing
    assert queue(state_dir) == []


def live_in(state_dir: Path) -> list[int]:
    with host() as locked:
        return [ticket.seq for ticket in live_tickets(locked)]


def test_a_number_of_a_dead_ticket_that_stays_is_not_taken_for_its_successor(state_dir: Path, join) -> None:
    """What is known to be dead is known by number and inode, so that a new ticket is never mistaken for an old one."""
    mine = join(ticket=False)
    (state_dir / "queue").mkdir(parents=True)
    (state_dir / "queue" / "1.ticket").write_text("{}")
    os.chmod(state_dir, 0o1777)
    assert ahead_of(mine) is None
    live = join()
    assert ahead_of(mine) == int(queue(state_dir)[-1].split(".")[0])
    live.leave()


def test_a_ticket_made_ready_before_is_like_any_other(state_dir: Path, join) -> None:
    first, mine = join(), join(nb_gpus=8, ticket=False)
    mine.prepare()
    assert queue(state_dir) == ["1.ticket"]
    with host() as locked:
        mine.join(locked)
    assert json.loads((state_dir / "queue" / "2.ticket").read_text())["request"]["nb_gpus"] == 8
    assert (state_dir / "queue" / "2.ticket").stat().st_mode & 0o777 == 0o666
    assert live_in(state_dir) == [1, 2]
    assert ahead_of(join(ticket=False)) == 2
    first.leave()
    assert ahead_of(mine) is None


def test_a_ticket_made_ready_in_vain_leaves_nothing(state_dir: Path, join) -> None:
    join().leave()
    open_before = os.listdir("/proc/self/fd")
    mine = join(ticket=False)
    for _ in range(2):
        mine.prepare()
        assert len(os.listdir("/proc/self/fd")) == len(open_before) + 1
    mine.leave()
    assert os.listdir("/proc/self/fd") == open_before
    assert queue(state_dir) == []


def test_whoever_waits_lists_the_queue_but_once(state_dir: Path, join, monkeypatch: pytest.MonkeyPatch) -> None:
    """None comes to be ahead of a ticket, and the head of hundreds looks many times a second."""
    first, passed, mine = join(), join(nb_gpus=8), join()
    assert ahead_of(mine, lambda demand: demand.nb_gpus == 8) == 1
    later = join()
    monkeypatch.setattr(StateDir, "names", None)
    assert ahead_of(mine) == 2
    passed.leave()
    assert ahead_of(mine) == 1
    first.leave()
    assert ahead_of(mine) is None
    assert ahead_of(later) == 3


def test_a_queue_that_was_cleaned_away_and_began_anew(state_dir: Path, join) -> None:
    join()
    mine = join()
    assert ahead_of(mine) == 1
    for name in queue(state_dir):
        (state_dir / "queue" / name).unlink()
    assert ahead_of(join()) is None
    assert queue(state_dir) == ["1.ticket"]
    assert ahead_of(mine) is None  # who has the number now came later


def test_too_few_descriptors_do_not_make_a_ticket_look_dead(
    state_dir: Path, join, monkeypatch: pytest.MonkeyPatch
) -> None:
    join()
    mine = join()

    def full(self: StateDir, name: str) -> None:
        raise StateDirError("too many open files", errno=errno.EMFILE)

    with monkeypatch.context() as patch, host() as locked:
        patch.setattr(StateDir, "open", full)
        with pytest.raises(StateDirError, match="too many"):
            mine.ahead(locked, never)
    assert ahead_of(mine) == 1


def test_rubbish_in_the_queue_is_ignored(state_dir: Path, join) -> None:
    join()
    for name in ("x.ticket", "1.tmp", "-3.ticket", "٣.ticket", ".2.ticket.99.ab"):
        (state_dir / "queue" / name).touch()
    (state_dir / "queue" / "7.ticket").symlink_to("/etc/passwd")
    mine = join(ticket=False)
    assert ahead_of(mine) == 1


def test_a_live_ticket_that_cannot_be_read_competes_with_everybody(state_dir: Path, join) -> None:
    join()
    (state_dir / "queue" / "1.ticket").write_text("{ torn")
    assert ahead_of(join(frozenset({"GPU-7"}))) == 1


def test_a_sleeper_wakes_when_the_one_before_it_leaves_or_dies(state_dir: Path, child) -> None:
    sleeper = (
        WAIT
        + """
def look():
    with HostLock(None) as host:
        return waiter.ahead(host, lambda demand: False)
while (ahead := look()) is not None:
    say("sleeping")
    assert waiter.sleep_behind(ahead, 600)
say("head")
listen()
waiter.leave()
say("left")
"""
    )
    first, second, third = [child(sleeper) for _ in range(1)] + [None, None]
    assert [first.hear(), first.hear()] == ["queued", "head"]
    second = child(sleeper)
    assert [second.hear(), second.hear()] == ["queued", "sleeping"]
    third = child(sleeper)
    assert [third.hear(), third.hear()] == ["queued", "sleeping"]
    first.tell()
    assert [first.hear(), second.hear()] == ["left", "head"]
    second.kill()
    assert third.hear() == "head"
    assert queue(state_dir) == ["3.ticket"]


def test_a_sleep_ends_at_its_deadline_and_is_taken_up_again(state_dir: Path, join, eventually) -> None:
    first = join()
    before = threading.active_count()
    for waiter in (join(ticket=False), join(ticket=False)):
        for _ in range(2):
            with host() as locked:
                ahead = waiter.ahead(locked, never)
            assert ahead is not None
            assert waiter.sleep_behind(ahead, 0.001) is False
    assert threading.active_count() == before + 1  # one thread for one ticket, whoever looks at it and how often
    first.leave()
    eventually(lambda: threading.active_count() == before)


def test_a_forked_child_does_not_keep_the_ticket_alive(state_dir: Path, join, child) -> None:
    code = (
        WAIT
        + """
import signal
if os.fork() == 0:
    waiter.leave()          # not the child's to give back
    say(os.getpid()); signal.pause()
listen()
"""
    )
    parent = child(code)
    assert parent.hear() == "queued"
    survivor = int(parent.hear())
    mine = join(ticket=False)
    assert ahead_of(mine) == 1
    parent.kill()
    try:
        assert ahead_of(mine) is None
        os.kill(survivor, 0)
    finally:
        os.kill(survivor, signal.SIGKILL)


def test_no_room_for_the_ticket_leaves_none(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiter = Waiter(Demand(1, ANY))
    with host() as locked, monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda fd, data, offset: 1)
        with pytest.raises(OSError, match="no room"):
            waiter.join(locked)
    assert not waiter.queued
    assert queue(state_dir) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_kills_unwinds_first(state_dir: Path, child, number: int) -> None:
    code = (
        WAIT
        + """
import signal
from safe_gpu.coordination.signals import tidy_on_signals
try:
    with tidy_on_signals():
        say("waiting"); signal.pause()
finally:
    waiter.leave()
"""
    )
    # The ticket is left inside, where the signal is caught; the process then dies of it as it would have.
    code = (
        code.replace("try:\n    with", "with")
        .replace("        say", "    try:\n        say")
        .replace("\nfinally:\n    ", "\n    finally:\n        ")
    )
    waiter = child(code)
    assert [waiter.hear(), waiter.hear()] == ["queued", "waiting"]
    os.kill(waiter.pid, number)
    assert waiter.process.wait(30) == -number
    assert queue(state_dir) == []


def test_a_handler_of_the_program_is_left_alone(state_dir: Path, child) -> None:
    code = """
import os, signal
from safe_gpu.coordination.signals import tidy_on_signals
signal.signal(signal.SIGTERM, lambda *a: say("mine"))
with tidy_on_signals():
    os.kill(os.getpid(), signal.SIGTERM)
say(signal.getsignal(signal.SIGHUP) is signal.SIG_DFL)
"""
    assert child(code).finish().split() == ["mine", "True"]
