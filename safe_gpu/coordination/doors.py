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
import hashlib
import os
from _socket import AF_UNIX, SHUT_RDWR, SOCK_DGRAM, socket  # the module socket takes 15 ms to import
from collections.abc import Collection, Iterable
from contextlib import ExitStack

from ..gpus.devices import PARTITION_MODES
from ..host.locks import Held, keep_across_exec

MOST_PARTS = 32
"""Parts that a GPU has at most: shares, or claims inside one claim. As many further ones are those of its pieces."""

SHARE_PARTS = range(MOST_PARTS)
"""Numbers of the parts that shares have, and claims inside a claim."""

PIECE_PARTS = range(MOST_PARTS, 2 * MOST_PARTS)
"""Numbers of the parts that claims of pieces have. Were they those of shares, a claim of a piece could not tell a share
in another state directory from another piece."""

_PROTOCOL = "safe-gpu/1/"  # what all names begin with, after a NUL byte

_LENGTH = 49  # bytes of a name at least; the columns of /proc/net/unix cannot be imitated by names of this length


class Doors:
    """The doors that one claim holds. Each call takes all that it needs, or nothing.

    Args:
        prefix: of each UUID in the names; "" but on simulated hosts.

    Attributes:
        parts: UUID -> K, of the GPUs of which a part is held.

    Raises:
        OSError: the kernel has no sockets, or no more descriptors. What a call has taken is given back.

    Example::

        doors = Doors()
        if not doors.take_whole("GPU-5c89852c", parts_here=()):
            ...  # another state directory has it
        doors.release()
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._held: list[Held] = []
        self.parts: dict[str, int] = {}

    def take_whole(self, uuid: str, parts_here: Collection[int], token: str = "") -> bool:
        """Take a GPU; False where another process holds it or a part of it.

        Args:
            parts_here: its parts that living entries of this directory have: these entries themselves say whether they
                are in the way. Parts of pieces are not excused by it.
            token: of a claim that allows claims inside it.
        """
        with ExitStack() as undo:
            undo.callback(self._release_from, len(self._held), dict(self.parts))
            if token:
                first, last = self._names_of_token(uuid, token)
                if not self._take(first):
                    return False
            if not self._take(self._name(uuid)):
                return False
            if self._parts_elsewhere(uuid, parts_here):
                return False
            if token:
                if not self._take_part(uuid, SHARE_PARTS, parts_here):
                    return False
                if not self._take(last):
                    return False
            undo.pop_all()
        return True

    def take_share(self, uuid: str, parts_here: Collection[int]) -> bool:
        """Take a part of a GPU beside those of living entries here; False where another process holds any of it."""
        with ExitStack() as undo:
            before = len(self._held)
            undo.callback(self._release_from, before, dict(self.parts))
            if not self._take(self._name(uuid)):
                return False
            if self._parts_elsewhere(uuid, parts_here):
                return False
            if not self._take_part(uuid, SHARE_PARTS, parts_here):
                return False
            undo.pop_all()
        self._held.pop(before).release()  # who takes another share needs it for a moment
        return True

    def take_inside(self, uuid: str, parts_here: Collection[int], token: str) -> bool:
        """Take a part of a GPU inside the claim with this token; False where that claim has ended.

        The part comes first: from then on nobody else takes the GPU, even if that claim ends.
        """
        with ExitStack() as undo:
            undo.callback(self._release_from, len(self._held), dict(self.parts))
            if not self._take_part(uuid, SHARE_PARTS, parts_here):
                return False
            if not self.is_inside(uuid, token):
                return False
            undo.pop_all()
        return True

    def take_part_of_pieces(self, gpu: str, mode: str = "") -> bool:
        """Take a part of a GPU for pieces of it; False where another process has all of that GPU, a share of it or a
        piece of it in another mode, and where no part is left.

        The part comes first, and who takes all of the GPU asks for it after taking that: of two, one sees the other.

        Args:
            gpu: its name, the same in all modes.
            mode: in which it is divided; "" of GPUs without modes.
        """
        if gpu in self.parts:  # for another piece of it
            return True
        with ExitStack() as undo:
            undo.callback(self._release_from, len(self._held), dict(self.parts))
            if not self._take_part(gpu, PIECE_PARTS):
                return False
            if mode in PARTITION_MODES and not self._take(self._name(gpu, f".{mode}.{self.parts[gpu]}")):
                return False
            if self.is_held_against_pieces(gpu, mode):
                return False
            undo.pop_all()
        return True

    def is_held_against_pieces(self, gpu: str, mode: str = "") -> bool:
        """Return whether a process holds all of a GPU, a share of it, or a piece of it in another mode than this: then
        none of its pieces is free."""
        names = [self._name(gpu)]
        names += [self._name(gpu, f".{part}") for part in SHARE_PARTS]
        if mode:
            others = [other for other in PARTITION_MODES if other != mode]
            names += [self._name(gpu, f".{other}.{part}") for other in others for part in PIECE_PARTS]
        return any(_are_held(names))

    def has_no_part_for_pieces(self, gpu: str) -> bool:
        """Return whether as many claims hold pieces of a GPU as can."""
        return all(_are_held(self._name(gpu, f".{part}") for part in PIECE_PARTS))

    def is_inside(self, uuid: str, token: str) -> bool:
        """Return whether the claim with this token holds a GPU. Of its two doors one is closed before the GPU's own, in
        whichever order the kernel closes the descriptors of a process that has ended."""
        return all(_are_held(self._names_of_token(uuid, token)))

    def are_taken(self, uuid: str, parts_here: Collection[int]) -> bool:
        """Return whether another process holds a GPU, or a part of it beside those of living entries here."""
        return any(_are_held([self._name(uuid)])) or bool(self._parts_elsewhere(uuid, parts_here))

    def is_any_part_taken(self, uuid: str, parts: Collection[int]) -> bool:
        """Return whether a process holds one of these parts of a GPU."""
        return any(_are_held(self._name(uuid, f".{part}") for part in sorted(parts)))

    @property
    def holds_any(self) -> bool:
        """Whether at least one is held."""
        return len(self._held) > 0

    @property
    def are_intact(self) -> bool:
        """Whether none of those that were taken has been closed by the program."""
        return all(door.fd >= 0 for door in self._held)

    def release(self) -> None:
        """Give all doors back; safe to call twice."""
        self.parts = {}
        while self._held:
            self._held.pop().release()

    def keep_across_exec(self) -> None:
        """Let all doors survive exec(2), by descriptors in the same order."""
        keep_across_exec(self._held)

    def _take_part(self, uuid: str, parts: Iterable[int], parts_here: Collection[int] = ()) -> bool:
        """Take the lowest of these parts that nobody holds; False if there is none."""
        for part in parts:
            if part not in parts_here and self._take(self._name(uuid, f".{part}")):
                self.parts[uuid] = part
                return True
        return False

    def _take(self, name: bytes) -> bool:
        """Bind a name, on a descriptor above all that are held: they are kept, and closed, in this order."""
        highest = -1
        if self._held:
            highest = self._held[-1].fd
        held = bind_name(name, above=highest)
        if held is None:
            return False
        self._held.append(held)
        return True

    def _release_from(self, number: int, parts: dict[str, int]) -> None:
        """Give back all doors but the first ones, as many as ``number``; ``parts`` is what was held with these."""
        self.parts = parts
        while len(self._held) > number:
            self._held.pop().release()

    def _parts_elsewhere(self, uuid: str, parts_here: Collection[int]) -> set[int]:
        """Return the parts of a GPU that are held, without those of shares of living entries here."""
        parts = [part for part in SHARE_PARTS if part not in parts_here]
        parts += PIECE_PARTS
        are_held = _are_held(self._name(uuid, f".{part}") for part in parts)
        return {part for part, is_held in zip(parts, are_held, strict=True) if is_held}

    def _name(self, uuid: str, tail: str = "") -> bytes:
        """Return a name as bind(2) takes it.

        >>> Doors()._name("MIG-GPU-5c89852c/1/0", ".7")
        b'\\x00safe-gpu/1/MIG-GPU-5c89852c_1_0.7...............'
        """
        name = b"\0" + os.fsencode(_PROTOCOL + self._prefix + uuid.replace("/", "_") + tail)
        return name.ljust(_LENGTH, b".")

    def _names_of_token(self, uuid: str, token: str) -> tuple[bytes, bytes]:
        """Return the names of the two doors of a token, in the order in which they are taken. All users can read names,
        and from these nobody learns what stands in the entry."""
        tail = digest(f"{token}.door")
        return self._name(uuid, f".{tail}.0"), self._name(uuid, f".{tail}.1")


def bind_name(name: bytes, above: int) -> Held | None:
    """Return a socket that is bound to a name, on a descriptor above another one; None where the name is held.

    Raises:
        OSError: the kernel has no sockets, or no more descriptors.
    """
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
        return [one.connect_ex(name) != errno.ECONNREFUSED for name in names]
    finally:
        one.close()


def uuid_prefix(path: str) -> str:
    """Return the prefix of UUIDs in the names of doors, on a simulated host whose processes are kept in this
    directory."""
    return f"sim-{digest(path)}/"


def digest(text: str) -> str:
    """Return the first 16 hexadecimal digits of SHA-256."""
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:16]
