"""NVML's lists of processes, over all the layouts that drivers have given them.

The rows of these lists changed more often than the names of the calls: 16 bytes without a suffix, 24 for ``_v2``
(R450) and ``_v3`` (R510), 32 for ``_v3`` of R535 up to 535.86 and 24 again from 535.104 on. Reading them with the
wrong stride yields plausible nonsense, so the stride is measured: the buffer is filled with a pattern first, and what
the driver overwrote tells the size of its rows. The buffer is large enough for the widest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ..devices import GpuProcess, ProcessKind

_CALLS = {
    ProcessKind.COMPUTE: "nvmlDeviceGetComputeRunningProcesses",
    ProcessKind.GRAPHICS: "nvmlDeviceGetGraphicsRunningProcesses",
    ProcessKind.MPS: "nvmlDeviceGetMPSComputeRunningProcesses",
}
_SUFFIXES = (("_v3", 24), ("_v2", 24), ("", 16))

_WIDEST = 32
_STRIDES = (16, 24, _WIDEST)
_PATTERN = b"\xa5"
_FILLING = _PATTERN * _WIDEST
_ROOM = 32  # rows at first: one call is enough on nearly every GPU
_MOST = 1 << 16  # rows: a driver that says there are more is not believed
_TRIES = 8  # each doubles the room

_SUCCESS = 0
_INSUFFICIENT_SIZE = 7
_NO_INSTANCE = 0xFFFFFFFF
_NO_MEMORY = 0xFFFFFFFFFFFFFFFF


class ProcessRow(NamedTuple):
    """One row: ``memory`` in bytes or None; the ids name a MIG instance, None where there is none or it is hidden."""

    pid: int
    memory: int | None
    gpu_instance: int | None
    compute_instance: int | None


def symbols(kind: str) -> tuple[tuple[str, int], ...]:
    """The functions that list processes of a kind, newest first, each with the row size that its header promises."""
    return tuple((_CALLS[kind] + suffix, stride) for suffix, stride in _SUFFIXES)


def read_rows(function: Any, handle: Any, stride: int) -> tuple[int, list[ProcessRow]]:
    """Call one of these functions: NVML's return code, and the rows when that is 0.

    Processes may start between two calls, so the room grows until it suffices.
    """
    import ctypes

    room = _ROOM
    code = _INSUFFICIENT_SIZE
    for _ in range(_TRIES):
        buffer = ctypes.create_string_buffer(_FILLING * room, room * _WIDEST)
        count = ctypes.c_uint(room)
        code = function(handle, ctypes.byref(count), buffer)
        if code == _SUCCESS:
            return code, _parse(buffer.raw, min(count.value, room), stride) if count.value else []
        if code != _INSUFFICIENT_SIZE:
            break
        room = min(max(2 * room, count.value + _ROOM), _MOST)
    return code, []


def _parse(raw: bytes, count: int, promised: int) -> list[ProcessRow]:
    from struct import unpack_from

    written = len(raw.rstrip(_PATTERN))
    stride = next((size for size in _STRIDES if size * count == written), promised)
    rows = []
    for offset in range(0, count * stride, stride):
        (pid,) = unpack_from("=I", raw, offset)
        (memory,) = unpack_from("=Q", raw, offset + 8)
        instances = unpack_from("=II", raw, offset + 16) if stride > _STRIDES[0] else (_NO_INSTANCE, _NO_INSTANCE)
        rows.append(
            ProcessRow(
                pid,
                None if memory == _NO_MEMORY else memory,
                *(None if instance == _NO_INSTANCE else instance for instance in instances),
            )
        )
    return rows


def merge(rows: Iterable[tuple[str, ProcessRow]], names: dict[int, str | None]) -> tuple[GpuProcess, ...]:
    """Processes from (kind, row) pairs: each pid once per kind, its memory the largest figure that was given."""
    merged: dict[tuple[str, int], int | None] = {}
    for kind, row in rows:
        known = merged.get((kind, row.pid))
        merged[kind, row.pid] = row.memory if known is None else max(known, row.memory or 0)
    return tuple(GpuProcess(pid, kind, memory, names.get(pid)) for (kind, pid), memory in merged.items())
