"""Holders in other PID namespaces: their numbers mean nothing here, and nobody else is blamed for them."""

import json
import os
import shutil
from pathlib import Path

import pytest

from safe_gpu import NoPlaceholder, claim_gpus
from safe_gpu.claim.host.ancestors import ancestor_may_hold
from safe_gpu.claim.host.outer_claim import pids_of_outer
from safe_gpu.coordination.holders.of_gpus import LockedFile
from safe_gpu.coordination.leases.file_names import lease_name
from safe_gpu.coordination.leases.record import LeaseRecord
from safe_gpu.coordination.queue.ticket import Ticket
from safe_gpu.gpus.devices import Gpu, HostSnapshot, LeaseHolder
from safe_gpu.host import procfs
from safe_gpu.selection.request import Selection
from safe_gpu.selection.verdicts import judge
from safe_gpu.status.gather import ProcessTable, gather, who_holds, who_waits

OTHER = 4026539999
FIRST = procfs.FIRST_PID_NAMESPACE
FILE = LockedFile("x.lock", 1, 2)


@pytest.mark.parametrize(
    ("own", "other", "place"),
    [
        (FIRST, FIRST, ""),
        (FIRST, None, ""),
        (OTHER, OTHER, ""),
        (FIRST, OTHER, "in a container"),
        (OTHER, FIRST, "outside this container"),
        (OTHER, OTHER + 1, "in another container"),
    ],
)
def test_where_a_process_is(monkeypatch: pytest.MonkeyPatch, own: int, other: int | None, place: str) -> None:
    monkeypatch.setattr(procfs, "pid_namespace", lambda: own)
    assert procfs.namespace_text(other) == place


def test_an_unrelated_process_with_that_number_is_not_blamed() -> None:
    record = LeaseRecord.of_this_process(None, None)
    holding = who_holds(FILE, record._replace(pidns=OTHER), ProcessTable([]))
    assert holding[:2] == (None, None)
    assert f"as process {os.getpid()} there, which cannot be seen from here" in holding.note
    assert who_holds(FILE, record, ProcessTable([]))[:2] == (None, None), "nor is one of here, on a record's word"
    ticket = Ticket(1, 2, os.getpid(), "x", 1.0, None, OTHER, os.geteuid())
    pid, user, note = who_waits(ticket, (), ProcessTable([]))
    assert (pid, user) == (None, None)
    assert f"as process {os.getpid()} there, which cannot be seen from here" in note
    assert who_waits(ticket, [os.getpid()], ProcessTable([]))[0] == os.getpid()


def test_a_record_of_another_namespace_on_a_lock_of_this_one(ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody can write a record; the kernel says that the holder is no process of a container."""
    monkeypatch.setattr(procfs, "pid_namespace", lambda: FIRST)
    with claim_gpus(1, NoPlaceholder(), affinity=None):
        path = ground.directory / "leases" / lease_name(ground.uuids[0])
        record = json.loads(path.read_text())
        path.write_text(json.dumps({**record, "pid": 7, "start": 7, "pidns": OTHER, "user": "innocent"}))
        claim = gather().gpus[0].claim
        assert claim is not None
        assert (claim.pid, claim.user) == (os.getpid(), procfs.user_name(os.geteuid()))
        assert "its record names process 7 in a container, which does not hold the lock" in claim.note


def test_a_claim_in_a_real_pid_namespace(ground, child) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root, and unshare")
    code = "import ctypes, os, safe_gpu\nassert ctypes.CDLL(None).unshare(0x20000000) == 0\n"  # CLONE_NEWPID
    code += "if os.fork() == 0:\n    safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), affinity=None)\n"
    code += "    say(os.getpid())\n    listen()\nelse:\n    os.wait()\n"
    parent = child(code)
    try:
        assert parent.hear() == "1", "pid 1 of its namespace"
        (holder,) = procfs.descendants(parent.pid)
        one = gather().gpus[0]
        assert one.claim is not None
        assert one.claim.pid == holder
        assert one.claim.note.endswith("container, as process 1 there")
        assert "process 1 (" not in one.reason
    finally:
        parent.tell()


def test_a_number_of_another_namespace_is_no_ancestor(ground) -> None:
    gpu = Gpu(0, ground.uuids[0])
    with claim_gpus(1, NoPlaceholder(), affinity=None):
        assert ancestor_may_hold([gpu], inner=False)
        path = ground.directory / "leases" / lease_name(gpu.uuid)
        path.write_text(json.dumps({**json.loads(path.read_text()), "pidns": OTHER}))
        assert not ancestor_may_hold([gpu], inner=False)


def test_the_processes_of_an_outer_claim_elsewhere() -> None:
    record = LeaseRecord.of_this_process(None, None)
    assert pids_of_outer(record) == (os.getpid(),)
    assert pids_of_outer(record._replace(pidns=OTHER)) == tuple(procfs.ancestors(os.getpid()))


def test_what_a_refusal_says() -> None:
    gpu = Gpu(0, "GPU-0")
    held = {"GPU-0": LeaseHolder(7, "ada", command="train", namespace="in a container")}
    (verdict,) = judge(HostSnapshot((gpu,)), Selection(), leased=held)
    assert verdict.reason == "claimed by process 7 in a container (ada, train)"
    assert verdict.pid is None


def test_records_without_the_key_are_of_this_namespace(tmp_path: Path) -> None:
    line = LeaseRecord.of_this_process(None, None).encode()
    old = {key: value for key, value in json.loads(line).items() if key != "pidns"}
    record = LeaseRecord.decode(json.dumps(old).encode())
    assert record is not None
    assert record.here
    assert LeaseRecord.decode(line) == LeaseRecord.of_this_process(None, None)
