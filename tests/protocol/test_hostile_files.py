"""What anybody may write into the shared directories does the second client no more harm than the page says."""

import fcntl
import json
import os
from typing import Any

NOW = ("-t", "0")
RECORD = {"v": 1, "pid": 4470, "start": 1, "uid": 0, "gpus": ["x"], "since": 1.5, "token": "", "pidns": None}
REQUEST = {"nb_gpus": 1, "gpus": ["GPU-x"], "min_memory": None}
TICKET = {"pid": 4470, "pidns": None, "user": "anna", "request": REQUEST, "since": 1.5, "hold_for": None}
JUNK = (b"", b'"', b"{", b"]", b"\\", b"\xff", b"-", b"9" * 40, b"[" * 5000, b"\x00", b"1e999")


def claims_all(scene: Any) -> int:
    return int(scene.start("c", 8, *NOW, command=["true"]).finish()[0])


def mutated(scene: Any, good: dict[str, Any]) -> bytes:
    """A line of JSON in which some bytes were replaced, removed or repeated."""
    line = bytearray(json.dumps(good).encode() + b"\n")
    for _ in range(scene.random.randint(1, 4)):
        at = scene.random.randrange(len(line))
        line[at : at + scene.random.randint(0, 3)] = scene.random.choice(JUNK)
    return bytes(line)


def test_files_that_are_no_tickets_are_no_waiters(scene: Any) -> None:
    assert claims_all(scene) == 0
    queue = scene.state_dir / "queue"
    os.mkfifo(queue / "3.ticket")
    os.link(scene.state_dir / "host.lock", queue / "4.ticket")
    (queue / "5.ticket").mkdir()
    (queue / "6.ticket").symlink_to(scene.state_dir / "host.lock")
    (queue / "7.ticket").write_text("dead")
    far = [queue / "007.ticket", queue / f"{'9' * 18}.ticket", queue / f"{'9' * 19}.ticket"]
    kept = [path.open("w") for path in far]
    for file in kept:
        fcntl.flock(file, fcntl.LOCK_EX)
    assert claims_all(scene) == 0
    assert not (queue / "7.ticket").exists()


def test_a_live_ticket_that_cannot_be_read_is_waited_for(scene: Any) -> None:
    assert claims_all(scene) == 0
    with (scene.state_dir / "queue" / "6.ticket").open("w") as ticket:
        for text in ("", "{", '{"pid":1}', json.dumps({**TICKET, "request": {**REQUEST, "nb_gpus": 5000}})):
            os.ftruncate(ticket.fileno(), 0)
            os.pwrite(ticket.fileno(), text.encode(), 0)
            fcntl.flock(ticket, fcntl.LOCK_EX)
            assert claims_all(scene) == 75, text
        os.ftruncate(ticket.fileno(), 0)
        os.pwrite(ticket.fileno(), json.dumps(TICKET).encode() + b"\n", 0)
        assert claims_all(scene) == 0  # of other GPUs
        os.pwrite(ticket.fileno(), b"x", 0)
        waiter = scene.until_waits(scene.start("c", 8))
        fcntl.flock(ticket, fcntl.LOCK_UN)
        scene.until_holds(waiter)


def test_garbage_in_records_and_tickets_costs_nobody_a_gpu(scene: Any) -> None:
    assert claims_all(scene) == 0
    leases, queue = scene.state_dir / "leases", scene.state_dir / "queue"
    for number in range(400 if scene.required else 40):
        for uuid in scene.uuids[:3]:
            (leases / f"{uuid}.lock").write_bytes(mutated(scene, RECORD))
            (leases / f"{uuid}.fault").write_bytes(mutated(scene, {"when": 1.5, "error": "x"}))
        path = queue / f"{number + 10}.ticket"
        path.write_bytes(mutated(scene, TICKET))
        with path.open("r+b") as ticket:
            fcntl.flock(ticket, fcntl.LOCK_EX)
            assert claims_all(scene) in (0, 75), path.read_bytes()
        assert claims_all(scene) == 0
        assert not path.exists()
