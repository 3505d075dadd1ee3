"""The guard around every test: none touches a real GPU unless it says so, none sees the outer job, and nothing stays.

What stays of a test is a variable, a binding, a thread, a descriptor or the handler of a signal in this process. Of a
claim it is more; of a whole run it is a process.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.gpus import DRIVER_LIBRARIES, DriverLibraries

import safe_gpu
from safe_gpu.affinity.memory_policy import MemoryPolicy, get_policy
from safe_gpu.claim import owner
from safe_gpu.coordination.holders import living_claims
from safe_gpu.coordination.queue import waiting_tickets
from safe_gpu.errors import StateDirError
from safe_gpu.schedulers.job import SCHEDULERS
from safe_gpu.settings import variables

_state_dirs = itertools.count()

_OF_SCHEDULERS = {name for scheduler in SCHEDULERS for name in scheduler.variables}

# What a scheduler, a launcher or the person who runs the tests has set must not decide their outcome.
OUTER_PREFIXES = (
    *"SAFE_GPU_ CUDA_ ROCR_ HIP_ SLURM_ SGE_ PBS_ LSB_ FLUX_ _CONDOR_".split(),
    *"OMPI_ PMI_ PMIX_ MPI_ MV2_ JSM_ HOROVOD_ TORCHELASTIC_".split(),
    *(name.removesuffix("*") for name in _OF_SCHEDULERS if name.endswith("*")),
)
OUTER_NAMES = {
    *("LOCAL_RANK", "LOCAL_SIZE", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "FAKE_GPU_DIR"),
    *(name for name in _OF_SCHEDULERS if not name.endswith("*")),
}


def is_of_an_outer_job(name: str) -> bool:
    """Return whether no test inherits this variable."""
    return name.startswith(OUTER_PREFIXES) or name in OUTER_NAMES


class ProcessState(NamedTuple):
    """This process now; ``masks`` are those of the CPUs of each thread, and ``policy`` is the caller's."""

    environment: dict[str, str]
    masks: dict[str, set[int]]
    policy: MemoryPolicy | None
    threads: list[str]
    descriptors: dict[str, str]
    handlers: dict[int, Any]

    def changes(self, before: ProcessState) -> dict[str, object]:
        """What is different now, by its name: the earlier value and this one, or of a mapping only what differs.

        A thread that has ended since then, or was only about to end, counts for nothing.
        """
        found: dict[str, object] = {}
        for name, then, now in zip(self._fields, before, self, strict=True):
            if isinstance(then, dict) and isinstance(now, dict):
                keys = then.keys() & now.keys() if name == "masks" else then.keys() | now.keys()
                pairs = {key: (then.get(key), now.get(key)) for key in keys}
                if different := {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}:
                    found[name] = different
            elif then != now:
                found[name] = (then, now)
        return found


def process_state() -> ProcessState:
    """Return what this process has now."""
    masks, descriptors = {}, {}
    for tid in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # join() returns before the kernel has ended the thread
            masks[tid] = os.sched_getaffinity(int(tid))
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            descriptors[number] = os.readlink(f"/proc/self/fd/{number}")
    policy = get_policy()
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    threads = sorted(one.name for one in threading.enumerate())
    # SIGALRM is pytest-timeout's, which lets it go when a test fails.
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals() - {signal.SIGALRM}}
    return ProcessState(environment, masks, policy, threads, descriptors, handlers)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Fail a test that leaves a variable, a binding, a thread or a descriptor in this process."""
    before = process_state()
    yield
    if process_state().changes(before):
        gc.collect()  # what a traceback keeps open
        for thread in threading.enumerate():
            if thread.name not in before.threads:
                thread.join(10)  # it may be about to end
        if stays := process_state().changes(before):
            pytest.fail(f"this stays of the test: {stays}", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def no_process_stays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a run that leaves processes. One that has just been killed has some time to end."""
    yield
    place = str(tmp_path_factory.getbasetemp())
    deadline = time.monotonic() + 10
    while (left := _started_in(place)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == [], "these processes stay, and the tests that started them"


def _started_in(place: str) -> list[tuple[str, str]]:
    """Return the programs whose state directory is below a directory, and the test in which each was started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            lines = (path / "environ").read_bytes().decode(errors="replace").split("\0")
            environment = dict(line.split("=", 1) for line in lines if "=" in line)
            if path.name != str(os.getpid()) and environment.get("SAFE_GPU_DIR", "").startswith(f"{place}/"):
                command = (path / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                found.append((command[:80], environment.get("PYTEST_CURRENT_TEST", "")))
    return found


@pytest.fixture(autouse=True)
def driver_libraries(
    nothing_stays: None,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[DriverLibraries]:
    """Keep tests off real GPUs, off what other programs of this host share and out of the outer job's environment.

    In this process loading a driver library fails the test; child processes find unusable files in their place.
    """
    libraries = DriverLibraries()
    fakes = {name: os.environ[name] for name in ("FAKE_GPU_DIR", "SAFE_GPU_FSROOT") if name in os.environ}
    for name in list(os.environ):
        if is_of_an_outer_job(name):
            monkeypatch.delenv(name)
    states = tmp_path_factory.getbasetemp() / "state"  # far cheaper than a temporary directory of pytest's for each
    states.mkdir(exist_ok=True)
    monkeypatch.setenv("SAFE_GPU_DIR", str(states / str(next(_state_dirs))))
    monkeypatch.setenv("SAFE_GPU_LEGACY_LOCK", "never")  # whoever claims with safe-gpu 1.x or 2.0 here
    monkeypatch.setenv("SAFE_GPU_TEST_SIMULATED", "1")  # on purpose, also where there is a real driver
    if request.node.get_closest_marker("gpu"):
        for name, value in fakes.items():  # the tests of real GPUs are themselves tested on fakes
            monkeypatch.setenv(name, value)
        yield libraries
        return

    etc = f"{os.environ['SAFE_GPU_DIR']}-etc"  # is not there, so that the limits of this host do not count
    monkeypatch.setenv("SAFE_GPU_TEST_ETC", etc)
    monkeypatch.setattr(variables, "HOST_FILES", (f"{etc}/config.ini", f"{etc}/policy.ini"))

    class GuardedCDLL(ctypes.CDLL):
        def __init__(self, name: str | None, mode: int = ctypes.DEFAULT_MODE, *args: Any, **kwargs: Any) -> None:
            asks_only = mode & os.RTLD_NOLOAD
            super().__init__(name if name is None or asks_only else libraries.path(name), mode, *args, **kwargs)

    monkeypatch.setattr(ctypes, "CDLL", GuardedCDLL)
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:dgx-a100")
    unusable = tmp_path_factory.getbasetemp() / "no-gpu"
    unusable.mkdir(exist_ok=True)
    for name in DRIVER_LIBRARIES:
        (unusable / name).touch()  # the loader stops at "file too short" and looks no further
    monkeypatch.setenv("LD_LIBRARY_PATH", str(unusable), prepend=":")
    yield libraries


@contextmanager
def untouched() -> Iterator[None]:
    """That a claim leaves nothing behind."""
    process, before, entries = process_state(), _traces(), _entries()
    yield
    assert not process_state().changes(process)
    now = _traces()
    for what, then in before.items():
        assert now[what] == then, what
    assert not _entries() - entries


def _traces() -> dict[str, object]:
    state = Path(os.environ["SAFE_GPU_DIR"])
    try:
        living = [entry.name for entry in (*living_claims(), *waiting_tickets())]
    except StateDirError:  # the test has made it so
        living = []
    contexts = sorted(path.name for path in state.glob("simulated/*/*"))
    return {"entries": living, "contexts": contexts, "owners": (owner.current_owner(), safe_gpu.gpu_owner)}


def _entries() -> set[str]:
    state = Path(os.environ["SAFE_GPU_DIR"])
    return {path.name for part in ("claims", "queue") for path in state.glob(f"{part}/*")}


def is_locked(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (FileNotFoundError, NotADirectoryError):
        pass
    return False
