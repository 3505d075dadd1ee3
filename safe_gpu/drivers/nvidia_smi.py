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
from ..host.foreign_files import printable
from ..host.programs import TooLate, TooMuch, find_program, output_of
from ..runtimes.cuda import CUDA
from .base import Driver, illness_of, in_bus_order, is_wsl, memory_is_node, numa_node, own_namespace_pids

_MOST_OUTPUT = 16 << 20

_MOST_GPUS = 256

_LONGEST_TEXT = 400

_LONGEST_COMPLAINT = 200

_LONGEST_NAME = 80

_GPU = re.compile(r'<gpu id="([^"]*)">')

_UUID = re.compile(rf"GPU-[0-9A-Za-z/-]{{1,90}}|{BARE_UUID}")

# "GPU0: 0000:17:00.0: Unknown Error"; other versions write the index or the bus id alone, or no "GPU".
_NO_HANDLE = re.compile(r"(?i)handle for +(?:GPU)? *(?:(\d{1,3})(?!\w*:\w\w:)[ :]*)?(\w{4,8}:\w\w:\w\w\.\w)?[ :]*(.*)")

_LOST = re.compile(r"\bis lost\b|requires reset", re.I)

_NEVER = re.compile(r"not supported|n/a", re.I)  # what is unsupported stays so; other trouble may pass

_NO_VALUES = ("", "n/a", "none", "err!", "not found", "not supported", "unknown error", "insufficient permissions")

_KINDS = {"G": ProcessKind.GRAPHICS, "M": ProcessKind.MPS, "M+C": ProcessKind.MPS}

_MODES = {
    "exclusive_process": ComputeMode.EXCLUSIVE_PROCESS,
    "exclusive_thread": ComputeMode.EXCLUSIVE_PROCESS,
    "prohibited": ComputeMode.PROHIBITED,
}

_SHIFTED = ", so an index may be that of another GPU: name GPUs by UUID"

_FORGED = "nvidia-smi shows more GPUs than it counts, or one twice: the name of a process may look like a GPU"

_MIG_NEEDS_NVML = (
    "MIG mode is on, and its instances can be claimed through NVML only: pip install nvidia-ml-py, and leave "
    "SAFE_GPU_DRIVER=nvidia-smi out"
)


class _Section(NamedTuple):
    """What nvidia-smi says of one GPU.

    Attributes:
        bus_id: "" where it has none, as on Jetson.
        text: all but its processes and MIG instances; "" if the driver cannot reach it, and then ``trouble`` says why.
        processes: the list of its processes; None if there is none.
    """

    bus_id: str
    text: str = ""
    processes: str | None = None
    trouble: str = ""


def _read_sections(report: str) -> tuple[list[_Section], str]:
    """Return the GPUs in nvidia-smi's order, those that it cannot reach too, and why the order may be wrong."""
    head, *pieces = _GPU.split(report)
    found = []
    for bus_id, text in zip(pieces[::2], pieces[1::2], strict=True):
        processes, rest = _without(text, "processes")
        _, rest = _without(rest, "mig_devices")
        found.append(_Section(normalize_bus_id(bus_id), rest, processes))
    attached, doubt = _number(_text(head, "attached_gpus")), ""
    names = Counter(name for one in found for name in (one.bus_id, _value(_text(one.text, "uuid"))) if name)
    if (attached is not None and len(found) > attached) or max(names.values(), default=0) > 1:
        doubt = _FORGED
    placed = {(one.bus_id, False, 0 if one.bus_id else at): one for at, one in enumerate(found)}
    for index, bus_id, said in _NO_HANDLE.findall("\n".join([head, *(one.text for one in found)])):
        bus_id = normalize_bus_id(bus_id)
        if bus_id or index:  # those that have only an index are put among the others last
            placed.setdefault((bus_id, not bus_id, 0 if bus_id else int(index)), _Section(bus_id, trouble=said))
    if placed and len(placed) < (attached or 0):
        doubt = doubt or f"nvidia-smi counts {attached} GPUs and shows {len(placed)}"
    order = [(bus_id, number, one) for (bus_id, _, number), one in sorted(placed.items())]
    return in_bus_order(order)[:_MOST_GPUS], doubt


def _read_processes(text: str | None) -> dict[str, Any]:
    """Return what a list of processes says, as fields of a Gpu."""
    if text is None:
        return {"processes": None, "process_error": "nvidia-smi does not list its processes"}
    rows: dict[tuple[int, str], GpuProcess] = {}
    said = "" if text.strip() == "None" else text.strip()
    for entry in _elements(text, "process_info"):
        command, entry = _without(entry, "process_name")
        said = _text(entry, "pid")
        if not re.fullmatch("[0-9]{1,10}", said):
            break
        kind = _KINDS.get(_text(entry, "type"), ProcessKind.COMPUTE)
        memory, name = _in_bytes(_text(entry, "used_memory")), _value(_plain(command or ""))
        rows.setdefault((int(said), kind), GpuProcess(int(said), kind, memory, name))
        said = ""
    if said:
        said = printable(said[:_LONGEST_TEXT])
        what = f"nvidia-smi does not list its processes: {said}"
        return {"processes": None, "process_error": what, "processes_supported": not _NEVER.search(said)}
    return {"processes": own_namespace_pids(rows.values()), "process_error": ""}


def _read_illness(said: str) -> str:
    """Return what the section of a GPU says against it; see :func:`illness_of`."""
    action = _value(_text(said, "gpu_recovery_action")) or ""
    rows = _element(said, "remapped_rows")
    return illness_of(
        recovery_action=action[:_LONGEST_NAME],
        remapping_failed=_text(rows, "remapped_row_failure").lower() == "yes",
        remapping_pending=_text(rows, "remapped_row_pending").lower() == "yes",
    )


def _without(text: str, name: str) -> tuple[str | None, str]:
    """Return what an element holds, up to the last end of such a one, since the name of a process may have more of
    them; and the text without it."""
    before, began, rest = text.partition(f"<{name}>")
    inside, ended, after = rest.rpartition(f"</{name}>")
    return (inside, before + after) if began and ended else (None, text)


def _elements(text: str, name: str) -> Iterator[str]:
    """Yield what stands in each element of this name. It takes one pass, also where elements are opened and never
    closed."""
    begin, end = f"<{name}>", f"</{name}>"
    start = text.find(begin)
    while start >= 0 and (stop := text.find(end, start + len(begin))) >= 0:
        yield text[start + len(begin) : stop]
        start = text.find(begin, stop)


def _element(text: str, name: str) -> str:
    return next(_elements(text, name), "")


def _text(text: str, name: str) -> str:
    """Return what an element holds as plain text; "" for none."""
    return _plain(_element(text, name))


def _plain(text: str) -> str:
    """Return the beginning of a text, printable and with XML's names of characters replaced."""
    found = text.strip()[:_LONGEST_TEXT]
    if "&" in found:
        from html import unescape

        found = unescape(found)
    return printable(found).strip()


def _value(text: str) -> str | None:
    """Return the text; None for ``[N/A]``, ``Not Supported``, ``ERR!`` and the like."""
    return None if text.startswith("[") or text.lower() in _NO_VALUES else text


def _number(text: str) -> int | None:
    """Return the digits that it begins with; None where they are more than any figure of a driver has."""
    found = re.match(r"[0-9]{1,18}(?![0-9])", text)
    return int(found[0]) if found else None


def _first_number(text: str, *names: str) -> int | None:
    """Return the number in the first element that has one. Drivers of different age call it by different names."""
    numbers = (_number(_text(text, name)) for name in names)
    return next((number for number in numbers if number is not None), None)


def _in_bytes(text: str) -> int | None:
    """Return a number of MiB, with or without the unit, in bytes."""
    found = _number(text)
    return None if found is None else found << 20


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
            raise self._failure("nvidia-smi is not on PATH: install the NVIDIA driver, or put its directory on PATH.")
        self._path = path
        self._timeout = timeout
        self._known: dict[str, tuple[str, str]] = {}  # UUID and name by bus id, for a GPU that no longer tells

    def snapshot(self) -> HostSnapshot:
        """Poll every GPU of the host; see :class:`~safe_gpu.drivers.base.Driver`."""
        code, text = self._run()
        gpus, doubt = self._read(text)
        if not gpus and "no devices" not in text.lower():
            said = _complaint(text) or f"exit status {code} and no output"
            raise self._failure(f"nvidia-smi does not work on this host: {said}")
        version = _value(_text(text, "driver_version")) or ""
        return HostSnapshot(gpus, self.name, version[:_LONGEST_NAME], doubt=doubt and doubt + _SHIFTED)

    def usage(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """Ask again about these devices only, and about all where one of them does not answer like this."""
        if not gpus:
            return ()
        _, text = self._run("-i", ",".join(gpu.uuid for gpu in gpus))
        shown = {gpu.uuid: gpu for gpu in self._read(text)[0]}
        if not all(gpu.uuid in shown for gpu in gpus):
            shown = {gpu.uuid: gpu for gpu in self.snapshot().gpus}
        gone = "nvidia-smi no longer shows it"
        return tuple(
            shown[gpu.uuid]._replace(index=gpu.index) if gpu.uuid in shown else _unreachable(gpu, gone) for gpu in gpus
        )

    def _read(self, report: str) -> tuple[tuple[Gpu, ...], str]:
        """Return the GPUs of a report, and why their order may be wrong."""
        sections, doubt = _read_sections(report)
        found: dict[str, Gpu] = {}
        for index, section in enumerate(sections):
            gpu = self._gpu(index, section)
            if doubt == _FORGED and not gpu.lost:
                gpu = gpu._replace(processes=None, process_error=doubt)
            if gpu.uuid in found:
                nobody = gpu._replace(uuid=f"unknown-{section.bus_id or index}")
                gpu = _unreachable(nobody, "another GPU has its UUID")
            found[gpu.uuid] = gpu
        return tuple(found.values()), doubt

    def _gpu(self, index: int, section: _Section) -> Gpu:
        said, place = section.text, section.bus_id or str(index)
        fields = ("uuid", "product_name", "compute_mode", "display_active")
        uuid, name, mode, display = (_text(said, field) for field in fields)
        memory = _element(said, "fb_memory_usage")
        figures = {f"memory_{field}": _text(memory, field) for field in ("total", "used", "free")}
        trouble = next((text for text in (uuid, name, mode, display, *figures.values()) if _LOST.search(text)), "")
        sizes: dict[str, Any] = {field: _in_bytes(text) for field, text in figures.items()}
        known = self._known.get(place, (f"unknown-{place}", ""))
        if _UUID.fullmatch(uuid):
            known = self._known[place] = uuid, product_name(name)[:_LONGEST_NAME] or known[1]
        gpu = Gpu(index, *known, section.bus_id, numa_node(section.bus_id))
        if trouble or not _UUID.fullmatch(uuid):
            return _unreachable(gpu, trouble or section.trouble or uuid or "it reports no UUID")
        mig = _text(_element(said, "mig_mode"), "current_mig").lower() == "enabled"
        return gpu._replace(
            compute_mode=_MODES.get(mode.lower(), ComputeMode.DEFAULT),
            counts_reserved=_value(_text(memory, "reserved")) is None,
            memory_shared=is_wsl() or memory_is_node(section.bus_id),
            utilization=_number(_text(_element(said, "utilization"), "gpu_util")),
            temperature=_number(_text(_element(said, "temperature"), "gpu_temp")),
            fan=_number(_text(said, "fan_speed")),
            power=_first_number(said, "power_draw", "average_power_draw"),
            power_limit=_first_number(said, "current_power_limit", "enforced_power_limit"),
            display_active=display.lower() == "enabled",
            unusable=_MIG_NEEDS_NVML if mig else None,
            mig_enabled=mig,
            illness=_read_illness(said),
            **sizes,
            **_read_processes(section.processes),
        )

    def _run(self, *arguments: str) -> tuple[int, str]:
        """Exit status and output of one run, complaints included.

        Raises:
            NoDriverError: it cannot be started, or does not end in time.
        """
        command, env = [self._path, "-q", "-x", *arguments], {**os.environ, "LC_ALL": "C"}
        Driver.latest_call = "nvidia-smi -q -x"
        try:
            return output_of(command, env=env, timeout=self._timeout, most=_MOST_OUTPUT)[:2]
        except OSError as err:
            problem = f"{self._path} cannot be started: {err.strerror}."
        except TooMuch:
            problem = (
                f"{self._path} prints more than {_MOST_OUTPUT >> 20} MiB: look at what `nvidia-smi -q -x` shows, and "
                "whether that is NVIDIA's program."
            )
        except TooLate:
            problem = (
                f"nvidia-smi did not answer within {self._timeout:g} s, so the NVIDIA driver hangs: look for NVRM or "
                "Xid in dmesg; usually the host needs a reboot."
            )
        raise self._failure(problem)

    def _failure(self, text: str) -> NoDriverError:
        return NoDriverError(text, driver=self.name)


def _unreachable(gpu: Gpu, complaint: str) -> Gpu:
    said = printable(complaint.strip("[] .")[:_LONGEST_COMPLAINT])
    return gpu.unreachable(f"the driver cannot reach it ({said}): reset it, or reboot the host")


def _complaint(text: str) -> str:
    """Return the line of its output that says what is wrong: the last one, unless another speaks of a failure."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    line = next((line for line in lines if "fail" in line.lower()), lines[-1] if lines else "")
    return printable(line[:_LONGEST_COMPLAINT])
