"""What a neighbour's files do to claims and waiters of others: links, tickets of his, and many of both."""

import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safe_gpu.coordination.files.state_dir import StateDir
from safe_gpu.coordination.leases.file_names import lease_name
from safe_gpu.coordination.locks.host_lock import HostLock
from safe_gpu.coordination.queue.listing import Listing
from safe_gpu.coordination.queue.live import live_tickets
from safe_gpu.coordination.queue.ticket import TicketRequest
from safe_gpu.coordination.queue.waiter import Waiter
from support.claims import claim

from safe_gpu.coordination.queue import live as tickets
from safe_gpu.errors import NotEnoughGpusError, StateDirError
from safe_gpu.status.gather import gather

NEIGHBOUR, VICTIM = 4711, 4712
MOST = 1000  # tickets of one user that count


@pytest.fixture
def used(state_dir: Path, ground: Any) -> Path:
    with HostLock(time.monotonic() + 30):
        return state_dir


# Leases that are links


def link(used: Path, source: str, index: int, ground: Any) -> None:
    os.link(used / source, used / "leases" / lease_name(ground.uuids[index]))


def test_a_lease_that_is_a_link_to_host_lock_is_closed(used: Path, ground: Any, command: Any) -> None:
    link(used, "host.lock", 1, ground)
    with pytest.raises(StateDirError, match=r"is closed: a hard link to host\.lock; who made it is not known"):
        claim(only=1)
    with claim(only="0,1") as owner:
        assert owner.devices_taken == [0]
    one = gather().gpus[1]
    assert (one.state, one.claim) == ("unusable", None)
    assert "a hard link" in one.reason


def test_a_lease_that_is_a_link_to_another_one_blames_nobody(used: Path, ground: Any, command: Any) -> None:
    ground.hold(0)
    link(used, f"leases/{lease_name(ground.uuids[0])}", 1, ground)
    for one in gather().gpus[:2]:
        assert one.state == "claimed", "its lease is held"
        assert one.claim is not None
        assert (one.claim.pid, one.claim.user) == (None, None)
        assert "a hard link" in one.reason
    with pytest.raises((NotEnoughGpusError, StateDirError)) as caught:
        claim(only=1)
    assert f"process {os.getpid()}" not in str(caught.value)
    with claim() as owner:
        assert owner.devices_taken == [2]
    ground.let_go()
    assert [one.state for one in gather().gpus[:3]] == ["unusable", "unusable", "free"]


def test_a_link_under_a_name_that_is_no_gpus_closes_nothing(used: Path, ground: Any) -> None:
    ground.hold(0)
    for name in ("a.lock", "GPU-unknown.lock", "x"):
        os.link(used / "leases" / lease_name(ground.uuids[0]), used / "leases" / name)
    assert gather().gpus[0].reason.count("a hard link") == 0
    ground.let_go()
    with claim(only=0) as owner:
        assert owner.devices_taken == [0]


# Tickets


def ahead_of(request: TicketRequest) -> list[int]:
    """The numbers of the live tickets of which a newcomer knows, the nearest first."""
    listing, found = Listing(), []
    with StateDir(os.environ["SAFE_GPU_DIR"]) as root, StateDir("queue", root) as queue:
        listing.update(queue)
    waiter = Waiter(request, listing)
    with HostLock(time.monotonic() + 30) as host:
        one = waiter.nearest(host)
        while one is not None:
            found.append(one.ticket.seq)
            one = waiter.nearest(host, beyond=one)
    return found


def make_ticket(used: Path, number: int, uid: int, content: str = "", mode: int = 0o644) -> int:
    """A ticket that is locked for as long as its descriptor is open."""
    fd = os.open(used / "queue" / f"{number}.ticket", os.O_CREAT | os.O_EXCL | os.O_RDWR)
    os.write(fd, content.encode())
    os.fchmod(fd, mode)
    os.chown(fd, uid, uid)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


ANY = TicketRequest(1, frozenset({"GPU-0"}))
REQUEST = json.dumps({"pid": 1, "user": "x", "since": 1.0, "request": {"nb_gpus": 1, "gpus": ["GPU-0"]}})


def test_nobody_rewrites_a_ticket_of_another_user(used: Path, as_user: Any) -> None:
    def wait(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        waiter = Waiter(ANY)
        with HostLock(time.monotonic() + 30) as host:
            waiter.join(host)
        say("waits")
        listen()

    def attack(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        try:
            os.open(used / "queue" / "1.ticket", os.O_RDWR)
        except PermissionError:
            say(f"closed, and {ahead_of(ANY)} ahead")

    waiter = as_user(wait, uid=VICTIM, umask=0)
    assert waiter.hear() == "waits"
    assert as_user(attack, uid=NEIGHBOUR).hear() == "closed, and [1] ahead"


@pytest.fixture
def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give files away")


def test_of_one_user_a_thousand_tickets_count(used: Path, needs_root: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, MOST + 51):
        os.close(make_ticket(used, number, NEIGHBOUR))
    victims = [make_ticket(used, MOST + 51 + number, uid, REQUEST) for number, uid in enumerate((VICTIM, 0))]
    late = make_ticket(used, MOST + 53, NEIGHBOUR, REQUEST)
    opened: list[int] = []
    genuine = tickets.open_live

    def counted(host: Any, seq: int, *args: Any) -> Any:
        opened.append(seq)
        return genuine(host, seq, *args)

    with monkeypatch.context() as patch:
        patch.setattr("safe_gpu.coordination.queue.predecessors.open_live", counted)
        assert ahead_of(ANY) == [MOST + 52, MOST + 51]
    assert len(opened) == MOST + 2
    for fd in (*victims, late):
        os.close(fd)


def test_links_silence_nobody_and_count_once(used: Path, needs_root: None) -> None:
    fd = make_ticket(used, 1, VICTIM, REQUEST)
    for number in range(2, MOST + 3):
        os.link(used / "queue" / "1.ticket", used / "queue" / f"{number}.ticket")
    second = make_ticket(used, MOST + 3, VICTIM, REQUEST)
    assert ahead_of(ANY) == [MOST + 3, 1]
    with HostLock(time.monotonic() + 30) as host:
        assert [one.seq for one in live_tickets(host)] == [1, MOST + 3]
    os.close(fd)
    os.close(second)


@pytest.mark.parametrize("source", ["host.lock", "leases/{lease}"])
def test_a_link_to_a_lock_is_no_ticket(used: Path, ground: Any, source: str) -> None:
    ground.hold(0)
    os.link(used / source.format(lease=lease_name(ground.uuids[0])), used / "queue" / "1.ticket")
    assert ahead_of(TicketRequest(1, frozenset(ground.uuids))) == []
    with claim() as owner:
        assert owner.devices_taken == [1]


def test_nobody_looks_at_all_leases(used: Path, ground: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for notes of bad GPUs, nor because a ticket has a second link."""
    for number in range(100):
        (used / "leases" / f"{number}.lock").touch()
    fd = make_ticket(used, 1, os.geteuid(), REQUEST)
    os.link(used / "queue" / "1.ticket", used / "queue" / "2.ticket")
    looked: list[str] = []
    genuine = os.stat

    def spied(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        looked.append(str(path))
        return genuine(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", spied)
    listed: list[str] = []
    list_directory = os.listdir

    def noted(fd: Any) -> list[str]:
        listed.append(os.readlink(f"/proc/self/fd/{fd}") if isinstance(fd, int) else str(fd))
        return list_directory(fd)

    monkeypatch.setattr(os, "listdir", noted)
    with claim() as owner:
        assert owner.devices_taken == [0]
    assert not any(name.endswith(".lock") and name[:-5].isdigit() for name in looked)
    assert not any(path.endswith("/leases") for path in listed)
    os.close(fd)
