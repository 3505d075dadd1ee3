"""In which order the kernel frees what a dead process held. Nothing depends on it: this only reports, and
``pytest -rP`` shows what."""

import fcntl
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROUNDS = 5
BETWEEN = 400  # descriptors between the two that are watched, so that there is something to see


def exits() -> None:
    os._exit(0)


def waits() -> None:
    signal.pause()


def becomes_another_program() -> None:
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and os.path.exists(f"/proc/self/fd/{number}"):
            os.set_inheritable(number, True)
    os.execv("/bin/sleep", ["sleep", "60"])


@pytest.mark.parametrize("way", [exits, waits, becomes_another_program], ids=["exit", "kill", "exec and kill"])
@pytest.mark.parametrize("kind", ["names", "locks"])
def test_the_order_of_release(
    kind: str, way: Callable[[], None], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    seen: Counter[str] = Counter()
    for number in range(ROUNDS):
        seen[(_names if kind == "names" else _locks)(way, f"{tmp_path}/{number}")] += 1
    record_property("order", dict(seen))
    print(f"{kind}, {way.__name__}: {', '.join(f'{count} {what}' for what, count in seen.items())}")
    assert sum(seen.values()) == ROUNDS


def _names(way: Callable[[], None], place: str) -> str:
    addresses = [f"\0{place}/{end}".encode() for end in ("low", "high")]

    def hold() -> Any:
        held = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(BETWEEN + 2)]
        for one, address in zip(held[:: BETWEEN + 1], addresses, strict=True):
            one.bind(address)
        return held

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
        return _watch(way, hold, lambda number: asking.connect_ex(addresses[number]) != 0)


def _locks(way: Callable[[], None], place: str) -> str:
    paths = [f"{place}-{end}" for end in ("low", "high")]

    def hold() -> Any:
        held = [os.open(path, os.O_RDWR | os.O_CREAT) for path in [paths[0], *[os.devnull] * BETWEEN, paths[1]]]
        for one in held:
            fcntl.flock(one, fcntl.LOCK_SH if one != held[0] else fcntl.LOCK_EX)
        return held

    mine = [os.open(path, os.O_RDWR | os.O_CREAT) for path in paths]

    def is_free(number: int) -> bool:
        try:
            fcntl.flock(mine[number], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(mine[number], fcntl.LOCK_UN)
        return True

    try:
        return _watch(way, hold, is_free)
    finally:
        for one in mine:
            os.close(one)


def _watch(way: Callable[[], None], hold: Callable[[], Any], is_free: Callable[[int], bool]) -> str:
    """Let a process hold two, and end; return which was seen free while the other was held."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            held = hold()
            os.write(writer, b"x")
            way()
            assert held
        finally:
            os._exit(1)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    os.kill(pid, signal.SIGKILL)
    answer = "both at once"
    while not (is_free(0) and is_free(1)):
        if is_free(0) and not is_free(1):
            answer = "lowest descriptor first"
        elif is_free(1) and not is_free(0):
            answer = "highest descriptor first"
    os.waitpid(pid, 0)
    return answer
