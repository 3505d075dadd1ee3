"""The loop that gets leases for a request: look, decide, wait, look again.

host.lock is never held during a slow operation. The driver is polled before host.lock is taken, and polled again once
the leases are held, because a process may have started on a GPU in between.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from ...coordination.signals import unwind_on_signals
from ...coordination.state_dir import doubt_of_entries, doubt_of_image, not_told_yet, state_dir_path
from ...errors import LockTimeout, StateDirError, UnsatisfiableRequestError
from ...host.procfs import printable_lines
from ...selection.choice import check_possible, fits
from ..arguments import ClaimOptions, with_policy_limits
from ..checks.confirmation import confirm
from ..host.ancestors import refuse_inside_share
from .attempt import Attempt
from .decision import POLL, REFUSE, SLEEP, TAKE, Decision, WaitState, decide
from .queue_place import QueuePlace

if TYPE_CHECKING:
    from ...coordination.leases.watcher import LeaseWatcher
    from ...gpus.devices import Gpu, LeaseHolder
    from ..held import Claim
    from ..host.host_view import HostView
    from .wait_reports import WaitReporter

# Pause of the head of the queue between two looks at the leases, in seconds. It is doubled after the first second.
_LEASE_PAUSE = 0.010

# A sleeper that looks again polls the driver first if its latest poll is older than this, in seconds.
_OLD = 30.0

# For so long waiters wait for a state directory that went away, in seconds, and look for it so often.
_LONGEST_ABSENCE = 60.0

_ABSENCE_PAUSE = 0.25

# A claim waits at most this many times MINIMUM_PATIENCE for a host.lock that nobody keeps.
_MOST_CROWDS = 6


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
    claim.note(time.monotonic() - options.began)
    path = state_dir_path()
    doubts = [doubt_of_image(path)]
    if not view.snapshot.shared_display:  # there names keep nobody off
        doubts.append(doubt_of_entries(path, doors=len(claim.names) >= len(claim.gpus)))
    for doubt in not_told_yet(doubts):
        options.logger.warning("%s", doubt)


def wait_until_free(view: HostView, options: ClaimOptions) -> tuple[Gpu, ...]:
    """Wait until :func:`acquire` would succeed, but take nothing. The errors are the same.

    Returns:
        The GPUs that it would get.
    """
    return _Search(view, options).run(None)


_ROOMS = "affinity claim coordination drivers gpus host runtimes schedulers selection settings topology".split()


@cache
def _import_all() -> None:
    """Import what the wait, the claim after it and their refusals may need: an upgrade may replace the files."""
    import pkgutil
    from importlib import import_module

    package = __name__.partition(".")[0]
    for name in _ROOMS:
        module = import_module(f"{package}.{name}")
        for one in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{module.__name__}."):
            import_module(one.name)


class _Search:
    """One search for GPUs, from the first look to the leases; with ``claim`` None it takes no leases."""

    def __init__(self, view: HostView, options: ClaimOptions) -> None:
        options = with_policy_limits(options)
        self._view = view
        self._options = options
        self._place = QueuePlace(view, options.hold, options.quota, options.job.job_label)
        self._attempt = Attempt()
        self._watcher: LeaseWatcher | None = None
        self._state = WaitState(options.deadline, tried_last=options.timeout == 0)
        self._reporter: WaitReporter | None = None
        self._watching_since = 0.0
        self._looks = 0
        self._limited = False
        self._crowds = 0
        self._gone_since = 0.0  # time.monotonic() value, of the state directory

    def run(self, claim: Claim | None) -> tuple[Gpu, ...]:
        """Look, decide and wait until there are enough GPUs, and a second poll confirms that they are free."""
        if "SAFE_GPU_SHARE" in os.environ:  # of a claim around this process, or leaked
            from ..messages.refusal import holders_now

            refuse_inside_share(self._view.snapshot.gpus, holders_now(self._view))
        self._check_possible()
        self._limit()
        self._options.logger.info("acquiring lock")
        try:
            with unwind_on_signals():
                try:
                    while True:
                        # Stored before it holds a ticket, so that _leave closes it after an interrupt.
                        self._attempt = attempt = Attempt()
                        with self._outlasting(attempt):
                            scope = self._view.scope
                            attempt.run(self._view, self._place, claim, self._options, may_wait=self._may_wait())
                            if not self._takes(attempt, scope):
                                continue
                        if attempt.chosen and self._is_confirmed(claim, attempt.chosen):
                            return attempt.chosen if claim is None else claim.gpus
                finally:
                    self._leave()
        except BaseException:
            self._leave()  # again, because an interrupt may have ended the first call
            raise

    def _takes(self, attempt: Attempt, scope: str) -> bool:
        """Return whether a look took GPUs; wait if not."""
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

    @contextmanager
    def _outlasting(self, attempt: Attempt) -> Iterator[None]:
        """Let a look fail while the state directory is away for a moment, or the host is overloaded."""
        try:
            yield
        except (StateDirError, LockTimeout) as err:
            attempt.close()
            attempt.chosen = ()
            if isinstance(err, StateDirError):
                self._outlast(err)
                return
            self._crowds += 1
            if not err.overloaded or self._crowds == _MOST_CROWDS:
                raise

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
            from ..messages.other_vendor import with_way_out

            raise with_way_out(err, request, view.rules) from None

    def _leased(self) -> Mapping[str, LeaseHolder]:
        from ..messages.refusal import holders_now

        try:
            return holders_now(self._view)
        except StateDirError:
            return {}

    def _is_confirmed(self, claim: Claim | None, gpus: tuple[Gpu, ...]) -> bool:
        """Return whether a second poll shows the GPUs free; the leases of a claim are given back if not."""
        if claim is not None:
            return confirm(self._view, claim, self._options)
        self._view.polls.poll_again(gpus)
        return all(gpu.uuid in self._view.unoccupied for gpu in gpus)

    def _limit(self) -> None:
        """Apply the policy, once it is certain that this claim is not made inside another one."""
        if self._limited or self._options.quota is None or self._view.scope:
            return
        from ..limits import check_policy_limits

        self._limited = True
        options, limits = self._options, self._options.quota.limits
        number = self._view.request.amount(self._view.snapshot.gpus)
        hold, spelling = options.hold, options.request.spelling
        check_policy_limits(number, hold.seconds, limits, spelling, said=hold.said)
        most = limits.max_wait
        if most is not None and (options.timeout is None or options.timeout > most):
            self._options = options._replace(timeout=most, wait_limit=limits.path)
        self._state = WaitState(self._options.deadline, tried_last=self._options.timeout == 0)

    def _decide(self, attempt: Attempt) -> Decision:
        now = next_look = time.monotonic()
        if attempt.chosen:
            next_look = math.inf
        elif self._options.quota is None or not self._options.quota.unresolved:
            next_look = self._waiting(began=now).next_look(now)
        unleased = [gpu for gpu in self._view.usable if gpu.uuid in attempt.result.unleased]
        decision = decide(
            attempt.result,
            self._state,
            suffices=fits(self._view.request, unleased),
            now=now,
            next_poll=self._view.polls.next_poll,
            next_look=next_look,
        )
        self._state = decision.state
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
        self._view.polls.has_waited = True
        if decision.step == POLL:
            self._view.polls.poll()
        elif decision.step == SLEEP:
            if not self._sleep(attempt, min(decision.until, self._waiting().due)) and self._view.polls.age > _OLD:
                self._view.polls.poll()  # a process that holds no lease may have started or exited
        else:
            self._watch(attempt, min(decision.until, self._waiting().warning_due))

    def _waiting(self, began: float | None = None) -> WaitReporter:
        if self._reporter is None:
            from .wait_reports import WaitReporter

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
        from ...coordination.leases.watcher import LeaseWatcher

        now = time.monotonic()
        self._watching_since = self._watching_since or now
        # A name cannot be slept on: the next full look sees to it.
        not_held = attempt.result.unleased | attempt.result.named
        held = (self._view.outer.lease_name(gpu.uuid) for gpu in self._view.usable if gpu.uuid not in not_held)
        watched = {*held, *attempt.result.watched}
        self._watcher = LeaseWatcher(watched if attempt.result.limit is None else attempt.result.limit.leases)
        with self._watcher as watcher:
            while now < until:
                pause = _LEASE_PAUSE if now - self._watching_since < 1.0 else 2 * _LEASE_PAUSE
                time.sleep(min(until - now, pause))
                if watcher.any_free():
                    return
                now = time.monotonic()

    def _leave(self) -> None:
        if self._watcher is not None:
            self._watcher.close()  # an interrupt may have come before the with block closed it
        self._attempt.close()
        self._place.leave()

    def _refusal(self, attempt: Attempt) -> Exception:
        from ..messages.refusal import refusal

        ticket = None if attempt.ahead is None else attempt.ahead.ticket
        return refusal(
            self._view,
            ticket=ticket,
            stopped=attempt.stopped,
            spent=attempt.result.limit,
            position=self._place.position,
            waited=self._options.timeout or 0.0,
            wait_limit=self._options.wait_limit,
        )
