"""What anybody may put into the shared directories does the client in C no more harm than the page says."""

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.state import entry_name as name
from support.state import living

NEIGHBOUR, VICTIM, OTHER = 4711, 4712, 4713
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")

CLAIM = {"v": 1, "pid": 4470, "start": 1, "gpus": {"GPU-x": None}, "parts": {}, "token": "", "inside": "", "since": 1.5}
TICKET = {"v": 1, "pid": 4470, "nb_gpus": 1, "gpus": ["GPU-x"], "inside": "", "hold_for": None, "turn": 1.5}
JUNK = (b"", b'"', b"{", b"]", b"\\", b"\xff", b"-", b"9" * 40, b"[" * 5000, b"\x00", b"1e999", b"null")


def claims_all(scene: Any) -> int:
    return int(scene.ends("c", 8, "now"))


def mutated(scene: Any, good: dict[str, Any]) -> bytes:
    """A line of JSON in which some bytes were replaced, removed or repeated."""
    line = bytearray(json.dumps({**good, "gpus": [scene.uuids[0]]} if "nb_gpus" in good else good).encode() + b"\n")
    for _ in range(scene.random.randint(1, 4)):
        at = scene.random.randrange(len(line))
        line[at : at + scene.random.randint(0, 3)] = scene.random.choice(JUNK)
    return bytes(line)


def test_what_is_no_entry_is_ignored(scene: Any) -> None:
    assert claims_all(scene) == 0
    whole = json.dumps({**CLAIM, "gpus": dict.fromkeys(scene.uuids)}).encode()
    for directory, data in (("claims", whole), ("queue", json.dumps({**TICKET, "gpus": scene.uuids}).encode())):
        above = scene.state_dir / directory
        os.mkfifo(above / name(3))
        (above / name(4)).mkdir()
        (above / name(6)).symlink_to(scene.state_dir / "host.lock")
        (above / name(7)).write_bytes(data)  # dead
        for odd in ("007." + "0" * 16, "9" * 19 + "." + "0" * 16, "8." + "F" * 16, "8", ".8"):
            with living(above / odd, data):
                assert claims_all(scene) == 0, odd
        with living(above / name(8), data):
            assert claims_all(scene) == 75
            (above / name(8)).chmod(0o664)
            assert claims_all(scene) == 0
        assert not (above / name(7)).exists()


def test_garbage_in_entries_costs_nobody_a_gpu_for_longer_than_it_lives(scene: Any) -> None:
    assert claims_all(scene) == 0
    for number in range(20, 420 if scene.required else 60):
        claim, ticket = mutated(scene, {**CLAIM, "gpus": {scene.uuids[0]: None}}), mutated(scene, TICKET)
        with living(scene.state_dir / "claims" / name(number), claim):
            counts = any(scene.uuids[0] in one.gpus for one in scene.entries("claims"))  # for this package
            assert claims_all(scene) in ((75,) if counts else (0, 75)), claim
        with living(scene.state_dir / "queue" / name(number), ticket):
            assert claims_all(scene) in (0, 75), ticket
        assert claims_all(scene) == 0
    assert len(os.listdir(scene.state_dir / "queue")) == 0


def test_an_entry_with_two_names_counts_once_and_a_huge_share_once_more(scene: Any) -> None:
    assert claims_all(scene) == 0
    above = scene.state_dir / "claims"
    share = {**CLAIM, "gpus": dict.fromkeys(scene.uuids, 60 << 30)}
    with living(above / name(8), json.dumps(share).encode()):
        os.link(above / name(8), above / name(9))
        assert scene.ends("c", 8, "now", "10 GiB") == 0
        huge = json.dumps({**CLAIM, "gpus": dict.fromkeys(scene.uuids, 2**63 - 1)}).encode()
        with living(above / name(10), huge), living(above / name(11), huge):
            assert scene.ends("c", 1, "now", "10 GiB") == 75


def as_user(uid: int) -> dict[str, Any]:
    return {"user": uid, "group": uid, "extra_groups": []}


@needs_root
def test_what_a_user_has_beyond_a_bound_is_ignored_and_refuses_nobody_else(scene: Any) -> None:
    """For both clients: of one owner 2,048 files count, dead ones too, and of several names of a file the first."""
    assert claims_all(scene) == 0
    above = scene.state_dir / "claims"
    whole = json.dumps({**CLAIM, "gpus": dict.fromkeys(scene.uuids)}).encode()

    def place(number: int, uid: int = NEIGHBOUR) -> Path:
        (above / name(number)).touch()
        os.chown(above / name(number), uid, uid)
        return above / name(number)

    def counts(number: int, uid: int = NEIGHBOUR) -> bool:
        with living(above / name(number), whole):
            os.chown(above / name(number), uid, uid)
            found = bool(scene.entries("claims"))
            assert scene.ends("c", 8, "now", **as_user(VICTIM)) == (75 if found else 0)
        (above / name(number)).unlink()
        return found

    for number in range(1, 2048):
        place(number)
    os.link(above / name(1), above / name(2048))
    assert counts(2049)
    last = place(2050)
    assert counts(2049)
    assert not counts(2051)
    assert counts(2051, OTHER)
    last.unlink()
    (above / name(1)).unlink()
    assert counts(2051), "the other name of the first file stands in its place"


@needs_root
@pytest.mark.parametrize("alive", [False, True])
def test_who_has_as_many_bytes_as_count_removes_dead_files_or_makes_no_entry(scene: Any, alive: bool) -> None:
    assert claims_all(scene) == 0
    above = scene.state_dir / "claims"
    with ExitStack() as stack:
        for number in range(1, 129):  # 4 MiB
            if alive:
                stack.enter_context(living(above / name(number), b""))
            (above / name(number)).write_bytes(b"x" * (32 << 10))
            os.chown(above / name(number), NEIGHBOUR, NEIGHBOUR)
        party = scene.start("c", 1, "now", command=["true"], **as_user(NEIGHBOUR))
        code, _, told = party.finish()
        assert (code, "claims has as many files of yours as count" in told) == ((70, True) if alive else (0, False))
        assert claims_all(scene) == 0


def test_values_of_another_kind_count_as_missing_and_too_many_of_them_for_nothing(scene: Any) -> None:
    assert claims_all(scene) == 0
    above = scene.state_dir / "claims"
    gpus = dict.fromkeys(scene.uuids)
    for said, code in (
        ({"gpus": gpus, "nb_gpus": "1"}, 75),
        ({"gpus": gpus, "nb_gpus": 1.0, "token": None, "inside": None}, 75),
        ({"gpus": dict.fromkeys(gpus, "none"), "parts": [], "pid": "1"}, 75),
        ({"gpus": gpus, "x": [0] * 2040}, 0),
        ({"gpus": gpus, "x": [0] * 1900}, 75),
        ({"gpus": gpus, "nb_gpus": 1}, 0),
    ):
        with living(above / name(3), json.dumps(said).encode()):
            assert (claims_all(scene), bool(scene.entries("claims"))) == (code, code == 75), said


def test_who_waits_with_a_number_that_no_longer_counts_makes_another_ticket(scene: Any) -> None:
    """Who comes later would stand ahead of it."""
    scene.until_holds(scene.start("python", 8))
    with living(scene.state_dir / "queue" / f"{10**7}.{'0' * 16}", b"{}"):
        waiter = scene.until_waits(scene.start("c", 1))
        assert [ticket.number for ticket in scene.entries("queue")] == [10**7 + 1]
    scene.until(lambda: [ticket.number for ticket in scene.entries("queue")] == [1], waiter)
    assert scene.tickets() == [waiter.pid]


def has_sleeper(path: Path) -> bool:
    """Whether a process sleeps until the entry with this name dies."""
    inode = f":{path.stat().st_ino} "
    return any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines())


def test_who_has_no_turn_stands_behind_a_lower_turn_with_a_higher_number(scene: Any) -> None:
    """Its own is the highest of those with lower numbers, whether or not they compete."""
    holder = scene.until_holds(scene.start("c", 8))
    queue = scene.state_dir / "queue"
    ahead = json.dumps({**TICKET, "gpus": scene.uuids, "turn": 4.0}).encode()
    behind = json.dumps({**TICKET, "gpus": scene.uuids, "turn": 6.0}).encode()
    with living(queue / name(7), json.dumps({**TICKET, "turn": 5.0}).encode()):
        waiter = scene.until_waits(scene.start("c", 1))  # with the number 8
        with living(queue / name(9), behind):
            with living(queue / name(10), ahead):
                holder.end()
                scene.until(lambda: has_sleeper(queue / name(10)) or waiter.pid in scene.served(), waiter)
                assert waiter.pid not in scene.served()
            scene.until_holds(waiter)
