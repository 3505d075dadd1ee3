"""One self-contained file that shows hosts: no server, no script needed to read it, nothing fetched. Pure."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from secrets import token_urlsafe
from string import Template
from typing import Any

from ... import __version__
from ...wording.text import format_age, plural, short_age
from ..history.claims import hours
from ..history.report import ReportRow
from .figures import NO_DOCUMENT, TITLES, figures_of
from .host import host_part
from .markup import Markup, bar, element, joined, listed, table

_MOST_USERS = 12  # that are listed, those with the most GPU-hours

_USER = ("User", "Claims", "GPU-hours", "Mean wait")

_PAGE = Template(Path(__file__).with_name("page.html").read_text("utf-8"))


def render_page(hosts: Mapping[str, Any], *, now: float, every: float, use: Mapping[str, Sequence[ReportRow]]) -> str:
    """Return the page.

    Args:
        hosts: name -> the document of ``status --json`` of that host, or why there is none.
        now: when it is made, in Unix seconds.
        every: how often it is made, in seconds: once thrice that has passed, it says that it is stale.
        use: name -> the users of that host's GPUs in the last day, the most first, where they are known.
    """
    several, (first, *_) = len(hosts) > 1, hosts
    free = gpus = 0
    rows, parts = [], []
    for number, (name, status) in enumerate(hosts.items()):
        row: dict[str, str] = {"Host": element("a", name, href=f"#host-{number}")}
        try:
            figures = figures_of(status, now)
            part = host_part(status, figures, now, _use(use[name], figures.total) if name in use else Markup())
            row |= figures.cells
            free, gpus = free + figures.free, gpus + figures.total
        except NO_DOCUMENT as err:
            told = status if isinstance(status, str) else f"its answer cannot be read: {err!r}"
            row["GPU"] = part = element("span", told, class_="error")
        rows.append(row)
        head = element("h2", name) if several else Markup()
        parts.append(element("section", head, part, id=f"host-{number}", aria_label=name))
    title = f"{plural(len(hosts), 'host') if several else first}: {free} of {plural(gpus)} free"
    of_whom = f"The last day's use is that of {', '.join(use)}, where the page is made. " if several and use else ""
    return _PAGE.substitute(
        now=f"{now:.0f}",
        every=f"{every:g}",
        after=f"{3 * every:g}",
        age=format_age(every),
        nonce=token_urlsafe(),  # what a name that slipped in as markup could not know
        title=joined(title),
        made=element("time", time.strftime("%a %Y-%m-%d %H:%M %Z", time.localtime(now))),
        main=joined(table("Hosts", ("Host", *TITLES), rows, "hosts") if several else "", *parts),
        footer=joined(of_whom, f"safe-gpu {__version__}"),
    )


def _use(users: Sequence[ReportRow], gpus: int) -> Markup:
    """Return what the users of that many GPUs have had of them in a day."""
    largest = max((row.gpu_hours_most for row in users), default=0.0) or 1.0
    rows = [
        {
            "User": row.key,
            "Claims": str(row.claims),
            "GPU-hours": joined(bar(row.gpu_hours_most / largest), hours(row.gpu_hours_least, row.gpu_hours_most)),
            "Mean wait": "" if row.wait_mean is None else short_age(row.wait_mean),
        }
        for row in users[:_MOST_USERS]
    ]
    others = [f"and {plural(len(users) - len(rows), 'user')} with less"] * (len(users) > len(rows))
    total = sum(row.gpu_hours_most for row in users)
    title = element("h3", f"The last day: {total:.0f} of {24 * gpus} GPU-hours claimed")
    return joined(title, table("GPU-hours by user", _USER, rows, "use"), listed(others))
