"""Writing a file that others read at any moment: they see the old one or the new one, and never a part."""

from __future__ import annotations

import os
import time


def write_whole(path: str, text: str) -> None:
    """Write a file of mode 0644 under another name in the same directory, and rename it into place.

    Raises:
        OSError: it cannot be written there; nothing is left behind.
    """
    path = os.path.abspath(path)
    directory, name = os.path.split(path)
    temporary = os.path.join(
        directory, f".{name}.{os.getpid()}.{time.monotonic_ns():x}.tmp"
    )  # no reader takes it for a metrics file
    # A link that somebody put there is not followed.
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
