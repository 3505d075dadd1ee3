"""Where the driver's libraries are loaded from. Root loads nothing that another user could have put there.

dlopen(3) looks through LD_LIBRARY_PATH first, which root may have from a user: in a scheduler's prolog, or under sudo.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..procfs import read_start
from ..programs import is_root, others_can_change

if TYPE_CHECKING:
    import ctypes


_DIRECTORIES = ("/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/lib/wsl/lib", "/run/opengl-driver/lib")
_CACHE = "/etc/ld.so.cache"
_MAGIC = b"glibc-ld.so.cache1.1"
_CACHE_LIMIT = 1 << 24


def load(name: str) -> ctypes.CDLL:
    """Load a shared library by its name; for root, from a place that only root can change.

    Raises:
        OSError: there is none, or only one that other users can change.
    """
    import ctypes

    doubtful = [place for place in _search_path() if "$" in place or others_can_change(place)] if is_root() else []
    if not doubtful:
        return ctypes.CDLL(name)
    for path in _candidates(name):
        real = os.path.realpath(path)
        if os.path.isfile(real) and not others_can_change(real):
            try:
                return ctypes.CDLL(real)
            except OSError as err:
                if "wrong ELF class" not in str(err):
                    raise
    raise OSError(
        f"{name}: not found where root may load it from, since other users can change {doubtful[0]} on LD_LIBRARY_PATH"
    )


def _search_path() -> list[str]:
    """The directories of LD_LIBRARY_PATH, as it is and as it was when this process was started."""
    began = b"".join(
        entry[16:]
        for entry in (read_start("/proc/self/environ") or b"").split(b"\0")
        if entry.startswith(b"LD_LIBRARY_PATH=")
    )
    found: dict[str, None] = {}
    for value in (os.environ.get("LD_LIBRARY_PATH", ""), os.fsdecode(began)):
        if value:
            found.update(dict.fromkeys(place or "." for place in value.replace(";", ":").split(":")))
    return list(found)


def _candidates(name: str) -> Iterator[str]:
    """Files of that name in the order of dlopen(3): LD_LIBRARY_PATH, the loader's cache, the usual directories."""
    for place in _search_path():
        if not others_can_change(place):
            yield os.path.join(place, name)
    yield from _cached(name)
    for place in _DIRECTORIES:
        yield os.path.join(place, name)


def _cached(name: str) -> Iterator[str]:
    """What the loader's cache has for a name (glibc's dl-cache.h)."""
    data = read_start(_CACHE, _CACHE_LIMIT) or b""
    start = data.find(_MAGIC)
    if start < 0:
        return
    try:
        (count,) = struct.unpack_from("=I", data, start + len(_MAGIC))
        for number in range(count):
            key, value = struct.unpack_from("=II", data, start + 48 + 24 * number + 4)
            if _text(data, start + key) == name:
                yield _text(data, start + value)
    except struct.error:
        return


def _text(data: bytes, start: int) -> str:
    return os.fsdecode(data[start : data.find(b"\0", start)])
