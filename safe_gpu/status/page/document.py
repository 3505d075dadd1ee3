"""One self-contained file that shows hosts: no server, no script needed to read it, nothing fetched. Pure."""

import time
from collections.abc import Mapping
from pathlib import Path
from secrets import token_urlsafe
from string import Template
from typing import Any

from ... import __version__
from ...wording.text import format_age, plural
from .figures import NO_DOCUMENT, TITLES, figures_of
from .host import host_part
from .markup import Markup, element, joined, table
from .use import LastDay, use_part

_PAGE = Template(Path(__file__).with_name("page.html").read_text("utf-8"))


def render_page(hosts: Mapping[str, Any], *, now: float, every: float, use: Mapping[str, LastDay]) -> str:
    """Return the page.

    Args:
        hosts: name -> the document of ``status --json`` of that host, or why there is none.
        now: when it is made, in Unix seconds.
        every: how often it is made, in seconds: once thrice that has passed, it says that it is stale.
        use: name -> the use of that host's GPUs in the last day, where it is known.
    """
    several, (first, *_) = len(hosts) > 1, hosts
    free = gpus = 0
    rows, parts = [], []
    for number, (name, status) in enumerate(hosts.items()):
        row: dict[str, str] = {"Host": element("a", name, href=f"#host-{number}")}
        try:
            figures = figures_of(status, now)
            part = host_part(status, figures, now, use_part(use[name], now) if name in use else Markup())
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
