"""What this process waits for, and the two lines that say so if that takes long.

A thread that waits for another one logs the lines itself. While a thread does the slow work itself, such as making a
CUDA context, another thread logs them.
"""

from __future__ import annotations

import math
import time
from _thread import LockType, allocate_lock
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any

from .signals import DeferredSignals

FIRST = 2.0
"""Seconds of waiting after which the first line is due."""

LATE = 10.0
"""The same of the second one."""

_LONGEST = 4e6  # seconds; threading.TIMEOUT_MAX is at least this

Tell = Callable[[str], None]
"""Takes a line for the person who waits."""


class Awaited:
    """Something that is awaited since this object was made.

    Args:
        what: in words, such as ``the driver (nvml)``. It may be changed later.
        tell: takes the lines.
        cause: returns what the second line adds, as soon as more can be said.

    Attributes:
        began: ``time.monotonic()`` value.
        due: the same of the next line; ``math.inf`` after the second one.
    """

    def __init__(self, what: str, tell: Tell, cause: Callable[[], str] = lambda: "") -> None:
        self.what = what
        self.began = time.monotonic()
        self.due = self.began + FIRST
        self._tell = tell
        self._cause = cause
        self._since = time.strftime("%H:%M:%S")
        self._told_once = False

    def tell_if_due(self) -> None:
        """Log the line that is due, if one is."""
        if time.monotonic() < self.due:
            return
        if not self._told_once:
            self._told_once = True
            self.due = self.began + LATE
            self._tell(f"waiting for {self.what} since {self._since}")
            return
        self.due = math.inf
        line = f"still waiting for {self.what} since {self._since}"
        cause = self._cause()
        if cause:
            line += f": {cause}"
        self._tell(line)

    def pause(self, until: float = math.inf) -> float:
        """Return the seconds until the next line is due, or until this ``time.monotonic()`` value if that is sooner;
        ``math.inf`` if neither ever comes."""
        return max(0.0, min(self.due, until) - time.monotonic())

    def took(self, lock: LockType, until: float) -> bool:
        """Wait until a lock can be taken, and log the lines meanwhile.

        Args:
            until: ``time.monotonic()`` value at which the wait ends.

        Returns:
            Whether it was taken. A handler of a signal that raises ends the wait at once.
        """
        while True:
            if lock.acquire(timeout=min(self.pause(until), _LONGEST)):
                return True
            self.tell_if_due()
            if time.monotonic() >= until:
                return False


class Watchdog:
    """Logs the lines about what this thread awaits, from another thread, until the end of ``with``.

    That thread ends with it, before the program goes on, forks or becomes another one; a child that is forked meanwhile
    has none. It is one of ``threading``, since logging would remember any other one to the end of the process.
    """

    def __init__(self, awaited: Awaited) -> None:
        self._awaited = awaited
        self._over = allocate_lock()
        self._over.acquire()
        self._thread = Thread(target=self._watch, name="safe_gpu-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        try:
            # A handler that raises while a thread starts may leave a RuntimeError in place of its exception.
            with DeferredSignals(), suppress(RuntimeError):  # there can be no more threads: nothing is told
                self._thread.start()
        except BaseException:
            self._over.release()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.release()
        if self._thread.ident is not None:
            self._thread.join()  # in a forked child at once

    def _watch(self) -> None:
        while self._awaited.due < math.inf:
            if self._over.acquire(timeout=self._awaited.pause()):
                return
            self._awaited.tell_if_due()


def tell_by(logger: Any) -> Tell:
    """Return what gives lines to a logger: at INFO where that is shown, else as warnings, which Python shows
    where logging is not configured."""

    def tell(line: str) -> None:
        is_enabled = getattr(logger, "isEnabledFor", None)
        has_handlers = getattr(logger, "hasHandlers", None)  # the module logging, which may be a logger here, has none
        if is_enabled is not None and has_handlers is not None and is_enabled(20) and has_handlers():
            logger.info("%s", line)
        else:
            logger.warning("%s", line)

    return tell
