"""What one look needs of the kernel's tables of locks and names, which are read just before host.lock is taken.

Other users can make these tables long, so they are never read while host.lock is held. What is decided under it comes
from here, and from the locks and names themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...coordination.leases.lease import is_empty
from ..host.outer_claim import OuterClaim

if TYPE_CHECKING:
    from ...coordination.holders.by_kernel import LeaseOwners
    from ...coordination.locks.host_lock import LockedHost
    from ...coordination.name_table import NameTable
    from ..arguments import ClaimOptions
    from ..host.host_view import HostView


class KernelFacts:
    """What was read for one look, and nothing of what it cannot need.

    Attributes:
        owners: whose leases are; None on a host without limits of users.
        scope: the claim that SAFE_GPU_SCOPE names.
        names: the names that are held; None if the look does not need them.
    """

    def __init__(self, owners: LeaseOwners | None, scope: OuterClaim, names: NameTable | None) -> None:
        self.owners = owners
        self.scope = scope
        self.names = names


def read_facts(host: LockedHost, view: HostView, options: ClaimOptions, *, taking: bool, joins: bool) -> KernelFacts:
    """Read what a look needs. A claim without limits that nobody waits ahead of needs nothing.

    Args:
        taking: whether the look takes GPUs. If not, names are not bound, and only the table tells which are held.
        joins: whether it may join the queue.
    """
    snapshot, queue = view.snapshot, not host.queue.is_empty()
    used = (gpu for gpu in snapshot.gpus if gpu.processes and queue)
    strangers = any(is_empty(host.leases, view.outer.lease_name(gpu.uuid)) for gpu in used)
    facts = KernelFacts(None, OuterClaim(), None)
    if options.quota is not None:
        facts.owners = options.quota.owners(host.leases, snapshot, others=queue, joins=joins)
    if view.scope:
        from ..host.find_outer import find_outer

        facts.scope = find_outer(host.leases, snapshot, view.scope)
    if strangers or not taking:
        from ...coordination.name_table import read_names

        facts.names = read_names()
    return facts
