"""HTML in which every text is escaped, unless it is markup already. Pure."""

import time
from collections.abc import Mapping, Sequence
from html import escape

from ...host.procfs import printable
from ...wording.text import clock

_LONGEST = 500  # characters of a text: anybody may have written it


class Markup(str):
    """Text in which names of users and all else that is not ours have been escaped."""

    __slots__ = ()


def element(tag: str, *content: str, **attributes: str) -> Markup:
    """Return an element; ``class_`` and ``aria_label`` name the attributes ``class`` and ``aria-label``.

    >>> element("td", "<b>", element("b", "!"), class_="user")
    '<td class="user">&lt;b&gt;<b>!</b></td>'
    """
    given = ((name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items())
    inside = "".join(f' {name}="{_escaped(value)}"' for name, value in given)
    return Markup(f"<{tag}{inside}>{joined(*content)}</{tag}>")


def joined(*content: str) -> Markup:
    """Return texts and markup one after the other."""
    return Markup("".join(map(_escaped, content)))


def _escaped(text: str) -> str:
    return text if isinstance(text, Markup) else escape(printable(text[:_LONGEST]))


def table(caption: str, titles: Sequence[str], rows: Sequence[Mapping[str, str]], kind: str) -> Markup:
    """Return a table without the columns that are empty; nothing without rows. The first cell of a row is its head.

    The roles say what screen readers could not tell by the elements once CSS has laid them out otherwise.
    """
    if not rows:
        return Markup()

    def cell(title: str, text: str, tag: str, role: str, **scope: str) -> Markup:
        return element(tag, text, role=role, class_=title.lower().replace("#", "place").replace(" ", "-"), **scope)

    first, *others = shown = [title for title in titles if any(row.get(title) for row in rows)]
    head = (cell(title, title, "th", "columnheader", scope="col") for title in shown)
    body = [
        element(
            "tr",
            cell(first, row.get(first, ""), "th", "rowheader", scope="row"),
            *(cell(title, row.get(title, ""), "td", "cell") for title in others),
            role="row",
        )
        for row in rows
    ]
    return element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *head, role="row"), role="rowgroup"),
        element("tbody", *body, role="rowgroup"),
        role="table",
        class_=kind,
    )


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
    return element("ul", *(element("li", line) for line in lines)) if lines else Markup()
