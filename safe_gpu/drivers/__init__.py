"""Where knowledge of the GPUs comes from, and the one place that chooses among the sources.

A driver knows no claims: it reports what it sees, and ``selection`` judges it. Only the choice of the vendor goes by
the claim that encloses this process.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ..coordination.holders import gpus_of_scope
from ..errors import NoDriverError, UnsatisfiableRequestError
from ..gpus.devices import vendor_of
from ..gpus.vendors import FIRST, VENDORS
from ..settings import variables as settings
from ..topology.files import Files
from ..wording import style
from .base import Driver
from .patience import AwaitedDriver, Patience


def _open_nvml() -> Driver:
    from .nvml import NvmlDriver

    return NvmlDriver()


def _open_nvidia_smi() -> Driver:
    from .nvidia_smi import NvidiaSmiDriver

    return NvidiaSmiDriver()


def _open_kfd() -> Driver:
    from .kfd import KfdDriver

    return KfdDriver()


def _open_intel() -> Driver:
    from .intel import IntelDriver

    return IntelDriver()


def _open_simulated(preset: str, vendor: str | None) -> Driver:
    from .simulated import SimulatedDriver

    return SimulatedDriver(preset, vendor=vendor)


# By the names of :attr:`~safe_gpu.gpus.vendors.Vendor.drivers`.
_OPENERS: dict[str, Callable[[], Driver]] = {
    "nvml": _open_nvml,
    "nvidia-smi": _open_nvidia_smi,
    "kfd": _open_kfd,
    "intel": _open_intel,
}

_KINDS = ("auto", *_OPENERS, "simulated")


class _Name(NamedTuple):
    """The name of a driver: one of ``_KINDS``, and the host after ``simulated:``."""

    kind: str
    preset: str

    @classmethod
    def parse(cls, name: str) -> "_Name":
        """Return what ``SAFE_GPU_DRIVER`` or an argument says.

        Raises:
            UnsatisfiableRequestError: there is no such driver.
        """
        kind, _, preset = name.partition(":")
        if kind not in _KINDS or (preset and kind != "simulated"):
            choices = ", ".join(_KINDS) + ":PRESET"
            raise UnsatisfiableRequestError(f"there is no driver {name!r}: choose one of {choices}", value=name)
        return cls(kind, preset)

    @classmethod
    def of_environment(cls) -> "_Name":
        """Return what ``SAFE_GPU_DRIVER`` says; "auto" if it is not set."""
        return cls.parse(os.environ.get("SAFE_GPU_DRIVER") or "auto")

    def vendors(self) -> Sequence[str]:
        """Return the vendors of whose GPUs it may be; those of a simulated host in the order of ``VENDORS``.

        Raises:
            UnsatisfiableRequestError: there is no such simulated host.
        """
        if self.kind == "auto":
            return list(VENDORS)
        if self.kind == "simulated":
            return _simulated_vendors(self.preset)
        return [key for key, vendor in VENDORS.items() if self.kind in vendor.drivers]

    def __str__(self) -> str:
        if self.preset:
            return f"{self.kind}:{self.preset}"
        return self.kind


def _simulated_vendors(preset: str) -> Sequence[str]:
    from .simulated import find_preset

    return find_preset(preset).vendors


def open_driver(name: str | None = None, *, vendor: str | None = None, prefer: str | None = None) -> Driver:
    """Open a driver by name: ``auto``, one of ``Vendor.drivers``, or ``simulated:PRESET``.

    Args:
        name: None means what ``SAFE_GPU_DRIVER`` says, else ``auto``: NVML, or nvidia-smi where NVML's library or
            Python module is missing, or the driver of the next vendor where there are no NVIDIA GPUs. A driver that
            is there and does not work is reported, not worked around.
        vendor: a key of ``VENDORS``; None leaves the choice to the host and to the claim that encloses this process.
        prefer: the same where a host has GPUs of several and this is not inside a claim; never an error.

    Raises:
        UnsatisfiableRequestError: no such driver, or no such preset, or it has no GPUs of that vendor, or the claim
            that encloses this process is of another one.
        NoDriverError: the driver is missing or does not work.
    """
    if name is None:
        driver = _Name.of_environment()
    else:
        driver = _Name.parse(name or "auto")
    if vendor is not None:
        _check_inside(vendor)
        if vendor not in driver.vendors():
            raise _refused(vendor, f"SAFE_GPU_DRIVER={driver} has none", ", or unset SAFE_GPU_DRIVER")
    if driver.kind == "auto":
        return _open_auto(vendor, prefer)
    if driver.kind != "simulated":
        return _OPENERS[driver.kind]()
    if vendor is None and len(driver.vendors()) > 1:
        vendor = meant_vendor(os.environ, prefer)
    return _open_simulated(driver.preset, vendor)


def open_drivers(patience: Patience | None = None) -> tuple[list[Driver], list[str]]:
    """Open the drivers of all GPUs that ``SAFE_GPU_DRIVER`` names, one for each vendor, for viewers such as ``status``.

    Args:
        patience: with which they are awaited; the default waits without limit, and tells by the package's logger.

    Returns:
        The drivers, in the order of ``VENDORS``, and sentences on those that do not work.

    Raises:
        UnsatisfiableRequestError: no such driver, or no such preset. NoDriverError: none works.
    """
    name = _Name.of_environment()
    if name.kind == "simulated":
        return [_open_simulated(name.preset, vendor) for vendor in name.vendors()], []
    if patience is None:
        patience = Patience()
    if name.kind == "auto":
        drivers, broken = patience.answer(_open_each)
    else:
        drivers = [patience.answer(open_driver)]
        broken = []
    return [AwaitedDriver(driver, patience) for driver in drivers], broken


def _open_auto(vendor: str | None, prefer: str | None) -> Driver:
    """Open the driver of the vendor that was chosen, else of the GPUs that this process has been given, else of the
    first vendor of which the host has GPUs. Whether they are free does not matter: programs are built for one vendor.
    """
    others = [other.vendor for other in _others_here()]
    meant = vendor
    if meant is None and others:
        meant = meant_vendor(os.environ, prefer)
    if meant in others:
        return _open_vendor(meant)
    if vendor is None and others:
        return _open_nvidia_beside_others() or _open_vendor(others[0])
    try:
        driver = _open_nvidia()
    except NoDriverError as err:
        if vendor is None or err.driver != "auto" or not others:
            raise
        raise _refused(vendor, "this host has none") from err
    if vendor is None or vendor == FIRST:
        return driver
    driver.close()
    raise _refused(vendor, "this host has none")


def _open_each() -> tuple[list[Driver], list[str]]:
    """Open the drivers of all vendors of which the host has GPUs; see :func:`open_drivers`.

    The integrated graphics of a processor are left out where there are other GPUs.
    """
    others = _others_here()
    if not others:
        return [_open_nvidia()], []
    drivers = []
    broken = []
    try:
        nvidia = _open_nvidia_beside_others()
        if nvidia is not None:
            drivers.append(nvidia)
    except NoDriverError as err:
        broken.append(str(err))
    wanted = [other.vendor for other in others if not other.integrated]
    if not wanted and not drivers:
        wanted = [other.vendor for other in others]
    drivers += [_open_vendor(key) for key in VENDORS if key in wanted]
    return drivers, broken


def _open_vendor(vendor: str) -> Driver:
    return _OPENERS[VENDORS[vendor].drivers[0]]()


def _open_nvidia() -> Driver:
    """Open NVML, or nvidia-smi where NVML's library or Python module is missing.

    Raises:
        NoDriverError: it does not work, or, with "auto" as its ``driver``, both are missing.
    """
    from .nvml_calls import why_missing

    reason = why_missing()
    if reason is None:
        return _open_nvml()
    if not _has_nvidia_smi():
        raise NoDriverError(
            f"there is no GPU driver here: {reason}, nvidia-smi is not on PATH, and no driver of AMD or Intel GPUs is "
            "loaded, or it shows no GPU. On a GPU host, install the driver, for NVIDIA also nvidia-ml-py; to try "
            "safe_gpu without a GPU, set SAFE_GPU_DRIVER=simulated:dgx-a100",
            driver="auto",
        )
    return _open_nvidia_smi()


def _has_nvidia_smi() -> bool:
    from .nvidia_smi import find_nvidia_smi

    return find_nvidia_smi() is not None


def _open_nvidia_beside_others() -> Driver | None:
    """Open the same on a host with other GPUs. None if it has no NVIDIA GPUs: a cluster may install one image on all
    hosts, with libraries of all vendors.

    Raises:
        NoDriverError: there are NVIDIA GPUs, and their driver does not work.
    """
    try:
        driver = _open_nvidia()
        if driver.snapshot().gpus:
            return driver
        driver.close()
    except NoDriverError as err:
        if Files().exists("dev/nvidiactl") or (err.driver != "auto" and Files().nvidia_gpus()):
            raise
    return None


class _Other(NamedTuple):
    """A vendor after the first of which the kernel shows GPUs, and whether those may all be integrated graphics."""

    vendor: str
    integrated: bool


def _others_here() -> list[_Other]:
    """Return the vendors after the first of which this host has GPUs; last one with integrated graphics only."""
    files = Files()
    found = []
    if _is_loaded(files, "amd"):
        found += _amd_here(files)
    if _is_loaded(files, "intel"):
        found += _intel_here(files)
    return sorted(found, key=lambda other: other.integrated)


def _is_loaded(files: Files, vendor: str) -> bool:
    """Return whether a kernel driver of a vendor's GPUs is loaded."""
    return any(files.exists(path) for path in VENDORS[vendor].loaded)


def _amd_here(files: Files) -> list[_Other]:
    from ..topology.kfd_topology import devices
    from .kfd import may_be_integrated

    found = devices(files)
    if not found:
        return []
    return [_Other("amd", integrated=all(may_be_integrated(device) for device in found))]


def _intel_here(files: Files) -> list[_Other]:
    from .intel import cards

    if not cards(files):
        return []
    return [_Other("intel", integrated=False)]  # such are never listed


def meant_vendor(environ: Mapping[str, str], prefer: str | None = None) -> str | None:
    """Return the vendor whose GPUs this process has been given, or ``prefer``; None if nothing tells.

    A claim inside another one keeps to the vendor of that. After ``prefer`` comes the GPU for which an engine started
    this process, and AMD where ROCR_VISIBLE_DEVICES has UUIDs, as claims set it. CUDA_VISIBLE_DEVICES does not say:
    HIP reads it too.
    """
    of_enclosing_claim = gpus_of_scope(environ.get("SAFE_GPU_SCOPE", ""))
    if of_enclosing_claim:
        return vendor_of(of_enclosing_claim[0])
    if prefer is not None:
        return prefer
    expected = environ.get("SAFE_GPU_EXPECT")
    if expected:
        return vendor_of(expected)
    visible = environ.get("ROCR_VISIBLE_DEVICES", "").strip().upper()
    if visible.startswith("GPU-") and not settings.ignores_fence(environ):
        return "amd"
    return settings.host_setting("vendor", "", environ)


def _check_inside(vendor: str) -> None:
    """Refuse a vendor that is not that of the claim inside which this process runs.

    Raises:
        UnsatisfiableRequestError: it is not.
    """
    of_enclosing_claim = gpus_of_scope(os.environ.get("SAFE_GPU_SCOPE", ""))
    if not of_enclosing_claim:
        return
    other = vendor_of(of_enclosing_claim[0])
    if other != vendor:
        held = f"the enclosing claim (SAFE_GPU_SCOPE) holds {VENDORS[other].title} GPUs"
        raise _refused(vendor, held, ", or make the claim outside")


def _refused(vendor: str, why: str, or_else: str = "") -> UnsatisfiableRequestError:
    """Return the error of a claim for a vendor whose GPUs it cannot have."""
    asked = f"{style.written('vendor', vendor)} asks for {VENDORS[vendor].title} GPUs"
    return UnsatisfiableRequestError(f"{asked}, and {why}: leave {style.option('vendor')} out{or_else}", value=vendor)


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
    if patience is None:
        patience = Patience()
    driver = patience.opened(lambda: open_driver(vendor=vendor, prefer=prefer))
    try:
        yield driver
    finally:
        driver.close()
