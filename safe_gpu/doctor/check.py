"""The types of a check, and the host that checks read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from .. import drivers
from ..coordination.state_dir import state_dir_path
from ..drivers import may_be_several
from ..errors import PolicyError, SafeGpuError, StateDirError
from ..gpus.devices import Gpu, HostSnapshot
from ..gpus.vendors import FIRST, VENDORS, Vendor
from ..host.foreign_files import read_start
from ..schedulers.job import JobContext, current

if TYPE_CHECKING:
    from ..drivers.base import Driver
    from ..status.facts import HostStatus

_MOST = 1 << 20  # characters; mountinfo and the tables of tmpfiles.d can be long


@dataclass(frozen=True)
class Finding:
    """The result of a check: ``status`` is passed, warning, failed or skipped; ``fix`` is one line or ""."""

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
    """Return a finding of no problem; ``detail`` says what was checked."""
    return Finding("passed", detail)


def skipped(detail: str) -> Finding:
    """Return a finding that the check does not apply; ``detail`` says why."""
    return Finding("skipped", detail)


def warning(detail: str, fix: str) -> Finding:
    """Return a finding that claims work, but less well or less safely than users expect."""
    return Finding("warning", detail, fix)


def failed(detail: str, fix: str) -> Finding:
    """Return a finding that claims fail, or do not protect GPUs."""
    return Finding("failed", detail, fix)


def gpus_named(labels: Sequence[str]) -> str:
    """Return ``GPU 3`` or ``GPUs 0,1,amd:2``."""
    return f"GPU{'s' if len(labels) > 1 else ''} {','.join(labels)}"


def labels(gpus: Iterable[Gpu]) -> str:
    """Return the same for GPUs of one vendor."""
    return gpus_named([gpu.label for gpu in gpus])


class CheckedHost:
    """The host that is checked.

    Args:
        root: the directory that has ``proc/...``, ``etc/...`` and so on.
        environ: the environment that is checked; None is this process's.

    Attributes:
        path: the state directory.
        driver: the driver that a claim would use, once ``snapshot`` was asked for; None if there is none.
        driver_error: why there is no driver; "" if there is one.
        poll_seconds: how long opening and polling the driver took.
    """

    def __init__(self, root: str = "/", environ: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.environ = os.environ if environ is None else environ
        try:
            self.path = state_dir_path()
        except (StateDirError, PolicyError) as err:  # the checks of the variables and of the policy report it
            self.path = os.path.abspath(err.path)
        self.driver: Driver | None = None
        self.driver_error = ""
        self.poll_seconds = 0.0

    def read(self, name: str) -> str | None:
        """Return the text of a file under the root, its first MiB, without trailing blanks; None if it cannot be
        read."""
        data = read_start(os.path.join(self.root, name), _MOST)
        return None if data is None else os.fsdecode(data).rstrip()

    def link(self, name: str) -> str | None:
        """Return the target of a symbolic link under the root; None if it cannot be read."""
        try:
            return os.readlink(os.path.join(self.root, name))
        except OSError:
            return None

    @cached_property
    def snapshot(self) -> HostSnapshot | None:
        """One poll of the driver, shared by all checks; None without a driver."""
        import time

        began = time.monotonic()
        try:
            self.driver = drivers.open_driver()
            snapshot = self.driver.detailed(self.driver.snapshot())
        except SafeGpuError as err:
            self.driver_error = str(err)
            return None
        self.poll_seconds = time.monotonic() - began
        return snapshot

    @cached_property
    def others(self) -> tuple[list[HostSnapshot], list[str]]:
        """One poll of the driver of each other vendor of which this host has GPUs, and what is broken."""
        from ..status.gather import polls

        try:
            found, broken = polls() if may_be_several() else ([], [])
        except SafeGpuError:
            return [], []
        mine = self.snapshot.vendor if self.snapshot is not None else None
        return [one for one in found if one.gpus and one.vendor != mine], broken

    @property
    def vendor(self) -> Vendor:
        """That of the GPUs that a claim would get."""
        return VENDORS[FIRST if self.snapshot is None else self.snapshot.vendor]

    @cached_property
    def status(self) -> HostStatus:
        """The claims and the queue; only the queue without a driver."""
        from ..status.gather import status_of

        shown = [*filter(None, [self.snapshot]), *self.others[0]]
        return status_of(*(shown or [HostSnapshot(())]))

    @cached_property
    def job(self) -> JobContext:
        """The batch job and the rank of this process."""
        return current(self.environ)

    @property
    def simulated(self) -> bool:
        """Whether the GPUs are simulated."""
        return self.driver is not None and self.driver.is_simulated

    def close(self) -> None:
        """Close the driver."""
        if self.driver is not None:
            self.driver.close()


def with_snapshot(check: Callable[[CheckedHost, HostSnapshot], Finding]) -> Callable[[CheckedHost], Finding]:
    """Return a check of what the driver shows, which is skipped without one."""
    return lambda host: skipped("there is no driver") if host.snapshot is None else check(host, host.snapshot)
