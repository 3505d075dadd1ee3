"""Whose GPUs a host has, and whose a process means."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..coordination.holders import gpus_of_scope
from ..errors import UnsatisfiableRequestError
from ..gpus.devices import vendor_of
from ..gpus.vendors import VENDORS
from ..settings import variables as settings
from ..topology.files import Files
from ..topology.kfd_topology import devices
from ..wording import text as style


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


def missing(vendor: str, driver: str) -> UnsatisfiableRequestError:
    """Return the error of a claim for a vendor of which a driver has no GPUs."""
    if driver == "auto":
        text = f"and this host has none: leave {style.option('vendor')} out"
    else:
        text = f"and SAFE_GPU_DRIVER={driver} has none: leave {style.option('vendor')} out, or unset SAFE_GPU_DRIVER"
    return UnsatisfiableRequestError(f"{_asked(vendor)}, {text}", value=vendor)


def _asked(vendor: str) -> str:
    return f"{style.written('vendor', vendor)} asks for {VENDORS[vendor].title} GPUs"


def others_here() -> dict[str, bool]:
    """Return the vendors after the first of which the kernel shows GPUs, and whether those may all be integrated
    graphics. Such a vendor comes last."""
    files, found = Files(), {}
    if any(map(files.exists, VENDORS["amd"].loaded)):
        from .kfd import may_be_integrated

        if amd := devices(files):
            found["amd"] = all(map(may_be_integrated, amd))
    if any(map(files.exists, VENDORS["intel"].loaded)):
        from .intel import cards

        if cards(files):
            found["intel"] = False
    return dict(sorted(found.items(), key=lambda one: one[1]))
