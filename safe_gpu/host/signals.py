"""Signals on the way of a claim: held back while a lock is held, unwound from while waiting, undone before exec(2).

This module calls ``_signal``, which the module ``signal`` wraps: its functions catch ValueError and TypeError, so such
an exception of a handler that runs meanwhile would be lost.
"""

import _signal as c_signals  # type: ignore[import-not-found,unused-ignore]
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class DeferredSignals:
    """Holds back the Python handlers of signals for microseconds: in ``with``, or between its two methods.

    A KeyboardInterrupt may come between any two lines, also between open(2) and the line that stores the descriptor.
    Here that would keep the whole host locked, or a GPU held, for as long as the process lives on, as a notebook
    does. What was taken meanwhile must be stored before the end of ``with``, where the handlers run.
    """

    # Those whose handlers programs let raise.
    _NUMBERS = (
        c_signals.SIGHUP,
        c_signals.SIGINT,
        c_signals.SIGUSR1,
        c_signals.SIGUSR2,
        c_signals.SIGALRM,
        c_signals.SIGTERM,
    )
    _NONE = (c_signals.SIG_DFL, c_signals.SIG_IGN, None)  # None: it is not Python's

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, object], object]] = {}
        self._caught: list[tuple[int, object]] = []

    def __enter__(self) -> "DeferredSignals":
        self.defer()
        return self

    def __exit__(self, *exc: object) -> None:
        self.deliver()

    def defer(self) -> None:
        """Let handlers wait for :meth:`deliver`; safe to call twice, and where another object holds them back already.
        If a handler raises here, none is held back."""
        if self._handlers:
            return
        try:
            for number in self._NUMBERS:
                handler = c_signals.getsignal(number)
                if handler not in self._NONE and getattr(handler, "__func__", None) is not DeferredSignals._catch:
                    self._handlers[number] = handler
                    c_signals.signal(number, self._catch)
        except ValueError:  # not the main thread, and only there do handlers run
            self._handlers.clear()
        except BaseException:  # one that is not held back yet has raised
            self.deliver()
            raise

    def deliver(self) -> None:
        """Put the handlers back, and run those whose signal came; safe to call twice."""
        handlers = self._handlers
        self._handlers = {}  # now, or a second call would put them back once more
        try:
            _set(handlers)
        except BaseException:  # the first to be put back may have run at once, and raised
            _set(handlers)
            raise
        finally:
            caught = self._caught
            self._caught = []
        for number, frame in caught:
            handlers[number](number, frame)

    def run_deferred(self, give_back: Callable[[], None]) -> None:
        """Run all of a function that gives something back, also where a handler raises before they are held back."""
        try:
            self.defer()
        finally:
            try:
                give_back()
            finally:
                self.deliver()

    def delivering(self) -> "_Delivering":
        """Return what lets handlers run in its ``with``, for what may take long."""
        return _Delivering(self)

    def _catch(self, number: int, frame: object) -> None:
        self._caught.append((number, frame))


class _Delivering:
    """Lets handlers run in ``with``, where others are held back.

    It is no generator. If a handler raises between the ``yield`` of one and the block, that generator ends when the
    exception is forgotten: then it would hold handlers back again, for good, and Ctrl-C would do nothing any more.
    """

    def __init__(self, signals: DeferredSignals) -> None:
        self._signals = signals

    def __enter__(self) -> None:
        try:
            self._signals.deliver()
        except BaseException:
            self._signals.defer()
            raise

    def __exit__(self, *exc: object) -> None:
        self._signals.defer()


@contextmanager
def unwind_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack first, where they would kill the process at once.

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

    mine = [
        number for number in (c_signals.SIGTERM, c_signals.SIGHUP) if c_signals.getsignal(number) == c_signals.SIG_DFL
    ]
    default = dict.fromkeys(mine, c_signals.SIG_DFL)
    try:
        _set(dict.fromkeys(mine, unwind))
        yield
    finally:
        try:
            _set(default)
        except BaseException:  # another handler has raised
            _set(default)
            raise
        if caught:
            os.kill(os.getpid(), caught[0])


def _set(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        c_signals.signal(number, handler)
