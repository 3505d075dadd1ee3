"""How claims inside a claim find it: by the token in ``SAFE_GPU_SCOPE``, and by names that the kernel lists.

For each of its GPUs a claim that allows claims inside it has a socket that others ask for, and a second one whose name
has the hash of the token and of the inode of the first. So what is found is the claim with this token: either name
alone may be another claim's by now, or what is left of one that dies.
"""

import time
from collections.abc import Iterable

from ..errors import LockTimeout, StateDirError
from ..gpus.devices import MOST_SHARERS
from .files.state_dir import opened
from .holders.by_kernel import leases_of_this_user, socket_of_this_user
from .holders.outer_claim import leases_with_token
from .leases.lease import may_be_held
from .locks.host_lock import MINIMUM_PATIENCE, HostLock
from .name_table import NameTable, read_names
from .scope_names import has_names_here, outer_name, scope_name
from .socket_names import OUTER, SHARE, digest, is_datagram

SLOTS = (None, *range(MOST_SHARERS))
"""What a claim may hold of a GPU: None is the whole of it."""


def _is_of_scope(table: NameTable, outer: str, token: str) -> bool:
    socket = table.get(outer)
    if socket is None or table.get(scope_name(outer, token, socket.inode)) is None:
        return False
    return socket_of_this_user(socket)


def slots_of_scope(table: NameTable, uuids: Iterable[str], token: str, prefix: str) -> dict[str, int | None]:
    """Return UUID -> slot, of those of these GPUs that this user's claim with this token holds by name."""
    places = ((uuid, slot) for uuid in uuids for slot in SLOTS)
    return {uuid: slot for uuid, slot in places if _is_of_scope(table, outer_name(uuid, prefix, slot), token)}


def gpus_of_scope(scope: str) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs of this user's living claim with this value of SAFE_GPU_SCOPE, whichever driver
    knows them.

    Empty if there is no such claim, and if the leases cannot be read. If the claim has no names, because its process
    has ended or others share no network namespace with it, it is empty too if there are more than 1,000 files.
    """
    if not scope:
        return ()
    table = read_names()
    ours = [name for name in table if is_datagram(name) and _is_of_scope(table, name, scope)]
    if ours:
        devices = (name.rstrip(".").removesuffix(OUTER).partition(SHARE)[0] for name in ours)
        return tuple(sorted(name.rpartition("/")[2] for name in devices))
    try:
        with opened("leases", make=False) as leases:
            files = [name for name in leases.few_names() or () if name.endswith(".lock") and ".inner." not in name]
            carriers, here = leases_with_token(leases, files, digest(scope)), table.told and has_names_here(scope)
            mine, _ = leases_of_this_user(leases, carriers, inherited=here)
        with HostLock(time.monotonic() + MINIMUM_PATIENCE, make=False) as host:
            held = (name for name in mine if may_be_held(host, name))
            return tuple(sorted({name.removesuffix(".lock").partition(SHARE)[0] for name in held}))
    except (LockTimeout, StateDirError, OSError):
        return ()  # the claim itself meets the same error
