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

from ..coordination.entry import is_alive
from ..coordination.host_lock import Host
from ..errors import LockTimeout, NoDriverError, StateDirError
from ..gpus.devices import Gpu, Holder
from ..host import procfs
from ..host.foreign_files import printable_lines
from ..host.signals import DeferredSignals, unwind_on_signals
from ..selection.choice import capacity, check_possible, fits
from ..wording.text import format_age
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

# Pauses between two polls of the driver by the head of the queue, in seconds: at least where nobody holds enough GPUs,
# so that only the driver can tell when they are free, and where others do; and at most. In between it is this part of
# the time since something has happened: who has waited for long loses little by a little more.
_FAST_POLLS, _POLLS, _SLOW_POLLS = 0.1, 2.0, 5.0

_PART = 1 / 20

# Between polls that are nearer than this, in seconds, the session with the driver stays open.
_SHORT = 1.0

# Pauses of a claim that withdrew, in seconds: uneven, or two go in step.
_UNEVEN = (0.0005, 0.010)

_MOST_STRANGERS = 64

# A sleeper that looks again polls the driver first if its latest poll is older than this, in seconds.
_OLD = 30.0

# For so long waiters wait for a state directory or a driver that cannot be used any more, in seconds, and at least for
# so much of the time that they have waited; and they try again so often.
_LONGEST_ABSENCE = 60.0

_OF_THE_WAIT = 0.1

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
    # Where nobody holds enough of them, the driver shows processes there.
    if (suffices and seen.free != state.polled_for) or now >= next_poll:
        return Decision(POLL, state._replace(polled_for=seen.free))
    return Decision(WATCH, state, min(until, next_poll))


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


_ROOMS = "affinity claim coordination gpus host runtimes schedulers selection settings topology".split()

# A claim that uses the GPUs of their vendor has imported them with its driver.
_OF_VENDORS = frozenset({"cuda", "hip", "kfd_topology"})

_FOR_COMMANDS = frozenset({"gpu_affinity", "plan_text", "setup"})


@cache
def _import_all() -> None:
    """Import what the wait, the claim after it and their refusals may need: an upgrade may replace the files."""
    import pkgutil
    from importlib import import_module

    package = __name__.partition(".")[0]
    for name in _ROOMS:
        module = import_module(f"{package}.{name}")
        for one in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{module.__name__}."):
            if one.name.rpartition(".")[2] not in _OF_VENDORS | _FOR_COMMANDS:
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
        self._free: frozenset[str] = frozenset()  # by the latest look
        self._calm_since = time.monotonic()  # since when nothing has happened that may free a GPU
        self._pause = 0.0  # between two polls
        self._unconfirmed = False  # the second poll of a claim has failed, and it has not waited since
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
                        try:
                            look = self._look(claim)
                            if look is not None and self._takes(look) and self._is_confirmed(claim, look.chosen):
                                return look.chosen if claim is None else claim.gpus
                        except (NoDriverError, StateDirError) as err:
                            self._outlast(err)
                finally:
                    self._leave()
        except BaseException:
            self._leave()  # again, because an interrupt may have ended the first call
            raise

    def _look(self, claim: Claim | None) -> Look | None:
        """Look; None where that fails since the host is overloaded."""
        scope = self._view.scope
        look = Look(self._host, self._view, self._place, claim, self._options)
        try:
            look.run(may_wait=time.monotonic() < self._options.deadline)
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
        if not self._unconfirmed:
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
        """Return whether a second poll shows the GPUs free; a claim is given back if not.

        Those behind look meanwhile, without this claim's ticket. It makes that again before its GPUs are free.
        """
        if claim is not None:
            DeferredSignals().run_deferred(self._place.stand_aside)
            confirmed, self._unconfirmed = False, True
            try:
                confirmed = confirm(self._view, claim, self._options)
                self._unconfirmed = False
            finally:
                if not confirmed:
                    self._stand_again()
                    claim.release()
            if not confirmed:
                self._view.polls.poll()  # before others are chosen
            return confirmed
        self._view.polls.poll_again(gpus)
        return all(gpu.uuid in self._view.unoccupied() for gpu in gpus)

    def _stand_again(self) -> None:
        """Make the ticket again that this claim had, at its place. Where that fails, the next look does it."""
        host, options = self._host, self._options
        if self._place.waiter is None or not self._place.waiter.has_place:
            return
        with suppress(LockTimeout, StateDirError), DeferredSignals() as signals:
            host.look()
            with host.locked(options.lock_deadline, signals):
                host.queue.refresh()
                quota = options.quota
                held = None if quota is None else quota.held(self._view.snapshot, self._view.claims)
                self._place.join(held, None)

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
        suffices = fits(self._view.request, free)
        if look.seen.free != self._free:
            self._free, self._calm_since = look.seen.free, now
        pause = max(_FAST_POLLS if suffices else _POLLS, (now - self._calm_since) * _PART)
        self._pause = min(pause, _SLOW_POLLS)
        decision = decide(
            look.seen,
            self._state,
            suffices=suffices,
            now=now,
            next_poll=self._view.polls.next_poll(self._pause),
            next_look=next_look,
            pause=_uneven(*_UNEVEN) if look.seen.withdrawn else 0.0,
        )
        self._state = decision.state
        return decision

    # Waiting

    def _outlast(self, err: NoDriverError | StateDirError) -> None:
        """Sleep for a moment if a waiter's state directory (gone, full) or driver (being reset or loaded) cannot be
        used since less than a minute, or than a part of its wait; else raise. A driver has answered when this
        returns."""
        now = time.monotonic()
        self._gone_since = self._gone_since or now
        patience = max(_LONGEST_ABSENCE, (self._gone_since - self._options.began) * _OF_THE_WAIT)
        if now == self._gone_since and self._reporter is not None:
            self._options.logger.warning("%s; waiting %s for it", printable_lines(str(err)), format_age(patience))
        while True:
            if self._reporter is None or now >= min(self._gone_since + patience, self._options.deadline):
                raise err
            time.sleep(_ABSENCE_PAUSE)
            now = time.monotonic()
            if isinstance(err, StateDirError):
                return
            with suppress(NoDriverError):
                self._view.polls.poll()
                if not self._unconfirmed:  # else the driver may show the GPUs and not tell who uses them
                    self._gone_since = 0.0
                return

    def _wait(self, decision: Decision, look: Look) -> None:
        if not look.seen.outdated and time.monotonic() < self._options.deadline:
            if not self._unwinds:
                self._unwinds = True
                self._waits.enter_context(unwind_on_signals())  # its ticket is to be removed
            _import_all()
            self._waiting().report(look)
        self._view.polls.has_waited = True
        self._unconfirmed = False
        if decision.step == SLEEP or (decision.step == WATCH and self._pause >= _SHORT):
            self._view.polls.driver.rest()  # an open session is in the way of a reset, of MIG and of another driver
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
        """Sleep until a claim or a process on a GPU that nobody holds may have ended, or until ``until``. What is held
        elsewhere is seen by the next look."""
        now = time.monotonic()
        self._watching_since = self._watching_since or now
        claims, limit = self._host.claims.directory, look.seen.limit
        watched = look.seen.watched if limit is None else limit.claims
        there = {one.pid for gpu in self._view.usable if gpu.uuid in look.seen.free for one in gpu.processes or ()}
        strangers = [pid for pid in [*there][:_MOST_STRANGERS] if not procfs.has_ended(pid)]
        next_look = now
        while now < until:
            pause = _PAUSE if now - self._watching_since < 1.0 else 2 * _PAUSE
            time.sleep(min(until - now, pause))
            with DeferredSignals():
                ended = False
                if now >= next_look:  # which costs more than to ask a claim
                    ended, next_look = any(map(procfs.has_ended, strangers)), now + _FAST_POLLS
                if ended or not all(is_alive(claims, name) for name in watched):
                    self._calm_since = time.monotonic()  # the driver may show it a little later
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
