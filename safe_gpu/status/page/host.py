"""A host on the page: its GPUs with their holders, its reservations, and who waits. Pure.

It is made from the document of ``status --json``, also from that of another host, which may say anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...coordination.leases.commands import program_names
from ...gpus.devices import MIG_IS_ON
from ...gpus.windows import Window
from ...wording.text import format_age, format_bytes, gpu_ranges, gpus_held, not_before, plural, short_age
from ..facts import FREE, WaiterStatus
from ..render import gib, wants
from .markup import Markup, bar, element, joined, listed, table, when

Document = Mapping[str, Any]

_GPU = ("GPU", "State", "Memory", "Util", "Temp", "User", "Job", "Command", "Since", "Until")

_WAITER = ("#", "User", "Job", "Wants", "Waited", "Planned", "Starts")

_WANTED = ("position", "pid", "user", "nb_gpus", "since", "share", "vendor")

_MOST_WAITERS = 100  # that are listed: any user can make thousands

_TOLD = ("drained by ", "reserved by ", "stopped ", "taken last ")
"""What is told of the reasons of a GPU in use: others may have a command with its arguments."""


def host_part(status: Document, now: float, use: Markup) -> tuple[tuple[int, int], dict[str, str], Markup]:
    """Return how many GPUs are free, and of how many; the row of the host in a table of several; and all about it.

    A GPU that is divided into instances does not count, but these do.

    Raises:
        LookupError, TypeError, ValueError, ArithmeticError, AttributeError, OSError: it is no such document.
    """
    gpus = [one for one in status["gpus"] if not one["reason"].startswith(MIG_IS_ON)]
    free, waiting = sum(one["state"] in FREE for one in gpus), len(status["queue"])
    since = [one["since"] for one in status["queue"] if one["since"]]
    models = Counter(one["name"] or "(no name)" for one in gpus).most_common()
    users = Counter(claim["user"] or "?" for one in gpus for claim in _claims(one)).most_common()
    row = {
        "Free": f"{free} of {len(gpus)}",
        "GPUs": ", ".join(f"{number} x {name}" for name, number in models),
        "Waiting": str(waiting or ""),
        "Longest wait": short_age(now - min(since)) if since else "",
        "Holders": ", ".join(f"{user} {number}" for user, number in users),
    }
    about = f"{row['GPUs'] or 'no GPUs'} ({status['driver']} {status['driver_version']}".rstrip() + ")"
    if waiting:
        about += f", {waiting} waiting, the first for {row['Longest wait'] or '?'}"
    rows = [each for one in status["gpus"] for each in _gpu_rows(one, now)]
    left = joined(table("GPUs", _GPU, rows, "gpus"), listed([*_notes(status, now), *status.get("warnings", ())]))
    parts = element("div", element("div", left), element("div", _waiting(status, now), use), class_="parts")
    return (free, len(gpus)), row, joined(element("p", about, class_="dim"), parts)


def _claims(gpu: Document) -> Sequence[Document]:
    return gpu["shares"] or [one for one in [gpu["claim"]] if one]


def _label(gpu: Document) -> str:
    return str(gpu.get("label", gpu["index"]))


def _gpu_rows(gpu: Document, now: float) -> Iterator[Mapping[str, str]]:
    load, heat, computing = gpu["utilization"], gpu["temperature"], _computing(gpu)
    row = {
        "GPU": _label(gpu),
        "State": element("b", gpu["state_shown"], class_=gpu["state_shown"].replace(" ", "-")),
        "Memory": _memory(gpu["memory_used"], gpu["memory_total"]),
        "Util": "" if load is None else f"{load}%",
        "Temp": "" if heat is None else f"{heat} °C",
    }
    if gpu["claim"] and not gpu["shares"]:
        row |= _holder(gpu["claim"], now)
    elif computing and gpu["state"] == "busy":
        row |= _holder(max(computing, key=lambda one: one["memory_used"] or 0), now)
    yield row
    for one in gpu["shares"]:
        part = {
            "GPU": _label(gpu),
            "State": element("b", "share", class_="share"),
            "Memory": _memory(one["memory_used"], one["share"]),
        }
        yield part | _holder(one, now)


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


def _notes(status: Document, now: float) -> Iterator[str]:
    notes: dict[str, list[str]] = {}
    for one in status["gpus"]:
        for note in _notes_on(one):
            notes.setdefault(note, []).append(_label(one))
    for each in status.get("windows", ()):
        window = Window(each["from"], each["until"], (), each["for"] or "", each["reason"], each["by"])
        on = [_label(one) for one in status["gpus"] if one["uuid"] in each["gpus"]]
        if on and not any(note.startswith(str(window)) for note in notes):
            notes[str(window)] = on
    return (f"GPU {gpu_ranges(labels)}: {note}" for note, labels in notes.items())


def _notes_on(gpu: Document) -> Iterator[str]:
    told = gpu["reason"].split("; ")
    if gpu["state"] == "claimed" or _computing(gpu):
        told = [reason for reason in told if reason.startswith(_TOLD)]
    if reasons := "; ".join(reason.partition(", since a claim failed")[0] for reason in told):
        yield reasons
    if gpu["state"] == "busy" and _computing(gpu):
        yield "used without a claim"
    if gpu["shares"]:
        unclaimed = "" if gpu["share_free"] is None else f", {format_bytes(gpu['share_free'])} unclaimed"
        yield plural(len(gpu["shares"]), "claim") + unclaimed
    if gpu["state_shown"] == "idle" and gpu["idle_for"]:
        yield f"no work for {format_age(gpu['idle_for'])}"
    for claim in _claims(gpu):
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
