"""One self-contained file that shows hosts: no server, no script needed to read it, nothing fetched. Pure."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING

from ... import __version__
from ...wording.text import format_age, plural
from .host import host_part
from .looks import SCRIPT, STYLE
from .markup import Markup, element, exact, joined, table
from .use import use_part

if TYPE_CHECKING:
    from .host import Document
    from .use import LastDay

_HOST = ("Host", "Free", "GPUs", "Waiting", "Longest wait", "Holders")

_NOT_OURS = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, OSError)

_PAGE = """<!DOCTYPE html>
<html lang="en" data-made="{now:.0f}" data-every="{every:g}" style="--after:{after:g}s">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none';style-src 'unsafe-inline';\
script-src 'sha256-{hash_of_script}';connect-src 'self';base-uri 'none';form-action 'none'">
{title}<style>{style}</style></head>
<body>
{body}
<script>{script}</script></body></html>
"""


def render_page(hosts: Mapping[str, Document | str], *, now: float, every: float, use: Mapping[str, LastDay]) -> str:
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
        try:
            if isinstance(status, str):
                raise ValueError(status)
            counts, row, part = host_part(status, now, use_part(use[name], now) if name in use else Markup())
            free, gpus = free + counts[0], gpus + counts[1]
        except _NOT_OURS as err:
            told = status if isinstance(status, str) else f"its answer cannot be read: {err!r}"
            row = {"GPUs": element("span", told, class_="error")}
            part = element("p", *row.values())
        rows.append({"Host": element("a", name, href=f"#host-{number}")} | row)
        head = element("h2", name) if several else Markup()
        parts.append(element("section", head, part, id=f"host-{number}", aria_label=name))
    title = f"{plural(len(hosts), 'host') if several else first}: {free} of {plural(gpus)} free"
    date = element("time", time.strftime("%a %Y-%m-%d %H:%M %Z", time.localtime(now)), datetime=exact(now))
    stale = element("strong", "stale", class_="stale")
    made = element("p", "made ", date, f", every {format_age(every)} ", stale, class_="made", role="status")
    overview = table("Hosts", _HOST, rows, "hosts") if several else Markup()
    of_whom = f"The last day's use is that of {', '.join(use)}, where the page is made. " if several and use else ""
    header, footer = (
        element("header", element("h1", title), made),
        element("footer", of_whom, f"safe-gpu {__version__}"),
    )
    return _PAGE.format(
        now=now,
        every=every,
        after=3 * every,
        hash_of_script=b64encode(sha256(SCRIPT.encode()).digest()).decode(),
        title=element("title", title),
        style=STYLE,
        body=joined(header, element("main", overview, *parts), footer),
        script=SCRIPT,
    )
