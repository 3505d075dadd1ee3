"""A driver without GPUs: a preset host whose processes are locked files in the state directory.

Nothing is guessed from pids, which may be recycled or belong to another container.

It simulates the driver only. Who is on which GPU is as real as elsewhere: a context is an open, locked file, and the
kernel closes it when its process ends in whatever way, or becomes another program.

    <tree>/<preset>/<uuid>.<pid>-<bytes>-<kind>-<number>     empty, mode 0644, flocked while alive
    <tree>/<preset>/<uuid>.bad                               a GPU that refuses contexts with the error that stands here

The tree is ``SAFE_GPU_SIMULATED_DIR``, else ``simulated`` in the state directory. All users of a host share one
directory of mode 1777. Files that nobody locks were left by processes that have ended: they do not count, and a poll
unlinks those that it may. It finds out by trying a shared lock for a moment. So who makes a file locks it without
blocking, and makes another one where it is locked or has been unlinked meanwhile. ``kind`` is ``compute``, ``graphics``
or ``mps``.
"""

import fcntl
import os
import re
from collections.abc import Container, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from typing import Any

from ..coordination.directory import OPEN_DIR, OPEN_FILE, SharedDirectory
from ..coordination.doors import simulated_tree
from ..coordination.state_dir import refusal, refusal_of_error, state_dir_path
from ..errors import PlaceholderError, StateDirError
from ..gpus.devices import Gpu, GpuProcess, HostSnapshot, ProcessKind
from ..gpus.vendors import VENDORS
from ..host.foreign_files import open_to_read
from ..host.held import Held
from ..host.signals import DeferredSignals
from ..runtimes.library import Runtime
from ..runtimes.visible_devices import read_visible
from ..topology.host import HostTopology
from .base import Driver, own_namespace_pids
from .presets import CONTEXT_BYTES
from .presets import preset as find_preset

_numbers = count()


def is_alive(name: str, directory: int) -> bool:
    """Return whether somebody holds the lock of this entry; if nobody does, it is removed where this user may."""
    try:
        fd = os.open(name, OPEN_FILE, dir_fd=directory)
    except OSError:
        return False  # gone meanwhile, or not an entry at all
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        # Under our shared lock: its maker, if this is a context in the making, sees that the name is gone.
        with suppress(OSError):
            os.unlink(name, dir_fd=directory)
        return False
    finally:
        os.close(fd)


class SimulatedContext:
    """A live process on a simulated GPU; made by :meth:`SimulatedDriver.occupy`.

    It lives until it is closed (``with`` does), or its process ends or executes another program.

    Attributes: ``uuid`` of the device, ``pid`` as the driver shows it, ``memory`` in bytes.
    """

    def __init__(self, directory: SharedDirectory, uuid: str, memory: int, kind: str, pid: int) -> None:
        self.uuid = uuid
        self.pid = pid
        self.memory = memory
        self._directory = Held(os.dup(directory.fd))
        try:
            self._name, self._lock = _enter(directory, f"{uuid}.{pid}-{memory}-{kind}")
        except BaseException:
            self._directory.release()
            raise

    def close(self) -> None:
        """Leave the GPU; safe to call twice, and without effect in a forked child, whose context it is not."""
        self._lock.release(first=self._unlink)
        self._directory.release()

    def _unlink(self) -> None:
        with suppress(OSError):
            os.unlink(self._name, dir_fd=self._directory.fd)

    def __enter__(self) -> "SimulatedContext":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _enter(directory: SharedDirectory, stem: str) -> tuple[str, Held]:
    """Make the entry of a context and take its lock; return its name and its lock."""
    try:
        while True:
            name = f"{stem}-{next(_numbers)}"
            try:
                lock = Held(os.open(name, OPEN_FILE | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=directory.fd))
            except FileExistsError:
                continue  # left by a dead process with our pid, of a user whose files we cannot remove
            try:
                os.fchmod(lock.fd, 0o644)
                with suppress(BlockingIOError):
                    fcntl.flock(lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.fstat(lock.fd).st_nlink:
                        return name, lock
            except BaseException:
                lock.release()
                raise
            lock.release()  # a poll came between, took it for a dead one's and removes it
    except OSError as err:
        what = f"the simulated host cannot write {directory.path} ({err.strerror}): free some space there"
        raise refusal(what, directory.path, err.errno) from err


_GONE = "this host has no such device"
_ENTRY = r"(.+)\.([0-9]{1,10})-([0-9]{1,15})-(compute|graphics|mps)-[0-9]+"
_Usage = dict["tuple[int, str]", int]
"""(pid, kind) -> bytes, on one device."""


class SimulatedDriver(Driver, Runtime):
    """The driver of a simulated host. NVLink is part of the preset, a poll lists all processes, and utilisation is not
    simulated. Nothing is open between polls; contexts belong to their process, as with a real driver.

    Args:
        preset: name of the host, a key of ``presets.PRESETS``.
        state_dir: where the processes are kept, in ``simulated``; None: in ``SAFE_GPU_SIMULATED_DIR``, else in
            ``simulated`` in the state directory. It is made when the first process comes.
        vendor: whose GPUs it has, on a host with those of several; None: of the first there.

    Attributes:
        idle: the host with nobody on it.

    Raises:
        UnsatisfiableRequestError: no such preset. StateDirError: a relative path.
    """

    is_simulated = True

    def __init__(self, preset: str, state_dir: str | None = None, *, vendor: str | None = None) -> None:
        self._host = find_preset(preset).of(vendor)
        self._place = (*_tree_of(state_dir), self._host.name)
        prefix = simulated_tree(os.path.join(*self._place[:-1]))
        gpus = self._host.gpus
        self.name = f"simulated:{self._host.name}"
        self.runtime = self  # no library knows these GPUs
        self.idle = HostSnapshot(gpus, self.name, VENDORS[gpus[0].vendor].version, prefix)
        self._by_uuid = {gpu.uuid: gpu for gpu in gpus}

    def snapshot(self) -> HostSnapshot:
        """Poll: the host with the processes that live now.

        Raises:
            StateDirError: the tree of processes cannot be read.
        """
        usage = self._usage(self._by_uuid)
        if not usage:
            return self.idle
        return self.idle.updated(self._used(self._by_uuid[uuid], used) for uuid, used in usage.items())

    def usage(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """Return these devices with the processes that live now; the same errors as :meth:`snapshot`."""
        usage = self._usage({gpu.uuid for gpu in gpus})
        found = ((gpu, self._by_uuid.get(gpu.uuid), usage.get(gpu.uuid)) for gpu in gpus)
        return tuple(
            gpu.unreachable(_GONE) if idle is None else self._used(idle, used) if used else idle
            for gpu, idle, used in found
        )

    def _usage(self, uuids: Container[str]) -> dict[str, _Usage]:
        """Return what lives on these devices; idle ones are left out."""
        usage: dict[str, _Usage] = {}
        try:
            os.lstat(os.path.join(*self._place[:2]))
        except FileNotFoundError:  # nobody has used it: nothing is opened
            return usage
        except OSError:
            pass  # the rest says why
        with DeferredSignals(), ExitStack() as stack:
            try:
                tree = os.open(self._place[0], OPEN_DIR)
                stack.callback(os.close, tree)
                for part in self._place[1:]:
                    tree = os.open(part, OPEN_DIR, dir_fd=tree)
                    stack.callback(os.close, tree)
            except FileNotFoundError:
                return usage
            except OSError as err:
                raise refusal_of_error(os.path.join(*self._place), err) from err
            for name in os.listdir(tree):
                entry = re.fullmatch(_ENTRY, name)
                if entry and entry[1] in uuids and is_alive(name, tree):
                    used = usage.setdefault(entry[1], {})
                    key = int(entry[2]), entry[4]
                    used[key] = used.get(key, 0) + int(entry[3])
        return usage

    def _opened(self, stack: ExitStack) -> SharedDirectory:
        """Return the directory of this host's processes, open until the end of ``stack``."""
        directory = stack.enter_context(SharedDirectory(self._place[0]))
        for name in self._place[1:]:
            directory = stack.enter_context(SharedDirectory(name, directory))
        return directory

    def _used(self, gpu: Gpu, usage: _Usage) -> Gpu:
        """Return the device with its processes."""
        total = gpu.memory_total or 0
        taken = min((gpu.memory_used or 0) + sum(usage.values()), total)
        listed = (GpuProcess(pid, kind, memory) for (pid, kind), memory in sorted(usage.items()))
        processes = own_namespace_pids(listed, vendor=None)
        return gpu._replace(memory_used=taken, memory_free=total - taken, processes=processes)

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
        gpu = self._by_uuid.get(uuid)
        if gpu is None or gpu.unusable:
            reason = gpu.unusable if gpu else "no such device"
            raise PlaceholderError(f"{self.name} cannot run anything on {uuid}: {reason}", uuid=uuid)
        with ExitStack() as stack:
            directory = self._opened(stack)
            with suppress(OSError), open_to_read(f"{uuid}.bad", os.O_NOFOLLOW, directory.fd) as file:
                trouble = (file.read(4096) or b"").decode(errors="replace").strip()
                if trouble:
                    raise PlaceholderError(f"{self.name} cannot make a context on {uuid}: {trouble}", uuid=uuid)
            return SimulatedContext(directory, uuid, memory, kind, os.getpid() if pid is None else pid)

    def visible(self) -> tuple[str, ...]:
        """Return the UUIDs that CUDA would show this process now, by ordinal, as its environment says."""
        visible_limit = read_visible(os.environ, self.idle)
        if visible_limit is not None:
            return visible_limit.uuids
        return tuple(gpu.uuid for gpu in self.idle.gpus if not gpu.unusable)

    def cpu_affinity(self, uuid: str, scope: str) -> frozenset[int] | None:
        gpu = self._by_uuid.get(uuid)
        if gpu is None:
            return None
        place = self._host.topology.gpu(gpu.index)
        return place.socket_cpus if scope == "socket" else place.node_cpus

    def host_topology(self) -> HostTopology:
        return self._host.topology

    def default_placeholder(self, logger: Any = None) -> "SimulatedPlaceholder":
        return SimulatedPlaceholder(logger, driver=self)


def _tree_of(state_dir: str | None) -> tuple[str, ...]:
    """Return where the processes of simulated hosts are: a directory, and what is below it. Its path is the host's
    identity: processes with two state directories and one tree are on one host."""
    tree = os.environ.get("SAFE_GPU_SIMULATED_DIR") if state_dir is None else None
    if not tree:
        return state_dir or state_dir_path(), "simulated"
    if not os.path.isabs(tree):
        raise StateDirError(f"SAFE_GPU_SIMULATED_DIR={tree} is relative: set it to an absolute path", path=tree)
    return (os.path.abspath(tree),)


class SimulatedPlaceholder:
    """Holds a simulated GPU by a context of this process, as the other placeholders hold real ones.

    Args:
        logger: where trouble on release is told.
        driver: the simulated host.
    """

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
