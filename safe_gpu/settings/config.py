"""The configuration files: root's, with settings and limits of a host, and the user's own, with its other hosts.

Most hosts and users have none, so this module is loaded only where a file exists. Claims that go around safe_gpu go
around the limits too.
"""

import grp
import os
import pwd
import re
import stat
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from ..errors import PolicyError
from ..gpus.vendors import VENDORS
from ..host import procfs
from ..host.foreign_files import LIMIT, open_to_read
from ..host.programs import is_root, others_can_change
from ..host.signals import DeferredSignals
from .values import seconds_of

HOST_KEYS = {
    "state_dir": "SAFE_GPU_DIR",
    "vendor": "",
    "sge_resource": "SAFE_GPU_SGE_RESOURCE",
    "unexplained_memory": "SAFE_GPU_UNEXPLAINED_MEMORY",
    "refused_exit": "",
    "order": "",
    "hosts": "",
    "remote_command": "",
}
"""What ``[host]`` may set -> the variable of the environment that wins, "" without one."""

# The form of a value, and what is wrong with another one.
_FORMS = {
    "state_dir": ("/.*", "is relative: write a path from / on"),
    "vendor": ("|".join(VENDORS), f"is no vendor: write {', '.join(VENDORS)}"),
    "unexplained_memory": ("[0-9][0-9.]* ?[KMGTkmgt]?[iI]?[bB]?", "is no size: write 300MiB"),
    "refused_exit": ("0{0,2}[1-9]|0?[1-9][0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-5]", "is no exit code: write 1 to 255"),
    "order": ("fifo|fair", "is no order: write fifo or fair"),
    "remote_command": (".+", "is empty: write what starts safe-gpu on the other hosts"),
    "max_gpus": ("[0-9]{1,5}|(?i:unlimited|none|inf)", "is not a number of GPUs: write a whole number, or unlimited"),
}

KEYS = ("max_gpus", "max_hold", "default_hold", "max_wait", "idle_report_after", "weight")
"""What the other sections may set. All but ``max_gpus`` and ``weight`` are durations."""

# Keys that cannot be 0.
_POSITIVE = ("max_hold", "default_hold", "idle_report_after")

_WEIGHTS = (0.01, 100.0)

_USER_KEYS = ("hosts", "remote_command")

_LONGEST_FILE = 1 << 16

# Root's file: its name, and its older name.
_NAME, _OLDER_NAME = "config.ini", "policy.ini"


class Section(NamedTuple):
    """One section: ``kind`` is "host", "default", "user" or "group". A key set to no limit has the value None."""

    kind: str
    name: str
    values: dict[str, Any]

    @property
    def title(self) -> str:
        """As in the file: ``[user anna]``."""
        return f"[{self.kind} {self.name}]" if self.name else f"[{self.kind}]"


class Policy(NamedTuple):
    """The content of a file; ``sections`` are in its order."""

    path: str
    sections: tuple[Section, ...] = ()

    @property
    def host(self) -> Mapping[str, str]:
        """The values of ``[host]``."""
        return next((section.values for section in self.sections if section.kind == "host"), {})

    @property
    def limits_gpus(self) -> bool:
        """Whether it limits anybody's number of GPUs."""
        return any(section.values.get("max_gpus") is not None for section in self.sections)

    @property
    def by_turns(self) -> bool:
        """Whether users who wait are served by turns, and not as they came."""
        return self.host.get("order") == "fair"


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


def parse(text: str, path: str, *, host_only: bool = False) -> Policy:
    """Return what a text of ``[section]`` and ``key = value`` lines says; ``#`` and ``;`` begin comments.

    Args:
        host_only: do not look at the lines of the sections other than ``[host]``.

    Raises:
        PolicyError: names the line, and what is wrong with it.
    """
    sections: list[Section] = []
    for number, raw in enumerate(text.split("\n"), 1):
        line = re.split(r"(?:^|[ \t])[#;]", raw.strip(), maxsplit=1)[0].strip()
        try:
            if line.startswith("["):
                sections.append(_header(line, sections))
            elif line and not sections:
                raise ValueError(f"{line!r} stands before the first section: write [default] above it")
            elif line and not (host_only and sections[-1].kind != "host"):
                _read_setting(line, sections[-1])
        except ValueError as err:
            hidden = "it is wrong, and not shown: who chose the file is unknown"
            shown = err if _may_be_shown(path) else ValueError(hidden)
            raise PolicyError(f"{path}:{number}: {shown}", path=path, line=number) from shown
    return Policy(path, tuple(sections))


def _may_be_shown(path: str) -> bool:
    """Return whether errors may quote a file. A variable or a link of another user's may lead root to one that this
    user must not read."""
    readable = not os.path.exists(path) or os.stat(path).st_mode & stat.S_IROTH
    return not is_root() or (bool(readable) and others_can_change(path) is None)


def _header(line: str, above: Collection[Section]) -> Section:
    found = re.fullmatch(r"\[\s*(?:(default|DEFAULT|host)\s*|(user|group)\s([^]]+))\]", line)
    kind, name = (found[1] or found[2], (found[3] or "").strip()) if found else ("", "")
    if kind in ("", "user", "group") and not name:
        raise ValueError(f"{line} is not a section: write [default], [user NAME] or [group NAME], or [host]")
    section = Section(kind.lower(), name, {})
    if section.title in [one.title for one in above]:
        raise ValueError(f"{line} stands here twice: write all of it into one section")
    return section


def _read_setting(line: str, section: Section) -> None:
    name, *value = re.split("[=:]", line, maxsplit=1)
    if not value:
        raise ValueError(f"{line!r} is neither [section] nor key = value")
    key, text = name.strip().lower(), value[0].strip()
    keys = HOST_KEYS if section.kind == "host" else KEYS
    if key not in keys:
        from difflib import get_close_matches

        meant = next(iter(get_close_matches(key, keys, 1, 0.6)), "")
        raise ValueError(f"{key!r} is unknown: " + (f"did you mean {meant}?" if meant else f"write {', '.join(keys)}"))
    if key in section.values:
        raise ValueError(f"{key} is set twice in this section")
    section.values[key] = _value(key, text)


def _value(key: str, text: str) -> str | float | None:
    form, problem = _FORMS.get(key, (".*", ""))
    if not re.fullmatch(form, text):
        raise ValueError(f"{f'{key} = {text}' if text else key} {problem}")
    if key == "hosts":
        host_names(text)
    if key in HOST_KEYS:
        return text
    if key == "max_gpus":
        return int(text) if text.isdecimal() else None
    if key == "weight":
        if not (re.fullmatch(r"[0-9]{1,3}(\.[0-9]+)?", text) and _WEIGHTS[0] <= float(text) <= _WEIGHTS[1]):
            raise ValueError(f"{key} = {text} is no weight: write a number from {_WEIGHTS[0]:g} to {_WEIGHTS[1]:g}")
        return float(text)
    try:
        seconds = seconds_of(text)
    except ValueError as err:
        raise ValueError(f"{key} = {text} {err}") from None
    if seconds is not None and seconds < (key in _POSITIVE):
        raise ValueError(f"{key} = {text} is too short: a second is the least")
    return seconds


def host_names(text: str) -> tuple[str, ...]:
    """Return the hosts in a list that blanks or commas separate, each once, in its order.

    Raises:
        ValueError: one of them is no name of a host. ssh would take ``-x`` for an option, and programs that it starts
            may give other texts to a shell.
    """
    names = text.replace(",", " ").split()
    for name in names:
        if not re.fullmatch(r"([\w.][\w.+-]*@)?[\w.:\[][\w.:%\[\]-]*", name):
            raise ValueError(f"{name!r} is no name of a host: write gpu1, anna@gpu1 or a name of ~/.ssh/config")
    return tuple(dict.fromkeys(names))


def read(path: str) -> tuple[Policy | None, str]:
    """Return the policy in a file, or None and why the file is ignored; ("" where there is no file).

    Raises:
        PolicyError: the file cannot be read, or a line of it is wrong, or a file with the older name is there too.
    """
    text, doubt = _read_text(path)
    other = os.path.join(os.path.dirname(path), _OLDER_NAME)
    if os.path.basename(path) == _NAME and os.path.lexists(path) and os.path.lexists(other):
        raise PolicyError(f"{other} counts only where there is no {path}: move its sections there", path=other)
    return (None if doubt or not os.path.lexists(path) else parse(text, path)), doubt


def host_values(path: str) -> Mapping[str, str]:
    """Return the values of ``[host]`` in a file.

    Raises:
        PolicyError: the file cannot be read, or a line of that section is wrong.
    """
    return parse(_read_text(path)[0], path, host_only=True).host


def _read_text(path: str) -> tuple[str, str]:
    """Return the text of a file, and why the file is ignored; both are "" where there is none.

    Raises:
        PolicyError: the file cannot be read.
    """
    try:
        with open_to_read(path, os.O_NOFOLLOW) as file:
            doubt = _doubt(os.fstat(file.fileno()))
            data = b"" if doubt else file.read(_LONGEST_FILE + 1) or b""
    except FileNotFoundError:
        return "", ""
    except IsADirectoryError:
        doubt = "is not a file"
    except OSError as err:
        if not os.path.islink(path):
            problem = f"{path} cannot be read ({err.strerror}): ask root for a file of mode 644"
            raise PolicyError(problem, path=path) from err
        doubt = "is a link"
    if doubt:
        return "", f"{path} {doubt}: it is ignored, and nothing is limited; ask root for a file of mode 644"
    if len(data) > _LONGEST_FILE:
        raise PolicyError(f"{path} is longer than 64 KiB: name groups, not users", path=path)
    return data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace"), ""


def _doubt(status: os.stat_result) -> str:
    """Return why such a file does not count; "" if it does."""
    if not stat.S_ISREG(status.st_mode):
        return "is not a file"
    if status.st_uid:
        return f"belongs to {procfs.user_name(status.st_uid)}, not to root"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others than root (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


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


def limits_of_user(policy: Policy, uid: int) -> Limits:
    """Return what applies to a user, by the groups of this process or those that the directory has for another user.
    Takes no lock; the directory may take a while."""
    gids = cache(lambda: gids_of(uid))  # not asked for where no group matters
    names = procfs.user_name(uid), str(uid)
    return resolve(policy, names, lambda group: gid_of(group) in gids(), is_root=uid == 0)


def unknown_names(policy: Policy) -> list[str]:
    """Return the sentences on the sections of users and groups that this host does not know."""
    known = {"user": uid_of, "group": gid_of}
    missing = (one for one in policy.sections if one.kind in known and known[one.kind](one.name) is None)
    return [f"{one.title}: there is no such {one.kind} here" for one in missing]


def uid_of(name: str) -> int | None:
    """Return the uid of a user, by name or number; None if nobody has that name."""
    return _id_of(name, pwd.getpwnam)


def gid_of(group: str) -> int | None:
    """Return the gid of a group, by name or number; None if none has that name."""
    return _id_of(group, grp.getgrnam)


def _id_of(name: str, entry_of: Callable[[str], Any]) -> int | None:
    with suppress(KeyError, ValueError), DeferredSignals():  # as in procfs.user_name
        return int(entry_of(name)[2])  # pw_uid, gr_gid
    return int(name) if name.isdecimal() and name.isascii() and len(name) < 11 else None


def gids_of(uid: int) -> set[int]:
    """Return the groups of a user: those of this process, or those that the directory has for another user."""
    if uid == os.geteuid():
        return {os.getegid(), *os.getgroups()}
    with suppress(KeyError, OSError, OverflowError):
        entry = pwd.getpwuid(uid)
        return set(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return set()


def values_of_user(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the values of ``[host]`` in the user's own file.

    Raises:
        PolicyError: it cannot be read, or is wrong. What a user runs on other hosts is never another user's choice.
    """
    path = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".config", "safe-gpu", "config.ini")
    try:
        # Users keep such files by links, but root's HOME may be another user's, who would choose what root reads.
        with open_to_read(path, os.O_NOFOLLOW if is_root() else 0) as file:
            status, data = os.fstat(file.fileno()), file.read(LIMIT) or b""
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as err:
        raise PolicyError(f"{path} cannot be read: {err}", path=path) from err
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & ~0o644:
        raise PolicyError(f"{path} must be a file of your own with mode 644 at most: chmod 644 {path}", path=path)
    values = parse(data.decode("utf-8", "replace"), path, host_only=True).host
    if others := [key for key in values if key not in _USER_KEYS]:
        raise PolicyError(f"{path}: {others[0]} is for root's file; here {' and '.join(_USER_KEYS)} count", path=path)
    return values
