"""Asks a driver in a thread of its own, so that the caller can report the wait, be interrupted, and give up in time.

A call of a driver that hangs does not return, and nothing in this process can end it. Without a thread it would hold up
the deadline of a claim and the handlers of signals, Ctrl-C too.
"""

from __future__ import annotations

import math
import os
import time
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, TypeVar

from ..errors import ClaimTimeout, package_logger
from ..gpus.devices import Gpu, HostSnapshot
from ..gpus.vendors import FIRST, VENDORS
from ..host.awaiting import Awaited, Tell, tell_by
from ..settings.variables import is_simulated
from ..topology.host import HostTopology
from ..wording.text import in_brackets
from .base import Driver

# Seconds that a question to a driver has, whatever the deadline. Without persistence mode the first one can take over
# 20 s on eight GPUs.
AT_LEAST = 30.0

# Seconds that the end of a session is waited for. A question that hangs keeps the session.
TO_CLOSE = 2.0

_Answer = TypeVar("_Answer")


class _Question(Generic[_Answer]):
    """A question that a thread of its own asks.

    Args:
        ask: returns the answer.
        discard: is given an answer that comes too late.

    Attributes:
        answered: a lock that can be taken once there is an answer, or an error.
    """

    def __init__(self, ask: Callable[[], _Answer], discard: Callable[[_Answer], None] = lambda answer: None) -> None:
        self.answered = allocate_lock()
        self.answered.acquire()
        self._ask = ask
        self._discard = discard
        self._answer: list[_Answer] = []
        self._error: BaseException | None = None
        self._is_abandoned = False

    def start(self) -> bool:
        """Return whether there could be another thread, which asks now. It is no ``threading.Thread``, since a handler
        that raises while one starts may leave a RuntimeError in place of its exception."""
        try:
            start_new_thread(self._run, ())
        except RuntimeError:
            return False
        return True

    def _run(self) -> None:
        try:
            self._answer.append(self._ask())
        except BaseException as err:
            self._error = err
        self.answered.release()
        if self._is_abandoned:
            self._discard_answer()

    def result(self) -> _Answer:
        """Return the answer, or raise the error that came in its place."""
        if self._error is not None:
            raise self._error
        return self._answer.pop()

    def abandon(self) -> None:
        """Wait for no answer any more."""
        self._is_abandoned = True
        if self.answered.acquire(blocking=False):  # it has come meanwhile
            self._discard_answer()

    def _discard_answer(self) -> None:
        while self._answer:
            self._discard(self._answer.pop())


def _tell_by_default(line: str) -> None:
    tell_by(package_logger())(line)


class Patience:
    """How long a driver is waited for, and where that is reported.

    Args:
        tell: takes the lines; the default gives them to the logger of this package.
        deadline: ``time.monotonic()`` value at which nobody waits any longer. Each question has half a minute all the
            same.
    """

    def __init__(self, tell: Tell = _tell_by_default, deadline: float = math.inf) -> None:
        self._tell = tell
        self._deadline = deadline

    def opened(self, open_one: Callable[[], Driver]) -> Driver:
        """Return the driver that a function opens, as one that is asked with this patience.

        Raises:
            ClaimTimeout: as of :meth:`answer`. Others as of the function.
        """
        if is_simulated(os.environ):
            return open_one()  # it asks nobody
        driver = self.answer(open_one, discard=lambda late: late.close())
        return AwaitedDriver(driver, self)

    def answer(
        self, ask: Callable[[], _Answer], name: str = "", discard: Callable[[_Answer], None] = lambda answer: None
    ) -> _Answer:
        """Return the answer of a driver.

        Args:
            ask: asks it.
            name: that of the driver, if it is known yet.
            discard: is given an answer for which nobody waits any more.

        Raises:
            ClaimTimeout: it has not answered in time. The thread that asks it stays behind.
        """
        Driver.latest_call = ""
        question = _Question(ask, discard)
        awaited = Awaited(f"the GPU driver{in_brackets(name)}", self._tell, lambda: _cause(name))
        try:
            if not question.start():
                return ask()
            in_time = awaited.took(question.answered, max(self._deadline, awaited.began + AT_LEAST))
        except BaseException:
            question.abandon()
            raise
        if not in_time:
            question.abandon()
            seconds = time.monotonic() - awaited.began
            what = f"the time to wait is over, and {awaited.what} has not answered for {seconds:.0f} s: {_cause(name)}"
            raise ClaimTimeout(what, timeout=seconds)
        return question.result()


def _cause(name: str) -> str:
    """Return in which call a driver of this name keeps this process waiting, and what usually is the cause."""
    cause = why_late(name)
    if Driver.latest_call:
        cause = f"{Driver.latest_call} does not return; {cause}"
    return cause


def why_late(name: str) -> str:
    """Return what usually is the cause where a driver of this name takes long; with "" that of the first vendor."""
    vendor = VENDORS[FIRST]
    for one in VENDORS.values():
        if name in one.drivers:
            vendor = one
    return f"if this ends after seconds, {vendor.is_slow}; if it never ends, the driver hangs: {vendor.recover}"


class AwaitedDriver(Driver):
    """A driver whose answers are awaited with patience; the questions are those of
    :class:`~safe_gpu.drivers.base.Driver`.

    Raises:
        ClaimTimeout: from every question, as of :meth:`Patience.answer`.
    """

    def __init__(self, driver: Driver, patience: Patience) -> None:
        self.name = driver.name
        self.runtime = driver.runtime
        self._driver = driver
        self._patience = patience

    def _answer(self, question: Callable[..., _Answer], *arguments: Any) -> _Answer:
        return self._patience.answer(lambda: question(*arguments), self.name)

    def snapshot(self) -> HostSnapshot:
        """Poll every GPU of the host."""
        return self._answer(self._driver.snapshot)

    def usage(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """Ask again about some devices."""
        return self._answer(self._driver.usage, gpus)

    def shows_same(self, snapshot: HostSnapshot) -> bool:
        """Return whether the GPUs are those of an earlier poll."""
        return self._answer(self._driver.shows_same, snapshot)

    def linked(self, snapshot: HostSnapshot, among: Collection[str] | None = None) -> HostSnapshot:
        """Return the same poll with ``nvlink_peers``."""
        return self._answer(self._driver.linked, snapshot, among)

    def detailed(self, snapshot: HostSnapshot) -> HostSnapshot:
        """Return the same poll with what only people look at."""
        return self._answer(self._driver.detailed, snapshot)

    def examined(self, snapshot: HostSnapshot, among: Collection[str] | None = None) -> HostSnapshot:
        """Return the same poll with what speaks for ill GPUs."""
        return self._answer(self._driver.examined, snapshot, among)

    def cpu_affinity(self, uuid: str, scope: str) -> frozenset[int] | None:
        """Return the CPUs next to a GPU."""
        return self._answer(self._driver.cpu_affinity, uuid, scope)

    def host_topology(self) -> HostTopology | None:
        """Return the CPUs of the host, where the driver brings its own."""
        return self._driver.host_topology()

    def rest(self) -> None:
        """End the session for a pause, where that harms nobody."""
        self._answer(self._driver.rest)

    def close(self) -> None:
        """End the session, unless a question that hangs keeps it."""
        closing = _Question(self._driver.close)
        if not closing.start():
            self._driver.close()
        elif closing.answered.acquire(timeout=TO_CLOSE):
            closing.result()
