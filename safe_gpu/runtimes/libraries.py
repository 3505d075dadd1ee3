"""Where the vendors' libraries are loaded from.

Root loads nothing that another user could have put there.

dlopen(3) looks through LD_LIBRARY_PATH first, which root may have from a user: in a scheduler's prolog, or under sudo.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..host.foreign_files import read_start
from ..host.programs import is_root, others_can_change

if TYPE_CHECKING:
    import ctypes


_DIRECTORIES = ("/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/lib/wsl/lib", "/run/opengl-driver/lib")
_CACHE = "/etc/ld.so.cache"
_CACHE_LIMIT = 1 << 24


def load(name: str) -> ctypes.CDLL:
    """Load a shared library by its name; for root, from a place that only root can change.

    Raises:
        OSError: there is none, or only one that other users can change.
    """
    import ctypes

    places = _search_path() if is_root() else []
    doubtful = [place for place in places if "$" in place or others_can_change(place, within=True)]
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
    """Return the directories of LD_LIBRARY_PATH, as it is and as it was when this process was started."""
    entries = b"\0" + (read_start("/proc/self/environ") or b"")
    began = [os.fsdecode(one.partition(b"\0")[0]) for one in entries.split(b"\0LD_LIBRARY_PATH=")[1:]]
    values = filter(None, (os.environ.get("LD_LIBRARY_PATH"), *began))
    return list(dict.fromkeys(place or "." for value in values for place in value.replace(";", ":").split(":")))


def _candidates(name: str) -> Iterator[str]:
    """Files of that name in the order of dlopen(3): LD_LIBRARY_PATH, the loader's cache, the usual directories."""
    yield from (os.path.join(place, name) for place in _search_path() if not others_can_change(place))
    cache = read_start(_CACHE, _CACHE_LIMIT) or b""  # its table of strings has paths (glibc's dl-cache.h)
    yield from map(os.fsdecode, re.findall(rb"/[^\0]*/" + re.escape(os.fsencode(name)) + rb"(?=\0)", cache))
    yield from (os.path.join(place, name) for place in _DIRECTORIES)
