"""Elements of a page for a browser, in which no text of anybody's is markup. Pure."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from html import escape

from ..host.foreign_files import printable
from ..wording.text import clock

_LONGEST = 500  # characters of a text: anybody may have written it


class Markup(str):
    """Text in which names of users and all else that is not ours have been escaped."""


def element(tag: str, *content: str, **attributes: str) -> Markup:
    """Return an element; ``class_`` and ``aria_label`` name the attributes ``class`` and ``aria-label``.

    >>> element("td", "<b>", element("b", "!"), class_="user")
    '<td class="user">&lt;b&gt;<b>!</b></td>'
    """
    inside = ""
    for name, value in attributes.items():
        html_name = name.rstrip("_").replace("_", "-")
        inside += f' {html_name}="{_escaped(value)}"'
    return Markup(f"<{tag}{inside}>{joined(*content)}</{tag}>")


def joined(*content: str) -> Markup:
    """Return texts and markup one after the other."""
    return Markup("".join(_escaped(text) for text in content))


def _escaped(text: str) -> str:
    if isinstance(text, Markup):
        return text
    return escape(printable(text[:_LONGEST]))


def table(caption: str, titles: Sequence[str], rows: Sequence[Mapping[str, str]], kind: str) -> Markup:
    """Return a table in a box of its own, which scrolls where the window is narrower; nothing without rows.

    All columns are there, also those that are empty at the moment, so that each stays in its place. The first cell of a
    row is its head.
    """
    if not rows:
        return Markup()
    heads = [_cell("th", title, title, scope="col") for title in titles]
    head = element("thead", element("tr", *heads))
    body = element("tbody", *(_row(titles, row) for row in rows))
    shown = element("table", element("caption", caption), head, body, class_=kind)
    return element("div", shown, class_="scroll", tabindex="0", role="group", aria_label=caption)


def _row(titles: Sequence[str], row: Mapping[str, str]) -> Markup:
    first, *others = titles
    head = _cell("th", first, row.get(first, ""), scope="row")
    cells = [_cell("td", title, row.get(title, "")) for title in others]
    return element("tr", head, *cells)


def _cell(tag: str, title: str, text: str, **scope: str) -> Markup:
    column = title.lower().replace("#", "place").replace(" ", "-")
    return element(tag, text, class_=column, **scope)


def when(moment: float | None, now: float) -> str:
    """Return ``14:20``, or with a day if that is not clear, as a moment that programs can read too; "" for None."""
    if moment is None:
        return ""
    exact = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))
    return element("time", clock(moment, now), datetime=exact, title=time.ctime(moment))


def user_name(name: str) -> Markup:
    """Return the name of a user, which is broken after its punctuation where it is wider than its column.

    >>> user_name("anna.mustermann")
    'anna.<wbr/>mustermann'
    """
    parts = re.split(r"(?<=[._@-])", name[:_LONGEST])
    return Markup("<wbr/>".join(_escaped(part) for part in parts))


def bar(part: float) -> Markup:
    """Return a bar that is full to this part, from 0 to 1, for the eye alone."""
    full = element("rect", width=f"{100 * min(1.0, max(0.0, part)):.0f}%", height="100%")
    return element("svg", full, class_="bar", aria_hidden="true")


def listed(lines: Sequence[str]) -> Markup:
    """Return a list of notes; no element where there are none."""
    if not lines:
        return Markup()
    items = [element("li", line) for line in lines]
    return element("ul", *items)
