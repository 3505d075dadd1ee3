"""Why a claim waits or was refused, and when it can expect to start.

Nothing here takes a lock.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..coordination.entry import Entry
from ..coordination.holders import Claims, claims_now, holder_of_full, lives_here, living_claims
from ..coordination.queue import TicketRequest, Waiter, is_stopped
from ..errors import ClaimTimeout, NotEnoughGpusError
from ..gpus.devices import GpuVerdict, Holder, HostSnapshot
from ..host import procfs
from ..host.procfs import user_name
from ..selection.backfill import latest_harmless_ends, starts, when_free
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
from .attempt import Seen
from .enclosing import refuse_gpus_of_ancestors
from .queue_place import QueuePlace
from .view import HostView

if TYPE_CHECKING:
    from .limits import LimitReached

SOMEBODY = "somebody"

REPORT_INTERVAL = 60.0
"""Seconds between two reports. A sleeping waiter also tries again about this often."""

EARLY_INTERVAL = 10.0
"""The same for the first waiters of the queue: when one of them is suspended, those behind it are not woken."""

_EARLY = 32

WARNING_DELAY = 1.0
"""Seconds of waiting after which a warning is given, and the fewest after which a change is reported."""

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
        if self.may_move:
            return f"starts {moment} or later"
        return f"starts about {moment}"


def forecast(view: HostView, waiter: Waiter, hold_for: float | None) -> Forecast:
    """Return what a waiter can expect now, which will hold its GPUs for ``hold_for`` seconds; None is unknown."""
    now = time.time()
    holders = view.others.claims.holders(view.others.inside)
    when = {}
    for verdict in view.judge_for(Selection(), holders):
        gpu = verdict.gpu
        when[gpu.uuid] = when_free(gpu, holders.get(gpu.uuid), now, free=verdict.free)
    ahead = waiter.competing()
    wants = []
    for ticket in ahead:
        if not is_stopped(ticket):
            wants.append(view.backfill_request(TicketRequest.of(ticket), ticket.uid))
    wants.append(view.backfill_request(waiter.request._replace(hold_for=hold_for), os.geteuid()))
    start = starts(wants, when)[-1]
    earliest = list(latest_harmless_ends(wants, when))[-1].latest_end
    return Forecast(
        start=_known(start),
        earliest=_known(earliest),
        passed_by=_passed_by(waiter, holders),
        may_move=waiter.by_turns and len(ahead) > 0,
    )


def _known(moment: float) -> float | None:
    if moment == math.inf:
        return None
    return moment


def _passed_by(waiter: Waiter, holders: Mapping[str, Holder]) -> int:
    """Return how many claims hold GPUs that a waiter wants and came after it."""
    if not waiter.since:
        return 0
    holding: set[Holder] = set()
    for uuid in waiter.request.gpus:
        if uuid in holders:
            holding.update(holders[uuid].each)
    came_later = [one for one in holding if (one.queued or one.since or 0.0) > waiter.since]
    return len(came_later)


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
        user = None
        if ticket.uid >= 0:
            user = user_name(ticket.uid)
        pid = 0
        if lives_here(ticket):
            pid = ticket.pid
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
        limit: the limit of the user, if it stands in the way. Then the GPUs are not judged.
        asked: all that is asked for, in words; "" if that is only ``needed`` GPUs.
    """

    position: int
    free: int | None
    needed: int
    verdicts: tuple[GpuVerdict, ...] = ()
    ahead: ClaimAhead | None = None
    expected: Forecast | None = None
    limit: LimitReached | None = None
    asked: str = ""


def _status(view: HostView, seen: Seen, position: int, verdicts: tuple[GpuVerdict, ...] = ()) -> WaitStatus:
    """Return the state of a wait after an attempt.

    Args:
        position: in the queue, or 0 if it was not counted.
        verdicts: empty if the GPUs were not judged.
    """
    ahead = None
    if seen.ahead is not None:
        ahead = ClaimAhead.of(seen.ahead)
    free = None
    if verdicts:
        free = _number_of_free(verdicts)
    request = view.request
    return WaitStatus(position, free, request.nb_gpus, verdicts, ahead, limit=seen.limit, asked=request.text)


def _number_of_free(verdicts: Iterable[GpuVerdict]) -> int:
    return sum(verdict.free for verdict in verdicts)


class JudgedNow(NamedTuple):
    """The GPUs of the host at one time.

    Attributes:
        holders: UUID -> who holds it.
        verdicts: one for each GPU.
    """

    holders: dict[str, Holder]
    verdicts: tuple[GpuVerdict, ...]


def judged_now(view: HostView) -> JudgedNow:
    """Return who holds GPUs now, and the verdicts on all of them.

    Raises:
        NotEnoughGpusError: an ancestor of this process holds the GPUs that it waits for.
        StateDirError: the claims cannot be read.
    """
    holders = holders_now(view.snapshot, view.others.inside)
    verdicts = view.judge(holders)
    usable = {gpu.uuid for gpu in view.usable}
    refuse_gpus_of_ancestors(verdicts, usable, view.request, inside=view.enclosing is not None)
    return JudgedNow(holders, verdicts)


def refusal(view: HostView, seen: Seen, options: ClaimOptions, position: int) -> NotEnoughGpusError:
    """Return the error with which a claim fails: ClaimTimeout if it waited, else NotEnoughGpusError.

    Args:
        seen: by the latest attempt.
        position: in the queue.

    Raises:
        NotEnoughGpusError, StateDirError: as in :func:`judged_now`.
    """
    now = judged_now(view)
    unlimited = view.judge(now.holders, within_visible_limit=False)
    hint = fence_hint(unlimited, view.visible_limit)
    if hint and view.visible_limit is not None and view.visible_limit.lift:
        hint += f" ({view.visible_limit.lift} disregards it)"
    passed = None
    if seen.stopped is not None:
        passed = ClaimAhead.of(seen.stopped)._replace(stopped=True)
    waited = options.timeout or 0.0
    nb_gpus = view.request.nb_gpus
    message = refusal_message(
        _status(view, seen, position, now.verdicts),
        passed=passed,
        hint=hint,
        waited=waited,
        wait_limit=options.wait_limit,
        elsewhere=view.is_frozen and _number_of_free(unlimited) >= nb_gpus,
    )
    if waited:
        return ClaimTimeout(message, nb_gpus=nb_gpus, verdicts=now.verdicts, timeout=waited)
    return NotEnoughGpusError(message, nb_gpus=nb_gpus, verdicts=now.verdicts)


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
    holders = {**beyond, **claims.holders()}
    for uuid, holder in beyond.items():
        if holder.full:  # there is no share of it either
            holders[uuid] = holder
    return holders


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
    if now is None:
        now = time.time()
    free = status.free or 0
    text = f"{status.asked} asked for, {_free_text(free, status)}"
    if waited:
        text += f" after {format_age(waited)}"
    if status.ahead is not None:
        text += f", {_behind(status.ahead, now)}"
        if status.position > 2:
            text += f" and {plural(status.position - 2, 'more claim')}"
    if passed is not None:
        text += f" (past {passed.user or SOMEBODY}, {', '.join(_facts(passed, now))})"
    if status.limit is not None:
        text += f", and {status.limit}"
    if elsewhere:
        text += ": start a new process, which can have others (in a notebook, restart the kernel)"
    elif wait_limit:
        text += f": try again ({wait_limit} limits the wait)"
    else:
        text += f": {_advice_to_wait(waited, status.needed)}"
    if status.ahead is None and status.limit is None and 0 < free < status.needed:
        text += ", or ask for fewer"
    if hint:
        text += f". {hint}"
    lines = [text]
    alike = grouped((verdict.gpu.label, _why_not(verdict)) for verdict in status.verdicts)
    for reason, labels in alike.items():
        lines.append(f"  GPU {gpu_ranges(labels)} {reason}")
    return "\n".join(lines)


def _advice_to_wait(waited: float, needed: int) -> str:
    """Return how to wait, or to wait longer: twice what was waited, or an hour."""
    way_out = "wait for them"
    if waited:
        way_out = "wait longer"
    elif needed == 1:
        way_out = "wait for it"
    hours = max(1, math.ceil(waited / 1800))
    longer = style.value(f"{hours}h").replace("'", '"')
    return f"{way_out} ({style.setting('timeout', longer)}, or {style.written('timeout', None)} to wait without limit)"


def _free_text(free: int, status: WaitStatus, among: str = "") -> str:
    """Return how many GPUs are free; if enough are, but for others, for whom.

    Args:
        among: such as ``of 4 ``, to stand behind the number.
    """
    if status.ahead is None or free < status.needed:
        return f"{free} {among}free"
    ahead = max(1, status.position - 1)
    claims = "the claim"
    if ahead > 1:
        claims = plural(ahead, "claim")
    return f"{free} {among}free, kept for {claims} ahead"


def _why_not(verdict: GpuVerdict) -> str:
    reason = verdict.reason
    if not reason:
        reason = "free"
        if verdict.state == "display":
            reason += ", shared with the display"
    return f"({verdict.gpu.name or 'name not known'}): {reason}"


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
    if now is None:
        now = time.time()
    expected = status.expected or Forecast()
    candidates = [verdict for verdict in status.verdicts if _is_candidate(verdict)]
    head = _head_of_wait(status, candidates, expected.text(now), waited, in_words=True)
    if width is not None and display_width(head) > width:
        head = _head_of_wait(status, candidates, expected.text(now), waited, in_words=False)
    parts = [head]
    if status.ahead is not None:
        parts.append(_behind(status.ahead, now))
    if expected.passed_by:
        parts.append(f"passed by {plural(expected.passed_by, 'claim')}")
    if holders:
        parts.extend(_by_holder(candidates, now))
    line = "; ".join(parts)
    if width is None or display_width(line) <= width:
        return line
    if display_width(head) + _LEAST_REST <= width:
        return cut(line, width)
    return cut(head, width)


def _head_of_wait(
    status: WaitStatus, candidates: Collection[GpuVerdict], start: str, waited: float | None, *, in_words: bool
) -> str:
    """Return what is most important of a wait.

    Args:
        candidates: the verdicts on the GPUs that could do.
        start: when it starts, in words; "" if nothing is known.
        waited: seconds since the wait began; None leaves them out.
        in_words: whether to say that a place is one in the queue.
    """
    text = "waiting"
    if waited is not None:
        text += f" {_running_clock(waited)}"
    text += f" for {status.asked or plural(status.needed)}"
    if status.free is not None:
        among = ""
        if len(candidates) < len(status.verdicts):
            among = f"of {len(candidates)} "
        text += f" ({_free_text(status.free, status, among)})"
    if status.limit is not None:
        text += f", at your limit ({round(status.limit.held, 2):g} of {status.limit.most})"
    if status.ahead is not None and status.position > 1:
        text += f", #{status.position}"
        if in_words:
            text += " in the queue"
    if start:
        text += f", {start}"
    return text


def holders_line(status: WaitStatus, now: float) -> str:
    """Return who has the GPUs that are not free, in few words: ``GPU 0,1 ada · 2 ben idle · 3 shared``; "" for none."""
    taken = [verdict for verdict in status.verdicts if _is_candidate(verdict) and not verdict.free]
    if not taken:
        return ""
    labels_of = grouped((verdict.gpu.label, _short_who(verdict, now)) for verdict in taken)
    parts = [f"{gpu_ranges(labels)} {who}" for who, labels in labels_of.items()]
    return f"GPU {' · '.join(parts)}"


def _short_who(verdict: GpuVerdict, now: float) -> str:
    closed = ""
    if verdict.state == "unusable":
        closed = verdict.reason.partition(" ")[0]
    who = verdict.user or closed or "unknown"
    if verdict.holder is not None and verdict.holder.elsewhere:
        return verdict.holder.name
    if verdict.holder is not None and verdict.holder.sharers:
        who = "shared"
    elif verdict.holder is not None and verdict.holder.stopped:
        return f"{who} stopped"
    if verdict.is_idle(now):
        who += " idle"
    return who


def _running_clock(seconds: float) -> str:
    """Return ``0:07`` or ``26:03:00``."""
    minutes, left = divmod(max(0, int(seconds)), 60)
    if minutes < 60:
        return f"{minutes}:{left:02}"
    return f"{minutes // 60}:{minutes % 60:02}:{left:02}"


def _is_candidate(verdict: GpuVerdict) -> bool:
    """Return whether the request could use the GPU if it were free; a drained or reserved one comes back."""
    return verdict.closed or verdict.state not in ("outside", "unusable")


def _behind(ahead: ClaimAhead, now: float) -> str:
    return f"behind {ahead.user or SOMEBODY} ({', '.join(_facts(ahead, now))})"


def _facts(waiter: ClaimAhead, now: float) -> list[str]:
    facts = []
    if waiter.pid:
        facts.append(f"pid {waiter.pid}")
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
    pid = f"pid {holder.pid or '?'}"
    if holder.namespace:
        pid += f" {holder.namespace}"
    if holder.left_by is not None:
        pid = left_behind(holder.pid, holder.left_by)
    job = ""
    if holder.job:
        job = f"job {holder.job}"
    stopped = ""
    if holder.stopped:
        stopped = "stopped"
    text = f"{holder.user or 'unknown user'}{in_brackets(pid, job, stopped)}"
    if holder.since:
        text += f" for {format_age(now - holder.since)}"
    return text


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
        self._on_wait = options.on_wait
        self._on_long_wait: Callable[[WaitStatus], None] | None = None
        if self._on_wait is None:
            self._on_wait = _to_log(options.logger, late=False)
            if self._on_wait is None or not _is_heard(options.logger):
                self._on_long_wait = _to_log(options.logger, late=True)
        self._last: tuple[object, ...] | None = None
        self._began = time.monotonic()
        self.due = self._began
        self.warning_due = math.inf
        if self._on_long_wait is not None:
            self.warning_due = self._began + WARNING_DELAY

    def next_attempt(self, now: float) -> float:
        """Return the latest time at which a sleeping waiter tries again, whether or not the ticket that it sleeps on is
        gone.

        Among the first 32 of the queue that is in 10 seconds, else when the next report is due or in about a minute.
        The intervals depend on the pid, so that hundreds of waiters that started together do not try at the same time.
        """
        spread = 0.75 + os.getpid() % 500 / 1000
        if self._place.among_first(_EARLY):
            return now + EARLY_INTERVAL * spread
        if self._on_wait is None:
            return now + REPORT_INTERVAL * spread
        if self.due > now:
            return self.due
        return now + REPORT_INTERVAL

    def report(self, seen: Seen) -> None:
        """Give the reports that are due after this attempt.

        Raises:
            NotEnoughGpusError: an ancestor of this process holds the GPUs that it waits for.
            StateDirError: the claims cannot be read.
        """
        now = time.monotonic()
        if seen.ahead is None and now >= self.warning_due:  # a waiter behind a ticket is warned while it sleeps
            self.warn_once(seen)
        self._bring_forward(seen, now)
        if now < self.due:
            return
        self.due = math.inf
        if self._on_wait is not None:
            self.due = now + REPORT_INTERVAL
        may_hold = self._may_ancestors_hold()
        if seen.ahead is None and (may_hold or self._on_wait is not None):
            self._view.polls.poll()
        if may_hold:
            judged_now(self._view)
        if self._on_wait is not None:
            self._on_wait(self._gather(seen, self._place.position))

    def _bring_forward(self, seen: Seen, now: float) -> None:
        """Let a report be due soon if this attempt has found something else than the one before. Only few waiters count
        their position."""
        if self._on_wait is None:
            return
        position = 0
        if self._place.among_first(_EARLY):
            position = self._place.position
        ahead = ""
        if seen.ahead is not None:
            ahead = seen.ahead.name
        found = (position, ahead, seen.free, seen.limit)
        if found != self._last:
            self._last = found
            soon = max(WARNING_DELAY, (now - self._began) / 60)  # a long wait fills no log
            self.due = min(self.due, now + soon)

    def _may_ancestors_hold(self) -> bool:
        """Return whether a holder of a GPU has the pid of this process or of an ancestor."""
        family = {os.getpid(), *procfs.ancestors(os.getpid())}
        for holder in self._view.others.holders().values():
            if any(one.pid in family for one in holder.each):
                return True
        return False

    def warn_once(self, seen: Seen) -> None:
        """Give the warning from this attempt alone. Hundreds may wait, so nothing is tried and polled for it."""
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
        # An attempt asks for doors only until too few GPUs are left, so the number that are free needs another look.
        claimed: dict[str, Holder] = dict.fromkeys(seen.elsewhere, Holder(elsewhere=True))
        claimed.update(holders_now(view.snapshot, view.others.inside))
        for gpu in view.usable:
            if gpu.uuid in seen.full:
                claimed[gpu.uuid] = holder_of_full(gpu)
        status = _status(view, seen, position, view.judge(claimed))
        return status._replace(expected=forecast(view, self._place.ensure_waiter(), self._place.hold_for()))


def _is_heard(logger: Any) -> bool:
    """Return whether somebody reads what a logger is given, as far as it tells."""
    has_handlers = getattr(logger, "hasHandlers", None)
    return has_handlers is not None and has_handlers()


def _to_log(logger: Any, *, late: bool) -> Callable[[WaitStatus], None] | None:
    """Return a function that logs a report, with the facts as attributes of the log record: at INFO, or if ``late`` a
    warning.

    None if the logger is not enabled for that level.
    """
    level = 20
    log = logger.info
    if late:
        level = 30
        log = logger.warning
    is_enabled = getattr(logger, "isEnabledFor", None)  # the older package accepts the module logging, which has none
    if is_enabled is not None and not is_enabled(level):
        return None

    def tell(status: WaitStatus) -> None:
        facts = {f"safe_gpu_{name}": value for name, value in status._asdict().items()}
        log("%s", waiting_message(status, width=_LONGEST_LINE), extra=facts)

    return tell
