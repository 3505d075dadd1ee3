"""Checks of a host and of the environment that a claim would be made in, each finding with its fix.

A check is a small function from :class:`Host` to :class:`Finding`; one that breaks is failed and hides no other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from . import gpus, sharing, state, surroundings
from .check import Check, Finding, Host
from .view import render

__all__ = ["CHECKS", "Check", "exit_code", "render", "run_checks", "to_dict"]

CHECKS: tuple[tuple[str, Callable[[Host], Finding]], ...] = (
    ("platform", surroundings.platform),
    ("Python packages", surroundings.packages),
    ("GPU driver", gpus.driver),
    ("driver speed", gpus.driver_speed),
    ("CUDA", gpus.cuda_starts),
    ("lost GPUs", gpus.lost_gpus),
    ("process lists", gpus.process_lists),
    ("compute mode", gpus.compute_mode),
    ("MIG", gpus.mig),
    ("MPS", gpus.mps),
    ("state directory", state.state_directory),
    ("its file system", state.file_system),
    ("room", state.room),
    ("locks", state.locks),
    ("cleaning of old files", state.cleaning),
    ("removed leases", state.removed_leases),
    ("protected_regular", state.protected_regular),
    ("private /tmp", sharing.private_directory),
    ("process namespace", sharing.process_namespace),
    ("suspended processes", sharing.suspended),
    ("clock", sharing.clock),
    ("older package", sharing.older_package),
    ("SAFE_GPU variables", surroundings.variables),
    ("SAFE_GPU_SCOPE", surroundings.scope),
    ("CUDA_VISIBLE_DEVICES", surroundings.visible_devices),
    ("CUDA_DEVICE_ORDER", surroundings.device_order),
    ("batch job", surroundings.batch_job),
    ("address space", surroundings.address_space),
    ("CPU mask", surroundings.cpu_mask),
    ("OpenMP binding", surroundings.openmp),
)
"""Name and function of every check, in the order in which people read them."""


def run_checks(host: Host | None = None) -> list[Check]:
    """Run all checks; ``host`` None is this host and this process's environment. Never raises for what it finds."""
    examined = Host() if host is None else host
    found = []
    try:
        for name, examine in CHECKS:
            try:
                finding = examine(examined)
            except Exception as err:
                finding = Finding(
                    "failed",
                    f"the check itself broke: {type(err).__name__}: {err}",
                    "look at what the message names; the other checks are not touched by it",
                )
            found.append(Check(name, finding.status, finding.detail, finding.fix))
    finally:
        examined.close()
    return found


def to_dict(checks: Sequence[Check]) -> dict[str, Any]:
    """For JSON: ``{"host", "checks": [{"name", "status", "detail", "fix"}]}``."""
    return {
        "host": os.uname().nodename,
        "checks": [{"name": one.name, "status": one.status, "detail": one.detail, "fix": one.fix} for one in checks],
    }


def exit_code(checks: Sequence[Check]) -> int:
    """1 where a check failed, else 0."""
    return int(any(one.status == "failed" for one in checks))
