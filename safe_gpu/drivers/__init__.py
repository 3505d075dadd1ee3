"""Where knowledge of the GPUs comes from, and the one place that chooses among the sources.

Nothing here knows claims: a driver reports what it sees, and ``selection`` judges it.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ..errors import NoDriverError, UnsatisfiableRequestError
from ..gpus.vendors import FIRST, VENDORS
from .presets import preset as find_preset

if TYPE_CHECKING:
    from .base import Driver

__all__ = ["may_be_several", "open_driver", "open_drivers", "opened_driver"]

# The drivers, with the vendor of those whose GPUs are all of one.
_KINDS = {"auto": None, **{name: key for key, vendor in VENDORS.items() for name in vendor.drivers}, "simulated": None}


def open_driver(name: str | None = None, *, vendor: str | None = None, prefer: str | None = None) -> Driver:
    """Open a driver by name: ``auto``, one of ``Vendor.drivers``, or ``simulated:PRESET``.

    Args:
        name: None means what ``SAFE_GPU_DRIVER`` says, else ``auto``: NVML, or nvidia-smi where NVML's library or
            Python module is missing, or the driver of the next vendor where there are no NVIDIA GPUs. A driver that
            is there and does not work is reported, not worked around.
        vendor: a key of ``VENDORS``; None leaves the choice to the host and to the claim around this process.
        prefer: the same where a host has GPUs of several and this is not inside a claim; never an error.

    Raises:
        UnsatisfiableRequestError: no such driver, or no such preset, or it has no GPUs of that vendor, or the claim
            around this process is of another one.
        NoDriverError: the driver is missing or does not work.
    """
    kind, preset = _parsed(name)
    if vendor is not None:
        from .vendors import check_inside, lacking

        check_inside(vendor)
        if _KINDS[kind] not in (None, vendor):
            raise lacking(vendor, kind)
    if kind == "auto":
        return _auto(vendor, prefer)
    if kind == "simulated":
        return _simulated(preset, vendor, prefer)
    if kind == "nvml":
        from .nvidia.nvml import NvmlDriver

        return NvmlDriver()
    if kind == "kfd":
        from .kfd import KfdDriver

        return KfdDriver()
    if kind == "intel":
        from .intel import IntelDriver

        return IntelDriver()
    from .nvidia.nvidia_smi import NvidiaSmiDriver

    return NvidiaSmiDriver()


def open_drivers() -> tuple[list[Driver], list[str]]:
    """Open the drivers of all GPUs that ``SAFE_GPU_DRIVER`` names, one for each vendor, for viewers such as ``status``.

    Returns:
        The drivers, in the order of ``VENDORS``, and sentences on those that do not work.

    Raises:
        UnsatisfiableRequestError: no such driver, or no such preset. NoDriverError: none works.
    """
    kind, preset = _parsed(None)
    if kind == "auto" and _may_have_others():
        from .vendors import open_each

        return open_each(_nvidia)
    if kind == "simulated":
        from .simulated import SimulatedDriver

        return [SimulatedDriver(preset, vendor=vendor) for vendor in find_preset(preset).vendors], []
    return [open_driver()], []


def may_be_several() -> bool:
    """Return whether :func:`open_drivers` may open more than one driver. It opens none."""
    kind, preset = _parsed(None)
    if kind == "simulated":
        return len(find_preset(preset).vendors) > 1
    return kind == "auto" and _may_have_others()


def _parsed(name: str | None) -> tuple[str, str]:
    name = (os.environ.get("SAFE_GPU_DRIVER") if name is None else name) or "auto"
    kind, _, preset = name.partition(":")
    if kind not in _KINDS or (preset and kind != "simulated"):
        choices = ", ".join(_KINDS) + ":PRESET"
        raise UnsatisfiableRequestError(f"There is no driver {name!r}: choose one of {choices}.", value=name)
    return kind, preset


def _may_have_others() -> bool:
    """Return whether a kernel driver of another than the first vendor is loaded. Every claim asks this, so it is one or
    two questions to the file system for each vendor."""
    root = os.environ.get("SAFE_GPU_FSROOT") or "/"
    paths = (path for key, vendor in VENDORS.items() if key != FIRST for path in vendor.loaded)
    return any(os.path.exists(os.path.join(root, path)) for path in paths)


def _auto(vendor: str | None, prefer: str | None) -> Driver:
    if vendor is not None:
        from .vendors import open_of

        return open_of(vendor, _nvidia)
    if _may_have_others():
        from .vendors import open_first

        return open_first(prefer, _nvidia)
    return _nvidia(only=True)


def _nvidia(*, only: bool = False) -> Driver:
    """NVIDIA's driver; ``only`` if that of no other vendor is loaded."""
    from .nvidia.nvml import NvmlDriver, why_missing

    reason = why_missing()
    if reason is None:
        return NvmlDriver()

    from .nvidia.nvidia_smi import NvidiaSmiDriver, find_nvidia_smi

    if find_nvidia_smi() is None:
        raise NoDriverError(
            f"There is no {'' if only else 'NVIDIA '}GPU driver here: {reason}, and nvidia-smi is not on PATH"
            f"{'; nor is the driver of AMD or Intel GPUs loaded' if only else ''}. On a GPU host, install the driver, "
            "for NVIDIA also nvidia-ml-py; to try safe_gpu without a GPU, set SAFE_GPU_DRIVER=simulated:dgx-a100.",
            driver="auto",
        )
    return NvidiaSmiDriver()


def _simulated(preset: str, vendor: str | None, prefer: str | None) -> Driver:
    from .simulated import SimulatedDriver

    vendors = find_preset(preset).vendors
    if vendor is not None and vendor not in vendors:
        from .vendors import lacking

        raise lacking(vendor, f"simulated:{preset}")
    if vendor is None and len(vendors) > 1:
        from .vendors import meant_vendor

        vendor = meant_vendor(os.environ, prefer)
    return SimulatedDriver(preset, vendor=vendor)


class opened_driver:
    """``with opened_driver() as driver``: the driver that SAFE_GPU_DRIVER names, closed at the end.

    ``vendor`` and ``prefer`` are those of :func:`open_driver`.

    Raises:
        UnsatisfiableRequestError: this is not Linux; or as :func:`open_driver`, NoDriverError too.
    """

    def __init__(self, vendor: str | None = None, *, prefer: str | None = None) -> None:
        self._vendor = vendor
        self._prefer = prefer

    def __enter__(self) -> Driver:
        if sys.platform != "linux":
            raise UnsatisfiableRequestError(f"safe_gpu works on Linux only, and this is {sys.platform}")
        self._driver = open_driver(vendor=self._vendor, prefer=self._prefer)
        return self._driver

    def __exit__(self, *exc: object) -> None:
        self._driver.close()
