"""flock(2) of a descriptor, tried once."""

from ..errors import MissingPackageError


def lock_file(fd: int) -> bool:
    """Try once to lock a descriptor of our own, exclusively; False where another open file holds the lock."""
    try:
        from filelock import lock_descriptor
    except ImportError as err:
        raise MissingPackageError(
            f"the Python package filelock is missing or too old ({err}): pip install -U filelock"
        ) from err
    return lock_descriptor(fd, blocking=False)


def unlock_file(fd: int) -> None:
    """Give the lock back before closing: a child forked meanwhile holds a copy of the descriptor and would keep it."""
    try:
        from filelock import unlock_descriptor
    except ImportError:
        return  # then nothing could be locked
    unlock_descriptor(fd)
