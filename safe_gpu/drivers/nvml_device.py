"""What NVML says of one GPU or MIG instance."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from .base import illness_of
from .nvml_calls import NvmlCalls

_MOST_INSTANCES = 64  # of a GPU; there are 7 today

_SCOPES = {"node": 0, "socket": 1}  # NVML_AFFINITY_SCOPE_*

_MASK_WORDS = 64  # of 64 bits: room for 4096 CPUs

_BITS_OF_WORD = 64

_TEMPERATURE_GPU = 0  # NVML_TEMPERATURE_GPU

_ENABLED = 1  # NVML_FEATURE_ENABLED

_MIG_ON = 1  # NVML_DEVICE_MIG_ENABLE

# Known to R570 and nvidia-ml-py 12.570, and newer ones.
_RECOVERY_FIELD = "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"

# nvmlDeviceGpuRecoveryAction_t, in nvidia-smi's words; 0 is none.
_RECOVERY_ACTIONS = {
    1: "Reset",
    2: "Reboot",
    3: "Drain P2P",
    4: "Drain and Reset",
    5: "Recover IMEX Domain",
    6: "Bus Reset",
    7: "System Reboot",
}


class NvmlDevice:
    """A GPU or a MIG instance, as NVML answers about it now.

    Args:
        handle: that of NVML.
        parent: the GPU of a MIG instance. Some drivers list processes only there, with the instance's ids.

    Raises:
        Fault: from every method, if the device is lost.
        SessionOver: from every method.
    """

    def __init__(self, calls: NvmlCalls, handle: Any, parent: "NvmlDevice | None" = None) -> None:
        self.calls = calls
        self.handle = handle
        self.parent = parent

    def instance(self, slot: int) -> "NvmlDevice":
        """Return the MIG instance in a slot, without its parent: only what it says itself is of interest.

        Raises:
            Fault: there is none, or this user may not see it.
        """
        return NvmlDevice(self.calls, self.calls.ask("nvmlDeviceGetMigDeviceHandleByIndex", self.handle, slot))

    def instances(self) -> Iterator["MigInstance"]:
        """Yield the MIG instances of a GPU, without those that this user may not see."""
        slots = self.calls.ask_or(0, "nvmlDeviceGetMaxMigDeviceCount", self.handle)
        for slot in range(min(slots, _MOST_INSTANCES)):
            handle = self.calls.ask_or(None, "nvmlDeviceGetMigDeviceHandleByIndex", self.handle, slot)
            if handle is None:
                continue
            uuid = self.calls.ask_or("", "nvmlDeviceGetUUID", handle)
            if uuid:
                yield MigInstance(slot, uuid, NvmlDevice(self.calls, handle, parent=self))

    def name(self) -> str:
        """Return what the driver says as the name; "" for nothing."""
        return str(self.calls.ask_or("", "nvmlDeviceGetName", self.handle))

    def bus_id(self) -> str:
        """Return the PCI bus id as NVML writes it; "" if it is not reported."""
        place = self.calls.ask_or(None, "nvmlDeviceGetPciInfo", self.handle)
        bus_id = getattr(place, "busId", "")
        if isinstance(bus_id, bytes):
            return bus_id.decode("ascii", "replace")
        return str(bus_id)

    def compute_mode(self) -> int:
        """Return the nvmlComputeMode_t; 0 if it is not reported."""
        return int(self.calls.ask_or(0, "nvmlDeviceGetComputeMode", self.handle))

    def display_active(self) -> bool:
        """Return whether a display is initialised on it."""
        return bool(self.calls.ask_or(0, "nvmlDeviceGetDisplayActive", self.handle) == _ENABLED)

    def mig_enabled(self) -> bool:
        """Return whether MIG mode is on."""
        current, *_ = self.calls.ask_or((0, 0), "nvmlDeviceGetMigMode", self.handle)
        return bool(current == _MIG_ON)

    def is_persistent(self) -> bool:
        """Return whether persistence mode is on; Fault where it is not supported."""
        return bool(self.calls.ask("nvmlDeviceGetPersistenceMode", self.handle) == _ENABLED)

    def gpu_instance_id(self) -> int | None:
        """Return NVML's number of the GPU instance that this MIG instance is in; None if it is not reported."""
        found: int | None = self.calls.ask_or(None, "nvmlDeviceGetGpuInstanceId", self.handle)
        return found

    def utilization(self) -> int | None:
        """Return the percentage of time in which a kernel ran; None if it is not reported."""
        rates = self.calls.ask_or(None, "nvmlDeviceGetUtilizationRates", self.handle)
        if rates is None:
            return None
        return int(rates.gpu)

    def temperature(self) -> int | None:
        """Return degrees Celsius; None if they are not reported."""
        found: int | None = self.calls.ask_or(None, "nvmlDeviceGetTemperature", self.handle, _TEMPERATURE_GPU)
        return found

    def fan(self) -> int | None:
        """Return the percentage of the fan's highest speed; None if it is not reported."""
        found: int | None = self.calls.ask_or(None, "nvmlDeviceGetFanSpeed", self.handle)
        return found

    def power(self) -> int | None:
        """Return the watts that it draws; None if they are not reported."""
        return self._watts("nvmlDeviceGetPowerUsage")

    def power_limit(self) -> int | None:
        """Return the watts that it may draw; None if they are not reported."""
        return self._watts("nvmlDeviceGetEnforcedPowerLimit")

    def _watts(self, question: str) -> int | None:
        milliwatts = self.calls.ask_or(0, question, self.handle)
        return milliwatts // 1000 or None

    def cpus(self, scope: str) -> frozenset[int] | None:
        """Return the CPUs next to it, for "node" or "socket". None is unknown, as where all of them lie outside this
        process's cpuset."""
        function = "nvmlDeviceGetCpuAffinityWithinScope"
        words = self.calls.ask_or((), function, self.handle, _MASK_WORDS, _SCOPES[scope])
        cpus = set()
        for number, word in enumerate(words):
            for bit in range(_BITS_OF_WORD):
                if word >> bit & 1:
                    cpus.add(_BITS_OF_WORD * number + bit)
        return frozenset(cpus) or None

    def illness(self) -> str:
        """Return what the driver says against a GPU, a clause; "" if nothing."""
        action = self._recovery_action()
        pending = failed = False
        # Ampere and newer, and not while there are MIG instances.
        remapped = self.calls.ask_or(None, "nvmlDeviceGetRemappedRows", self.handle)
        if remapped is not None:
            _correctable, _uncorrectable, pending, failed = remapped
        return illness_of(recovery_action=action, remapping_failed=bool(failed), remapping_pending=bool(pending))

    def _recovery_action(self) -> str:
        """Return what the driver recommends for a GPU; "" for nothing, and where it does not say."""
        field = self.calls.constant(_RECOVERY_FIELD)
        if field is None:
            return ""
        for value in self.calls.ask_or((), "nvmlDeviceGetFieldValues", self.handle, [field]):
            action = int(value.value.uiVal)
            if value.nvmlReturn == 0 and action:
                return _RECOVERY_ACTIONS.get(action, f"number {action}")
        return ""


class MigInstance(NamedTuple):
    """A MIG instance in a slot of its GPU."""

    slot: int
    uuid: str
    device: NvmlDevice
