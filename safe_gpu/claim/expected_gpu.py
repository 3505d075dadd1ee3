"""The check of a worker that an engine started: ``SAFE_GPU_EXPECT`` names the GPU that it must see.

``safe-gpu run`` and ``safe-gpu bind`` make it before they become the command, so programs that are not Python are
checked too.
"""

import os
import time

from ..coordination.leases.file_names import lease_name
from ..coordination.leases.lease import probe
from ..coordination.leases.record import read_record
from ..coordination.locks.host_lock import HostLock
from ..coordination.socket_names import digest
from ..drivers import opened_driver
from ..errors import HolderLostError, WrongDeviceError
from ..runtimes.visible_devices import read_visible, visible_variables

EXPECT = "SAFE_GPU_EXPECT"


def check_expected_gpu() -> None:
    """Check that this process sees only the GPU of ``SAFE_GPU_EXPECT``, and that it is still held for its workers.

    Without the variable it does nothing. The variable is removed after the check, so that it does not reach jobs which
    the command submits.

    Raises:
        WrongDeviceError: the environment selects another GPU, several or none, or this host does not have the GPU.
        HolderLostError: the claim that held the GPU has ended.
        NoDriverError, LockTimeout, StateDirError: the driver, host.lock or the state directory cannot be used.
    """
    uuid = os.environ.get(EXPECT)
    if not uuid:
        return
    _check_visible(uuid)
    if not is_held(uuid, os.environ.get("SAFE_GPU_SCOPE")):
        host = os.uname().nodename
        raise HolderLostError(
            f"{host}: GPU {uuid}, for which this process was started ({EXPECT}), is no longer held by its claim: claim "
            f"again, or unset {EXPECT} if it was inherited by mistake",
            host=host,
        )
    del os.environ[EXPECT]


def _check_visible(uuid: str) -> None:
    with opened_driver() as driver:
        snapshot = driver.snapshot()
    name = visible_variables(snapshot)[0]
    shown = os.environ.get(name)
    visible_limit = read_visible(os.environ, snapshot)
    seen = tuple(gpu.uuid for gpu in snapshot.gpus) if visible_limit is None else visible_limit.uuids
    if seen == (uuid,):
        return
    raise WrongDeviceError(
        f"this process was started for GPU {uuid} ({EXPECT}), and on {os.uname().nodename} "
        f"{f'without {name}' if shown is None else f'{name}={shown}'} it sees "
        f"{', '.join(seen) if 0 < len(seen) <= 2 else f'{len(seen)} GPUs'}: start it with the policy and the "
        f"environment of the claim, or unset {EXPECT} if it was inherited by mistake",
        expected=uuid,
        actual=", ".join(seen),
    )


def is_held(uuid: str, token: str | None) -> bool:
    """Return whether a claim holds the lease of this GPU; with a ``token`` (SAFE_GPU_SCOPE), whether that claim does.

    Raises:
        LockTimeout, StateDirError: the leases cannot be read.
    """
    # Engines start many workers at once and spin meanwhile: on few cores a holder of host.lock waits seconds for a CPU.
    with HostLock(time.monotonic() + 60.0) as host:
        if not probe(host, lease_name(uuid)):
            return False
        record = read_record(host.leases, lease_name(uuid))
    return token is None or (record is not None and record.token == digest(token))
