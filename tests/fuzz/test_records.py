"""Lines that anybody may have written into the state directory, as they are decoded: bounded, printable, or nothing."""

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import example, given
from support import hostile
from support.hostile import CLAIM, FAULT, NOW, RECORD, TICKET, TRICK, assert_plain, bounded, broken_json, examples

from safe_gpu.coordination.faults import read_faults, write_fault
from safe_gpu.coordination.leases.record import LeaseRecord
from safe_gpu.coordination.queue import ticket as tickets
from safe_gpu.gpus.devices import GpuFault
from safe_gpu.status import history as past

LATEST = 1e11

CLASSICS = (
    *hostile.JUNK, b"[" * 60_000, b'{"pid": ' + b"9" * 5000 + b"}", b'{"pid": NaN}', b"null", b"7", b'"x"', b"[]",
    b"{}", b"\xef\xbb\xbf{}",
)  # fmt: skip


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


def with_classics(document: dict[str, Any], *changes: dict[str, Any]) -> Any:
    """A test with an example of each classic, and of the document as it is and with each of these changes."""
    return hostile.with_examples(*CLASSICS, *(json.dumps({**document, **change}).encode() for change in ({}, *changes)))


@with_classics(
    RECORD,
    {"gpus": [TRICK]},
    {"gpus": "x" * 60_000},
    {"gpus": [{}] * 20_000},
    {"token": TRICK, "user": {"\x1b": "\x1b"}},
    {"since": math.nan, "until": math.inf},
    {"since": 1e300, "until": 1e300},
    {"pid": 1e5, "v": True, "uid": "\u0661"},
)
@examples(40)
@given(broken_json(RECORD))
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


@with_classics(
    TICKET,
    {"user": TRICK},
    {"request": {"nb_gpus": math.inf, "gpus": "GPU-1"}},
    {"request": {"nb_gpus": 1, "gpus": {TRICK: 1}}},
    {"hold_for": math.inf, "since": -math.inf},
    {"pid": -(10**30), "pidns": 2**64},
    {"pid": math.nan},
)
@examples(40)
@given(broken_json(TICKET))
def test_a_ticket(data: bytes) -> None:
    with bounded():
        ticket = tickets._decode(7, 11, data[: 1 << 16])
    assert_plain([ticket.user])
    assert_bounded((*ticket[:5], *(ticket.request or ())), 100)
    assert 0 <= ticket.pid < 1 << 31
    assert 0 <= ticket.since < LATEST
    if ticket.request is not None:
        assert 1 <= ticket.request.nb_gpus <= 4096
        assert ticket.request.hold_for is None or 1 <= ticket.request.hold_for < LATEST
        assert isinstance(ticket.competes_with(ticket.request), bool)


@with_classics(FAULT, {"error": TRICK}, {"when": math.nan}, {"when": 1e300})
@examples(30)
@given(broken_json(FAULT))
def test_a_note_of_a_fault(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        write_fault(place, "GPU-1", GpuFault(NOW, "makes the directory"))
        Path(place, "faults", f"GPU-1.{os.geteuid()}").write_bytes(data)
        with bounded():
            fault = read_faults(place, ["GPU-1"]).get("GPU-1")
    if fault is not None:
        assert_plain(fault.error)
        assert_bounded(tuple(fault), 400)


@with_classics(hostile.ENDING, {"claim": [1e5, NOW], "ended": NOW}, {"claim": [4470, 5], "ended": [math.nan, math.inf]})
@examples(30)
@given(broken_json(hostile.ENDING))
def test_the_end_of_a_claim(data: bytes) -> None:
    with bounded():
        found = [one for one in past._line(data[: 1 << 16]) if isinstance(one, past.ClaimEnd)]
    for end in found:
        assert_bounded(tuple(end), 0)
        assert 0 < end.since <= end.seen <= end.ended < LATEST


@with_classics(
    CLAIM, {"labels": [TRICK], "gpus": [TRICK]}, {"labels": ["9" * 5000]}, {"claim": 5}, {"claim": [[[]], {}]}
)
@example(b'{"v": 1' * 9000)
@examples(40)
@given(broken_json(CLAIM))
def test_a_line_of_the_history(data: bytes) -> None:
    with bounded():
        found = list(past._line(data[: 1 << 16]))
        claims = past.merged(found)
    for claim in claims:
        values = [value for key, value in claim._asdict().items() if key != "running"]
        assert_plain(values)
        assert_bounded(values, 200)
        assert 0 < claim.since < LATEST
