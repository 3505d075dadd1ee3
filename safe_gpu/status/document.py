"""What the document of ``status --json`` of some host tells: its line in a table of hosts, and its status. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from ..gpus.devices import CLAIMED_ELSEWHERE, MIG_IS_ON, SOMEBODY_ELSEWHERE, Gpu, HeldAs, Holder
from ..gpus.windows import Window
from ..host.foreign_files import printable
from ..host.programs import program_names
from ..wording.text import short_age
from .facts import FREE, BesideStatus, GpuStatus, HostStatus, ProcessStatus, WaiterStatus

Document = Mapping[str, Any]

TITLES = ("Free", "GPU", "Waiting", "Longest", "Held by")
"""Of the columns of a table of hosts."""

NO_DOCUMENT = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError)
"""What comes of an answer that is no such document."""

_TOLD = ("drained by ", "reserved by ", "stopped ", "taken last ", CLAIMED_ELSEWHERE)
"""How the reasons of a GPU in use begin that are shown: others may contain a command with its arguments."""


class Figures(NamedTuple):
    """A line on one host.

    Attributes:
        free, total: numbers of GPUs; of one that is divided the MIG instances count.
        has_instances: whether there are MIG instances among them.
        waiting, waiters: the number of waiters, and their users.
        cells: its cells in a table of hosts, by title.
        broken: sentences on the GPUs that cannot be used.
        identity: the same for two names of one host.
    """

    free: int
    total: int
    has_instances: bool
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
    queue = status["queue"]
    free = sum(one["state"] in FREE for one in gpus)
    cells = {
        "Free": f"{free} of {len(gpus)}",
        "GPU": _models(gpus),
        "Waiting": str(len(queue) or ""),
        "Longest": _longest_wait(queue, now),
        "Held by": _held_by(gpus),
    }
    users = dict.fromkeys(one["user"] or "?" for one in queue)
    unusable = [one for one in gpus if one["state"] == "unusable" and one["state_shown"] != "drained"]
    identity = (status["host"], status["state_dir"], *(one["uuid"] for one in gpus))
    return Figures(
        free,
        len(gpus),
        any(_is_mig_instance(one) for one in gpus),
        len(queue),
        waiters=printable(", ".join(users)),
        cells={title: printable(text) for title, text in cells.items()},
        broken=tuple(printable(f"GPU {one['index']}: {one['reason']}") for one in unusable),
        identity=repr(identity),
    )


def _models(gpus: list[Document]) -> str:
    """Return the models, with the number of GPUs of each where there are several."""
    models = Counter(_model(one) for one in gpus)
    if len(models) == 1:
        [name] = models
        return name
    return ", ".join(f"{number} x {name}" for name, number in models.items())


def _model(gpu: Document) -> str:
    """Return the name of a GPU; some drivers give a MIG instance the name of its GPU."""
    name = str(gpu["name"] or "(name not known)")
    if _is_mig_instance(gpu) and " MIG " not in name:
        return f"{name} MIG instance"
    return name


def _is_mig_instance(gpu: Document) -> bool:
    return str(gpu["uuid"]).startswith("MIG-")


def _longest_wait(queue: list[Document], now: float) -> str:
    since = [one["since"] for one in queue if one["since"] is not None]
    if not since:
        return ""
    return short_age(now - min(since))


def _held_by(gpus: list[Document]) -> str:
    """Return the users with the number of GPUs that each holds, of which a share counts as its part."""
    held: dict[str, float] = {}
    for one in gpus:
        for claim, part in _claims_and_parts(one):
            user = claim["user"] or "?"
            if claim.get("elsewhere"):  # an older version has no such key
                user = SOMEBODY_ELSEWHERE
            held[user] = held.get(user, 0) + part
    ranked = Counter(held).most_common()
    return ", ".join(f"{user} {round(number, 2):g}" for user, number in ranked)


def _claims_and_parts(one: Document) -> Iterator[tuple[Document, float]]:
    """Yield each claim of a GPU with the part of the GPU that it counts as."""
    pieces = one.get("pieces")  # an older version has none
    if one["shares"]:
        for claim in one["shares"]:
            yield claim, (claim["share"] or 0) / (one["memory_total"] or 1)
    elif pieces:
        for claim in pieces:
            yield claim, 1 / len(pieces)
    elif one["claim"]:
        yield one["claim"], 1


def status_in(document: Document, now: float) -> HostStatus:
    """Return the status of which a document tells, with commands by the names of program and script.

    Raises:
        NO_DOCUMENT: it is no such document.
    """
    return _record(
        HostStatus,
        document,
        taken_at=now,
        gpus=tuple(_gpu(one) for one in document["gpus"]),
        queue=tuple(_record(WaiterStatus, one) for one in document["queue"]),
        windows=tuple(_window(one) for one in document["windows"]),
    )


_Record = TypeVar("_Record")


def _record(kind: type[_Record], facts: Document, **given: Any) -> _Record:
    """Return a record of these facts. What a document of an older version lacks has its default."""
    names = getattr(kind, "_fields", None) or kind.__dataclass_fields__  # type: ignore[attr-defined]
    told = {name: facts[name] for name in names if name in facts}
    if "command" in told:
        told["command"] = program_names((told["command"] or "").split())
    return kind(**{**told, **given})


def _gpu(one: Document) -> GpuStatus:
    reason = _told_reason(one)
    is_idle = one["state_shown"] == "idle"
    status = _record(
        GpuStatus,
        one,
        gpu=_record(Gpu, one, index=one["label"], processes=()),
        claim=_claim_of(one),
        processes=tuple(_record(ProcessStatus, each) for each in one["processes"]),
        beside=tuple(_record(BesideStatus, each) for each in one.get("beside", ())),  # an older version has none
        reason=reason,
        fault=reason,
        drained=one["state_shown"] == "drained",
        idle=is_idle,
    )
    if is_idle:
        return replace(status, idle_report_after=0.0)
    return status


def _told_reason(one: Document) -> str:
    is_in_use = one["claim"] or one["processes"]
    reasons = [reason.partition(", since a claim failed")[0] for reason in one["reason"].split("; ")]
    return "; ".join(reason for reason in reasons if reason.startswith(_TOLD) or not is_in_use)


def _claim_of(one: Document) -> Holder | None:
    """Return the claim of a GPU, or all if there are several."""
    if one["shares"]:
        return Holder.of_sharers(_claim(each) for each in one["shares"])
    if one.get("pieces"):
        first, *others = [_claim(each) for each in one["pieces"]]
        return first._replace(others=tuple(others))
    if one["claim"]:
        return _claim(one["claim"])
    return None


def _claim(facts: Document) -> Holder:
    held_as = None
    if facts.get("held_as") is not None:
        held_as = _record(HeldAs, facts["held_as"])
    return _record(Holder, facts, held_as=held_as)


def _window(one: Document) -> Window:
    return Window(one["from"], one["until"], tuple(one["gpus"]), one["for"] or "", one["reason"], one["by"])
