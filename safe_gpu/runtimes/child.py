"""A vendor's library that is asked in a child process, which it may keep waiting or end."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from ..errors import NoDriverError, SafeGpuError
from ..gpus.vendors import VENDORS
from ..host.programs import Failed, TooLate, call_in_child
from .calls import NO_GPU

# Starts the lines of a child's answer. Libraries may print other lines.
_MARK = "cuda-sees "

_WHY_SLOW = {vendor.library: vendor.is_slow for vendor in VENDORS.values()}


def visible_in_child(title: str, env: Mapping[str, str], patience: float) -> tuple[str, ...]:
    """Return the GPUs that the library with this title shows to a child process.

    Args:
        env: its environment.
        patience: seconds that it may take.

    Raises:
        NoDriverError: it could not be asked.
    """
    try:
        answer = call_in_child("safe_gpu.runtimes.child tell", title, env=env, timeout=patience)
    except TooLate:
        problem = (
            f"{title} did not answer within {patience:g} s in a child process: {_WHY_SLOW[title]}; or the driver "
            "hangs, see dmesg"
        )
    except (Failed, OSError) as err:
        problem = f"{title} could not be asked in a child process: {err}"
    else:
        return tuple(line.removeprefix(_MARK) for line in answer.split("\n") if line.startswith(_MARK))
    raise NoDriverError(problem, driver=title.lower())


def tell(title: str) -> int:
    """Print, in a child process, what names the GPUs that the library with this title shows, or an error to stderr;
    return an exit status."""
    from importlib import import_module

    from .causes import likely_cause

    library = getattr(import_module(f".{title.lower()}", __package__), title)
    try:
        library.load().initialize()
        shown = library.all_shown()
    except SafeGpuError as err:
        if getattr(err, "code", 0) == NO_GPU:
            return 0
        print(f"{err}{likely_cause(err)}", file=sys.stderr)
        return 1
    for one in shown:
        print(f"{_MARK}{one}")
    return 0
