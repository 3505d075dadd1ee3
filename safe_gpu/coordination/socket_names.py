"""Names of claimed GPUs: what no cleaner, ``rm -rf`` or private /tmp can take away from a claim.

Beside its lease files, a claim holds for each GPU a Unix stream socket that is bound to an abstract name and never
listens; for a share of a GPU it is a datagram socket, as is the one that says that claims inside are allowed. Such a
name belongs to the network namespace: it is one for all mount and PID namespaces and all users of a host. There is no
file, and the kernel frees it with the last descriptor.

A socket cannot be unbound while a copy of its descriptor lives. So forked children close theirs, and only exec(2) by
``safe-gpu run`` passes names on.
"""

import errno
import os
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from ..gpus.devices import MOST_SHARERS
from .files.descriptors import fork_guard
from .held import survive_exec

PROTOCOL = "safe-gpu/1/"
"""What all names begin with, after a NUL byte."""

_LONGEST = 107  # bytes after the first, which is NUL: the kernel takes 108 in all
_SPARE = 8  # descriptors that are left to the program: where the limit is that low, lease files have to do

_SHORTEST = 48  # bytes of a name

SHARE = ".share."
"""Stands in names of shares."""
OUTER = ".outer"
"""Ends the name of a claim that allows claims inside it."""


def name_of(uuid: str, prefix: str = "") -> str:
    """Return the name of a claimed device, without what all names of the protocol begin with.

    Args:
        prefix: "" on a real host, else :func:`simulated_prefix`.

    >>> name_of("MIG-GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f/1/0")
    'MIG-GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f_1_0'
    >>> name_of("GPU-a3f1c07e52d98b16")
    'GPU-a3f1c07e52d98b16.................'
    """
    return _padded(uuid, "", prefix)


def inner_of(uuid: str, prefix: str = "") -> str:
    """Return the name for a claim made inside another claim."""
    return _padded(uuid, ".inner", prefix)


def outer_of(uuid: str, prefix: str = "") -> str:
    """Return the name by which others see that a claim allows claims inside it."""
    return _padded(uuid, OUTER, prefix)


def scope_of(uuid: str, token: str, prefix: str = "") -> str:
    """Return a name with the hash of a text, since all users can read it."""
    return _padded(uuid, f".{digest(token)}", prefix)


def amount_of(slot: str, share: int, directory: os.stat_result) -> str:
    """Return the second name of a share, which says how many bytes it has, and in which directory of leases its slot is
    locked. Anybody may change a record, but not the names of another user."""
    return scope_of("", f"{directory.st_dev}:{directory.st_ino}:{share}", slot.rstrip("."))


def slot_of(uuid: str, slot: int, prefix: str = "") -> str:
    """Return the name of a share."""
    return _padded(uuid, f"{SHARE}{slot}", prefix)


def _padded(uuid: str, suffix: str, prefix: str) -> str:
    return f"{prefix}{uuid.replace('/', '_')}{suffix}".ljust(_SHORTEST - len(PROTOCOL), ".")


def simulated_prefix(tree: str) -> str:
    """Return what stands before the UUIDs of a simulated host whose processes are kept in this directory."""
    return f"sim-{digest(tree)}/"


@cache
def _sha256() -> Callable[[bytes], Any]:
    """Return SHA-256. hashlib would load OpenSSL, which takes longer than a claim; a module that is not there is
    looked for each time."""
    try:
        from _sha2 import sha256  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        try:
            from _sha256 import sha256  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            from hashlib import sha256
    return sha256  # type: ignore[no-any-return, unused-ignore]


def digest(text: str) -> str:
    """Return the first 16 hexadecimal digits of SHA-256."""
    return str(_sha256()(os.fsencode(text)).hexdigest()[:16])


class SocketName:
    """A name that this process holds, until :meth:`release` or until the last copy of its descriptor is closed."""

    def __init__(self, fd: int) -> None:
        fork_guard.add(fd)
        self._fd = fd

    @property
    def inode(self) -> int:
        """The inode of its socket."""
        return os.fstat(self._fd).st_ino

    def release(self) -> None:
        """Free it; safe to call twice, and without effect in a forked child, where it is closed already."""
        fd, self._fd = self._fd, -1
        if fork_guard.discard(fd):
            os.close(fd)

    def keep_across_exec(self) -> None:
        """Let it survive exec(2)."""
        if fork_guard.discard(self._fd):
            self._fd = survive_exec(self._fd)
            fork_guard.add(self._fd)


def take_name(name: str) -> SocketName | None:
    """Take a name; None where another process has it.

    Raises:
        OSError: the kernel refuses sockets or this name.
    """
    from _socket import AF_UNIX, SHUT_RDWR, SOCK_DGRAM, SOCK_STREAM, socket  # the module socket takes 15 ms to import

    address = _address(name)
    if len(address) > _LONGEST + 1:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), name)
    datagrams = is_datagram(name)
    one = socket(AF_UNIX, SOCK_DGRAM if datagrams else SOCK_STREAM)
    try:
        if 0 < os.sysconf("SC_OPEN_MAX") <= one.fileno() + _SPARE:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        one.bind(address)
        if datagrams:
            one.shutdown(SHUT_RDWR)  # or anybody's datagrams, with descriptors in them, would queue up in it
    except OSError as err:
        one.close()
        if err.errno == errno.EADDRINUSE:
            return None
        raise
    return SocketName(one.detach())


def is_datagram(name: str) -> bool:
    """Return whether a name is of a datagram socket, of which connect(2) tells whether it is held."""
    return SHARE in name or OUTER in name


def _address(name: str) -> bytes:
    return b"\0" + os.fsencode(PROTOCOL + name)


def named_slots(uuid: str, prefix: str) -> list[int]:
    """Return the slots of a GPU whose names are held.

    Raises:
        OSError: there are no sockets here.
    """
    return [slot for slot, held in enumerate(_are_held(_slots(uuid, prefix))) if held]


def is_divided(uuid: str, prefix: str) -> bool:
    """Return whether a claim that allows claims inside it holds a GPU, or claims that share it; the same errors."""
    return any(_are_held([_address(outer_of(uuid, prefix)), *_slots(uuid, prefix)]))


def is_held(name: str) -> bool:
    """Return whether one name of a datagram socket is held; the same errors."""
    return _are_held([_address(name)])[0]


@cache
def _slots(uuid: str, prefix: str) -> tuple[bytes, ...]:
    begin = _address(f"{prefix}{uuid.replace('/', '_')}{SHARE}")
    return tuple((begin + b"%d" % slot).ljust(_SHORTEST + 1, b".") for slot in range(MOST_SHARERS))


def _are_held(addresses: Iterable[bytes]) -> list[bool]:
    """Return whether each of these names of datagram sockets is held, asked in this order.

    connect(2) of a datagram socket tells that at once: ECONNREFUSED is free, and any other answer is held. It tells
    nothing of stream sockets. A table of names may leave one out while others come and go.
    """
    from _socket import AF_UNIX, SOCK_DGRAM, socket

    one = socket(AF_UNIX, SOCK_DGRAM)
    try:
        return [answer != errno.ECONNREFUSED for answer in map(one.connect_ex, addresses)]
    finally:
        one.close()
