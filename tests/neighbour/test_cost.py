"""What a neighbour can make a command cost: little memory, however wide its processes and files are."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from safe_gpu.affinity import placement as placements
from safe_gpu.host import procfs

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
def test_long_texts_in_entries_are_cut(ground: Any, cost: Callable[..., Any], text: str) -> None:
    ground.hold(*range(8), job=text[:2000], command=text[:50_000].encode()[:60_000].decode(errors="ignore"))
    for arguments in ((), ("--json",)):
        taken = cost("status", *arguments)
        assert taken.code == 0
        assert len(taken.out) < (32_000 if arguments else 8_000)
        assert taken.mebibytes < MOST


def test_a_process_with_too_many_descriptors_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert procfs.open_files(os.getpid())
    monkeypatch.setattr(procfs, "_MOST_FILES", 1)
    assert procfs.open_files(os.getpid()) is None
