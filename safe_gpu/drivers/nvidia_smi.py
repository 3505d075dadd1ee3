"""The NVIDIA driver through the nvidia-smi program.

The report is read element by element, not as XML: some versions close elements of the clocks' section in the wrong
order, warnings stand before, after and sometimes inside it, and names of processes are not escaped. A value may be
``N/A``, ``Not Supported``, ``Unknown Error`` or ``ERR!``, with or without brackets, and old versions do not have every
element.

Any user chooses the name of a process, so a name may look like the section of a GPU. It can add sections but hide none,
as it could with a comment or CDATA if this were read as XML. So the sections are counted: where they are more than
``attached_gpus``, or two have a bus id or a UUID in common, the processes on all GPUs are unknown, so these are busy.

One run of ``nvidia-smi -q -x`` answers a poll. On a host in trouble it prints complaints besides, or hangs. MIG
instances are not read: it does not tell their UUIDs there.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..errors import NoDriverError
from ..gpus.devices import ComputeMode, Gpu, GpuProcess, HostSnapshot, ProcessKind, normalize_bus_id
from ..gpus.vendors import BARE_UUID, product_name
from ..host import procfs
from ..host.programs import TooLate, TooMuch, find_program, output_of
from ..runtimes.cuda import CUDA
from . import pci
from .base import Driver
from .kernel import is_wsl, memory_is_node, own_namespace_pids

_MIB = 1 << 20

_LONGEST_TEXT = 400

_LONGEST_NAME = 80

_GPU = re.compile(r'<gpu id="([^"]*)">')

_KINDS = {"G": ProcessKind.GRAPHICS, "M": ProcessKind.MPS, "M+C": ProcessKind.MPS}

_NO_VALUES = ("", "n/a", "none", "err!", "not found", "not supported", "unknown error", "insufficient permissions")

_LOST = re.compile(r"\bis lost\b|requires reset", re.I)

_NEVER = re.compile(r"not supported|n/a", re.I)  # what is unsupported stays so; other trouble may pass


class ProcessList(NamedTuple):
    """The list of a GPU's processes, or why there is none; ``supported`` is False where there never will be."""

    rows: tuple[GpuProcess, ...] = ()
    error: str = ""
    supported: bool = True


class GpuReport(NamedTuple):
    """One GPU.

    Attributes:
        bus_id: "" where it has none, as on Jetson.
        text: what nvidia-smi wrote of it besides its processes and MIG instances.
        trouble: why the driver cannot reach it; "" if it can.
    """

    bus_id: str
    uuid: str = ""
    text: str = ""
    mig: bool = False
    processes: ProcessList = ProcessList()
    trouble: str = ""


def read(report: str) -> Iterator[GpuReport]:
    """Yield the GPUs that it reports, in its order."""
    _, *pieces = _GPU.split(report)
    for bus_id, text in zip(pieces[::2], pieces[1::2], strict=True):
        processes, rest = _without(text, "processes")
        _, rest = _without(rest, "mig_devices")
        yield GpuReport(
            normalize_bus_id(bus_id),
            _text(rest, "uuid"),
            rest,
            _text(_section(rest, "mig_mode"), "current_mig").lower() == "enabled",
            _read_processes(processes),
        )


def read_all(report: str) -> tuple[list[GpuReport], str]:
    """Return the GPUs in nvidia-smi's order, those that it cannot reach too, and why the order may be wrong."""
    head, found, doubt = _GPU.split(report, 1)[0], list(read(report)), ""
    attached = _number(_text(head, "attached_gpus"))
    names = Counter(name for gpu in found for name in (gpu.bus_id, _value(gpu.uuid)) if name)
    if (attached is not None and len(found) > attached) or max(names.values(), default=0) > 1:
        doubt = _FORGED
        found = [gpu._replace(processes=ProcessList(error=doubt)) for gpu in found]
    placed = {(gpu.bus_id, False, 0 if gpu.bus_id else at): gpu for at, gpu in enumerate(found)}
    for index, bus_id, said in _NO_HANDLE.findall("\n".join([head, *(gpu.text for gpu in found)])):
        bus_id = normalize_bus_id(bus_id)
        if bus_id or index:  # those that have only an index are put among the others last
            placed.setdefault((bus_id, not bus_id, 0 if bus_id else int(index)), GpuReport(bus_id, trouble=said))
    if placed and len(placed) < (attached or 0):
        doubt = doubt or f"nvidia-smi counts {attached} GPUs and shows {len(placed)}"
    order = [(bus_id, number, gpu) for (bus_id, _, number), gpu in sorted(placed.items())]
    return pci.in_bus_order(order)[:_MOST_GPUS], doubt


def _without(text: str, name: str) -> tuple[str | None, str]:
    """Return what an element holds, up to the last end of such a one, since the name of a process may have more of
    them; and the text without it."""
    before, began, rest = text.partition(f"<{name}>")
    inside, ended, after = rest.rpartition(f"</{name}>")
    return (inside, before + after) if began and ended else (None, text)


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


def _read_processes(text: str | None) -> ProcessList:
    if text is None:
        return ProcessList(error="nvidia-smi does not list its processes")
    rows: dict[tuple[int, str], GpuProcess] = {}
    entries = list(_sections(text, "process_info"))
    for entry in entries:
        command, entry = _without(entry, "process_name")
        pid = _text(entry, "pid")
        if not re.fullmatch("[0-9]{1,10}", pid):
            return _unlisted(pid)
        kind = _KINDS.get(_text(entry, "type"), ProcessKind.COMPUTE)
        memory, name = _in_bytes(_text(entry, "used_memory")), _value(_plain(command or ""))
        rows.setdefault((int(pid), kind), GpuProcess(int(pid), kind, memory, name))
    said = text.strip()
    if not entries and said not in ("", "None"):
        return _unlisted(said)
    return ProcessList(tuple(rows.values()))


def _unlisted(said: str) -> ProcessList:
    said = procfs.printable(said[:_LONGEST_TEXT])
    return ProcessList(error=f"nvidia-smi does not list its processes: {said}", supported=not _NEVER.search(said))


def _memory(text: str) -> dict[str, Any]:
    """Return the memory, bytes or None, as fields of a Gpu."""
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
    """Return what an element holds as plain text; "" for none."""
    return _plain(_section(text, name))


def _plain(text: str) -> str:
    """Return the beginning of a text, printable and with XML's names of characters replaced."""
    found = text.strip()[:_LONGEST_TEXT]
    if "&" in found:
        from html import unescape

        found = unescape(found)
    return procfs.printable(found).strip()


_REPORT = ("-q", "-x")

_MOST_OUTPUT = 16 << 20

_LONGEST_COMPLAINT = 200

_UUID = re.compile(rf"GPU-[0-9A-Za-z/-]{{1,90}}|{BARE_UUID}")

_MOST_GPUS = 256

# "GPU0: 0000:17:00.0: Unknown Error"; other versions write the index or the bus id alone, or no "GPU".
_NO_HANDLE = re.compile(r"(?i)handle for +(?:GPU)? *(?:(\d{1,3})(?!\w*:\w\w:)[ :]*)?(\w{4,8}:\w\w:\w\w\.\w)?[ :]*(.*)")

_MODES = {
    "exclusive_process": ComputeMode.EXCLUSIVE_PROCESS,
    "exclusive_thread": ComputeMode.EXCLUSIVE_PROCESS,
    "prohibited": ComputeMode.PROHIBITED,
}

_SHIFTED = ", so an index may be that of another GPU: name GPUs by UUID"

_MIG_NEEDS_NVML = (
    "MIG mode is on, and its instances can be claimed through NVML only: pip install nvidia-ml-py, and leave "
    "SAFE_GPU_DRIVER=nvidia-smi out"
)

_GONE = "nvidia-smi no longer shows it"

_FORGED = "nvidia-smi shows more GPUs than it counts, or one twice: the name of a process may look like a GPU"


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

    def snapshot(self) -> HostSnapshot:
        """Poll every GPU of the host; see :class:`~safe_gpu.drivers.base.Driver`."""
        code, text = self._run(*_REPORT)
        found, doubt = read_all(text)
        gpus = tuple(self._gpus(found))
        if not gpus and "no devices" not in text.lower():
            said = _complaint(text) or f"exit status {code} and no output"
            raise NoDriverError(f"nvidia-smi does not work on this host: {said}", driver=self.name)
        version = _value(_text(text, "driver_version")) or ""
        return HostSnapshot(gpus, self.name, version[:_LONGEST_NAME], doubt=doubt and doubt + _SHIFTED)

    def usage(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """Ask again about these devices only, and about all where one of them does not answer like this."""
        if not gpus:
            return ()
        asked = ",".join(gpu.uuid for gpu in gpus)
        found, _ = read_all(self._run(*_REPORT, "-i", asked)[1])
        shown = {gpu.uuid: gpu for gpu in self._gpus(found)}
        if not all(gpu.uuid in shown for gpu in gpus):
            shown = {gpu.uuid: gpu for gpu in self.snapshot().gpus}
        return tuple(
            shown[gpu.uuid]._replace(index=gpu.index) if gpu.uuid in shown else _unreachable(gpu, _GONE) for gpu in gpus
        )

    def _gpus(self, reports: Sequence[GpuReport]) -> Iterator[Gpu]:
        """Yield the GPUs of a report."""
        seen: set[str] = set()
        for index, report in enumerate(reports):
            gpu = self._gpu(index, report)
            if gpu.uuid in seen:
                nobody = gpu._replace(uuid=f"unknown-{report.bus_id or index}")
                gpu = _unreachable(nobody, "another GPU has its UUID")
            yield gpu
            seen.add(gpu.uuid)

    def _gpu(self, index: int, report: GpuReport) -> Gpu:
        said, uuid, place = report.text, report.uuid, report.bus_id or str(index)
        name, mode, display = (_text(said, field) for field in ("product_name", "compute_mode", "display_active"))
        memory = _section(said, "fb_memory_usage")
        figures = (_text(memory, field) for field in ("total", "used", "free"))
        trouble = next((text for text in (uuid, name, mode, display, *figures) if _LOST.search(text)), report.trouble)
        known = self._known.get(place, (f"unknown-{place}", ""))
        if _UUID.fullmatch(uuid):
            known = self._known[place] = uuid, product_name(name)[:_LONGEST_NAME] or known[1]
        gpu = Gpu(index, *known, report.bus_id, pci.numa_node(report.bus_id))
        if trouble or not _UUID.fullmatch(uuid):
            return _unreachable(gpu, trouble or uuid or "it reports no UUID")
        listed = report.processes
        return gpu._replace(
            compute_mode=_MODES.get(mode.lower(), ComputeMode.DEFAULT),
            counts_reserved=_value(_text(memory, "reserved")) is None,
            memory_shared=is_wsl() or memory_is_node(report.bus_id),
            utilization=_number(_text(_section(said, "utilization"), "gpu_util")),
            temperature=_number(_text(_section(said, "temperature"), "gpu_temp")),
            display_active=display.lower() == "enabled",
            unusable=_MIG_NEEDS_NVML if report.mig else None,
            mig_enabled=report.mig,
            processes=None if listed.error else own_namespace_pids(listed.rows),
            process_error=listed.error,
            processes_supported=listed.supported,
            **_memory(memory),
        )

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


def _unreachable(gpu: Gpu, complaint: str) -> Gpu:
    said = procfs.printable(complaint.strip("[] .")[:_LONGEST_COMPLAINT])
    return gpu.unreachable(f"the driver cannot reach it ({said}): reset it, or reboot the host")


def _complaint(text: str) -> str:
    """Return the line of its output that says what is wrong: the last one, unless another speaks of a failure."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    line = next((line for line in lines if "fail" in line.lower()), lines[-1] if lines else "")
    return procfs.printable(line[:_LONGEST_COMPLAINT])
