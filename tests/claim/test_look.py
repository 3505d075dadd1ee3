"""Which leases a look takes: the chosen ones, and of the others only what their records leave in doubt."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safe_gpu import procfs
from safe_gpu.claim import leasing
from safe_gpu.claim import view as host_view
from safe_gpu.coordination.leases import LeaseRecord, lease_name
from safe_gpu.coordination.locks import HostLock
from safe_gpu.coordination.queue import TicketRequest, Waiter

from .conftest import _locked, try_claim


def write_record(uuid: str) -> None:
    path = Path(os.environ["SAFE_GPU_DIR"]) / "leases" / lease_name(uuid)
    path.write_bytes(LeaseRecord.of_this_process(None, None).claiming((uuid,), "").encode())


def test_idle_gpus_that_are_leased_count_when_nodes_are_filled_up(host: Any, ground: Any) -> None:
    """GPUs 2 and 3 share a node. The driver shows nobody on GPU 2, its lease is held: GPU 3 is the one to take."""
    assert try_claim(1) == (0,)
    ground.hold(2)
    write_record(host.uuids[2])
    assert try_claim(1) == (3,)


def test_only_what_is_wanted_is_leased(host: Any, monkeypatch: Any) -> None:
    try_claim(1)
    tried: list[str] = []
    genuine = leasing.try_lease

    def try_lease(where: Any, name: str, *, shared: bool = False) -> Any:
        tried.append(name)
        return genuine(where, name, shared=shared)

    monkeypatch.setattr(leasing, "try_lease", try_lease)
    assert try_claim(1) == (0,)
    assert tried == [lease_name(host.uuids[0])]


def test_a_process_is_looked_up_once_and_never_under_host_lock(host: Any, cleanup: ExitStack, monkeypatch: Any) -> None:
    """Others wait for host.lock. The waiter ahead is judged too: it wants what the stranger has, and is passed."""
    cleanup.enter_context(host.stranger(0))
    ahead = Waiter(TicketRequest(8, frozenset(host.uuids)))
    with HostLock(None) as locked:
        ahead.join(locked)
    cleanup.callback(ahead.leave)
    looked_up = []

    def describe(pid: int) -> Any:
        looked_up.append((pid, _locked(Path(os.environ["SAFE_GPU_DIR"], "host.lock"))))
        return procfs.describe_process(pid)

    monkeypatch.setattr(host_view, "describe_process", describe)
    assert try_claim(1) == (1,)
    assert looked_up == [(host.stranger_pid, False)]
