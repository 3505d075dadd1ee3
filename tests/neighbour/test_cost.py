"""What a neighbour can make a command cost: little memory, however wide its processes and files are."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safe_gpu.affinity import placement as placements
from safe_gpu.coordination.holders.by_kernel import holder_by_kernel
from safe_gpu.coordination.leases.file_names import lease_name
from safe_gpu.coordination.queue.ticket import Ticket
from safe_gpu.host import procfs
from safe_gpu.status import gather as holders

MOST = 64  # MiB beyond a bare interpreter


def test_of_a_wide_process_little_is_read(wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    genuine = procfs.read_start

    def spied(path: str, limit: int = 1 << 16) -> bytes | None:
        data = genuine(path, limit)
        sizes.append((path.rpartition("/")[2], len(data or b"")))
        return data

    monkeypatch.setattr(procfs, "read_start", spied)
    monkeypatch.setattr(placements, "read_start", spied)
    assert (procfs.command_of(wide) or "").startswith("wide")
    placements.placement(wide)
    assert max(size for name, size in sizes if name == "cmdline") <= 4096
    assert max(size for name, size in sizes if name == "environ") == 65536


@pytest.mark.parametrize("text", ["a" + "\u0301" * 60_000, "x" * 60_000])
def test_long_names_in_records_are_cut(state_dir: Path, ground: Any, cost: Callable[..., Any], text: str) -> None:
    ground.hold(*range(8))
    for uuid in ground.uuids:
        path = state_dir / "leases" / lease_name(uuid)
        path.write_text(f'{{"pid": {os.getpid()}, "user": "{text}", "job": "{text[:2000]}"}}')
    for arguments in ((), ("--json",)):
        taken = cost("status", *arguments)
        assert len(taken.out) < (32_000 if arguments else 8_000)
        assert taken.mebibytes < MOST


def test_each_process_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tickets name it."""
    asked: list[int] = []
    for name in ("real_uid_of", "has_ended", "is_stopped"):
        monkeypatch.setattr(procfs, name, lambda pid: asked.append(pid))
    processes = holders.ProcessTable([])
    for number in range(1500):
        holders.who_waits(Ticket(number, number, os.getpid(), "x", 1.0, None), [os.getpid()], processes)
        processes.is_stopped(os.getpid())
    assert asked == [os.getpid()] * 3


def test_a_crowd_that_locks_a_lease_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim's lock has one holder; any number of processes may hold a shared one."""
    asked: list[int] = []
    monkeypatch.setattr(procfs, "has_ended", lambda pid: asked.append(pid) or True)
    assert holder_by_kernel(None, range(2, 5000)) == (None, None)
    assert len(asked) < 20


def test_a_process_with_too_many_descriptors_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert procfs.open_files(os.getpid())
    monkeypatch.setattr(procfs, "_MOST_FILES", 1)
    assert procfs.open_files(os.getpid()) is None
