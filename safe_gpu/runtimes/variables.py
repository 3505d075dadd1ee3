"""The environment variables that choose the GPUs of a process: one grammar for each vendor. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from . import visible_devices

if TYPE_CHECKING:
    from ..devices import Gpu, HostSnapshot
    from .visible_devices import VisibleLimit


_NAMES = {
    "nvidia": ("CUDA_VISIBLE_DEVICES",),
    "amd": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}


def visible_variables(snapshot: HostSnapshot) -> tuple[str, ...]:
    """The variables that choose among these GPUs."""
    return _NAMES[snapshot.vendor]


def read_visible(environ: Mapping[str, str], snapshot: HostSnapshot) -> VisibleLimit | None:
    """The GPUs to which an environment limits a process; None if no variable does."""
    if snapshot.vendor == "amd":
        from . import rocm_devices

        return rocm_devices.read(environ, snapshot)
    return visible_devices.parse(
        environ.get("CUDA_VISIBLE_DEVICES"), snapshot, device_order=environ.get("CUDA_DEVICE_ORDER")
    )


def read_visible_once(environ: Mapping[str, str], snapshot: HostSnapshot) -> VisibleLimit | None:
    """The GPUs to which an environment limits a claim: as :func:`read`, but a list that a batch scheduler has written
    into several variables counts once. See :mod:`~safe_gpu.runtimes.rocm_devices`."""
    if snapshot.vendor == "amd":
        from . import rocm_devices

        environ = rocm_devices.once(environ)
    return read_visible(environ, snapshot)


def render_visible(
    gpus: Sequence[Gpu], *, visible_as: str, snapshot: HostSnapshot, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The variables that make exactly these GPUs visible, in this order, to a process with this environment (None: an
    empty one). The first one names them.

    Raises:
        UnsatisfiableRequestError: as for :func:`~safe_gpu.runtimes.visible_devices.render`.
    """
    if snapshot.vendor == "amd":
        from . import rocm_devices

        return rocm_devices.render(gpus, visible_as=visible_as, snapshot=snapshot, environ=environ or {})
    return visible_devices.render(gpus, visible_as=visible_as, snapshot=snapshot)


def hide_all(vendor: str) -> dict[str, str]:
    """The variables that hide all GPUs of a vendor."""
    return dict.fromkeys(_NAMES[vendor], "")
