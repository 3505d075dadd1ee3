"""Doors: one bit for each GPU and for each part of one, seen by those who cannot see the entry.

A door is a datagram socket that is bound to an abstract name (see unix(7)). The name belongs to the network namespace:
it is one for all users and for all mount and PID namespaces of a host. No ``rm -rf`` removes it, and the kernel frees
it with the last descriptor. connect(2) tells whether it is held.

There is a door ``UUID`` of a GPU, and ``UUID.K`` of its part K. A claim of pieces of a GPU, such as MIG instances, has
a part of the GPU too, with a number from 32 on. A claim that allows claims inside it holds two more doors, of its
token: one that it took before ``UUID``, and one after it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from _socket import AF_UNIX, SHUT_RDWR, SOCK_DGRAM, socket  # the module socket takes 15 ms to import
from collections.abc import Callable, Collection, Iterable
from functools import cache
from itertools import compress
from typing import Any

from ..gpus.devices import PARTITION_MODES
from ..host.locks import Held, keep_across_exec

MOST_PARTS = 32
"""Parts that a GPU has at most: shares, or claims inside one claim. As many further ones are those of its pieces."""

_PROTOCOL = "safe-gpu/1/"  # what all names begin with, after a NUL byte

_LENGTH = 49  # bytes of a name at least; the columns of /proc/net/unix cannot be imitated by names of this length
_TAILS = [f".{part}".encode() for part in range(2 * MOST_PARTS)]
_OF_PIECES = range(MOST_PARTS, 2 * MOST_PARTS)


class Doors:
    """The doors that one claim holds. Those of a GPU are taken all or none.

    Args:
        tree: what stands before each UUID; "" but on simulated hosts.

    Attributes:
        parts: UUID -> K, of the GPUs of which a part is held.

    Raises:
        OSError: the kernel has no sockets, or no more descriptors. What a call has taken is given back.

    Example::

        doors = Doors()
        if not doors.take_whole("GPU-5c89852c", known=()):
            ...  # another state directory has it
        doors.release()
    """

    def __init__(self, tree: str = "") -> None:
        self._tree = tree
        self._held: list[Held] = []
        self.parts: dict[str, int] = {}

    def take_whole(self, uuid: str, known: Collection[int], token: str = "", *, divisible: bool = True) -> bool:
        """Take a GPU; False where another process holds it or a part of it.

        Args:
            known: its parts that living entries of this directory have. They are judged by their entries.
            token: of a claim that allows claims inside it.
            divisible: whether claims of its pieces have doors of this name.
        """
        first, last = self._of_token(uuid, token) if token else (b"", b"")
        return self._all_or_none(
            lambda: (
                (not token or self._take(first))
                and self._take(self._name(uuid))
                and self._held_parts(uuid, divisible) <= {*known}
                and (not token or (self._take_part(uuid, known) and self._take(last)))
            )
        )

    def take_share(self, uuid: str, known: Collection[int], *, divisible: bool = True) -> bool:
        """Take a part of a GPU beside those that are known; False where another process holds any of it."""

        def take() -> bool:
            begin = len(self._held)
            if not self._take(self._name(uuid)) or not self._held_parts(uuid, divisible) <= {*known}:
                return False
            if not self._take_part(uuid, known):
                return False
            self._held.pop(begin).release()
            return True

        return self._all_or_none(take)

    def take_inside(self, uuid: str, known: Collection[int], token: str) -> bool:
        """Take a part of a GPU inside the claim with this token; False where that claim has ended.

        The part comes first: from then on nobody else takes the GPU, even if that claim ends.
        """
        return self._all_or_none(lambda: self._take_part(uuid, known) and self.is_inside(uuid, token))

    def take_piece(self, gpu: str, mode: str = "") -> bool:
        """Take a part of the GPU of a piece, beside those of other pieces; False where another process holds all of
        that GPU, a share of it, or a piece of another mode. The part comes first, so that one of two sees the other."""
        if gpu in self.parts:  # of another piece of it
            return True
        return self._all_or_none(
            lambda: (
                self._take_part(gpu, (), _OF_PIECES)
                and (mode not in PARTITION_MODES or self._take(self._name(gpu, _tail(mode, self.parts[gpu]))))
                and not self.is_shut(gpu, mode)
            )
        )

    def is_shut(self, gpu: str, mode: str = "") -> bool:
        """Return whether a process holds all of a GPU, a share of it, or a piece of another mode: then none of its
        pieces is free."""
        modes = [other for other in PARTITION_MODES if other != mode] if mode in PARTITION_MODES else []
        tails = [_tail(other, part) for other in modes for part in _OF_PIECES]
        return any(_are_held([self._name(gpu), *self._names(gpu, [*_TAILS[:MOST_PARTS], *tails])]))

    def is_inside(self, uuid: str, token: str) -> bool:
        """Return whether the claim with this token holds a GPU. Of its two doors one is closed before the GPU's own, in
        whichever order the kernel closes the descriptors of a process that has ended."""
        return all(_are_held(self._of_token(uuid, token)))

    def are_taken(self, uuid: str, known: Collection[int], *, divisible: bool = True) -> bool:
        """Return whether another process holds a GPU, or a part of it beside those that are known."""
        return any(_are_held([self._name(uuid)])) or not self._held_parts(uuid, divisible) <= {*known}

    @property
    def are_open(self) -> bool:
        """Whether none is held."""
        return not self._held

    def release(self) -> None:
        """Give all doors back; safe to call twice."""
        self.parts = {}
        while self._held:
            self._held.pop().release()

    def keep_across_exec(self) -> None:
        """Let all doors survive exec(2), by descriptors in the same order."""
        keep_across_exec(self._held)

    def _all_or_none(self, take: Callable[[], bool]) -> bool:
        begin, parts, done = len(self._held), dict(self.parts), False
        try:
            done = take()
        finally:
            if not done:
                self.parts = parts
                while len(self._held) > begin:
                    self._held.pop().release()
        return done

    def _take_part(self, uuid: str, known: Collection[int], parts: Iterable[int] = range(MOST_PARTS)) -> bool:
        for part in parts:
            if part not in known and self._take(self._name(uuid, _TAILS[part])):
                self.parts[uuid] = part
                return True
        return False

    def _take(self, name: bytes) -> bool:
        held = _bound(name, above=self._held[-1].fd if self._held else -1)
        if held is not None:
            self._held.append(held)
        return held is not None

    def _held_parts(self, uuid: str, divisible: bool) -> set[int]:
        tails = _TAILS if divisible else _TAILS[:MOST_PARTS]
        return {*compress(range(len(tails)), _are_held(self._names(uuid, tails)))}

    def _name(self, uuid: str, tail: bytes = b"") -> bytes:
        """Return a name as bind(2) takes it.

        >>> Doors()._name("MIG-GPU-5c89852c/1/0", b".7")
        b'\\x00safe-gpu/1/MIG-GPU-5c89852c_1_0.7...............'
        """
        return self._names(uuid, [tail])[0]

    def _names(self, uuid: str, tails: Iterable[bytes]) -> list[bytes]:
        begin = b"\0" + os.fsencode(_PROTOCOL + self._tree + uuid.replace("/", "_"))
        names = [*map(begin.__add__, tails)]
        return names if len(begin) >= _LENGTH else [name.ljust(_LENGTH, b".") for name in names]

    def _of_token(self, uuid: str, token: str) -> list[bytes]:
        """Return the names of the two doors of a token, in the order in which they are taken. All users can read names,
        and from these nobody learns what stands in the entry."""
        tail = digest(f"{token}.door")
        return self._names(uuid, [f".{tail}.0".encode(), f".{tail}.1".encode()])


def _tail(mode: str, part: int) -> bytes:
    return f".{mode}.{part}".encode()


def _bound(name: bytes, above: int) -> Held | None:
    """Return a socket that is bound to a name, on a descriptor above another one; None where the name is held."""
    one = socket(AF_UNIX, SOCK_DGRAM)
    try:
        one.bind(name)
        one.shutdown(SHUT_RDWR)  # or datagrams of anybody, with descriptors in them, would queue up in it
        if one.fileno() > above:
            return Held(one.detach())
        return Held(fcntl.fcntl(one.fileno(), fcntl.F_DUPFD_CLOEXEC, above + 1))
    except OSError as err:
        if err.errno == errno.EADDRINUSE:
            return None
        raise
    finally:
        one.close()


def _are_held(names: Iterable[bytes]) -> list[bool]:
    """Return whether each name is held. ECONNREFUSED is free; any other answer is held."""
    one = socket(AF_UNIX, SOCK_DGRAM)
    try:
        return [*map(errno.ECONNREFUSED.__ne__, map(one.connect_ex, names))]
    finally:
        one.close()


def simulated_tree(path: str) -> str:
    """Return what stands before the UUIDs of a simulated host whose processes are kept in this directory."""
    return f"sim-{digest(path)}/"


@cache
def _sha256() -> Callable[[bytes], Any]:
    """Return SHA-256. hashlib would load OpenSSL, which takes longer than a claim; so does the search for a module that
    is not there."""
    try:
        if sys.version_info >= (3, 12):
            from _sha2 import sha256  # type: ignore[import-not-found, unused-ignore]
        else:
            from _sha256 import sha256  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        from hashlib import sha256
    return sha256  # type: ignore[no-any-return, unused-ignore]


def digest(text: str) -> str:
    """Return the first 16 hexadecimal digits of SHA-256."""
    return str(_sha256()(os.fsencode(text)).hexdigest()[:16])
