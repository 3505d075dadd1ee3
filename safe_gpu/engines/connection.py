"""A holder on a node, at one end of a connection; the program that claims has the other end.

The kernel reports each end when the other is gone. So a holder ends with its program, however that ends, and a program
notices a lost holder, whatever engine started it. An engine's part is to run :func:`serve` on a node.

A holder calls the program, and says which holder it is. Both prove then that they know its secret token, before either
reads an object of the other: another user may have got the port of a program that has ended.
"""

import hashlib
import math
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple
from weakref import WeakSet

from ..errors import HolderLostError
from .holder import ClaimArguments, HolderProcess

_TOKEN = 32  # bytes

_PROOF_LIMIT = 10  # seconds for each message of a proof

_CHECK_INTERVAL = (
    0.5  # seconds between two questions to the engine whether a holder that has not called yet still lives
)

Address = tuple[str, int]
"""Where holders call: the address of the program's host, and the port."""

Request = tuple[str, tuple[Any, ...]]
"""What the program sends: the name of a method of :class:`~safe_gpu.engines.holder.HolderProcess`, and its
arguments."""


# What a forked child inherits would keep the holders of a program that has ended.
_open: WeakSet[Connection | socket.socket] = WeakSet()


def _close_in_child() -> None:
    for one in list(_open):
        one.close()


os.register_at_fork(after_in_child=_close_in_child)


class ExpectedCall(NamedTuple):
    """A holder that is to call.

    Attributes:
        token: the secret by which it is let in.
        link: the connection to come; it is cancelled if the holder is given up.
    """

    token: bytes
    link: Future[Connection]


class Listener:
    """Where the holders of one claim call. It is open until the last of them has called or is given up.

    Attributes:
        port: the port, on all addresses of this host.
    """

    def __init__(self) -> None:
        self._server = socket.create_server(("", 0), backlog=4096)
        _open.add(self._server)
        self.port: int = self._server.getsockname()[1]
        self._expected: dict[bytes, ExpectedCall] = {}  # by the public name of the token
        self._all_known = False
        self._thread = Thread(target=self._accept, daemon=True)
        self._thread.start()

    def expect(self) -> ExpectedCall:
        """Let one more holder in, and return its token and the connection to come."""
        expected = ExpectedCall(secrets.token_bytes(_TOKEN), Future[Connection]())
        self._expected[_public_name(expected.token)] = expected
        return expected

    def give_up(self, token: bytes) -> None:
        """Let the holder with this token in no more."""
        self._expected.pop(_public_name(token), None)
        self._close_if_done()

    def close_when_done(self) -> None:
        """Close the port once nobody is expected; no further holders are."""
        self._all_known = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._all_known and not self._expected:
            with suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # ends the accept of the thread
            self._thread.join()

    def _accept(self) -> None:
        with self._server, suppress(OSError):
            while True:
                caller, _ = self._server.accept()
                Thread(target=self._admit, args=(caller,), daemon=True).start()

    def _admit(self, caller: socket.socket) -> None:
        link = _connection(caller)
        try:
            name = link.recv_bytes(_TOKEN)
            token = self._expected[name].token
            deliver_challenge(link, token)
            answer_challenge(link, token)
            expected = self._expected.pop(name)
        except (OSError, EOFError, KeyError, AuthenticationError):
            link.close()  # a stranger, or the holder of a claim that is over
            return
        _limit_reads(link, 0)
        _open.add(link)
        if expected.link.set_running_or_notify_cancel():
            expected.link.set_result(link)
        else:
            link.close()  # its claim has ended meanwhile
        self._close_if_done()


def _public_name(token: bytes) -> bytes:
    """Return what anybody may know of a token."""
    return hashlib.sha256(token).digest()


def _connection(connected: socket.socket) -> Connection:
    """Return a connection over a socket, for the proofs; within half a minute it tells that the other host is gone."""
    connected.settimeout(None)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    link = Connection(connected.detach())
    _limit_reads(link, _PROOF_LIMIT)
    return link


def _limit_reads(link: Connection, seconds: int) -> None:
    """Let a read last at most that long; 0 is without limit."""
    with socket.socket(fileno=os.dup(link.fileno())) as duplicate:
        duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", seconds, 0))


class RemoteHolder:
    """A :class:`~safe_gpu.engines.holder.HolderProcess` on a node, as the program that claims reaches it.

    An engine derives a class from it that says how a process is started on a node.

    Attributes:
        host: the engine's name of the host.
        node_id: the engine's id of the node.
    """

    def __init__(self, host: str, node_id: str) -> None:
        self.host = host
        self.node_id = node_id

    def start_process(self, port: int, token: bytes) -> None:
        """Run :func:`serve` on the node, with this port and token. May raise any exception of the engine."""
        raise NotImplementedError

    def why_ended(self) -> str:
        """Return why the process ended before it called; "" if it may still call."""
        raise NotImplementedError

    def start(self, listener: Listener) -> None:
        """Start the process, which is to call there.

        Raises:
            HolderLostError: it could not be started.
        """
        self._listener = listener
        self._expected = listener.expect()
        try:
            self.start_process(listener.port, self._expected.token)
        except Exception as err:
            self.end()
            raise HolderLostError(f"{self.host}: a holder could not be started there: {err}", host=self.host) from err

    def call(self, method: str, *arguments: Any) -> None:
        """Start a method of the holder, as soon as that has called. Each call must be followed by its answer."""
        request: Request = (method, arguments)

        def send(link: Future[Connection]) -> None:
            if link.cancelled():
                return
            with suppress(OSError):  # the answer says that it is gone
                link.result().send(request)

        self._expected.link.add_done_callback(send)

    def answer(self, limit: float | None) -> Any:
        """Return the result of the method.

        Raises:
            HolderLostError: the holder has exited, or did not answer within ``limit`` seconds.
        """
        deadline = math.inf
        if limit is not None:
            deadline = time.monotonic() + limit
        link = self._wait_for_call(deadline)
        left = None
        if limit is not None:
            left = max(0.0, deadline - time.monotonic())
        try:
            if link is not None and link.poll(left):
                return link.recv()
        except (EOFError, OSError) as err:
            exited = "the process that held the GPUs there has exited, and others may have taken them: claim again"
            raise self._lost(exited) from err
        raise self._lost(f"the holder does not answer within {limit:g} s; is the node overloaded or cut off?")

    def _wait_for_call(self, deadline: float) -> Connection | None:
        """Return the connection once the holder has called; None if it has not by then.

        Raises:
            HolderLostError: it has ended, so it will not call.
        """
        link = self._expected.link
        while not link.done():
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            wait([link], min(_CHECK_INTERVAL, left))
            if link.done():
                break
            why = self.why_ended()
            if why:
                raise self._lost(f"the holder there has ended before it began ({why})")
        return link.result()

    def end(self) -> None:
        """End the holder in any state, which releases what it holds. Safe to call twice."""
        self._listener.give_up(self._expected.token)
        link = self._expected.link
        if not link.cancel():
            link.result().close()

    def _lost(self, why: str) -> HolderLostError:
        return HolderLostError(f"{self.host}: {why}", host=self.host)


def start_all(holders: Iterable[RemoteHolder]) -> None:
    """Start holders; if one cannot be started, end the others and raise."""
    listener = Listener()
    started: list[RemoteHolder] = []
    try:
        for holder in holders:
            holder.start(listener)
            started.append(holder)
    except BaseException:
        for holder in started:
            holder.end()
        raise
    finally:
        listener.close_when_done()


def serve(address: Address, token: bytes, claim_arguments: ClaimArguments, label: str) -> None:
    """Hold GPUs of this host for the program at an address, until the program ends it or is gone."""
    program = _connection(socket.create_connection(address, timeout=_PROOF_LIMIT))
    program.send_bytes(_public_name(token))
    answer_challenge(program, token)
    deliver_challenge(program, token)
    _limit_reads(program, 0)
    requests: SimpleQueue[Request | None] = SimpleQueue()
    idle = Event()
    idle.set()
    Thread(target=_receive, args=(program, requests, idle), daemon=True).start()
    holder = HolderProcess(claim_arguments, label)
    while True:
        request = requests.get()
        if request is None:
            break
        method, arguments = request
        answer = getattr(holder, method)(*arguments)
        idle.set()
        with suppress(OSError):  # the program is gone, which the next request shows
            program.send(answer)
    holder.release()


def _receive(program: Connection, requests: SimpleQueue[Request | None], idle: Event) -> None:
    """Receive requests in a thread, so that the end of the program reaches a holder that waits for GPUs.

    The end of the program is a request None if the holder is idle. Otherwise it ends this process.
    """
    try:
        while True:
            request = program.recv()
            idle.clear()
            requests.put(request)
    except (EOFError, OSError):
        if not idle.is_set():
            os._exit(0)
        requests.put(None)
