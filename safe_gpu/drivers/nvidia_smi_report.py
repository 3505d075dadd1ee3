"""What ``nvidia-smi -q -x`` says, as data.

The report is read element by element, not as XML: some versions close elements of the clocks' section in the wrong
order, and warnings stand before, after and, on a bad day, inside it. A value may be ``N/A``, ``Not Supported``,
``Unknown Error`` or ``ERR!``, with or without brackets, and old versions do not have every element.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .. import procfs
from ..devices import GpuProcess, ProcessKind, normalize_bus_id

_MIB = 1 << 20
_LONGEST_TEXT = 400
_LONGEST_NAME = 80
_GPU = re.compile(r'<gpu id="([^"]*)">')
_KINDS = {"G": ProcessKind.GRAPHICS, "M": ProcessKind.MPS, "M+C": ProcessKind.MPS}
_NO_VALUES = ("", "n/a", "none", "err!", "not found", "not supported", "unknown error", "insufficient permissions")
_NEVER = re.compile(r"not supported|n/a", re.I)  # what is unsupported stays so; other trouble may pass


class Row(NamedTuple):
    """A process on a GPU, with the ids of its MIG instance; None where it is on none, or they are hidden."""

    process: GpuProcess
    gpu_instance: int | None
    compute_instance: int | None


class ProcessList(NamedTuple):
    """The list of a GPU's processes, or why there is none; ``supported`` is False where there never will be."""

    rows: tuple[Row, ...] = ()
    error: str = ""
    supported: bool = True


class MigReport(NamedTuple):
    """A MIG instance by its number. ``uuid`` is "" where it is not told. ``memory`` is total, used and free."""

    slot: int
    gpu_instance: int | None
    compute_instance: int | None
    uuid: str
    memory: tuple[int | None, ...]


class GpuReport(NamedTuple):
    """One GPU; texts are as nvidia-smi wrote them, "" where they are missing. ``memory`` is total, used and free."""

    bus_id: str
    uuid: str
    name: str
    memory: tuple[int | None, ...]
    utilization: int | None
    compute_mode: str
    display_active: bool
    mig: bool
    processes: ProcessList
    instances: tuple[MigReport, ...]
    counts_reserved: bool
    trouble: str


def driver_version(report: str) -> str:
    """The version of the kernel driver, "" where it is not told."""
    return (_value(_text(report, "driver_version")) or "")[:_LONGEST_NAME]


def read(report: str) -> Iterator[GpuReport]:
    """The GPUs that it reports, in its order."""
    _, *pieces = _GPU.split(report)
    for bus_id, text in zip(pieces[::2], pieces[1::2], strict=True):
        yield _read_gpu(bus_id, text)


def _value(text: str) -> str | None:
    """None for ``[N/A]``, ``Not Supported``, ``ERR!`` and the like."""
    return None if text.startswith("[") or text.lower() in _NO_VALUES else text


def _number(text: str) -> int | None:
    """The digits that it begins with; None where they are more than any figure of a driver has."""
    found = re.match(r"[0-9]{1,18}(?![0-9])", text)
    return int(found[0]) if found else None


def _in_bytes(text: str) -> int | None:
    """From MiB, with or without the unit."""
    found = _number(text)
    return None if found is None else found * _MIB


def _read_gpu(bus_id: str, text: str) -> GpuReport:
    # A process may have any name, so its list ends where the last such element does.
    before, began, listed = text.partition("<processes>")
    listed, ended, after = listed.rpartition("</processes>")
    rest = before + after if ended else text
    before, _, behind = rest.partition("<mig_devices>")
    instances, closed, after = behind.partition("</mig_devices>")
    rest = before + after if closed else rest
    fields = {name: _text(rest, name) for name in ("uuid", "product_name", "compute_mode", "display_active")}
    memory = _section(rest, "fb_memory_usage")
    return GpuReport(
        normalize_bus_id(bus_id),
        fields["uuid"],
        (_value(fields["product_name"]) or "")[:_LONGEST_NAME],
        _memory(memory),
        _number(_text(_section(rest, "utilization"), "gpu_util")),
        fields["compute_mode"].lower(),
        fields["display_active"].lower() == "enabled",
        _text(_section(rest, "mig_mode"), "current_mig").lower() == "enabled",
        _read_processes(listed if began and ended else None),
        tuple(_read_instances(instances if closed else "")),
        _value(_text(memory, "reserved")) is None,
        _trouble((*fields.values(), *(_text(memory, name) for name in ("total", "used", "free")))),
    )


def _trouble(values: Iterable[str]) -> str:
    """The value that says that the GPU is lost, or ""."""
    lost = re.compile(r"\bis lost\b|requires reset", re.I)
    return next((text.strip("[] .") for text in values if lost.search(text)), "")


def _read_instances(text: str) -> Iterator[MigReport]:
    for one in _sections(text, "mig_device"):
        slot = _number(_text(one, "index"))
        if slot is not None:
            yield MigReport(
                slot,
                _number(_text(one, "gpu_instance_id")),
                _number(_text(one, "compute_instance_id")),
                _value(_text(one, "uuid")) or "",
                _memory(_section(one, "fb_memory_usage")),
            )


def _read_processes(text: str | None) -> ProcessList:
    if text is None:
        return ProcessList(error="nvidia-smi does not list its processes")
    rows: dict[tuple[int, str], Row] = {}
    entries = list(_sections(text, "process_info"))
    for entry in entries:
        pid = _text(entry, "pid")
        if not re.fullmatch("[0-9]{1,10}", pid):
            return _unlisted(pid)
        kind = _KINDS.get(_text(entry, "type"), ProcessKind.COMPUTE)
        process = GpuProcess(
            int(pid), kind, _in_bytes(_text(entry, "used_memory")), _value(_text(entry, "process_name"))
        )
        ids = (_number(_text(entry, "gpu_instance_id")), _number(_text(entry, "compute_instance_id")))
        rows.setdefault((process.pid, kind), Row(process, *ids))
    said = text.strip()
    if not entries and said not in ("", "None"):
        return _unlisted(said)
    return ProcessList(tuple(rows.values()))


def _unlisted(said: str) -> ProcessList:
    said = procfs.printable(said[:_LONGEST_TEXT])
    return ProcessList(error=f"nvidia-smi does not list its processes: {said}", supported=not _NEVER.search(said))


def _memory(text: str) -> tuple[int | None, ...]:
    return tuple(_in_bytes(_text(text, name)) for name in ("total", "used", "free"))


def _section(text: str, name: str) -> str:
    return next(_sections(text, name), "")


def _sections(text: str, name: str) -> Iterator[str]:
    """What stands in each element of this name. It takes one pass, also where elements are opened and never closed."""
    begin, end = f"<{name}>", f"</{name}>"
    start = text.find(begin)
    while start >= 0 and (stop := text.find(end, start + len(begin))) >= 0:
        yield text[start + len(begin) : stop]
        start = text.find(begin, stop)


def _text(text: str, name: str) -> str:
    """The beginning of what an element holds, printable and with XML's names of characters replaced; "" for none."""
    found = _section(text, name).strip()[:_LONGEST_TEXT]
    if "&" in found:
        from html import unescape

        found = unescape(found)
    return procfs.printable(found).strip()
