"""The names of GPUs, which exclude claims with other state directories, as one look takes them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from ...coordination import socket_names as names
from ...coordination.scope_names import scope_name

if TYPE_CHECKING:
    from ...coordination.leases.record import LeaseRecord
    from ...coordination.locks.host_lock import LockedHost
    from ...coordination.name_table import NameTable
    from ...coordination.socket_names import SocketName
    from ..held import Claim
    from ..host.host_view import HostView


class GpuNames:
    """The names of GPUs, as one look takes them for a claim.

    Attributes:
        claim: None if the look takes nothing.
    """

    def __init__(self, host: LockedHost, view: HostView, claim: Claim | None, table: NameTable | None) -> None:
        self.claim = claim
        self._host = host
        self._view = view
        self._table = table
        self._prefix = view.snapshot.name_prefix

    def held(
        self, uuids: Collection[str], table: NameTable | None = None, *, inner: bool = False, shares: bool = True
    ) -> frozenset[str]:
        """Return those of these GPUs whose names are held, by this table or that of the look."""
        known = self._table if table is None else table
        return frozenset() if known is None else known.held_among(uuids, self._prefix, inner=inner, shares=shares)

    def take_whole(self, uuid: str, mine: list[SocketName]) -> bool:
        """Take a GPU's names; False where one of them is another's.

        Raises:
            OSError: they cannot be bound.
        """
        view, prefix = self._view, self._prefix
        if view.outer and not self._bind_all(mine, [names.inner_of(uuid, prefix)]):
            return False
        if view.outer and (view.outer.by_name or (not view.outer.listed and view.outer.is_named(uuid))):
            return view.outer.is_named(uuid)
        # The outer claim first: one inside it takes its own name, and then asks for that of the outer one.
        if not self._bind_all(mine, [names.name_of(uuid, prefix)]) or names.is_divided(uuid, prefix):
            return False
        if not view.outer and not self._is_free(names.inner_of(uuid, prefix)):
            return False
        return self.claim is None or not self.claim.delegates or self._bind_outer(self.claim, uuid, mine)

    def _bind_outer(self, claim: Claim, uuid: str, mine: list[SocketName]) -> bool:
        """Take the name that others ask for before they ask for those of claims inside this one, and the one by which
        these find it."""
        outer = names.outer_of(uuid, self._prefix)
        return self._bind_all(mine, [outer]) and self._bind_all(mine, [scope_name(outer, claim.token, mine[-1].inode)])

    def take_slot(
        self, uuid: str, mine: list[SocketName], slot: int, held: Mapping[int, LeaseRecord | None], share: int
    ) -> bool:
        """Take the names of a slot; False where another state directory has the GPU.

        The name of the whole GPU is held meanwhile, so that of two that come at once one sees the other.
        """
        prefix = self._prefix
        if self.claim is None:  # who binds only to look takes a GPU from others
            return not self.held([uuid], shares=False) and self._all_here(uuid, held)
        door = names.take_name(names.name_of(uuid, prefix))
        if door is None:
            return False
        try:
            if names.is_held(names.outer_of(uuid, prefix)) or not self._is_free(names.inner_of(uuid, prefix)):
                return False
            name = names.slot_of(uuid, slot, prefix)
            return self._all_here(uuid, held) and self._bind_all(mine, [self._amount(name, share), name])
        finally:
            door.release()

    def _all_here(self, uuid: str, held: Mapping[int, LeaseRecord | None]) -> bool:
        """Return whether all slots whose names are held are locked in this state directory, by who has the name, with
        the share that their records say.

        A forked child may hold the lock of a slot without its name, and a claim elsewhere may then have that name.
        """
        slots = names.named_slots(uuid, self._prefix)
        return all(self._has_share(names.slot_of(uuid, slot, self._prefix), held.get(slot)) for slot in slots)

    def _has_share(self, name: str, record: LeaseRecord | None) -> bool:
        share = None if record is None else record.share
        return share is not None and names.is_held(self._amount(name, share))

    def _amount(self, name: str, share: int) -> str:
        return names.amount_of(name, share, os.fstat(self._host.leases.fd))

    def _bind_all(self, mine: list[SocketName], wanted: Iterable[str]) -> bool:
        for name in wanted:
            one = names.take_name(name)
            if one is None:
                return False
            mine.append(one)
        return True

    def _is_free(self, name: str) -> bool:
        """Return whether nobody has this name, which is bound for a moment."""
        bound = names.take_name(name)
        if bound is not None:
            bound.release()
        return bound is not None
