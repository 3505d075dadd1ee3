"""Hosts with GPUs of several vendors: which driver a claim works with, and all drivers for viewers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ..coordination.holders import gpus_of_scope
from ..errors import NoDriverError, UnsatisfiableRequestError
from ..gpus.devices import vendor_of
from ..gpus.vendors import FIRST, VENDORS
from ..settings import variables as settings
from ..topology.files import Files
from ..topology.kfd_topology import devices
from ..wording import argument_style as style

if TYPE_CHECKING:
    from .base import Driver


def meant_vendor(environ: Mapping[str, str], prefer: str | None = None) -> str | None:
    """Return the vendor whose GPUs this process has been given, or ``prefer``; None if nothing tells.

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
    if named and not settings.ignores_fence(environ):
        return "amd"
    return settings.host_setting("vendor", "", environ)


def check_inside(vendor: str) -> None:
    """Refuse a vendor that is not that of the claim inside which this process runs.

    Raises:
        UnsatisfiableRequestError: it is not.
    """
    around = gpus_of_scope(os.environ.get("SAFE_GPU_SCOPE", ""))
    if around and (other := vendor_of(around[0])) != vendor:
        raise UnsatisfiableRequestError(
            f"{_asked(vendor)}, and the claim around this process (SAFE_GPU_SCOPE) holds "
            f"{VENDORS[other].title} GPUs: leave {style.option('vendor')} out, or make the claim outside",
            value=vendor,
        )


def lacking(vendor: str, driver: str) -> UnsatisfiableRequestError:
    """Return the error of a claim for a vendor of which a driver has no GPUs."""
    if driver == "auto":
        text = f"and this host has none: leave {style.option('vendor')} out"
    else:
        text = f"and SAFE_GPU_DRIVER={driver} has none: leave {style.option('vendor')} out, or unset SAFE_GPU_DRIVER"
    return UnsatisfiableRequestError(f"{_asked(vendor)}, {text}", value=vendor)


def _asked(vendor: str) -> str:
    return f"{style.written('vendor', vendor)} asks for {VENDORS[vendor].title} GPUs"


class _Other(NamedTuple):
    """A vendor after the first: how many of its GPUs the kernel lists, and whether all may be integrated graphics."""

    open: Callable[[], Driver]
    gpus: int
    only_graphics: bool


def _of_amd() -> _Other:
    from .kfd import KfdDriver, may_be_integrated

    found = devices(Files()) or ()
    return _Other(KfdDriver, len(found), all(map(may_be_integrated, found)))


def _of_intel() -> _Other:
    from .intel import IntelDriver, cards

    return _Other(IntelDriver, len(cards(Files())), False)


_OTHERS: dict[str, Callable[[], _Other]] = {"amd": _of_amd, "intel": _of_intel}


def _others() -> dict[str, _Other]:
    """Return the vendors after the first of which this host has GPUs, those last that may have integrated graphics
    only."""
    files = Files()
    found = {key: _OTHERS[key]() for key in _OTHERS if any(map(files.exists, VENDORS[key].loaded))}
    there = [(key, other) for key, other in found.items() if other.gpus]
    return dict(sorted(there, key=lambda one: one[1].only_graphics))


def open_of(vendor: str, open_nvidia: Callable[[], Driver]) -> Driver:
    """Return the driver of the vendor that was chosen.

    Raises:
        UnsatisfiableRequestError: this host has GPUs of other vendors only.
        NoDriverError: it has no driver at all, or the one that was chosen does not work.
    """
    others = _others()
    if vendor != FIRST:
        from .nvidia.nvidia_smi import find_nvidia_smi
        from .nvidia.nvml import why_missing

        if vendor not in others and (others or why_missing() is None or find_nvidia_smi() is not None):
            raise lacking(vendor, "auto")
        return _OTHERS[vendor]().open()
    try:
        return open_nvidia()
    except NoDriverError as err:
        if err.driver == "auto" and others:  # it is missing
            raise lacking(vendor, "auto") from err
        raise


def open_first(prefer: str | None, open_nvidia: Callable[[], Driver]) -> Driver:
    """Return the driver of a process that chose no vendor, on a host where the kernel's driver of a further one is
    loaded.

    NVIDIA's is the first, unless this process has been given other GPUs (``prefer``, or :func:`meant_vendor`). The
    others are taken only where there are no NVIDIA GPUs, in the order of the table. Whether they are free does not
    matter: programs are built for one vendor.

    Raises:
        NoDriverError: there are NVIDIA GPUs, and their driver does not work.
    """
    others = _others()
    if not others:
        return open_nvidia()
    vendor = meant_vendor(os.environ, prefer)
    if vendor in others:
        return others[vendor].open()
    first = next(iter(others))
    try:
        driver = open_nvidia()
        is_first = vendor == FIRST or bool(driver.snapshot().gpus)
    except NoDriverError as err:
        if _is_of_other_vendor(err):
            return others[first].open()
        if others[first].only_graphics:
            raise
        way_out = style.written("vendor", first)
        text = f"{err} (this host has {VENDORS[first].title} GPUs too: {way_out})"
        raise NoDriverError(text, driver=err.driver) from err
    if is_first:
        return driver
    driver.close()
    return others[first].open()


def open_each(open_nvidia: Callable[[], Driver]) -> tuple[list[Driver], list[str]]:
    """Return the drivers of all vendors of which this host has GPUs, and what is wrong with those that do not work.

    The integrated graphics of a processor are left out where there are other GPUs.

    Raises:
        NoDriverError: there are GPUs of the first vendor only, and its driver is missing or does not work.
    """
    others = _others()
    if not others:
        return [open_nvidia()], []
    wanted = [key for key, other in others.items() if not other.only_graphics]
    broken: list[str] = []
    drivers: list[Driver] = []
    try:
        drivers.append(open_nvidia())
        if not wanted and drivers[0].snapshot().gpus:
            return drivers, []
    except NoDriverError as err:
        drivers.clear()
        broken += [] if _is_of_other_vendor(err) else [str(err)]
    drivers += [others[key].open() for key in VENDORS if key in (wanted or others)]
    return drivers, broken


def _is_of_other_vendor(err: NoDriverError) -> bool:
    """Return whether NVIDIA's driver does not work because the host has no NVIDIA GPUs. A cluster may install one image
    on all hosts, with libraries of both vendors."""
    files = Files()
    return not files.exists("dev/nvidiactl") and (err.driver == "auto" or not files.nvidia_gpus())
