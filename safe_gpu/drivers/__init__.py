"""Where knowledge of the GPUs comes from, and the one place that chooses among the sources."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Driver

__all__ = ["open_driver", "opened_driver"]

_TRY_SIMULATED = "to try safe_gpu without a GPU, set SAFE_GPU_DRIVER=simulated:dgx-a100"


def open_driver(name: str | None = None) -> Driver:
    """Open a driver by name: ``auto``, ``nvml``, ``nvidia-smi`` or ``simulated:PRESET``.

    Args:
        name: None means what ``SAFE_GPU_DRIVER`` says, else ``auto``: NVML, or nvidia-smi where NVML's library or
            Python module is missing. A driver that is there and does not work is reported, not worked around.

    Raises:
        UnsatisfiableRequestError: no such driver, or no such preset.
        NoDriverError: the driver is missing or does not work.
    """
    name = (os.environ.get("SAFE_GPU_DRIVER") if name is None else name) or "auto"
    kind, _, preset = name.partition(":")
    factory = _FACTORIES.get(kind)
    if factory is None or (preset and kind != "simulated"):
        from ..errors import UnsatisfiableRequestError

        choices = ", ".join(_FACTORIES) + ":PRESET"
        raise UnsatisfiableRequestError(f"There is no driver {name!r}: choose one of {choices}.", value=name)
    return factory(preset)


def _auto(_preset: str) -> Driver:
    from .nvml import NvmlDriver, why_missing

    reason = why_missing()
    if reason is None:
        return NvmlDriver()

    from .nvidia_smi import NvidiaSmiDriver, find_nvidia_smi

    if find_nvidia_smi() is None:
        from ..errors import NoDriverError

        raise NoDriverError(
            f"There is no NVIDIA driver here: {reason}, and nvidia-smi is not on PATH. On a GPU host, install the "
            f"driver and nvidia-ml-py; {_TRY_SIMULATED}.",
            driver="auto",
        )
    return NvidiaSmiDriver()


def _nvml(_preset: str) -> Driver:
    from .nvml import NvmlDriver

    return NvmlDriver()


def _nvidia_smi(_preset: str) -> Driver:
    from .nvidia_smi import NvidiaSmiDriver

    return NvidiaSmiDriver()


def _simulated(preset: str) -> Driver:
    from .simulated import SimulatedDriver

    return SimulatedDriver(preset)


_FACTORIES: dict[str, Callable[[str], Driver]] = {
    "auto": _auto,
    "nvml": _nvml,
    "nvidia-smi": _nvidia_smi,
    "simulated": _simulated,
}


class opened_driver:
    """``with opened_driver() as driver``: the driver that SAFE_GPU_DRIVER names, closed at the end.

    Raises:
        UnsatisfiableRequestError: this is not Linux; or as :func:`open_driver`, NoDriverError too.
    """

    def __enter__(self) -> Driver:
        if sys.platform != "linux":
            from ..errors import UnsatisfiableRequestError

            raise UnsatisfiableRequestError(f"safe_gpu works on Linux only, and this is {sys.platform}")
        self._driver = open_driver()
        return self._driver

    def __exit__(self, *exc: object) -> None:
        self._driver.close()
