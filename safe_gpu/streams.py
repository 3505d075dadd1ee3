"""The standard streams of a command: all three there, what goes wrong said on stderr, a broken stdout let go."""

from __future__ import annotations

import os
import sys

__all__ = ["drop_output", "open_standard_streams", "say"]


def open_standard_streams() -> None:
    """Let none of the numbers 0 to 2 be free, or a lease takes it and is printed to; the command finds them closed."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def drop_output() -> None:
    """What is still buffered cannot be written, and the interpreter would try once more at exit."""
    fd = os.open(os.devnull, os.O_WRONLY)
    os.dup2(fd, sys.stdout.fileno())
    os.close(fd)


def say(text: str) -> None:
    """One line on stderr."""
    try:
        print(f"safe-gpu: {text}", file=sys.stderr, flush=True)
    except OSError:
        pass  # nobody listens
