"""What a check is, and the host as checks see it: each fact is fetched once, when the first check asks for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ..coordination.files import state_dir_path
from ..errors import SafeGpuError

if TYPE_CHECKING:
    from ..devices import Gpu, HostSnapshot
    from ..drivers.base import Driver
    from ..schedulers import JobContext
    from ..status import HostStatus

__all__ = ["Check", "Finding", "Host", "failed", "labels", "passed", "skipped", "warning"]


@dataclass(frozen=True)
class Finding:
    """What a check found: ``status`` is passed, warning, failed or skipped; ``fix`` is one line, "" if none is due."""

    status: str
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Check:
    """A finding with the name of its check."""

    name: str
    status: str
    detail: str
    fix: str = ""


def passed(detail: str) -> Finding:
    """All is well; ``detail`` says what was looked at."""
    return Finding("passed", detail)


def skipped(detail: str) -> Finding:
    """Nothing to check here, and why."""
    return Finding("skipped", detail)


def warning(detail: str, fix: str) -> Finding:
    """It works, but not as well or not as safely as people expect."""
    return Finding("warning", detail, fix)


def failed(detail: str, fix: str) -> Finding:
    """Claims fail, or do not protect."""
    return Finding("failed", detail, fix)


def labels(gpus: list[Gpu]) -> str:
    """``GPU 3`` or ``GPUs 0,1,3:1``."""
    return f"GPU{'s' if len(gpus) > 1 else ''} {','.join(gpu.label for gpu in gpus)}"


class Host:
    """The host that is checked.

    Args:
        root: where the files of the kernel and of the system are read (``proc/...``, ``etc/...``).
        environ: the environment that is checked; None is this process's.

    Attributes:
        path: the state directory.
        driver_error: why there is no driver; "" where there is one.
        poll_seconds: how long opening and polling it took.
    """

    def __init__(self, root: str = "/", environ: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.environ = os.environ if environ is None else environ
        self.path = state_dir_path()
        self.driver_error = ""
        self.poll_seconds = 0.0

    def read(self, name: str) -> str | None:
        """The text of a file under the root, without trailing blanks; None where it cannot be read."""
        try:
            with open(os.path.join(self.root, name), encoding="utf-8", errors="replace") as file:
                return file.read().rstrip()
        except OSError:
            return None

    def link(self, name: str) -> str | None:
        """Where a symbolic link under the root points; None where it cannot be read."""
        try:
            return os.readlink(os.path.join(self.root, name))
        except OSError:
            return None

    @cached_property
    def _polled(self) -> tuple[Driver, HostSnapshot] | None:
        import time

        from ..drivers import open_driver

        began = time.monotonic()
        try:
            driver = open_driver()
            snapshot = driver.snapshot()
        except SafeGpuError as err:
            self.driver_error = str(err)
            return None
        self.poll_seconds = time.monotonic() - began
        return driver, snapshot

    @property
    def driver(self) -> Driver | None:
        """The driver, as a claim would open it."""
        return self._polled[0] if self._polled else None

    @property
    def snapshot(self) -> HostSnapshot | None:
        """One poll of it, shared by all checks."""
        return self._polled[1] if self._polled else None

    @cached_property
    def status(self) -> HostStatus:
        """Who has claimed what and who waits; without a driver, who waits."""
        from ..devices import HostSnapshot
        from ..status import status_of

        return status_of(self.snapshot or HostSnapshot(()))

    @cached_property
    def job(self) -> JobContext:
        """The batch job and rank that this process is."""
        from ..schedulers import current

        return current(self.environ)

    @property
    def simulated(self) -> bool:
        """Whether the GPUs are not real."""
        return self.driver is not None and not self.driver.uses_cuda

    def close(self) -> None:
        """End the driver's session."""
        if "_polled" in self.__dict__ and self.driver is not None:
            self.driver.close()
