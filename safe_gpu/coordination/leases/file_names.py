"""The names of the files in ``leases/``."""

from collections.abc import Iterable, Iterator

from ...gpus.devices import MOST_SHARERS

INNER_SUFFIX = ".inner.lock"


def lease_name(uuid: str) -> str:
    """Return the lease file of a device.

    >>> lease_name("GPU-12")
    'GPU-12.lock'
    """
    # Old MIG names hold slashes (MIG-GPU-uuid/1/0); a file name cannot.
    return uuid.replace("/", "_") + ".lock"


def inner_name(uuid: str) -> str:
    """Return the lease file of a claim made inside another claim."""
    return uuid.replace("/", "_") + INNER_SUFFIX


def names_of_host(uuids: Iterable[str]) -> Iterator[str]:
    """Yield every file that a claim of these devices may lock."""
    for uuid in uuids:
        yield from leases_of([uuid])
        for slot in range(MOST_SHARERS):
            yield slot_name(uuid, slot)


def slot_name(uuid: str, slot: int) -> str:
    """Return the file of a share.

    >>> slot_name("GPU-12", 3)
    'GPU-12.share.3.lock'
    """
    return f"{uuid.replace('/', '_')}.share.{slot}.lock"


def fault_name(uuid: str) -> str:
    """Return the file with the note on a device.

    >>> fault_name("GPU-12")
    'GPU-12.fault'
    """
    return uuid.replace("/", "_") + ".fault"


def leases_of(uuids: Iterable[str]) -> tuple[str, ...]:
    """Return the lease files of these devices, for claims and for claims inside them."""
    return tuple(name for uuid in uuids for name in (lease_name(uuid), inner_name(uuid)))
