"""The loop that gets GPUs for a request: look, decide, wait, look again.

host.lock is never held during a slow operation. The driver is polled before host.lock is taken, and polled again once
the GPUs are held, because a process may have started on a GPU in between.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from ..coordination.directory import state_dir_path
from ..coordination.entry import is_alive
from ..coordination.host_lock import Host
from ..errors import LockTimeout, StateDirError
from ..gpus.devices import Gpu, Holder
from ..host.foreign_files import printable_lines
from ..host.signals import DeferredSignals, unwind_on_signals
from ..selection.choice import capacity, check_possible, fits
from .arguments import ClaimOptions, with_policy_limits
from .around import refuse_inside_share
from .checks import confirm
from .claim import Claim
from .look import Look, Seen
from .queue_place import QueuePlace
from .view import HostView

if TYPE_CHECKING:
    from .report import WaitReporter

# Pause of the head of the queue between two questions whether claims live, in seconds. It is doubled after the first
# second.
_PAUSE = 0.010

# Pauses of a claim that withdrew, in seconds: uneven, or two go in step.
_UNEVEN = (0.0005, 0.010)

# A sleeper that looks again polls the driver first if its latest poll is older than this, in seconds.
_OLD = 30.0

# For so long waiters wait for a state directory that went away, in seconds, and look for it so often.
_LONGEST_ABSENCE = 60.0

_ABSENCE_PAUSE = 0.25

# A claim waits at most this many times MINIMUM_PATIENCE for a host.lock that nobody keeps.
_MOST_CROWDS = 6


POLL = "poll"
"""Poll the driver, then look again."""

SLEEP = "sleep"
"""Sleep until the ticket ahead is gone, then look again."""

WATCH = "watch"
"""Watch the claims of others, then look again."""

AGAIN = "again"
"""Pause unevenly, then look again: two claims have seen each other."""

REFUSE = "refuse"
"""Fail, because the time to wait is over."""

# The head of the queue makes a full look this often, in seconds, because the state directory may have been deleted.
_FULL_LOOK = 1.0

# A dying process closes its descriptors one by one, so a door may outlive an entry: it is tried once more, in seconds.
_SECOND_TRY = 0.005

# For so long even a claim that does not wait looks again after it withdrew, in seconds.
_WITHDRAWING = 1.0


class WaitState(NamedTuple):
    """The state of a claim's wait.

    Attributes:
        deadline: ``time.monotonic()`` value; ``math.inf`` waits without limit.
        tried_last: whether the last look, after the deadline, has been made.
        polled_for: the GPUs that nobody held at the time of the latest poll.
        elsewhere: the GPUs held elsewhere for which a second look was made.
        withdrew: when the claim withdrew first, since it was not in anybody's way; 0 for never.
    """

    deadline: float = math.inf
    tried_last: bool = False
    polled_for: frozenset[str] | None = None
    elsewhere: frozenset[str] = frozenset()
    withdrew: float = 0.0


class Decision(NamedTuple):
    """A step; ``until`` is the ``time.monotonic()`` value at which SLEEP, WATCH and AGAIN end at the latest."""

    step: str
    state: WaitState
    until: float = 0.0


def decide(
    seen: Seen,
    state: WaitState,
    *,
    suffices: bool,
    now: float,
    next_poll: float,
    next_look: float = math.inf,
    pause: float = 0.0,
) -> Decision:
    """Return the next step of a claim that has seen too few GPUs.

    Args:
        suffices: whether the GPUs that nobody holds would be enough.
        now: ``time.monotonic()`` value, as are the next two.
        next_poll: earliest time of another poll for the same GPUs.
        next_look: latest time at which a sleeping waiter looks again.
        pause: seconds until a claim that withdrew looks again.
    """
    if seen.outdated:
        return Decision(POLL, state)
    withdrew = (state.withdrew or now) if seen.withdrawn else 0.0
    state = state._replace(withdrew=withdrew)
    if seen.withdrawn and now < max(state.deadline, withdrew + _WITHDRAWING):
        return Decision(AGAIN, state, now + pause)
    if not seen.elsewhere <= state.elsewhere:
        return Decision(WATCH, state._replace(elsewhere=state.elsewhere | seen.elsewhere), now + _SECOND_TRY)
    if now >= state.deadline:
        if state.tried_last:
            return Decision(REFUSE, state)
        return Decision(POLL, state._replace(tried_last=True))
    if seen.behind:
        return Decision(SLEEP, state, min(state.deadline, next_look))
    until = min(state.deadline, now + _FULL_LOOK)
    if seen.limit is not None:
        return Decision(WATCH, state, until)
    if suffices:  # nobody holds enough of them, but the driver shows processes there
        if seen.free != state.polled_for or now >= next_poll:
            return Decision(POLL, state._replace(polled_for=seen.free))
        until = min(until, next_poll)
    return Decision(WATCH, state, until)


def acquire(view: HostView, options: ClaimOptions, claim: Claim | None) -> tuple[Gpu, ...]:
    """Fill an empty claim with N GPUs, confirmed by a second poll; with None, wait until that would succeed.

    Returns:
        The GPUs.

    Raises:
        UnsatisfiableRequestError: this host or its policy can never satisfy the request; raised without a wait.
        PolicyError: the policy file cannot be used.
        NotEnoughGpusError, ClaimTimeout: too few GPUs are free now, or were until the deadline.
        LockTimeout, StateDirError, NoDriverError: host.lock, the state directory or the driver cannot be used.
    """
    if view.snapshot.shared_display:
        options.logger.info("Running on a machine with single GPU used for actual display")
    return _Search(view, options).run(claim)


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
    """One search for GPUs, from the first look to the claim; with ``claim`` None it takes nothing."""

    def __init__(self, view: HostView, options: ClaimOptions) -> None:
        options = with_policy_limits(options)
        self._view = view
        self._options = options
        self._host = Host()
        self._place = QueuePlace(self._host, view, options)
        self._state = WaitState(options.deadline, tried_last=options.timeout == 0)
        self._reporter: WaitReporter | None = None
        self._watching_since = 0.0
        self._looks = 0
        self._limited = False
        self._crowds = 0
        self._gone_since = 0.0  # time.monotonic() value, of the state directory
        self._waits = ExitStack()  # ends with the search
        self._unwinds = False

    def run(self, claim: Claim | None) -> tuple[Gpu, ...]:
        """Look, decide and wait until there are enough GPUs, and a second poll confirms that they are free."""
        if "SAFE_GPU_SHARE" in os.environ:  # of a claim around this process, or leaked
            refuse_inside_share(self._view.snapshot.gpus, self._holders())
        self._check_possible()
        self._limit()
        self._options.logger.info("acquiring lock")
        try:
            with self._waits:
                try:
                    while True:
                        look = self._look(claim)
                        if look is not None and self._takes(look) and self._is_confirmed(claim, look.chosen):
                            return look.chosen if claim is None else claim.gpus
                finally:
                    self._leave()
        except BaseException:
            self._leave()  # again, because an interrupt may have ended the first call
            raise

    def _look(self, claim: Claim | None) -> Look | None:
        """Look; None where that fails while the state directory is away for a moment, or the host is overloaded."""
        scope = self._view.scope
        look = Look(self._host, self._view, self._place, claim, self._options)
        try:
            look.run(may_wait=time.monotonic() < self._options.deadline)
        except StateDirError as err:
            self._outlast(err)
            return None
        except LockTimeout as err:
            self._crowds += 1
            if not err.overloaded or self._crowds == _MOST_CROWDS:
                raise
            return None
        if scope != self._view.scope:  # it is of no claim, so the visible limit decides
            self._check_possible()
        self._limit()
        if look.chosen or not self._looks:
            self._options.logger.info("lock acquired")
            self._options.logger.info("lock released")
        self._looks += 1
        self._gone_since = 0.0
        return look

    def _takes(self, look: Look) -> bool:
        """Return whether a look took GPUs; wait if not."""
        if look.seen.enough:
            return True
        decision = self._decide(look)
        if decision.step == REFUSE:
            from .report import refusal

            raise refusal(self._view, look, self._options, self._place.position)
        if decision.step == AGAIN:
            time.sleep(max(0.0, decision.until - time.monotonic()))
        else:
            self._wait(decision, look)
        return False

    def _check_possible(self) -> None:
        """Refuse what this host can never give. Inside another claim, that decides, once the lock is held."""
        view, request = self._view, self._view.request
        if not request.conditions and capacity(view.usable) >= request.nb_gpus:  # as almost always
            return
        visible_limit = None if view.scope else view.visible_limit
        check_possible(view.snapshot, request, visible_limit, claimed=self._holders, rules=view.rules)

    def _holders(self) -> Mapping[str, Holder]:
        from .report import holders_now

        with suppress(StateDirError):
            return holders_now(self._view.snapshot, self._view.inside)
        return {}

    def _is_confirmed(self, claim: Claim | None, gpus: tuple[Gpu, ...]) -> bool:
        """Return whether a second poll shows the GPUs free; a claim is given back if not."""
        if claim is not None:
            return confirm(self._view, claim, self._options)
        self._view.polls.poll_again(gpus)
        return all(gpu.uuid in self._view.unoccupied() for gpu in gpus)

    def _limit(self) -> None:
        """Apply the policy, once it is certain that this claim is not made inside another one."""
        if self._limited or self._options.quota is None or self._view.scope:
            return
        from .limits import check_policy_limits

        self._limited = True
        options, limits = self._options, self._options.quota.limits
        number = self._view.request.amount(self._view.snapshot.gpus)
        check_policy_limits(number, limits, options.hold.seconds, said=options.hold.said)
        most = limits.max_wait
        if most is not None and (options.timeout is None or options.timeout > most):
            self._options = options._replace(timeout=most, wait_limit=limits.path)
        self._state = WaitState(self._options.deadline, tried_last=self._options.timeout == 0)

    def _decide(self, look: Look) -> Decision:
        now = next_look = time.monotonic()
        reporter, quota = self._waiting(), self._options.quota
        if quota is None or not quota.unresolved:
            next_look = reporter.next_look(now)
        free = [gpu for gpu in self._view.usable if gpu.uuid in look.seen.free]
        decision = decide(
            look.seen,
            self._state,
            suffices=fits(self._view.request, free),
            now=now,
            next_poll=self._view.polls.next_poll,
            next_look=next_look,
            pause=_uneven(*_UNEVEN) if look.seen.withdrawn else 0.0,
        )
        self._state = decision.state
        return decision

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

    def _wait(self, decision: Decision, look: Look) -> None:
        if not look.seen.outdated and time.monotonic() < self._options.deadline:
            if not self._unwinds:
                self._unwinds = True
                self._waits.enter_context(unwind_on_signals())  # its ticket is to be removed
            _import_all()
            self._waiting().report(look)
        self._view.polls.has_waited = True
        if decision.step == POLL:
            self._view.polls.poll()
        elif decision.step == SLEEP:
            if not self._sleep(look, min(decision.until, self._waiting().due)) and self._view.polls.age > _OLD:
                self._view.polls.poll()  # a process that holds no claim may have started or exited
        else:
            self._watch(look, min(decision.until, self._waiting().warning_due))

    def _waiting(self) -> WaitReporter:
        if self._reporter is None:
            from .report import WaitReporter

            self._reporter = WaitReporter(self._view, self._options, self._place)
        return self._reporter

    def _sleep(self, look: Look, until: float) -> bool:
        """Sleep until the ticket ahead is gone or ``until``; give a warning that becomes due meanwhile.

        Returns:
            Whether the ticket ahead is gone.
        """
        assert look.ahead is not None
        waiter, reporter = self._place.ensure_waiter(), self._waiting()
        if reporter.warning_due < until:
            if waiter.sleep_behind(look.ahead, max(0.0, reporter.warning_due - time.monotonic())):
                return True
            reporter.warn_once(look)
        return waiter.sleep_behind(look.ahead, max(0.0, until - time.monotonic()))

    def _watch(self, look: Look, until: float) -> None:
        """Sleep until a claim may have ended, or until ``until``. What is held elsewhere is seen by the next look."""
        now = time.monotonic()
        self._watching_since = self._watching_since or now
        claims, limit = self._host.claims.directory, look.seen.limit
        watched = look.seen.watched if limit is None else limit.claims
        while now < until:
            pause = _PAUSE if now - self._watching_since < 1.0 else 2 * _PAUSE
            time.sleep(min(until - now, pause))
            with DeferredSignals():
                if not all(is_alive(claims, name) for name in watched):
                    return
            now = time.monotonic()

    def _leave(self) -> None:
        if self._place.waiter is not None or self._host.directory is not None:
            DeferredSignals().run_deferred(self._leave_now)

    def _leave_now(self) -> None:
        self._place.leave()
        self._host.close()


def _uneven(least: float, most: float) -> float:
    import random

    return random.Random().uniform(least, most)  # the program's own sequence of random numbers stays as it is
