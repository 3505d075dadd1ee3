"""Shared libraries, by name: those that are mapped already, and those that are loaded from where root may take them.

Root loads nothing that another user could have put there. dlopen(3) looks through LD_LIBRARY_PATH first, which root may
have from a user: in a scheduler's prolog, or under sudo.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from ..host.foreign_files import read_start
from ..host.programs import is_root, others_can_change

if TYPE_CHECKING:
    import ctypes

_DIRECTORIES = ("/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/lib/wsl/lib", "/run/opengl-driver/lib")
_CACHE = "/etc/ld.so.cache"
_CACHE_LIMIT = 1 << 24


def open_mapped(names: Iterable[str]) -> ctypes.CDLL | None:
    """Return the first of these libraries that is mapped into this process; None if none is."""
    import ctypes

    for name in names:
        with suppress(OSError):
            return ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    return None


def load_file(name: str) -> ctypes.CDLL:
    """Load a shared library by its name; for root, from a place that only root can change.

    Raises:
        OSError: there is none, or only one that other users can change.
    """
    import ctypes

    doubtful = _doubtful_place()
    if doubtful is None:
        return ctypes.CDLL(name)
    for path in files_named(name):
        real = os.path.realpath(path)
        if os.path.isfile(real) and not others_can_change(real):
            with suppress(OSError):  # of another ELF class
                return ctypes.CDLL(real)
    raise OSError(
        f"{name}: not found where root may load it from, since other users can change {doubtful} on LD_LIBRARY_PATH"
    )


def _doubtful_place() -> str | None:
    """Return a directory of LD_LIBRARY_PATH that root must not load from; None if there is none, or if this is not
    root."""
    if not is_root():
        return None
    for place in _search_path():
        if "$" in place or others_can_change(place, within=True):
            return place
    return None


def _search_path() -> list[str]:
    """Return the directories of LD_LIBRARY_PATH, as it is and as it was when this process was started."""
    values = [os.environ.get("LD_LIBRARY_PATH", "")]
    variables = b"\0" + (read_start("/proc/self/environ") or b"")
    for rest in variables.split(b"\0LD_LIBRARY_PATH=")[1:]:
        values.append(os.fsdecode(rest.partition(b"\0")[0]))
    places: dict[str, None] = {}
    for value in values:
        if value:
            places.update(dict.fromkeys(place or "." for place in value.replace(";", ":").split(":")))
    return list(places)


def files_named(name: str) -> Iterator[str]:
    """Yield the files of that name in the order of dlopen(3): LD_LIBRARY_PATH, the loader's cache, the usual
    directories."""
    for place in _search_path():
        if not others_can_change(place):
            yield os.path.join(place, name)
    cache = read_start(_CACHE, _CACHE_LIMIT) or b""  # its table of strings has paths (glibc's dl-cache.h)
    for path in re.findall(rb"/[^\0]*/" + re.escape(os.fsencode(name)) + rb"(?=\0)", cache):
        yield os.fsdecode(path)
    for place in _DIRECTORIES:
        yield os.path.join(place, name)
