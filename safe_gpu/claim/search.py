"""The search for GPUs: attempt, decide, wait, report, attempt again.

host.lock is never held during a slow operation. The driver is polled before host.lock is taken, and polled again once
the leases are held, because a process may have started on a GPU in between.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ..coordination.files import state_dir_path, state_dir_warnings
from ..coordination.signals import unwind_on_signals
from ..errors import StateDirError, UnsatisfiableRequestError
from ..procfs import printable_lines
from ..selection.choice import check_possible, fits
from .attempt import Attempt
from .claim import confirm
from .options import with_policy_limits
from .queue_place import TIME_TO_TAKE, QueuePlace
from .view import ancestor_may_hold

if TYPE_CHECKING:
    from ..coordination.locks import LeaseWatcher
    from ..devices import Gpu, LeaseHolder
    from .attempt import AttemptResult
    from .claim import Claim
    from .messages import WaitStatus
    from .options import ClaimOptions
    from .view import HostView


# Decides what a claim does next: take, sleep, poll, watch or refuse. A pure function of a look and the time.


TAKE = "take"
"""The GPUs are leased; the search ends."""
POLL = "poll"
"""Poll the driver, then look again."""
SLEEP = "sleep"
"""Sleep until the ticket ahead is gone, then look again."""
WATCH = "watch"
"""Watch the leases that others hold, then look again."""
REFUSE = "refuse"
"""Fail, because the time to wait is over."""

# The head of the queue makes a full look this often, in seconds, because the state directory may have been deleted.
_FULL_LOOK = 1.0

# A name may outlive its claim for a moment, in a child between fork and exec: it is tried once more, in seconds.
_SECOND_TRY = 0.005


class WaitState(NamedTuple):
    """The state of a claim's wait.

    Attributes:
        deadline: ``time.monotonic()`` value; ``math.inf`` waits without limit.
        tried_last: whether the last look, after the deadline, has been made.
        polled_for: the unleased GPUs at the time of the latest poll.
        named: the GPUs held by name only for which a second look was made.
    """

    deadline: float = math.inf
    tried_last: bool = False
    polled_for: frozenset[str] | None = None
    named: frozenset[str] = frozenset()


class Decision(NamedTuple):
    """A step; ``until`` is the ``time.monotonic()`` value at which SLEEP and WATCH end at the latest."""

    step: str
    patience: WaitState
    until: float = 0.0


def decide(
    seen: AttemptResult,
    patience: WaitState,
    *,
    suffices: bool,
    now: float,
    next_poll: float,
    next_look: float = math.inf,
) -> Decision:
    """Return the next step of a claim.

    Args:
        suffices: whether the unleased GPUs would be enough.
        now: ``time.monotonic()`` value, as are the next two.
        next_poll: earliest time of another poll for the same unleased GPUs.
        next_look: latest time at which a sleeping waiter looks again.
    """
    if seen.enough:
        return Decision(TAKE, patience)
    if seen.outdated:
        return Decision(POLL, patience)
    if not seen.named <= patience.named:
        return Decision(WATCH, patience._replace(named=patience.named | seen.named), now + _SECOND_TRY)
    if now >= patience.deadline:
        if patience.tried_last:
            return Decision(REFUSE, patience)
        return Decision(POLL, patience._replace(tried_last=True))
    if seen.behind:
        return Decision(SLEEP, patience, min(patience.deadline, next_look))
    until = min(patience.deadline, now + _FULL_LOOK)
    if seen.spent is not None:
        return Decision(WATCH, patience, until)
    if suffices:  # enough leases are free, but the driver shows processes on those GPUs
        if seen.unleased != patience.polled_for or now >= next_poll:
            return Decision(POLL, patience._replace(polled_for=seen.unleased))
        until = min(until, next_poll)
    return Decision(WATCH, patience, until)


# Reports of a wait: when they are due, and where they go. Only claims that wait load this module.


# Seconds between two reports. A sleeping waiter also looks again about this often.
_REPORT_INTERVAL = 60.0
# The same for the first waiters of the queue: nobody behind one that stops is woken by that.
_EARLY_INTERVAL = 10.0
_EARLY = 32
# Seconds of waiting after which a warning is given, and the fewest after which a change is reported.
_WARNING_DELAY = 1.0
# Characters of a report in the log; what others run on the GPUs may have any length.
_LONGEST_LINE = 240


class WaitReporter:
    """The reports of one wait, which began at ``began``, a ``time.monotonic()`` value.

    Reports go to ``options.on_wait``. If there is none they go to the logger at INFO; where nobody hears that, once,
    after a second, as a warning, which Python shows even if logging is not configured.

    Attributes:
        due: ``time.monotonic()`` value at which the next report is due; ``math.inf`` if none is.
        warning_due: the same for the warning.
    """

    def __init__(self, view: HostView, options: ClaimOptions, place: QueuePlace, began: float) -> None:
        self._view = view
        self._place = place
        self._on_wait = options.on_wait or _to_log(options.logger, late=False)
        is_heard = getattr(options.logger, "hasHandlers", bool) if options.on_wait is None else lambda: True
        self._on_long_wait = None if self._on_wait and is_heard() else _to_log(options.logger, late=True)
        self._last: tuple[object, ...] | None = None
        self._began = self.due = began
        self.warning_due = math.inf if self._on_long_wait is None else began + _WARNING_DELAY

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

    def report(self, attempt: Attempt) -> None:
        """Give the reports that are due after this look.

        Raises:
            NotEnoughGpusError: an ancestor of this process holds the GPUs that it waits for.
            LockTimeout, StateDirError: it cannot be determined whether one does.
        """
        now = time.monotonic()
        if attempt.ahead is None and now >= self.warning_due:  # a waiter behind a ticket is warned while it sleeps
            self.warn_once(attempt)
        if self._on_wait is not None and (found := self._found(attempt)) != self._last:
            self._last = found
            self.due = min(self.due, now + max(_WARNING_DELAY, (now - self._began) / 60))  # a long wait fills no log
        if now < self.due:
            return
        self.due = now + _REPORT_INTERVAL if self._on_wait is not None else math.inf
        # The records show without a lock whether an ancestor may hold a GPU. Only then are the holders looked up.
        may_hold = ancestor_may_hold(self._view.usable, inner=bool(self._view.outer))
        if attempt.ahead is None and (may_hold or self._on_wait is not None):
            self._view.poll()
        if may_hold:
            from .messages import refuse_if_ancestor_holds

            refuse_if_ancestor_holds(self._view)
        if self._on_wait is not None:
            self._on_wait(self._gather(attempt, self._place.position))

    def _found(self, attempt: Attempt) -> tuple[object, ...]:
        """Return what a look has found; another report is due when it changes. Only few waiters count their
        position."""
        position = self._place.position if self._place.among_first(_EARLY) else 0
        ahead = None if attempt.ahead is None else attempt.ahead.ticket.seq
        return position, ahead, attempt.result.unleased, attempt.result.spent

    def warn_once(self, attempt: Attempt) -> None:
        """Give the warning from this look alone. Hundreds may wait, so there is no new look and no poll for it."""
        if self._on_long_wait is not None:
            self._on_long_wait(self._gather(attempt, 0))  # 0: the position is not counted either
        self._on_long_wait = None
        self.warning_due = math.inf

    def _gather(self, attempt: Attempt, position: int) -> WaitStatus:
        from .messages import forecast, wait_status

        ticket = None if attempt.ahead is None else attempt.ahead.ticket
        result = attempt.result
        status = wait_status(self._view, ticket, result.unleased, position, result.named, result.spent)
        if status.spent is not None:
            return status  # when a claim of the same user ends, others do not matter
        if ticket is not None and not position:
            return status  # hundreds may wait, and to look it up reads the tickets of all
        return status._replace(expected=forecast(self._view, self._place))


def _to_log(logger: Any, *, late: bool) -> Callable[[WaitStatus], None] | None:
    """Return a function that logs a report, with the facts as attributes of the log record: at INFO, or if ``late`` a
    warning.

    None if the logger is not enabled for that level.
    """
    is_enabled = getattr(logger, "isEnabledFor", None)  # the older package accepts the module logging, which has none
    if is_enabled is not None and not is_enabled(30 if late else 20):
        return None

    def tell(status: WaitStatus) -> None:
        from .messages import waiting_message

        facts = {f"safe_gpu_{name}": value for name, value in status._asdict().items()}
        (logger.warning if late else logger.info)("%s", waiting_message(status, width=_LONGEST_LINE), extra=facts)

    return tell


# The loop that gets leases for a request: look, decide, wait, look again.


# Pause of the head of the queue between two looks at the leases, in seconds. It is doubled after the first second.
_LEASE_PAUSE = 0.010
# A sleeper that looks again polls the driver first if its latest poll is older than this, in seconds.
_OLD = 30.0
# For so long waiters wait for a state directory that went away, in seconds, and look for it so often.
_LONGEST_ABSENCE = 60.0
_ABSENCE_PAUSE = 0.25


def acquire(view: HostView, options: ClaimOptions, claim: Claim) -> None:
    """Fill an empty claim with leases on N GPUs, confirmed by a second poll.

    Raises:
        UnsatisfiableRequestError: this host or its policy can never satisfy the request; raised without a wait.
        PolicyError: the policy file cannot be used.
        NotEnoughGpusError, ClaimTimeout: too few GPUs are free now, or were until the deadline.
        LockTimeout, StateDirError, NoDriverError: host.lock, the state directory or the driver cannot be used.
    """
    if view.snapshot.shared_display:
        options.logger.info("Running on a machine with single GPU used for actual display")
    _Search(view, options).run(claim)
    claim.note()
    for doubt in state_dir_warnings():
        options.logger.warning("the state directory %s %s", printable_lines(state_dir_path()), doubt)


def wait_until_free(view: HostView, options: ClaimOptions) -> tuple[Gpu, ...]:
    """Wait until :func:`acquire` would succeed, but take nothing. The errors are the same.

    Returns:
        The GPUs that it would get.
    """
    return _Search(view, options).run(None)


_ROOMS = "affinity claim coordination drivers runtimes schedulers selection status".split()


@cache
def _import_all() -> None:
    """Import what the wait, the claim after it and their refusals may need: an upgrade may replace the files."""
    import pkgutil
    from importlib import import_module

    package = __name__.partition(".")[0]
    for name in ("host_file", "policy", "sysfs", "topology", *_ROOMS):
        module = import_module(f"{package}.{name}")
        for one in pkgutil.iter_modules(getattr(module, "__path__", ())):
            import_module(f"{module.__name__}.{one.name}")


class _Search:
    """One search for GPUs, from the first look to the leases; with ``claim`` None it takes no leases."""

    def __init__(self, view: HostView, options: ClaimOptions) -> None:
        options = with_policy_limits(options)
        self._view = view
        self._options = options
        self._place = QueuePlace(view, options.hold, options.quota, options.job.job_label)
        self._attempt = Attempt()
        self._lookout: LeaseWatcher | None = None
        self._patience = WaitState(options.deadline, tried_last=options.timeout == 0)
        self._reporter: WaitReporter | None = None
        self._watching_since = 0.0
        self._looks = 0
        self._limited = False
        self._gone_since = 0.0  # time.monotonic() value, of the state directory

    def run(self, claim: Claim | None) -> tuple[Gpu, ...]:
        """Look, decide and wait until there are enough GPUs, and a second poll confirms that they are free."""
        self._check_possible()
        self._limit()
        self._options.logger.info("acquiring lock")
        try:
            with unwind_on_signals():
                try:
                    while True:
                        # Stored before it holds a ticket, so that _leave closes it after an interrupt.
                        self._attempt = attempt = Attempt()
                        if self._takes(attempt, claim) and self._is_confirmed(claim, attempt.chosen):
                            return attempt.chosen if claim is None else claim.gpus
                finally:
                    self._leave()
        except BaseException:
            self._leave()  # again, because an interrupt may have ended the first call
            raise

    def _takes(self, attempt: Attempt, claim: Claim | None) -> bool:
        """Look once, and wait if there are too few GPUs; a state directory that is away for a moment is waited for."""
        try:
            scope = self._view.scope
            attempt.run(self._view, self._place, claim, self._options, may_wait=self._may_wait())
            if scope != self._view.scope:  # it is of no claim, so the visible limit decides
                self._check_possible()
            self._limit()
            if attempt.chosen or not self._looks:
                self._options.logger.info("lock acquired")
                self._options.logger.info("lock released")
            self._looks += 1
            self._gone_since = 0.0
            decision = self._decide(attempt)
            if decision.step == REFUSE:
                raise self._refusal(attempt)
            if decision.step != TAKE:
                self._carry_out(decision, attempt)
                attempt.close()
            return decision.step == TAKE
        except StateDirError as err:
            attempt.close()
            self._outlast(err)
            return False

    def _check_possible(self) -> None:
        """Refuse what this host can never give. Inside another claim, that decides, once the lock is held."""
        view, request = self._view, self._view.request
        if not request.conditions and fits(request, view.usable):  # as almost always
            return
        visible_limit = None if view.scope else view.visible_limit
        try:
            check_possible(view.snapshot, request, visible_limit, leased=self._leased, rules=view.rules)
        except UnsatisfiableRequestError as err:
            if visible_limit is not None:
                raise  # this process was given GPUs, and those of another vendor are not among them
            from .messages import with_way_out

            raise with_way_out(err, request, view.rules) from None

    def _leased(self) -> Mapping[str, LeaseHolder]:
        from .messages import holders_now

        try:
            return holders_now(self._view)
        except StateDirError:
            return {}

    def _is_confirmed(self, claim: Claim | None, gpus: tuple[Gpu, ...]) -> bool:
        """Return whether a second poll shows the GPUs free; the leases of a claim are given back if not."""
        if claim is not None:
            return confirm(self._view, claim, self._options)
        self._view.poll_again(gpus)
        return all(gpu.uuid in self._view.unoccupied for gpu in gpus)

    def _limit(self) -> None:
        """Apply the policy, once it is certain that this claim is not made inside another one."""
        if self._limited or self._options.quota is None or self._view.scope:
            return
        from ..selection.sharing import amount
        from .quota import check_policy_limits

        self._limited = True
        options, limits = self._options, self._options.quota.limits
        request = self._view.request
        number = amount(request.nb_gpus, request.share, self._view.snapshot.gpus)
        check_policy_limits(number, options.hold, limits, options.request.spelling)
        most = limits.max_wait
        if most is not None and (options.timeout is None or options.timeout > most):
            self._options = options._replace(timeout=most, wait_limit=limits.path)
        self._patience = WaitState(self._options.deadline, tried_last=self._options.timeout == 0)

    def _decide(self, attempt: Attempt) -> Decision:
        now = next_look = time.monotonic()
        if attempt.chosen:
            next_look = math.inf
        elif self._options.quota is None or not self._options.quota.unresolved:
            next_look = self._waiting(began=now).next_look(now)
        if attempt.result.strange:
            next_look = min(next_look, now + TIME_TO_TAKE)
        unleased = [gpu for gpu in self._view.usable if gpu.uuid in attempt.result.unleased]
        decision = decide(
            attempt.result,
            self._patience,
            suffices=fits(self._view.request, unleased),
            now=now,
            next_poll=self._view.next_poll,
            next_look=next_look,
        )
        self._patience = decision.patience
        return decision

    def _may_wait(self) -> bool:
        return time.monotonic() < self._options.deadline

    # Waiting

    def _outlast(self, err: StateDirError) -> None:
        """Sleep for a moment if the state directory went away during the wait, less than a minute ago; else raise."""
        now = time.monotonic()
        self._gone_since = self._gone_since or (now if self._looks and not os.path.isdir(state_dir_path()) else 0.0)
        if not self._gone_since or now >= min(self._gone_since + _LONGEST_ABSENCE, self._options.deadline):
            raise err
        if now == self._gone_since:
            self._options.logger.warning("%s; waiting a minute for it", printable_lines(str(err)))
        time.sleep(_ABSENCE_PAUSE)

    def _carry_out(self, decision: Decision, attempt: Attempt) -> None:
        if not attempt.result.outdated and self._may_wait():
            _import_all()
            self._waiting().report(attempt)
        self._view.has_waited = True
        if decision.step == POLL:
            self._view.poll()
        elif decision.step == SLEEP:
            if not self._sleep(attempt, min(decision.until, self._waiting().due)) and self._view.age > _OLD:
                self._view.poll()  # a process that holds no lease may have started or exited
        else:
            self._watch(attempt, min(decision.until, self._waiting().warning_due))

    def _waiting(self, began: float | None = None) -> WaitReporter:
        if self._reporter is None:
            self._reporter = WaitReporter(self._view, self._options, self._place, began or time.monotonic())
        return self._reporter

    def _sleep(self, attempt: Attempt, until: float) -> bool:
        """Sleep until the ticket ahead is gone or ``until``; give a warning that becomes due meanwhile.

        Returns:
            Whether the ticket ahead is gone.
        """
        assert attempt.ahead is not None
        waiter, reporter = self._place.ensure_waiter(), self._waiting()
        if reporter.warning_due < until:
            if waiter.sleep_behind(attempt.ahead, max(0.0, reporter.warning_due - time.monotonic())):
                return True
            reporter.warn_once(attempt)
        return waiter.sleep_behind(attempt.ahead, max(0.0, until - time.monotonic()))

    def _watch(self, attempt: Attempt, until: float) -> None:
        """Sleep until a lease may have been released, or until ``until``."""
        from ..coordination.locks import LeaseWatcher

        now = time.monotonic()
        self._watching_since = self._watching_since or now
        # A name cannot be slept on: the next full look sees to it.
        not_held = attempt.result.unleased | attempt.result.named
        held = (self._view.lease_name(gpu.uuid) for gpu in self._view.usable if gpu.uuid not in not_held)
        watched = {*held, *attempt.result.watched}
        self._lookout = LeaseWatcher(watched if attempt.result.spent is None else attempt.result.spent.leases)
        with self._lookout as lookout:
            while now < until:
                pause = _LEASE_PAUSE if now - self._watching_since < 1.0 else 2 * _LEASE_PAUSE
                time.sleep(min(until - now, pause))
                if lookout.any_free():
                    return
                now = time.monotonic()

    def _leave(self) -> None:
        if self._lookout is not None:
            self._lookout.close()  # an interrupt may have come before the with block closed it
        self._attempt.close()
        self._place.leave()

    def _refusal(self, attempt: Attempt) -> Exception:
        from .messages import refusal

        ticket = None if attempt.ahead is None else attempt.ahead.ticket
        return refusal(
            self._view,
            ticket=ticket,
            stopped=attempt.stopped,
            spent=attempt.result.spent,
            position=self._place.position,
            waited=self._options.timeout or 0.0,
            wait_limit=self._options.wait_limit,
        )
