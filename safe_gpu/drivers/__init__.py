"""Where knowledge of the GPUs comes from, and the one place that chooses among the sources.

Nothing here knows claims: a driver reports what it sees, and ``selection`` judges it.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module

from ..coordination.holders import gpus_of_scope
from ..errors import NoDriverError, UnsatisfiableRequestError
from ..gpus.devices import vendor_of
from ..gpus.vendors import FIRST, VENDORS
from ..settings import variables as settings
from ..topology.files import Files
from ..wording import style
from .base import Driver
from .patience import AwaitedDriver, Patience

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
        _check_inside(vendor)
        if kind != "auto" and vendor not in (_simulated_vendors(preset) if kind == "simulated" else (_KINDS[kind],)):
            given = f"SAFE_GPU_DRIVER={kind}:{preset}".rstrip(":")
            raise _refused(vendor, f"{given} has none", ", or unset SAFE_GPU_DRIVER")
    if kind == "auto":
        return _auto(vendor, prefer)
    if kind != "simulated":
        return _opened(kind)
    if vendor is None and len(_simulated_vendors(preset)) > 1:
        vendor = meant_vendor(os.environ, prefer)
    return _opened(kind, preset, vendor=vendor)


def open_drivers(patience: Patience | None = None) -> tuple[list[Driver], list[str]]:
    """Open the drivers of all GPUs that ``SAFE_GPU_DRIVER`` names, one for each vendor, for viewers such as ``status``.

    Args:
        patience: with which they are awaited; the default waits without limit, and tells by the package's logger.

    Returns:
        The drivers, in the order of ``VENDORS``, and sentences on those that do not work.

    Raises:
        UnsatisfiableRequestError: no such driver, or no such preset. NoDriverError: none works.
    """
    kind, preset = _parsed(None)
    if kind == "simulated":
        return [_opened(kind, preset, vendor=vendor) for vendor in _simulated_vendors(preset)], []
    patience = patience or Patience()
    if kind == "auto":
        drivers, broken = patience.answer(_each)
    else:
        drivers, broken = [patience.answer(open_driver)], []
    return [AwaitedDriver(driver, patience) for driver in drivers], broken


@cache
def _simulated_vendors(preset: str) -> Sequence[str]:
    from .simulated import find_preset

    return find_preset(preset).vendors


def _parsed(name: str | None) -> tuple[str, str]:
    name = (os.environ.get("SAFE_GPU_DRIVER") if name is None else name) or "auto"
    kind, _, preset = name.partition(":")
    if kind not in _KINDS or (preset and kind != "simulated"):
        choices = ", ".join(_KINDS) + ":PRESET"
        raise UnsatisfiableRequestError(f"There is no driver {name!r}: choose one of {choices}.", value=name)
    return kind, preset


def _opened(kind: str, *arguments: str, **named: str | None) -> Driver:
    """Open a driver by its name, after which its module and its class are called: ``nvidia_smi.NvidiaSmiDriver``."""
    name = f"{__package__}.{kind.replace('-', '_')}"
    module = sys.modules.get(name) or import_module(name)
    driver: Driver = getattr(module, f"{kind.title().replace('-', '')}Driver")(*arguments, **named)
    return driver


def _of_vendor(vendor: str) -> Driver:
    return _opened(VENDORS[vendor].drivers[0])


def _auto(vendor: str | None, prefer: str | None) -> Driver:
    """Open the driver of the vendor that was chosen, else of the GPUs that this process has been given, else of the
    first vendor of which the host has GPUs. Whether they are free does not matter: programs are built for one vendor.
    """
    others = _others_here()
    meant = vendor or (meant_vendor(os.environ, prefer) if others else None)
    if meant in others:
        return _of_vendor(meant)
    if vendor is None and others:
        return _nvidia_here() or _of_vendor(next(iter(others)))
    try:
        driver = _nvidia()
    except NoDriverError as err:
        if vendor is None or err.driver != "auto" or not others:
            raise
        raise _refused(vendor, "this host has none") from err
    if vendor in (None, FIRST):
        return driver
    driver.close()
    raise _refused(vendor, "this host has none")


def _each() -> tuple[list[Driver], list[str]]:
    """Open the drivers of all vendors of which the host has GPUs; see :func:`open_drivers`.

    The integrated graphics of a processor are left out where there are other GPUs.
    """
    others, broken, nvidia = _others_here(), [], None
    if not others:
        return [_nvidia()], []
    wanted = [key for key, only_graphics in others.items() if not only_graphics]
    try:
        nvidia = _nvidia_here()
    except NoDriverError as err:
        broken.append(str(err))
    drivers = [_of_vendor(key) for key in VENDORS if key in (wanted if nvidia else wanted or others)]
    return [nvidia, *drivers] if nvidia else drivers, broken


def _nvidia() -> Driver:
    """Open NVML, or nvidia-smi where NVML's library or Python module is missing.

    Raises:
        NoDriverError: it does not work, or, with "auto" as its ``driver``, both are missing.
    """
    from .nvml import why_missing

    reason = why_missing()
    if reason is None:
        return _opened("nvml")

    from .nvidia_smi import find_nvidia_smi

    if find_nvidia_smi() is None:
        raise NoDriverError(
            f"There is no GPU driver here: {reason}, and nvidia-smi is not on PATH; nor is the driver of AMD or Intel "
            "GPUs loaded, or it shows none. On a GPU host, install the driver, for NVIDIA also nvidia-ml-py; to try "
            "safe_gpu without a GPU, set SAFE_GPU_DRIVER=simulated:dgx-a100.",
            driver="auto",
        )
    return _opened("nvidia-smi")


def _nvidia_here() -> Driver | None:
    """Open the same on a host with other GPUs. None if it has no NVIDIA GPUs: a cluster may install one image on all
    hosts, with libraries of all vendors.

    Raises:
        NoDriverError: there are NVIDIA GPUs, and their driver does not work.
    """
    try:
        driver = _nvidia()
        if driver.snapshot().gpus:
            return driver
        driver.close()
    except NoDriverError as err:
        if Files().exists("dev/nvidiactl") or (err.driver != "auto" and Files().nvidia_gpus()):
            raise
    return None


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


def _check_inside(vendor: str) -> None:
    """Refuse a vendor that is not that of the claim inside which this process runs.

    Raises:
        UnsatisfiableRequestError: it is not.
    """
    around = gpus_of_scope(os.environ.get("SAFE_GPU_SCOPE", ""))
    if around and (other := vendor_of(around[0])) != vendor:
        held = f"the claim around this process (SAFE_GPU_SCOPE) holds {VENDORS[other].title} GPUs"
        raise _refused(vendor, held, ", or make the claim outside")


def _refused(vendor: str, why: str, or_else: str = "") -> UnsatisfiableRequestError:
    """Return the error of a claim for a vendor whose GPUs it cannot have."""
    asked = f"{style.written('vendor', vendor)} asks for {VENDORS[vendor].title} GPUs"
    return UnsatisfiableRequestError(f"{asked}, and {why}: leave {style.option('vendor')} out{or_else}", value=vendor)


def _others_here() -> dict[str, bool]:
    """Return the vendors after the first of which the kernel shows GPUs, and whether those may all be integrated
    graphics. Such a vendor comes last."""
    files, found = Files(), {}
    if any(map(files.exists, VENDORS["amd"].loaded)):
        from ..topology.kfd_topology import devices
        from .kfd import may_be_integrated

        if amd := devices(files):
            found["amd"] = all(map(may_be_integrated, amd))
    if any(map(files.exists, VENDORS["intel"].loaded)):
        from .intel import cards

        if cards(files):
            found["intel"] = False
    return dict(sorted(found.items(), key=lambda one: one[1]))


@contextmanager
def opened_driver(
    vendor: str | None = None, *, prefer: str | None = None, patience: Patience | None = None
) -> Iterator[Driver]:
    """``with opened_driver() as driver``: the driver that SAFE_GPU_DRIVER names, closed at the end.

    Args:
        vendor, prefer: as of :func:`open_driver`.
        patience: as of :func:`open_drivers`.

    Raises:
        UnsatisfiableRequestError: this is not Linux; or as :func:`open_driver`, NoDriverError too.
        ClaimTimeout: from here and from every question, if it does not answer in time.
    """
    if sys.platform != "linux":
        raise UnsatisfiableRequestError(f"safe_gpu works on Linux only, and this is {sys.platform}")
    driver = (patience or Patience()).opened(lambda: open_driver(vendor=vendor, prefer=prefer))
    try:
        yield driver
    finally:
        driver.close()
