"""Reports of a wait: when they are due, and where they go. Only claims that wait load this module."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .nested import ancestor_may_hold

if TYPE_CHECKING:
    from .host_view import HostView
    from .line import QueuePlace
    from .look import Attempt
    from .terms import ClaimOptions
    from .why_not import WaitStatus


# Seconds between two reports. A sleeping waiter also looks again about this often.
_REPORT_INTERVAL = 60.0
# The same for the first waiters of the queue: one that stops while others sleep behind it wakes nobody.
_EARLY_INTERVAL = 10.0
_EARLY = 32
# Seconds of waiting after which a warning is given, and after which a change of the waiter ahead is reported.
_WARNING_DELAY = 1.0


class WaitReporter:
    """The reports of one wait, which begins when the object is made.

    Reports go to ``terms.on_wait``. If there is none they go to the logger: at INFO, and once, after a second, as a
    warning, which Python shows even if logging is not configured.

    Attributes:
        due: ``time.monotonic()`` value at which the next report is due; ``math.inf`` if none is.
        warning_due: the same for the warning.
    """

    def __init__(self, view: HostView, terms: ClaimOptions, line: QueuePlace) -> None:
        self._view = view
        self._line = line
        self._on_wait = terms.on_wait or _to_log(terms.logger, late=False)
        self._on_long_wait = None if terms.on_wait is not None else _to_log(terms.logger, late=True)
        self._last_ahead: int | None = None
        self.due = now = time.monotonic()
        self.warning_due = math.inf if self._on_long_wait is None else now + _WARNING_DELAY

    def next_look(self, now: float) -> float:
        """The latest time at which a sleeping waiter looks again, whether or not the ticket that it sleeps on is gone.

        Among the first 32 of the queue that is in 10 seconds, else when the next report is due or in about a minute.
        The intervals depend on the pid, so that hundreds of waiters that started together do not look at the same time.
        """
        spread = 0.75 + os.getpid() % 500 / 1000
        if self._line.among_first(_EARLY):
            return now + _EARLY_INTERVAL * spread
        if self._on_wait is None:
            return now + _REPORT_INTERVAL * spread
        return self.due if self.due > now else now + _REPORT_INTERVAL

    def tell(self, look: Attempt) -> None:
        """Give the reports that are due after this look.

        Raises:
            NotEnoughGpusError: an ancestor of this process holds the GPUs that it waits for.
            LockTimeout, StateDirError: it cannot be determined whether one does.
        """
        now = time.monotonic()
        if look.ahead is None and now >= self.warning_due:  # a waiter behind a ticket is warned while it sleeps
            self.warn(look)
        ahead = 0 if look.ahead is None else look.ahead.ticket.seq
        if self._on_wait is not None and ahead != self._last_ahead:
            self._last_ahead = ahead
            self.due = min(self.due, now + _WARNING_DELAY)
        if now < self.due:
            return
        self.due = now + _REPORT_INTERVAL if self._on_wait is not None else math.inf
        # The records show without a lock whether an ancestor may hold a GPU. Only then are the holders looked up.
        may_hold = ancestor_may_hold(self._view.usable, inner=bool(self._view.outer))
        if look.ahead is None and (may_hold or self._on_wait is not None):
            self._view.poll()
        if may_hold:
            from .why_not import refuse_if_ancestor_holds

            refuse_if_ancestor_holds(self._view)
        if self._on_wait is not None:
            self._on_wait(self._gather(look, self._line.position))

    def warn(self, look: Attempt) -> None:
        """Give the warning from this look alone. Hundreds may wait, so there is no new look and no poll for it."""
        if self._on_long_wait is not None:
            self._on_long_wait(self._gather(look, 0))  # 0: the position is not counted either
        self._on_long_wait = None
        self.warning_due = math.inf

    def _gather(self, look: Attempt, position: int) -> WaitStatus:
        from .forecast import forecast
        from .why_not import wait_status

        ticket = None if look.ahead is None else look.ahead.ticket
        news = wait_status(self._view, ticket, look.seen.unleased, position, look.seen.named, look.seen.spent)
        if news.spent is not None:
            return news  # when a claim of the same user ends, others do not matter
        if ticket is not None and not position:
            return news  # hundreds may wait, and to look it up reads the tickets of all
        return news._replace(expected=forecast(self._view, self._line))


def _to_log(logger: Any, *, late: bool) -> Callable[[WaitStatus], None] | None:
    """A function that logs a report, with the facts as attributes of the log record: at INFO, or if ``late`` a warning.

    None if the logger is not enabled for that level.
    """
    is_enabled = getattr(logger, "isEnabledFor", None)  # the older package accepts the module logging, which has none
    if is_enabled is not None and not is_enabled(30 if late else 20):
        return None

    def tell(news: WaitStatus) -> None:
        from .why_not import waiting_message

        facts = {f"safe_gpu_{name}": value for name, value in news._asdict().items()}
        (logger.warning if late else logger.info)("%s", waiting_message(news), extra=facts)

    return tell
