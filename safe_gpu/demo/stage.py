"""The hosts of races: the GPUs that can be claimed on this host, and private simulated hosts."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..claim.free import current_verdicts
from ..claim.owner import claim_gpus, release_gpus
from ..devices import GpuRequest, GpuVerdict, HostSnapshot
from ..drivers import opened_driver
from ..errors import NoDriverError, StateDirError, UnsatisfiableRequestError
from ..runtimes.visible_devices import VisibleLimit
from ..runtimes.visible_limit import visible_limit_of
from .children import scratch_directory

DEFAULT_HOST = "dgx-a100"
"""The simulated host if SAFE_GPU_DRIVER names none."""

QUIET = logging.getLogger("safe_gpu.demo")
"""The logger of all claims, without output: the demo prints its own report."""

QUIET.propagate = False
QUIET.addHandler(logging.NullHandler())

_KIND = "simulated"


class RaceHost(NamedTuple):
    """A host before a race: one poll, the verdicts for a claim of this process, and the fence of CUDA_VISIBLE_DEVICES.

    ``obstacle`` is another reason why no claim is possible, "" if there is none.
    """

    snapshot: HostSnapshot
    verdicts: tuple[GpuVerdict, ...] = ()
    fence: VisibleLimit | None = None
    obstacle: str = ""


def wanted_host() -> str | None:
    """The simulated host that SAFE_GPU_DRIVER names; None if it names a driver of real GPUs or is not set."""
    kind, _, name = os.environ.get("SAFE_GPU_DRIVER", "").partition(":")
    return name if kind == _KIND else None


def look() -> RaceHost:
    """The host of the driver that SAFE_GPU_DRIVER names; without a driver it has no GPUs.

    Raises:
        NoDriverError: the driver that SAFE_GPU_DRIVER names does not work.
        LockTimeout, StateDirError: as for a claim.
    """
    try:
        with opened_driver() as driver:
            snapshot = driver.snapshot()
            if not snapshot.gpus:
                return RaceHost(snapshot)
            try:
                fence = visible_limit_of(snapshot, 1, driver.runtime)
            except UnsatisfiableRequestError as err:
                return RaceHost(snapshot, obstacle=str(err))
    except NoDriverError:
        if os.environ.get("SAFE_GPU_DRIVER") not in (None, "", "auto"):
            raise
        return RaceHost(HostSnapshot(()))
    return RaceHost(snapshot, current_verdicts(snapshot, GpuRequest(), fence), fence)


@contextmanager
def simulated_host(name: str) -> Iterator[None]:
    """An unused simulated host in a temporary directory, for this process and its children.

    One claim is made there and released, so that racers need not import modules.

    Raises:
        UnsatisfiableRequestError: there is no such host.
        StateDirError: locks work in no directory for temporary files.
    """
    kept = dict(os.environ)
    try:
        with _directory(name):
            yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


@contextmanager
def _directory(name: str) -> Iterator[None]:
    """Use a directory for temporary files, or one in /dev/shm if locks do not work there (a network file system)."""
    with scratch_directory("safe-gpu-demo-") as directory:
        try:
            _enter(name, directory)
        except StateDirError:
            if not os.path.isdir("/dev/shm"):
                raise
        else:
            yield
            return
    with scratch_directory("safe-gpu-demo-", "/dev/shm") as directory:
        _enter(name, directory)
        yield


def _enter(name: str, directory: str) -> None:
    for variable in list(os.environ):
        if variable.startswith(("SAFE_GPU_", "CUDA_", "ROCR_", "HIP_")):
            del os.environ[variable]
    os.environ.update(
        SAFE_GPU_DIR=directory,
        SAFE_GPU_DRIVER=f"{_KIND}:{name}",
        SAFE_GPU_LEGACY_LOCK="never",
        SAFE_GPU_TEST_SIMULATED="1",
    )
    claim_gpus(logger=QUIET, timeout=0.0, affinity=None)
    release_gpus()
