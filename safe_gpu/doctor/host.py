"""The host that checks look at."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from functools import cached_property

from ..coordination.state_dir import state_dir_path
from ..drivers import open_driver
from ..drivers.base import Driver
from ..errors import PolicyError, SafeGpuError, StateDirError
from ..gpus.devices import Gpu, HostSnapshot
from ..gpus.vendors import VENDORS, Vendor
from ..schedulers.job import JobContext, current


def named(labels: Iterable[str]) -> str:
    """Return ``GPU 0,1``."""
    return f"GPU {','.join(labels)}"


def labels(gpus: Iterable[Gpu]) -> str:
    """Return ``GPU 0,1``."""
    return named(gpu.label for gpu in gpus)


class CheckedHost:
    """The host that is checked.

    Args:
        environ: the environment that is checked; None is this process's.

    Attributes:
        path: the state directory.
        driver: the driver that a claim would use, once ``snapshot`` was asked for; None if there is none.
        driver_error: why there is no driver; "" if there is one.
        poll_seconds: how long opening and polling the driver took.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self.environ = os.environ if environ is None else environ
        try:
            self.path = state_dir_path()
        except (StateDirError, PolicyError) as err:  # the checks of the variables and of the policy report it
            self.path = os.path.abspath(err.path)
        self.driver: Driver | None = None
        self.driver_error = ""
        self.poll_seconds = 0.0

    @cached_property
    def snapshot(self) -> HostSnapshot:
        """One poll of the driver, shared by all checks; of no GPU without a driver."""
        began = time.monotonic()
        try:
            self.driver = open_driver()
            snapshot = self.driver.detailed(self.driver.snapshot())
        except SafeGpuError as err:
            self.driver_error = str(err)
            return HostSnapshot(())
        self.poll_seconds = time.monotonic() - began
        return snapshot

    @property
    def vendor(self) -> Vendor:
        """That of the GPUs that a claim would get."""
        return VENDORS[self.snapshot.vendor]

    def label(self, uuid: str) -> str:
        """Return how people name a GPU; one that the driver does not show by its UUID."""
        gpu = self.snapshot.by_uuid(uuid)
        return uuid if gpu is None else gpu.label

    def named(self, uuids: Iterable[str]) -> str:
        """Return ``GPU 0,1``."""
        return named(map(self.label, uuids))

    @cached_property
    def job(self) -> JobContext:
        """The batch job and the rank of this process."""
        return current(self.environ)

    def close(self) -> None:
        """Close the driver."""
        if self.driver is not None:
            self.driver.close()
