"""Names of claimed GPUs: what no cleaner, ``rm -rf`` or private /tmp can take away from a claim.

Beside its lease files, a claim holds for each GPU a Unix stream socket that is bound to an abstract name and never
listens; for a share of a GPU it is a datagram socket. Such a name belongs to the network namespace: it is one for all
mount and PID namespaces and all users of a host. There is no file, and the kernel frees it with the last descriptor.

A socket cannot be unbound while a copy of its descriptor lives. So forked children close theirs, and only exec(2) by
``safe-gpu run`` passes names on.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterable
from functools import cache

from ..devices import MOST_SHARERS
from ..procfs import lines_of
from .files import survive_exec
from .locks import fork_guard

_PROTOCOL = "safe-gpu/1/"
_LONGEST = 107  # bytes after the first, which is NUL: the kernel takes 108 in all
_SPARE = 8  # descriptors that are left to the program: where the limit is that low, lease files have to do

# A line of /proc/net/unix (unix_seq_show() in the kernel's net/unix/af_unix.c) is an address of 16 bytes, which may be
# hidden, then ": %08X %08X %08X %04X %02X %5lu" for references, protocol, flags, type, state and inode, and " @NAME".
_ADDRESS = 16
_COLUMNS = b": 00000000 00000000 00000000 0000 00 "
_STREAMS = b" 00000000 00000000 0001 ", b" 00000000 00010000 0001 "  # protocol to type; the second one listens
_DATAGRAMS = (b" 00000000 00000000 0002 ",)
_TO_ZERO = bytes.maketrans(b"123456789ABCDEF", b"0" * 15)
_INODE = _ADDRESS + len(_COLUMNS)
_BEGIN = b" @" + _PROTOCOL.encode()
_SHORTEST = 48  # bytes of a name: from its "\n" to "@" a forged line has 61, and no path or name is longer than 108

_SHARE = ".share."  # in names of shares, which are of datagram sockets: connect(2) tells whether one is held

_digests: dict[str, str] = {}


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


def scope_of(uuid: str, token: str, prefix: str = "", slot: int | None = None) -> str:
    """Return the name by which claims inside a delegating claim find it; all users can read it, so it has a hash."""
    return _padded(uuid, f"{_slot_suffix(slot)}.{digest(token)}", prefix)


def place_of(uuid: str, slot: int, directory: os.stat_result, prefix: str = "") -> str:
    """Return the second name of a share, which says in which directory of leases its slot is locked."""
    return scope_of(uuid, f"{directory.st_dev}:{directory.st_ino}", prefix, slot)


def slot_of(uuid: str, slot: int, prefix: str = "", *, inner: bool = False) -> str:
    """Return the name of a share: that of a claim, or of one made inside it."""
    return _padded(uuid, _slot_suffix(slot) + (".inner" if inner else ""), prefix)


def _slot_suffix(slot: int | None) -> str:
    return "" if slot is None else f"{_SHARE}{slot}"


def _padded(uuid: str, suffix: str, prefix: str) -> str:
    return f"{prefix}{uuid.replace('/', '_')}{suffix}".ljust(_SHORTEST - len(_PROTOCOL), ".")


def simulated_prefix(tree: str) -> str:
    """Return what stands before the UUIDs of a simulated host whose processes are kept in this directory."""
    return f"sim-{digest(tree)}/"


def digest(text: str) -> str:
    """Return the first 16 hexadecimal digits of SHA-256. hashlib would load OpenSSL, which takes longer than a
    claim."""
    if text not in _digests:
        try:
            from _sha2 import sha256  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            try:
                from _sha256 import sha256  # type: ignore[import-not-found, unused-ignore]
            except ImportError:
                from hashlib import sha256
        _digests[text] = sha256(os.fsencode(text)).hexdigest()[:16]
    return _digests[text]


class SocketName:
    """A name that this process holds, until :meth:`release` or until the last copy of its descriptor is closed."""

    def __init__(self, fd: int) -> None:
        fork_guard.add(fd)
        self._fd = fd

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


def bind(name: str) -> SocketName | None:
    """Take a name; None where another process has it.

    Raises:
        OSError: the kernel refuses sockets or this name.
    """
    from _socket import AF_UNIX, SHUT_RDWR, SOCK_DGRAM, SOCK_STREAM, socket  # the module socket takes 15 ms to import

    address = _address(name)
    if len(address) > _LONGEST + 1:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), name)
    datagrams = _SHARE in name
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


def _address(name: str) -> bytes:
    return b"\0" + os.fsencode(_PROTOCOL + name)


def held_slots(uuid: str, prefix: str) -> list[int]:
    """Return the slots of a GPU whose names are held: by a claim, or by one inside it.

    Raises:
        OSError: there are no sockets here.
    """
    return sorted({number // 2 for number, held in enumerate(_are_held(_slots(uuid, prefix))) if held})


def is_held(name: str) -> bool:
    """Return whether one name of a share is held; the same errors as :func:`held_slots`."""
    return _are_held([_address(name)])[0]


_TAILS = tuple(b"%d%b" % (slot, tail) for slot in range(MOST_SHARERS) for tail in (b"", b".inner"))


@cache
def _slots(uuid: str, prefix: str) -> tuple[bytes, ...]:
    begin = _address(f"{prefix}{uuid.replace('/', '_')}{_SHARE}")
    return tuple((begin + tail).ljust(_SHORTEST + 1, b".") for tail in _TAILS)


def _are_held(addresses: Iterable[bytes]) -> list[bool]:
    """Return whether each of these names of shares is held.

    connect(2) of a datagram socket tells that at once: ECONNREFUSED is free, and any other answer is held. It tells
    nothing of stream sockets. /proc/net/unix may leave out a name while others come and go.
    """
    from _socket import AF_UNIX, SOCK_DGRAM, socket

    one = socket(AF_UNIX, SOCK_DGRAM)
    try:
        return [answer != errno.ECONNREFUSED for answer in map(one.connect_ex, addresses)]
    finally:
        one.close()


def in_use() -> frozenset[str]:
    """Return all names of the protocol that are held on this host, by /proc/net/unix; none where that cannot be
    read."""
    return frozenset(sockets())


def sockets() -> dict[str, int]:
    """Return every name of the protocol that is held on this host -> the inode of its socket, by /proc/net/unix.

    The kernel writes names and paths as they are: by a line break in one, a neighbour writes a line with any inode. In
    the exact columns of the kernel, which alone count, such a line has no room for a name of the protocol.
    """
    found = {}
    for line in lines_of("/proc/net/unix"):
        at = line.find(_BEGIN, _INODE)
        if at < 0 or len(line) - at < len(b" @\n") + _SHORTEST:
            continue
        columns, inode = line[_ADDRESS:_INODE], line[_INODE:at]
        name = line[at + len(_BEGIN) : -1].decode("utf-8", "replace")
        if (
            columns[10:34] in (_DATAGRAMS if _SHARE in name else _STREAMS)
            and columns.translate(_TO_ZERO) == _COLUMNS
            and len(inode) <= 20
            and inode.lstrip(b" ").isdigit()
            and inode == b"%5d" % (number := int(inode))
        ):
            found[name] = number
    return found


def held_among(uuids: Collection[str], prefix: str = "", *, inner: bool = False, shares: bool = True) -> frozenset[str]:
    """Return those of these devices whose name is held: by a claim, by one inside another claim too.

    Args:
        inner: ask for the names of claims inside another claim only.
        shares: ask for the names of shares too.
    """
    if not uuids:
        return frozenset()
    held = in_use()
    found = {uuid for uuid in uuids if inner_of(uuid, prefix) in held or (not inner and name_of(uuid, prefix) in held)}
    shared = {name.partition(_SHARE)[0] for name in held if _SHARE in name} if shares and not inner else ()
    if shared:
        found |= {uuid for uuid in uuids if f"{prefix}{uuid.replace('/', '_')}" in shared}
    return frozenset(found)
