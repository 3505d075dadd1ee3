"""Checks a host and the environment of a claim.

A check is a function from :class:`CheckedHost` to :class:`Finding`. A check that raises counts as failed, and the other
checks still run.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from . import driver, environment, state
from .check import Check, Finding, render_checks
from .host import CheckedHost

__all__ = ["CHECKS", "Check", "CheckedHost", "exit_code", "render_checks", "run_checks", "to_dict"]

CHECKS: tuple[tuple[str, Callable[[CheckedHost], Finding]], ...] = (
    ("Python packages", environment.packages),
    ("GPU driver", driver.driver),
    ("driver speed", driver.speed),
    ("CUDA", driver.cuda_starts),
    ("access to GPUs", driver.lost_gpus),
    ("GPUs in service", state.drained),
    ("process lists", driver.process_lists),
    ("compute mode", driver.compute_mode),
    ("MPS", driver.mps),
    ("state directory", state.directory),
    ("file locks", state.locks),
    ("policy file", environment.policy),
    ("visible processes", state.process_namespace),
    ("state directories of claims", state.elsewhere),
    ("safe-gpu 1.x and 2.0", state.older_package),
    ("SAFE_GPU variables", environment.variables),
    ("SAFE_GPU_SCOPE", state.scope),
    ("CUDA_VISIBLE_DEVICES", environment.visible_devices),
    ("batch job", environment.batch_job),
    ("address space limit", environment.address_space),
    ("OpenMP variables", environment.openmp),
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
