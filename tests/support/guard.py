"""The guard around every test: none touches a real GPU unless it says so, and none sees the outer job."""

import ctypes
import gc
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.gpus import DRIVER_LIBRARIES, DriverLibraries
from support.process_state import process_state

from safe_gpu.settings import variables

_state_dirs = itertools.count()

# What a scheduler, a launcher or the person who runs the tests has set must not decide their outcome.
OUTER_PREFIXES = (
    *("SAFE_GPU_", "CUDA_", "ROCR_", "HIP_"),
    *("SLURM_", "SGE_", "PBS_", "LSB_", "FLUX_", "_CONDOR_"),
    *("OMPI_", "PMI_", "PMIX_", "MPI_", "MV2_", "JSM_", "HOROVOD_", "TORCHELASTIC_"),
)
OUTER_NAMES = (
    *("LOCAL_RANK", "LOCAL_SIZE", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "FAKE_GPU_DIR"),
    *("JOB_ID", "NSLOTS", "NHOSTS", "PE_HOSTFILE"),
)


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
        if name.startswith(OUTER_PREFIXES) or name in OUTER_NAMES:
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

    etc = str(tmp_path_factory.getbasetemp() / "etc")  # is not there, so that the limits of this host do not count
    monkeypatch.setenv("SAFE_GPU_TEST_ETC", etc)
    monkeypatch.setattr(variables, "HOST_FILES", (f"{etc}/config.ini", f"{etc}/policy.ini"))

    class GuardedCDLL(ctypes.CDLL):
        def __init__(self, name: str | None, mode: int = ctypes.DEFAULT_MODE, *args: Any, **kwargs: Any) -> None:
            asks_only = mode & os.RTLD_NOLOAD
            super().__init__(name if name is None or asks_only else libraries.path(name), mode, *args, **kwargs)

    monkeypatch.setattr(ctypes, "CDLL", GuardedCDLL)
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:dgx-a100")
    monkeypatch.setenv(
        "LD_LIBRARY_PATH",
        ":".join(filter(None, [str(_unusable_libraries(tmp_path_factory)), os.environ.get("LD_LIBRARY_PATH")])),
    )
    yield libraries


def _unusable_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.getbasetemp() / "no-gpu"
    if not directory.exists():
        directory.mkdir()
        for name in DRIVER_LIBRARIES:
            (directory / name).touch()  # the loader stops at "file too short" and looks no further
    return directory
