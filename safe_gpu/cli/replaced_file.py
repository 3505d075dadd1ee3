"""A file that others read at any moment: they see the old one or the new one, never a part."""

import os
import stat
import sys
import time
from contextlib import suppress


def write_whole(path: str, content: str | bytes) -> None:
    """Write a file of mode 0644 under another name in the same directory, and rename it into place.

    Raises:
        OSError: it cannot be written there, or would replace what is no regular file; nothing is left behind.
    """
    path = os.path.abspath(path)
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise OSError(f"{path} is there and is no regular file, so it is not replaced: name another file")
    directory, name = os.path.split(path)
    temporary = os.path.join(
        directory, f".{name}.{os.getpid()}.{time.monotonic_ns():x}.tmp"
    )  # no reader takes it for a metrics file
    # A link that somebody put there is not followed.
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_output(text: str, path: str | None) -> None:
    """Write a file whole, the value of ``--output``; print the text for None and ``-``.

    Raises:
        OSError: as of :func:`write_whole`; or there is no such directory.
    """
    if path in (None, "-"):
        sys.stdout.write(text)
        return
    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise OSError(f"--output {path}: there is no such directory: make it, for those who read the file")
    write_whole(path, text)
