"""What the head of the queue sees while it waits for a lease to come free."""

import os
import signal
from pathlib import Path

import pytest

from safe_gpu.coordination.leases.file_names import lease_name
from safe_gpu.coordination.leases.lease import probe, try_lease
from safe_gpu.coordination.leases.watcher import LeaseWatcher
from safe_gpu.coordination.locks.host_lock import HostLock

NAMES = [lease_name(f"GPU-{number}") for number in range(3)]

HOLD = f"""
from safe_gpu.coordination.locks.host_lock import HostLock
from safe_gpu.coordination.leases.lease import try_lease
with HostLock(None) as host:
    leases = [try_lease(host, name) for name in {NAMES!r}]
say("held")
listen()
leases[1].release()
say("released")
listen()
"""


@pytest.fixture
def holder(state_dir: Path, child):
    one = child(HOLD)
    assert one.hear() == "held"
    return one


def test_it_stirs_when_a_lease_comes_free_and_keeps_none(holder) -> None:
    with LeaseWatcher(NAMES) as watcher:
        assert not watcher.any_free()
        holder.tell()
        assert holder.hear() == "released"
        assert watcher.any_free()
        with HostLock(None) as host:
            assert not probe(host, NAMES[1])
            lease = try_lease(host, NAMES[1])
        assert lease is not None
        assert not watcher.any_free()
        lease.release()
        assert watcher.any_free()


def test_signals_are_held_back_only_while_it_looks(holder) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with LeaseWatcher(NAMES) as watcher:
        assert signal.getsignal(signal.SIGINT) is handler
        watcher.any_free()
        assert signal.getsignal(signal.SIGINT) is handler
    assert signal.getsignal(signal.SIGINT) is handler


def test_it_stirs_when_the_holder_dies(holder) -> None:
    with LeaseWatcher(NAMES) as watcher:
        assert not watcher.any_free()
        holder.kill()
        assert watcher.any_free()


def test_it_probes_nothing_while_another_has_host_lock(holder) -> None:
    holder.tell()
    assert holder.hear() == "released"
    with LeaseWatcher(NAMES) as watcher, HostLock(None) as host:
        lease = try_lease(host, NAMES[1])
        assert watcher.any_free()  # it cannot tell
        assert lease is not None
    with HostLock(None) as host:
        assert probe(host, NAMES[1])
    lease.release()


def descriptors_of_a_child() -> int:
    """How many descriptors a forked child has."""
    child_pid = os.fork()
    if child_pid == 0:
        os._exit(len(os.listdir("/proc/self/fd")))
    return os.waitstatus_to_exitcode(os.waitpid(child_pid, 0)[1])


def test_it_leaves_no_descriptor(holder, child) -> None:
    before = os.listdir("/proc/self/fd")
    in_child = descriptors_of_a_child()
    with LeaseWatcher([*NAMES, lease_name("GPU-missing")]) as watcher:
        assert descriptors_of_a_child() == in_child
        assert not watcher.any_free()
    assert os.listdir("/proc/self/fd") == before
