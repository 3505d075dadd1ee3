"""The loop that gets leases for a request: look, decide, wait, look again.

host.lock is never held during a slow operation. The driver is polled before host.lock is taken, and polled again once
the leases are held, because a process may have started on a GPU in between.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from ..coordination.files import state_dir_path, state_dir_warnings
from ..coordination.signals import unwind_on_signals
from ..errors import UnsatisfiableRequestError
from ..procfs import printable_lines
from ..selection.choice import check_possible
from .decision import POLL, REFUSE, SLEEP, TAKE, Decision, WaitState, decide
from .line import QueuePlace
from .look import Attempt
from .recheck import confirm
from .terms import with_policy_limits

if TYPE_CHECKING:
    from ..coordination.locks import LeaseWatcher
    from ..devices import Gpu
    from .claim import Claim
    from .host_view import HostView
    from .news import WaitReporter
    from .terms import ClaimOptions


# Pause of the head of the queue between two looks at the leases, in seconds. It is doubled after the first second.
_LEASE_PAUSE = 0.010
# A sleeper that looks again polls the driver first if its latest poll is older than this, in seconds.
_OLD = 30.0


def acquire(view: HostView, terms: ClaimOptions, claim: Claim) -> None:
    """Fill an empty claim with leases on N GPUs, confirmed by a second poll.

    Raises:
        UnsatisfiableRequestError: this host or its policy can never satisfy the request; raised without a wait.
        PolicyError: the policy file cannot be used.
        NotEnoughGpusError, ClaimTimeout: too few GPUs are free now, or were until the deadline.
        LockTimeout, StateDirError, NoDriverError: host.lock, the state directory or the driver cannot be used.
    """
    if view.snapshot.shared_display:
        terms.logger.info("Running on a machine with single GPU used for actual display")
    _Search(view, terms).settle(claim)
    claim.note()
    for doubt in state_dir_warnings():
        terms.logger.warning("the state directory %s %s", printable_lines(state_dir_path()), doubt)


def wait_until_free(view: HostView, terms: ClaimOptions) -> tuple[Gpu, ...]:
    """Wait until :func:`acquire` would succeed, but take nothing. The errors are the same.

    Returns:
        The GPUs that it would get.
    """
    return _Search(view, terms).settle(None)


class _Search:
    """One search for GPUs, from the first look to the leases; with ``claim`` None it takes no leases."""

    def __init__(self, view: HostView, terms: ClaimOptions) -> None:
        terms = with_policy_limits(terms)
        self._view = view
        self._terms = terms
        self._line = QueuePlace(view, terms.hold, terms.quota)
        self._look = Attempt()
        self._lookout: LeaseWatcher | None = None
        self._patience = WaitState(terms.deadline, tried_last=terms.timeout == 0)
        self._news: WaitReporter | None = None
        self._watching_since = 0.0
        self._looks = 0
        self._limited = False

    def settle(self, claim: Claim | None) -> tuple[Gpu, ...]:
        self._check_possible()
        self._limit()
        self._terms.logger.info("acquiring lock")
        try:
            with unwind_on_signals():
                try:
                    return self._take_turns(claim)
                finally:
                    self._leave()
        except BaseException:
            self._leave()  # again, because an interrupt may have ended the first call
            raise

    def _check_possible(self) -> None:
        view, request = self._view, self._terms.request
        try:
            check_possible(view.snapshot, request, view.fence, rules=view.rules)
        except UnsatisfiableRequestError as err:
            if view.fence is not None:
                raise  # this process was given GPUs, and those of another vendor are not among them
            from .other_vendor import with_way_out

            raise with_way_out(err, request, view.rules) from None

    def _take_turns(self, claim: Claim | None) -> tuple[Gpu, ...]:
        while True:
            gpus = self._next_turn(claim)
            if claim is None:
                if self._still_free(gpus):
                    return gpus
            elif confirm(self._view, claim, self._terms):
                return claim.gpus

    def _still_free(self, gpus: tuple[Gpu, ...]) -> bool:
        self._view.poll_again(gpus)
        return all(gpu.uuid in self._view.unoccupied for gpu in gpus)

    def _next_turn(self, claim: Claim | None) -> tuple[Gpu, ...]:
        """Look and wait until there are enough GPUs; the only loop that waits for them."""
        while True:
            self._look = look = (
                Attempt()
            )  # stored before it holds a ticket, so that _leave closes it after an interrupt
            look.take(self._view, self._line, claim, self._terms, may_wait=self._may_wait())
            self._limit()
            self._log_first(look)
            next_step = self._decide(look)
            if next_step.step == TAKE:
                return look.chosen
            if next_step.step == REFUSE:
                raise self._refusal(look)
            self._carry_out(next_step, look)
            look.close()

    def _limit(self) -> None:
        """Apply the policy, once it is certain that this claim is not made inside another one."""
        if self._limited or self._terms.quota is None or self._view.scope:
            return
        from .quota import check_policy_limits

        self._limited = True
        terms, limits = self._terms, self._terms.quota.limits
        check_policy_limits(terms.request.nb_gpus, terms.hold, limits, terms.request.spelling)
        most = limits.max_wait
        if most is not None and (terms.timeout is None or terms.timeout > most):
            self._terms = terms._replace(timeout=most, wait_limit=limits.path)
        self._patience = WaitState(self._terms.deadline, tried_last=self._terms.timeout == 0)

    def _decide(self, look: Attempt) -> Decision:
        now = time.monotonic()
        decision = decide(
            look.seen,
            self._patience,
            needed=self._terms.request.nb_gpus,
            now=now,
            next_poll=self._view.next_poll,
            next_look=math.inf if look.chosen else self._next_look(now),
        )
        self._patience = decision.patience
        return decision

    def _next_look(self, now: float) -> float:
        if self._terms.quota is not None and self._terms.quota.unresolved:
            return now
        return self._waiting().next_look(now)

    def _may_wait(self) -> bool:
        return time.monotonic() < self._terms.deadline

    def _log_first(self, look: Attempt) -> None:
        if look.chosen or not self._looks:
            self._terms.logger.info("lock acquired")
            self._terms.logger.info("lock released")
        self._looks += 1

    # Waiting

    def _carry_out(self, decision: Decision, look: Attempt) -> None:
        if not look.seen.outdated and self._may_wait():
            self._waiting().tell(look)
        if decision.step == POLL:
            self._view.poll()
        elif decision.step == SLEEP:
            if not self._sleep(look, min(decision.until, self._waiting().due)) and self._view.age > _OLD:
                self._view.poll()  # a process that holds no lease may have started or exited
        else:
            self._watch(look, decision.until)

    def _waiting(self) -> WaitReporter:
        if self._news is None:
            from .news import WaitReporter

            self._news = WaitReporter(self._view, self._terms, self._line)
        return self._news

    def _sleep(self, look: Attempt, until: float) -> bool:
        """Sleep until the ticket ahead is gone or ``until``; give a warning that becomes due meanwhile.

        Returns:
            Whether the ticket ahead is gone.
        """
        assert look.ahead is not None
        waiter, news = self._line.stand(), self._waiting()
        if news.warning_due < until:
            if waiter.sleep_behind(look.ahead, max(0.0, news.warning_due - time.monotonic())):
                return True
            news.warn(look)
        return waiter.sleep_behind(look.ahead, max(0.0, until - time.monotonic()))

    def _watch(self, look: Attempt, until: float) -> None:
        """Sleep until a lease may have been released, or until ``until``."""
        from ..coordination.locks import LeaseWatcher

        now = time.monotonic()
        self._watching_since = self._watching_since or now
        not_held = look.seen.unleased | look.seen.named  # a name cannot be slept on: the next full look sees to it
        held = (self._view.lease_name(gpu.uuid) for gpu in self._view.usable if gpu.uuid not in not_held)
        self._lookout = LeaseWatcher(held if look.seen.spent is None else look.seen.spent.leases)
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
        self._look.close()
        self._line.leave()

    def _refusal(self, look: Attempt) -> Exception:
        from .why_not import refusal

        ticket = None if look.ahead is None else look.ahead.ticket
        return refusal(
            self._view,
            ticket=ticket,
            stopped=look.stopped,
            spent=look.seen.spent,
            position=self._line.position,
            waited=self._terms.timeout or 0.0,
            wait_limit=self._terms.wait_limit,
        )
