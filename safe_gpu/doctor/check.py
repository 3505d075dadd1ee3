"""What a check finds, and how findings are shown."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from ..host.procfs import printable
from ..wording.text import paint, plural, wrapped


@dataclass(frozen=True)
class Finding:
    """The result of a check: ``status`` is passed, warning, failed or skipped; ``fix`` is one line or ""."""

    status: str
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Check:
    """A finding with the name of its check."""

    name: str
    status: str
    detail: str
    fix: str = ""


def passed(detail: str) -> Finding:
    """Return a finding of no problem; ``detail`` says what was checked."""
    return Finding("passed", detail)


def skipped(detail: str) -> Finding:
    """Return a finding that the check does not apply; ``detail`` says why."""
    return Finding("skipped", detail)


def warning(detail: str, fix: str) -> Finding:
    """Return a finding that claims work, but less well or less safely than users expect."""
    return Finding("warning", detail, fix)


def failed(detail: str, fix: str) -> Finding:
    """Return a finding that claims fail, or do not protect GPUs."""
    return Finding("failed", detail, fix)


_COLORS = {"failed": "red", "warning": "yellow", "passed": "green", "skipped": "dim"}

_INDENT = " " * 9


def render_checks(checks: Sequence[Check], *, color: bool, width: int, verbose: bool = False) -> str:
    """Return what is wrong, worst first and each with its fix, and a last line with the number of checks by status.

    Args:
        checks: the checks in the order of the report.
        color: paint the status and ``fix:``.
        width: the columns of the terminal. A word of a fix is never cut, so that it can be copied.
        verbose: list the checks that passed or were skipped too.
    """
    lines = []
    for status in _COLORS if verbose else ("failed", "warning"):
        for one in (one for one in checks if one.status == status):
            first, *others = wrapped(f"{one.name}: {one.detail}", width, _INDENT)
            lines += [paint(status, _COLORS[status], color) + first[len(status) :], *others]
            if one.fix:
                text = textwrap.fill(
                    printable(f"fix: {one.fix}"),
                    width,
                    initial_indent=_INDENT,
                    subsequent_indent=_INDENT,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
                lines.append(text.replace("fix:", paint("fix:", "bold", color), 1))
    numbers = {status: sum(one.status == status for one in checks) for status in ("passed", "skipped", "failed")}
    warnings = len(checks) - sum(numbers.values())
    counts = [f"{number} {status}" for status, number in numbers.items() if number]
    counts += [plural(warnings, "warning")] if warnings else []
    summary = ", ".join(counts) + ("" if verbose else " (-v lists all)")
    return "\n".join([*lines, *[""][: len(lines)], summary])
