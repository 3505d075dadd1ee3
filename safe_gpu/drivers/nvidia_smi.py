"""The NVIDIA driver through the nvidia-smi program, for hosts without NVML's Python module or library.

Its output is taken with a pinch of salt: warnings stand before and after the rows, a value may be ``[N/A]``, ``[Not
Supported]``, ``[Unknown Error]`` or ``ERR!``, old versions do not know every field, and on a host in trouble it hangs.
Of MIG instances it tells no more than their UUIDs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..devices import ComputeMode, Gpu, GpuProcess, HostSnapshot, normalize_bus_id
from ..errors import NoDriverError
from . import pci

if TYPE_CHECKING:
    import subprocess

__all__ = ["NvidiaSmiDriver", "find_nvidia_smi"]

# The name comes last, since it alone may contain the separator.
_FIELDS = (
    "uuid",
    "pci.bus_id",
    "memory.total",
    "memory.used",
    "memory.free",
    "utilization.gpu",
    "compute_mode",
    "display_active",
    "mig.mode.current",
    "driver_version",
    "name",
)
_BASIC_FIELDS = ("uuid", "pci.bus_id", "memory.total", "memory.used", "memory.free", "name")
_APP_FIELDS = ("gpu_uuid", "pid", "used_memory", "process_name")

_CSV = "--format=csv,noheader,nounits"

_MIB = 1 << 20
_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]+")
_BAD_FIELD = re.compile(r'"([\w.]+)" is not a valid field', re.IGNORECASE)
_NO_HANDLE = re.compile(r"device handle for GPU\s*([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])\s*:?\s*(.*)", re.I)
_LOST = re.compile(r"\bis lost\b|requires reset", re.I)
_NEVER = re.compile(r"not supported|n/a", re.I)  # what is unsupported stays so; other trouble may pass
_LISTED_GPU = re.compile(r"GPU\s+\d+:.*\(UUID:\s*(GPU-[^)\s]+)\s*\)")
_LISTED_INSTANCE = re.compile(r"\s+MIG\s+(\S+)\s+Device\s+(\d+):.*\(UUID:\s*(MIG-[^)\s]+)\s*\)")

_MODES = {
    "exclusive_process": ComputeMode.EXCLUSIVE_PROCESS,
    "exclusive_thread": ComputeMode.EXCLUSIVE_PROCESS,
    "prohibited": ComputeMode.PROHIBITED,
}
_MIG_IS_ON = "MIG mode is on: claim one of its instances"
_MIG_PROCESSES = "nvidia-smi does not tell which MIG instance a process is on: install nvidia-ml-py to ask NVML"


def find_nvidia_smi() -> str | None:
    """Path of nvidia-smi by PATH, or None."""
    from shutil import which

    return which("nvidia-smi")


class NvidiaSmiDriver:
    """nvidia-smi as a driver.

    Args:
        timeout: seconds that one run of nvidia-smi may take; without persistence mode it wakes every card up first.

    Raises:
        NoDriverError: it is not on PATH.
    """

    name = "nvidia-smi"
    uses_cuda = True

    def __init__(self, timeout: float = 30.0) -> None:
        path = find_nvidia_smi()
        if path is None:
            raise NoDriverError(
                "nvidia-smi is not on PATH: install the NVIDIA driver, or put its directory on PATH.", driver=self.name
            )
        self._path = path
        self._timeout = timeout
        self._fields: tuple[str, ...] = _FIELDS
        self._known: dict[str, tuple[str, str]] = {}  # UUID and name by bus id, for a GPU that no longer tells

    def snapshot(self) -> HostSnapshot:
        """Poll every GPU of the host; see :class:`~safe_gpu.drivers.base.Driver`."""
        rows = self._query_gpus()
        rows.sort(key=lambda row: pci.bus_order(row["pci.bus_id"]) or ())
        gpus = [self._gpu(index, row) for index, row in enumerate(rows)]
        version = next((row["driver_version"] for row in rows if _value(row.get("driver_version", ""))), "")
        if any(not gpu.lost for gpu in gpus):
            gpus = list(self._with_processes(gpus))
        return HostSnapshot(tuple(gpus), self.name, version)

    def cpu_affinity(self, uuid: str, scope: str) -> frozenset[int] | None:
        """None: nvidia-smi tells it in tables for people only."""
        return None

    def host_topology(self) -> None:
        """None: the CPUs are those of sysfs."""
        return

    def default_placeholder(self, logger: Any = None) -> Any:
        """A minimal allocation through the CUDA driver."""
        from ..placeholders import CudaPlaceholder

        return CudaPlaceholder(logger)

    def close(self) -> None:
        """Nothing is kept open."""

    def _query_gpus(self) -> list[dict[str, str]]:
        """One row a GPU, by field; a GPU of which nvidia-smi only complains has the complaint as its ``uuid``."""
        while True:
            code, text = self._run(f"--query-gpu={','.join(self._fields)}", _CSV)
            rows = [row for row in _rows(text, self._fields) if pci.bus_order(row["pci.bus_id"])]
            listed = {normalize_bus_id(row["pci.bus_id"]) for row in rows}
            rows += [
                {"pci.bus_id": bus_id, "uuid": complaint}
                for bus_id, complaint in _NO_HANDLE.findall(text)
                if normalize_bus_id(bus_id) not in listed
            ]
            if rows or "no devices" in text.lower():
                return rows
            unknown = set(_BAD_FIELD.findall(text)) - {"uuid", "pci.bus_id"}
            fewer = tuple(field for field in self._fields if field not in unknown) if unknown else _BASIC_FIELDS
            if "field" not in text.lower() or fewer == self._fields:
                said = _complaint(text) or f"exit status {code} and no output"
                raise NoDriverError(f"nvidia-smi does not work on this host: {said}", driver=self.name)
            self._fields = fewer

    def _gpu(self, index: int, row: dict[str, str]) -> Gpu:
        bus_id = normalize_bus_id(row["pci.bus_id"])
        lost = next((value for value in row.values() if _LOST.search(value)), None)
        if _UUID.fullmatch(row["uuid"]):
            self._known[bus_id] = row["uuid"], row.get("name", "")
        elif lost is None:
            lost = row["uuid"]
        uuid, name = self._known.get(bus_id, (f"unknown-{bus_id}", ""))
        if lost is not None:
            trouble = f"the driver cannot reach it ({lost.strip('[] .')}): reset it, or reboot the host"
            return Gpu(
                index,
                uuid,
                name,
                bus_id,
                pci.numa_node(bus_id),
                processes=None,
                process_error=trouble,
                unusable=trouble,
                lost=True,
            )
        mig = row.get("mig.mode.current", "").lower() == "enabled"
        return Gpu(
            index,
            uuid,
            name,
            bus_id,
            pci.numa_node(bus_id),
            memory_total=_bytes(row.get("memory.total", "")),
            memory_used=_bytes(row.get("memory.used", "")),
            memory_free=_bytes(row.get("memory.free", "")),
            utilization=_number(row.get("utilization.gpu", "")),
            compute_mode=_MODES.get(row.get("compute_mode", "").lower(), ComputeMode.DEFAULT),
            display_active=row.get("display_active", "").lower() == "enabled",
            unusable=_MIG_IS_ON if mig else None,
            mig_enabled=mig,
        )

    def _with_processes(self, gpus: Sequence[Gpu]) -> Iterator[Gpu]:
        """The GPUs with their processes, each with its MIG instances behind it."""
        instances = self._instances() if any(gpu.mig_enabled for gpu in gpus) else {}
        processes, failures, failure = self._query_processes()
        for gpu in gpus:
            if gpu.lost:
                yield gpu
                continue
            error, supported = (failure, True) if failure else failures.get(gpu.uuid, ("", True))
            yield replace(
                gpu,
                processes=None if error else tuple(processes.get(gpu.uuid, ())),
                process_error=error,
                processes_supported=supported,
            )
            for number, profile, uuid in instances.get(gpu.uuid, ()):
                # A row that names an instance is believed; an idle one cannot be told from one that is not spoken of.
                known = None if failure else processes.get(uuid)
                yield Gpu(
                    gpu.index,
                    uuid,
                    f"{gpu.name} MIG {profile}",
                    gpu.pci_bus_id,
                    gpu.numa_node,
                    compute_mode=gpu.compute_mode,
                    processes=None if known is None else tuple(known),
                    process_error="" if known is not None else failure or _MIG_PROCESSES,
                    processes_supported=known is not None or bool(failure),
                    mig_parent=gpu.uuid,
                    mig_instance=number,
                )

    def _query_processes(self) -> tuple[dict[str, list[GpuProcess]], dict[str, tuple[str, bool]], str]:
        """Processes by UUID; by UUID why they cannot be listed, and whether that may change; why none can, or ""."""
        try:
            code, text = self._run(f"--query-compute-apps={','.join(_APP_FIELDS)}", _CSV)
        except NoDriverError as err:
            return {}, {}, str(err)
        if code:
            return {}, {}, f"nvidia-smi does not list processes: {_complaint(text) or f'exit status {code}'}"
        processes: dict[str, list[GpuProcess]] = {}
        failures: dict[str, tuple[str, bool]] = {}
        for row in _rows(text, _APP_FIELDS):
            uuid, pid = row["gpu_uuid"], row["pid"]
            if not pid.isdecimal():
                failures[uuid] = f"nvidia-smi does not list its processes: {pid}", not _NEVER.search(pid)
            elif not _UUID.fullmatch(uuid):
                return {}, {}, f"nvidia-smi does not tell which GPU process {pid} is on: {uuid}"
            else:
                listed = processes.setdefault(uuid, [])
                if all(other.pid != int(pid) for other in listed):
                    memory = _bytes(row["used_memory"])
                    listed.append(GpuProcess(int(pid), memory_used=memory, name=_value(row["process_name"])))
        return processes, failures, ""

    def _instances(self) -> dict[str, list[tuple[int, str, str]]]:
        """MIG instances as (number, profile, UUID), by their GPU's UUID."""
        found: dict[str, list[tuple[int, str, str]]] = {}
        parent = ""
        for line in self._run("-L")[1].splitlines():
            if gpu := _LISTED_GPU.match(line):
                parent = gpu[1]
            elif instance := _LISTED_INSTANCE.match(line):
                found.setdefault(parent, []).append((int(instance[2]), instance[1], instance[3]))
        return found

    def _run(self, *arguments: str) -> tuple[int, str]:
        """Exit status and output of one run, complaints included.

        Raises:
            NoDriverError: it cannot be started, or does not end in time.
        """
        import subprocess

        try:
            process = subprocess.Popen(
                [self._path, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LC_ALL": "C"},
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
        except OSError as err:
            raise NoDriverError(f"{self._path} cannot be started: {err.strerror}.", driver=self.name) from err
        try:
            text, _ = process.communicate(timeout=self._timeout)
        except BaseException as err:
            _abandon(process)
            if not isinstance(err, subprocess.TimeoutExpired):
                raise
            raise NoDriverError(
                f"nvidia-smi did not answer within {self._timeout:g} s, so the NVIDIA driver hangs: look for NVRM or "
                "Xid in dmesg; usually the host needs a reboot.",
                driver=self.name,
            ) from err
        return process.returncode, text


def _abandon(process: subprocess.Popen[str]) -> None:
    """Kill it with its children; a driver that hangs may keep it unkillable, so it is not waited for long."""
    import signal
    import subprocess

    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if process.stdout is not None:
        process.stdout.close()
    try:
        process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        pass


def _rows(text: str, fields: Sequence[str]) -> Iterator[dict[str, str]]:
    """Lines that have all the fields; the last one may hold commas."""
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",", len(fields) - 1)]
        if len(values) == len(fields):
            yield dict(zip(fields, values, strict=True))


def _value(text: str) -> str | None:
    """None for ``[N/A]``, ``[Not Supported]``, ``N/A``, ``ERR!`` and the like."""
    return None if text.startswith("[") or text in ("", "N/A", "ERR!") else text


def _number(text: str) -> int | None:
    found = re.match(r"\d+", text)
    return int(found[0]) if found else None


def _bytes(text: str) -> int | None:
    """From MiB, with or without the unit."""
    number = _number(text)
    return None if number is None else number * _MIB


def _complaint(text: str) -> str:
    """The line of its output that says what is wrong: the last one, unless another speaks of a failure."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "fail" in line.lower()), lines[-1] if lines else "")
