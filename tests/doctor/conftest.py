"""The state directory in which ``doctor`` looks, and no older package beside it."""

import time
from pathlib import Path

import pytest
from support.findings import UUIDS

from safe_gpu.coordination.leases.file_names import lease_name
from safe_gpu.coordination.leases.lease import try_lease
from safe_gpu.coordination.locks.host_lock import HostLock
from safe_gpu.doctor.state import claims as legacy


@pytest.fixture(autouse=True)
def no_older_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was used on this host."""
    monkeypatch.setattr(legacy, "LOCK_FILE", "/nowhere/lock")


@pytest.fixture
def claimed(state_dir: Path):
    """A state directory in use, with the lease of GPU 0 held by this process."""
    with HostLock(time.monotonic() + 30) as host:
        lease = try_lease(host, lease_name(UUIDS[0]))
    assert lease is not None
    yield lease
    lease.release()
