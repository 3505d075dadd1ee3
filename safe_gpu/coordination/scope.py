"""How claims inside a claim find it: by the token in ``SAFE_GPU_SCOPE``, and by names that the kernel lists.

For each of its GPUs a claim that allows claims inside it has a socket that others ask for, and a second one whose name
has the hash of the token and of the inode of the first. So what is found is the claim with this token: either name
alone may be another claim's by now, or what is left of one that dies.
"""

import time
from collections.abc import Iterable

from ..errors import LockTimeout, StateDirError
from .files.state_dir import opened
from .holders.by_kernel import leases_of_this_user, socket_of_this_user
from .holders.outer_claim import leases_with_token
from .leases.lease import may_be_held
from .locks.host_lock import MINIMUM_PATIENCE, HostLock
from .name_table import NameTable, read_names
from .scope_names import has_names_here, scope_name
from .socket_names import OUTER, SHARE, digest, outer_of


def _is_of_scope(table: NameTable, outer: str, token: str) -> bool:
    socket = table.get(outer)
    if socket is None or table.get(scope_name(outer, token, socket.inode)) is None:
        return False
    return socket_of_this_user(socket)


def named_in_scope(table: NameTable, uuids: Iterable[str], token: str, prefix: str) -> frozenset[str]:
    """Return those of these GPUs that this user's claim with this token holds by name."""
    return frozenset(uuid for uuid in uuids if _is_of_scope(table, outer_of(uuid, prefix), token))


def gpus_of_scope(scope: str) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs of this user's living claim with this value of SAFE_GPU_SCOPE, whichever driver
    knows them.

    Empty if there is no such claim, and if the leases cannot be read. If the claim has no names, because its process
    has ended or others share no network namespace with it, it is empty too if there are more than 1,000 files.
    """
    if not scope:
        return ()
    table = read_names()
    ours = [name for name in table if OUTER in name and _is_of_scope(table, name, scope)]
    if ours:
        return tuple(sorted(name.rstrip(".").removesuffix(OUTER).rpartition("/")[2] for name in ours))
    try:
        with opened("leases", make=False) as leases:
            names = (name for name in leases.few_names() or () if name.endswith(".lock"))
            files = [name for name in names if ".inner." not in name and SHARE not in name]
            carriers, here = leases_with_token(leases, files, digest(scope)), table.told and has_names_here(scope)
            mine, _ = leases_of_this_user(leases, carriers, inherited=here)
        with HostLock(time.monotonic() + MINIMUM_PATIENCE, make=False) as host:
            return tuple(sorted(name.removesuffix(".lock") for name in mine if may_be_held(host, name)))
    except (LockTimeout, StateDirError, OSError):
        return ()  # the claim itself meets the same error
