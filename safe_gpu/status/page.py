"""The state of hosts as a page for a browser."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from secrets import token_urlsafe
from string import Template
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..gpus.devices import Holder
from ..wording.text import format_age, plural, short_age
from .document import NO_DOCUMENT, TITLES, Document, Figures, figures_of, status_in
from .facts import HostStatus
from .history import hours
from .markup import Markup, bar, element, joined, listed, table, user_name, when
from .notes import notes_of
from .rows import TableRow, rows_of
from .table import COLUMNS_OF_GPU, COLUMNS_OF_USER
from .waiting import notes_on_waiter, queue_of

if TYPE_CHECKING:
    from .report import ReportRow

_AGES = ("HELD", "LEFT")  # columns of the terminal in whose place the page has times, which stay right while it is open

_TITLES_OF_USERS = ("User", "Claims", "GPU-hours", "Used", "Idle", "Mean wait")

_MOST_USERS = 12  # that are listed, those with the most GPU-hours

_PAGE = Template(files(__package__).joinpath("page.html").read_text("utf-8"))


def render_page(hosts: Mapping[str, Any], *, now: float, every: float, use: Mapping[str, Sequence[ReportRow]]) -> str:
    """Return the page.

    Args:
        hosts: name -> the document of ``status --json`` of that host, or why there is none.
        now: when it is made, in Unix seconds.
        every: how often it is made, in seconds. After three times as long the page says that it is stale.
        use: name -> the users of that host's GPUs in the last day, the most first, where they are known.
    """
    are_several = len(hosts) > 1
    free = 0
    gpus = 0
    has_instances = False
    rows = []
    sections = []
    for number, (name, answer) in enumerate(hosts.items()):
        row: dict[str, str] = {"Host": element("a", name, href=f"#host-{number}")}
        try:
            figures = figures_of(answer, now)
            part = host_part(answer, figures, now, _use(use.get(name), figures.total), is_alone=not are_several)
        except NO_DOCUMENT as err:
            part = element("span", _why_none(answer, err), class_="error")
            row["GPU"] = part
        else:
            row.update(figures.cells)
            free += figures.free
            gpus += figures.total
            has_instances = has_instances or figures.has_instances
        rows.append(row)
        head = Markup()
        if are_several:
            head = element("h2", name)
        sections.append(element("section", head, part, id=f"host-{number}", aria_label=name))

    devices = plural(gpus)
    if has_instances:
        devices = f"{gpus} GPUs and MIG instances"
    title, *_ = hosts
    overview = Markup()
    of_whom = ""
    if are_several:
        title = plural(len(hosts), "host")
        overview = table("Hosts", ("Host", *TITLES), rows, "hosts")
        if use:
            of_whom = f"The last day's use is that of {', '.join(use)}, where the page is made. "
    return _PAGE.substitute(
        nonce=token_urlsafe(),  # what a name that slipped in as markup could not know
        title=joined(f"{title}: {free} of {devices} free"),
        made=element("time", time.strftime("%a %Y-%m-%d %H:%M %Z", time.localtime(now))),
        main=joined(overview, *sections),
        footer=joined(of_whom, f"safe-gpu {__version__}"),
        now=f"{now:.0f}",
        every=f"{every:g}",
        after=f"{3 * every:g}",
        age=format_age(every),
    )


def _why_none(answer: object, err: Exception) -> str:
    if isinstance(answer, str):
        return answer
    return f"its answer cannot be read: {err!r}"


def host_part(document: Document, figures: Figures, now: float, use: Markup, *, is_alone: bool) -> Markup:
    """Return all about a host.

    Args:
        use: what its GPUs have been used for.
        is_alone: whether the page has no other, so that its title says how many GPUs are free.

    Raises:
        NO_DOCUMENT: it is no such document.
    """
    status = status_in(document, now)
    about = f"{figures.cells['GPU']} ({status.driver} {status.driver_version})"
    if not is_alone:
        about = f"{figures.cells['Free']} free, {about}"
    if figures.waiting:
        about += f", {figures.waiting} waiting, the first for {figures.cells['Longest'] or '?'}"
    notes = listed([*notes_of(status), *status.warnings])
    left = element("div", _gpus(status), notes)
    parts = element("div", left, element("div", _waiting(status), use), class_="parts")
    return joined(element("p", about, class_="dim"), parts)


def _gpus(status: HostStatus) -> Markup:
    now = status.taken_at
    rows = []
    for one in status.gpus:
        rows += [_cells(row, one.label, now) for row in rows_of(one, now)]
    return table("GPUs", _titles_of_gpus(), rows, "gpus")


def _titles_of_gpus() -> list[str]:
    """Return the titles of the table of GPUs: what the terminal shows of itself, with times in place of ages."""
    columns = (*COLUMNS_OF_GPU, *COLUMNS_OF_USER)
    shown = [column.title for column in columns if not column.only_verbose and column.title not in _AGES]
    return [*(_title(title) for title in shown), "Since", "Until"]


def _cells(row: TableRow, label: str, now: float) -> Mapping[str, str]:
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
        "User": user_name(row.who.user),
        "Command": row.who.command or row.text,
        "Since": when(claim.since, now),
        "Until": when(claim.until, now),
    }


def _title(column: str) -> str:
    """Return the title that a column of the terminal has on the page."""
    if column == "GPU":
        return column
    return column.capitalize().partition("/")[0]


def _waiting(status: HostStatus) -> Markup:
    queue = queue_of(status, verbose=True, most_of_user=99, whole_names=True)
    titles = [_title(column.title) for column in queue.columns]
    cells_of_rows = zip(*(column.cells for column in queue.columns), strict=True)
    rows = []
    for cells in cells_of_rows:
        row = dict(zip(titles, cells, strict=True))
        row["User"] = user_name(row["User"])
        rows.append(row)
    waiters = table(f"Waiting, {queue.order}", titles, rows, "queue")
    notes = []
    for group in queue.groups:
        first = group[0]
        notes += [f"#{first.position}: {note}" for note in notes_on_waiter(first)]
    more = len(status.queue) - len(queue.groups)
    if more > 0:
        notes.append(f"and {more} more")
    return joined(waiters, listed(notes))


def _use(users: Sequence[ReportRow] | None, gpus: int) -> Markup:
    """Return what the users of that many GPUs have had of them in a day; nothing if that is not known."""
    if users is None:
        return Markup()
    largest = max((row.gpu_hours_most for row in users), default=0.0) or 1.0
    rows = [_cells_of_user(row, largest) for row in users[:_MOST_USERS]]
    total = sum(row.gpu_hours_most for row in users)
    title = element("h3", f"The last day: {total:.0f} of {24 * gpus} GPU-hours claimed")
    shown = table("GPU-hours by user", _TITLES_OF_USERS, rows, "use")
    others = len(users) - len(rows)
    if others == 0:
        return joined(title, shown)
    return joined(title, shown, listed([f"and {plural(others, 'user')} with less"]))


def _cells_of_user(row: ReportRow, largest: float) -> dict[str, str]:
    wait = ""
    if row.wait_mean is not None:
        wait = short_age(row.wait_mean)
    return {
        "User": user_name(row.key),
        "Claims": str(row.claims),
        "GPU-hours": joined(bar(row.gpu_hours_most / largest), hours(row.gpu_hours_least, row.gpu_hours_most)),
        "Used": row.use.used_text(),
        "Idle": row.use.idle_text(),
        "Mean wait": wait,
    }
