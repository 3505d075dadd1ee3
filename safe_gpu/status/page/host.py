"""A host on the page: its GPUs with their holders, its reservations, and who waits. Pure.

It is made from the document of ``status --json``, also from that of another host, which may say anything.
"""

from collections.abc import Iterator, Mapping

from ...coordination.leases.commands import program_names
from ...gpus.windows import Window
from ...wording.text import format_age, format_bytes, gpu_ranges, gpus_held, not_before, plural, short_age
from ..facts import WaiterStatus
from ..render import gib, wants
from .figures import Document, Figures, claims_of
from .markup import Markup, bar, element, joined, listed, table, when

_GPU = ("GPU", "State", "Memory", "Util", "Temp", "User", "Job", "Command", "Since", "Until")

_WAITER = ("#", "User", "Job", "Wants", "Waited", "Planned", "Starts")

_WANTED = ("position", "pid", "user", "nb_gpus", "since", "share", "vendor")

_MOST_WAITERS = 100  # that are listed: any user can make thousands

_TOLD = ("drained by ", "reserved by ", "stopped ", "taken last ")
"""What is told of the reasons of a GPU in use: others may have a command with its arguments."""


def host_part(status: Document, figures: Figures, now: float, use: Markup) -> Markup:
    """Return all about a host.

    Raises:
        NO_DOCUMENT: it is no such document.
    """
    about = f"{figures.cells['Free']} free, {figures.cells['GPU']} ({status['driver']} {status['driver_version']})"
    if figures.waiting:
        about += f", {figures.waiting} waiting, the first for {figures.cells['Longest'] or '?'}"
    rows = [row for one in status["gpus"] for row in _gpu_rows(one, now)]
    left = joined(table("GPUs", _GPU, rows, "gpus"), listed([*_notes(status), *status["warnings"]]))
    parts = element("div", element("div", left), element("div", _waiting(status, now), use), class_="parts")
    return joined(element("p", about, class_="dim"), parts)


def _gpu_rows(gpu: Document, now: float) -> Iterator[Mapping[str, str]]:
    load, heat = gpu["utilization"], gpu["temperature"]
    busiest = max(_computing(gpu), key=lambda one: one["memory_used"] or 0, default=None)
    holder = None if gpu["shares"] else gpu["claim"] or (gpu["state"] == "busy" and busiest)
    yield {
        "GPU": gpu["label"],
        "State": element("b", gpu["state_shown"], class_=gpu["state_shown"].replace(" ", "-")),
        "Memory": _memory(gpu["memory_used"], gpu["memory_total"]),
        "Util": "" if load is None else f"{load}%",
        "Temp": "" if heat is None else f"{heat} °C",
        **(_holder(holder, now) if holder else {}),
    }
    for one in gpu["shares"]:
        memory = _memory(one["memory_used"], one["share"])
        yield {
            "GPU": gpu["label"],
            "State": element("b", "share", class_="share"),
            "Memory": memory,
            **_holder(one, now),
        }


def _computing(gpu: Document) -> list[Document]:
    return [one for one in gpu["processes"] if one["kind"] != "graphics"]


def _memory(used: int | None, total: int | None) -> str:
    if used is None or not total:
        return ""
    return joined(bar(used / total), element("span", f"{gib(used)}/{gib(total)} GiB"))


def _holder(one: Document, now: float) -> dict[str, str]:
    """Return what is known of a claim, a waiter or a process."""
    until, job = one.get("until"), one.get("job")
    late = element("span", " overdue", class_="late") if until is not None and until < now else ""
    return {
        "User": one["user"] or "?",
        "Job": job.rpartition(":")[2] if job else f"pid {one['pid'] or '?'}",
        "Command": program_names((one.get("command") or "").split()),
        "Since": when(one.get("since"), now),
        "Until": joined(when(until, now), late),
    }


def _notes(status: Document) -> Iterator[str]:
    notes: dict[str, list[str]] = {}
    for one in status["gpus"]:
        for note in filter(None, _notes_on(one)):
            notes.setdefault(note, []).append(one["label"])
    for each in status["windows"]:
        window = str(Window(each["from"], each["until"], (), each["for"] or "", each["reason"], each["by"]))
        on = [one["label"] for one in status["gpus"] if one["uuid"] in each["gpus"]]
        if on and not any(note.startswith(window) for note in notes):
            notes[window] = on
    return (f"GPU {gpu_ranges(labels)}: {note}" for note, labels in notes.items())


def _notes_on(gpu: Document) -> Iterator[str]:
    reasons, computing = gpu["reason"].split("; "), _computing(gpu)
    if gpu["state"] == "claimed" or computing:
        reasons = [reason for reason in reasons if reason.startswith(_TOLD)]
    yield "; ".join(reason.partition(", since a claim failed")[0] for reason in reasons)
    if gpu["state"] == "busy" and computing:
        yield "used without a claim"
    if gpu["shares"]:
        unclaimed = "" if gpu["share_free"] is None else f", {format_bytes(gpu['share_free'])} unclaimed"
        yield plural(len(gpu["shares"]), "claim") + unclaimed
    if gpu["state_shown"] == "idle" and gpu["idle_for"]:
        yield f"no work for {format_age(gpu['idle_for'])}"
    for claim in claims_of(gpu):
        if claim["removable_by"]:
            yield f"nothing but its lease keeps others off it, and {claim['removable_by']} can remove that"
        if "share" in claim and (claim["memory_used"] or 0) > claim["share"]:
            yield f"{claim['user']} uses more than the share"


def _waiting(status: Document, now: float) -> Markup:
    queue, both = status["queue"], len({one["vendor"] for one in status["gpus"]}) > 1
    rows = [
        _holder(one, now)
        | {
            "#": str(one["position"]),
            "Wants": wants(WaiterStatus(**{name: one[name] for name in _WANTED}), both),
            "Waited": short_age(now - one["since"]) if one["since"] else "?",
            "Planned": "" if one["hold_for"] is None else short_age(one["hold_for"]),
            "Starts": _starts(one, now),
        }
        for one in queue[:_MOST_WAITERS]
    ]
    if not rows:
        return Markup()
    order = "by turns" if any("turn" in one for one in queue) else "first come first served"
    more = len(queue) - len(rows)
    return joined(
        table(f"Waiting, {order}", _WAITER, rows, "queue"), element("p", f"and {more} more") if more else Markup()
    )


def _starts(one: Document, now: float) -> Markup:
    """Return when it is expected to start, and what else decides that: the limit of its user, or whose turn it is."""
    limit, held, start, earliest = (one.get(key) for key in ("limit", "in_turn", "expected_start", "earliest_start"))
    if start is not None:
        told = when(start, now) if start >= now + 1 else "now"
    else:
        told = not_before(earliest, now) if earliest and earliest > now else "" if limit else "?"
    parts = [told, f"at limit ({limit[0]:g} of {limit[1]})" if limit else ""]
    parts += ["" if held is None else f"in turn ({gpus_held(held)})"]
    first, *others = filter(None, parts)
    return joined(first, *(f", {other}" for other in others))
