"""Names of claimed GPUs: one holder on the whole host, and nothing on disk."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from safe_gpu.coordination import socket_names as names
from safe_gpu.coordination.socket_names import SocketName, bind, digest, held_among, in_use, inner_of, name_of, scope_of

NVIDIA, AMD = "GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f", "GPU-a3f1c07e52d98b16"
HOLD = (
    "from safe_gpu.coordination.socket_names import bind\none = bind(sys.argv[1]); say('held' if one else 'refused')\n"
)


@pytest.fixture
def prefix() -> str:
    """Of a host that no other test has."""
    return names.simulated_prefix(os.urandom(8).hex())


@pytest.fixture
def take(prefix: str) -> Iterator[Callable[..., SocketName | None]]:
    """Bind the name of a device; it is freed when the test ends."""
    held: list[SocketName] = []

    def take(uuid: str = "GPU-1") -> SocketName | None:
        one = bind(name_of(uuid, prefix))
        if one is not None:
            held.append(one)
        return one

    yield take
    for one in held:
        one.release()


def test_names_are_those_of_the_protocol() -> None:
    token = hashlib.sha256(b"secret").hexdigest()[:16]
    assert digest("secret") == token
    assert name_of(NVIDIA) == NVIDIA
    assert name_of(f"MIG-{NVIDIA}/2/3") == f"MIG-{NVIDIA}_2_3"
    assert inner_of(NVIDIA) == f"{NVIDIA}.inner"
    assert scope_of(NVIDIA, "secret") == f"{NVIDIA}.{token}"
    assert names.simulated_prefix("secret") == f"sim-{token}/"
    assert name_of(NVIDIA, "sim-0/") == f"sim-0/{NVIDIA}"


def test_short_names_are_padded() -> None:
    """To 48 bytes with what all names begin with, which leaves 37."""
    assert name_of(AMD) == AMD + 17 * "."
    assert inner_of(AMD) == AMD + ".inner" + 11 * "."
    assert scope_of(AMD, "secret") == f"{AMD}.{digest('secret')}"
    assert name_of(AMD, "sim-0123456/") == f"sim-0123456/{AMD}....."
    assert name_of(AMD, "sim-0123456789abcdef/") == f"sim-0123456789abcdef/{AMD}"


def test_one_holder_at_a_time(take: Any, prefix: str) -> None:
    one = take()
    assert one is not None
    assert take() is None
    one.release()
    one.release()
    assert take() is not None


def test_other_programs_see_exactly_this_name(take: Any, prefix: str) -> None:
    """Not by this code: the address stands in the protocol. Nobody can connect to it."""
    assert take("GPU-1") is not None
    address = f"\0safe-gpu/1/{prefix}GPU-1...........".encode()
    with socket.socket(socket.AF_UNIX) as other:
        with pytest.raises(OSError) as caught:
            other.bind(address)
        assert caught.value.errno == errno.EADDRINUSE
        with pytest.raises(ConnectionRefusedError):
            other.connect(address)


def test_who_looks_takes_nothing(take: Any, prefix: str) -> None:
    assert held_among(["GPU-1", "GPU-2"], prefix) == frozenset()
    one = take("GPU-1")
    assert held_among(["GPU-1", "GPU-2"], prefix) == {"GPU-1"}
    assert held_among(["GPU-1"], prefix, inner=True) == frozenset()
    assert name_of("GPU-1", prefix) in in_use()
    assert take("GPU-2.inner") is not None
    assert held_among(["GPU-1", "GPU-2"], prefix) == {"GPU-1", "GPU-2"}
    assert held_among(["GPU-1", "GPU-2"], prefix, inner=True) == {"GPU-2"}
    one.release()
    assert held_among(["GPU-1"], prefix) == frozenset()


def test_a_name_of_another_kind_of_socket_is_none(prefix: str, take: Any) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(b"\0safe-gpu/1/" + name_of("GPU-1", prefix).encode())
        assert held_among(["GPU-1"], prefix) == frozenset()
        assert take("GPU-1") is not None


LINE = b"0000000012ab34cd: 00000002 00000000 00000000 0001 01 12345 @safe-gpu/1/" + NVIDIA.encode() + b"\n"


@pytest.mark.parametrize(
    ("old", "new", "inode"),
    [
        (b"", b"", 12345),
        (b"0000000012ab34cd", b"(____ptrval____)", 12345),
        (b"00000000 0001", b"00010000 0001", 12345),
        (b"00000002", b"0000001F", 12345),
        (b"12345", b"    7", 7),
        (b"12345", b"18446744073709551615", 2**64 - 1),
        (b"0000000012ab34cd", b"12ab34cd", None),
        (b"cd: ", b"cd:", None),
        (b"00000002", b"0000001f", None),
        (b"00000002 00000000", b"00000002 00000001", None),
        (b"00000000 0001", b"00020000 0001", None),
        (b"0001 01", b"0002 01", None),
        (b" ", b"\t", None),
        (b"12345", b"     7", None),
        (b"12345", b"012345", None),
        (b"12345", b"   -1", None),
        (b"12345", b"12345 /tmp/x", None),
        (b"12345", b"9" * 21, None),
        (b"@safe", b"@@safe", None),
        (NVIDIA.encode(), AMD.encode(), None),
    ],
)
def test_only_the_columns_of_the_kernel_count(monkeypatch, old: bytes, new: bytes, inode: int | None) -> None:
    monkeypatch.setattr(names, "lines_of", lambda path: iter([LINE.replace(old, new, 1)]))
    assert names.sockets() == ({} if inode is None else {NVIDIA: inode})


def test_a_killed_holder_holds_nothing(child: Any, take: Any, prefix: str) -> None:
    other = child(HOLD.replace("sys.argv[1]", repr(name_of("GPU-1", prefix))) + "listen()")
    assert other.hear() == "held"
    assert take() is None
    other.kill()
    assert take() is not None


def test_a_forked_child_does_not_hold_it(take: Any, prefix: str) -> None:
    one = take()
    assert one is not None
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        other = os.open("/dev/null", os.O_RDONLY)  # gets the number of the socket, which is closed here
        one.release()
        os.fstat(other)
        os.write(writer, b"x")
        signal.pause()
    try:
        os.close(writer)
        assert os.read(reader, 1) == b"x"
        assert take() is None
        one.release()
        assert take() is not None
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)


@pytest.mark.parametrize("kept", [True, False])
def test_exec_passes_on_what_is_kept(child: Any, take: Any, prefix: str, kept: bool) -> None:
    work = HOLD.replace("sys.argv[1]", repr(name_of("GPU-1", prefix)))
    work += "one.keep_across_exec()\n" if kept else ""
    work += "import os; os.execv('/bin/sh', ['sh', '-c', 'echo there; read line'])"
    other = child(work)
    assert other.hear() == "held"
    assert other.hear() == "there"
    assert (take() is None) is kept
    other.tell()


def test_another_user_is_kept_out(take: Any, prefix: str, as_user: Any) -> None:
    assert take() is not None

    def work(say: Any, listen: Any) -> None:
        say(bind(name_of("GPU-1", prefix)))
        say(held_among(["GPU-1"], prefix))

    other = as_user(work, uid=65534)
    assert other.hear() == "None"
    assert other.hear() == "frozenset({'GPU-1'})"


def test_a_name_that_is_too_long_is_an_error_like_any_other() -> None:
    longest = 107 - len("safe-gpu/1/")
    one = bind("x" * longest)
    assert one is not None
    one.release()
    with pytest.raises(OSError, match="too long"):
        bind("x" * (longest + 1))


def test_the_last_descriptors_are_left_to_the_program(child: Any) -> None:
    """Names until no more can be had, and then a file can be opened still."""
    code = """
import os, resource
from safe_gpu.coordination.socket_names import bind
bind(os.urandom(8).hex()).release()
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
held = []
try:
    while True:
        held.append(bind(os.urandom(8).hex()))
except OSError as err:
    say(err.strerror)
say(len(held) > 10, bool([open("/dev/null") for _ in range(5)]))
"""
    other = child(code)
    assert other.hear() == "Too many open files"
    assert other.hear() == "True True"


def test_without_proc_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr("builtins.open", refuse)
    assert in_use() == frozenset()
