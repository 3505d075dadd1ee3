"""A holder on a node, at one end of a connection of which the driver has the other.

The kernel tells each end when the other is gone. So a holder ends with its driver, however that ends, and a driver
notices a lost holder, whatever engine started it. An engine's part is to run :func:`serve` on a node.

A holder calls the driver, and says which holder it is. Both prove then that they know its secret token, before either
reads an object of the other: another user may have got the port of a driver that has ended.
"""

import hashlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any
from weakref import WeakSet

from ..errors import HolderLostError
from .holder import ClaimArguments, HolderProcess

_TOKEN = 32  # bytes

_PATIENCE = 10  # seconds for each word of a proof

_SIGN = 0.5  # seconds between two questions to the engine whether a holder that has not called yet still lives

Address = tuple[str, int]
"""Where holders call: the address of the driver's host, and the port."""


# What a forked child inherits would keep the holders of a driver that has ended.
_open: WeakSet[Connection | socket.socket] = WeakSet()


def _close_in_child() -> None:
    for one in list(_open):
        one.close()


os.register_at_fork(after_in_child=_close_in_child)


class Door:
    """Where the holders of one claim call. It is open until the last of them has called or is given up.

    Attributes:
        port: the port, on all addresses of this host.
    """

    def __init__(self) -> None:
        self._server = socket.create_server(("", 0), backlog=4096)
        _open.add(self._server)
        self.port: int = self._server.getsockname()[1]
        self._expected: dict[bytes, tuple[bytes, Future[Connection]]] = {}
        self._all_known = False
        self._listener = Thread(target=self._listen, daemon=True)
        self._listener.start()

    def expect(self) -> tuple[bytes, Future[Connection]]:
        """Return the token by which one holder is let in, and the connection to come."""
        token, link = secrets.token_bytes(_TOKEN), Future[Connection]()
        self._expected[_name(token)] = token, link
        return token, link

    def give_up(self, token: bytes) -> None:
        """Let the holder with this token in no more."""
        self._expected.pop(_name(token), None)
        self._close_if_done()

    def close_when_done(self) -> None:
        """Close the door once nobody is expected; no further holders are."""
        self._all_known = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._all_known and not self._expected:
            with suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # ends the accept of the thread
            self._listener.join()

    def _listen(self) -> None:
        with self._server, suppress(OSError):
            while True:
                caller, _ = self._server.accept()
                Thread(target=self._admit, args=(caller,), daemon=True).start()

    def _admit(self, caller: socket.socket) -> None:
        link = _connection(caller)
        try:
            name = link.recv_bytes(_TOKEN)
            token, _ = self._expected[name]
            deliver_challenge(link, token)
            answer_challenge(link, token)
            _, expected = self._expected.pop(name)
        except (OSError, EOFError, KeyError, AuthenticationError):
            link.close()  # a stranger, or the holder of a claim that is over
            return
        _wait_for(link, 0)
        _open.add(link)
        if expected.set_running_or_notify_cancel():
            expected.set_result(link)
        else:
            link.close()  # its claim has ended meanwhile
        self._close_if_done()


def _name(token: bytes) -> bytes:
    """Return what anybody may know of a token."""
    return hashlib.sha256(token).digest()


def _connection(one: socket.socket) -> Connection:
    """Return a connection over a socket, for the proofs; within half a minute it tells that the other host is gone."""
    one.settimeout(None)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        one.setsockopt(socket.IPPROTO_TCP, option, value)
    link = Connection(one.detach())
    _wait_for(link, _PATIENCE)
    return link


def _wait_for(link: Connection, seconds: int) -> None:
    """Let a read last at most that long; 0 is without limit."""
    with socket.socket(fileno=os.dup(link.fileno())) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", seconds, 0))


class Holder:
    """A :class:`~safe_gpu.engines.holder.HolderProcess` on a node, as the driver of a claim reaches it.

    Attributes:
        host: the engine's name of the host.
        node_id: the engine's id of the node.
    """

    def __init__(self, host: str, node_id: str, start: Callable[[int, bytes], Callable[[], str]], door: Door) -> None:
        """Start it.

        Args:
            host, node_id: see above.
            start: runs :func:`serve` on the node, with this port and token; returns a question: why did it end before
                it called, or "".
            door: where it is to call.

        Raises:
            HolderLostError: it could not be started.
        """
        self.host, self.node_id, self._door = host, node_id, door
        self._token, self._link = door.expect()
        try:
            self._why_ended = start(door.port, self._token)
        except Exception as err:
            self.end()
            raise HolderLostError(f"{host}: a holder could not be started there: {err}", host=host) from err

    def call(self, method: str, *arguments: Any) -> None:
        """Start a method of the holder, as soon as that has called. Each call must be followed by its answer."""
        self._link.add_done_callback(lambda link: _send(link, (method, arguments)))

    def answer(self, limit: float | None) -> Any:
        """Return the result of the method.

        Raises:
            HolderLostError: the holder has exited, or did not answer within ``limit`` seconds.
        """
        until = None if limit is None else time.monotonic() + limit
        while not self._link.done() and (until is None or time.monotonic() < until):
            wait([self._link], _SIGN if until is None else min(_SIGN, until - time.monotonic()))
            if not self._link.done() and (why := self._why_ended()):
                raise self._lost(f"the holder there has ended before it began ({why})")
        left = None if until is None else max(0.0, until - time.monotonic())
        try:
            if self._link.done() and self._link.result().poll(left):
                return self._link.result().recv()
        except (EOFError, OSError) as err:
            exited = "the process that held the GPUs there has exited, and others may have taken them: claim again"
            raise self._lost(exited) from err
        raise self._lost(f"the holder does not answer within {limit:g} s; is the node overloaded or cut off?")

    def end(self) -> None:
        """End the holder in any state, which releases what it holds. Safe to call twice."""
        self._door.give_up(self._token)
        if not self._link.cancel():
            self._link.result().close()

    def _lost(self, why: str) -> HolderLostError:
        return HolderLostError(f"{self.host}: {why}", host=self.host)


def start_all(starts: Iterable[Callable[..., Holder]]) -> list[Holder]:
    """Start holders, each by a function of the argument ``door``; if one cannot be started, end the others and
    raise."""
    door = Door()
    holders: list[Holder] = []
    try:
        for start in starts:
            holders.append(start(door=door))
    except BaseException:
        for holder in holders:
            holder.end()
        raise
    finally:
        door.close_when_done()
    return holders


def _send(link: Future[Connection], message: tuple[str, tuple[Any, ...]]) -> None:
    if not link.cancelled():
        with suppress(OSError):  # the answer says that it is gone
            link.result().send(message)


def serve(address: Address, token: bytes, wishes: ClaimArguments, label: str) -> None:
    """Hold GPUs of this host for the driver at an address, until the driver ends it or is gone."""
    driver = _connection(socket.create_connection(address, timeout=_PATIENCE))
    driver.send_bytes(_name(token))
    answer_challenge(driver, token)
    deliver_challenge(driver, token)
    _wait_for(driver, 0)
    todo: SimpleQueue[tuple[str, tuple[Any, ...]] | None] = SimpleQueue()
    idle = Event()
    idle.set()
    Thread(target=_listen, args=(driver, todo, idle), daemon=True).start()
    holder = HolderProcess(wishes, label)
    while (asked := todo.get()) is not None:
        method, arguments = asked
        answer = getattr(holder, method)(*arguments)
        idle.set()
        with suppress(OSError):  # the driver is gone, which the next turn tells
            driver.send(answer)
    holder.release()


def _listen(driver: Connection, todo: SimpleQueue[Any], idle: Event) -> None:
    """Take requests in a thread, so that the end of the driver reaches a holder that waits for GPUs."""
    try:
        while True:
            asked = driver.recv()
            idle.clear()
            todo.put(asked)
    except (EOFError, OSError):
        if not idle.is_set():
            os._exit(0)
        todo.put(None)
