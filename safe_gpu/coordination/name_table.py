"""The names that claims hold on this host, and whose they are, as the kernel lists them.

The kernel is asked by NETLINK_SOCK_DIAG for AF_UNIX (sock_diag(7)), as ``ss -x`` does. /proc/net/unix takes longer and
does not tell the users, and anybody can write lines there, by a line break in a name.
"""

import os
import sys
import time
from collections.abc import Collection, Iterator
from functools import cache
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from ..gpus.devices import MOST_SHARERS
from ..host.foreign_files import read_start
from ..host.procfs import LONGEST_READ
from .socket_names import PROTOCOL, amount_of, inner_of, is_datagram, name_of, outer_of, slot_of

if TYPE_CHECKING:
    from .leases.record import LeaseRecord

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_DONE = 3  # NLMSG_DONE
_NAME_AND_UID = 0x1 | 0x40  # UDIAG_SHOW_NAME | UDIAG_SHOW_UID
_UID = 7  # UNIX_DIAG_UID

_HEADER = Struct("=IHHII")  # struct nlmsghdr: length, type, flags, sequence number, port
_REQUEST = Struct("=BBHIIIII")  # struct unix_diag_req
_START = Struct("=IH").unpack_from  # of a message: its length and type
_ATTRIBUTE = Struct("=HH").unpack_from  # struct nlattr: length and type
_INODE = Struct("=I").unpack_from
# Where a message has the type, state and inode of a socket, and then the length of its name, and the name.
_TYPE, _STATE, _NUMBER, _SIZE, _NAME = 17, 18, 20, 32, 36
_STREAM, _DATAGRAM = 1, 2
_ESTABLISHED, _CLOSE, _LISTEN = 1, 7, 10
_STATES = 1 << _ESTABLISHED | 1 << _CLOSE | 1 << _LISTEN

_BEGIN = b"\0" + PROTOCOL.encode()


class NamedSocket(NamedTuple):
    """The socket that is bound to a name; ``uid`` is the user who made it, None if that is not known."""

    inode: int
    uid: int | None


class NameTable:
    """The names of the protocol that were held at one moment, without what all of them begin with.

    Attributes:
        complete: False if there were too many sockets, of other users too, to read all.
        told: whether the kernel lists them.
    """

    def __init__(self) -> None:
        self.complete, self.told = True, False
        # type of socket -> name -> what the kernel says of it; few of them are ever asked for
        self._messages: dict[int, dict[bytes, bytes]] = {_STREAM: {}, _DATAGRAM: {}}

    def __iter__(self) -> Iterator[str]:
        return (name.decode("utf-8", "replace") for one in self._messages.values() for name in one)

    def get(self, name: str) -> NamedSocket | None:
        """Return the socket that has this name; None if there is none."""
        message = self._messages[_DATAGRAM if is_datagram(name) else _STREAM].get(os.fsencode(name))
        if message is None:
            return None
        attributes = dict(_attributes(message))
        uid = int.from_bytes(attributes.get(_UID, b""), sys.byteorder) if _UID in attributes else None
        return NamedSocket(_INODE(message, _NUMBER)[0], None if uid == _nobody() else uid)

    def of_device(self, uuid: str, prefix: str = "", *, inner: bool = False, shares: bool = True) -> list[NamedSocket]:
        """Return the sockets with the names of a device: those of a claim, of one inside it, and of shares.

        Args:
            inner: only that of a claim inside another claim.
            shares: those of shares too.
        """
        names = [kind(uuid, prefix) for kind in ((inner_of,) if inner else (name_of, inner_of, outer_of))]
        if shares and not inner and self._messages[_DATAGRAM]:
            names += [slot_of(uuid, slot, prefix) for slot in range(MOST_SHARERS)]
        return [one for one in map(self.get, names) if one is not None]

    def held_among(
        self, uuids: Collection[str], prefix: str = "", *, inner: bool = False, shares: bool = True
    ) -> frozenset[str]:
        """Return those of these devices that have a holder by :meth:`of_device`."""
        return frozenset(uuid for uuid in uuids if self.of_device(uuid, prefix, inner=inner, shares=shares))

    def owner(self, uuid: str, prefix: str = "") -> int | None:
        """Return the user who has all names of a device; None if that is not known, or it is not one user."""
        uids = {one.uid for one in self.of_device(uuid, prefix)}
        return uids.pop() if len(uids) == 1 else None

    def confirms(self, slot: str, record: "LeaseRecord", directory: os.stat_result) -> bool:
        """Return whether who has the name of a slot also has that of a share as large as its record says.

        Args:
            slot: its name.
            directory: of the leases.
        """
        if record.share is None:
            return False
        held, amount = self.get(slot), self.get(amount_of(slot, record.share, directory))
        return held is not None and amount is not None and held.uid == amount.uid

    def add(self, data: bytes) -> bool:
        """Add the sockets in an answer of the kernel. Returns whether another answer follows."""
        at, end, ours = 0, len(data), _BEGIN in data
        while at < end:
            length, kind = _START(data, at)
            if kind != _SOCK_DIAG_BY_FAMILY:
                self.told = kind == _DONE  # else NLMSG_ERROR: a kernel without unix_diag
                return False
            if not ours:
                return True
            if data.startswith(_BEGIN, at + _NAME):
                kind = data[at + _TYPE]
                named = self._messages.get(kind)
                # A connected stream may show the name of the socket that accepted it. A datagram socket looks connected
                # once somebody has asked for its name by connect(2).
                if named is not None and (kind == _DATAGRAM or data[at + _STATE] != _ESTABLISHED):
                    size = int.from_bytes(data[at + _SIZE : at + _SIZE + 2], sys.byteorder)
                    named[data[at + _NAME + len(_BEGIN) : at + _SIZE + size]] = data[at : at + length]
            at += length + 3 & ~3
        return True


def _attributes(message: bytes) -> Iterator[tuple[int, bytes]]:
    at = _SIZE
    while at < len(message):
        length, kind = _ATTRIBUTE(message, at)
        yield kind, message[at + 4 : at + length]
        at += max(4, length + 3 & ~3)


@cache
def _nobody() -> int:
    """Return the uid that stands for all users whom this user namespace does not know."""
    text = (read_start("/proc/sys/kernel/overflowuid", 16) or b"").strip()
    return int(text) if text.isdigit() else 65534


def read_names(tries: int = 2) -> NameTable:
    """Return the names that are held in this network namespace: none if the kernel does not tell.

    How long it takes depends on other users, so host.lock must not be held. If they are too many, they are read again.
    """
    from _socket import AF_NETLINK, AF_UNIX, MSG_DONTWAIT, SOCK_RAW, socket

    table = NameTable()
    until = time.thread_time() + LONGEST_READ
    request = _REQUEST.pack(AF_UNIX, 0, 0, _STATES, 0, _NAME_AND_UID, 0, 0)
    try:
        kernel = socket(AF_NETLINK, SOCK_RAW, _NETLINK_SOCK_DIAG)
    except OSError:
        return table  # a sandbox
    try:
        kernel.send(_HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _DUMP, 0, 0) + request)
        while table.complete and table.add(kernel.recv(1 << 15, MSG_DONTWAIT)):
            table.complete = time.thread_time() < until
    except OSError:
        pass  # a kernel without unix_diag
    finally:
        kernel.close()
    return table if table.complete or tries < 2 else read_names(tries - 1)
