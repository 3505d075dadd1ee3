"""Bounded reading of files that others have written.

Reading takes bounded memory, a FIFO does not block it, and an exception of a signal handler leaves no descriptor open.
"""

import os
from functools import partial
from io import FileIO

LIMIT = 1 << 16
"""Bytes that are read of one file of a process, or of a file that other users may write. They can make it larger."""

# O_NONBLOCK is for a FIFO, and for a file on which its owner holds a file lease (F_SETLEASE).
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

_PART = 1 << 16


def open_to_read(path: str, flags: int = 0, dir_fd: int | None = None) -> FileIO:
    """Return the open file; ``flags`` are more of those of os.open(), such as O_NOFOLLOW, and ``dir_fd`` is as there.

    Raises:
        OSError: it cannot be opened, or it is a directory. ValueError: the path has a NUL.
    """
    try:
        # One call, for a handler may raise after each: the file closes itself when nobody has it. An opener for open()
        # would be a function of Python with a call more.
        return next(map(FileIO, map(partial(os.open, dir_fd=dir_fd), (path,), (_FLAGS | flags,))))
    except IsADirectoryError as err:
        if isinstance(err.filename, int):  # FileIO does not close the descriptor that it refuses
            os.close(err.filename)
        raise


def read_bytes(path: str, limit: int = LIMIT) -> bytes:
    """Return the first ``limit`` bytes of a file. The kernel returns a page or less of some files at a time.

    Raises:
        OSError: it cannot be read. ValueError: the path has a NUL.
    """
    parts = []
    with open_to_read(path) as file:
        while limit > 0 and (part := file.read(min(limit, _PART))):
            parts.append(part)
            limit -= len(part)
    return b"".join(parts)


def read_start(path: str, limit: int = LIMIT) -> bytes | None:
    """Return the same; None if it cannot be read."""
    try:
        return read_bytes(path, limit)
    except (OSError, ValueError):
        return None
