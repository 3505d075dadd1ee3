"""Signals on the way of a claim: held back while a lock is held, unwound from while waiting, undone before exec(2).

``_signal`` is what the module ``signal`` wraps in enumerations, which take longer than a claim.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found,unused-ignore]
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["HeldBack", "tidy_on_signals", "unignore"]


class HeldBack:
    """Holds back the Python handlers of signals for the microseconds in which host.lock is held.

    A KeyboardInterrupt may come between any two lines. Here that would keep the whole host locked, or a lease held, for
    as long as the process lives on, as a notebook does.
    """

    # Those whose handlers programs let raise.
    _NUMBERS = (
        _signal.SIGHUP,
        _signal.SIGINT,
        _signal.SIGUSR1,
        _signal.SIGUSR2,
        _signal.SIGALRM,
        _signal.SIGTERM,
    )

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, object], object]] = {}
        self._caught: list[tuple[int, object]] = []

    def hold_back(self) -> None:
        """Let handlers wait for :meth:`let_go`."""
        for number in self._NUMBERS:
            handler = _signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                try:
                    _signal.signal(number, self._catch)
                except ValueError:  # not the main thread, and only there do handlers run
                    self._handlers.clear()
                    return

    def let_go(self) -> None:
        """Put the handlers back, and run those whose signal came; safe to call twice."""
        if not self._handlers:
            return
        handlers = dict(self._handlers)
        try:
            for number, handler in handlers.items():
                _signal.signal(number, handler)
        finally:
            for number, handler in handlers.items():  # the first to be put back may have run at once
                _signal.signal(number, handler)
            self._handlers.clear()
            caught, self._caught = self._caught, []
        for number, frame in caught:
            handlers[number](number, frame)

    def _catch(self, number: int, frame: object) -> None:
        self._caught.append((number, frame))


@contextmanager
def tidy_on_signals() -> Iterator[None]:
    """While inside, SIGTERM and SIGHUP unwind the stack first, where they would have killed the process at once.

    Only in the main thread and only for signals at their default action; afterwards the process dies of the signal as
    it would have.
    """
    import threading

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []

    def unwind(number: int, frame: object) -> None:
        caught.append(number)
        raise SystemExit(128 + number)

    mine = [number for number in (_signal.SIGTERM, _signal.SIGHUP) if _signal.getsignal(number) == _signal.SIG_DFL]
    for number in mine:
        _signal.signal(number, unwind)
    try:
        yield
    finally:
        for number in mine:
            _signal.signal(number, _signal.SIG_DFL)
        if caught:
            os.kill(os.getpid(), caught[0])


def unignore() -> None:
    """SIGPIPE and SIGXFSZ at their default action: Python ignores them, and exec(2) would hand that on."""
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
        _signal.signal(number, _signal.SIG_DFL)
