"""The NVIDIA driver through the nvidia-smi program.

The report is read element by element, not as XML: some versions close elements of the clocks' section in the wrong
order, and warnings stand before, after and sometimes inside it. A value may be ``N/A``, ``Not Supported``,
``Unknown Error`` or ``ERR!``, with or without brackets, and old versions do not have every element.

One run of ``nvidia-smi -q -x`` answers a poll. Where a GPU has MIG instances, ``nvidia-smi -L`` tells their UUIDs, once
for as long as they stay the same. On a host in trouble it prints complaints besides, or hangs.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ...errors import NoDriverError
from ...gpus.devices import MIG_IS_ON, ComputeMode, Gpu, GpuProcess, HostSnapshot, ProcessKind, normalize_bus_id
from ...gpus.vendors import product_name
from ...host import procfs
from ...host.programs import TooLate, TooMuch, find_program, output_of
from ...runtimes.runtime import CUDA
from .. import pci
from ..base import Driver
from ..kernel import is_wsl, memory_is_node, own_namespace_pids

_MIB = 1 << 20

_LONGEST_TEXT = 400

_LONGEST_NAME = 80

_GPU = re.compile(r'<gpu id="([^"]*)">')

_KINDS = {"G": ProcessKind.GRAPHICS, "M": ProcessKind.MPS, "M+C": ProcessKind.MPS}

_NO_VALUES = ("", "n/a", "none", "err!", "not found", "not supported", "unknown error", "insufficient permissions")

_LOST = re.compile(r"\bis lost\b|requires reset", re.I)

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
    """A MIG instance by its number. ``uuid`` is "" if unknown. ``memory`` is that of a Gpu."""

    slot: int
    uuid: str
    memory: dict[str, int | None]
    gpu_instance: int | None
    compute_instance: int | None


class GpuReport(NamedTuple):
    """One GPU; ``text`` is what nvidia-smi wrote of it besides its processes and MIG instances."""

    bus_id: str
    text: str
    mig: bool
    processes: ProcessList
    instances: tuple[MigReport, ...]


def read(report: str) -> Iterator[GpuReport]:
    """Yield the GPUs that it reports, in its order."""
    _, *pieces = _GPU.split(report)
    for bus_id, text in zip(pieces[::2], pieces[1::2], strict=True):
        # A process may have any name, so its list ends where the last such element does.
        before, began, listed = text.partition("<processes>")
        listed, ended, after = listed.rpartition("</processes>")
        rest = before + after if ended else text
        before, _, behind = rest.partition("<mig_devices>")
        instances, closed, after = behind.partition("</mig_devices>")
        rest = before + after if closed else rest
        yield GpuReport(
            normalize_bus_id(bus_id),
            rest,
            _text(_section(rest, "mig_mode"), "current_mig").lower() == "enabled",
            _read_processes(listed if began and ended else None),
            tuple(_read_instances(instances if closed else "")),
        )


def _value(text: str) -> str | None:
    """Return the text; None for ``[N/A]``, ``Not Supported``, ``ERR!`` and the like."""
    return None if text.startswith("[") or text.lower() in _NO_VALUES else text


def _number(text: str) -> int | None:
    """Return the digits that it begins with; None where they are more than any figure of a driver has."""
    found = re.match(r"[0-9]{1,18}(?![0-9])", text)
    return int(found[0]) if found else None


def _in_bytes(text: str) -> int | None:
    """Return a number of MiB, with or without the unit, in bytes."""
    found = _number(text)
    return None if found is None else found * _MIB


def _read_instances(text: str) -> Iterator[MigReport]:
    for one in _sections(text, "mig_device"):
        slot = _number(_text(one, "index"))
        if slot is not None:
            ids = (_number(_text(one, f"{kind}_instance_id")) for kind in ("gpu", "compute"))
            memory = _memory(_section(one, "fb_memory_usage"))
            yield MigReport(slot, _value(_text(one, "uuid")) or "", memory, *ids)


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
        memory, name = _in_bytes(_text(entry, "used_memory")), _value(_text(entry, "process_name"))
        process = GpuProcess(int(pid), kind, memory, name)
        ids = (_number(_text(entry, "gpu_instance_id")), _number(_text(entry, "compute_instance_id")))
        rows.setdefault((process.pid, kind), Row(process, *ids))
    said = text.strip()
    if not entries and said not in ("", "None"):
        return _unlisted(said)
    return ProcessList(tuple(rows.values()))


def _unlisted(said: str) -> ProcessList:
    said = procfs.printable(said[:_LONGEST_TEXT])
    return ProcessList(error=f"nvidia-smi does not list its processes: {said}", supported=not _NEVER.search(said))


def _memory(text: str) -> dict[str, int | None]:
    """Return the memory as fields of a Gpu."""
    return {f"memory_{name}": _in_bytes(_text(text, name)) for name in ("total", "used", "free")}


def _section(text: str, name: str) -> str:
    return next(_sections(text, name), "")


def _sections(text: str, name: str) -> Iterator[str]:
    """Yield what stands in each element of this name. It takes one pass, also where elements are opened and never
    closed."""
    begin, end = f"<{name}>", f"</{name}>"
    start = text.find(begin)
    while start >= 0 and (stop := text.find(end, start + len(begin))) >= 0:
        yield text[start + len(begin) : stop]
        start = text.find(begin, stop)


def _text(text: str, name: str) -> str:
    """Return the beginning of what an element holds, printable and with XML's names of characters replaced; "" for
    none."""
    found = _section(text, name).strip()[:_LONGEST_TEXT]
    if "&" in found:
        from html import unescape

        found = unescape(found)
    return procfs.printable(found).strip()


_REPORT = ("-q", "-x")

_MOST_OUTPUT = 16 << 20

_LONGEST_LINE = 1000

_LONGEST_COMPLAINT = 200

_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]{1,90}")

_MOST_GPUS = 256

_NO_HANDLE = re.compile(r"device handle for GPU\s*([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])\s*:?\s*(.*)", re.I)

_LISTED_GPU = re.compile(r"GPU\s+[0-9]+:.*\(UUID:\s*(GPU-[^)\s]+)\s*\)")

_LISTED_INSTANCE = re.compile(r"\s+MIG\s+(\S+)\s+Device\s+([0-9]{1,6}):.*\(UUID:\s*(MIG-[^)\s]+)\s*\)")

_MODES = {
    "exclusive_process": ComputeMode.EXCLUSIVE_PROCESS,
    "exclusive_thread": ComputeMode.EXCLUSIVE_PROCESS,
    "prohibited": ComputeMode.PROHIBITED,
}

_GONE = "nvidia-smi no longer shows it"


def find_nvidia_smi() -> str | None:
    """Return the path of nvidia-smi by PATH, or None.

    Raises:
        NoDriverError: this is root, and other users can change it.
    """
    try:
        return find_program("nvidia-smi", os.environ)
    except PermissionError as err:
        raise NoDriverError(f"{err}.", driver="nvidia-smi") from None


class NvidiaSmiDriver(Driver):
    """nvidia-smi as a driver. It shows NVLink and CPUs in tables for people only.

    Args:
        timeout: seconds that one run of nvidia-smi may take; without persistence mode it initialises every card first.

    Raises:
        NoDriverError: it is not on PATH, or not one that root may run.
    """

    name = "nvidia-smi"
    runtime = CUDA

    def __init__(self, timeout: float = 30.0) -> None:
        path = find_nvidia_smi()
        if path is None:
            raise NoDriverError(
                "nvidia-smi is not on PATH: install the NVIDIA driver, or put its directory on PATH.", driver=self.name
            )
        self._path = path
        self._timeout = timeout
        self._known: dict[str, tuple[str, str]] = {}  # UUID and name by bus id, for a GPU that no longer tells
        self._layout: tuple[object, ...] = ()  # the MIG instances for which -L was asked,
        self._listed: dict[tuple[str, int], tuple[str, str]] = {}  # and UUID and profile by GPU and number

    def snapshot(self) -> HostSnapshot:
        """Poll every GPU of the host; see :class:`~safe_gpu.drivers.base.Driver`."""
        code, text = self._run(*_REPORT)
        gpus = tuple(self._gpus(text))
        if not gpus and "no devices" not in text.lower():
            said = _complaint(text) or f"exit status {code} and no output"
            raise NoDriverError(f"nvidia-smi does not work on this host: {said}", driver=self.name)
        version = _value(_text(text, "driver_version")) or ""
        return HostSnapshot(gpus, self.name, version[:_LONGEST_NAME])

    def usage(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """Ask again about these devices only, and about all where one of them does not answer like this."""
        if not gpus:
            return ()
        asked = dict.fromkeys(gpu.mig_parent or gpu.uuid for gpu in gpus)
        shown = {gpu.uuid: gpu for gpu in self._gpus(self._run(*_REPORT, "-i", ",".join(asked))[1])}
        if not all(gpu.uuid in shown for gpu in gpus):
            shown = {gpu.uuid: gpu for gpu in self.snapshot().gpus}
        return tuple(
            shown[gpu.uuid]._replace(index=gpu.index) if gpu.uuid in shown else _unreachable(gpu, _GONE) for gpu in gpus
        )

    def _gpus(self, text: str) -> Iterator[Gpu]:
        """Yield the devices of a report, a GPU before its MIG instances."""
        reports = {report.bus_id: report for report in read(text)}
        complaints = {normalize_bus_id(bus_id): said for bus_id, said in _NO_HANDLE.findall(text)}
        order = {bus_id: place for bus_id in {**complaints, **reports} if (place := pci.bus_order(bus_id))}
        bus_ids = sorted(order, key=order.__getitem__)[:_MOST_GPUS]
        self._list_instances(reports.values())
        seen: set[str] = set()
        for index, bus_id in enumerate(bus_ids):
            report = reports.get(bus_id)
            if report is None:
                yield _unreachable(self._identified(index, bus_id), complaints[bus_id])
            else:
                for gpu in self._devices(index, report):
                    if gpu.uuid not in seen:
                        yield gpu
                    elif not gpu.is_mig_instance:
                        nobody = Gpu(index, f"unknown-{bus_id}", gpu.name, bus_id, gpu.numa_node)
                        yield _unreachable(nobody, "another GPU has its UUID")
                    seen.add(gpu.uuid)

    def _identified(self, index: int, bus_id: str) -> Gpu:
        """Return a GPU that does not tell its UUID, as far as it is remembered."""
        uuid, name = self._known.get(bus_id, (f"unknown-{bus_id}", ""))
        return Gpu(index, uuid, name, bus_id, pci.numa_node(bus_id))

    def _devices(self, index: int, report: GpuReport) -> Iterator[Gpu]:
        said = report.text
        uuid, name, mode, display = (
            _text(said, field) for field in ("uuid", "product_name", "compute_mode", "display_active")
        )
        memory = _section(said, "fb_memory_usage")
        figures = (_text(memory, field) for field in ("total", "used", "free"))
        trouble = next((text for text in (uuid, name, mode, display, *figures) if _LOST.search(text)), "")
        if _UUID.fullmatch(uuid):
            known = self._known.get(report.bus_id, ("", ""))[1]
            self._known[report.bus_id] = uuid, product_name(name)[:_LONGEST_NAME] or known
        gpu = self._identified(index, report.bus_id)
        if trouble or not _UUID.fullmatch(uuid):
            yield _unreachable(gpu, trouble or uuid or "it reports no UUID")
            return
        gpu = gpu._replace(
            compute_mode=_MODES.get(mode.lower(), ComputeMode.DEFAULT),
            counts_reserved=_value(_text(memory, "reserved")) is None,
            memory_shared=is_wsl() or memory_is_node(report.bus_id),
        )
        yield _with_usage(gpu, _memory(memory), report.processes)._replace(
            utilization=_number(_text(_section(said, "utilization"), "gpu_util")),
            temperature=_number(_text(_section(said, "temperature"), "gpu_temp")),
            display_active=display.lower() == "enabled",
            unusable=MIG_IS_ON if report.mig else None,
            mig_enabled=report.mig,
        )
        for instance in report.instances if report.mig else ():
            uuid, profile = self._listed.get((gpu.uuid, instance.slot), (instance.uuid, ""))
            if _UUID.fullmatch(uuid):
                name = f"{gpu.name} MIG {profile}".strip()
                device = gpu._replace(uuid=uuid, name=name, mig_parent=gpu.uuid, mig_instance=instance.slot)
                yield _with_usage(device, instance.memory, _of_instance(report.processes, instance))

    def _list_instances(self, reports: Iterable[GpuReport]) -> None:
        """Learn the UUIDs of MIG instances, where they have changed since the last time."""
        layout = tuple(
            (_text(report.text, "uuid"), one.slot, one.gpu_instance, one.compute_instance, one.memory["memory_total"])
            for report in reports
            if report.mig
            for one in report.instances
            if not one.uuid
        )
        if set(layout) <= set(self._layout):  # a narrow report shows some of them only
            return
        self._layout, self._listed, parent = layout, {}, ""
        for line in self._run("-L")[1].splitlines():
            line = procfs.printable(line[:_LONGEST_LINE])
            if gpu := _LISTED_GPU.match(line):
                parent = gpu[1]
            elif instance := _LISTED_INSTANCE.match(line):
                self._listed[parent, int(instance[2])] = instance[3], instance[1]

    def _run(self, *arguments: str) -> tuple[int, str]:
        """Exit status and output of one run, complaints included.

        Raises:
            NoDriverError: it cannot be started, or does not end in time.
        """
        command, env = [self._path, *arguments], {**os.environ, "LC_ALL": "C"}
        try:
            code, text, _ = output_of(command, env=env, timeout=self._timeout, most=_MOST_OUTPUT)
        except OSError as err:
            raise NoDriverError(f"{self._path} cannot be started: {err.strerror}.", driver=self.name) from err
        except TooMuch as err:
            raise NoDriverError(
                f"{self._path} prints more than {_MOST_OUTPUT >> 20} MiB: look at what `nvidia-smi -q -x` shows, and "
                "whether that is NVIDIA's program.",
                driver=self.name,
            ) from err
        except TooLate as err:
            raise NoDriverError(
                f"nvidia-smi did not answer within {self._timeout:g} s, so the NVIDIA driver hangs: look for NVRM or "
                "Xid in dmesg; usually the host needs a reboot.",
                driver=self.name,
            ) from err
        return code, text


def _with_usage(gpu: Gpu, memory: dict[str, Any], processes: ProcessList) -> Gpu:
    listed = None if processes.error else own_namespace_pids(row.process for row in processes.rows)
    return gpu._replace(
        processes=listed, process_error=processes.error, processes_supported=processes.supported, **memory
    )


def _of_instance(processes: ProcessList, instance: MigReport) -> ProcessList:
    """Return the processes of a GPU that are on one of its MIG instances."""
    unplaced = next((row.process.pid for row in processes.rows if row.gpu_instance is None), None)
    if unplaced is not None:
        return ProcessList(error=f"nvidia-smi does not tell which MIG instance process {unplaced} is on")
    same = (instance.compute_instance, None)
    rows = (row for row in processes.rows if row.gpu_instance == instance.gpu_instance and row.compute_instance in same)
    return processes._replace(rows=tuple(rows))


def _unreachable(gpu: Gpu, complaint: str) -> Gpu:
    said = procfs.printable(complaint.strip("[] .")[:_LONGEST_COMPLAINT])
    return gpu.unreachable(f"the driver cannot reach it ({said}): reset it, or reboot the host")


def _complaint(text: str) -> str:
    """Return the line of its output that says what is wrong: the last one, unless another speaks of a failure."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = next((line for line in lines if "fail" in line.lower()), lines[-1] if lines else "")
    return procfs.printable(line[:_LONGEST_COMPLAINT])
