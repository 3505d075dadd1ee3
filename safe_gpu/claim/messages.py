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
from ..text import cut, display_width, format_age, gpu_ranges, in_brackets, plural
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
        start: when it will probably start, in Unix seconds; None if some end is unknown.
        earliest: it does not start before that if holders keep their word; None is unknown.
        overdue: the holders whose end has passed.
        silent: the holders whose end is unknown, if that of others is known.
        passers: the holders of GPUs that this waiter wants who came after it.
    """

    start: float | None = None
    earliest: float | None = None
    overdue: tuple[HolderGpus, ...] = ()
    silent: tuple[HolderGpus, ...] = ()
    passers: tuple[HolderGpus, ...] = ()


def forecast(view: HostView, place: QueuePlace) -> Forecast:
    """Return what the claim in this place can expect now."""
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
        _by_user(holder for holder in mine if holder.until is not None and holder.until < now),
        _by_user(holder for holder in mine if told and holder.until is None),
        _by_user(holder for holder in mine if waiter.since and (holder.since or 0.0) > waiter.since),
    )


def _recorded_holders(view: HostView) -> dict[str, LeaseHolder]:
    """Return UUID -> who has a record in the lease file. A lease that was released has none."""
    uuids = [gpu.uuid for gpu in view.snapshot.gpus]
    found = recorded_holders({uuid: (view.lease_name(uuid), inner_name(uuid)) for uuid in uuids})
    return {uuid: holder for uuid, holder in found.items() if holder.since is not None}


def _free_at(view: HostView, holders: Mapping[str, LeaseHolder], now: float) -> dict[str, When]:
    return {
        stem_of(view, verdict.gpu.uuid): when_free(verdict.gpu, holders.get(verdict.gpu.uuid), now, free=verdict.free)
        for verdict in view.judge_for(Selection(), holders)
    }


def _by_user(holders: Iterable[LeaseHolder]) -> tuple[HolderGpus, ...]:
    """Group them by user and end, those with the most GPUs first."""
    numbers: dict[tuple[str, float | None], int] = {}
    for holder in holders:
        key = (holder.user or "somebody", holder.until)
        numbers[key] = numbers.get(key, 0) + 1
    ranked = sorted(numbers.items(), key=lambda item: -item[1])
    return tuple(HolderGpus(user, number, until) for (user, until), number in ranked)


def describe_forecast(expected: Forecast, now: float) -> tuple[str, list[str]]:
    """Return when the waiter starts, "" if nothing is known; and what else there is to tell."""
    start, more = "", list[str]()
    if expected.overdue:
        share = expected.overdue[0]
        start = f"{_whose(share)} overdue by {format_age(now - (share.until or now))}"
    elif expected.start is not None and expected.start > now:
        start = f"starts about {_clock(expected.start, now)}"
    elif expected.start is None and expected.earliest is not None and expected.earliest > now:
        start = f"not before {_clock(expected.earliest, now)}"
    elif expected.start is None and expected.silent:
        more.append(f"no end known for {_whose(expected.silent[0])}")
    if expected.passers:
        share = expected.passers[0]
        until = f", until {_clock(share.until, now)}" if share.until is not None else ""
        others = f" and {len(expected.passers) - 1} more" if len(expected.passers) > 1 else ""
        more.append(f"passed by {share.user} ({plural(share.nb_gpus)}{until}){others}")
    return start, more


def _whose(share: HolderGpus) -> str:
    return f"{share.user}'s {'GPU' if share.nb_gpus == 1 else plural(share.nb_gpus)}"


def _clock(moment: float, now: float) -> str:
    """Return ``14:20``, ``Sun 14:20`` or ``2026-11-30``, whichever is clear."""
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
        """Return the claim that a ticket describes, of the owner of its file. /proc tells whether its process is
        stopped."""
        nb_gpus = None if ticket.demand is None else ticket.demand.nb_gpus
        with DeferredSignals():  # an exception that comes in the midst of getpwuid(3) is lost if it knows no such user
            user = user_name(ticket.uid)
        return cls(ticket.pid, user, nb_gpus, ticket.since, ticket.is_stopped())


class WaitStatus(NamedTuple):
    """The state of a wait, for a report to the user.

    Attributes:
        position: 1 for the first of the waiters that compete for the same GPUs, 0 if it was not counted.
        free: how many GPUs are free; None if they were not judged.
        needed: how many GPUs it waits for.
        verdicts: one for each GPU; empty if they were not judged.
        ahead: the nearest claim ahead in the queue, if there is one.
        expected: when it can expect to start; None if that was not looked up.
        spent: the limit of the user, if it stands in the way. Then the GPUs are not judged.
        asked: all that is asked for, in words; "" if that is only ``needed`` GPUs.
    """

    position: int
    free: int | None
    needed: int
    verdicts: tuple[GpuVerdict, ...] = ()
    ahead: ClaimAhead | None = None
    expected: Forecast | None = None
    spent: LimitReached | None = None
    asked: str = ""


# Gathering the facts


def wait_status(
    view: HostView,
    ticket: Ticket | None,
    unleased: Collection[str],
    position: int,
    named: Collection[str] = (),
    spent: LimitReached | None = None,
) -> WaitStatus:
    """Return the state of a wait after the latest look. It takes no lock and does not poll the driver.

    Args:
        ticket: the nearest ticket ahead that may not be passed, if any.
        unleased: UUIDs of the usable GPUs that nobody holds; used only if there is no such ticket.
        position: in the queue, or 0 if it was not counted. Behind a ticket the GPUs are not judged then, because
            hundreds may wait.
        named: UUIDs of the GPUs that are held by name only.
        spent: the limit of this user, if it stands in the way.
    """
    ahead = None if ticket is None else ClaimAhead.of(ticket)
    status = WaitStatus(position, None, view.request.nb_gpus, ahead=ahead, spent=spent, asked=view.request.text)
    if spent is not None or (ticket is not None and not position):
        return status
    if ticket is not None:
        verdicts = view.judge(_recorded_holders(view))
    else:
        held = [gpu.uuid for gpu in view.usable if gpu.uuid not in unleased or gpu.uuid in view.shared]
        names = {uuid: (view.lease_name(uuid), inner_name(uuid)) for uuid in held if uuid not in named}
        found = recorded_holders(names)
        verdicts = view.judge({uuid: found.get(uuid, LeaseHolder(elsewhere=True)) for uuid in held})
    return status._replace(free=sum(verdict.free for verdict in verdicts), verdicts=verdicts)


def refuse_if_ancestor_holds(view: HostView) -> None:
    """Call :func:`~safe_gpu.claim.view.refuse_gpus_of_ancestors` with the present holders. Takes host.lock.

    Raises:
        NotEnoughGpusError: an ancestor of this process holds the GPUs that it waits for.
        LockTimeout, StateDirError: the leases cannot be read.
    """
    _judge(view, holders_now(view))


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
    """Return the error with which a claim fails: ClaimTimeout if it waited (``waited`` in seconds), else
    NotEnoughGpusError.

    ``ticket``, ``spent`` and ``position`` are those of :func:`wait_news`; ``stopped`` was passed, because its waiter is
    stopped; ``wait_limit`` is the policy file, if that set the timeout.

    Raises:
        NotEnoughGpusError, LockTimeout, StateDirError: as in :func:`refuse_if_ancestor_holds`.
    """
    request, visible_limit = view.request, view.visible_limit
    holders = holders_now(view)
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


def holders_now(view: HostView) -> dict[str, LeaseHolder]:
    """Return UUID -> holder of the GPUs that are held now. Takes host.lock.

    Raises:
        StateDirError: the leases cannot be read.
    """
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
    """Return why a request was not met: one sentence, then one line for the GPUs that share a reason.

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
    text = f"{request.text} asked for, {free} free"
    if waited:
        text += f" after {format_age(waited)}"
    if ahead is not None:
        text += f", {_behind(ahead, _moment(now))}"
        text += f" and {plural(position - 2, 'more claim')}" if position > 2 else ""
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


def waiting_message(
    status: WaitStatus, now: float | None = None, *, waited: float | None = None, width: int | None = None
) -> str:
    """Return one line about a wait, the most important first: ``waiting 0:07 for 3 GPUs (0 free), #2 in the queue,
    starts about 15:18; behind ada (pid 30106)``.

    Args:
        now: in Unix seconds; None reads the clock.
        waited: seconds since the wait began; None leaves them out.
        width: columns of the terminal. The end of a longer line is cut off, which is who holds what.
    """
    moment = _moment(now)
    start, more = describe_forecast(status.expected or Forecast(), moment)
    text = "waiting" if waited is None else f"waiting {_running_clock(waited)}"
    text += f" for {status.asked or plural(status.needed)}"
    candidates = [verdict for verdict in status.verdicts if _is_candidate(verdict)]
    if status.free is not None:
        text += f" ({status.free} {f'of {len(candidates)} ' if len(candidates) < len(status.verdicts) else ''}free)"
    if status.spent is not None:
        text += f", at your limit ({round(status.spent.held, 2):g} of {status.spent.most})"
    place = f", #{status.position}{{}}" if status.ahead is not None and status.position > 1 else ""
    heads = [text + place.format(words) + (start and f", {start}") for words in (" in the queue", "")]
    head = heads[0] if width is None or display_width(heads[0]) <= width else heads[1]
    who = [] if status.ahead is None else [_behind(status.ahead, moment)]
    line = "; ".join([head, *who, *_by_holder(candidates, moment), *more])
    if width is None or display_width(line) <= width:
        return line
    return cut(line if display_width(head) + _LEAST_REST <= width else head, width)


_LEAST_REST = 12  # columns that are worth writing of who holds what


def _running_clock(seconds: float) -> str:
    """Return ``0:07`` or ``26:03:00``."""
    minutes, left = divmod(max(0, int(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{left:02}" if minutes >= 60 else f"{minutes}:{left:02}"


def _is_candidate(verdict: GpuVerdict) -> bool:
    """Return whether the request could use the GPU if it were free; a drained one comes back."""
    return verdict.state not in ("outside", "unusable") or verdict.reason.startswith("drained by ")


def _moment(now: float | None) -> float:
    return time.time() if now is None else now


def _behind(ahead: ClaimAhead, now: float) -> str:
    if not ahead.pid:
        return "behind a claim whose ticket cannot be read"
    return f"behind {ahead.user} ({', '.join(_facts(ahead, now))})"


def _facts(waiter: ClaimAhead, now: float) -> list[str]:
    facts = [f"pid {waiter.pid}"]
    if waiter.stopped:
        facts.append("stopped")
    if waiter.nb_gpus is not None:
        facts.append(f"wants {plural(waiter.nb_gpus)}")
    if waiter.since:
        facts.append(f"queued for {format_age(now - waiter.since)}")
    return facts


def _by_holder(verdicts: Iterable[GpuVerdict], now: float) -> list[str]:
    """Return who has the GPUs that are not free, those with the most GPUs first."""
    holders: dict[str, list[str]] = {}
    for verdict in verdicts:
        if not verdict.free:
            holders.setdefault(_who(verdict, now), []).append(verdict.gpu.label)
    ranked = sorted(holders.items(), key=lambda item: -len(item[1]))
    return [f"GPU {gpu_ranges(labels)}: {who}" for who, labels in ranked]


def _who(verdict: GpuVerdict, now: float) -> str:
    holder = verdict.holder
    if verdict.state != "claimed" or holder is None or holder.elsewhere or holder.sharers:
        return verdict.reason
    if not holder.user and not holder.pid:
        return "unknown holder"
    pid = f"pid {holder.pid or '?'}{holder.place and f' {holder.place}'}"
    age = f" for {format_age(now - holder.since)}" if holder.since else ""
    return f"{holder.user or 'unknown user'}{in_brackets(pid, holder.job and f'job {holder.job}')}{age}"


# Hosts with GPUs of two vendors: a request that those of the default vendor can never satisfy, and the others can.


def with_way_out(err: UnsatisfiableRequestError, request: Selection, rules: Rules) -> UnsatisfiableRequestError:
    """Return the error of a claim, with the vendor to ask for if its GPUs here can satisfy the request."""
    vendor = _that_fits(request, rules)
    if not vendor:
        return err
    way_out = request.spelling.setting("vendor", request.spelling.value(vendor))
    return UnsatisfiableRequestError(
        f"{err} (the {VENDORS[vendor].title} GPUs of this host fit: {way_out})",
        value=err.value,
        verdicts=err.verdicts,
    )


def _that_fits(request: Selection, rules: Rules) -> str:
    """Return the first vendor whose GPUs here can satisfy the request; "" if there is none, or the vendor was no
    default."""
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
