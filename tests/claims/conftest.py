"""A simulated host that can be watched and disturbed poll by poll, and a check that a claim left nothing behind."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu import acquisition, drivers, owner
from safe_gpu.affinity import shares
from safe_gpu.coordination.leases import lease_name
from safe_gpu.devices import Gpu, HostSnapshot
from safe_gpu.drivers.simulated import SimulatedContext, SimulatedDriver, SimulatedPlaceholder

# No process can have this number, as none of another container can be seen from here.
HIDDEN_PID = 999_999_999
# A pause that is told from every other one by its length.
PAUSE = 0.000123


class Host(SimulatedDriver):
    """A simulated host; it counts polls, and runs ``on_poll(number)`` before each.

    ``edits`` maps the UUIDs of GPUs to what the driver shows of them instead. ``fail_at(event)`` may raise.
    """

    def __init__(self, preset: str) -> None:
        super().__init__(preset)
        self.polls = 0
        self.cuda = False
        self.events: list[str] = []
        self.edits: dict[str, dict[str, Any]] = {}
        self.on_poll: Callable[[int], object] = lambda number: None
        self.on_event: Callable[[str], object] = lambda event: None

    @property
    def uses_cuda(self) -> bool:
        return self.cuda

    @property
    def uuids(self) -> list[str]:
        return [gpu.uuid for gpu in self.idle.gpus if not gpu.unusable]

    def snapshot(self) -> HostSnapshot:
        self.polls += 1
        self.event("poll")
        self.on_poll(self.polls)
        shown = super().snapshot()
        gpus = tuple(replace(gpu, **self.edits.get(gpu.uuid, {})) for gpu in shown.gpus)
        return HostSnapshot(gpus, shown.driver, shown.driver_version)

    def close(self) -> None:
        self.event("close")
        super().close()

    def event(self, name: str) -> None:
        self.events.append(name)
        self.on_event(name)

    def stranger(self, number: int, pid: int | None = None, **values: Any) -> SimulatedContext:
        """A process that knows nothing of safe_gpu on this GPU; the parent of this process unless told otherwise."""
        return self.occupy(self.uuids[number], pid=os.getppid() if pid is None else pid, **values)


@pytest.fixture
def host_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Host]:
    """``host_of("laptop")``: that host, in place of whatever driver a claim in this process would open."""

    def install(preset: str) -> Host:
        host = Host(preset)
        monkeypatch.setenv("SAFE_GPU_DRIVER", host.name)
        monkeypatch.setattr(drivers, "open_driver", lambda name=None: host)
        return host

    if os.getppid() == 0:
        pytest.skip("the parent of this process, which plays the stranger, cannot be seen from this container")
    # A busy machine must not make a claim poll once more than it has to.
    monkeypatch.setattr(owner, "_STALE", 1e9)
    return install


@pytest.fixture
def host(host_of: Callable[[str], Host]) -> Host:
    """Eight equal GPUs."""
    return host_of("dgx-a100")


class Spies:
    """Every step of a claim as an event of the host, in the order in which they happen.

    Use it with ``placeholder_fn=spies.placeholder`` and ``debug_sleep=spies.PAUSE``.
    """

    PAUSE = PAUSE

    def __init__(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = host
        self.released: list[str] = []
        host.cuda = True  # so that CUDA is asked about the devices; here it sleeps
        event = host.event

        class SpiedHostLock(acquisition.HostLock):
            def __enter__(self) -> Any:
                event("host.lock")
                return super().__enter__()

            def __exit__(self, *exc: object) -> None:
                super().__exit__(*exc)
                event("unlock")

        def spied(module: Any, name: str, before: str = "", after: str = "") -> None:
            genuine = getattr(module, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                if before:
                    event(before)
                result = genuine(*args, **kwargs)
                if after:
                    event(after)
                return result

            monkeypatch.setattr(module, name, call)

        class LegacyLock:
            def release(self) -> None:
                if self in held:
                    held.remove(self)
                    host.events.append("legacy release")

        held: list[LegacyLock] = []

        def take_legacy_lock(deadline: float | None, logger: Any) -> LegacyLock:
            event("legacy lock")
            held.append(LegacyLock())
            return held[-1]

        genuine_sleep = time.sleep

        def sleep(seconds: float) -> None:
            if seconds == PAUSE:
                event(f"sleep, CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}")
            genuine_sleep(seconds)

        monkeypatch.setattr(acquisition, "HostLock", SpiedHostLock)
        monkeypatch.setattr(acquisition, "take_legacy_lock", take_legacy_lock)
        monkeypatch.setattr(time, "sleep", sleep)
        spied(owner, "checked", before="check")
        spied(owner, "boundaries", before="boundaries")
        spied(acquisition, "try_lease", before="lease")
        spied(acquisition.Lease, "write", before="record")
        spied(owner, "verify_devices", before="verify")
        spied(shares, "bind_process", before="bind", after="bound")
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
        super().prepare()

    def __call__(self, device_no: int) -> SimulatedContext:
        self.host.event(f"placeholder {device_no}")
        return super().__call__(device_no)

    def release(self, thing: SimulatedContext) -> None:
        self.host.events.append("placeholder released")
        super().release(thing)


@pytest.fixture
def spies(host: Host, monkeypatch: pytest.MonkeyPatch) -> Spies:
    """All steps of a claim as events."""
    return Spies(host, monkeypatch)


class Leases:
    """Lease files that this test holds itself, as another process would."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}

    def hold(self, *uuids: str) -> None:
        directory = Path(os.environ["SAFE_GPU_DIR"]) / "leases"
        directory.mkdir(parents=True, exist_ok=True)
        for uuid in uuids:
            fd = os.open(directory / lease_name(uuid), os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._held[uuid] = fd

    def free(self) -> None:
        while self._held:
            os.close(self._held.popitem()[1])


@pytest.fixture
def leases() -> Iterator[Leases]:
    """Hold leases in this process without a claim."""
    held = Leases()
    yield held
    held.free()


@contextmanager
def _untouched() -> Iterator[None]:
    before = _traces()
    yield
    now = _traces()
    for what, then in before.items():
        assert now[what] == then, what


def _traces() -> dict[str, object]:
    state = Path(os.environ["SAFE_GPU_DIR"])
    return {
        "environment": dict(os.environ),
        "affinity": {tid: os.sched_getaffinity(int(tid)) for tid in _tids()},
        "descriptors": _descriptors(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "leases": [path.name for path in sorted(state.glob("leases/*.lock")) if _locked(path)],
        "host.lock": _locked(state / "host.lock"),
        "tickets": sorted(path.name for path in state.glob("queue/*")),
        "contexts": sorted(path.name for path in state.glob("simulated/*/*")),
        "owners": (owner.current_owner(), safe_gpu.gpu_owner),
    }


def _tids() -> list[str]:
    return os.listdir("/proc/self/task")


def _descriptors() -> dict[str, str]:
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # the one that listed them
    return found


def _locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@pytest.fixture
def untouched() -> Callable[[], AbstractContextManager[None]]:
    """``with untouched():`` whatever happens inside, it leaves this process and the state directory as they were.

    Compared are the environment, every thread's CPU mask, descriptors, threads, locks, tickets, simulated contexts, and
    what the package remembers of claims.
    """
    return _untouched


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """No claim of one test reaches the next."""
    yield
    holder = owner.current_owner()
    if holder is not None:
        holder.release_gpus()


@pytest.fixture
def shown(host: Host) -> Callable[[int], Gpu]:
    """A GPU as the driver shows it now."""
    return lambda number: next(gpu for gpu in SimulatedDriver.snapshot(host).gpus if gpu.uuid == host.uuids[number])


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    """What is to be closed after the test."""
    with ExitStack() as stack:
        yield stack
