"""The hosts of races: GPUs of this host, and private simulated hosts."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from .. import errors
from ..claim.free import current_verdicts
from ..claim.functions import claim_gpus, release_gpus
from ..claim.host.visible_limit import visible_limit_of
from ..drivers import opened_driver
from ..gpus.devices import GpuVerdict, HostSnapshot
from ..gpus.vendors import VENDORS
from ..selection.request import Selection

if TYPE_CHECKING:
    from ..gpus.visible import VisibleLimit

DEFAULT_HOST = "dgx-a100"
"""The simulated host if SAFE_GPU_DRIVER names none."""

QUIET = logging.getLogger("safe_gpu.demo")
"""The logger of all claims, without output: the demo prints its own report."""

QUIET.propagate = False

QUIET.addHandler(logging.NullHandler())


class RaceHost(NamedTuple):
    """A host before a race: one poll, the verdicts for a claim of this process, and the visible limit.

    ``obstacle`` is another reason why no claim is possible, "" if there is none.
    """

    snapshot: HostSnapshot
    verdicts: tuple[GpuVerdict, ...] = ()
    visible_limit: VisibleLimit | None = None
    obstacle: str = ""


def wanted_host() -> str | None:
    """Return the simulated host that SAFE_GPU_DRIVER names; None if it names a driver of real GPUs or is not set."""
    kind, _, name = os.environ.get("SAFE_GPU_DRIVER", "").partition(":")
    return name if kind == "simulated" else None


def look() -> RaceHost:
    """Return the host of the driver that SAFE_GPU_DRIVER names; without a driver it has no GPUs.

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
                visible_limit = visible_limit_of(snapshot, 1, driver.runtime)
            except errors.UnsatisfiableRequestError as err:
                return RaceHost(snapshot, obstacle=str(err))
    except errors.NoDriverError:
        if os.environ.get("SAFE_GPU_DRIVER") not in (None, "", "auto"):
            raise
        return RaceHost(HostSnapshot(()))
    return RaceHost(snapshot, current_verdicts(snapshot, Selection(), visible_limit), visible_limit)


@contextmanager
def simulated_host(name: str) -> Iterator[None]:
    """Set up an unused simulated host in a temporary directory, for this process and its children.

    One claim is made there and released, so that racers need not import modules.

    Raises:
        UnsatisfiableRequestError: there is no such host.
        StateDirError: locks work in no directory for temporary files.
    """
    kept = dict(os.environ)
    with ExitStack() as ending:
        ending.callback(os.environ.update, kept)
        ending.callback(os.environ.clear)
        for parent in (tempfile.gettempdir(), "/dev/shm"):
            directory = ending.enter_context(tempfile.TemporaryDirectory(prefix="safe-gpu-demo-", dir=parent))
            for variable in list(os.environ):
                if variable.startswith(("SAFE_GPU_", *(name for one in VENDORS.values() for name in one.prefixes))):
                    del os.environ[variable]
            os.environ.update(
                SAFE_GPU_DIR=directory,
                SAFE_GPU_DRIVER=f"simulated:{name}",
                SAFE_GPU_LEGACY_LOCK="never",
                SAFE_GPU_TEST_SIMULATED="1",
            )
            try:
                claim_gpus(logger=QUIET, timeout=0.0, affinity=None)
                release_gpus()
                break
            except errors.StateDirError:  # locks do not work on a network's file system
                if parent == "/dev/shm":
                    raise
        yield
