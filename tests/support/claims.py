"""Claims of simulated GPUs, and a host that counts polls, notes steps of claims, and can change at each of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

import safe_gpu
from safe_gpu.affinity import binding
from safe_gpu.claim import checks as confirmation
from safe_gpu.claim import claim as claim_module
from safe_gpu.claim import functions
from safe_gpu.claim import owner as owner_module
from safe_gpu.claim import view as host_view
from safe_gpu.coordination import host_lock
from safe_gpu.coordination.doors import Doors
from safe_gpu.drivers.simulated import SimulatedContext, SimulatedDriver, SimulatedPlaceholder
from safe_gpu.gpus.devices import Gpu, HostSnapshot
from safe_gpu.runtimes.cuda import CudaLibrary


def claim(nb_gpus: int = 1, **options: Any) -> safe_gpu.GPUOwner:
    """A claim without placeholders that does not wait, unless the options say otherwise."""
    return safe_gpu.GPUOwner(nb_gpus, safe_gpu.NoPlaceholder(), **{"timeout": 0, "affinity": None, **options})


def try_claim(nb_gpus: int, **options: Any) -> tuple[int, ...] | None:
    """The indices of the GPUs that a claim gets without waiting, and has given back; None: it is refused."""
    try:
        with claim(nb_gpus, **options) as claimed:
            return tuple(claimed.devices_taken)
    except safe_gpu.NotEnoughGpusError:
        return None


class Host(SimulatedDriver):
    """A simulated host.

    Attributes:
        polls: how often the driver was asked, for all GPUs or for some.
        on_poll: is called with that number before each answer.
        events: what has happened, in order: "poll", "usage", "close" and the steps of :class:`Spies`.
        on_event: is called with each of them, and may raise.
        edits: UUID of a GPU -> the fields of its record that the driver shows changed.
        strangers: processes that use GPUs without a claim.
    """

    def __init__(self, preset: str, stranger_pid: int) -> None:
        super().__init__(preset)
        self.stranger_pid = stranger_pid
        self.polls = 0
        self.events: list[str] = []
        self.edits: dict[str, dict[str, Any]] = {}
        self.on_poll: Callable[[int], object] = lambda number: None
        self.on_event: Callable[[str], object] = lambda event: None
        self.strangers: list[SimulatedContext] = []

    def ask_cuda(self) -> None:
        """Make claims here ask CUDA about their devices, which is not initialised in this process."""
        cuda: Any = CudaLibrary()
        cuda.default_placeholder = lambda logger=None: SimulatedPlaceholder(logger, driver=self)
        self.runtime = cuda

    @property
    def uuids(self) -> list[str]:
        return [gpu.uuid for gpu in self.idle.gpus if not gpu.unusable]

    def snapshot(self) -> HostSnapshot:
        self._poll("poll")
        shown = super().snapshot()
        return HostSnapshot(self._edited(shown.gpus), shown.driver, shown.driver_version, shown.name_prefix)

    def usage(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        self._poll("usage")
        return self._edited(super().usage(gpus))

    def _poll(self, event: str) -> None:
        self.polls += 1
        self.event(event)
        self.on_poll(self.polls)

    def _edited(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        return tuple(gpu._replace(**self.edits.get(gpu.uuid, {})) for gpu in gpus)

    def close(self) -> None:
        self.event("close")
        super().close()

    def event(self, name: str) -> None:
        self.events.append(name)
        self.on_event(name)

    def stranger(self, number: int, pid: int | None = None, **values: Any) -> SimulatedContext:
        """A process that knows nothing of safe_gpu on this GPU."""
        pid = self.stranger_pid if pid is None else pid
        self.strangers.append(self.occupy(self.uuids[number], pid=pid, **values))
        return self.strangers[-1]


class Spies:
    """Note every step of a claim as an event of the host.

    Use it with ``placeholder_fn=spies.placeholder`` and ``debug_sleep=spies.PAUSE``.
    """

    PAUSE = 0.000123  # told from every other pause by its length

    def __init__(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = host
        host.ask_cuda()
        event = host.event

        genuine_locked = host_lock.Host.locked

        @contextmanager
        def locked(*arguments: Any) -> Iterator[None]:
            event("host.lock")
            with genuine_locked(*arguments):
                yield
            event("unlock")

        def spied(module: Any, name: str, before: str, after: str = "") -> None:
            genuine = getattr(module, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                event(before)
                result = genuine(*args, **kwargs)
                if after:
                    event(after)
                return result

            monkeypatch.setattr(module, name, call)

        class OlderPackageLock:
            def __init__(self, deadline: float | None, logger: Any, signals: Any) -> None:
                event("legacy lock")
                held.append(self)

            def release(self) -> None:
                if self in held:
                    held.remove(self)
                    host.events.append("legacy release")

        held: list[OlderPackageLock] = []
        genuine_sleep = time.sleep

        def sleep(seconds: float) -> None:
            if seconds == self.PAUSE:
                event(f"sleep, CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}")
            genuine_sleep(seconds)

        monkeypatch.setattr(host_lock.Host, "locked", locked)
        monkeypatch.setattr(confirmation, "older_package_counts", lambda: True)
        monkeypatch.setattr(confirmation, "take_older_package_lock", OlderPackageLock)
        monkeypatch.setattr(time, "sleep", sleep)
        spied(owner_module, "read_options", "options")
        spied(functions, "read_options", "options")
        spied(host_view, "visible_limit_of", "visible_limit")
        spied(Doors, "take_whole", "door")
        spied(claim_module, "ClaimEntry", "entry")
        spied(owner_module, "verify_devices", "verify")
        spied(binding, "bind_process", "bind", "bound")
        self.legacy_held = held
        self.placeholder = SpiedPlaceholder(host)


class SpiedPlaceholder(SimulatedPlaceholder):
    """Holds simulated GPUs, and tells the host."""

    def __init__(self, host: Host) -> None:
        super().__init__(driver=host)
        self.host = host

    def prepare(self) -> None:
        if "prepare" not in self.host.events:
            self.host.event("prepare")

    def __call__(self, device_no: int) -> SimulatedContext:
        self.host.event(f"placeholder {device_no}")
        return super().__call__(device_no)

    def release(self, thing: SimulatedContext) -> None:
        self.host.events.append("placeholder released")
        super().release(thing)
