"""What anybody may put into the shared directories does the client in C no more harm than the page says."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support import api

CLAIM = {"v": 1, "pid": 4470, "start": 1, "gpus": {"GPU-x": None}, "parts": {}, "token": "", "inside": "", "since": 1.5}
TICKET = {"v": 1, "pid": 4470, "nb_gpus": 1, "gpus": ["GPU-x"], "inside": "", "hold_for": None, "turn": 1.5}
JUNK = (b"", b'"', b"{", b"]", b"\\", b"\xff", b"-", b"9" * 40, b"[" * 5000, b"\x00", b"1e999", b"null")


def claims_all(scene: Any) -> int:
    return int(scene.ends("c", 8, "now"))


@contextmanager
def living(path: Path, data: bytes) -> Iterator[None]:
    """An entry whose owner keeps it locked, whatever it says."""
    path.write_bytes(data)
    path.chmod(0o644)
    with path.open("r+b") as file:
        api.lock(file.fileno())
        yield
        api.unlock(file.fileno())


def name(number: int) -> str:
    return f"{number}.{number:016x}"


def mutated(scene: Any, good: dict[str, Any]) -> bytes:
    """A line of JSON in which some bytes were replaced, removed or repeated."""
    line = bytearray(json.dumps({**good, "gpus": [scene.uuids[0]]} if "nb_gpus" in good else good).encode() + b"\n")
    for _ in range(scene.random.randint(1, 4)):
        at = scene.random.randrange(len(line))
        line[at : at + scene.random.randint(0, 3)] = scene.random.choice(JUNK)
    return bytes(line)


def test_what_is_no_entry_counts_for_nothing(scene: Any) -> None:
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
            assert claims_all(scene) in (0, 75), claim
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
