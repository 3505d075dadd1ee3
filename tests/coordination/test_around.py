"""Which claim this process runs in: its own, its nearest ancestor's, or the one with its scope."""

import os

from safe_gpu.coordination.holders.outer_claim import outer_claim_of_process
from safe_gpu.coordination.leases.record import LeaseRecord
from safe_gpu.coordination.socket_names import digest
from safe_gpu.host import procfs


def record(pid: int, start: int | None, token: str = "") -> LeaseRecord:
    return LeaseRecord(pid, start, 0, "", "", None, None, (f"GPU-{pid}",), 1.0, token)


ME = record(os.getpid(), procfs.start_time(os.getpid()))
STRANGER = record(999_999_999, 1, digest("secret"))


def test_the_nearest_process_counts() -> None:
    ancestors = list(procfs.ancestors(os.getpid()))
    parents = [record(pid, procfs.start_time(pid), "x") for pid in ancestors]
    assert outer_claim_of_process([*reversed(parents), STRANGER, ME], "secret") == ME
    if parents:
        assert outer_claim_of_process([*reversed(parents), STRANGER], "secret") == parents[0]


def test_a_recycled_pid_is_another_process() -> None:
    assert ME.start is not None
    assert outer_claim_of_process([ME._replace(start=ME.start + 1)], "") is None


def test_the_scope_tells_where_no_process_does() -> None:
    assert outer_claim_of_process([STRANGER], "secret") == STRANGER
    assert outer_claim_of_process([STRANGER], "other") is None
    assert outer_claim_of_process([STRANGER], digest("secret")) is None, "the hash that everybody can read"
    assert outer_claim_of_process([STRANGER._replace(token="")], "") is None
    assert outer_claim_of_process([], "secret") is None
