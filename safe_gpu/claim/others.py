"""What others hold, by one listing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..coordination.entry import Entry
from ..coordination.holders import Claims
from ..gpus.devices import Gpu, Holder
from ..host import procfs
from ..selection.sharing import promised_room


@dataclass(frozen=True)
class HeldByOthers:
    """The claims of others by one listing, as a claim sees them. No directory service is asked, since host.lock may be
    held.

    Attributes:
        claims: the living claims.
        enclosing: the claim inside which this one is made; None of one inside none.
        shared: UUID -> whose claims share it, of the GPUs that this claim may share.
    """

    claims: Claims = field(default_factory=lambda: Claims(()))
    enclosing: Entry | None = None
    shared: Mapping[str, Holder] = field(default_factory=dict)

    @property
    def inside(self) -> str:
        """Hash of the token of the enclosing claim; "" of a claim inside none."""
        if self.enclosing is None:
            return ""
        return self.enclosing.token

    def in_the_way(self, gpu: Gpu) -> list[Entry]:
        """Return the claims that take room of a GPU from this one."""
        return self.claims.in_the_way(gpu.uuid, self.inside)

    def holders(self) -> dict[str, Holder]:
        """Return UUID -> who holds it, or whose claims share it."""
        return self.claims.holders_as_written(self.inside)

    def room_of(self, gpu: Gpu) -> int:
        """Return the bytes of a GPU that are not promised to claims that share it."""
        if gpu.uuid not in self.shared:
            return promised_room(gpu, ())
        return promised_room(gpu, self.shared[gpu.uuid].sharers)


def pids_of_enclosing(enclosing: Entry) -> tuple[int, ...]:
    """Return the processes that are those of the enclosing claim: this process is a descendant of them."""
    is_visible_here = not procfs.namespace_text(enclosing.pidns or None)
    if enclosing.pid and is_visible_here:
        return (enclosing.pid,)
    return tuple(procfs.ancestors(os.getpid()))


def owner_of(enclosing: Entry) -> str:
    """Return ``the claim of process 4711``, with where that is if it is not here."""
    owner = f"the claim of process {enclosing.pid or '?'}"
    namespace = procfs.namespace_text(enclosing.pidns or None)
    if namespace:
        owner += f" {namespace}"
    return owner
