"""The answers of many hosts as lines of a table and as JSON. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...host.procfs import printable_lines
from ...status.facts import SCHEMA
from ...status.page.figures import TITLES
from ...status.render import table
from ...wording.text import GAP, Column, paint, plural, wrapped
from .answer import Answer

_RIGHT = ("Free", "Waiting", "Longest")

_MOST = {"Held by": 80}  # columns of a terminal

Answers = Mapping[str, Answer]
"""Name of a host -> its answer, in the order of the lines."""


def arranged(answers: Answers, most_free_first: bool) -> Answers:
    """Return them in the order of the lines, where a host under a second name has that in place of its figures."""
    found: dict[str, Answer] = {}
    names: dict[str, str] = {}
    for name, one in answers.items():
        if one.figures and (first := names.setdefault(one.figures.identity, name)) != name:
            one = replace(one, figures=None, error=f"the same host as {first}", same_as=first)
        found[name] = one
    if not most_free_first:
        return found
    return dict(sorted(found.items(), key=lambda item: -item[1].figures.free if item[1].figures else 1))


def render_hosts(answers: Answers, *, width: int, color: bool, verbose: bool = False) -> str:
    """Return a line for each host, or why it has no figures; ``verbose`` adds each host's own table."""
    known = {name: one.figures for name, one in answers.items() if one.figures}
    free, total = sum(one.free for one in known.values()), sum(one.total for one in known.values())
    waiting = sum(one.waiting for one in known.values())
    hosts = plural(sum(not one.same_as for one in answers.values()), "host")
    summary = f"{free} of {plural(total)} free on {len(known)} of {hosts}" + (f", {waiting} waiting" if waiting else "")

    columns = [names := Column("HOST", answers)]
    for title in TITLES:
        cells = (known[name].cells[title] if name in known else "" for name in answers)
        columns.append(Column(title.upper(), cells, right=title in _RIGHT, most=_MOST.get(title, 40)))
    head, *rows = table(columns, width, optional=("GPU", "LONGEST"))
    lines = [paint(summary, "bold", color), "", paint(head, "bold", color)]
    for (name, one), begin, row in zip(answers.items(), names.cells, rows, strict=True):
        indent = " " * (names.width + len(GAP))
        if name in known:
            lines.append(row)
            told = [line for text in known[name].broken for line in wrapped(text, width, indent)]
        else:
            told = wrapped(one.error, width, names.padded(begin) + GAP[1:], indent)
        lines += (paint(line, "yellow", color) for line in told)
    for name in known if verbose else ():
        lines += ["", paint(f"{name}:", "bold", color), printable_lines(answers[name].text.strip("\n"), 1 << 17)]
    return "\n".join(lines)


def document(answers: Answers) -> dict[str, Any]:
    """Return the document of ``status --json`` with hosts: ``status`` or ``error`` of each.

    Where an earlier name stands for the same host, ``same_as`` is that name.
    """
    hosts = {
        name: ({"error": one.error} if one.status is None else {"status": one.status})
        | ({"same_as": one.same_as} if one.same_as else {})
        for name, one in answers.items()
    }
    return {"schema": SCHEMA, "hosts": hosts}
