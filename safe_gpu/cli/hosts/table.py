"""The answers of many hosts as lines of a table and as JSON. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from ...host.procfs import printable_lines
from ...status.facts import SCHEMA
from ...status.render import table
from ...wording.text import GAP, Column, paint, plural, short_age, wrapped
from .answer import Answer

Answers = Mapping[str, Answer]
"""Name of a host -> its answer, in the order of the lines."""


def same_hosts(answers: Answers) -> dict[str, str]:
    """Return the names of hosts that another name before them stands for too -> that name."""
    first: dict[str, str] = {}
    named = {name: first.setdefault(one.identity, name) for name, one in answers.items() if one.status is not None}
    return {name: other for name, other in named.items() if other != name}


def most_free_first(answers: Answers) -> Answers:
    """Return them with the hosts that have the most free GPUs first, and those without figures last."""
    return dict(sorted(answers.items(), key=lambda item: (item[1].status is None, -item[1].free)))


def summary(answers: Answers) -> str:
    """Return how much is free: ``11 of 24 GPUs free on 3 of 4 hosts, 5 waiting``."""
    hosts = [one for name, one in answers.items() if name not in same_hosts(answers)]
    known = [one for one in hosts if one.status is not None]
    free, total, waiting = (sum(getattr(one, key) for one in known) for key in ("free", "total", "waiting"))
    text = f"{free} of {plural(total)} free on {len(known)} of {plural(len(hosts), 'host')}"
    return f"{text}, {waiting} waiting" if waiting else text


def render_hosts(answers: Answers, *, width: int, color: bool, verbose: bool = False) -> str:
    """Return a line for each host, or why it has no figures; ``verbose`` adds each host's own table."""
    reasons = {name: one.error for name, one in answers.items() if one.status is None}
    reasons |= {name: f"the same host as {other}" for name, other in same_hosts(answers).items()}

    def column(title: str, text: Callable[[Answer], str], right: bool = True, most: int = 40) -> Column:
        cells = ("" if name in reasons else text(one) for name, one in answers.items())
        return Column(title, cells, right=right, most=most)

    names = Column("HOST", answers)
    columns = (
        names,
        column("FREE", lambda one: f"{one.free} of {one.total}"),
        column("GPU", _models, right=False),
        column("WAITING", lambda one: str(one.waiting or "")),
        column("LONGEST", lambda one: "" if one.longest is None else short_age(one.longest)),
        column("HELD BY", _holders, right=False, most=80),
    )
    title, *rows = table(columns, width, optional=("GPU", "LONGEST"))
    lines = [paint(summary(answers), "bold", color), "", paint(title, "bold", color)]
    for (name, one), begin, row in zip(answers.items(), names.cells, rows, strict=True):
        indent = " " * (names.width + len(GAP))
        if name in reasons:
            told = wrapped(reasons[name], width, names.padded(begin) + GAP[1:], indent)
        else:
            lines.append(row)
            told = [line for text in one.broken for line in wrapped(text, width, indent)]
        lines += (paint(line, "yellow", color) for line in told)
    for name in (one for one in answers if verbose and one not in reasons):
        lines += ["", paint(f"{name}:", "bold", color), printable_lines(answers[name].text.strip("\n"), 1 << 17)]
    return "\n".join(lines)


def _models(one: Answer) -> str:
    if len(one.models) == 1:
        return next(iter(one.models))
    return ", ".join(f"{number} x {name}" for name, number in one.models.items())


def _holders(one: Answer) -> str:
    most = sorted(one.held.items(), key=lambda item: -item[1])
    return ", ".join(f"{user} {round(number, 2):g}" for user, number in most)


def document(answers: Mapping[str, Answer]) -> dict[str, Any]:
    """Return the document of ``status --json`` with hosts: ``status`` or ``error`` of each.

    Where an earlier name stands for the same host, ``same_as`` is that name.
    """
    others = same_hosts(answers)
    hosts = {
        name: ({"error": one.error} if one.status is None else {"status": one.status})
        | ({"same_as": others[name]} if name in others else {})
        for name, one in answers.items()
    }
    return {"schema": SCHEMA, "hosts": hosts}
