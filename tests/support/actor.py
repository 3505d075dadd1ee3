"""A process that does one thing at a time: it says what it has done, listens, and is killed."""

import os
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

from support.kernel import let_others_look

Say = Callable[[object], None]
Listen = Callable[[], str]
Work = Callable[[Connection], object]
GONE = ("gone",)


class Failure(AssertionError):
    """An actor did what it must never do."""


class Actor:
    """A forked process that runs ``work(line)`` and talks to this one over ``line``; it dies with this one.

    It is forked and not started anew, since another user may not even be able to read this interpreter.

    Args:
        uid, umask: of the user that it becomes; None leaves them.
        name: for messages.
        patience: seconds that it may take to say anything; None is without limit.

    >>> actor = Actor(lambda line: line.send(2 * line.recv()))
    >>> actor.tell(21)
    >>> actor.hear()
    42
    >>> actor.end()
    0
    """

    def __init__(
        self,
        work: Work,
        *,
        uid: int | None = None,
        umask: int | None = None,
        name: str = "an actor",
        patience: float | None = None,
    ) -> None:
        self.name, self.patience = name, patience
        self.status: int | None = None
        self.line, theirs = Pipe()
        self.pid = os.fork()
        if self.pid:
            theirs.close()
            return
        code = 1
        try:
            self.line.close()
            if umask is not None:
                os.umask(umask)
            if uid is not None:
                become(uid)
            work(theirs)
            code = 0
        except (EOFError, BrokenPipeError):
            pass  # the other one is gone
        except BaseException:
            with suppress(OSError):
                theirs.send(("error", traceback.format_exc()))
        finally:
            os._exit(code)

    def hear(self) -> Any:
        """What it says next; ``GONE`` where it has ended.

        Raises:
            Failure: it says nothing for too long, or that it has met an exception.
        """
        try:
            if not self.line.poll(self.patience):
                raise Failure(f"{self.name} says nothing for {self.patience} s")
            said = self.line.recv()
        except (EOFError, ConnectionResetError):
            return GONE
        if isinstance(said, tuple) and said[0] == "error":
            raise Failure(f"{self.name}: {said[1]}")
        return said

    def expect(self, *words: str) -> Any:
        """What it says next, which begins with one of these words.

        Raises:
            Failure: it says something else.
        """
        said = self.hear()
        if said[0] not in words:
            raise Failure(f"{self.name} says {': '.join(map(str, said))} instead of {' or '.join(words)}")
        return said

    def tell(self, word: object = "go") -> None:
        """Say something to it; nothing comes of it where it has ended."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.line.send(word)

    def join(self) -> int:
        """Its wait status, when it has ended."""
        if self.status is None:
            self.status = os.waitpid(self.pid, 0)[1]
        return self.status

    def end(self) -> int:
        """SIGKILL, and wait until nothing of it is left. Returns its wait status: it may have ended before."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
        self.line.close()
        return self.join()


def in_words(work: Callable[[Say, Listen], object]) -> Work:
    """The work of an actor that says texts: what it says as text, and an exception as ``Name: message``."""

    def talk(line: Connection) -> None:
        try:
            work(lambda said: line.send(str(said)), line.recv)
        except EOFError:
            pass
        except BaseException as err:
            line.send(f"{type(err).__name__}: {err}")

    return talk


def become(uid: int) -> None:
    """Turn this process into one of another user, for good, who may be looked at as after exec(2)."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    let_others_look()
