"""The state of hosts as a page for a browser."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from secrets import token_urlsafe
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .. import __version__
from ..gpus.devices import MIG_IS_ON, Gpu, HeldAs, Holder
from ..gpus.windows import Window
from ..host.foreign_files import printable
from ..host.programs import program_names
from ..wording.text import clock, format_age, plural, short_age
from .facts import FREE, GpuStatus, HostStatus, ProcessStatus, WaiterStatus
from .history import hours
from .notes import notes_of
from .rows import TableRow, rows_of
from .table import COLUMNS_OF_GPU, COLUMNS_OF_USER
from .waiting import queue_of

if TYPE_CHECKING:
    from .report import ReportRow

Document = Mapping[str, Any]

TITLES = ("Free", "GPU", "Waiting", "Longest", "Held by")

NO_DOCUMENT = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError)
"""What comes of an answer that is no such document."""


class Figures(NamedTuple):
    """A line on one host.

    Attributes:
        free, total: numbers of GPUs.
        waiting, waiters: the number of waiters, and their users.
        cells: its cells in a table of hosts, by title.
        broken: sentences on the GPUs that cannot be used.
        identity: the same for two names of one host.
    """

    free: int
    total: int
    waiting: int
    waiters: str
    cells: Mapping[str, str]
    broken: tuple[str, ...]
    identity: str


def figures_of(status: Document, now: float) -> Figures:
    """Return them.

    Raises:
        NO_DOCUMENT: it is none.
    """
    # Of a GPU that is divided the instances count.
    gpus = [one for one in status["gpus"] if not one["reason"].startswith(MIG_IS_ON)]
    free, waiting = sum(one["state"] in FREE for one in gpus), len(status["queue"])
    since = [one["since"] for one in status["queue"] if one["since"] is not None]
    models = Counter(one["name"] or "(no name)" for one in gpus)
    held: Counter[str] = Counter()
    for one in gpus:
        pieces = one.get("pieces", ())  # an older version tells none
        for claim in one["shares"] or pieces or filter(None, [one["claim"]]):
            if "share" in claim:
                part = (claim["share"] or 0) / (one["memory_total"] or 1)
            else:
                part = 1 / max(1, len(pieces))
            held[claim["user"] or "?"] += part  # type: ignore[assignment]
    cells = (
        f"{free} of {len(gpus)}",
        ", ".join(f"{number} x {name}" if len(models) > 1 else name for name, number in models.items()),
        str(waiting or ""),
        short_age(now - min(since)) if since else "",
        ", ".join(f"{user} {round(number, 2):g}" for user, number in held.most_common()),
    )
    waiters = printable(", ".join(dict.fromkeys(one["user"] or "?" for one in status["queue"])))
    shown = dict(zip(TITLES, map(printable, cells), strict=True))
    unusable = [one for one in gpus if one["state"] == "unusable" and one["state_shown"] != "drained"]
    broken = tuple(printable(f"GPU {one['index']}: {one['reason']}") for one in unusable)
    identity = repr((status["host"], status["state_dir"], *(one["uuid"] for one in gpus)))
    return Figures(free, len(gpus), waiting, waiters, shown, broken, identity)


_LONGEST = 500  # characters of a text: anybody may have written it


class Markup(str):
    """Text in which names of users and all else that is not ours have been escaped."""


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

    def line(row: Mapping[str, str]) -> Markup:
        others = (cell(title, row.get(title, ""), "td", "cell") for title in shown[1:])
        return element("tr", cell(shown[0], row.get(shown[0], ""), "th", "rowheader", scope="row"), *others, role="row")

    shown = [title for title in titles if any(row.get(title) for row in rows)]
    heads = (cell(title, title, "th", "columnheader", scope="col") for title in shown)
    head = element("thead", element("tr", *heads, role="row"), role="rowgroup")
    body = element("tbody", *map(line, rows), role="rowgroup")
    return element("table", element("caption", caption), head, body, role="table", class_=kind)


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


_Record = TypeVar("_Record")

_TITLES = ("GPU", "State", "Memory", "Util", "Temp", "User", "Job", "Command", "Since", "Until")

_TOLD = ("drained by ", "reserved by ", "stopped ", "taken last ")
"""What is told of the reasons of a GPU in use: others may have a command with its arguments."""


def host_part(document: Document, figures: Figures, now: float, use: Markup) -> Markup:
    """Return all about a host.

    Raises:
        NO_DOCUMENT: it is no such document.
    """
    status = _status_of(document, now)
    about = f"{figures.cells['Free']} free, {figures.cells['GPU']} ({status.driver} {status.driver_version})"
    if figures.waiting:
        about += f", {figures.waiting} waiting, the first for {figures.cells['Longest'] or '?'}"
    rows = [_row(row, one.label, now) for one in status.gpus for row in rows_of(one, now)]
    notes = listed([*notes_of(status), *status.warnings])
    left = element("div", table("GPUs", _TITLES, rows, "gpus"), notes)
    parts = element("div", left, element("div", _waiting(status), use), class_="parts")
    return joined(element("p", about, class_="dim"), parts)


def _row(row: TableRow, label: str, now: float) -> Mapping[str, str]:
    claim = row.claim or Holder()
    state = row.state.strip()
    memory = Markup()
    if row.memory_used is not None and row.memory_total:
        memory = joined(bar(row.memory_used / row.memory_total), element("span", row.memory))
    return {
        **{_title(column.title): column.cell(row) for column in (*COLUMNS_OF_GPU, *COLUMNS_OF_USER)},
        "GPU": label,
        "State": element("b", state, class_=state.replace(" ", "-")),
        "Memory": memory,
        "Command": row.who.command or row.text,
        "Since": when(claim.since, now),
        "Until": when(claim.until, now),
    }


def _title(column: str) -> str:
    """Return the title that a column of the terminal has on the page."""
    return column.capitalize().partition("/")[0]


def _waiting(status: HostStatus) -> Markup:
    queue = queue_of(status, verbose=True, most_of_user=99)
    titles = [_title(column.title) for column in queue.columns]
    cells_of_rows = zip(*(column.cells for column in queue.columns), strict=True)
    rows = [dict(zip(titles, cells, strict=True)) for cells in cells_of_rows]
    waiters = table(f"Waiting, {queue.order}", titles, rows, "queue")
    more = len(status.queue) - len(queue.groups)
    if more == 0:
        return waiters
    return joined(waiters, listed([f"and {more} more"]))


def _status_of(document: Document, now: float) -> HostStatus:
    """Return the status of which a document tells, with commands by the names of program and script."""

    def record(kind: type[_Record], facts: Document, **more: Any) -> _Record:
        if "command" in facts:
            more["command"] = program_names((facts["command"] or "").split())
        names = getattr(kind, "_fields", None) or kind.__dataclass_fields__  # type: ignore[attr-defined]
        return kind(**{name: facts[name] for name in names if name in facts} | more)

    def claim_of(facts: Document) -> Holder:
        held_as = None
        if facts.get("held_as") is not None:
            held_as = record(HeldAs, facts["held_as"])
        return record(Holder, facts, held_as=held_as)

    def gpu(one: Document) -> GpuStatus:
        in_use, shown = one["claim"] or one["processes"], one["state_shown"]
        reasons = [reason.partition(", since a claim failed")[0] for reason in one["reason"].split("; ")]
        told = "; ".join(reason for reason in reasons if reason.startswith(_TOLD) or not in_use)
        claim = None
        if one["shares"]:
            claim = Holder.of_sharers(claim_of(each) for each in one["shares"])
        elif one.get("pieces"):
            first, *others = (claim_of(each) for each in one["pieces"])
            claim = first._replace(others=tuple(others))
        elif one["claim"]:
            claim = claim_of(one["claim"])
        processes = tuple(record(ProcessStatus, each) for each in one["processes"])
        facts = {"claim": claim, "processes": processes, "reason": told, "fault": told, "drained": shown == "drained"}
        facts |= {"idle": True, "idle_report_after": 0.0} if shown == "idle" else {"idle": False}
        return record(GpuStatus, one, gpu=record(Gpu, one, index=one["label"], processes=()), **facts)

    def window(one: Document) -> Window:
        return Window(one["from"], one["until"], tuple(one["gpus"]), one["for"] or "", one["reason"], one["by"])

    queue = tuple(record(WaiterStatus, one) for one in document["queue"])
    gpus, windows = tuple(map(gpu, document["gpus"])), tuple(map(window, document["windows"]))
    return record(HostStatus, document, taken_at=now, gpus=gpus, queue=queue, windows=windows)


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
    times = {"now": f"{now:.0f}", "every": f"{every:g}", "after": f"{3 * every:g}", "age": format_age(every)}
    made = element("time", time.strftime("%a %Y-%m-%d %H:%M %Z", time.localtime(now)))
    main = joined(table("Hosts", ("Host", *TITLES), rows, "hosts") if several else "", *parts)
    nonce = token_urlsafe()  # what a name that slipped in as markup could not know
    footer = joined(of_whom, f"safe-gpu {__version__}")
    return _PAGE.substitute(times, nonce=nonce, title=joined(title), made=made, main=main, footer=footer)


def _use(users: Sequence[ReportRow], gpus: int) -> Markup:
    """Return what the users of that many GPUs have had of them in a day."""
    largest = max((row.gpu_hours_most for row in users), default=0.0) or 1.0
    rows = []
    for row in users[:_MOST_USERS]:
        used = joined(bar(row.gpu_hours_most / largest), hours(row.gpu_hours_least, row.gpu_hours_most))
        wait = "" if row.wait_mean is None else short_age(row.wait_mean)
        rows.append(dict(zip(_USER, (row.key, str(row.claims), used, wait), strict=True)))
    others = [f"and {plural(len(users) - len(rows), 'user')} with less"] * (len(users) > len(rows))
    total = sum(row.gpu_hours_most for row in users)
    title = element("h3", f"The last day: {total:.0f} of {24 * gpus} GPU-hours claimed")
    return joined(title, table("GPU-hours by user", _USER, rows, "use"), listed(others))
