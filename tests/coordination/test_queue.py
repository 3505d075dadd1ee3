"""The queue: who stands before whom, who may pass, and how the dead fall out."""

import errno
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from safe_gpu.coordination.files.descriptors import fork_guard
from safe_gpu.coordination.files.state_dir import StateDir
from safe_gpu.coordination.locks.host_lock import HostLock
from safe_gpu.coordination.queue.listing import Listing
from safe_gpu.coordination.queue.live import live_tickets
from safe_gpu.coordination.queue.ticket import TicketRequest
from safe_gpu.coordination.queue.waiter import Waiter
from safe_gpu.errors import StateDirError

ANY = frozenset({"GPU-0", "GPU-1"})


def host() -> HostLock:
    return HostLock(time.monotonic() + 30)


def never(request: TicketRequest) -> bool:
    return False


def queue(state_dir: Path) -> list[str]:
    return sorted(os.listdir(state_dir / "queue"), key=lambda name: int(name.split(".")[0]))


@pytest.fixture
def join():
    """Waiters of this process, each with a ticket."""
    joined: list[Waiter] = []

    def make(gpus: frozenset[str] = ANY, nb_gpus: int = 1, *, ticket: bool = True) -> Waiter:
        waiter = Waiter(TicketRequest(nb_gpus, gpus))
        if ticket:
            with host() as locked:
                waiter.join(locked)
        joined.append(waiter)
        return waiter

    yield make
    for waiter in joined:
        waiter.leave()


@pytest.fixture
def locked() -> Iterator[ExitStack]:
    """Files that stay locked until the test ends."""
    with ExitStack() as stack:
        yield stack


def ahead_of(waiter: Waiter, may_pass=never) -> int | None:
    with host() as locked:
        found = waiter.nearest(locked)
        while found is not None and found.ticket.request is not None and may_pass(found.ticket.request):
            found = waiter.nearest(locked, beyond=found)
    if found is None:
        return None
    os.close(found.fd)
    return found.ticket.seq


def test_tickets_are_numbered_in_order_and_say_who_waits(state_dir: Path, join) -> None:
    join()
    join(nb_gpus=8)
    assert queue(state_dir) == ["1.ticket", "2.ticket"]
    raw = json.loads((state_dir / "queue" / "2.ticket").read_text())
    assert set(raw) == {"pid", "pidns", "user", "request", "since", "hold_for", "job"}
    assert (raw["pid"], raw["pidns"]) == (os.getpid(), os.stat("/proc/self/ns/pid").st_ino)
    assert raw["request"] == {"nb_gpus": 8, "gpus": ["GPU-0", "GPU-1"], "min_memory": None}
    assert (state_dir / "queue" / "2.ticket").stat().st_mode & 0o777 == 0o644


def test_a_number_is_one_above_the_highest_that_exists(state_dir: Path, join) -> None:
    first, second, third = join(), join(), join()
    second.leave()
    assert queue(state_dir) == ["1.ticket", "3.ticket"]
    join()
    assert queue(state_dir)[-1] == "4.ticket"
    first.leave()
    third.leave()


def test_leaving_leaves_nothing(state_dir: Path, join) -> None:
    before = set(fork_guard._fds)  # a thread of an earlier test may still sleep on a ticket
    waiter = join()
    waiter.leave()
    waiter.leave()
    assert queue(state_dir) == []
    assert fork_guard._fds.keys() <= before


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
    assert ahead_of(mine, lambda request: request.nb_gpus == 8) == 1
    assert ahead_of(mine, lambda request: True) is None


WAIT = """
import os, time
from safe_gpu.coordination.locks.host_lock import HostLock
from safe_gpu.coordination.queue.waiter import Waiter
from safe_gpu.coordination.queue.ticket import TicketRequest as Demand
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
        waiter = Waiter(TicketRequest(1, ANY))
        with host() as locked:
            waiter.join(locked)
        say("queued")
        listen()

    first = as_user(waiter_work, uid=12345, umask=0o077)
    assert first.hear() == "queued"
    os.chown(state_dir, 0, 0)
    os.chown(state_dir / "queue", 0, 0)  # sticky: only root and the ticket's owner may unlink there

    def other_work(say, listen) -> None:
        waiter = Waiter(TicketRequest(1, ANY))
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


def test_who_came_between_the_listing_and_the_lock_stands_ahead(state_dir: Path, join) -> None:
    first = join()
    listing = Listing()
    with StateDir(str(state_dir)) as root, StateDir("queue", root) as tickets:
        listing.update(tickets)
    second = join()
    first.leave()
    mine = Waiter(TicketRequest(1, ANY), listing)
    with host() as locked:
        mine.join(locked)
    assert queue(state_dir) == ["2.ticket", "3.ticket"]
    assert ahead_of(mine) == 2
    second.leave()
    assert ahead_of(mine) is None
    mine.leave()


def test_whoever_waits_lists_the_queue_but_once(state_dir: Path, join, monkeypatch: pytest.MonkeyPatch) -> None:
    """None comes to be ahead of a ticket, and the head of hundreds looks many times a second."""
    first, passed, mine = join(), join(nb_gpus=8), join()
    assert ahead_of(mine, lambda request: request.nb_gpus == 8) == 1
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


def test_a_ticket_is_known_again_by_what_cannot_repeat(state_dir: Path, join) -> None:
    """Numbers and inodes are used again within seconds."""
    join()
    mine = join()
    assert ahead_of(mine) == 1
    ticket = state_dir / "queue" / "1.ticket"
    inode = ticket.stat().st_ino
    raw = json.loads((state_dir / "queue" / "2.ticket").read_text())
    ticket.write_text(json.dumps(raw | {"pid": os.getppid()}))  # one who came later
    assert ticket.stat().st_ino == inode
    assert ahead_of(mine) is None


@pytest.mark.parametrize(("here", "seen"), [(True, True), (None, True), (False, False)])
def test_a_stopped_waiter_is_known_in_its_own_pid_namespace_only(
    state_dir: Path, join, child, stop, here: bool | None, seen: bool
) -> None:
    one = child(WAIT + "listen()")
    assert one.hear() == "queued"
    ticket = state_dir / "queue" / "1.ticket"
    raw = json.loads(ticket.read_text())
    raw["pidns"] = {True: raw["pidns"], None: None, False: raw["pidns"] + 1}[here]
    ticket.write_text(json.dumps(raw))
    with host() as locked:
        assert [found.is_stopped() for found in live_tickets(locked)] == [False]
    stop(one.pid)
    with host() as locked:
        assert [found.is_stopped() for found in live_tickets(locked)] == [seen]


def test_who_is_among_the_first_is_known_without_a_lock(state_dir: Path, join) -> None:
    first, second, third = join(), join(frozenset({"GPU-7"})), join()
    assert [third.among_first(number) for number in (1, 2, 3)] == [False, False, True]
    assert first.among_first(1)
    second.leave()
    first.leave()
    assert third.among_first(1)


def test_too_few_descriptors_do_not_make_a_ticket_look_dead(state_dir: Path, join, monkeypatch) -> None:
    join()
    mine = join()

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch, host() as locked:
        patch.setattr(os, "open", full)
        with pytest.raises(StateDirError, match="Too many"):
            mine.nearest(locked)
    assert ahead_of(mine) == 1


def test_rubbish_in_the_queue_is_ignored(state_dir: Path, join, locked: ExitStack) -> None:
    join()
    rubbish = "x.ticket 1.tmp -3.ticket ٣.ticket .2.ticket.99.ab 02.ticket 00.ticket".split()
    rubbish += [f"{'1' * 19}.ticket", f"{'9' * 248}.ticket"]
    for name in rubbish:
        file = locked.enter_context((state_dir / "queue" / name).open("w"))
        fcntl.flock(file, fcntl.LOCK_EX)  # even so
    (state_dir / "queue" / "7.ticket").symlink_to("/etc/passwd")
    mine = join(ticket=False)
    assert ahead_of(mine) == 1
    join()
    assert set(os.listdir(state_dir / "queue")) == {*rubbish, "1.ticket", "7.ticket", "8.ticket"}


@pytest.mark.parametrize("number", [10**12 + 10, 10**17 - 1, 10**17, 10**18 - 1])
@pytest.mark.parametrize("live", [True, False])
def test_a_number_that_no_queue_gets_to_is_nobodys(state_dir: Path, join, number: int, live: bool) -> None:
    """Else one dead file of another user, which nobody may remove, uses up the numbers."""
    join()
    with open(state_dir / "queue" / f"{number}.ticket", "w") as file:
        if live:
            fcntl.flock(file, fcntl.LOCK_EX)
        second, third = join(), join()
        assert (ahead_of(second), ahead_of(third)) == (1, 2)
        assert ahead_of(join(ticket=False)) == 3
        assert third.position() == 3
        assert third.among_first(4)
        with host() as locked:
            seen = [ticket.seq for ticket in live_tickets(locked)]
    assert seen == [1, 2, 3]
    assert "4.ticket" not in queue(state_dir)


def test_the_numbers_of_a_long_lived_queue_count(state_dir: Path, join) -> None:
    join().leave()
    with open(state_dir / "queue" / f"{10**12}.ticket", "w") as file:
        os.fchmod(file.fileno(), 0o644)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert ahead_of(join()) == 10**12
        assert f"{10**12 + 1}.ticket" in os.listdir(state_dir / "queue")


@pytest.mark.parametrize("mode", [0o666, 0o600, 0o664, 0o4644])
def test_a_file_of_another_mode_is_no_ticket(state_dir: Path, join, mode: int) -> None:
    join()
    (state_dir / "queue" / "1.ticket").chmod(mode)
    assert ahead_of(join(ticket=False)) is None


@pytest.mark.parametrize(
    "wish",
    [{"nb_gpus": 10**4000}, {"nb_gpus": -1}, {"min_memory": 10**4000}, {"gpus": ["GPU-0" + "x" * 70_000]}],
    ids=["endless number", "negative number", "endless memory", "more than is read"],
)
def test_a_ticket_beyond_all_bounds_is_unreadable(state_dir: Path, join, wish: dict[str, object]) -> None:
    join()
    ticket = state_dir / "queue" / "1.ticket"
    raw = json.loads(ticket.read_text())
    raw["request"] |= wish
    ticket.write_text(json.dumps(raw))
    with host() as locked:
        assert [found.request for found in live_tickets(locked)] == [None]


def test_a_ticket_under_a_file_lease_is_dead(state_dir: Path, join, file_lease) -> None:
    """Its waiter has it open, so nobody could take one. To open it would block everybody, with host.lock held."""
    waiter = join()
    os.close(waiter._fd)  # it died
    waiter._fd = -1
    file_lease(state_dir / "queue" / "1.ticket", 54321)
    assert ahead_of(join()) is None


def test_a_sleeper_wakes_when_the_one_before_it_leaves_or_dies(state_dir: Path, child) -> None:
    sleeper = (
        WAIT
        + """
def look():
    with HostLock(None) as host:
        return waiter.nearest(host)
while (ahead := look()) is not None:
    say("sleeping")
    assert waiter.sleep_behind(ahead, 600)
say("head")
listen()
waiter.leave()
say("left")
"""
    )
    first = child(sleeper)
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
                ahead = waiter.nearest(locked)
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
    waiter = Waiter(TicketRequest(1, ANY))
    with host() as locked, monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda fd, data, offset: 1)
        with pytest.raises(OSError, match="no room"):
            waiter.join(locked)
    assert not waiter.queued
    assert queue(state_dir) == []
    waiter.leave()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_kills_unwinds_first(state_dir: Path, child, number: int) -> None:
    # The ticket is left inside, where the signal is caught; the process then dies of it as it would have.
    code = """
import signal
from safe_gpu.coordination.signals import unwind_on_signals
with unwind_on_signals():
    try:
        say("waiting"); signal.pause()
    finally:
        waiter.leave()
"""
    waiter = child(WAIT + code)
    assert [waiter.hear(), waiter.hear()] == ["queued", "waiting"]
    os.kill(waiter.pid, number)
    assert waiter.process.wait(30) == -number
    assert queue(state_dir) == []


def test_a_handler_of_the_program_is_left_alone(state_dir: Path, child) -> None:
    code = """
import os, signal
from safe_gpu.coordination.signals import unwind_on_signals
signal.signal(signal.SIGTERM, lambda *a: say("mine"))
with unwind_on_signals():
    os.kill(os.getpid(), signal.SIGTERM)
say(signal.getsignal(signal.SIGHUP) is signal.SIG_DFL)
"""
    assert child(code).finish().split() == ["mine", "True"]


def test_a_ticket_that_is_abandoned_is_closed_at_once(state_dir: Path) -> None:
    waiter = Waiter(TicketRequest(1, ANY))
    with host() as locked:
        before = set(os.listdir("/proc/self/fd"))
        waiter.join(locked)
        waiter.abandon(locked)
        assert set(os.listdir("/proc/self/fd")) == before
    assert os.listdir(state_dir / "queue") == []
