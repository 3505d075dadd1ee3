"""Renders findings for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..text import paint, wrapped

if TYPE_CHECKING:
    from .check import Check


_COLORS = {"passed": "green", "warning": "yellow", "failed": "red", "skipped": "dim"}


def render_checks(checks: Sequence[Check], *, color: bool, width: int) -> str:
    """One paragraph for each check, with its fix, and a last line with the number of checks by status."""
    names = max((len(one.name) for one in checks), default=0)
    indent = " " * (7 + 2 + names + 2)
    lines = []
    for one in checks:
        head = f"{one.status:7}  {one.name:{names}}  "
        first, *others = wrapped(one.detail, width, indent) or [indent]
        lines.append(paint(one.status, _COLORS[one.status], color) + head[len(one.status) :] + first[len(indent) :])
        lines += others
        if one.fix:
            lines += wrapped(f"fix: {one.fix}", width, indent)
    counts = {status: sum(one.status == status for one in checks) for status in _COLORS}
    summary = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    return "\n".join([*lines, "", summary])
