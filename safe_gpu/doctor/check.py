"""The host that checks look at, what a check finds, and how findings are shown."""

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from textwrap import TextWrapper

from ..drivers import open_driver
from ..drivers.base import Driver
from ..drivers.patience import Patience, why_late
from ..errors import PolicyError, SafeGpuError, StateDirError
from ..gpus.devices import Gpu, HostSnapshot
from ..gpus.vendors import FIRST, VENDORS, Vendor
from ..host.awaiting import Awaited, Tell, Watchdog
from ..host.foreign_files import printable
from ..host.programs import Failed, TooLate, call_in_child
from ..settings.variables import is_simulated
from ..topology.files import Files
from ..wording.text import paint, plural, wrapped

PATIENCE = 30.0
"""Seconds that a driver has for its first answer. Without persistence mode, eight GPUs can take over 20 s."""


def labels(gpus: Iterable[Gpu]) -> str:
    """Return ``GPU 0,1``."""
    return f"GPU {','.join(gpu.label for gpu in gpus)}"


class CheckedHost:
    """The host that is checked.

    Args:
        environ: the environment that is checked; None is this process's.
        tell: takes a line where the driver takes long; None tells nobody.

    Attributes:
        driver: the driver that a claim would use, once ``snapshot`` was asked for; None if there is none.
        driver_error: why there is no driver; "" if there is one.
        settings_error: the same, if the driver was not even looked for.
        driver_hangs: whether it does not answer.
        poll_seconds: how long opening and polling the driver took.
    """

    def __init__(self, environ: Mapping[str, str] | None = None, tell: Tell | None = None) -> None:
        self.environ: Mapping[str, str] = os.environ
        if environ is not None:
            self.environ = environ
        self._tell = tell or _say_nothing
        self.driver: Driver | None = None
        self.driver_error = ""
        self.settings_error: SafeGpuError | None = None
        self.driver_hangs = False
        self.poll_seconds = 0.0

    @cached_property
    def snapshot(self) -> HostSnapshot:
        """One poll of the driver, shared by all checks; of no GPU without a driver."""
        if not is_simulated(self.environ) and self._hangs():
            self.driver_hangs = True
            self.driver_error = f"the driver does not answer: it has kept a child process waiting for {PATIENCE:g} s"
            return HostSnapshot(())
        began = time.monotonic()
        try:
            self.driver = Patience(self._tell, deadline=began).opened(open_driver)
            snapshot = self.driver.examined(self.driver.detailed(self.driver.snapshot()))
        except (PolicyError, StateDirError) as err:
            self.settings_error = err
            return HostSnapshot(())
        except SafeGpuError as err:
            self.driver_error = str(err)
            return HostSnapshot(())
        except Exception as err:  # such as of another package with the name of ours
            self.driver_error = f"asking the driver failed: {type(err).__name__}: {err}"
            return HostSnapshot(())
        self.poll_seconds = time.monotonic() - began
        return snapshot

    def _hangs(self) -> bool:
        """Return whether the driver keeps a child process waiting. That one can be left; this one could not even
        end."""
        awaited = Awaited("the GPU driver", self._tell, lambda: why_late(self._likely_vendor.drivers[0]))
        try:
            with Watchdog(awaited):
                call_in_child(f"{__name__} poll", env=self.environ, timeout=PATIENCE, with_packages=True)
        except TooLate:
            return True
        except (Failed, OSError):
            return False  # the same is found out here
        return False

    @property
    def vendor(self) -> Vendor:
        """That of the GPUs that a claim would get, or of a driver that shows none, or does not work."""
        for vendor in VENDORS.values():
            if self.snapshot.driver in vendor.drivers:
                return vendor
        if not self.snapshot.driver:
            return self._likely_vendor
        return VENDORS[self.snapshot.vendor]

    @property
    def _likely_vendor(self) -> Vendor:
        """The vendor whose driver is chosen or loaded, where no driver works."""
        for vendor in VENDORS.values():
            if self.environ.get("SAFE_GPU_DRIVER") in vendor.drivers:
                return vendor
        for vendor in VENDORS.values():
            if is_loaded(vendor):
                return vendor
        return VENDORS[FIRST]

    def close(self) -> None:
        """Close the driver."""
        if self.driver is not None:
            self.driver.close()


def is_loaded(vendor: Vendor) -> bool:
    """Return whether a kernel driver of this vendor is loaded, of the host where this is a container."""
    return any(Files().exists(path) for path in vendor.loaded)


def _say_nothing(line: str) -> None:
    return


def poll() -> None:
    """Poll the driver, in a child process."""
    driver = open_driver()
    driver.examined(driver.detailed(driver.snapshot()))


@dataclass(frozen=True)
class Check:
    """What a check has found: ``status`` is passed, warning, failed or skipped; ``fix`` is one line or ""."""

    status: str
    detail: str
    fix: str = ""
    name: str = ""


def passed(detail: str) -> Check:
    """Claims work; the detail says what was checked."""
    return Check("passed", detail)


def skipped(detail: str) -> Check:
    """The check does not apply; the detail says why."""
    return Check("skipped", detail)


def warning(detail: str, fix: str) -> Check:
    """Claims work, but less well or less safely than users expect."""
    return Check("warning", detail, fix)


def failed(detail: str, fix: str) -> Check:
    """Claims fail, or do not protect GPUs."""
    return Check("failed", detail, fix)


_COLORS = {"failed": "red", "warning": "yellow", "passed": "green", "skipped": "dim"}  # in the order of a full report

_WRONG = ("failed", "warning")

_INDENT = " " * 9


def render_checks(checks: Sequence[Check], *, color: bool, width: int, verbose: bool = False) -> str:
    """Return what is wrong, worst first and each with its fix, and a last line with the number of checks by status.

    Args:
        checks: the checks in the order of the report.
        color: paint the status and ``fix:``.
        width: the columns of the terminal. A word of a fix is never cut, so that it can be copied.
        verbose: list the checks that passed or were skipped too.
    """
    listed: Iterable[str] = _WRONG
    if verbose:
        listed = _COLORS
    lines = []
    for status in listed:
        for check in checks:
            if check.status == status:
                lines += _lines_of(check, color=color, width=width)
    if lines:
        lines.append("")
    lines.append(_summary(checks, verbose=verbose))
    return "\n".join(lines)


def _lines_of(check: Check, *, color: bool, width: int) -> list[str]:
    first, *others = wrapped(f"{check.name}: {check.detail}", width, _INDENT)
    status = paint(check.status, _COLORS[check.status], color)
    lines = [status + first[len(check.status) :], *others]
    if check.fix:
        fixes = TextWrapper(
            width, initial_indent=_INDENT, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False
        )
        text = fixes.fill(printable(f"fix: {check.fix}"))
        lines.append(text.replace("fix:", paint("fix:", "bold", color), 1))
    return lines


def _summary(checks: Sequence[Check], *, verbose: bool) -> str:
    """Return "3 passed, 1 failed, 2 warnings"."""
    numbers = Counter(check.status for check in checks)
    counts = [f"{numbers[status]} {status}" for status in ("passed", "skipped", "failed") if numbers[status]]
    if numbers["warning"]:
        counts.append(plural(numbers["warning"], "warning"))
    summary = ", ".join(counts)
    if not verbose:
        summary += " (-v lists all)"
    return summary
