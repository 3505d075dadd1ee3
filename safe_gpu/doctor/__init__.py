"""Checks a host and the environment of a claim. Each finding comes with its fix.

A check is a function from :class:`CheckedHost` to :class:`Finding`. A check that raises counts as failed, and the other
checks still run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from . import gpus, process, state
from .check import Check, CheckedHost, Finding, render_checks

__all__ = ["CHECKS", "Check", "exit_code", "render_checks", "run_checks", "to_dict"]

CHECKS: tuple[tuple[str, Callable[[CheckedHost], Finding]], ...] = (
    ("platform", process.platform),
    ("Python packages", process.packages),
    ("shared installation", process.for_all_users),
    ("GPU driver", gpus.driver),
    ("GPUs of other vendors", gpus.other_vendor),
    ("driver speed", gpus.driver_speed),
    ("CUDA", gpus.cuda_starts),
    ("access to GPUs", gpus.lost_gpus),
    ("GPUs in service", gpus.drained),
    ("process lists", gpus.process_lists),
    ("compute mode", gpus.compute_mode),
    ("MIG", gpus.mig),
    ("MPS", gpus.mps),
    ("state directory", state.state_directory),
    ("file system", state.file_system),
    ("free disk space", state.room),
    ("file locks", state.locks),
    ("removal of old files", state.cleaning),
    ("lease files", state.removed_leases),
    ("fs.protected_regular", state.protected_regular),
    ("policy file", state.policy),
    ("history", state.history),
    ("shared state directory", state.private_directory),
    ("visible processes", state.process_namespace),
    ("holders and waiters", state.suspended),
    ("shares of memory", state.overused),
    ("state directories of claims", state.other_directories),
    ("clock", state.clock),
    ("safe-gpu 1.x and 2.0", state.older_package),
    ("SAFE_GPU variables", process.variables),
    ("SAFE_GPU_SCOPE", process.scope),
    ("CUDA_VISIBLE_DEVICES", process.visible_devices),
    ("CUDA_DEVICE_ORDER", process.device_order),
    ("batch job", process.batch_job),
    ("address space limit", process.address_space),
    ("CPU mask", process.cpu_mask),
    ("OpenMP variables", process.openmp),
)
"""Name and function of every check, in the order of the report."""


def run_checks(host: CheckedHost | None = None) -> list[Check]:
    """Run all checks; ``host`` None is this host with this process's environment. Errors in checks do not raise."""
    examined = CheckedHost() if host is None else host
    found = []
    try:
        for name, examine in CHECKS:
            try:
                finding = examine(examined)
            except Exception as err:
                finding = Finding(
                    "failed",
                    f"the check itself failed: {type(err).__name__}: {err}",
                    "look for the cause that the message names; the other checks are not affected",
                )
            own = {"CUDA": examined.vendor.library, "CUDA_VISIBLE_DEVICES": examined.vendor.variables[0]}
            name = own.get(name, name)
            found.append(Check(name, **vars(finding)))
    finally:
        examined.close()
    return found


def to_dict(checks: Sequence[Check]) -> dict[str, Any]:
    """Return the JSON document: ``{"host", "checks": [{"name", "status", "detail", "fix"}]}``."""
    return {
        "host": os.uname().nodename,
        "checks": [asdict(one) for one in checks],
    }


def exit_code(checks: Sequence[Check]) -> int:
    """Return 1 if a check failed, else 0."""
    return int(any(one.status == "failed" for one in checks))
