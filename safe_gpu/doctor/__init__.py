"""Checks a host and the environment of a claim.

A check is a function from :class:`CheckedHost` to :class:`Check`. A check that raises counts as failed, and the other
checks still run.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from ..errors import PolicyError, SafeGpuError, StateDirError
from ..host.awaiting import Tell
from . import driver, environment, state
from .check import Check, CheckedHost, failed, render_checks, skipped

__all__ = ["CHECKS", "Check", "CheckedHost", "check", "exit_code", "render_checks", "run_checks", "to_dict"]

CHECKS: dict[str, Callable[[CheckedHost], Check]] = {
    "Python packages": environment.packages,
    "GPU driver": driver.driver,
    "CUDA": driver.cuda_starts,
    "access to GPUs": driver.lost_gpus,
    "health of GPUs": driver.ill_gpus,
    "GPUs in service": state.drained,
    "process lists": driver.process_lists,
    "ended processes": state.ended_processes,
    "state directory": state.directory,
    "trial entry": state.trial_entry,
    "file locks": state.locks,
    "doors of GPUs": state.doors,
    "entries": state.entries,
    "policy file": environment.policy,
    "visible processes": state.process_namespace,
    "state directories of claims": state.elsewhere,
    "processes beside claims": state.beside,
    "modes of claimed GPUs": state.modes,
    "SAFE_GPU variables": environment.variables,
    "CUDA_VISIBLE_DEVICES": environment.visible_devices,
    "batch job": environment.batch_job,
}
"""Name -> function of every check, in the order of the report."""

_NEED_A_DRIVER = frozenset(
    {
        "CUDA",
        "access to GPUs",
        "health of GPUs",
        "process lists",
        "ended processes",
        "processes beside claims",
        "CUDA_VISIBLE_DEVICES",
    }
)

# The error -> the check that finds its cause. Other checks that fail by it do not report it again.
_TOLD_BY: dict[type[SafeGpuError], str] = {StateDirError: "state directory", PolicyError: "policy file"}


def check(name: str, host: CheckedHost) -> Check:
    """Run the check of that name. Whatever it raises is what it has found; errors of ours say what to do."""
    try:
        if name in _NEED_A_DRIVER and not host.snapshot.driver:
            return skipped("there is no driver")
        return CHECKS[name](host)
    except SafeGpuError as err:
        teller = _TOLD_BY.get(type(err), name)
        if teller != name and check(teller, host).status == "failed":
            return skipped(f"for the reason that stands under: {teller}")
        return failed(str(err), "do what the message says, and check again")
    except Exception as err:
        what = f"the check itself failed: {type(err).__name__}: {err}"
        return failed(what, "look for the cause that the message names; the other checks are not affected")


def run_checks(tell: Tell | None = None) -> list[Check]:
    """Run all checks, each under its name, on this host with this process's environment. Errors in checks do not
    raise.

    Args:
        tell: takes a line where the driver takes long.
    """
    with closing(CheckedHost(tell=tell)) as host:
        found = {name: check(name, host) for name in CHECKS}
        return [replace(one, name=_title(name, host)) for name, one in found.items()]


def _title(name: str, host: CheckedHost) -> str:
    """Return the name of a check as the vendor of the GPUs calls what it asks about."""
    if name == "CUDA":
        return host.vendor.library
    if name == "CUDA_VISIBLE_DEVICES":
        return host.vendor.variables[0]
    return name


def to_dict(checks: Sequence[Check]) -> dict[str, Any]:
    """Return the JSON document: ``{"host", "checks": [{"name", "status", "detail", "fix"}]}``."""
    rows = [{"name": one.name, "status": one.status, "detail": one.detail, "fix": one.fix} for one in checks]
    return {"host": os.uname().nodename, "checks": rows}


def exit_code(checks: Sequence[Check]) -> int:
    """Return 1 if a check failed, else 0."""
    return int(any(one.status == "failed" for one in checks))
