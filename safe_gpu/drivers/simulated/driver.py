"""What the driver of a simulated host answers, and how its GPUs are held."""

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ...coordination.directory import refusal_of_error
from ...coordination.doors import uuid_prefix
from ...errors import PlaceholderError
from ...gpus.devices import Gpu, HostSnapshot, ProcessKind
from ...gpus.vendors import VENDORS
from ...host.locks import Held
from ...host.signals import DeferredSignals
from ...runtimes.library import Runtime
from ...runtimes.visible_devices import read_visible
from ...topology.host import HostTopology
from ..base import Driver, own_namespace_pids
from .cards import MIB
from .contexts import ContextName, DeviceState, SimulatedContext, read_states
from .presets import Preset, find_preset
from .tree import Tree, mode_of, text_of

CONTEXT_BYTES = 400 * MIB
"""What one CUDA context costs on a data-centre GPU, roughly."""

_GONE = "this host has no such device"


class _Seen(NamedTuple):
    """What a look at the files showed.

    Attributes:
        preset: the host as its cards are divided now.
        states: UUID -> state, of devices that are not as the preset says.
    """

    preset: Preset
    states: Mapping[str, DeviceState]

    def of(self, gpu: Gpu) -> Gpu:
        """Return an idle device with its processes and its illness."""
        state = self.states.get(gpu.uuid, DeviceState())
        beside = 0
        for uuid in self.preset.together.get(gpu.uuid, ()):
            if uuid != gpu.uuid and uuid in self.states:
                beside += self.states[uuid].memory
        total = gpu.memory_total or 0
        used = min((gpu.memory_used or 0) + state.memory + beside, total)
        return gpu._replace(
            memory_used=used,
            memory_free=total - used,
            memory_beside=beside,
            processes=own_namespace_pids(state.processes, vendor=None),
            illness=state.illness,
        )


class SimulatedDriver(Driver, Runtime):
    """The driver of a simulated host. NVLink is part of the preset, a poll lists all processes, and utilisation is not
    simulated. Nothing is open between polls; contexts belong to their process, as with a real driver.

    Args:
        preset: name of the host, a key of ``PRESETS``.
        state_dir: where the processes are kept, in ``simulated``; None: in ``SAFE_GPU_SIMULATED_DIR``, else in
            ``simulated`` in the state directory. It is made when the first process comes.
        vendor: whose GPUs it has, on a host with those of several; None: of the first there.

    Attributes:
        preset: the host as its cards are divided at first.
        idle: the host with nobody on it.
        tree: where its files are.

    Raises:
        UnsatisfiableRequestError: no such preset. StateDirError: a relative path.
    """

    is_simulated = True

    def __init__(self, preset: str, state_dir: str | None = None, *, vendor: str | None = None) -> None:
        self.preset = find_preset(preset).of(vendor)
        self.tree = Tree(self.preset.name, state_dir)
        self.name = f"simulated:{self.preset.name}"
        self.runtime = self  # no library knows these GPUs
        self.idle = self._snapshot_of(self.preset, self.preset.gpus)

    def snapshot(self) -> HostSnapshot:
        """Poll: the host with the processes that live now.

        Raises:
            StateDirError: the tree of processes cannot be read.
        """
        seen = self._look()
        return self._snapshot_of(seen.preset, [seen.of(gpu) for gpu in seen.preset.gpus])

    def usage(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """Return these devices with the processes that live now; the same errors as :meth:`snapshot`."""
        seen = self._look({gpu.uuid for gpu in gpus})
        idle = {gpu.uuid: gpu for gpu in seen.preset.gpus}
        found = []
        for gpu in gpus:
            if gpu.uuid in idle:
                found.append(seen.of(idle[gpu.uuid]))
            else:
                found.append(gpu.unreachable(_GONE))
        return tuple(found)

    def _snapshot_of(self, preset: Preset, gpus: Sequence[Gpu]) -> HostSnapshot:
        version = VENDORS[preset.gpus[0].vendor].version
        return HostSnapshot(tuple(gpus), self.name, version, uuid_prefix(self.tree.root))

    def _look(self, uuids: Collection[str] | None = None) -> _Seen:
        """Read the modes of the cards, and the states of these devices and of those that share their memory; None for
        all."""
        if self.tree.is_unused():
            return _Seen(self.preset, {})
        with DeferredSignals(), suppress(FileNotFoundError):
            directory = self.tree.open()
            try:
                names = os.listdir(directory)
                preset = self._divided(directory, names)
                if uuids is None:
                    uuids = [gpu.uuid for gpu in preset.gpus]
                wanted: set[str] = set()
                for uuid in uuids:
                    wanted.update(preset.together.get(uuid, [uuid]))
                return _Seen(preset, read_states(directory, names, wanted))
            finally:
                os.close(directory)
        return _Seen(self.preset, {})

    def _divided(self, directory: int, names: Collection[str]) -> Preset:
        """Return the host as the files of its directory divide its cards."""
        modes = {}
        for card in self.preset.cards:
            whole = card.gpu.whole
            if f"{whole}.mode" not in names:
                continue
            mode = mode_of(whole, directory)
            if mode is None:
                continue
            with suppress(ValueError):  # what is no mode of this card is ignored
                card.devices(mode)
                modes[whole] = mode
        if not modes:
            return self.preset
        return self.preset.divided(modes)

    def _preset_now(self) -> Preset:
        """Return the host as its cards are divided now."""
        return self._look(()).preset

    def divide(self, card: str, mode: str) -> None:
        """Divide a card as an administrator does, even one in use. It stays so.

        Args:
            card: its name in all modes (:attr:`Gpu.whole`).
            mode: see :mod:`.cards`.

        Raises:
            ValueError: there is no such card or mode.
            StateDirError: the state directory cannot be written.
        """
        self.preset.divided({card: mode})
        self.tree.replace(f"{card}.mode", f"{mode}\n")

    def occupy(
        self, uuid: str, *, memory: int = CONTEXT_BYTES, kind: str = ProcessKind.COMPUTE, pid: int | None = None
    ) -> SimulatedContext:
        """Put a process on a device: it shows there until the context is closed or this process ends.

        Args:
            uuid: the device.
            memory: bytes that it uses.
            kind: one of :class:`~safe_gpu.gpus.devices.ProcessKind`.
            pid: the number to show; None is this process's own. Another one plays a process whose pid means nothing
                here, such as one in a container.

        Raises:
            PlaceholderError: the host has no such device, or MIG is on and it is to be used by its instances.
            StateDirError: the state directory cannot be written.
        """
        reason = self._why_unusable(uuid)
        if reason:
            raise PlaceholderError(f"{self.name} cannot run anything on {uuid}: {reason}", uuid=uuid)
        if pid is None:
            pid = os.getpid()
        directory = Held(self.tree.make())
        try:
            trouble = text_of(f"{uuid}.bad", directory.fd)
            if trouble:
                raise PlaceholderError(f"{self.name} cannot make a context on {uuid}: {trouble}", uuid=uuid)
            return SimulatedContext(directory, ContextName(uuid, pid, memory, kind))
        except OSError as err:
            directory.release()
            raise refusal_of_error(self.tree.path, err) from err
        except BaseException:
            directory.release()
            raise

    def _why_unusable(self, uuid: str) -> str:
        """Return why nothing can run on a device, "" if something can."""
        for gpu in self._preset_now().gpus:
            if gpu.uuid == uuid:
                return gpu.unusable or ""
        return "no such device"

    def visible(self) -> tuple[str, ...]:
        """Return the UUIDs that CUDA would show this process now, by ordinal, as its environment says."""
        preset = self._preset_now()
        visible_limit = read_visible(os.environ, self._snapshot_of(preset, preset.gpus))
        if visible_limit is not None:
            return visible_limit.uuids
        return tuple(gpu.uuid for gpu in preset.gpus if not gpu.unusable)

    def cpu_affinity(self, uuid: str, scope: str) -> frozenset[int] | None:
        preset = self._preset_now()
        for gpu in preset.gpus:
            if gpu.uuid == uuid:
                place = preset.topology.gpu(gpu.index)
                if scope == "socket":
                    return place.socket_cpus
                return place.node_cpus
        return None

    def host_topology(self) -> HostTopology:
        return self._preset_now().topology

    def default_placeholder(self, logger: Any = None) -> "SimulatedPlaceholder":
        return SimulatedPlaceholder(logger, driver=self)


class SimulatedPlaceholder:
    """Holds a simulated GPU by a context of this process, as the other placeholders hold real ones.

    Args:
        logger: where trouble on release is told.
        driver: the simulated host.
    """

    own_context = True

    def __init__(self, logger: Any = None, *, driver: SimulatedDriver) -> None:
        self.logger = logger
        self._driver = driver

    def __call__(self, device_no: int) -> SimulatedContext:
        """Start a context on the device that CUDA_VISIBLE_DEVICES shows as ``device_no``.

        Raises:
            PlaceholderError: it shows fewer devices.
            StateDirError: the state directory cannot be written.
        """
        visible = self._driver.visible()
        if not 0 <= device_no < len(visible):
            raise PlaceholderError(
                f"there is no simulated CUDA device {device_no}: CUDA_VISIBLE_DEVICES="
                f"{os.environ.get('CUDA_VISIBLE_DEVICES')} shows {len(visible)} of {self._driver.name}",
                device_no=device_no,
            )
        return self._driver.occupy(visible[device_no])

    def release(self, thing: SimulatedContext) -> None:
        """Leave the GPU."""
        thing.close()
