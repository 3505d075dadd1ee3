"""The policy of a host: limits for its users, which root sets in one file.

Claims that go around safe_gpu go around the policy too. The file is read only if root owns it and nobody else may write
it. Most hosts have none, so this module is loaded only where the file exists.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any, NamedTuple

from . import procfs, programs
from .argument_style import ArgumentStyle
from .errors import PolicyError, UnsatisfiableRequestError
from .foreign_files import open_to_read
from .settings import parse_duration

KEYS = ("max_gpus", "max_hold", "default_hold", "max_wait", "idle_report_after")
"""What a section may set. All but ``max_gpus`` are durations."""

# Least values, in seconds, of the keys that cannot be 0.
_LEAST = {"max_hold": 1.0, "default_hold": 1.0, "idle_report_after": 1.0}
_UNLIMITED = ("unlimited", "none", "inf")
_LONGEST_FILE = 1 << 16


class Section(NamedTuple):
    """One section: ``kind`` is "default", "user" or "group". A key that is set to no limit has the value None."""

    kind: str
    name: str
    values: Mapping[str, float | None]

    @property
    def title(self) -> str:
        """As in the file: ``[user anna]``."""
        return f"[{self.kind} {self.name}]" if self.name else f"[{self.kind}]"


class Policy(NamedTuple):
    """The content of a policy file; ``sections`` are in the order of the file."""

    path: str
    sections: tuple[Section, ...] = ()

    @property
    def limits_gpus(self) -> bool:
        """Whether it limits anybody's number of GPUs."""
        return any(section.values.get("max_gpus") is not None for section in self.sections)


class Limits(NamedTuple):
    """What applies to one user; None is no limit, or no value.

    Attributes:
        path: the policy file.
        max_gpus: GPUs that the user may hold at once on this host.
        max_hold: the longest time for which a claim may say that it holds its GPUs, in seconds.
        default_hold: the time for which a claim that says nothing will probably hold its GPUs, in seconds.
        max_wait: the longest wait of a claim, in seconds.
        idle_report_after: after this many seconds without work a claimed GPU is reported as idle.
        sections: key -> title of the section that it comes from.
        exempt: whether the user is root, whom the file does not name.
    """

    path: str = ""
    max_gpus: int | None = None
    max_hold: float | None = None
    default_hold: float | None = None
    max_wait: float | None = None
    idle_report_after: float | None = None
    sections: Mapping[str, str] = {}
    exempt: bool = False


# Parsing


class _InFile(ArgumentStyle):
    """``max_hold = 2x``, as it stands in the file."""

    @staticmethod
    def setting(argument: str, value: str) -> str:
        return f"{argument} = {value}"

    @staticmethod
    def value(value: object) -> str:
        return str(value)


def parse(text: str, path: str) -> Policy:
    """The policy in a text of ``[section]`` and ``key = value`` lines; ``#`` and ``;`` begin comments.

    Raises:
        PolicyError: names the line, and what is wrong with it.
    """
    sections: list[Section] = []
    values: dict[str, float | None] | None = None
    for number, raw in enumerate(text.splitlines(), 1):
        line = re.split(r"(?:^|[ \t])[#;]", raw.strip(), maxsplit=1)[0].strip()
        try:
            if line.startswith("["):
                kind, name = _header(line)
                if any((one.kind, one.name) == (kind, name) for one in sections):
                    raise ValueError(f"{line} stands here twice: write all of it into one section")
                values = {}
                sections.append(Section(kind, name, values))
            elif line:
                if values is None:
                    raise ValueError(f"{line!r} stands before the first section: write [default] above it")
                key, value = _setting(line)
                if key in values:
                    raise ValueError(f"{key} is set twice in this section")
                values[key] = value
        except (ValueError, UnsatisfiableRequestError) as err:
            raise PolicyError(f"{path}:{number}: {err}", path=path, line=number) from err
    return Policy(path, tuple(sections))


def _header(line: str) -> tuple[str, str]:
    found = re.fullmatch(r"\[\s*(?:(?:default|DEFAULT)\s*|(user|group)\s([^]]+))\]", line)
    kind, name = (found[1] or "default", (found[2] or "").strip()) if found else ("", "")
    if not kind or (kind != "default" and not name):
        raise ValueError(f"{line} is not a section: write [default], [user NAME] or [group NAME]")
    return kind, name


def _setting(line: str) -> tuple[str, float | None]:
    name, *value = re.split("[=:]", line, maxsplit=1)
    if not value:
        raise ValueError(f"{line!r} is neither [section] nor key = value")
    key = name.strip().lower()
    if key not in KEYS:
        from difflib import get_close_matches

        meant = next(iter(get_close_matches(key, KEYS, 1, 0.6)), "")
        raise ValueError(f"{key!r} is unknown: " + (f"did you mean {meant}?" if meant else f"write {', '.join(KEYS)}"))
    return key, _value(key, value[0].strip())


def _value(key: str, text: str) -> float | None:
    if key == "max_gpus":
        if text.lower() in _UNLIMITED:
            return None
        if not (text.isdecimal() and text.isascii() and len(text) < 6):
            raise ValueError(f"{key} = {text} is not a number of GPUs: write a whole number, or unlimited")
        return int(text)
    seconds = parse_duration(text, key, spelling=_InFile)
    if seconds is not None and seconds < _LEAST.get(key, 0.0):
        raise ValueError(f"{key} = {text} is too short: a second is the least")
    return seconds


# Which sections apply to a user


def resolve(policy: Policy, names: Collection[str], in_group: Callable[[str], bool], *, is_root: bool) -> Limits:
    """What applies to one user.

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
    """What applies to this process, by its effective user and its groups. Takes no lock; a directory may be asked."""
    gids = {os.getegid(), *os.getgroups()}
    uid = os.geteuid()
    return resolve(policy, _names(uid), lambda group: _gid(group) in gids, is_root=programs.is_root())


def limits_of_user(policy: Policy, uid: int) -> Limits:
    """What applies to another user, by the groups that the directory has for that user. It may take a while."""
    gids = cache(lambda: _gids_of(uid))  # not asked for where no group matters
    return resolve(policy, _names(uid), lambda group: _gid(group) in gids(), is_root=uid == 0)


def _names(uid: int) -> tuple[str, str]:
    return procfs.user_name(uid), str(uid)


def _gids_of(uid: int) -> set[int]:
    import pwd

    try:
        entry = pwd.getpwuid(uid)
        return set(os.getgrouplist(entry.pw_name, entry.pw_gid))
    except (KeyError, OSError, OverflowError):
        return set()


def _gid(group: str) -> int | None:
    import grp

    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, ValueError):
        return int(group) if group.isdecimal() and group.isascii() and len(group) < 11 else None


# Reading


def read(path: str) -> tuple[Policy | None, str]:
    """The policy in a file, or None and why the file is ignored; ("" where there is no file).

    Raises:
        PolicyError: the file cannot be read, or a line of it is wrong.
    """
    try:
        with open_to_read(path, os.O_NOFOLLOW) as file:
            doubt = _doubt(os.fstat(file.fileno()))
            data = b"" if doubt else file.read(_LONGEST_FILE + 1) or b""
    except FileNotFoundError:
        return None, ""
    except IsADirectoryError:
        doubt = "is not a file"
    except OSError as err:
        if os.path.islink(path):
            return None, f"{path} is a link: it is ignored, and nothing is limited; write the policy there itself"
        raise PolicyError(
            f"{path} cannot be read ({err.strerror}): ask root for `chmod 644 {path}`", path=path
        ) from err
    if doubt:
        return None, f"{path} {doubt}: it is ignored, and nothing is limited; root should make it a file of mode 644"
    if len(data) > _LONGEST_FILE:
        raise PolicyError(f"{path} is longer than 64 KiB: name groups, not users", path=path)
    return parse(data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace"), path), ""


def _doubt(status: os.stat_result) -> str:
    """Why a policy file does not count; "" if it does."""
    if not stat.S_ISREG(status.st_mode):
        return "is not a file"
    if status.st_uid:
        return f"belongs to {procfs.user_name(status.st_uid)}, not to root"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others than root (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""
