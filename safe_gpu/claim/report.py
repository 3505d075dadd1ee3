"""Why a claim waits or was refused, and when it can expect to start.

Nothing here takes a lock.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..coordination.entry import Entry
from ..coordination.holders import Claims, claims_now, holder_of_full, lives_here, living_claims
from ..coordination.queue import TicketRequest, Waiter, is_stopped
from ..errors import ClaimTimeout, NotEnoughGpusError
from ..gpus.devices import GpuVerdict, Holder, HostSnapshot
from ..host import procfs
from ..host.procfs import user_name
from ..selection.backfill import dates, starts, when_free
from ..selection.request import Selection
from ..selection.verdicts import fence_hint
from ..wording import style
from ..wording.text import (
    clock,
    cut,
    display_width,
    format_age,
    gpu_ranges,
    grouped,
    in_brackets,
    left_behind,
    not_before,
    plural,
)
from .arguments import ClaimOptions
from .around import refuse_gpus_of_ancestors
from .look import Seen
from .queue_place import QueuePlace
from .view import HostView

if TYPE_CHECKING:
    from .limits import LimitReached

SOMEBODY = "somebody"

# Seconds between two reports. A sleeping waiter also looks again about this often.
_REPORT_INTERVAL = 60.0

# The same for the first waiters of the queue: nobody behind one that stops is woken by that.
_EARLY_INTERVAL = 10.0

_EARLY = 32

# Seconds of waiting after which a warning is given, and the fewest after which a change is reported.
_WARNING_DELAY = 1.0

# Characters of a report in the log; what others run on the GPUs may have any length.
_LONGEST_LINE = 240

_LEAST_REST = 12  # columns that are worth writing of who holds what


class Forecast(NamedTuple):
    """What a waiter can expect.

    Attributes:
        start: when it will probably start, in Unix seconds; None if some end is unknown.
        earliest: it does not start before that if holders keep their word; None is unknown.
        passed_by: how many claims hold GPUs that it wants and came after it.
        may_move: it waits for others by turns, so who joins later may start before it.
    """

    start: float | None = None
    earliest: float | None = None
    passed_by: int = 0
    may_move: bool = False

    def text(self, now: float) -> str:
        """Return when the waiter starts; "" if nothing is known."""
        if self.start is None:
            return not_before(self.earliest, now)
        if self.start <= now:
            return ""
        moment = clock(self.start, now)
        return f"starts {moment} or later" if self.may_move else f"starts about {moment}"


def forecast(view: HostView, waiter: Waiter, hold_for: float | None) -> Forecast:
    """Return what a waiter can expect now, which will hold its GPUs for ``hold_for`` seconds; None is unknown."""
    now = time.time()
    holders = view.claims.holders(view.inside)
    when = {
        verdict.gpu.uuid: when_free(verdict.gpu, holders.get(verdict.gpu.uuid), now, free=verdict.free)
        for verdict in view.judge_for(Selection(), holders)
    }
    ahead = waiter.competing()
    wants = [view.wish(TicketRequest.of(one), one.uid) for one in ahead if not is_stopped(one)]
    wants.append(view.wish(waiter.request._replace(hold_for=hold_for), os.geteuid()))
    start, earliest = starts(wants, when)[-1], list(dates(wants, when))[-1][1]
    holding = {one for uuid in waiter.request.gpus if uuid in holders for one in holders[uuid].each}
    return Forecast(
        start if start < math.inf else None,
        earliest if earliest < math.inf else None,
        sum((one.queued or one.since or 0.0) > waiter.since for one in holding) if waiter.since else 0,
        waiter.by_turns and bool(ahead),
    )


class ClaimAhead(NamedTuple):
    """The nearest waiter ahead that wants some of the same GPUs.

    ``since`` is in Unix seconds. ``stopped`` is True if its process is stopped or frozen (a suspended job). ``pid`` is
    0 if no process of the ticket's owner with this pid lives here.
    """

    pid: int
    user: str | None
    nb_gpus: int
    since: float
    stopped: bool = False

    @classmethod
    def of(cls, ticket: Entry) -> ClaimAhead:
        """Return the claim that a ticket describes. /proc tells whether its process is stopped."""
        user = user_name(ticket.uid) if ticket.uid >= 0 else None
        pid = ticket.pid if lives_here(ticket) else 0
        return cls(pid, user, ticket.nb_gpus, ticket.since or 0.0, is_stopped(ticket))


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


def _status(view: HostView, seen: Seen, position: int, verdicts: tuple[GpuVerdict, ...] = ()) -> WaitStatus:
    """Return the state of a wait after a look.

    Args:
        position: in the queue, or 0 if it was not counted.
        verdicts: empty if the GPUs were not judged.
    """
    ahead = None if seen.ahead is None else ClaimAhead.of(seen.ahead)
    free = sum(verdict.free for verdict in verdicts) if verdicts else None
    request = view.request
    return WaitStatus(position, free, request.nb_gpus, verdicts, ahead, spent=seen.limit, asked=request.text)


def judged_now(view: HostView) -> tuple[dict[str, Holder], tuple[GpuVerdict, ...]]:
    """Return who holds GPUs now, and the verdicts on all of them.

    Raises:
        NotEnoughGpusError: an ancestor of this process holds the GPUs that it waits for.
        StateDirError: the claims cannot be read.
    """
    holders = holders_now(view.snapshot, view.inside)
    verdicts = view.judge(holders)
    refuse_gpus_of_ancestors(verdicts, {gpu.uuid for gpu in view.usable}, view.request, inside=bool(view.around))
    return holders, verdicts


def refusal(view: HostView, seen: Seen, options: ClaimOptions, position: int) -> NotEnoughGpusError:
    """Return the error with which a claim fails: ClaimTimeout if it waited, else NotEnoughGpusError.

    Args:
        seen: by the latest look.
        position: in the queue.

    Raises:
        NotEnoughGpusError, StateDirError: as in :func:`judged_now`.
    """
    request, visible_limit = view.request, view.visible_limit
    holders, verdicts = judged_now(view)
    unlimited = view.judge(holders, within_limit=False)
    hint = fence_hint(unlimited, visible_limit)
    if hint and visible_limit is not None and visible_limit.lift:
        hint += f" ({visible_limit.lift} disregards it)"
    waited = options.timeout or 0.0
    message = refusal_message(
        _status(view, seen, position, verdicts),
        passed=None if seen.stopped is None else ClaimAhead.of(seen.stopped)._replace(stopped=True),
        hint=hint,
        waited=waited,
        wait_limit=options.wait_limit,
        elsewhere=view.is_frozen and sum(verdict.free for verdict in unlimited) >= request.nb_gpus,
    )
    if waited:
        return ClaimTimeout(message, nb_gpus=request.nb_gpus, verdicts=verdicts, timeout=waited)
    return NotEnoughGpusError(message, nb_gpus=request.nb_gpus, verdicts=verdicts)


def holders_now(snapshot: HostSnapshot, inside: str = "") -> dict[str, Holder]:
    """Return UUID -> holder of the GPUs that are held now.

    Args:
        inside: hash of the token of the claim inside which they would be claimed; "" for none.

    Raises:
        StateDirError: the claims cannot be read.
    """
    if inside:
        return Claims(living_claims(), snapshot.gpus).holders(inside)
    claims, beyond = claims_now(snapshot.gpus, snapshot.name_prefix)
    full = {uuid: holder for uuid, holder in beyond.items() if holder.full}  # of which there is no share either
    return {**beyond, **claims.holders(), **full}


def refusal_message(
    status: WaitStatus,
    *,
    passed: ClaimAhead | None = None,
    hint: str = "",
    waited: float = 0.0,
    wait_limit: str = "",
    elsewhere: bool = False,
    now: float | None = None,
) -> str:
    """Return why a request was not met: one sentence, then one line for the GPUs that share a reason.

    Args:
        status: at its end, with a verdict on every device.
        passed: a waiter that stands ahead and is stopped.
        hint: what CUDA_VISIBLE_DEVICES excludes, see ``fence_hint``; a sentence without the full stop.
        waited: seconds that the claim waited.
        wait_limit: the policy file, if that set the timeout.
        elsewhere: whether another process could have them at once, in which CUDA is not initialised.
        now: in Unix seconds; None reads the clock.
    """
    free, ahead = status.free or 0, status.ahead
    now = time.time() if now is None else now
    text = f"{status.asked} asked for, {_free(free, status.needed, ahead, status.position)}"
    if waited:
        text += f" after {format_age(waited)}"
    if ahead is not None:
        text += f", {_behind(ahead, now)}"
        text += f" and {plural(status.position - 2, 'more claim')}" if status.position > 2 else ""
    if passed is not None:
        text += f" (past {passed.user or SOMEBODY}, {', '.join(_facts(passed, now))})"
    if status.spent is not None:
        text += f", and {status.spent}"
    if elsewhere:
        text += ": start a new process, which can have others (in a notebook, restart the kernel)"
    elif wait_limit:
        text += f": try again ({wait_limit} limits the wait)"
    else:
        way_out = "wait longer" if waited else "wait for it" if status.needed == 1 else "wait for them"
        # Twice what was waited, or an hour.
        hours = style.value(f"{max(1, -int(-waited // 1800))}h").replace("'", '"')
        longer = f"{style.setting('timeout', hours)}, or {style.written('timeout', None)} to wait without limit"
        text += f": {way_out} ({longer})"
    if ahead is None and status.spent is None and 0 < free < status.needed:
        text += ", or ask for fewer"
    alike = grouped((verdict.gpu.label, _why_not(verdict)) for verdict in status.verdicts)
    lines = [f"  GPU {gpu_ranges(labels)} {reason}" for reason, labels in alike.items()]
    return "\n".join([f"{text}. {hint}." if hint else f"{text}.", *lines])


def _free(free: int, needed: int, ahead: ClaimAhead | None, position: int, of: str = "") -> str:
    """Return how many GPUs are free; if enough are, but for others, for whom."""
    if ahead is None or free < needed:
        return f"{free} {of}free"
    return f"{free} {'is' if free == 1 else 'are'} free for {plural(max(1, position - 1), 'claim')} ahead"


def _why_not(verdict: GpuVerdict) -> str:
    free = "free, shared with the display" if verdict.state == "display" else "free"
    return f"({verdict.gpu.name or verdict.gpu.uuid}): {verdict.reason or free}"


def waiting_message(
    status: WaitStatus,
    now: float | None = None,
    *,
    waited: float | None = None,
    width: int | None = None,
    holders: bool = True,
) -> str:
    """Return one line about a wait, the most important first: ``waiting 0:07 for 3 GPUs (0 free), #2 in the queue,
    starts about 15:18; behind ada (pid 30106)``.

    Args:
        now: in Unix seconds; None reads the clock.
        waited: seconds since the wait began; None leaves them out.
        width: columns of the terminal. The end of a longer line is cut off, which is who holds what.
        holders: whether to say who holds what.
    """
    now = time.time() if now is None else now
    expected = status.expected or Forecast()
    start, passed = expected.text(now), expected.passed_by
    text = "waiting" if waited is None else f"waiting {_running_clock(waited)}"
    text += f" for {status.asked or plural(status.needed)}"
    candidates = [verdict for verdict in status.verdicts if _is_candidate(verdict)]
    if status.free is not None:
        of = f"of {len(candidates)} " * (len(candidates) < len(status.verdicts))
        text += f" ({_free(status.free, status.needed, status.ahead, status.position, of)})"
    if status.spent is not None:
        text += f", at your limit ({round(status.spent.held, 2):g} of {status.spent.most})"
    place = f", #{status.position}{{}}" if status.ahead is not None and status.position > 1 else ""
    heads = [text + place.format(words) + (start and f", {start}") for words in (" in the queue", "")]
    head = heads[0] if width is None or display_width(heads[0]) <= width else heads[1]
    who = [] if status.ahead is None else [_behind(status.ahead, now)]
    who += [f"passed by {plural(passed, 'claim')}"] if passed else []
    line = "; ".join([head, *who, *(_by_holder(candidates, now) if holders else ())])
    if width is None or display_width(line) <= width:
        return line
    return cut(line if display_width(head) + _LEAST_REST <= width else head, width)


def holders_line(status: WaitStatus, now: float) -> str:
    """Return who has the GPUs that are not free, in few words: ``GPU 0,1 ada · 2 ben idle · 3 shared``; "" for none."""
    taken = [one for one in status.verdicts if _is_candidate(one) and not one.free]
    found = grouped((one.gpu.label, _short_who(one, now)) for one in taken)
    parts = [f"{gpu_ranges(labels)} {who}" for who, labels in found.items()]
    return f"GPU {' · '.join(parts)}" if parts else ""


def _short_who(verdict: GpuVerdict, now: float) -> str:
    shared = verdict.holder is not None and verdict.holder.sharers
    closed = verdict.reason.partition(" ")[0] if verdict.state == "unusable" else ""
    who = "shared" if shared else verdict.user or closed or "unknown"
    return f"{who} idle" if verdict.is_idle(now) else who


def _running_clock(seconds: float) -> str:
    """Return ``0:07`` or ``26:03:00``."""
    minutes, left = divmod(max(0, int(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{left:02}" if minutes >= 60 else f"{minutes}:{left:02}"


def _is_candidate(verdict: GpuVerdict) -> bool:
    """Return whether the request could use the GPU if it were free; a drained or reserved one comes back."""
    return verdict.state not in ("outside", "unusable") or verdict.reason.startswith(("drained by ", "reserved by "))


def _behind(ahead: ClaimAhead, now: float) -> str:
    return f"behind {ahead.user or SOMEBODY} ({', '.join(_facts(ahead, now))})"


def _facts(waiter: ClaimAhead, now: float) -> list[str]:
    facts = [f"pid {waiter.pid}"] if waiter.pid else []
    if waiter.stopped:
        facts.append("stopped")
    facts.append(f"wants {plural(waiter.nb_gpus)}")
    if waiter.since:
        facts.append(f"queued for {format_age(now - waiter.since)}")
    return facts


def _by_holder(verdicts: Iterable[GpuVerdict], now: float) -> list[str]:
    """Return who has the GPUs that are not free, those with the most GPUs first."""
    holders = grouped((verdict.gpu.label, _who(verdict, now)) for verdict in verdicts if not verdict.free)
    ranked = sorted(holders.items(), key=lambda item: -len(item[1]))
    return [f"GPU {gpu_ranges(labels)}: {who}" for who, labels in ranked]


def _who(verdict: GpuVerdict, now: float) -> str:
    holder = verdict.holder
    if verdict.state != "claimed" or holder is None or holder.elsewhere or holder.full or holder.sharers:
        return verdict.reason
    if not holder.user and not holder.pid:
        return "unknown holder"
    pid = f"pid {holder.pid or '?'}{holder.namespace and f' {holder.namespace}'}"
    if holder.left_by is not None:
        pid = left_behind(holder.pid, holder.left_by)
    age = f" for {format_age(now - holder.since)}" if holder.since else ""
    return f"{holder.user or 'unknown user'}{in_brackets(pid, holder.job and f'job {holder.job}')}{age}"


class WaitReporter:
    """The reports of one wait, which begins with this object.

    Reports go to ``options.on_wait``. If there is none they go to the logger at INFO; where nobody hears that, once,
    after a second, as a warning, which Python shows even if logging is not configured.

    Attributes:
        due: ``time.monotonic()`` value at which the next report is due; ``math.inf`` if none is.
        warning_due: the same for the warning.
    """

    def __init__(self, view: HostView, options: ClaimOptions, place: QueuePlace) -> None:
        self._view = view
        self._place = place
        self._on_wait = options.on_wait or _to_log(options.logger, late=False)
        is_heard = getattr(options.logger, "hasHandlers", bool) if options.on_wait is None else lambda: True
        self._on_long_wait = None if self._on_wait and is_heard() else _to_log(options.logger, late=True)
        self._last: tuple[object, ...] | None = None
        self._began = self.due = time.monotonic()
        self.warning_due = math.inf if self._on_long_wait is None else self._began + _WARNING_DELAY

    def next_look(self, now: float) -> float:
        """Return the latest time at which a sleeping waiter looks again, whether or not the ticket that it sleeps on is
        gone.

        Among the first 32 of the queue that is in 10 seconds, else when the next report is due or in about a minute.
        The intervals depend on the pid, so that hundreds of waiters that started together do not look at the same time.
        """
        spread = 0.75 + os.getpid() % 500 / 1000
        if self._place.among_first(_EARLY):
            return now + _EARLY_INTERVAL * spread
        if self._on_wait is None:
            return now + _REPORT_INTERVAL * spread
        return self.due if self.due > now else now + _REPORT_INTERVAL

    def report(self, seen: Seen) -> None:
        """Give the reports that are due after this look.

        Raises:
            NotEnoughGpusError: an ancestor of this process holds the GPUs that it waits for.
            StateDirError: the claims cannot be read.
        """
        now = time.monotonic()
        if seen.ahead is None and now >= self.warning_due:  # a waiter behind a ticket is warned while it sleeps
            self.warn_once(seen)
        if self._on_wait is not None and (found := self._found(seen)) != self._last:
            self._last = found
            self.due = min(self.due, now + max(_WARNING_DELAY, (now - self._began) / 60))  # a long wait fills no log
        if now < self.due:
            return
        self.due = now + _REPORT_INTERVAL if self._on_wait is not None else math.inf
        family = {os.getpid(), *procfs.ancestors(os.getpid())}
        may_hold = any(one.pid in family for holder in self._view.held.values() for one in holder.each)
        if seen.ahead is None and (may_hold or self._on_wait is not None):
            self._view.polls.poll()
        if may_hold:
            judged_now(self._view)
        if self._on_wait is not None:
            self._on_wait(self._gather(seen, self._place.position))

    def _found(self, seen: Seen) -> tuple[object, ...]:
        """Return what a look has found; another report is due when it changes. Only few waiters count their
        position."""
        position = self._place.position if self._place.among_first(_EARLY) else 0
        return position, seen.ahead and seen.ahead.name, seen.free, seen.limit

    def warn_once(self, seen: Seen) -> None:
        """Give the warning from this look alone. Hundreds may wait, so there is no new look and no poll for it."""
        if self._on_long_wait is not None:
            self._on_long_wait(self._gather(seen, 0))  # 0: the position is not counted either
        self._on_long_wait = None
        self.warning_due = math.inf

    def _gather(self, seen: Seen, position: int) -> WaitStatus:
        """Return the state of the wait. The GPUs are not judged where others do not matter, and if the position was not
        counted: then hundreds may wait, whose tickets are all read for that."""
        view = self._view
        if seen.limit is not None or (seen.ahead is not None and not position):
            return _status(view, seen, position)
        elsewhere = dict.fromkeys(seen.elsewhere, Holder(elsewhere=True))
        full = {gpu.uuid: holder_of_full(gpu) for gpu in view.usable if gpu.uuid in seen.full}
        verdicts = view.judge({**elsewhere, **view.claims.holders(view.inside), **full})
        status = _status(view, seen, position, verdicts)
        return status._replace(expected=forecast(view, self._place.ensure_waiter(), self._place.hold_for()))


def _to_log(logger: Any, *, late: bool) -> Callable[[WaitStatus], None] | None:
    """Return a function that logs a report, with the facts as attributes of the log record: at INFO, or if ``late`` a
    warning.

    None if the logger is not enabled for that level.
    """
    is_enabled = getattr(logger, "isEnabledFor", None)  # the older package accepts the module logging, which has none
    if is_enabled is not None and not is_enabled(30 if late else 20):
        return None

    def tell(status: WaitStatus) -> None:
        facts = {f"safe_gpu_{name}": value for name, value in status._asdict().items()}
        (logger.warning if late else logger.info)("%s", waiting_message(status, width=_LONGEST_LINE), extra=facts)

    return tell
