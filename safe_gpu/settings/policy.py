"""The policy of a host: which limits and orders its administrator has set.

Claims that go around safe_gpu go around the policy too. The file is read only if root owns it and nobody else may write
it. Most hosts have none, so this module is loaded only where the file exists.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import PolicyError
from ..host import procfs, programs
from ..wording.argument_style import ArgumentStyle
from . import host_file
from . import variables as settings
from .durations import parse_duration

if TYPE_CHECKING:
    from .host_file import Section

KEYS = ("max_gpus", "max_hold", "default_hold", "max_wait", "idle_report_after", "weight")
"""What a section may set. All but ``max_gpus`` and ``weight`` are durations."""

# Least values, in seconds, of the keys that cannot be 0.
_LEAST = {"max_hold": 1.0, "default_hold": 1.0, "idle_report_after": 1.0}

_WEIGHTS = (0.01, 100.0)

_UNLIMITED = ("unlimited", "none", "inf")


class Policy(NamedTuple):
    """The content of a policy file; ``sections`` are in the order of the file."""

    path: str
    sections: tuple[Section, ...] = ()

    @property
    def limits_gpus(self) -> bool:
        """Whether it limits anybody's number of GPUs."""
        return any(section.values.get("max_gpus") is not None for section in self.sections)

    @property
    def by_turns(self) -> bool:
        """Whether users who wait are served by turns, and not as they came."""
        return any(section.values.get("order") == "fair" for section in self.sections)


class Limits(NamedTuple):
    """What applies to one user; None is no limit, or no value.

    Attributes:
        path: the policy file.
        max_gpus: GPUs that the user may hold at once on this host.
        max_hold: the longest time for which a claim may say that it holds its GPUs, in seconds.
        default_hold: the time for which a claim without ``hold_for`` will probably hold its GPUs, in seconds.
        max_wait: the longest wait of a claim, in seconds.
        idle_report_after: after this many seconds without work a claimed GPU is reported as idle.
        weight: where users are served by turns, what the user holds and waits for counts divided by this; None is 1.
        sections: key -> title of the section that it comes from.
        exempt: whether the user is root, whom the file does not name.
    """

    path: str = ""
    max_gpus: int | None = None
    max_hold: float | None = None
    default_hold: float | None = None
    max_wait: float | None = None
    idle_report_after: float | None = None
    weight: float | None = None
    sections: Mapping[str, str] = {}
    exempt: bool = False


class _InFile(ArgumentStyle):
    """``max_hold = 2x``, as it stands in the file."""

    @staticmethod
    def setting(argument: str, value: str) -> str:
        return f"{argument} = {value}"

    @staticmethod
    def value(value: object) -> str:
        return str(value)


def parse(text: str, path: str) -> Policy:
    """Return the policy in a text. Errors are those of :func:`safe_gpu.settings.host_file.parse`."""
    return Policy(path, host_file.parse(text, path, KEYS, _value))


def _value(key: str, text: str) -> float | None:
    if key == "max_gpus":
        if text.lower() in _UNLIMITED:
            return None
        if not (text.isdecimal() and text.isascii() and len(text) < 6):
            raise ValueError(f"{key} = {text} is not a number of GPUs: write a whole number, or unlimited")
        return int(text)
    if key == "weight":
        if not (re.fullmatch(r"[0-9]{1,3}(\.[0-9]+)?", text) and _WEIGHTS[0] <= float(text) <= _WEIGHTS[1]):
            raise ValueError(f"{key} = {text} is no weight: write a number from {_WEIGHTS[0]:g} to {_WEIGHTS[1]:g}")
        return float(text)
    seconds = parse_duration(text, key, spelling=_InFile)
    if seconds is not None and seconds < _LEAST.get(key, 0.0):
        raise ValueError(f"{key} = {text} is too short: a second is the least")
    return seconds


def resolve(policy: Policy, names: Collection[str], in_group: Callable[[str], bool], *, is_root: bool) -> Limits:
    """Return what applies to one user.

    Each key comes from the user's section, else from the first section in the file of a group of the user's that sets
    it, else from the default. Root is exempt unless the file has a section for that user.

    Args:
        names: the user's login name and uid, as text.
        in_group: whether the user is in the group of that name or number. It is asked only where that matters.
    """
    own = [section for section in policy.sections if section.kind == "user" and section.name in names]
    if is_root and not own:
        return Limits(policy.path, exempt=True)
    groups = [section for section in policy.sections if section.kind == "group" and in_group(section.name)]
    found: dict[str, Section] = {}
    for section in (*own, *groups, *(one for one in policy.sections if one.kind == "default")):
        for key in section.values:
            found.setdefault(key, section)
    values: dict[str, Any] = {key: section.values[key] for key, section in found.items()}
    return Limits(policy.path, **values, sections={key: section.title for key, section in found.items()})


def limits_of_this_user(policy: Policy) -> Limits:
    """Return what applies to this process, by its effective user and its groups. Takes no lock; a directory may be
    asked."""
    gids, uid = _own_gids(), os.geteuid()
    return resolve(policy, _names(uid), lambda group: gid_of(group) in gids, is_root=programs.is_root())


def limits_of_user(policy: Policy, uid: int) -> Limits:
    """Return what applies to another user, by the groups that the directory has for that user. It may take a while."""
    gids = cache(lambda: _gids_of(uid))  # not asked for where no group matters
    return resolve(policy, _names(uid), lambda group: gid_of(group) in gids(), is_root=uid == 0)


def is_in_group(uid: int, group: str) -> bool:
    """Return whether a user is in the group of that name or number, as in the two functions above."""
    return gid_of(group) in (_own_gids() if uid == os.geteuid() else _gids_of(uid))


def if_readable(path: str) -> Policy | None:
    """Return the policy in a file; None where it is ignored or broken, which claims and ``safe-gpu policy`` report."""
    try:
        return read(path)[0]
    except PolicyError:
        return None


def unknown_names(policy: Policy) -> list[str]:
    """Return the sentences on the sections of users and groups that this host does not know."""
    known = {"user": lambda name: uid_of(name) is not None, "group": lambda name: gid_of(name) is not None}
    return [
        f"{one.title}: there is no such {one.kind} here"
        for one in policy.sections
        if one.kind in known and not known[one.kind](one.name)
    ]


def uid_of(name: str) -> int | None:
    """Return the uid of a user, by name or number; None if nobody has that name."""
    import pwd

    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        return int(name) if name.isdecimal() and name.isascii() and len(name) < 11 else None


def gid_of(group: str) -> int | None:
    """Return the gid of a group, by name or number; None if none has that name."""
    import grp

    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, ValueError):
        return int(group) if group.isdecimal() and group.isascii() and len(group) < 11 else None


def _names(uid: int) -> tuple[str, str]:
    return procfs.user_name(uid), str(uid)


def _own_gids() -> set[int]:
    return {os.getegid(), *os.getgroups()}


def _gids_of(uid: int) -> set[int]:
    import pwd

    try:
        entry = pwd.getpwuid(uid)
        return set(os.getgrouplist(entry.pw_name, entry.pw_gid))
    except (KeyError, OSError, OverflowError):
        return set()


def read(path: str) -> tuple[Policy | None, str]:
    """Return the policy in a file, or None and why the file is ignored; ("" where there is no file).

    Raises:
        PolicyError: the file cannot be read, or a line of it is wrong, or a file with the older name is there too.
    """
    text, doubt = host_file.read_text(path)
    name, *older = settings.HOST_FILES
    if path == name and os.path.lexists(path) and (other := next(filter(os.path.lexists, older), None)):
        raise PolicyError(f"{other} counts only where there is no {path}: move its sections there", path=other)
    return (None if doubt or not os.path.lexists(path) else parse(text, path)), doubt
