"""Lines that anybody may have written into the state directory, as they are decoded: bounded, printable, or nothing."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from hypothesis import example, given
from support.hostile import JUNK, TRICK, assert_plain, bounded, broken_json, examples

from safe_gpu.coordination import leases as faults
from safe_gpu.coordination import queue as tickets
from safe_gpu.coordination.leases import LeaseRecord
from safe_gpu.coordination.records import LONGEST, ClaimEnd
from safe_gpu.status import history as past

UUID = "GPU-00000000-0000-0000-0000-000000000000"
RECORD: dict[str, Any] = {
    "v": 1, "pid": 4470, "start": 891233, "uid": 1000, "user": "anna", "host": "gpu1", "job": "sge:4711.3",
    "command": "python train.py", "gpus": [UUID], "since": 1795184513.204, "until": 1795191713.204, "token": "",
    "pidns": 4026531836,
}  # fmt: skip
TICKET: dict[str, Any] = {
    "pid": 4470, "pidns": 4026531836, "user": "anna", "request": {"nb_gpus": 2, "gpus": [UUID], "min_memory": None},
    "hold_for": 3600.0, "since": 1795184513.204,
}  # fmt: skip
FAULT: dict[str, Any] = {"when": 1795184513.2, "error": "CUDA_ERROR_ECC_UNCORRECTABLE"}
ENDING: dict[str, Any] = {"v": 1, "claim": [4470, 1795184513.204], "ended": [1795184600.0, 1795184700.0]}
CLAIM: dict[str, Any] = {**RECORD, "claim": [4470, 1795184513.204], "labels": ["0"]}
LATEST = 1e11

DEEP = b"[" * 60_000
CLASSICS = (
    *JUNK,
    DEEP,
    b'{"pid": ' + b"9" * 5000 + b"}",
    b'{"pid": NaN}',
    b"null",
    b"7",
    b'"x"',
    b"[]",
    b"{}",
    b"\xef\xbb\xbf{}",
)


def assert_bounded(value: Any, texts: int, numbers: float = 2**63) -> None:
    """No text is longer, and no number further from 0, than this; none is infinite."""
    if isinstance(value, str):
        assert len(value) <= texts
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        assert math.isfinite(value)
        assert abs(value) <= numbers
    elif isinstance(value, (list, tuple, frozenset)):
        for one in value:
            assert_bounded(one, texts, numbers)


def with_classics(test: Any) -> Any:
    """The test with an example of each classic."""
    for data in CLASSICS:
        test = example(data)(test)
    return test


@with_classics
@examples(150)
@given(broken_json(RECORD))
@example(json.dumps(RECORD).encode())
@example(json.dumps({**RECORD, "gpus": [TRICK]}).encode())
@example(json.dumps({**RECORD, "gpus": "x" * 60_000}).encode())
@example(json.dumps({**RECORD, "gpus": [{}] * 20_000}).encode())
@example(json.dumps({**RECORD, "token": TRICK, "user": {"\x1b": "\x1b"}}).encode())
@example(json.dumps({**RECORD, "since": float("nan"), "until": float("inf")}).encode())
@example(json.dumps({**RECORD, "since": 1e300, "until": 1e300}).encode())
@example(json.dumps({**RECORD, "pid": 1e5, "v": True, "uid": "\u0661"}).encode())
def test_a_record(data: bytes) -> None:
    with bounded():
        record = LeaseRecord.decode(data[: 1 << 16])
    if record is None:
        return
    fields = record._asdict()
    assert_plain(tuple(fields.values()))
    assert_bounded(tuple(fields.values()), 200)
    assert len(record.gpus) <= 1024
    assert 0 < record.pid < 1 << 31
    assert 0 <= record.since < LATEST
    json.loads(record.encode())


@with_classics
@examples(150)
@given(broken_json(TICKET))
@example(json.dumps(TICKET).encode())
@example(json.dumps({**TICKET, "user": TRICK}).encode())
@example(json.dumps({**TICKET, "request": {"nb_gpus": 1e400, "gpus": UUID}}).encode())
@example(json.dumps({**TICKET, "request": {"nb_gpus": 1, "gpus": {TRICK: 1}}}).encode())
@example(json.dumps({**TICKET, "hold_for": float("inf"), "since": -1e400}).encode())
@example(json.dumps({**TICKET, "pid": -(10**30), "pidns": 2**64}).encode())
@example(json.dumps({**TICKET, "pid": float("nan")}).encode())
def test_a_ticket(data: bytes) -> None:
    with bounded():
        ticket = tickets._decode(7, 11, data[: 1 << 16])
    assert_plain([ticket.user])
    assert_bounded((*ticket[:5], *(ticket.demand or ())), 100)
    assert 0 <= ticket.pid < 1 << 31
    assert 0 <= ticket.since < LATEST
    if ticket.demand is not None:
        assert 1 <= ticket.demand.nb_gpus <= 4096
        assert ticket.demand.hold_for is None or 1 <= ticket.demand.hold_for < LATEST
        assert isinstance(ticket.competes_with(ticket.demand), bool)


@with_classics
@examples(100)
@given(broken_json(FAULT))
@example(json.dumps(FAULT).encode())
@example(json.dumps({**FAULT, "error": TRICK}).encode())
@example(json.dumps({**FAULT, "when": float("nan")}).encode())
@example(json.dumps({**FAULT, "when": 1e300}).encode())
def test_a_note_of_a_fault(data: bytes) -> None:
    with bounded():
        fault = faults._decode(data[:4096])
    if fault is not None:
        assert_plain(fault.error)
        assert_bounded(tuple(fault), 400)


@with_classics
@examples(100)
@given(broken_json(ENDING))
@example(json.dumps(ENDING).encode())
@example(b'{"v": 1, "claim": [1e5, 1795184513.204], "ended": 1795184600}')
@example(b'{"v": 1, "claim": [4470, 5], "ended": [NaN, 1e400]}')
def test_the_end_of_a_claim(data: bytes) -> None:
    with bounded():
        ending = ClaimEnd.decode(data[: 1 << 16])
    if ending is not None:
        assert_bounded(tuple(ending), 0)
        assert 0 < ending.since <= ending.seen <= ending.ended < LATEST
        assert len(ending.encode()) <= LONGEST
        assert ClaimEnd.decode(ending.encode()) is not None


@with_classics
@examples(150)
@given(broken_json(CLAIM))
@example(json.dumps(CLAIM).encode())
@example(json.dumps({**CLAIM, "labels": [TRICK], "gpus": [TRICK]}).encode())
@example(json.dumps({**CLAIM, "labels": ["9" * 5000]}).encode())
@example(json.dumps({**CLAIM, "claim": 5}).encode())
@example(json.dumps({**CLAIM, "claim": [[[]], {}]}).encode())
@example(b'{"v": 1' * 9000)
def test_a_line_of_the_history(data: bytes) -> None:
    with bounded():
        found = list(past._line(data[: 1 << 16]))
        claims = past.merged(found)
    for claim in claims:
        values = [value for key, value in asdict(claim).items() if key != "running"]
        assert_plain(values)
        assert_bounded(values, 200)
        assert 0 < claim.since < LATEST
