"""The claim inside which this process runs, as the records of leases tell."""

from __future__ import annotations

import os
from collections.abc import Iterable

from .. import procfs
from ..errors import LockTimeout, StateDirError
from .leases import LeaseRecord
from .names import digest

# More leases than this are not looked at, because everybody can create some.
_MOST_LEASES = 512


def outer_claim_of_process(records: Iterable[LeaseRecord], scope: str) -> LeaseRecord | None:
    """The record of this process, else that of its nearest ancestor, else the one with this scope; None without any.

    Args:
        records: of held leases. scope: the value of SAFE_GPU_SCOPE, "" if it is not set.
    """
    known = list(records)
    for pid in (os.getpid(), *procfs.ancestors(os.getpid())):
        for record in known:
            if record.pid == pid and record.start == procfs.start_time(pid):
                return record
    return next((record for record in known if scope and record.token == digest(scope)), None)


def gpus_of_scope(scope: str) -> tuple[str, ...]:
    """UUIDs of the GPUs of this user's living claim with this value of SAFE_GPU_SCOPE, whichever driver knows them.

    Empty if there is no such claim, and if the leases cannot be read.
    """
    import time
    from itertools import islice

    from .files import LeaseDir, StateDir, state_dir_path
    from .host_lock import MINIMUM_PATIENCE, HostLock
    from .leases import is_empty, may_be_held, read_record
    from .ownership import leases_of_this_user

    if not scope:
        return ()
    secret = digest(scope)
    try:
        with StateDir(state_dir_path(), make=False) as root, LeaseDir("leases", root, make=False) as leases:
            files = (name for name in leases.names() if name.endswith(".lock") and not name.endswith(".inner.lock"))
            records = ((name, read_record(leases, name)) for name in files if not is_empty(leases, name))
            carriers = {name: record.uid for name, record in records if record is not None and record.token == secret}
        with HostLock(time.monotonic() + MINIMUM_PATIENCE, make=False) as host:
            held = {name: uid for name, uid in islice(carriers.items(), _MOST_LEASES) if may_be_held(host, name)}
            ours = leases_of_this_user(host.leases, held)
    except (LockTimeout, StateDirError, OSError):
        return ()  # the claim itself meets the same error
    return tuple(sorted(name.removesuffix(".lock") for name in ours))
