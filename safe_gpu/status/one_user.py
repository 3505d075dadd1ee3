"""What of the state of a host concerns one user, or one vendor. Pure."""

from __future__ import annotations

from dataclasses import replace

from .facts import GpuStatus, HostStatus


def of_user(status: HostStatus, user: str) -> HostStatus:
    """The GPUs that a user has claimed or computes on, and his places in the queue."""
    return replace(
        status,
        gpus=tuple(one for one in status.gpus if _concerns(one, user)),
        queue=tuple(one for one in status.queue if one.user == user),
    )


def of_vendor(status: HostStatus, vendor: str) -> HostStatus:
    """The GPUs of a vendor, by their indices alone, and the waiters for them."""
    return replace(
        status,
        gpus=tuple(replace(one, prefix="") for one in status.gpus if one.gpu.vendor == vendor),
        queue=tuple(one for one in status.queue if one.vendor in (vendor, None)),
    )


def _concerns(one: GpuStatus, user: str) -> bool:
    claims = [claim.user for claim in (one.claim, one.inner) if claim is not None]
    return user in claims or any(process.user == user for process in one.processes if process.kind != "graphics")


def free_labels(status: HostStatus) -> list[str]:
    """The GPUs that a claim could have now, as ``0``, ``3:1``, or ``amd:0`` where there are GPUs of two vendors.

    None is free if the claims are not known.
    """
    if status.warnings:
        return []
    return [one.label for one in status.gpus if one.state in ("free", "display")]
