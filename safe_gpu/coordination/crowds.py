"""Directories whose names, or the room that names had which are gone, slow down everybody who looks at them."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from itertools import islice

from ..host.foreign_files import printable
from ..host.procfs import user_name
from ..wording.text import plural
from .directory import Directory, SharedDirectory, setup_command

MANY = 5000
"""A directory with this many names is reported. Some hundreds of jobs have fewer, dead and unfinished entries too."""

_MOST_NAMES = 100_000  # that are listed

# ext4 keeps the blocks of names that are gone, and reads them at each listing. A name takes some 70 bytes.
_GROWN = 1 << 20
_OF_A_NAME = 1 << 9
_SAMPLE = 500  # names whose owners are looked up


def sentence_on_crowd(state_dir: str, name: str) -> str:
    """Return a sentence on a directory in a state directory that has very many names, and on the owner of most of them;
    "" if it has fewer, or is missing.

    Raises:
        StateDirError: it cannot be read.
    """
    with suppress(FileNotFoundError), Directory(state_dir, name, make=False) as directory:
        names = directory.names(_MOST_NAMES)
        if len(names) <= MANY:
            return _sentence_on_grown(directory, len(names), state_dir)
        owners: Counter[int] = Counter()
        for one in islice(names, _SAMPLE):  # a set has them in no order that anybody chose
            with suppress(OSError):
                owners[os.stat(one, dir_fd=directory.fd, follow_symlinks=False).st_uid] += 1
        sentence = f"{directory.path} has {_number(names)} names, which slows everybody down"
        for uid, number in owners.most_common(1):
            part = round(100 * number / owners.total())
            sentence += f"; {part}% of them are of {user_name(uid)}, who or root can remove them"
        return printable(sentence)
    return ""


def is_grown(directory: SharedDirectory, number: int) -> bool:
    """Return whether a directory takes much more room than that number of names needs."""
    size = os.fstat(directory.fd).st_size
    return size > _GROWN and size > number * _OF_A_NAME


def _sentence_on_grown(directory: Directory, number: int, state_dir: str) -> str:
    if not is_grown(directory, number):
        return ""
    size = os.fstat(directory.fd).st_size >> 20
    return printable(
        f"{directory.path} takes {size} MiB for {plural(number, 'name')}, which slows everybody down: as root: "
        f"{setup_command(state_dir)}"
    )


def _number(names: set[str]) -> str:
    if len(names) > _MOST_NAMES:
        return f"more than {_MOST_NAMES:,}"
    return f"{len(names):,}"
