"""A host on the page: its GPUs with their holders, its reservations, and who waits. Pure.

It is made from the document of ``status --json``, also from that of another host, which may say anything.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from ...coordination.leases.commands import program_names
from ...gpus.devices import Gpu
from ...gpus.windows import Window
from ..facts import ClaimStatus, GpuStatus, HostStatus, ProcessStatus, WaiterStatus
from ..render import TableRow, in_turn, notes_of, queue_of, rows_of, windows_of
from .figures import Document, Figures
from .markup import Markup, bar, element, joined, listed, table, when

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
    notes = listed([*notes_of(status), *windows_of(status), *status.warnings])
    left = element("div", table("GPUs", _TITLES, rows, "gpus"), notes)
    parts = element("div", left, element("div", _waiting(status), use), class_="parts")
    return joined(element("p", about, class_="dim"), parts)


def _row(row: TableRow, label: str, now: float) -> Mapping[str, str]:
    state, cells, claim = row.state.strip(), row.cells, row.claim or ClaimStatus()
    return {
        "GPU": label,
        "State": element("b", state, class_=state.replace(" ", "-")),
        "Memory": joined(bar(row.used / row.total), element("span", row.memory))
        if row.used is not None and row.total
        else "",
        "Util": row.load,
        "Temp": row.heat,
        "User": cells.get("USER", ""),
        "Job": cells.get("JOB/PID", ""),
        "Command": cells.get("COMMAND", row.text),
        "Since": when(claim.since, now),
        "Until": when(claim.until, now),
    }


def _waiting(status: HostStatus) -> Markup:
    order, groups, columns = queue_of(status, verbose=True, most_of_user=99)
    titles = [column.title.capitalize().partition("/")[0] for column in columns]
    rows = [dict(zip(titles, cells, strict=True)) for cells in zip(*(column.cells for column in columns), strict=True)]
    passers, more = in_turn(status.queue), len(status.queue) - len(groups)
    notes = [f"in turn: {passers}" if passers else "", f"and {more} more" if more else ""]
    return joined(table(f"Waiting, {order}", titles, rows, "queue"), listed([*filter(None, notes)]))


def _status_of(document: Document, now: float) -> HostStatus:
    """Return the status of which a document tells, with commands by the names of program and script."""

    def record(kind: type[_Record], facts: Document, **more: Any) -> _Record:
        if "command" in facts:
            more["command"] = program_names((facts["command"] or "").split())
        names = getattr(kind, "_fields", None) or kind.__dataclass_fields__  # type: ignore[attr-defined]
        return kind(**{name: facts[name] for name in names if name in facts} | more)

    def gpu(one: Document) -> GpuStatus:
        in_use, shown = one["claim"] or one["processes"], one["state_shown"]
        reasons = [reason.partition(", since a claim failed")[0] for reason in one["reason"].split("; ")]
        told = "; ".join(reason for reason in reasons if reason.startswith(_TOLD) or not in_use)
        return record(
            GpuStatus,
            one,
            gpu=record(Gpu, one, index=one["label"], processes=()),
            claim=one["claim"] and record(ClaimStatus, one["claim"]),
            shares=tuple(record(ClaimStatus, each) for each in one["shares"]),
            processes=tuple(record(ProcessStatus, each) for each in one["processes"]),
            reason=told,
            fault=told,
            idle=shown == "idle",
            idle_report=shown == "idle",
            drained=shown == "drained",
        )

    return record(
        HostStatus,
        document,
        taken_at=now,
        gpus=tuple(map(gpu, document["gpus"])),
        queue=tuple(record(WaiterStatus, one) for one in document["queue"]),
        windows=tuple(
            Window(one["from"], one["until"], tuple(one["gpus"]), one["for"] or "", one["reason"], one["by"])
            for one in document["windows"]
        ),
    )
