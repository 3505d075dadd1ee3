"""Lines that a neighbour forges in /proc/net/unix, by a line break in the name or path of a socket of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu.coordination import socket_names as names
from safe_gpu.drivers.presets import preset

NEIGHBOUR = 4712
EXACT = "\n0000000000000000: 00000002 00000000 00000000 0001 01 {:5} @safe-gpu/1/{}"
LOOSE = "\na: 2 0 1 0001 01 {} @safe-gpu/1/{}"  # the same eight fields, narrower
HEAD = 61  # bytes of the exact line before the name
ROOM = {"abstract": 107, "path": 108}  # for what is bound: sun_path has 108 bytes, and a NUL begins an abstract name


@pytest.fixture(autouse=True)
def directory(open_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where paths are bound: by the slashes in it, a forged line is a path of three levels."""
    monkeypatch.chdir(open_tmp)


def forge(kind: str, text: str) -> socket.socket:
    """A socket with this path or abstract name. Python's own bind() does not take a path of 108 bytes."""
    libc = ctypes.CDLL(None, use_errno=True)
    if kind == "path":
        os.makedirs(os.path.dirname(text), exist_ok=True)
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    address = int(socket.AF_UNIX).to_bytes(2, "little") + (b"\0" if kind == "abstract" else b"") + text.encode()
    if libc.bind(one.fileno(), address, len(address)):
        one.close()
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return one


def fitted(line: str, room: int) -> set[str]:
    """The line in that many bytes, its name whole: what is too much is left out of its head, at every place."""
    over = max(0, len(line) - room)
    return {line[:start] + line[start + over :] for start in range(1, HEAD + 1 - over)}


def imitated(kind: str) -> set[int]:
    """Sizes of names (those of 40 to 60 bytes are tried) that count as held by the lines of a neighbour alone."""
    found = set()
    for size in range(40, 61):
        name = os.urandom(8).hex().ljust(size - len("safe-gpu/1/"), "x")
        lines = {*fitted(EXACT.format(12345, name), ROOM[kind]), LOOSE.format(12345, name)}
        with contextlib.ExitStack() as stack:
            for line in lines:
                stack.enter_context(forge(kind, line))
            table = Path("/proc/net/unix").read_bytes().split(b"\n")
            assert {line.strip("\n").encode() for line in lines} <= set(table), "the kernel writes what was bound"
            if name in names.sockets():
                found.add(size)
    return found


@pytest.mark.parametrize("kind", ROOM)
def test_no_forged_line_has_room_for_a_name(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert imitated(kind) == set()
    monkeypatch.setattr(names, "_SHORTEST", 0)
    assert imitated(kind) == set(range(40, ROOM[kind] - HEAD + 1)), "by their length alone: 46 and 47 are the longest"


@pytest.mark.parametrize("kind", ROOM)
def test_a_gpu_with_a_short_uuid_does_not_seem_claimed(kind: str) -> None:
    uuid = f"GPU-{os.urandom(8).hex()}"
    with forge(kind, EXACT.format(12345, uuid)), forge(kind, LOOSE.format(12345, names.name_of(uuid))):
        assert names.held_among([uuid]) == frozenset()


def test_a_gpu_is_not_lent_to_a_claim_by_a_forged_line() -> None:
    """The neighbour knows the hash, which is public, and the number of any socket of the victim."""
    uuid, token = f"GPU-{os.urandom(8).hex()}", os.urandom(8).hex()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as ours:
        inode = os.fstat(ours.fileno()).st_ino
        with forge("abstract", LOOSE.format(inode, names.scope_of(uuid, token))):
            assert names.scope_of(uuid, token) not in names.sockets()


def test_the_gpus_of_a_host_seem_free_still(state_dir: Path, as_user: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:mi250x")
    uuids = [gpu.uuid for gpu in preset("mi250x").gpus()]
    prefix = names.simulated_prefix(str(state_dir / "simulated"))

    def work(say: Callable[[str], None], listen: Callable[[], str]) -> None:
        held = [forge("abstract", LOOSE.format(12345, names.name_of(uuid, prefix))) for uuid in uuids]
        say(str(len(held)))
        listen()

    assert as_user(work, uid=NEIGHBOUR).hear() == str(len(uuids))
    assert safe_gpu.get_free_gpus() == [str(index) for index in range(len(uuids))]
