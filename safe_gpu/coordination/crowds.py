"""Directories whose many names slow down everybody who looks at them, and who has made these names."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from itertools import islice

from ..host.foreign_files import printable
from ..host.procfs import user_name
from .directory import Directory

MANY = 5000
"""Names in a directory, from which on it is told: some hundreds of jobs have fewer, dead and unfinished ones too."""

_MOST_NAMES = 100_000  # that are listed
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
            return ""
        owners: Counter[int] = Counter()
        for one in islice(names, _SAMPLE):  # a set has them in no order that anybody chose
            with suppress(OSError):
                owners[os.stat(one, dir_fd=directory.fd, follow_symlinks=False).st_uid] += 1
        sentence = f"{directory.path} has {_number(names)} names, which slows down all who look"
        for uid, number in owners.most_common(1):
            part = round(100 * number / owners.total())
            sentence += f"; {part}% of them are of {user_name(uid)}, who or root can remove them"
        return printable(sentence)
    return ""


def _number(names: set[str]) -> str:
    if len(names) > _MOST_NAMES:
        return f"more than {_MOST_NAMES:,}"
    return f"{len(names):,}"
