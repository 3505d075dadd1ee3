"""Checks a host and the environment of a claim.

A check is a function from :class:`CheckedHost` to :class:`Finding`. A check that raises counts as failed, and the other
checks still run.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from . import gpus as gpus_module
from . import packages, process_limits, shown_processes, variables
from .check import Check, CheckedHost, Finding
from .findings_text import render_checks
from .state import claims, cleaners, namespaces
from .state import directory as state_dir

__all__ = ["CHECKS", "Check", "exit_code", "render_checks", "run_checks", "to_dict"]

CHECKS: tuple[tuple[str, Callable[[CheckedHost], Finding]], ...] = (
    ("platform", packages.platform),
    ("Python packages", packages.packages),
    ("shared installation", packages.for_all_users),
    ("GPU driver", gpus_module.driver),
    ("GPUs of other vendors", gpus_module.other_vendor),
    ("driver speed", gpus_module.driver_speed),
    ("CUDA", gpus_module.cuda_starts),
    ("access to GPUs", gpus_module.lost_gpus),
    ("GPUs in service", gpus_module.drained),
    ("process lists", shown_processes.process_lists),
    ("compute mode", gpus_module.compute_mode),
    ("MIG", gpus_module.mig),
    ("MPS", gpus_module.mps),
    ("state directory", state_dir.state_directory),
    ("file system", state_dir.file_system),
    ("free disk space", state_dir.room),
    ("file locks", state_dir.locks),
    ("removal of old files", cleaners.cleaning),
    ("lease files", cleaners.removed_leases),
    ("fs.protected_regular", cleaners.protected_regular),
    ("policy file", variables.policy),
    ("history", state_dir.history),
    ("shared state directory", namespaces.private_directory),
    ("visible processes", namespaces.process_namespace),
    ("holders and waiters", claims.suspended),
    ("shares of memory", claims.overused),
    ("state directories of claims", claims.other_directories),
    ("clock", claims.clock),
    ("safe-gpu 1.x and 2.0", claims.older_package),
    ("SAFE_GPU variables", variables.variables),
    ("SAFE_GPU_SCOPE", variables.scope),
    ("CUDA_VISIBLE_DEVICES", variables.visible_devices),
    ("CUDA_DEVICE_ORDER", variables.device_order),
    ("batch job", variables.batch_job),
    ("address space limit", process_limits.address_space),
    ("CPU mask", process_limits.cpu_mask),
    ("OpenMP variables", process_limits.openmp),
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
    return {"host": os.uname().nodename, "checks": [asdict(one) for one in checks]}


def exit_code(checks: Sequence[Check]) -> int:
    """Return 1 if a check failed, else 0."""
    return int(any(one.status == "failed" for one in checks))
