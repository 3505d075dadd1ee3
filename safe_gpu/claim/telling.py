"""Says what a claim is doing where that takes long: a driver that takes its time, or hangs, does not say so."""

from __future__ import annotations

import math
import os
import time
from _thread import LockType, allocate_lock, start_new_thread
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_FIRST, _LATE = 2.0, 10.0  # seconds after which it is told

_TO_TELL = 0.2  # seconds

_EX_TRY_AGAIN = 75

ASKING = "asking the driver"

HANGS = "if it hangs, dmesg tells more, and nvidia-smi hangs too"


class _Awaited:
    """What is awaited, since when (``time.monotonic()``), and how often that was told."""

    def __init__(self, what: str, hint: str) -> None:
        self.what = what
        self.hint = hint
        self.began = time.monotonic()
        self.told = 0


class Watchdog:
    """A thread beside a claim, which says what the claim awaits if that takes long. It runs while something is awaited,
    a little longer, so that a claim needs one, and not after :meth:`close`.

    Args:
        logger: takes warnings.
        deadline: of a process that does nothing but claim, which is ended then: no call of a driver can be interrupted.
    """

    def __init__(self, logger: Any, deadline: float = math.inf) -> None:
        self._logger = logger
        self._deadline = deadline
        self._awaited: _Awaited | None = None
        self._mutex = allocate_lock()
        self._thread: tuple[LockType, LockType] | None = None  # that ends it, that it gives back

    @contextmanager
    def telling(self, what: str, hint: str = "") -> Iterator[None]:
        """Tell, if the block takes long, that it is still ``what``: ``asking the driver (nvml)``."""
        before, self._awaited = self._awaited, _Awaited(what, hint)
        try:
            self._start()
            yield
        finally:
            self._awaited = before

    def close(self) -> None:
        """End the thread, before the program forks; safe to call twice."""
        with self._mutex:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread[0].release()
            with thread[1]:
                pass

    def _start(self) -> None:
        # An exception of a handler in here leaves at most a thread that ends by itself.
        with suppress(RuntimeError), self._mutex:  # no more threads
            if self._thread is None:
                thread = _locked(), _locked()
                start_new_thread(self._watch, thread)
                self._thread = thread

    def _watch(self, bell: LockType, ended: LockType) -> None:
        try:
            while not bell.acquire(timeout=self._pause()):
                with self._mutex:
                    awaited = self._awaited
                    if awaited is None:  # for some time
                        if self._thread == (bell, ended):
                            self._thread = None
                        return
                if time.monotonic() >= self._next(awaited):
                    self._tell(awaited)
        finally:
            ended.release()

    def _pause(self) -> float:
        awaited = self._awaited
        left = math.inf if awaited is None else self._next(awaited) - time.monotonic()
        return max(0.0, min(left, _FIRST))

    def _next(self, awaited: _Awaited) -> float:
        """Return the ``time.monotonic()`` value at which something is to be told of what is awaited."""
        if awaited.told == 0:
            return awaited.began + _FIRST
        if awaited.told == 1:
            return awaited.began + _LATE
        return max(self._deadline, awaited.began + _LATE)

    def _tell(self, awaited: _Awaited) -> None:
        awaited.told += 1
        seconds = time.monotonic() - awaited.began
        since = f"since {time.strftime('%X', time.localtime(time.time() - seconds))}"
        if awaited.told == 1:
            self._warn("still %s, for %.0f s", awaited.what, seconds)
        elif awaited.told == 2:
            hint = awaited.hint and f"; {awaited.hint}"
            self._warn("still %s, %s (%.0f s)%s", awaited.what, since, seconds, hint)
        else:
            self._warn("still %s, %s: the time to wait is over", awaited.what, since)
            time.sleep(_TO_TELL)
            if self._awaited is awaited:
                os._exit(_EX_TRY_AGAIN)

    def _warn(self, *words: object) -> None:
        from threading import Thread  # logging would make a lasting one of any other thread

        Thread(target=lambda: self._logger.warning(*words), daemon=True).start()


def _locked() -> LockType:
    lock = allocate_lock()
    lock.acquire()
    return lock
