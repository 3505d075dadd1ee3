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
from ..host.foreign_files import MOST_BYTES, open_to_read
from ..host.programs import is_root, others_can_change
from ..host.signals import DeferredSignals
from ..wording.text import most_similar
from .values import seconds_of


class Key:
    """What a section may set: any text, unless a subclass asks for more.

    Args:
        variable: the variable of the environment that wins over the file; "" without one.
    """

    def __init__(self, name: str, variable: str = "") -> None:
        self.name = name
        self.variable = variable

    def value_of(self, text: str) -> Any:
        """Return the value; None is no limit.

        Raises:
            ValueError: names the key, the text, what is wrong with it, and how to write it.
        """
        return text


class _Word(Key):
    """A text of a form, given as a regular expression, with what is said of any other text."""

    def __init__(self, name: str, variable: str = "", *, form: str, problem: str) -> None:
        super().__init__(name, variable)
        self.form = form
        self.problem = problem

    def value_of(self, text: str) -> Any:
        if re.fullmatch(self.form, text):
            return text
        if not text:
            raise ValueError(f"{self.name} {self.problem}")
        raise ValueError(f"{self.name} = {text} {self.problem}")


class _Hosts(Key):
    def value_of(self, text: str) -> str:
        host_names(text)
        return text


class _NumberOfGpus(_Word):
    def value_of(self, text: str) -> int | None:
        super().value_of(text)
        if not text.isdecimal():
            return None
        return int(text)


class _Weight(Key):
    _LEAST = 0.01
    _MOST = 100.0

    def value_of(self, text: str) -> float:
        if re.fullmatch(r"[0-9]{1,3}(\.[0-9]+)?", text) and self._LEAST <= float(text) <= self._MOST:
            return float(text)
        way_out = f"write a number from {self._LEAST:g} to {self._MOST:g}"
        raise ValueError(f"{self.name} = {text} is not a weight: {way_out}")


class _Duration(Key):
    """Seconds, from ``least`` up."""

    def __init__(self, name: str, *, least: float = 0.0) -> None:
        super().__init__(name)
        self.least = least

    def value_of(self, text: str) -> float | None:
        try:
            seconds = seconds_of(text)
        except ValueError as err:
            raise ValueError(f"{self.name} = {text} {err}") from None
        if seconds is not None and seconds < self.least:
            raise ValueError(f"{self.name} = {text} is too short: a second is the least")
        return seconds


_OF_HOST = (
    _Word("state_dir", "SAFE_GPU_DIR", form="/.*", problem="is relative: write a path from / on"),
    _Word("vendor", form="|".join(VENDORS), problem=f"is not a vendor: write {', '.join(VENDORS)}"),
    Key("sge_resource", "SAFE_GPU_SGE_RESOURCE"),
    _Word(
        "unexplained_memory",
        "SAFE_GPU_UNEXPLAINED_MEMORY",
        form="[0-9][0-9.]* ?[KMGTkmgt]?[iI]?[bB]?",
        problem="is not a size: write 300MiB",
    ),
    _Word(
        "refused_exit",
        form="0{0,2}[1-9]|0?[1-9][0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-5]",
        problem="is not an exit code: write 1 to 255",
    ),
    _Word("order", form="fifo|fair", problem="is not an order: write fifo or fair"),
    _Hosts("hosts"),
    _Word("remote_command", form=".+", problem="is empty: write what starts safe-gpu on the other hosts"),
)

HOST_KEYS = {key.name: key for key in _OF_HOST}
"""Name -> what ``[host]`` may set."""

_OF_USERS = (
    _NumberOfGpus(
        "max_gpus",
        form="[0-9]{1,5}|(?i:unlimited|none|inf)",
        problem="is not a number of GPUs: write a whole number, or unlimited",
    ),
    _Duration("max_hold", least=1.0),
    _Duration("default_hold", least=1.0),
    _Duration("max_wait"),
    _Duration("idle_report_after", least=1.0),
    _Weight("weight"),
)

KEYS = {key.name: key for key in _OF_USERS}
"""Name -> what the other sections may set."""

_USER_KEYS = ("hosts", "remote_command")

_LONGEST_FILE = 1 << 16

# Root's file: its name, and its older name.
_NAME = "config.ini"
_OLDER_NAME = "policy.ini"


class Section(NamedTuple):
    """One section: ``kind`` is "host", "default", "user" or "group". A key set to no limit has the value None."""

    kind: str
    name: str
    values: dict[str, Any]

    @property
    def title(self) -> str:
        """As in the file: ``[user anna]``."""
        if not self.name:
            return f"[{self.kind}]"
        return f"[{self.kind} {self.name}]"


class Policy(NamedTuple):
    """The content of a file; ``sections`` are in its order."""

    path: str
    sections: tuple[Section, ...] = ()

    @property
    def host(self) -> Mapping[str, str]:
        """The values of ``[host]``."""
        for section in self.sections:
            if section.kind == "host":
                return section.values
        return {}

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
            reason = err
            if not _may_be_shown(path):
                reason = ValueError("it is not valid, and is not shown, since it is not known who chose the file")
            raise PolicyError(f"{path}:{number}: {reason}", path=path, line=number) from reason
    return Policy(path, tuple(sections))


def _may_be_shown(path: str) -> bool:
    """Return whether errors may quote a file. A variable or a link of another user's may lead root to one that this
    user must not read."""
    if not is_root():
        return True
    if os.path.exists(path) and not os.stat(path).st_mode & stat.S_IROTH:
        return False
    return others_can_change(path) is None


def _header(line: str, above: Collection[Section]) -> Section:
    section = _section(line)
    if section.title in [one.title for one in above]:
        raise ValueError(f"{line} stands here twice: write all of it into one section")
    return section


def _section(line: str) -> Section:
    found = re.fullmatch(r"\[\s*(?:(default|DEFAULT|host)\s*|(user|group)\s([^]]+))\]", line)
    if found and found[1]:
        return Section(found[1].lower(), "", {})
    if found and found[3].strip():
        return Section(found[2], found[3].strip(), {})
    raise ValueError(f"{line} is not a section: write [default], [user NAME] or [group NAME], or [host]")


def _read_setting(line: str, section: Section) -> None:
    parts = re.split("[=:]", line, maxsplit=1)
    if len(parts) < 2:
        raise ValueError(f"{line!r} is neither [section] nor key = value")
    name = parts[0].strip().lower()
    text = parts[1].strip()
    keys: Mapping[str, Key] = HOST_KEYS if section.kind == "host" else KEYS
    if name not in keys:
        meant = most_similar(name, keys, least=0.6)
        if meant:
            raise ValueError(f"{name!r} is unknown: did you mean {meant}?")
        raise ValueError(f"{name!r} is unknown: write {', '.join(keys)}")
    if name in section.values:
        raise ValueError(f"{name} is set twice in this section")
    section.values[name] = keys[name].value_of(text)


def host_names(text: str) -> tuple[str, ...]:
    """Return the hosts in a list that blanks or commas separate, each once, in its order.

    Raises:
        ValueError: one of them is not the name of a host. ssh would take ``-x`` for an option, and programs that it
            starts may give other texts to a shell.
    """
    names = text.replace(",", " ").split()
    for name in names:
        if not re.fullmatch(r"([\w.][\w.+-]*@)?[\w.:\[][\w.:%\[\]-]*", name):
            raise ValueError(f"{name!r} is not the name of a host: write gpu1, anna@gpu1 or a name of ~/.ssh/config")
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
    if doubt or not os.path.lexists(path):
        return None, doubt
    return parse(text, path), ""


def host_values(path: str) -> Mapping[str, str]:
    """Return the values of ``[host]`` in a file.

    Raises:
        PolicyError: the file cannot be read, or a line of that section is wrong.
    """
    text, _ = _read_text(path)
    return parse(text, path, host_only=True).host


def _read_text(path: str) -> tuple[str, str]:
    """Return the text of a file, and why the file is ignored; both are "" where there is none.

    Raises:
        PolicyError: the file cannot be read.
    """
    data = b""
    try:
        with open_to_read(path, os.O_NOFOLLOW) as file:
            doubt = _doubt(os.fstat(file.fileno()))
            if not doubt:
                data = file.read(_LONGEST_FILE + 1) or b""
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
    if status.st_uid != 0:
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
    of_groups = [section for section in policy.sections if section.kind == "group" and in_group(section.name)]
    default = [section for section in policy.sections if section.kind == "default"]
    values: dict[str, Any] = {}
    titles: dict[str, str] = {}
    for section in (*own, *of_groups, *default):
        for key, value in section.values.items():
            if key not in values:
                values[key] = value
                titles[key] = section.title
    return Limits(policy.path, **values, sections=titles)


def limits_of_user(policy: Policy, uid: int) -> Limits:
    """Return what applies to a user, by the groups of this process or those that the directory has for another user.
    Takes no lock; the directory may take a while."""

    @cache  # not asked for where no group matters
    def gids() -> set[int]:
        return gids_of(uid)

    def is_in(group: str) -> bool:
        return gid_of(group) in gids()

    return resolve(policy, (procfs.user_name(uid), str(uid)), is_in, is_root=uid == 0)


def unknown_names(policy: Policy) -> list[str]:
    """Return the sentences on the sections of users and groups that this host does not know."""
    sentences = []
    for section in policy.sections:
        is_unknown_user = section.kind == "user" and uid_of(section.name) is None
        is_unknown_group = section.kind == "group" and gid_of(section.name) is None
        if is_unknown_user or is_unknown_group:
            sentences.append(f"{section.title}: there is no such {section.kind} here")
    return sentences


def uid_of(name: str) -> int | None:
    """Return the uid of a user, by name or number; None if nobody has that name."""
    with suppress(KeyError, ValueError), DeferredSignals():  # as in procfs.user_name
        return pwd.getpwnam(name).pw_uid
    return _id(name)


def gid_of(group: str) -> int | None:
    """Return the gid of a group, by name or number; None if none has that name."""
    with suppress(KeyError, ValueError), DeferredSignals():  # as in procfs.user_name
        return grp.getgrnam(group).gr_gid
    return _id(group)


def _id(text: str) -> int | None:
    if not re.fullmatch("[0-9]{1,10}", text):
        return None
    return int(text)


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
    # Users keep such files by links, but root's HOME may be another user's, who would choose what root reads.
    flags = os.O_NOFOLLOW if is_root() else 0
    try:
        with open_to_read(path, flags) as file:
            status = os.fstat(file.fileno())
            data = file.read(MOST_BYTES) or b""
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as err:
        raise PolicyError(f"{path} cannot be read: {err}", path=path) from err
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & ~0o644:
        raise PolicyError(f"{path} must be a file of your own with mode 644 at most: chmod 644 {path}", path=path)
    values = parse(data.decode("utf-8", "replace"), path, host_only=True).host
    for key in values:
        if key not in _USER_KEYS:
            keys = " and ".join(_USER_KEYS)
            raise PolicyError(f"{path}: {key} is for root's file; here {keys} count", path=path)
    return values
