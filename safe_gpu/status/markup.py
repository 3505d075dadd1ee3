"""Elements of a page for a browser, in which no text of anybody's is markup. Pure."""

from __future__ import annotations

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
    """Return a table without the columns that are empty; nothing without rows. The first cell of a row is its head.

    The roles say what screen readers could not tell by the elements once CSS has laid them out otherwise.
    """
    if not rows:
        return Markup()
    shown = [title for title in titles if any(row.get(title) for row in rows)]
    heads = [_cell("th", title, title, role="columnheader", scope="col") for title in shown]
    head = element("thead", element("tr", *heads, role="row"), role="rowgroup")
    body = element("tbody", *(_row(shown, row) for row in rows), role="rowgroup")
    return element("table", element("caption", caption), head, body, role="table", class_=kind)


def _row(titles: Sequence[str], row: Mapping[str, str]) -> Markup:
    first, *others = titles
    head = _cell("th", first, row.get(first, ""), role="rowheader", scope="row")
    cells = [_cell("td", title, row.get(title, ""), role="cell") for title in others]
    return element("tr", head, *cells, role="row")


def _cell(tag: str, title: str, text: str, *, role: str, **scope: str) -> Markup:
    column = title.lower().replace("#", "place").replace(" ", "-")
    return element(tag, text, role=role, class_=column, **scope)


def when(moment: float | None, now: float) -> str:
    """Return ``14:20``, or with a day if that is not clear, as a moment that programs can read too; "" for None."""
    if moment is None:
        return ""
    exact = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))
    return element("time", clock(moment, now), datetime=exact, title=time.ctime(moment))


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
