"""Doors: real sockets of real processes, which are asked from other processes and die in any order."""

import _socket
import itertools
import os
import resource
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support.actor import Actor
from support.forks import CAN_TRACE, each_point
from support.processes import own_network

from safe_gpu.coordination import doors as doors_module
from safe_gpu.coordination.doors import MOST_PARTS, Doors

TOKEN = "0123456789abcdef"


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> str:
    """A GPU that no other test has."""
    return f"GPU-{os.getpid()}-{abs(hash(request.node.nodeid)) % 10**9}"


@pytest.fixture
def make() -> Iterator[Callable[..., Doors]]:
    """Make doors that do not outlive the test."""
    with ExitStack() as made:

        def one(tree: str = "") -> Doors:
            doors = Doors(tree)
            made.callback(doors.release)
            return doors

        yield one


@pytest.fixture
def doors(make: Callable[..., Doors]) -> Doors:
    return make()


def is_free(gpu: str, known: Collection[int] = (), *, share: bool = False) -> bool:
    """Whether another claim could have a GPU, or a part of it."""
    other = Doors()
    try:
        return other.take_share(gpu, known) if share else other.take_whole(gpu, known)
    finally:
        other.release()


def test_a_whole_gpu_is_held_once(gpu: str, doors: Doors, make: Callable[..., Doors]) -> None:
    assert doors.take_whole(gpu, ())
    assert not is_free(gpu)
    assert not is_free(gpu, share=True)
    assert make("sim-1/").take_whole(gpu, ())
    doors.release()
    doors.release()
    assert is_free(gpu)


def test_shares_have_a_part_each(gpu: str, make: Callable[..., Doors]) -> None:
    sharers = [make() for _ in range(MOST_PARTS)]
    for number, sharer in enumerate(sharers):
        assert is_free(gpu, range(number - 1), share=True) == (number == 0), "one is of another directory"
        assert sharer.take_share(gpu, range(number))
        assert sharer.parts == {gpu: number}
    assert not is_free(gpu, range(MOST_PARTS), share=True)
    assert not is_free(gpu)
    sharers[3].release()
    assert is_free(gpu, [part for part in range(MOST_PARTS) if part != 3], share=True)


def test_inside_another_claim(gpu: str, doors: Doors, make: Callable[..., Doors]) -> None:
    assert doors.take_whole(gpu, (), TOKEN)
    inner, second, late = make(), make(), make()
    assert inner.take_inside(gpu, {0}, TOKEN)
    assert second.take_inside(gpu, {0, 1}, TOKEN)
    assert not late.take_inside(gpu, {0}, "another token")
    doors.release()
    assert not late.take_inside(gpu, {0}, TOKEN)
    assert not is_free(gpu), "who is inside keeps other directories off"
    inner.release()
    second.release()
    assert is_free(gpu)


@pytest.mark.skipif(not CAN_TRACE, reason="cannot trace processes here")
def test_whichever_way_they_are_closed_one_of_the_token_goes_before_the_gpu(gpu: str) -> None:
    """As a process is killed, released or ends at any system call, nobody is inside once the GPU could be had."""

    def work() -> None:
        mine = Doors()
        assert mine.take_whole(gpu, (), TOKEN)
        mine.keep_across_exec()
        mine.release()

    for stop in each_point(work):
        assert not Doors().is_inside(gpu, TOKEN), stop
        assert is_free(gpu), stop


@pytest.mark.parametrize("lowest_first", [True, False])
def test_descriptors_of_a_delegating_claim_stand_in_order(gpu: str, doors: Doors, lowest_first: bool) -> None:
    """Also where a lower number becomes free meanwhile."""
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(6)]
    bound = doors_module._bound

    def bound_and_closed(name: bytes, above: int) -> Any:
        held = bound(name, above)
        if taken:
            os.close(taken.pop(0 if lowest_first else -1))
        return held

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doors_module, "_bound", bound_and_closed)
        assert doors.take_whole(gpu, (), TOKEN)
    for fd in taken:
        os.close(fd)
    numbers = [held.fd for held in doors._held]
    assert numbers == sorted(numbers)
    doors.keep_across_exec()
    numbers = [held.fd for held in doors._held]
    assert numbers == sorted(numbers)
    assert min(numbers) >= 500
    assert Doors().is_inside(gpu, TOKEN)


@pytest.mark.parametrize("room", [1, 5])
def test_they_stay_in_order_where_the_limit_leaves_little_room(gpu: str, doors: Doors, room: int) -> None:
    """The limit is so low that they are moved to numbers next to their own, or not at all."""
    assert doors.take_whole(gpu, (), TOKEN)
    last = doors._held[-1].fd
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + room, hard))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "sysconf", lambda name: 2 * (last - 1))
            doors.keep_across_exec()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    numbers = [held.fd for held in doors._held]
    assert numbers == sorted(numbers)
    assert all(map(os.get_inheritable, numbers))


def test_forked_children_close_them(gpu: str, doors: Doors, eventually: Any) -> None:
    assert doors.take_whole(gpu, ())
    child = Actor(lambda line: (line.send("up"), line.recv()))
    assert child.hear() == "up"
    doors.release()
    assert doors.take_whole(gpu, ())
    child.end()


def test_they_belong_to_the_network_namespace_and_names_may_be_long(gpu: str, doors: Doors) -> None:
    assert doors.take_whole(gpu, ())
    with own_network():
        assert is_free(gpu)
    assert doors.take_whole("MIG-GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f/1/0", (), TOKEN)
    with pytest.raises(OSError, match="too long"):
        doors.take_whole("GPU-" + "a" * 200, ())


def test_a_stream_socket_of_the_name_is_another_one_and_nobody_leaves_anything_in_one(gpu: str, doors: Doors) -> None:
    with socket.socket(socket.AF_UNIX) as stream:
        stream.bind(doors._name(gpu))
        stream.listen()
        assert doors.take_whole(gpu, ())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one, pytest.raises(OSError, match="pipe"):
        one.sendto(b"x", doors._name(gpu))


def test_without_sockets_the_error_comes_up_and_nothing_stays(gpu: str, doors: Doors) -> None:
    made, calls = _socket.socket, itertools.count()

    def refuse(*arguments: int) -> Any:
        if next(calls) == 3:
            raise PermissionError(1, "Operation not permitted")
        return made(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_socket, "socket", refuse)
        with pytest.raises(PermissionError):
            doors.take_whole(gpu, (), TOKEN)
    assert is_free(gpu)
