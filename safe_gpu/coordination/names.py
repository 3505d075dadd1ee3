"""Names of claimed GPUs: what no cleaner, ``rm -rf`` or private /tmp can take away from a claim.

Beside its lease files, a claim holds for each GPU a Unix stream socket that is bound to an abstract name and never
listens. Such a name belongs to the network namespace: it is one for all mount and PID namespaces and all users of a
host. There is no file, and the kernel frees it with the last descriptor.

A socket cannot be unbound while a copy of its descriptor lives. So forked children close theirs, and only exec(2) by
``safe-gpu run`` passes names on.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection

from ..procfs import lines_of
from .files import survive_exec
from .host_lock import fork_guard

__all__ = [
    "Name",
    "bind",
    "digest",
    "held_among",
    "in_use",
    "inner_of",
    "name_of",
    "scope_of",
    "simulated_prefix",
    "sockets",
]

_PROTOCOL = "safe-gpu/1/"
_LONGEST = 107  # bytes after the first, which is NUL: the kernel takes 108 in all
_STREAM = b"0001"
_SPARE = 8  # descriptors that are left to the program: where the limit is that low, lease files have to do

_digests: dict[str, str] = {}


def name_of(uuid: str, prefix: str = "") -> str:
    """The name of a claimed device, without what all names of the protocol begin with.

    Args:
        prefix: "" on a real host, else :func:`simulated_prefix`.

    >>> name_of("MIG-GPU-12/1/0")
    'MIG-GPU-12_1_0'
    """
    return prefix + uuid.replace("/", "_")


def inner_of(uuid: str, prefix: str = "") -> str:
    """The name for a claim made inside another claim."""
    return f"{name_of(uuid, prefix)}.inner"


def scope_of(uuid: str, token: str, prefix: str = "") -> str:
    """The name by which claims inside a delegating claim find it; all users can read it, so it has a hash."""
    return f"{name_of(uuid, prefix)}.{digest(token)}"


def simulated_prefix(tree: str) -> str:
    """What stands before the UUIDs of a simulated host whose processes are kept in this directory."""
    return f"sim-{digest(tree)}/"


def digest(text: str) -> str:
    """The first 16 hexadecimal digits of SHA-256. hashlib would load OpenSSL, which takes longer than a claim."""
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


class Name:
    """A name that this process holds, until :meth:`release` or until the last copy of its descriptor is closed."""

    def __init__(self, fd: int) -> None:
        fork_guard.add(fd)
        self._fd = fd
        self._owner = os.getpid()

    def release(self) -> None:
        """Free it; safe to call twice, and without effect in a forked child, where it is closed already."""
        fd, self._fd = self._fd, -1
        if fd >= 0 and os.getpid() == self._owner:
            fork_guard.discard(fd)
            os.close(fd)

    def keep_across_exec(self) -> None:
        """Let it survive exec(2)."""
        if self._fd >= 0:
            fork_guard.discard(self._fd)
            self._fd = survive_exec(self._fd)
            fork_guard.add(self._fd)


def bind(name: str) -> Name | None:
    """Take a name; None where another process has it.

    Raises:
        OSError: the kernel refuses sockets or this name.
    """
    from _socket import AF_UNIX, SOCK_STREAM, socket  # the module socket takes 15 ms to import

    address = b"\0" + os.fsencode(_PROTOCOL + name)
    if len(address) > _LONGEST + 1:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), name)
    one = socket(AF_UNIX, SOCK_STREAM)
    try:
        if 0 < os.sysconf("SC_OPEN_MAX") <= one.fileno() + _SPARE:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        one.bind(address)
    except OSError as err:
        one.close()
        if err.errno == errno.EADDRINUSE:
            return None
        raise
    return Name(one.detach())


def in_use() -> frozenset[str]:
    """All names of the protocol that are held on this host, by /proc/net/unix; none where that cannot be read."""
    return frozenset(sockets())


def sockets() -> dict[str, int]:
    """Every name of the protocol that is held on this host -> the inode of its socket, by /proc/net/unix."""
    begin = b"@" + _PROTOCOL.encode()
    found = {}
    for line in lines_of("/proc/net/unix"):
        fields = line.rstrip(b"\n").split(None, 7)  # address, references, protocol, flags, type, state, inode, path
        # The kernel writes names as they are: with line breaks in one, anybody writes whole lines.
        inode = fields[6] if len(fields) == 8 else b""
        if inode.isdigit() and len(inode) < 20 and fields[4] == _STREAM and fields[7].startswith(begin):
            found[fields[7][len(begin) :].decode("utf-8", "replace")] = int(inode)
    return found


def held_among(uuids: Collection[str], prefix: str = "", *, inner: bool = False) -> frozenset[str]:
    """Those of these devices whose name is held: by a claim, by one inside another claim too.

    Args:
        inner: ask for the names of claims inside another claim only.
    """
    if not uuids:
        return frozenset()
    held = in_use()
    return frozenset(
        uuid for uuid in uuids if inner_of(uuid, prefix) in held or (not inner and name_of(uuid, prefix) in held)
    )
