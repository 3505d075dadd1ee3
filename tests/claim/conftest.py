"""A simulated host that can be watched and disturbed poll by poll, and a check that a claim left nothing behind."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu import drivers
from safe_gpu.affinity import cpu_shares as shares
from safe_gpu.claim import attempt as look
from safe_gpu.claim import claim as recheck
from safe_gpu.claim import leasing, owner
from safe_gpu.claim import view as host_view
from safe_gpu.coordination.leases import Lease
from safe_gpu.coordination.locks import HostLock
from safe_gpu.coordination.queue import TicketRequest, Waiter
from safe_gpu.devices import Gpu, HostSnapshot
from safe_gpu.drivers.simulated import SimulatedContext, SimulatedDriver, SimulatedPlaceholder
from safe_gpu.runtimes.runtime import CudaRuntime

# A pause that is told from every other one by its length.
PAUSE = 0.000123


class RuntimeOnSimulatedGpus(CudaRuntime):
    """CUDA, asked about simulated GPUs."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def try_gpu(self, gpu: Gpu, ordinal: int, logger: Any) -> None:
        raise AssertionError("no CUDA here")

    def default_placeholder(self, logger: Any = None) -> Any:
        return SimulatedPlaceholder(logger, driver=self._host)


class Host(SimulatedDriver):
    """A simulated host; it counts polls, narrow ones too, and runs ``on_poll(number)`` before each.

    ``edits`` maps the UUIDs of GPUs to what the driver shows of them instead. ``fail_at(event)`` may raise.
    """

    def __init__(self, preset: str, stranger_pid: int) -> None:
        super().__init__(preset)
        self.stranger_pid = stranger_pid
        self.polls = 0
        self.cuda = False
        self.events: list[str] = []
        self.edits: dict[str, dict[str, Any]] = {}
        self.on_poll: Callable[[int], object] = lambda number: None
        self.on_event: Callable[[str], object] = lambda event: None

    @property
    def runtime(self) -> Any:
        return RuntimeOnSimulatedGpus(self) if self.cuda else super().runtime

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
        return tuple(replace(gpu, **self.edits.get(gpu.uuid, {})) for gpu in gpus)

    def close(self) -> None:
        self.event("close")
        super().close()

    def event(self, name: str) -> None:
        self.events.append(name)
        self.on_event(name)

    def stranger(self, number: int, pid: int | None = None, **values: Any) -> SimulatedContext:
        """A process that knows nothing of safe_gpu on this GPU."""
        return self.occupy(self.uuids[number], pid=self.stranger_pid if pid is None else pid, **values)


@pytest.fixture
def host_of(monkeypatch: pytest.MonkeyPatch, stranger_pid: int) -> Callable[[str], Host]:
    """``host_of("laptop")``: that host, in place of whatever driver a claim in this process would open."""

    def install(preset: str) -> Host:
        host = Host(preset, stranger_pid)
        monkeypatch.setenv("SAFE_GPU_DRIVER", host.name)
        monkeypatch.setattr(drivers, "open_driver", lambda name=None, **choice: host)
        return host

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

        class SpiedHostLock(look.HostLock):
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

        def take_legacy_lock(deadline: float | None, logger: Any, signals: Any) -> LegacyLock:
            event("legacy lock")
            held.append(LegacyLock())
            return held[-1]

        genuine_sleep = time.sleep

        def sleep(seconds: float) -> None:
            if seconds == PAUSE:
                event(f"sleep, CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}")
            genuine_sleep(seconds)

        monkeypatch.setattr(look, "HostLock", SpiedHostLock)
        monkeypatch.setattr(recheck, "take_legacy_lock", take_legacy_lock)
        monkeypatch.setattr(time, "sleep", sleep)
        spied(owner, "read_options", before="options")
        spied(host_view, "visible_limit_of", before="visible_limit")
        spied(leasing, "try_lease", before="lease")
        spied(Lease, "write", before="record")
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


@contextmanager
def _untouched() -> Iterator[None]:
    before = _traces()
    yield
    now = _traces()
    for what, then in before.items():
        assert now[what] == then, what


def _held(state: Path) -> list[str]:
    """Names of the locks that are held, and not only tried by a waiter, who holds host.lock then."""

    def leases() -> list[str]:
        return [path.name for path in sorted(state.glob("leases/*.lock")) if _locked(path)]

    if not (state / "host.lock").exists():
        return leases()
    with (state / "host.lock").open() as lock:
        for _ in range(100):  # a test may hold it all the time
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return leases()
            time.sleep(0.005)
    return ["host.lock", *leases()]


def _traces() -> dict[str, object]:
    state = Path(os.environ["SAFE_GPU_DIR"])
    return {
        "environment": dict(os.environ),
        "affinity": {tid: os.sched_getaffinity(int(tid)) for tid in os.listdir("/proc/self/task")},
        "descriptors": _descriptors(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "locks": _held(state),
        "tickets": sorted(path.name for path in state.glob("queue/*")),
        "contexts": sorted(path.name for path in state.glob("simulated/*/*")),
        "owners": (owner.current_owner(), safe_gpu.gpu_owner),
    }


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
def stranger(child: Any, ground: Any) -> Callable[..., None]:
    """Another process that computes on GPUs; in this one it would be the claimer's own."""

    def occupy(*indices: int, kind: str = "compute", memory: int = 1 << 28) -> None:
        uuids = [ground.uuids[index] for index in indices]
        one = child(
            f"from safe_gpu.drivers.simulated import SimulatedDriver\n"
            f"driver = SimulatedDriver('dgx-a100')\n"
            f"contexts = [driver.occupy(uuid, kind={kind!r}, memory={memory}) for uuid in {uuids!r}]\n"
            f"say('there'); listen()"
        )
        assert one.hear() == "there"

    return occupy


@pytest.fixture
def line(ground: Any) -> Iterator[Callable[..., Waiter]]:
    """Tickets, played in this process: ``line(2, (0, 1), hold_for=600)``."""
    waiters: list[Waiter] = []

    def join(nb_gpus: int, gpus: Sequence[int] = range(8), *, hold_for: float | None = None, **more: Any) -> Waiter:
        uuids = frozenset(ground.uuids[index] for index in gpus)
        waiters.append(Waiter(TicketRequest(nb_gpus, uuids, tuple(more.items()), hold_for)))
        with HostLock(time.monotonic() + 30) as host:
            waiters[-1].join(host)
        return waiters[-1]

    yield join
    for waiter in waiters:
        waiter.leave()


def claim(nb_gpus: int = 1, **options: Any) -> safe_gpu.GPUOwner:
    """A claim without placeholders that does not wait, unless the options say otherwise."""
    return safe_gpu.GPUOwner(nb_gpus, safe_gpu.NoPlaceholder(), **{"timeout": 0, "affinity": None, **options})


def try_claim(nb_gpus: int, **options: Any) -> tuple[int, ...] | None:
    """The GPUs that a claim gets without waiting and gives back at once; None: it is refused."""
    try:
        with claim(nb_gpus, **options) as claimed:
            return tuple(claimed.devices_taken)
    except safe_gpu.NotEnoughGpusError:
        return None


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    """What is to be closed after the test."""
    with ExitStack() as stack:
        yield stack


def in_fork(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in a forked child of this process; where it fails by an error of ours, what that tells."""
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = work()
        except safe_gpu.SafeGpuError as err:
            answer = told(err)
        except BaseException:
            answer = {"failed": traceback.format_exc()}
        with os.fdopen(sending, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(sending)
    with os.fdopen(receiving) as pipe:
        answer = json.load(pipe)
    os.waitpid(pid, 0)
    if isinstance(answer, dict) and "failed" in answer:
        pytest.fail(answer["failed"])
    return answer


def told(err: Exception) -> tuple[str, str, dict[str, object]]:
    """The name of an error, its message, and its short attributes."""
    attributes = {name: value for name, value in vars(err).items() if isinstance(value, str | int | tuple)}
    return (
        type(err).__name__,
        str(err),
        {k: v for k, v in attributes.items() if k not in ("message", "verdicts", "processes")},
    )


VARIABLES = (*("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "CUDA_DEVICE_ORDER")
IN_A_PROCESS = """
import ctypes, json, os, subprocess, sys, threading
import safe_gpu
from safe_gpu import CudaPlaceholder, NoPlaceholder
from safe_gpu.claim import claim as recheck
def initialize():
    lib = ctypes.CDLL("libcuda.so.1")
    assert lib.cuInit(0) == 0
def claim(*arguments, **options):
    try:
        return safe_gpu.claim_gpus(*arguments, **{"timeout": 0, "affinity": None, **options}).devices_taken
    except safe_gpu.SafeGpuError as err:
        return told(err)
def variables():
    return {name: os.environ[name] for name in (*VARIABLES, "SAFE_GPU_SCOPE") if name in os.environ}
"""


def forked(host: Any, code: str, **environment: str) -> Any:
    """What ``code`` leaves in ``out`` in a child with these fake GPUs, to which CUDA and HIP are new."""
    import filelock  # noqa: F401 - here, so that no child has to
    import pynvml

    from safe_gpu.drivers import nvml

    class ByPath(next(kind for kind in ctypes.CDLL.__mro__ if kind.__module__ == "ctypes")):  # type: ignore[misc]
        """Libraries as a process finds them that is started with this LD_LIBRARY_PATH."""

        def __init__(self, name: str | None, mode: int = ctypes.DEFAULT_MODE, **options: Any) -> None:
            if name and not mode & os.RTLD_NOLOAD:
                paths = [os.path.join(place, name) for place in os.environ["LD_LIBRARY_PATH"].split(":")]
                name = next(filter(os.path.exists, paths), name)
            super().__init__(name, mode, **options)

    seen = {**host.env, **environment}

    def work() -> Any:
        os.environ.update(seen)
        ctypes.CDLL = pynvml.CDLL = ByPath
        pynvml.nvmlLib, pynvml._nvmlGetFunctionPointer_cache = None, {}
        nvml._KNOWN = nvml.KnownGpus()  # of the hosts of other tests
        space = {"out": {}, "told": told, "in_fork": in_fork, "VARIABLES": VARIABLES}
        exec(IN_A_PROCESS + code, space)
        return space["out"]

    return in_fork(work)
