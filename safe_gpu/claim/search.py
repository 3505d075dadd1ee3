"""The loop that gets GPUs for a request: try, decide, wait, try again.

host.lock is never held during a slow operation. The driver is polled before host.lock is taken, and polled again once
the GPUs are held, because a process may have started on a GPU in between.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from ..coordination.directory import state_dir_path
from ..coordination.entry import Entry, is_alive
from ..coordination.host_lock import Host
from ..errors import LockTimeout, NoDriverError, StateDirError
from ..gpus.devices import Gpu, Holder
from ..host.foreign_files import printable_lines
from ..host.signals import DeferredSignals, unwind_on_signals
from ..selection.choice import capacity, check_possible, fits
from ..wording.text import format_age
from .arguments import ClaimOptions, with_policy_limits
from .attempt import OUTDATED, TAKEN, WITHDRAWN, Attempt, Seen
from .checks import confirm
from .claim import Claim
from .enclosing import refuse_inside_share
from .listed import ListedProcess, listed_here
from .queue_place import QueuePlace
from .view import HostView

if TYPE_CHECKING:
    from .report import WaitReporter

# Pauses of the head of the queue between two questions whether claims live, in seconds: this part of the time for which
# it has asked, within these bounds. A claim that has waited for long loses little by a little more.
_PART_OF_THE_WAIT = 1 / 500
_SHORTEST_WATCH = 0.010
_LONGEST_WATCH = 0.100

SHORTEST_POLL_PAUSE = 0.25
LONGEST_POLL_PAUSE = 9.5
"""Pauses of the head between two polls of the driver, in seconds: twice the time since something has happened that may
free a GPU, within these bounds. So in a minute in which nothing happens there are ten at most."""

# Between polls that are nearer than this, in seconds, the session with the driver stays open.
_SHORT = 1.0

# Pauses of a claim that withdrew, in seconds. They are random, or two claims go in step.
_SHORTEST_RETREAT = 0.0005
_LONGEST_RETREAT = 0.010

# A sleeper that tries again polls the driver first if its latest poll is older than this, in seconds.
_OLD = 30.0

LONGEST_TROUBLE = 60.0
"""Seconds for which a claim that has waited tolerates trouble that passes by itself."""

# It tries again after a tenth of the time that the trouble has lasted, and after at least this many seconds.
_TROUBLE_PAUSE = 0.25

# A claim waits at most this many times MINIMUM_PATIENCE for a host.lock that nobody keeps.
_MOST_OVERLOADS = 6

POLL = "poll"
"""Poll the driver, then try again."""

SLEEP = "sleep"
"""Sleep until the ticket ahead is gone, then try again."""

WATCH = "watch"
"""Watch the claims of others, then try again."""

AGAIN = "again"
"""Pause for a random time, then try again: two claims have seen each other."""

REFUSE = "refuse"
"""Fail, because the time to wait is over."""

# The head of the queue tries again at least this often, in seconds, because the state directory may have been deleted.
_LONGEST_WITHOUT_ATTEMPT = 1.0

# A dying process closes its descriptors one by one, so a door may outlive an entry: it is tried once more, in seconds.
_SECOND_TRY = 0.005

# For so long even a claim that does not wait tries again after it withdrew, in seconds.
_WITHDRAWING = 1.0


class WaitState(NamedTuple):
    """The state of a claim's wait.

    Attributes:
        deadline: ``time.monotonic()`` value; ``math.inf`` waits without limit.
        tried_last: whether the last attempt, after the deadline, has been made.
        polled_for: the GPUs that nobody held at the time of the latest poll.
        elsewhere: the GPUs held elsewhere for which a second attempt was made.
        withdrew: when the present run of withdrawals began; None if the latest attempt was no withdrawal.
    """

    deadline: float = math.inf
    tried_last: bool = False
    polled_for: frozenset[str] | None = None
    elsewhere: frozenset[str] = frozenset()
    withdrew: float | None = None


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
    next_attempt: float = math.inf,
    pause: float = 0.0,
) -> Decision:
    """Return the next step of a claim that has seen too few GPUs.

    Args:
        suffices: whether the GPUs that nobody holds would be enough.
        now: ``time.monotonic()`` value, as are the next two.
        next_poll: earliest time of another poll for the same GPUs.
        next_attempt: latest time at which a sleeping waiter tries again.
        pause: seconds until a claim that withdrew tries again.
    """
    if seen.outcome == OUTDATED:
        return Decision(POLL, state)
    if seen.outcome != WITHDRAWN:
        state = state._replace(withdrew=None)
    elif state.withdrew is None:
        state = state._replace(withdrew=now)
    if state.withdrew is not None and now < max(state.deadline, state.withdrew + _WITHDRAWING):
        return Decision(AGAIN, state, now + pause)
    if not seen.elsewhere <= state.elsewhere:
        return Decision(WATCH, state._replace(elsewhere=state.elsewhere | seen.elsewhere), now + _SECOND_TRY)
    if now >= state.deadline:
        if state.tried_last:
            return Decision(REFUSE, state)
        return Decision(POLL, state._replace(tried_last=True))
    if seen.ahead is not None:
        return Decision(SLEEP, state, min(state.deadline, next_attempt))
    until = min(state.deadline, now + _LONGEST_WITHOUT_ATTEMPT)
    if seen.limit is not None:
        return Decision(WATCH, state, until)
    # Where nobody holds enough of them, the driver shows processes there.
    if (suffices and seen.free != state.polled_for) or now >= next_poll:
        return Decision(POLL, state._replace(polled_for=seen.free))
    return Decision(WATCH, state, min(until, next_poll))


def pause_between_polls(calm: float) -> float:
    """Return the seconds between two polls of the driver by the head of the queue.

    Args:
        calm: seconds from when something has happened that may free a GPU until the first of them.
    """
    return min(max(2 * calm, SHORTEST_POLL_PAUSE), LONGEST_POLL_PAUSE)


def pause_of_watch(watched: float) -> float:
    """Return the seconds after which the head of the queue asks again whether claims live, when it has done so for
    ``watched`` seconds."""
    return min(max(watched * _PART_OF_THE_WAIT, _SHORTEST_WATCH), _LONGEST_WATCH)


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
    search = _Search(view, options)
    search.check()
    try:
        return search.run(claim)
    except BaseException:
        search.leave()  # again, because an interrupt may have ended the first call
        raise


_ROOMS = "affinity claim coordination gpus host runtimes schedulers selection settings topology".split()

# A claim that uses the GPUs of their vendor has imported them with its driver.
_OF_VENDORS = frozenset({"cuda", "hip", "kfd_topology"})

_FOR_COMMANDS = frozenset({"gpu_affinity", "plan_text", "setup"})


@cache
def import_all() -> None:
    """Import what the wait, the claim after it and their refusals may need: an upgrade may replace the files."""
    import pkgutil
    from importlib import import_module

    package = __name__.partition(".")[0]
    for name in _ROOMS:
        module = import_module(f"{package}.{name}")
        for one in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{module.__name__}."):
            if one.name.rpartition(".")[2] not in _OF_VENDORS | _FOR_COMMANDS:
                import_module(one.name)


class _Trouble:
    """What keeps a waiter from going on and passes by itself.

    Attributes:
        since: ``time.monotonic()`` value.
        tries: how often the waiter has tried to go on since.
    """

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.tries = 0

    def lasting(self, err: NoDriverError | StateDirError, seconds: float) -> NoDriverError | StateDirError:
        """Return the error of a waiter that gives up, with what it has tried."""
        text = f"{err} (it was tried {self.tries + 1} times in {format_age(seconds)})"
        if isinstance(err, NoDriverError):
            return NoDriverError(text, driver=err.driver)
        return StateDirError(text, path=err.path, errno=err.errno)


def _passes(err: NoDriverError | StateDirError) -> bool:
    """Return whether what failed may work a little later: a driver is being loaded or reset, a disk is full, or the
    state directory is away. Directories that are closed and names that are too many stay so."""
    if isinstance(err, NoDriverError) or err.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    try:
        os.stat(state_dir_path())
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


class _Search:
    """One search for GPUs, from the first attempt to the claim."""

    def __init__(self, view: HostView, options: ClaimOptions) -> None:
        options = with_policy_limits(options)
        self._view = view
        self._options = options
        self._host = Host()
        self._place = QueuePlace(self._host, view, options)
        self._state = WaitState(options.deadline, tried_last=options.timeout == 0)
        self._reporter: WaitReporter | None = None
        self._watching_since: float | None = None  # time.monotonic() value, as is the next
        self._calm_since = time.monotonic()  # nothing has happened since then that may free a GPU
        self._free: frozenset[str] = frozenset()  # by the latest attempt
        self._listed: list[ListedProcess] = []  # by the latest poll and the latest attempt
        self._poll_pause = 0.0
        self._is_poll_due = False
        self._attempts = 0
        self._overloads = 0
        self._has_waited = False
        self._trouble: _Trouble | None = None
        self._waits = ExitStack()  # ends with the search

    def check(self) -> None:
        """Refuse what can never be met, before anything is waited for."""
        if "SAFE_GPU_SHARE" in os.environ:  # of a claim that encloses this process, or leaked
            refuse_inside_share(self._view.snapshot.gpus, self._holders())
        self._check_possible()
        if not self._view.scope:
            self._apply_policy()

    def run(self, claim: Claim | None) -> tuple[Gpu, ...]:
        """Try, decide and wait until there are enough GPUs, and a second poll confirms that they are free.

        With ``claim`` None nothing is taken.
        """
        self._options.logger.info("acquiring lock")
        with self._waits:
            try:
                while True:
                    gpus = self._take_or_wait(claim)
                    if gpus:
                        return gpus
            finally:
                self.leave()

    def _take_or_wait(self, claim: Claim | None) -> tuple[Gpu, ...]:
        """Return the GPUs; none if there were too few, or there was trouble that may pass: that was waited for."""
        try:
            seen = self._try_once(claim)
            if seen.outcome == TAKEN:
                gpus = self._confirmed(claim, seen)
            else:
                gpus = ()
                self._wait_or_refuse(seen)
        except LockTimeout as err:
            self._retry_after_overload(err)
            return ()
        except (NoDriverError, StateDirError) as err:
            self._retry_after_trouble(err)
            return ()
        if seen.outcome != OUTDATED:  # then the driver has shown the GPUs, and not yet who uses them
            self._trouble = None
        return gpus

    def leave(self) -> None:
        """Leave the queue, and close the directories; safe to call twice."""
        if self._place.waiter is not None or self._host.directory is not None:
            DeferredSignals().run_deferred(self._leave_now)

    def _leave_now(self) -> None:
        self._place.leave()
        self._host.close()

    # One attempt

    def _try_once(self, claim: Claim | None) -> Seen:
        if self._is_poll_due:
            self._poll()
        self._leave_out_the_gone()
        scope = self._view.scope
        attempt = Attempt(self._host, self._view, self._place, claim, self._options)
        seen = attempt.run(may_wait=time.monotonic() < self._options.deadline)
        # The attempt has found that no living claim has this scope: then the visible limit and the policy decide.
        if scope != self._view.scope:
            self._check_possible()
            self._apply_policy()
        # The lines of safe_gpu 1.x. They come after the release: a logger may be slow, and others wait for host.lock.
        if seen.outcome == TAKEN or self._attempts == 0:
            self._options.logger.info("lock acquired")
            self._options.logger.info("lock released")
        self._attempts += 1
        return seen

    def _leave_out_the_gone(self) -> None:
        """Count what has gone since the latest poll as gone, so that GPUs that are freed together need not be polled by
        one waiter after the other."""
        if self._host.directory is None:
            return
        gone: dict[str, set[int]] = {}
        still_here = []
        with DeferredSignals():
            for listed in self._listed:
                if listed.has_gone(self._host.claims.directory):
                    gone.setdefault(listed.uuid, set()).add(listed.pid)
                else:
                    still_here.append(listed)
        self._view.polls.leave_out(gone)
        self._listed = still_here

    def _poll(self) -> None:
        """Poll the driver for the whole host. What it lists now is there, whatever has ended."""
        self._view.polls.poll()
        self._listed = []
        self._is_poll_due = False

    def _check_possible(self) -> None:
        """Refuse what this host can never give. What an enclosing claim can give is checked under host.lock."""
        view = self._view
        if not view.request.conditions and capacity(view.usable) >= view.request.nb_gpus:  # as almost always
            return
        visible_limit = view.visible_limit
        if view.scope:
            visible_limit = None
        check_possible(view.snapshot, view.request, visible_limit, claimed=self._holders, rules=view.closed.rules)

    def _holders(self) -> Mapping[str, Holder]:
        from .report import holders_now

        with suppress(StateDirError):
            return holders_now(self._view.snapshot, self._view.others.inside)
        return {}

    def _apply_policy(self) -> None:
        """Refuse what the policy never allows, and let it end the wait earlier. Not for a claim inside another one."""
        if self._options.quota is None:
            return
        from .limits import check_policy_limits

        options = self._options
        limits = self._options.quota.limits
        number = self._view.request.amount(self._view.snapshot.gpus)
        check_policy_limits(number, limits, options.hold.seconds, stated=options.hold.stated)
        most = limits.max_wait
        if most is not None and (options.timeout is None or options.timeout > most):
            self._options = options._replace(timeout=most, wait_limit=limits.path)
        self._state = WaitState(self._options.deadline, tried_last=self._options.timeout == 0)

    # The second poll

    def _confirmed(self, claim: Claim | None, seen: Seen) -> tuple[Gpu, ...]:
        """Return the GPUs that an attempt has found, if a second poll shows them free; else none."""
        if claim is None:
            if self._are_still_free(seen.gpus):
                return seen.gpus
        elif self._is_confirmed(claim, seen):
            return claim.gpus
        return ()

    def _are_still_free(self, gpus: tuple[Gpu, ...]) -> bool:
        self._view.polls.poll_again(gpus)
        unoccupied = self._view.unoccupied()
        return all(gpu.uuid in unoccupied for gpu in gpus)

    def _is_confirmed(self, claim: Claim, seen: Seen) -> bool:
        """Return whether a second poll shows the GPUs of a claim free; it is given back if not.

        The ticket goes first: those behind try while the driver is asked.
        """
        DeferredSignals().run_deferred(self._place.stand_aside)
        try:
            is_free = confirm(self._view, claim, self._options, seen.spare)
        except (NoDriverError, StateDirError):
            self._give_back(claim)
            raise
        if not is_free:
            self._give_back(claim)
            self._is_poll_due = True  # before others are chosen
        return is_free

    def _give_back(self, claim: Claim) -> None:
        """Give a claim back that cannot stay, after its ticket was made again: nobody finds that neither is there."""
        if self._place.stands_aside:
            with suppress(LockTimeout, StateDirError):  # then the next attempt makes it
                self._come_back()
        claim.release()

    def _come_back(self) -> None:
        """Make the ticket again that this claim had, at its place."""
        host = self._host
        quota = self._options.quota
        with DeferredSignals() as signals:
            host.prepare()
            with host.locked(self._options.lock_deadline, signals):
                host.queue.refresh()
                by_user = None
                if quota is not None and self._view.enclosing is None:
                    by_user = quota.held(self._view.snapshot, self._view.others.claims)
                self._place.join(by_user, None)

    # Trouble

    def _retry_after_overload(self, err: LockTimeout) -> None:
        """Try again if host.lock was not free in time since the host is overloaded; else raise."""
        self._overloads += 1
        if not err.overloaded or self._overloads == _MOST_OVERLOADS:
            raise err

    def _retry_after_trouble(self, err: NoDriverError | StateDirError) -> None:
        """Pause before another try if this passes by itself and has lasted for less than a minute; else raise.

        Only a claim that has waited is patient: a person who has just begun learns at once what is wrong.
        """
        now = time.monotonic()
        if not self._has_waited or not _passes(err):
            raise err
        if self._trouble is None:
            if now >= self._options.deadline:
                raise err
            self._trouble = _Trouble()
            text = printable_lines(str(err))
            self._options.logger.warning("%s; waiting %s for it", text, format_age(LONGEST_TROUBLE))
        lasted = now - self._trouble.since
        if lasted >= LONGEST_TROUBLE or now >= self._options.deadline:
            raise self._trouble.lasting(err, lasted) from err
        self._trouble.tries += 1
        if isinstance(err, NoDriverError):
            self._is_poll_due = True
        pause = max(_TROUBLE_PAUSE, lasted / 10)
        time.sleep(min(pause, self._options.deadline - now))

    # Waiting

    def _wait_or_refuse(self, seen: Seen) -> None:
        decision = self._decide(seen)
        if decision.step == REFUSE:
            from .report import refusal

            raise refusal(self._view, seen, self._options, self._place.position)
        if decision.step == AGAIN:
            time.sleep(max(0.0, decision.until - time.monotonic()))
        else:
            self._wait(decision, seen)

    def _decide(self, seen: Seen) -> Decision:
        """Return the next step by :func:`decide`, and keep the state that this leaves."""
        now = time.monotonic()
        next_attempt = now
        quota = self._options.quota
        if quota is None or not quota.unresolved:
            next_attempt = self._ensure_reporter().next_attempt(now)
        free = [gpu for gpu in self._view.usable if gpu.uuid in seen.free]
        if seen.free != self._free:
            self._free = seen.free
            self._calm_since = now
        pause = 0.0
        if seen.outcome == WITHDRAWN:
            pause = _random_between(_SHORTEST_RETREAT, _LONGEST_RETREAT)
        polled_at = now - self._view.polls.age
        self._poll_pause = pause_between_polls(polled_at - self._calm_since)
        decision = decide(
            seen,
            self._state,
            suffices=fits(self._view.request, free),
            now=now,
            next_poll=self._view.polls.next_poll(self._poll_pause, LONGEST_POLL_PAUSE),
            next_attempt=next_attempt,
            pause=pause,
        )
        self._state = decision.state
        return decision

    def _wait(self, decision: Decision, seen: Seen) -> None:
        reporter = self._ensure_reporter()
        if seen.outcome != OUTDATED and time.monotonic() < self._options.deadline:
            if not self._has_waited:
                self._has_waited = True
                self._waits.enter_context(unwind_on_signals())  # its ticket is to be removed
            import_all()
            reporter.report(seen)
        self._view.polls.waited_since = True
        if decision.step == POLL:
            self._poll()
            return
        self._listed = listed_here(self._view.usable, self._view.others)
        if decision.step == SLEEP or self._poll_pause >= _SHORT:
            self._view.polls.driver.rest()  # an open session is in the way of a reset, of MIG and of another driver
        if seen.ahead is not None:
            is_gone = self._sleep_behind(seen.ahead, seen, min(decision.until, reporter.due))
            if not is_gone and self._view.polls.age > _OLD:
                self._poll()  # a process that holds no claim may have started or exited
        else:
            self._watch(seen, min(decision.until, reporter.warning_due))

    def _ensure_reporter(self) -> WaitReporter:
        if self._reporter is None:
            from .report import WaitReporter

            self._reporter = WaitReporter(self._view, self._options, self._place)
        return self._reporter

    def _sleep_behind(self, ahead: Entry, seen: Seen, until: float) -> bool:
        """Sleep until the ticket ahead is gone or ``until``; give a warning that becomes due meanwhile.

        Returns:
            Whether the ticket ahead is gone.
        """
        waiter = self._place.ensure_waiter()
        reporter = self._ensure_reporter()
        if reporter.warning_due < until:
            if waiter.sleep_behind(ahead, max(0.0, reporter.warning_due - time.monotonic())):
                return True
            reporter.warn_once(seen)
        return waiter.sleep_behind(ahead, max(0.0, until - time.monotonic()))

    def _watch(self, seen: Seen, until: float) -> None:
        """Sleep until a claim may have ended, or until ``until``. What else may have happened is seen by the next
        attempt: what is held elsewhere, and processes that have ended."""
        watched = seen.watched
        if seen.limit is not None:
            watched = seen.limit.claims
        claims = self._host.claims.directory
        now = time.monotonic()
        if self._watching_since is None:
            self._watching_since = now
        while now < until:
            time.sleep(min(until - now, pause_of_watch(now - self._watching_since)))
            with DeferredSignals():
                is_calm = all(is_alive(claims, name) for name in watched)
            now = time.monotonic()
            if not is_calm:
                self._calm_since = now  # what the driver shows of it may go a little later
                return


def _random_between(least: float, most: float) -> float:
    import random

    return random.Random().uniform(least, most)  # the program's own sequence of random numbers stays as it is
