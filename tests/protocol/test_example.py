"""The example of the protocol's page beside the other clients: what it does not do as they do, and its place in the
queue. That each sees what the other holds is in test_client.py, its races are in test_queue_and_race.py."""

import fcntl
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.state import entry_name as name
from support.state import living

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose files all count")
BESIDE = pytest.mark.parametrize(("first", "second"), [("minimal", "c"), ("c", "minimal")], ids=["first", "second"])
USER = 4711
TICKET = {"v": 1, "pid": 4470, "nb_gpus": 1, "inside": "", "hold_for": None}


@pytest.fixture
def shared(scene: Any) -> Any:
    """The scene, where somebody has claimed before."""
    scene.make_state_dir()
    return scene


def pauses(party: Any) -> int:
    """How often a process has gone to sleep."""
    lines = Path(f"/proc/{party.pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("voluntary_ctxt_switches")))


def until_it_has_looked(scene: Any, party: Any) -> None:
    """Wait until one that waits has slept and looked again, many times, or has got what it wants."""
    before = pauses(party)
    scene.until(lambda: party.pid in scene.served() or pauses(party) >= before + 15, party)


def test_it_refuses_where_nobody_has_claimed_yet(scene: Any) -> None:
    code, _, told = scene.start("minimal", 1, "now", command=["true"]).finish()
    assert code == 70
    assert "host.lock (the first claim of the package makes it)" in told


def test_it_refuses_what_is_no_nvidia_gpu(scene: Any) -> None:
    for other in ("AMD-0000:05:00.0", "GPU-3b328540185aedfd", "MIG-4f9e8f1e-5a0b-5c52-8d1a-2f0f8c5b7a6d", 'GPU-"'):
        words = [scene.build("client.c"), "-n", "1", "-g", other, "true"]
        assert subprocess.run(words, env=scene.env, capture_output=True, timeout=40).returncode == 64


def test_who_has_waited_leaves_an_entry_that_all_can_read_and_no_ticket(shared: Any) -> None:
    holder = shared.until_holds(shared.start("c", 8))
    waiter = shared.until_waits(shared.start("minimal", 1))
    holder.end()
    shared.until_holds(waiter)
    (claim,) = shared.entries("claims")
    assert (shared.state_dir / "claims" / claim.name).stat().st_mode & 0o7777 == 0o644
    assert list((shared.state_dir / "queue").iterdir()) == []


@BESIDE
def test_doors_keep_it_apart_from_another_directory(shared: Any, first: str, second: str) -> None:
    other = shared.directory / "other"
    shared.make_state_dir(other)
    shared.until_holds(shared.start(first, 6))
    shared.until_holds(shared.start(first, 1, "10 GiB"))
    for options, size, code in [((), 2, 75), (("10 GiB",), 2, 75), ((), 1, 0)]:
        assert shared.ends(second, size, "now", *options, env={"SAFE_GPU_DIR": str(other)}) == code


@BESIDE
def test_each_has_its_place_in_the_queue(shared: Any, first: str, second: str) -> None:
    """An earlier ticket is served before it, and a later one after it, whoever else could be."""
    holder = shared.until_holds(shared.start("c", 8))
    waiters = [shared.until_waits(shared.start(kind, size)) for kind, size in ((first, 8), (second, 8), ("c", 1))]
    assert shared.tickets() == [waiter.pid for waiter in waiters]
    assert shared.ends("minimal", 1, "now") == 75
    for waiter in waiters:
        holder.end()
        holder = shared.until_holds(waiter)
    assert shared.served()[1:] == [waiter.pid for waiter in waiters]
    assert shared.tickets() == []


def test_a_package_that_waits_is_ahead_and_behind(shared: Any) -> None:
    holder = shared.until_holds(shared.start("c", 8))
    kinds = ("minimal", "python", "minimal")
    waiters = [shared.until_waits(shared.start(kind, 8, seconds=0)) for kind in kinds]
    holder.end()
    for waiter in waiters:
        assert waiter.finish()[0] == 0
    assert shared.served()[1:] == [waiter.pid for waiter in waiters]


def test_a_lower_turn_with_a_higher_number_is_ahead(shared: Any) -> None:
    """Its own turn is the highest of those with lower numbers, whether or not they compete."""
    holder = shared.until_holds(shared.start("c", 8))
    queue = shared.state_dir / "queue"

    def ticket(turn: float, **facts: Any) -> bytes:
        return json.dumps({**TICKET, "gpus": shared.uuids, "turn": turn, **facts}).encode()

    with (
        living(queue / name(6), ticket(9.0, inside="0123456789abcdef")),
        living(queue / name(7), ticket(5.0, gpus=["GPU-x"])),
    ):
        waiter = shared.until_waits(shared.start("minimal", 1))  # with the number 8
        with living(queue / name(9), ticket(6.0)):
            with living(queue / name(10), ticket(4.0)):
                holder.end()
                until_it_has_looked(shared, waiter)
                assert waiter.pid not in shared.served()
            shared.until_holds(waiter)


def test_it_makes_no_entry_while_another_process_holds_host_lock(shared: Any) -> None:
    with (shared.state_dir / "host.lock").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        party = shared.start("minimal", 1)
        until_it_has_looked(shared, party)
        assert shared.served() == []
        assert shared.entries("claims") == shared.entries("queue") == []
    shared.until_holds(party)


def test_one_that_does_not_take_host_lock_is_seen(shared: Any) -> None:
    with (shared.state_dir / "host.lock").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        shared.until_holds(shared.start("minimal", 1, broken="no host.lock"))


def test_a_ticket_that_was_removed_or_is_disregarded_is_made_again(shared: Any) -> None:
    shared.until_holds(shared.start("c", 8))
    with living(shared.state_dir / "queue" / f"{10**7}.{'0' * 16}", b"{}"):
        waiter = shared.until_waits(shared.start("minimal", 1))
        assert [ticket.number for ticket in shared.entries("queue")] == [10**7 + 1]
    (shared.state_dir / "queue" / f"{10**7}.{'0' * 16}").unlink()
    shared.until(lambda: [ticket.number for ticket in shared.entries("queue")] == [1], waiter)
    (made,) = shared.entries("queue")
    behind = shared.until_waits(shared.start("c", 1))
    (shared.state_dir / "queue" / made.name).unlink()
    shared.until(lambda: shared.tickets() == [behind.pid, waiter.pid], waiter)


def test_who_came_between_two_polls_makes_it_withdraw(shared: Any) -> None:
    assert shared.ends("minimal", 1, "now", broken="a driver") == 0
    assert shared.ends("minimal", 1, "now", broken="a driver", env={"STRANGER": "1"}) == 75
    assert shared.entries("claims") == []


def test_reserved_and_drained_gpus_are_left_alone(shared: Any) -> None:
    closed = shared.state_dir / "closed"
    for line, options, code in [
        (f"{shared.uuids[3]} - - - a fan is broken\n", (), 75),
        (f"{shared.uuids[3]} 1000 9999999999 user:root a course\n", (), 75),
        (f"{shared.uuids[3]} 9999990000 9999999999 - a course\n", ("a minute",), 0),
        (f"{shared.uuids[3]} 1000 2000 - a course\n", (), 0),
        ("GPU-x - - - of another host\n", (), 0),
    ]:
        closed.write_text(line)
        closed.chmod(0o644)
        assert shared.ends("minimal", 8, "now", *options) == code, line


@ROOT
def test_it_refuses_when_its_user_has_as_many_files_as_count(shared: Any) -> None:
    theirs = {"user": USER, "group": USER, "extra_groups": []}
    for number in range(10, 10 + 2048):
        path = shared.state_dir / "claims" / name(number)
        path.touch()
        os.chown(path, USER, USER)
    code, _, told = shared.start("minimal", 1, "now", command=["true"], **theirs).finish()
    assert (code, "claims has as many files of yours as count" in told) == (70, True)
    assert shared.ends("minimal", 1, "now") == 0


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        ({"gpus": {"UUID": 10 << 30}}, 0),
        ({"gpus": {"UUID": 10 << 30, "GPU-y": None}, "parts": {"UUID": 3}, "pieces": {}}, 0),
        ({"gpus": {"UUID": 75 << 30}}, 75),
        ({"gpus": {"UUID": None}}, 75),
        ({"gpus": {"UUID": 0.5}}, 75),
        ({"gpus": {"UUID": 2**63}}, 75),
        ({"gpus": {"UUID": "10"}}, 75),
        ({"gpus": {"UUID": 10 << 30, "MIG-y": 1}, "pieces": {"UUID": ["MIG-y"]}}, 75),
        ({"gpus": {"MIG-y": None}, "pieces": {"UUID": ["MIG-y"]}}, 75),
        ({"pieces": {"UUID": []}, "gpus": {}}, 75),
        ({"gpus": {}, "command": 'a "UUID" and "gpus":{"UUID":1}'}, 0),
        ({"gpus": {"GPU-y": 1}, "parts": {"GPU-y": 3}, "labels": ["gpus", "pieces", "parts"]}, 0),
    ],
)
def test_what_it_reads_in_a_claim(shared: Any, facts: dict[str, Any], code: int) -> None:
    said = json.dumps({"v": 1, "pid": 4470, **facts}).replace("UUID", shared.uuids[0])
    with living(shared.state_dir / "claims" / name(50), said.encode()):
        assert shared.ends("minimal", 8, "now", "10 GiB") == code
        assert shared.ends("c", 8, "now", "10 GiB") == code
    escaped = said.replace(shared.uuids[0], shared.uuids[0].replace("-", "\\u002d"))
    with living(shared.state_dir / "claims" / name(51), escaped.encode()):
        assert shared.ends("minimal", 8, "now", "10 GiB") == (75 if "\\u002d" in escaped else code)
