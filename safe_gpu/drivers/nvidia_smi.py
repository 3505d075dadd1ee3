"""The NVIDIA driver through the nvidia-smi program.

The report is read element by element, not as XML: some versions close elements of the clocks' section in the wrong
order, warnings stand before, after and sometimes inside it, and names of processes are not escaped. A value may be
``N/A``, ``Not Supported``, ``Unknown Error`` or ``ERR!``, with or without brackets, and old versions do not have every
element.

Any user chooses the name of a process, so a name may look like the section of a GPU. It can add sections but hide none,
as it could with a comment or CDATA if this were read as XML. So the sections are counted: where they are more than
``attached_gpus``, or two have a bus id or a UUID in common, the processes on all GPUs are unknown, so these are busy.

One run of ``nvidia-smi -q -x`` answers a poll. On a host in trouble it prints complaints besides, or hangs. MIG
instances are not read: it does not report their UUIDs there.
"""

import os
import re
from collections.abc import Iterator, Sequence
from html import unescape
from typing import NamedTuple

from ..errors import NoDriverError
from ..gpus.devices import ComputeMode, Gpu, GpuProcess, HostSnapshot, ProcessKind, normalize_bus_id
from ..gpus.vendors import BARE_UUID, product_name
from ..host.foreign_files import printable
from ..host.programs import TooLate, TooMuch, find_program, output_of
from ..runtimes.cuda import CUDA
from .base import (
    Driver,
    Placed,
    ProcessList,
    illness_of,
    in_bus_order,
    is_wsl,
    memory_is_node,
    numa_node,
    own_namespace_pids,
)

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


class _Report(NamedTuple):
    """What one run of nvidia-smi says of the host.

    Attributes:
        sections: the GPUs in nvidia-smi's order, those that it cannot reach too.
        doubt: why the order may be wrong, a clause; "" for nothing.
    """

    sections: list[_Section]
    doubt: str


def _read_report(text: str) -> _Report:
    head, *pieces = _GPU.split(text)
    shown = []
    for bus_id, section in zip(pieces[::2], pieces[1::2], strict=True):
        processes, rest = _without(section, "processes")
        _, rest = _without(rest, "mig_devices")
        shown.append(_Section(normalize_bus_id(bus_id), rest, processes))
    attached = _number(_text(head, "attached_gpus"))
    placed = _placed(shown, "\n".join([head, *(section.text for section in shown)]))
    doubt = ""
    if _has_one_twice(shown) or (attached is not None and len(shown) > attached):
        doubt = _FORGED
    elif attached is not None and 0 < len(placed) < attached:
        doubt = f"nvidia-smi counts {attached} GPUs and shows {len(placed)}"
    return _Report(in_bus_order(placed)[:_MOST_GPUS], doubt)


def _has_one_twice(sections: Sequence[_Section]) -> bool:
    """Return whether two of them have a bus id or a UUID in common."""
    names = set()
    for section in sections:
        for name in (section.bus_id, _value(_text(section.text, "uuid"))):
            if not name:
                continue
            if name in names:
                return True
            names.add(name)
    return False


class _Place(NamedTuple):
    """By what two texts are of one GPU: its bus id, or its index if it has none.

    Sections come before complaints that give only an index.
    """

    bus_id: str
    by_complaint: bool = False
    number: int = 0


def _placed(shown: Sequence[_Section], complaints: str) -> list[Placed[_Section]]:
    """Return these sections, and one for each other GPU that nvidia-smi complains about."""
    found: dict[_Place, _Section] = {}
    for number, section in enumerate(shown):
        place = _Place(section.bus_id)
        if not section.bus_id:
            place = _Place("", number=number)
        found[place] = section
    for index, bus_id, trouble in _NO_HANDLE.findall(complaints):
        bus_id = normalize_bus_id(bus_id)
        if bus_id:
            found.setdefault(_Place(bus_id), _Section(bus_id, trouble=trouble))
        elif index:
            found.setdefault(_Place("", by_complaint=True, number=int(index)), _Section("", trouble=trouble))
    return [Placed(place.bus_id, place.number, section) for place, section in sorted(found.items())]


def _read_processes(text: str | None) -> ProcessList:
    if text is None:
        return ProcessList(None, "nvidia-smi does not list its processes")
    entries = list(_elements(text, "process_info"))
    if not entries and text.strip() not in ("", "None"):
        return _not_listed(text.strip())
    rows: dict[tuple[int, str], GpuProcess] = {}
    for entry in entries:
        name, entry = _without(entry, "process_name")
        pid = _text(entry, "pid")
        if not pid:  # those behind it may be hidden too
            return _not_listed("one of them has no number")
        if not re.fullmatch("[0-9]{1,10}", pid):
            return _not_listed(pid)
        process = GpuProcess(
            pid=int(pid),
            kind=_KINDS.get(_text(entry, "type"), ProcessKind.COMPUTE),
            memory_used=_in_bytes(_text(entry, "used_memory")),
            name=_value(_plain(name or "")),
        )
        rows.setdefault((process.pid, process.kind), process)
    return ProcessList(own_namespace_pids(rows.values()))


def _not_listed(complaint: str) -> ProcessList:
    """Return a list that nvidia-smi does not show, with what it says instead."""
    complaint = printable(complaint[:_LONGEST_TEXT])
    supported = _NEVER.search(complaint) is None
    return ProcessList(None, f"nvidia-smi does not list its processes: {complaint}", supported)


def _read_illness(section: str) -> str:
    """Return what the section of a GPU says against it; see :func:`illness_of`."""
    action = _value(_text(section, "gpu_recovery_action")) or ""
    rows = _element(section, "remapped_rows")
    return illness_of(
        recovery_action=action[:_LONGEST_NAME],
        remapping_failed=_text(rows, "remapped_row_failure").lower() == "yes",
        remapping_pending=_text(rows, "remapped_row_pending").lower() == "yes",
    )


def _without(text: str, name: str) -> tuple[str | None, str]:
    """Return what an element holds, up to the last end of such a one, since the name of a process may have more of
    them; and the text without it."""
    before, begin, rest = text.partition(f"<{name}>")
    inside, end, after = rest.rpartition(f"</{name}>")
    if begin and end:
        return inside, before + after
    return None, text


def _elements(text: str, name: str) -> Iterator[str]:
    """Yield what stands in each element of this name. It takes one pass, also where elements are opened and never
    closed."""
    begin = f"<{name}>"
    end = f"</{name}>"
    stop = 0
    while True:
        start = text.find(begin, stop)
        if start < 0:
            return
        start += len(begin)
        stop = text.find(end, start)
        if stop < 0:
            return
        yield text[start:stop]


def _element(text: str, name: str) -> str:
    """Return what stands in the first element of this name; "" for none."""
    for inside in _elements(text, name):
        return inside
    return ""


def _text(text: str, name: str) -> str:
    """Return what an element holds as plain text; "" for none."""
    return _plain(_element(text, name))


def _plain(text: str) -> str:
    """Return the beginning of a text, printable and with XML's names of characters replaced."""
    beginning = text.strip()[:_LONGEST_TEXT]
    return printable(unescape(beginning)).strip()


def _value(text: str) -> str | None:
    """Return the text; None for ``[N/A]``, ``Not Supported``, ``ERR!`` and the like."""
    if text.startswith("[") or text.lower() in _NO_VALUES:
        return None
    return text


def _number(text: str) -> int | None:
    """Return the digits that it begins with; None where they are more than any figure of a driver has."""
    found = re.match(r"[0-9]{1,18}(?![0-9])", text)
    if found is None:
        return None
    return int(found[0])


def _first_number(text: str, *names: str) -> int | None:
    """Return the number in the first element that has one. Drivers of different age call it by different names."""
    for name in names:
        number = _number(_text(text, name))
        if number is not None:
            return number
    return None


def _in_bytes(text: str) -> int | None:
    """Return a number of MiB, with or without the unit, in bytes."""
    mib = _number(text)
    if mib is None:
        return None
    return mib << 20


def find_nvidia_smi() -> str | None:
    """Return the path of nvidia-smi by PATH, or None.

    Raises:
        NoDriverError: this is root, and other users can change it.
    """
    try:
        return find_program("nvidia-smi", os.environ)
    except PermissionError as err:
        raise NoDriverError(f"{err}.", driver="nvidia-smi") from None


class _Identity(NamedTuple):
    """What a GPU is called."""

    uuid: str
    name: str


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
            raise self._failure("nvidia-smi is not on PATH: install the NVIDIA driver, or put its directory on PATH")
        self._path = path
        self._timeout = timeout
        self._known: dict[str, _Identity] = {}  # by bus id, for a GPU that no longer answers

    def snapshot(self) -> HostSnapshot:
        """Poll every GPU of the host; see :class:`~safe_gpu.drivers.base.Driver`."""
        code, text = self._run()
        report = _read_report(text)
        gpus = self._gpus(report)
        if not gpus and "no devices" not in text.lower():
            complaint = _complaint(text) or f"exit status {code} and no output"
            if "Unknown Error" in complaint:
                complaint += ": restart the container, if this one has lost its access to /dev/nvidia0, or see dmesg"
            raise self._failure(f"nvidia-smi does not work on this host: {complaint}")
        version = _value(_text(text, "driver_version")) or ""
        doubt = ""
        if report.doubt:
            doubt = report.doubt + _SHIFTED
        return HostSnapshot(gpus, self.name, version[:_LONGEST_NAME], doubt=doubt)

    def usage(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """Ask again about these devices only, and about all where one of them does not answer like this."""
        if not gpus:
            return ()
        _, text = self._run("-i", ",".join(gpu.uuid for gpu in gpus))
        shown = {gpu.uuid: gpu for gpu in self._gpus(_read_report(text))}
        if any(gpu.uuid not in shown for gpu in gpus):
            shown = {gpu.uuid: gpu for gpu in self.snapshot().gpus}
        found = []
        for gpu in gpus:
            if gpu.uuid in shown:
                found.append(shown[gpu.uuid]._replace(index=gpu.index))
            else:
                found.append(_unreachable(gpu, "no longer shown by nvidia-smi"))
        return tuple(found)

    def _gpus(self, report: _Report) -> tuple[Gpu, ...]:
        """Return the GPUs of a report."""
        found: dict[str, Gpu] = {}
        for index, section in enumerate(report.sections):
            gpu = self._gpu(index, section)
            if report.doubt == _FORGED and not gpu.lost:
                gpu = gpu._replace(processes=None, process_error=_FORGED)
            if gpu.uuid in found:
                nobody = gpu._replace(uuid=f"unknown-{section.bus_id or index}")
                gpu = _unreachable(nobody, "another GPU has its UUID")
            found[gpu.uuid] = gpu
        return tuple(found.values())

    def _gpu(self, index: int, section: _Section) -> Gpu:
        facts = _Facts.read(section.text)
        identity = self._identity(facts, section.bus_id or str(index))
        gpu = Gpu(index, identity.uuid, identity.name, section.bus_id, numa_node(section.bus_id))
        trouble = facts.trouble()
        if not trouble and not facts.has_uuid():
            trouble = section.trouble or facts.uuid or "it reports no UUID"
        if trouble:
            return _unreachable(gpu, trouble)
        return _read_processes(section.processes).put_on(_described(gpu, section.text, facts))

    def _identity(self, facts: "_Facts", place: str) -> _Identity:
        """Return what the GPU at a place is called, as far as it says or has said so."""
        known = self._known.get(place, _Identity(f"unknown-{place}", ""))
        if facts.has_uuid():
            name = product_name(facts.name)[:_LONGEST_NAME] or known.name
            known = _Identity(facts.uuid, name)
            self._known[place] = known
        return known

    def _run(self, *arguments: str) -> tuple[int, str]:
        """Exit status and output of one run, complaints included.

        Raises:
            NoDriverError: it cannot be started, or does not end in time.
        """
        command = [self._path, "-q", "-x", *arguments]
        env = {**os.environ, "LC_ALL": "C"}
        Driver.latest_call = "nvidia-smi -q -x"
        try:
            output = output_of(command, env=env, timeout=self._timeout, most=_MOST_OUTPUT)
            return output.status, output.text
        except OSError as err:
            problem = f"{self._path} cannot be started: {err.strerror}"
        except TooMuch:
            problem = (
                f"{self._path} prints more than {_MOST_OUTPUT >> 20} MiB: look at what `nvidia-smi -q -x` shows, and "
                "whether that is NVIDIA's program"
            )
        except TooLate:
            problem = (
                f"nvidia-smi did not answer within {self._timeout:g} s, so the NVIDIA driver hangs: look for NVRM or "
                "Xid in dmesg; usually the host needs a reboot"
            )
        raise self._failure(problem)

    def _failure(self, text: str) -> NoDriverError:
        return NoDriverError(text, driver=self.name)


class _Facts(NamedTuple):
    """Texts of the section of a GPU that may say in place of a value that it is lost."""

    uuid: str
    name: str
    compute_mode: str
    display_active: str
    memory_total: str
    memory_used: str
    memory_free: str

    @classmethod
    def read(cls, text: str) -> "_Facts":
        """Return those of the text of a section."""
        memory = _element(text, "fb_memory_usage")
        return cls(
            uuid=_text(text, "uuid"),
            name=_text(text, "product_name"),
            compute_mode=_text(text, "compute_mode"),
            display_active=_text(text, "display_active"),
            memory_total=_text(memory, "total"),
            memory_used=_text(memory, "used"),
            memory_free=_text(memory, "free"),
        )

    def has_uuid(self) -> bool:
        """Return whether the GPU tells its UUID."""
        return _UUID.fullmatch(self.uuid) is not None

    def trouble(self) -> str:
        """Return the first text which says that the GPU is lost; "" for none."""
        for text in self:
            if _LOST.search(text):
                return str(text)
        return ""


def _described(gpu: Gpu, text: str, facts: _Facts) -> Gpu:
    """Return a GPU with all that the text of its section says."""
    memory = _element(text, "fb_memory_usage")
    mig_enabled = _text(_element(text, "mig_mode"), "current_mig").lower() == "enabled"
    unusable = None
    if mig_enabled:
        unusable = _MIG_NEEDS_NVML
    return gpu._replace(
        memory_total=_in_bytes(facts.memory_total),
        memory_used=_in_bytes(facts.memory_used),
        memory_free=_in_bytes(facts.memory_free),
        counts_reserved=_value(_text(memory, "reserved")) is None,
        memory_shared=is_wsl() or memory_is_node(gpu.pci_bus_id),
        utilization=_number(_text(_element(text, "utilization"), "gpu_util")),
        temperature=_number(_text(_element(text, "temperature"), "gpu_temp")),
        fan=_number(_text(text, "fan_speed")),
        power=_first_number(text, "power_draw", "average_power_draw"),
        power_limit=_first_number(text, "current_power_limit", "enforced_power_limit"),
        compute_mode=_MODES.get(facts.compute_mode.lower(), ComputeMode.DEFAULT),
        display_active=facts.display_active.lower() == "enabled",
        unusable=unusable,
        mig_enabled=mig_enabled,
        illness=_read_illness(text),
    )


def _unreachable(gpu: Gpu, complaint: str) -> Gpu:
    what = printable(complaint.strip("[] .")[:_LONGEST_COMPLAINT])
    return gpu.unreachable(f"out of reach of the driver ({what}): reset the GPU, or reboot the host")


def _complaint(text: str) -> str:
    """Return the line of its output that says what is wrong: the last one, unless another speaks of a failure."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    complaint = ""
    if lines:
        complaint = lines[-1]
    for line in lines:
        if "fail" in line.lower():
            complaint = line
            break
    return printable(complaint[:_LONGEST_COMPLAINT])
