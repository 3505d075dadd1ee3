"""What a check finds, and how findings are shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import TextWrapper

from ..host.procfs import printable
from ..wording.text import paint, plural, wrapped


@dataclass(frozen=True)
class Check:
    """What a check has found: ``status`` is passed, warning, failed or skipped; ``fix`` is one line or ""."""

    status: str
    detail: str
    fix: str = ""
    name: str = ""


passed = partial(Check, "passed")
"""Claims work; the detail says what was checked."""

skipped = partial(Check, "skipped")
"""The check does not apply; the detail says why."""

warning = partial(Check, "warning")
"""Claims work, but less well or less safely than users expect."""

failed = partial(Check, "failed")
"""Claims fail, or do not protect GPUs."""

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
    fixes = TextWrapper(
        width, initial_indent=_INDENT, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False
    )
    lines = []
    for status in _COLORS if verbose else ("failed", "warning"):
        for one in (one for one in checks if one.status == status):
            first, *others = wrapped(f"{one.name}: {one.detail}", width, _INDENT)
            lines += [paint(status, _COLORS[status], color) + first[len(status) :], *others]
            if one.fix:
                text = fixes.fill(printable(f"fix: {one.fix}"))
                lines.append(text.replace("fix:", paint("fix:", "bold", color), 1))
    numbers = Counter(one.status for one in checks)
    counts = [f"{numbers[status]} {status}" for status in ("passed", "skipped", "failed") if numbers[status]]
    counts += [plural(numbers["warning"], "warning")] if numbers["warning"] else []
    summary = ", ".join(counts) + ("" if verbose else " (-v lists all)")
    return "\n".join([*lines, *[""][: len(lines)], summary])
