"""Hosts with GPUs of both vendors: which driver a claim works with, and all drivers for viewers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .. import settings
from ..argument_style import ArgumentStyle
from ..coordination.holders import gpus_of_scope
from ..devices import vendor_of
from ..errors import NoDriverError, UnsatisfiableRequestError
from ..sysfs import devices, tree
from .kernel import has_nvidia_gpu
from .kfd import KfdDriver, may_be_integrated

if TYPE_CHECKING:
    from .base import Driver


NAMES = {"nvidia": "NVIDIA", "amd": "AMD"}
"""The names of vendors in messages."""


def meant_vendor(environ: Mapping[str, str], prefer: str | None = None) -> str | None:
    """The vendor whose GPUs this process has been given, or ``prefer``; None if nothing tells.

    A claim inside another one keeps to the vendor of that. After ``prefer`` comes the GPU for which an engine started
    this process, and AMD where ROCR_VISIBLE_DEVICES has UUIDs, as claims set it. CUDA_VISIBLE_DEVICES does not tell:
    HIP reads it too.
    """
    around = gpus_of_scope(environ.get("SAFE_GPU_SCOPE", ""))
    if around:
        return vendor_of(around[0])
    if prefer is not None:
        return prefer
    expected = environ.get("SAFE_GPU_EXPECT")
    if expected:
        return vendor_of(expected)
    named = environ.get("ROCR_VISIBLE_DEVICES", "").strip().upper().startswith("GPU-")
    return "amd" if named and not settings.ignores_fence(environ) else None


def check_inside(vendor: str, spelling: type[ArgumentStyle]) -> None:
    """Refuse a vendor that is not that of the claim inside which this process runs.

    Raises:
        UnsatisfiableRequestError: it is not.
    """
    around = gpus_of_scope(os.environ.get("SAFE_GPU_SCOPE", ""))
    if around and (other := vendor_of(around[0])) != vendor:
        raise UnsatisfiableRequestError(
            f"{_asked(vendor, spelling)}, and the claim around this process (SAFE_GPU_SCOPE) holds {NAMES[other]} "
            f"GPUs: leave {spelling.option('vendor')} out, or make the claim outside",
            value=vendor,
        )


def lacking(vendor: str, driver: str, spelling: type[ArgumentStyle]) -> UnsatisfiableRequestError:
    """The error of a claim for a vendor of which a driver has no GPUs."""
    if driver == "auto":
        text = f"and this host has none: leave {spelling.option('vendor')} out"
    else:
        text = f"and SAFE_GPU_DRIVER={driver} has none: leave {spelling.option('vendor')} out, or unset SAFE_GPU_DRIVER"
    return UnsatisfiableRequestError(f"{_asked(vendor, spelling)}, {text}", value=vendor)


def _asked(vendor: str, spelling: type[ArgumentStyle]) -> str:
    return f"{spelling.setting('vendor', spelling.value(vendor))} asks for {NAMES[vendor]} GPUs"


def open_of(vendor: str, open_nvidia: Callable[[], Driver], spelling: type[ArgumentStyle]) -> Driver:
    """The driver of the vendor that was chosen.

    Raises:
        UnsatisfiableRequestError: this host has GPUs of the other vendor only.
        NoDriverError: it has no driver at all, or the one that was chosen does not work.
    """
    if vendor == "amd":
        from .nvidia_smi import find_nvidia_smi
        from .nvml import why_missing

        if not devices(tree()) and (why_missing() is None or find_nvidia_smi() is not None):
            raise lacking(vendor, "auto", spelling)
        return KfdDriver()
    try:
        return open_nvidia()
    except NoDriverError as err:
        if err.driver == "auto" and devices(tree()):  # it is missing
            raise lacking(vendor, "auto", spelling) from err
        raise


def open_first(prefer: str | None, open_nvidia: Callable[[], Driver], spelling: type[ArgumentStyle]) -> Driver:
    """The driver of a process that chose no vendor, on a host where the kernel's AMD driver is loaded.

    NVIDIA's is the first, unless this process has been given AMD GPUs (``prefer``, or :func:`meant_vendor`). AMD's is
    taken only where there are no NVIDIA GPUs. Whether they are free does not matter: programs are built for one vendor.

    Raises:
        NoDriverError: there are NVIDIA GPUs, and their driver does not work.
    """
    if not devices(tree()):
        return open_nvidia()
    vendor = meant_vendor(os.environ, prefer)
    if vendor == "amd":
        return KfdDriver()
    try:
        driver = open_nvidia()
        is_first = vendor is not None or bool(driver.snapshot().gpus)
    except NoDriverError as err:
        if _is_of_other_vendor(err):
            return KfdDriver()
        if _has_only_graphics():
            raise
        way_out = spelling.setting("vendor", spelling.value("amd"))
        raise NoDriverError(f"{err} (this host has AMD GPUs too: {way_out})", driver=err.driver) from err
    if is_first:
        return driver
    driver.close()
    return KfdDriver()


def open_each(open_nvidia: Callable[[], Driver]) -> tuple[list[Driver], list[str]]:
    """The drivers of all vendors of which this host has GPUs, and what is wrong with those that do not work.

    The integrated graphics of a processor are left out where there are NVIDIA GPUs.

    Raises:
        NoDriverError: there are no AMD GPUs, and NVIDIA's driver is missing or does not work.
    """
    if not devices(tree()):
        return [open_nvidia()], []
    try:
        nvidia = open_nvidia()
        if _has_only_graphics() and nvidia.snapshot().gpus:
            return [nvidia], []
    except NoDriverError as err:
        return [KfdDriver()], [] if _is_of_other_vendor(err) else [str(err)]
    return [nvidia, KfdDriver()], []


def _has_only_graphics() -> bool:
    return all(map(may_be_integrated, devices(tree()) or ()))


def _is_of_other_vendor(err: NoDriverError) -> bool:
    """Whether NVIDIA's driver does not work because the host has no NVIDIA GPUs. A cluster may install one image on
    all hosts, with libraries of both vendors."""
    is_missing = err.driver == "auto"
    return not tree().exists("dev/nvidiactl") and (is_missing or not has_nvidia_gpu())
