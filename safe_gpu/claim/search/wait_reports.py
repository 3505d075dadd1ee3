"""Reports of a wait: when they are due, and where they go."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...host import procfs

if TYPE_CHECKING:
    from ..arguments import ClaimOptions
    from ..report import WaitStatus
    from ..view import HostView
    from .look import Look
    from .queue_place import QueuePlace

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

    def report(self, look: Look) -> None:
        """Give the reports that are due after this look.

        Raises:
            NotEnoughGpusError: an ancestor of this process holds the GPUs that it waits for.
            StateDirError: the claims cannot be read.
        """
        now = time.monotonic()
        if look.ahead is None and now >= self.warning_due:  # a waiter behind a ticket is warned while it sleeps
            self.warn_once(look)
        if self._on_wait is not None and (found := self._found(look)) != self._last:
            self._last = found
            self.due = min(self.due, now + max(_WARNING_DELAY, (now - self._began) / 60))  # a long wait fills no log
        if now < self.due:
            return
        self.due = now + _REPORT_INTERVAL if self._on_wait is not None else math.inf
        family = {os.getpid(), *procfs.ancestors(os.getpid())}
        may_hold = any(one.pid in family for holder in self._view.held.values() for one in holder.each)
        if look.ahead is None and (may_hold or self._on_wait is not None):
            self._view.polls.poll()
        if may_hold:
            from ..report import refuse_if_ancestor_holds

            refuse_if_ancestor_holds(self._view)
        if self._on_wait is not None:
            self._on_wait(self._gather(look, self._place.position))

    def _found(self, look: Look) -> tuple[object, ...]:
        """Return what a look has found; another report is due when it changes. Only few waiters count their
        position."""
        position = self._place.position if self._place.among_first(_EARLY) else 0
        return position, look.ahead and look.ahead.name, look.seen.free, look.seen.limit

    def warn_once(self, look: Look) -> None:
        """Give the warning from this look alone. Hundreds may wait, so there is no new look and no poll for it."""
        if self._on_long_wait is not None:
            self._on_long_wait(self._gather(look, 0))  # 0: the position is not counted either
        self._on_long_wait = None
        self.warning_due = math.inf

    def _gather(self, look: Look, position: int) -> WaitStatus:
        from ..report import forecast, wait_status

        ticket = look.ahead
        status = wait_status(self._view, ticket, position, look.seen.elsewhere, look.seen.limit)
        if status.spent is not None:
            return status  # when a claim of the same user ends, others do not matter
        if ticket is not None and not position:
            return status  # hundreds may wait, and to look it up reads the tickets of all
        waiter, hold_for = self._place.ensure_waiter(), self._place.hold_for()
        return status._replace(expected=forecast(self._view, waiter, hold_for, by_turns=self._place.by_turns))


def _to_log(logger: Any, *, late: bool) -> Callable[[WaitStatus], None] | None:
    """Return a function that logs a report, with the facts as attributes of the log record: at INFO, or if ``late`` a
    warning.

    None if the logger is not enabled for that level.
    """
    is_enabled = getattr(logger, "isEnabledFor", None)  # the older package accepts the module logging, which has none
    if is_enabled is not None and not is_enabled(30 if late else 20):
        return None

    def tell(status: WaitStatus) -> None:
        from ..report import waiting_message

        facts = {f"safe_gpu_{name}": value for name, value in status._asdict().items()}
        (logger.warning if late else logger.info)("%s", waiting_message(status, width=_LONGEST_LINE), extra=facts)

    return tell
