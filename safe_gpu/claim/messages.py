"""Why a claim waits or was refused, and when it can expect to start."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ..coordination.holders import lease_holders, recorded_holders
from ..coordination.leases import inner_name
from ..coordination.signals import DeferredSignals
from ..devices import LeaseHolder
from ..drivers import may_be_several, open_drivers
from ..drivers.vendors import meant_vendor
from ..errors import ClaimTimeout, LockTimeout, NotEnoughGpusError, SafeGpuError, UnsatisfiableRequestError
from ..procfs import user_name
from ..selection.backfill import BackfillRequest, When, dates, starts, when_free
from ..selection.choice import check_possible
from ..selection.request import Selection
from ..selection.verdicts import fence_hint
from ..text import format_age, gpu_ranges, plural
from ..vendors import VENDORS
from .queue_place import stem_of
from .view import refuse_gpus_of_ancestors

if TYPE_CHECKING:
    from ..coordination.queue import Ticket
    from ..devices import GpuVerdict
    from ..selection.request import Rules
    from .queue_place import QueuePlace
    from .quota import LimitReached
    from .view import HostView


# When a waiter can expect to start, who is overdue, and who passed it: from records and tickets, without a lock.


class HolderGpus(NamedTuple):
    """The GPUs of one holder. ``until`` in Unix seconds; None is unknown."""

    user: str
    nb_gpus: int
    until: float | None


class Forecast(NamedTuple):
    """What a waiter can expect.

    Attributes:
        start: when it will probably start, Unix seconds; None if somebody did not say for how long.
        earliest: before that it does not start, as far as holders keep their word; None is unknown.
        due: those whose GPUs are due at ``start``, if nobody is ahead in the queue.
        overdue: those who were to be done by now.
        silent: those who did not say for how long, if others did.
        passers: those who got GPUs that this waiter wants after it came.
    """

    start: float | None = None
    earliest: float | None = None
    due: tuple[HolderGpus, ...] = ()
    overdue: tuple[HolderGpus, ...] = ()
    silent: tuple[HolderGpus, ...] = ()
    passers: tuple[HolderGpus, ...] = ()


def forecast(view: HostView, place: QueuePlace) -> Forecast:
    """What the claim in this place can expect now."""
    waiter, now = place.ensure_waiter(), time.time()
    holders = _recorded_holders(view)
    when = _free_at(view, holders, now)
    ahead = waiter.competing()
    of = partial(BackfillRequest.of, gpus=view.snapshot.gpus)
    wants = [of(one.demand) for one in ahead if one.demand is not None and not one.is_stopped()]
    wants.append(of(waiter.demand._replace(hold_for=place.hold_for())))
    start, earliest = starts(wants, when)[-1], list(dates(wants, when))[-1][1]
    wanted = [holder for uuid, holder in holders.items() if stem_of(view, uuid) in waiter.demand.gpus]
    mine = [each for holder in wanted for each in holder.each]
    told = any(holder.until is not None for holder in mine)
    return Forecast(
        start if start < math.inf else None,
        earliest if earliest < math.inf else None,
        _by_user(holder for holder in mine if not ahead and holder.until == start),
        _by_user(holder for holder in mine if holder.until is not None and holder.until < now),
        _by_user(holder for holder in mine if told and holder.until is None),
        _by_user(holder for holder in mine if waiter.since and (holder.since or 0.0) > waiter.since),
    )


def _recorded_holders(view: HostView) -> dict[str, LeaseHolder]:
    """UUID -> who has a record in the lease file. A lease that was released has none."""
    uuids = [gpu.uuid for gpu in view.snapshot.gpus]
    found = recorded_holders({uuid: (view.lease_name(uuid), inner_name(uuid)) for uuid in uuids})
    return {uuid: holder for uuid, holder in found.items() if holder.since is not None}


def _free_at(view: HostView, holders: Mapping[str, LeaseHolder], now: float) -> dict[str, When]:
    return {
        stem_of(view, verdict.gpu.uuid): when_free(verdict.gpu, holders.get(verdict.gpu.uuid), now, free=verdict.free)
        for verdict in view.judge_for(Selection(), holders)
    }


def _by_user(holders: Iterable[LeaseHolder]) -> tuple[HolderGpus, ...]:
    """Grouped by user and end, those with the most GPUs first."""
    numbers: dict[tuple[str, float | None], int] = {}
    for holder in holders:
        key = (holder.user or "somebody", holder.until)
        numbers[key] = numbers.get(key, 0) + 1
    ranked = sorted(numbers.items(), key=lambda item: -item[1])
    return tuple(HolderGpus(user, number, until) for (user, until), number in ranked)


def describe_forecast(expected: Forecast, now: float) -> list[str]:
    """What to tell the user, the most important first; nothing if nobody said anything."""
    found = []
    if expected.overdue:
        share = expected.overdue[0]
        late = format_age(now - share.until) if share.until is not None else ""
        found.append(f"{_whose(share)} overdue {late}")
    elif expected.start is not None and expected.start > now:
        text = f"expected at about {_clock(expected.start, now)}"
        found.append(f"{text}, when {_whose(expected.due[0])} due" if expected.due else text)
    elif expected.start is None and expected.earliest is not None and expected.earliest > now:
        found.append(f"not before {_clock(expected.earliest, now)}")
    elif expected.start is None and expected.silent:
        found.append(f"{expected.silent[0].user} did not say for how long")
    if expected.passers:
        share = expected.passers[0]
        until = f", until {_clock(share.until, now)}" if share.until is not None else ""
        others = f" and {len(expected.passers) - 1} more" if len(expected.passers) > 1 else ""
        found.append(f"passed by {share.user} ({plural(share.nb_gpus)}{until}){others}")
    return found


def _whose(share: HolderGpus) -> str:
    if share.nb_gpus == 1:
        return f"{share.user}'s GPU is"
    return f"{share.user}'s {share.nb_gpus} GPUs are"


def _clock(moment: float, now: float) -> str:
    """``14:20``, ``Sun 14:20`` or ``2026-11-30``, whichever is clear."""
    form = "%H:%M" if moment - now < 18 * 3600 else "%a %H:%M" if moment - now < 6 * 86400 else "%Y-%m-%d"
    return time.strftime(form, time.localtime(moment))


# Messages on why a claim waits or was refused: who is ahead in the queue, and who holds or uses the GPUs.


class ClaimAhead(NamedTuple):
    """The nearest waiter ahead that wants some of the same GPUs.

    ``since`` is in Unix seconds. ``stopped`` is True if its process is stopped or frozen (a suspended job). If its
    ticket cannot be read, ``pid`` is 0, ``nb_gpus`` None and ``since`` 0.
    """

    pid: int
    user: str
    nb_gpus: int | None
    since: float
    stopped: bool = False

    @classmethod
    def of(cls, ticket: Ticket) -> ClaimAhead:
        """The claim that a ticket describes, of the owner of its file. /proc tells whether its process is stopped."""
        nb_gpus = None if ticket.demand is None else ticket.demand.nb_gpus
        with DeferredSignals():  # an exception that comes in the midst of getpwuid(3) is lost if it knows no such user
            user = user_name(ticket.uid)
        return cls(ticket.pid, user, nb_gpus, ticket.since, ticket.is_stopped())


class WaitStatus(NamedTuple):
    """The state of a wait, for a report to the user.

    ``needed`` GPUs are asked for. If another claim is ahead in the queue, it is ``ahead``, ``verdicts`` is empty and
    ``free`` is None. Otherwise ``verdicts`` has one entry for each GPU, and ``free`` of them are free. ``position`` is
    1 for the first of the waiters that compete for the same GPUs, and 0 if it was not counted. ``expected`` is when it
    can expect to start; None if that was not looked up. If a limit of the user stands in the way, it is ``spent``, with
    ``held`` and ``most``; ``verdicts`` is empty then and ``free`` is None.
    """

    position: int
    free: int | None
    needed: int
    verdicts: tuple[GpuVerdict, ...] = ()
    ahead: ClaimAhead | None = None
    expected: Forecast | None = None
    spent: LimitReached | None = None


# Gathering the facts


def wait_status(
    view: HostView,
    ticket: Ticket | None,
    unleased: Collection[str],
    position: int,
    named: Collection[str] = (),
    spent: LimitReached | None = None,
) -> WaitStatus:
    """The state of a wait after the latest look. It takes no lock and does not poll the driver.

    Args:
        ticket: the nearest ticket ahead that may not be passed, if any.
        unleased: UUIDs of the usable GPUs that nobody holds; used only if there is no such ticket.
        position: in the queue, or 0 if it was not counted.
        named: UUIDs of the GPUs that are held by name only.
        spent: the limit of this user, if it stands in the way.
    """
    if spent is not None:
        return WaitStatus(position, None, view.request.nb_gpus, spent=spent)
    if ticket is not None:
        return WaitStatus(position, None, view.request.nb_gpus, ahead=ClaimAhead.of(ticket))
    held = [gpu.uuid for gpu in view.usable if gpu.uuid not in unleased or gpu.uuid in view.shared]
    found = recorded_holders({uuid: (view.lease_name(uuid), inner_name(uuid)) for uuid in held if uuid not in named})
    verdicts = view.judge({uuid: found.get(uuid, LeaseHolder(elsewhere=True)) for uuid in held})
    return WaitStatus(position, sum(verdict.free for verdict in verdicts), view.request.nb_gpus, verdicts)


def refuse_if_ancestor_holds(view: HostView) -> None:
    """Call :func:`~safe_gpu.claim.view.refuse_gpus_of_ancestors` with the present holders. Takes host.lock.

    Raises:
        NotEnoughGpusError: an ancestor of this process holds the GPUs that it waits for.
        LockTimeout, StateDirError: the leases cannot be read.
    """
    _judge(view, _holders(view))


def refusal(
    view: HostView,
    *,
    ticket: Ticket | None,
    stopped: Ticket | None = None,
    spent: LimitReached | None = None,
    position: int,
    waited: float,
    wait_limit: str = "",
) -> NotEnoughGpusError:
    """The error with which a claim fails: ClaimTimeout if it waited (``waited`` in seconds), else NotEnoughGpusError.

    ``ticket``, ``spent`` and ``position`` are those of :func:`wait_news`; ``stopped`` was passed, because its waiter is
    stopped; ``wait_limit`` is the policy file, if that set the timeout.

    Raises:
        NotEnoughGpusError, LockTimeout, StateDirError: as in :func:`refuse_if_ancestor_holds`.
    """
    request, visible_limit = view.request, view.visible_limit
    holders = _holders(view)
    verdicts = _judge(view, holders)
    unfenced = view.judge(holders, fenced=False)
    hint = fence_hint(unfenced, visible_limit)
    frozen = visible_limit is not None and visible_limit.frozen
    if hint and visible_limit is not None and not visible_limit.frozen:
        hint += " (SAFE_GPU_FENCE=ignore disregards it)"
    ahead = None if ticket is None else ClaimAhead.of(ticket)
    passed = None if stopped is None else ClaimAhead.of(stopped)._replace(stopped=True)
    message = refusal_message(
        request,
        verdicts,
        hint=hint,
        ahead=ahead,
        passed=passed,
        spent=spent,
        position=position,
        waited=waited,
        wait_limit=wait_limit,
        elsewhere=frozen and sum(verdict.free for verdict in unfenced) >= request.nb_gpus,
    )
    if waited:
        return ClaimTimeout(message, nb_gpus=request.nb_gpus, verdicts=verdicts, timeout=waited)
    return NotEnoughGpusError(message, nb_gpus=request.nb_gpus, verdicts=verdicts)


def _holders(view: HostView) -> dict[str, LeaseHolder]:
    try:
        prefix, slots = (
            view.snapshot.name_prefix,
            {uuid: slot for uuid in view.outer if (slot := view.slot(uuid)) is not None},
        )
        return lease_holders(view.snapshot.gpus, inner=bool(view.outer), slots=slots, prefix=prefix)
    except LockTimeout:  # so large a crowd that it only tells who had them a moment ago
        return _recorded_holders(view)


def _judge(view: HostView, holders: dict[str, LeaseHolder]) -> tuple[GpuVerdict, ...]:
    verdicts = view.judge(holders)
    refuse_gpus_of_ancestors(verdicts, {gpu.uuid for gpu in view.usable}, view.request, inner=bool(view.outer))
    return verdicts


# Writing the messages


def refusal_message(
    request: Selection,
    verdicts: Sequence[GpuVerdict],
    *,
    hint: str = "",
    ahead: ClaimAhead | None = None,
    passed: ClaimAhead | None = None,
    spent: LimitReached | None = None,
    position: int = 0,
    waited: float = 0.0,
    wait_limit: str = "",
    elsewhere: bool = False,
    now: float | None = None,
) -> str:
    """Why a request was not met: one sentence, then one line for the GPUs that share a reason.

    Args:
        verdicts: of every device, with holders.
        hint: what CUDA_VISIBLE_DEVICES excludes, see ``fence_hint``; a sentence without the full stop.
        ahead, position: as in :class:`WaitStatus`.
        passed: a waiter that stands ahead and is stopped.
        spent, wait_limit: as in :func:`refusal`.
        waited: seconds that the claim waited.
        elsewhere: whether another process could have them at once, in which CUDA is not initialised.
        now: in Unix seconds; None reads the clock.
    """
    free = sum(verdict.free for verdict in verdicts)
    text = f"{plural(request.nb_gpus)} {f'{request.together} ' if request.together else ''}asked for, {free} free"
    if waited:
        text += f" after {format_age(waited)}"
    if ahead is not None:
        text += f", {_behind(ahead, position, _moment(now))[0]}"
    if passed is not None:
        text += f" (past {passed.user}, {', '.join(_facts(passed, _moment(now)))})"
    if spent is not None:
        text += f", and {spent}"
    way_out = "wait longer" if waited else "wait for it" if request.nb_gpus == 1 else "wait for them"
    if elsewhere:
        text += ": start a new process, which can have others (in a notebook, restart the kernel)"
    elif wait_limit:
        text += f": try again ({wait_limit} limits the wait)"
    else:
        text += f": {way_out} ({request.spelling.option('timeout')})"
    if ahead is None and spent is None and 0 < free < request.nb_gpus:
        text += ", or ask for fewer"
    return "\n".join([f"{text}. {hint}." if hint else f"{text}.", *_lines(verdicts)])


def _lines(verdicts: Sequence[GpuVerdict]) -> Iterator[str]:
    alike: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        gpu = verdict.gpu
        reason = verdict.reason or ("free, shared with the display" if verdict.state == "display" else "free")
        alike.setdefault((gpu.name or gpu.uuid, reason), []).append(gpu.label)
    for (name, reason), labels in alike.items():
        yield f"  GPU {gpu_ranges(labels)} ({name}): {reason}"


def waiting_message(status: WaitStatus, now: float | None = None, *, width: int | None = None) -> str:
    """One line about a wait: the claim ahead if there is one, else who holds the GPUs and since when.

    Args:
        now: in Unix seconds; None reads the clock.
        width: columns of the terminal. Details are left out until the line fits. The user and pid of the claim ahead,
            or of the first holder, always stay, so the line may be longer than a very narrow terminal.
    """
    moment = _moment(now)
    text = _state(status, moment, width)
    if status.expected is not None:
        for clause in describe_forecast(status.expected, moment):
            text = _widest([f"{text}; {clause}", text], width)
    return text


def _state(status: WaitStatus, moment: float, width: int | None) -> str:
    """Who is ahead, or who holds the GPUs."""
    text = f"waiting for {plural(status.needed)}"
    if status.ahead is not None:
        return _widest([f"{text} {behind}" for behind in _behind(status.ahead, status.position, moment)], width)
    if status.spent is not None:
        return f"{text}: {status.spent}"
    if status.free is not None and status.free < status.needed:  # else enough GPUs have just become free
        text += f", {status.free} free"
    holders = _by_holder(status.verdicts, moment)
    left = sum(number for number, _ in holders)
    for place, (number, clauses) in enumerate(holders):
        rest = f"; {left - number} more" if left > number else ""
        room = None if width is None else width - len(rest)
        longer = _widest([f"{text}; {clause}" for clause in clauses], room)
        if place and room is not None and len(longer) > room:
            return f"{text}; {left} more"
        text, left = longer, left - number
    return text


def _moment(now: float | None) -> float:
    return time.time() if now is None else now


def _widest(texts: Sequence[str], width: int | None) -> str:
    """The first text that fits into ``width``, else the last one."""
    return next((text for text in texts if width is None or len(text) <= width), texts[-1])


def _behind(ahead: ClaimAhead, position: int, now: float) -> list[str]:
    """Texts that say who is ahead, from the longest to the shortest."""
    if not ahead.pid:
        return ["behind a claim whose ticket cannot be read"]
    facts = _facts(ahead, now)
    texts = [f"behind {ahead.user} ({', '.join(facts[:kept])})" for kept in range(len(facts), 0, -1)]
    if position > 2:
        texts.insert(0, f"{texts[0]} and {plural(position - 2, 'more claim')}")
    return texts


def _facts(waiter: ClaimAhead, now: float) -> list[str]:
    facts = [f"pid {waiter.pid}"]
    if waiter.stopped:
        facts.append("stopped")
    if waiter.nb_gpus is not None:
        facts.append(f"wants {plural(waiter.nb_gpus)}")
    if waiter.since:
        facts.append(f"queued for {format_age(now - waiter.since)}")
    return facts


def _by_holder(verdicts: Sequence[GpuVerdict], now: float) -> list[tuple[int, list[str]]]:
    """For each holder: the number of its GPUs, and texts on it from the longest to the shortest.

    The holders with the most GPUs come first.
    """
    holders: dict[tuple[str, ...], list[str]] = {}
    for verdict in verdicts:
        drained = verdict.reason.startswith("drained by ")
        if verdict.free or (verdict.state in ("outside", "unusable") and not drained):
            continue
        holders.setdefault(_who(verdict, now), []).append(verdict.gpu.label)
    ranked = sorted(holders.items(), key=lambda item: -len(item[1]))
    return [(len(labels), [f"GPU {gpu_ranges(labels)}: {who}" for who in texts]) for texts, labels in ranked]


def _who(verdict: GpuVerdict, now: float) -> tuple[str, ...]:
    holder = verdict.holder
    if holder is not None and holder.elsewhere:
        return (verdict.reason, "claimed elsewhere")
    if verdict.state != "claimed" or holder is None:
        process = f"{verdict.user} (pid {verdict.pid})" if verdict.user and verdict.pid else None
        return (verdict.reason, process) if process else (verdict.reason,)
    if not holder.user and not holder.pid:
        return ("unknown holder",)
    who = f"{holder.user or 'unknown user'} (pid {holder.pid or '?'}{holder.place and f' {holder.place}'}"
    age = f" for {format_age(now - holder.since)}" if holder.since else ""
    texts = (f"{who}){age}", f"{who})")
    return (f"{who}, job {holder.job}){age}", *texts) if holder.job else texts


# Hosts with GPUs of two vendors: a request that those of the default vendor can never satisfy, and the others can.


def with_way_out(err: UnsatisfiableRequestError, request: Selection, rules: Rules) -> UnsatisfiableRequestError:
    """The error of a claim, which also names the vendor to ask for where the GPUs of another one would do."""
    vendor = _that_fits(request, rules)
    if not vendor:
        return err
    way_out = request.spelling.setting("vendor", request.spelling.value(vendor))
    return UnsatisfiableRequestError(
        f"{err} (the {VENDORS[vendor].title} GPUs of this host would do: {way_out})",
        value=err.value,
        verdicts=err.verdicts,
    )


def _that_fits(request: Selection, rules: Rules) -> str:
    """The first vendor whose GPUs here can satisfy the request; "" if there is none, or the vendor was no default."""
    if request.vendor is not None or meant_vendor(os.environ, request.named_vendor) or not may_be_several():
        return ""
    with suppress(SafeGpuError):
        drivers, _ = open_drivers()
        try:
            for driver in drivers:
                with suppress(SafeGpuError):
                    snapshot = driver.snapshot()
                    check_possible(snapshot, request, rules=rules)
                    return snapshot.vendor
        finally:
            for driver in drivers:
                driver.close()
    return ""
