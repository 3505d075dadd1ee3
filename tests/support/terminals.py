"""Pseudo-terminals, where they can be made."""

from __future__ import annotations

import pty

import pytest

__all__ = ["open_terminal"]


def open_terminal() -> tuple[int, int]:
    """Both ends, the caller's to close; skips the test in a container without /dev/pts."""
    try:
        return pty.openpty()
    except OSError as err:
        pytest.skip(f"no terminal can be made here (/dev/pts): {err}")
