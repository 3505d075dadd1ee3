"""A driver and its holders in processes of this machine: who notices whose end."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

import pytest
from support.batch import wait_for

from safe_gpu import NotEnoughGpusError, get_free_gpus
from safe_gpu.engines.connection import Holder, serve, start_all
from safe_gpu.engines.holder import ClaimArguments
from safe_gpu.errors import HolderLostError
from safe_gpu.host.procfs import has_ended


def fork(work: Callable[[], None]) -> int:
    """Start a child that does this and exits."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


@pytest.fixture
def started() -> Iterator[list[int]]:
    """The pids of the holders of a test, which are ended with it."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


@pytest.fixture
def make(state_dir: Any, started: list[int]) -> Callable[..., Holder]:
    def start(port: int, token: bytes, *, calls: bool) -> Callable[[], str]:
        hold = partial(serve, ("127.0.0.1", port), token, ClaimArguments(affinity=None), "a test")
        started.append(fork(hold if calls else lambda: None))
        return lambda: "" if not has_ended(started[-1]) else "its process is gone"

    return lambda calls=True: start_all([partial(Holder, "hosta", "1", partial(start, calls=calls))])[0]


def ask(holder: Holder, method: str, *arguments: Any, limit: float | None = 30.0) -> Any:
    holder.call(method, *arguments)
    return holder.answer(limit)


def test_it_claims_and_ends_with_the_connection(make: Any, started: list[int]) -> None:
    holder = make()
    assert ask(holder, "report", 3).free == 8
    assert [gpu.index for gpu in ask(holder, "claim", 2, 0)] == [0, 1]
    assert isinstance(ask(holder, "claim", 9, 0), Exception), "errors are answers"
    assert len(get_free_gpus()) == 6
    holder.end()
    holder.end()
    wait_for(lambda: has_ended(started[0]), "the end of the holder")
    assert len(get_free_gpus()) == 8


def test_a_holder_that_waits_ends_too(make: Any, started: list[int]) -> None:
    first, second = make(), make()
    ask(first, "claim", 8, 0)
    assert isinstance(ask(second, "claim", 1, 0), NotEnoughGpusError)
    second.call("claim", 1, None)
    with pytest.raises(HolderLostError, match="does not answer within"):
        second.answer(0.1)
    second.end()
    wait_for(lambda: has_ended(started[1]), "the end of the waiting holder")
    first.end()


def test_a_holder_that_is_killed_is_lost(make: Any, started: list[int]) -> None:
    holder = make()
    ask(holder, "claim", 2, 0)
    os.kill(started[0], signal.SIGKILL)
    holder.call("ping")
    with pytest.raises(HolderLostError, match="hosta: the process that held the GPUs there has exited"):
        holder.answer(30.0)
    holder.end()


def test_a_holder_that_never_calls_is_lost(make: Any) -> None:
    holder = make(calls=False)
    holder.call("report")
    with pytest.raises(HolderLostError, match="ended before it began"):
        holder.answer(30.0)
    holder.end()


DRIVER = """
import os, sys
from functools import partial
from safe_gpu.engines.connection import Holder, start_all
def start(port, token):
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", HOLDER, str(port), token.hex()])
    return lambda: ""
HOLDER = '''
import sys
from safe_gpu.engines.connection import serve
from safe_gpu.engines.holder import ClaimArguments
serve(("127.0.0.1", int(sys.argv[1])), bytes.fromhex(sys.argv[2]), ClaimArguments(affinity=None), "a test")
'''
(holder,) = start_all([partial(Holder, "hosta", "1", start)])
holder.call("claim", 8, 0)
holder.answer(60)
if os.fork() == 0:  # a child that outlives its driver
    os.read(0, 1)
    os._exit(0)
say("claimed")
listen()
"""


def test_the_end_of_the_driver_frees_its_gpus_although_a_forked_child_lives(child: Any, state_dir: Any) -> None:
    driver = child(DRIVER, says="claimed")
    assert get_free_gpus() == []
    driver.kill()
    wait_for(lambda: len(get_free_gpus()) == 8, "the end of the holder")


def test_strangers_are_not_let_in(make: Any) -> None:
    ports: list[int] = []

    def start(port: int, token: bytes) -> Callable[[], str]:
        ports.append(port)
        return lambda: ""

    (holder,) = start_all([partial(Holder, "hosta", "1", start)])
    with Connection(socket.create_connection(("127.0.0.1", ports[0])).detach()) as stranger:
        stranger.send_bytes(bytes(32))
        with pytest.raises(EOFError):
            stranger.recv_bytes()
    holder.call("report")
    with pytest.raises(HolderLostError, match="does not answer"):
        holder.answer(0.05)
    holder.end()


def test_a_holder_reads_no_object_of_a_stranger_who_got_the_port() -> None:
    """A driver that has ended leaves its port to anybody."""

    def welcome() -> None:
        link = Connection(server.accept()[0].detach())
        link.recv_bytes()
        link.send_bytes(b"#CHALLENGE#" + bytes(20))
        link.recv_bytes()
        link.send_bytes(b"#WELCOME#")
        link.recv_bytes()
        link.send_bytes(bytes(16))
        link.send(("release", ()))
        link.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        stranger = Thread(target=welcome)
        stranger.start()
        with pytest.raises(AuthenticationError):
            serve(server.getsockname(), bytes(32), ClaimArguments(), "a test")
        stranger.join()
