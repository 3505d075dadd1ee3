"""Names of claimed GPUs: one holder on the whole host, and nothing on disk."""

import errno
import hashlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from safe_gpu.coordination import name_table
from safe_gpu.coordination import socket_names as names
from safe_gpu.coordination.name_table import NamedSocket, NameTable, read_names
from safe_gpu.coordination.socket_names import (
    SocketName,
    digest,
    inner_of,
    name_of,
    outer_of,
    scope_of,
    slot_of,
    take_name,
)

NVIDIA, AMD = "GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f", "GPU-a3f1c07e52d98b16"
HOLD = (
    "from safe_gpu.coordination.socket_names import take_name\n"
    "one = take_name(sys.argv[1]); say('held' if one else 'refused')\n"
)


def held_among(uuids: list[str], prefix: str, **options: bool) -> frozenset[str]:
    return read_names().held_among(uuids, prefix, **options)


@pytest.fixture
def prefix() -> str:
    """Of a host that no other test has."""
    return names.simulated_prefix(os.urandom(8).hex())


@pytest.fixture
def take(prefix: str) -> Iterator[Callable[..., SocketName | None]]:
    """Bind the name of a device; it is freed when the test ends."""
    held: list[SocketName] = []

    def take(uuid: str = "GPU-1") -> SocketName | None:
        one = take_name(name_of(uuid, prefix))
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
    assert name_of("GPU-1", prefix) in read_names()
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


def test_the_table_tells_socket_and_user(take: Any, prefix: str) -> None:
    assert take("GPU-1") is not None
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(b"\0safe-gpu/1/" + name_of("GPU-2", prefix).encode())
        os.fchown(other.fileno(), os.geteuid(), -1)
        other.listen()
        table = read_names()
        assert table.get(name_of("GPU-2", prefix)) == NamedSocket(os.fstat(other.fileno()).st_ino, os.geteuid())
        assert [table.owner(uuid, prefix) for uuid in ("GPU-1", "GPU-2", "GPU-3")] == [os.geteuid()] * 2 + [None]


def test_shares_are_told_by_their_own_names(prefix: str) -> None:
    one = take_name(slot_of("GPU-1", 15, prefix))
    assert one is not None
    assert held_among(["GPU-1", "GPU-2"], prefix) == {"GPU-1"}
    assert held_among(["GPU-1"], prefix, shares=False) == held_among(["GPU-1"], prefix, inner=True) == frozenset()
    assert read_names().owner("GPU-1", prefix) == os.geteuid()
    assert names.is_held(slot_of("GPU-1", 15, prefix))
    assert held_among(["GPU-1", "GPU-2"], prefix) == {"GPU-1"}, "to ask by connect(2) changes its state"
    one.release()


def test_a_name_that_somebody_connected_to_is_still_told(prefix: str) -> None:
    """The kernel calls a datagram socket established then; anybody may connect to it."""
    one = take_name(outer_of("GPU-1", prefix))
    assert one is not None
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.connect(b"\0safe-gpu/1/" + outer_of("GPU-1", prefix).encode())
        assert read_names().get(outer_of("GPU-1", prefix)) == NamedSocket(one.inode, os.geteuid())
    assert held_among(["GPU-1"], prefix) == {"GPU-1"}
    one.release()
    assert held_among(["GPU-1"], prefix) == frozenset()


def test_a_connection_is_not_a_name(prefix: str) -> None:
    """The kernel shows what accept(2) returns with the name of the socket that accepted, which may be closed."""
    address = b"\0safe-gpu/1/" + name_of("GPU-1", prefix).encode()
    with socket.socket(socket.AF_UNIX) as there, socket.socket(socket.AF_UNIX) as here:
        there.bind(address)
        there.listen()
        here.connect(address)
        with there.accept()[0]:
            there.close()
            assert address[1:] in Path("/proc/net/unix").read_bytes()
            assert held_among(["GPU-1"], prefix) == frozenset()


def test_without_the_attribute_nobody_knows_the_user(take: Any, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on kernels before 5.3."""
    assert take("GPU-1") is not None
    monkeypatch.setattr(name_table, "_NAME_AND_UID", 1)
    one = read_names().get(name_of("GPU-1", prefix))
    assert one is not None
    assert (one.inode > 0, one.uid) == (True, None)


def test_a_user_whom_the_user_namespace_does_not_know(take: Any, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert take("GPU-1") is not None
    monkeypatch.setattr(name_table, "_nobody", os.geteuid)
    assert read_names().owner("GPU-1", prefix) is None


def test_too_many_sockets_are_not_read_to_their_end(take: Any, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert take("GPU-1") is not None
    assert read_names().complete
    asked = []
    genuine = NameTable.add
    monkeypatch.setattr(NameTable, "add", lambda table, data: asked.append(table) or genuine(table, data))
    monkeypatch.setattr(name_table, "LONGEST_READ", 0)
    assert not read_names().complete
    assert len(set(asked)) == 2, "once more"


@pytest.mark.parametrize("error", [errno.EPERM, errno.EPROTONOSUPPORT])
def test_where_the_kernel_does_not_tell_nothing_is_seen(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("_socket.socket", refuse)
    assert list(read_names()) == []
    assert read_names().complete


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
        say(take_name(name_of("GPU-1", prefix)))
        say(held_among(["GPU-1"], prefix))

    other = as_user(work, uid=65534)
    assert other.hear() == "None"
    assert other.hear() == "frozenset({'GPU-1'})"


def test_a_name_that_is_too_long_is_an_error_like_any_other() -> None:
    longest = 107 - len("safe-gpu/1/")
    one = take_name("x" * longest)
    assert one is not None
    one.release()
    with pytest.raises(OSError, match="too long"):
        take_name("x" * (longest + 1))


def test_the_last_descriptors_are_left_to_the_program(child: Any) -> None:
    """Names until no more can be had, and then a file can be opened still."""
    code = """
import os, resource
from safe_gpu.coordination.socket_names import take_name
take_name(os.urandom(8).hex()).release()
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
held = []
try:
    while True:
        held.append(take_name(os.urandom(8).hex()))
except OSError as err:
    say(err.strerror)
say(len(held) > 10, bool([open("/dev/null") for _ in range(5)]))
"""
    other = child(code)
    assert other.hear() == "Too many open files"
    assert other.hear() == "True True"
