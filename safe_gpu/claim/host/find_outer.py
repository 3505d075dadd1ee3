"""The search for the claim inside which this process claims, by the token that this inherited.

The variable ``SAFE_GPU_SCOPE`` also reaches processes outside that claim (``qsub -V``, ssh, tmux), so its token is
valid only for GPUs that this user holds by the names of that claim. Records, which everybody may write, count only
where the kernel lists no names, and for a claim that has none here: its token says so, or a child has inherited its
leases, which is all that forked children keep.
"""

from typing import TYPE_CHECKING

from ...coordination.holders.by_kernel import leases_of_this_user
from ...coordination.holders.outer_claim import leases_with_token
from ...coordination.leases.file_names import lease_name
from ...coordination.leases.record import LeaseRecord
from ...coordination.name_table import read_names
from ...coordination.scope import named_in_scope
from ...coordination.scope_names import has_names_here
from ...coordination.socket_names import digest
from .outer_claim import OuterClaim

if TYPE_CHECKING:
    from ...coordination.files.state_dir import StateDir
    from ...gpus.devices import HostSnapshot

_READINGS = 3  # one reading of the names can miss some while others come and go

_UNKNOWN = LeaseRecord(0, None, -1, "", "", None, None, (), 0.0, "")


def find_outer(leases: "StateDir", snapshot: "HostSnapshot", token: str) -> OuterClaim:
    """Return this user's claim with this token. Host.lock must not be held.

    The record of a GPU whose lease file is not in this state directory is that of another GPU of the claim, or has
    pid 0.
    """
    uuids = [gpu.uuid for gpu in snapshot.gpus]
    files = {lease_name(uuid): uuid for uuid in uuids}
    carriers = leases_with_token(leases, files, digest(token))
    records = {files[name]: record for name, record in carriers.items()}
    listed = here = has_names_here(token)
    if here:
        expected = {uuid for record in records.values() for uuid in record.gpus}.intersection(uuids)
        found: frozenset[str] = frozenset()
        for _ in range(_READINGS):
            table = read_names()
            found |= named_in_scope(table, uuids, token, snapshot.name_prefix)
            if found and expected <= found:
                break
        if found or not table.complete:
            other = next(iter(records.values()), _UNKNOWN)
            gpus = {uuid: records.get(uuid, other) for uuid in uuids if uuid in found}
            return OuterClaim(gpus, by_name=True, known=table.complete, prefix=snapshot.name_prefix)
        listed = table.told
    ours, known = leases_of_this_user(leases, carriers, inherited=here and listed)
    gpus = {files[name]: record for name, record in carriers.items() if name in ours}
    return OuterClaim(gpus, listed=listed, known=known, prefix=snapshot.name_prefix)
