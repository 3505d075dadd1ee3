"""Questions to a vendor's library that a short-lived child process asks."""

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ..errors import NoDriverError, SafeGpuError
from ..host.programs import Failed, TooLate, call_in_child
from .causes import likely_cause

PATIENCE = 120.0
"""Seconds to wait for the child. Without persistence mode, the start of CUDA on eight GPUs can take over 20 s."""

_HANGS = "the driver hangs, see dmesg"

_SLOW = {
    "CUDA": "turn persistence mode on (nvidia-persistenced, or `nvidia-smi -pm 1` as root) if the host starts its GPUs "
    f"slowly; otherwise {_HANGS}"
}

# Starts the lines of the answer. Libraries may print other lines.
_MARK = "cuda-sees "


def ask_child(
    question: str, env: Mapping[str, str], timeout: float = PATIENCE, *, library: str = "CUDA"
) -> tuple[str, ...]:
    """Put a question to a library in a child process.

    Args:
        question: "list": which GPUs it shows; "hold": the same, after a try to hold the first.
        env: the whole environment of the child.
        timeout: seconds to wait for the child.
        library: the title of a runtime.

    Raises:
        NoDriverError: the child failed or did not answer in time; the message says why.
    """
    driver = library.lower()
    try:
        answer = call_in_child("safe_gpu.runtimes.child _child", question, library, env=env, timeout=timeout)
    except OSError as err:
        raise NoDriverError(f"a child process to ask {library} could not be started: {err}", driver=driver) from err
    except TooLate as err:
        problem = f"{library} did not answer within {timeout:g} s in a child process: {_SLOW.get(library, _HANGS)}"
        raise NoDriverError(problem, driver=driver) from err
    except Failed as err:
        raise NoDriverError(f"{library} could not be asked in a child process: {err}", driver=driver) from err
    return tuple(line.removeprefix(_MARK) for line in answer.split("\n") if line.startswith(_MARK))


def library_of(title: str) -> Any:
    """Return the library with this title: ``HIP`` of the module ``hip``."""
    return getattr(import_module(f".{title.lower()}", __package__), title)


def _child(question: str, title: str) -> int:
    """Do the child's part: print what names the GPUs to stdout, or an error to stderr; return an exit status."""
    library = library_of(title)
    try:
        if question == "hold":
            library.hold(0).release()
        shown = library.load().listed()
    except SafeGpuError as err:
        print(f"{err}{likely_cause(err)}", file=sys.stderr)
        return 1
    print(*(_MARK + one for one in shown), sep="\n")
    return 0
