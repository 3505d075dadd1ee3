"""A process that does one thing at a time: it says what it has done, listens, and is killed."""

import ctypes
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Pipe
from typing import Any

Say = Callable[[object], None]
Listen = Callable[[], str]


class Actor:
    """A forked process that runs ``work(say, listen)``, as another user if told so.

    It is forked and not started anew, since another user may not even be able to read this interpreter. An exception
    in it is said, as ``Name: message``.

    >>> actor = Actor(lambda say, listen: say(2 * int(listen())))
    >>> actor.tell("21")
    >>> actor.hear()
    '42'
    >>> actor.end()
    0
    """

    def __init__(self, work: Callable[[Say, Listen], Any], *, uid: int | None = None, umask: int | None = None) -> None:
        from_child, to_parent = os.pipe()
        from_parent, to_child = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(from_child)
                os.close(to_child)
                if umask is not None:
                    os.umask(umask)
                if uid is not None:
                    become(uid)
                work(
                    lambda text: _write(to_parent, f"{text}\n".encode()),
                    lambda: os.read(from_parent, 99).decode().strip(),
                )
                code = 0
            except BaseException as err:
                _write(to_parent, f"{type(err).__name__}: {err}\n".encode())
            finally:
                os._exit(code)
        os.close(to_parent)
        os.close(from_parent)
        self._in, self._out = os.fdopen(from_child), to_child

    def hear(self) -> str:
        """The next line that it says; "" where it has ended."""
        return self._in.readline().strip()

    def tell(self, text: object = "go") -> None:
        _write(self._out, f"{text}\n".encode())

    def kill(self) -> None:
        """SIGKILL; it may take a moment until all is closed that it had open."""
        os.kill(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """Its wait status; it is killed where it has not ended yet (9 then)."""
        if not self.pid:
            return 0
        self.kill()
        os.close(self._out)
        status = os.waitpid(self.pid, 0)[1]
        self.pid = 0
        self._in.close()
        return status


class Racer:
    """A forked process that runs ``work(line)`` and talks to this one over ``line`` in tuples; it dies with this one.

    ``uid`` and ``umask`` make it another user's. An exception in it is said, as ``("error", traceback)``.
    """

    def __init__(self, work: Callable[[Any], None], *, uid: int | None = None, umask: int | None = None) -> None:
        self.line, theirs = Pipe()
        self.pid = os.fork()
        self.status: int | None = None
        if self.pid == 0:
            try:
                self.line.close()
                if umask is not None:
                    os.umask(umask)
                if uid is not None:
                    become(uid)
                work(theirs)
            except (EOFError, BrokenPipeError):
                pass  # the other one is gone
            except BaseException:
                with suppress(OSError):
                    theirs.send(("error", traceback.format_exc()))
            finally:
                os._exit(0)
        theirs.close()

    def hear(self) -> tuple[Any, ...]:
        """What it says next; ``("gone",)`` where it died."""
        try:
            said: tuple[Any, ...] = self.line.recv()
        except (EOFError, ConnectionResetError):
            self.join()
            return ("gone",)
        assert said[0] != "error", said[1]
        return said

    def tell(self, word: str) -> None:
        self.line.send(word)

    def kill(self) -> None:
        """Kill it and wait until nothing of it is left."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.join()
        self.line.close()

    def join(self) -> int:
        """Its wait status."""
        if self.status is None:
            self.status = os.waitpid(self.pid, 0)[1]
        return self.status


def become(uid: int) -> None:
    """Turn this process into one of another user, for good, who may be looked at as after exec(2)."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE


def _write(fd: int, data: bytes) -> None:
    os.write(fd, data)
