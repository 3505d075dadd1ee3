"""The file with which root configures a host.

Most hosts have none, so this module is loaded only where the file exists.
"""

import os
import re
import stat
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any, NamedTuple

from ..errors import PolicyError, UnsatisfiableRequestError
from ..gpus.vendors import VENDORS
from ..host import procfs
from ..host.foreign_files import open_to_read
from ..host.programs import is_root, others_can_change

KEYS = {
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

_LONGEST_FILE = 1 << 16


class Section(NamedTuple):
    """One section: ``kind`` is "host", "default", "user" or "group". A key set to no limit has the value None."""

    kind: str
    name: str
    values: Mapping[str, Any]

    @property
    def title(self) -> str:
        """As in the file: ``[user anna]``."""
        return f"[{self.kind} {self.name}]" if self.name else f"[{self.kind}]"


@cache
def host_values(path: str) -> Mapping[str, str]:
    """Return the values of ``[host]`` in a file, read once in a process, which thus stays with one state directory.

    Raises:
        PolicyError: the file cannot be read, or a line of that section is wrong.
    """
    text, _ = read_text(path)
    return next((one.values for one in parse(text, path) if one.kind == "host"), {})


def parse(
    text: str, path: str, keys: Collection[str] = (), value_of: Callable[[str, str], Any] | None = None
) -> tuple[Section, ...]:
    """Return the sections of a text of ``[section]`` and ``key = value`` lines; ``#`` and ``;`` begin comments.

    Args:
        keys: of the sections other than ``[host]``.
        value_of: reads one of them, by its key and text. None: their
            lines are not looked at.

    Raises:
        PolicyError: names the line, and what is wrong with it.
    """
    sections: list[Section] = []
    for number, raw in enumerate(text.split("\n"), 1):
        line = re.split(r"(?:^|[ \t])[#;]", raw.strip(), maxsplit=1)[0].strip()
        try:
            if line.startswith("["):
                kind, name = _header(line)
                if any((one.kind, one.name) == (kind, name) for one in sections):
                    raise ValueError(f"{line} stands here twice: write all of it into one section")
                sections.append(Section(kind, name, {}))
            elif line:
                if not sections:
                    raise ValueError(f"{line!r} stands before the first section: write [default] above it")
                in_host = sections[-1].kind == "host"
                if not in_host and value_of is None:
                    continue
                key, value = _setting(line, KEYS if in_host else keys)
                if key in sections[-1].values:
                    raise ValueError(f"{key} is set twice in this section")
                read = _host_value if in_host or value_of is None else value_of
                sections[-1].values[key] = read(key, value)  # type: ignore[index]
        except (ValueError, UnsatisfiableRequestError) as err:
            shown = (
                err if _may_be_shown(path) else ValueError("it is wrong, and not shown: who chose the file is unknown")
            )
            raise PolicyError(f"{path}:{number}: {shown}", path=path, line=number) from shown
    return tuple(sections)


def _may_be_shown(path: str) -> bool:
    """Return whether errors may quote a file. A variable or a link of another user's may lead root to one that this
    user must not read."""
    readable = not os.path.exists(path) or os.stat(path).st_mode & stat.S_IROTH
    return not is_root() or (bool(readable) and others_can_change(path) is None)


def _header(line: str) -> tuple[str, str]:
    found = re.fullmatch(r"\[\s*(?:(default|DEFAULT|host)\s*|(user|group)\s([^]]+))\]", line)
    kind, name = (found[1] or found[2], (found[3] or "").strip()) if found else ("", "")
    if kind in ("", "user", "group") and not name:
        raise ValueError(f"{line} is not a section: write [default], [user NAME] or [group NAME], or [host]")
    return kind.lower(), name


def _setting(line: str, keys: Collection[str]) -> tuple[str, str]:
    name, *value = re.split("[=:]", line, maxsplit=1)
    if not value:
        raise ValueError(f"{line!r} is neither [section] nor key = value")
    key = name.strip().lower()
    if key not in keys:
        from difflib import get_close_matches

        meant = next(iter(get_close_matches(key, keys, 1, 0.6)), "")
        raise ValueError(f"{key!r} is unknown: " + (f"did you mean {meant}?" if meant else f"write {', '.join(keys)}"))
    return key, value[0].strip()


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


def _host_value(key: str, text: str) -> str:
    if key == "hosts":
        host_names(text)
    if key == "remote_command" and not text:
        raise ValueError(f"{key} is empty: write what starts safe-gpu on the other hosts")
    if key == "state_dir" and not os.path.isabs(text):
        raise ValueError(f"{key} = {text} is relative: write a path from / on")
    if key == "vendor" and text not in VENDORS:
        raise ValueError(f"{key} = {text} is no vendor: write {', '.join(VENDORS)}")
    if key == "order" and text not in ("fifo", "fair"):
        raise ValueError(f"{key} = {text} is no order: write fifo or fair")
    if key == "refused_exit" and not (re.fullmatch("[0-9]{1,3}", text) and 0 < int(text) < 256):
        raise ValueError(f"{key} = {text} is no exit code: write 1 to 255")
    if key == "unexplained_memory" and not re.fullmatch(r"[0-9][0-9.]* ?[KMGT]?i?B?", text, re.I):
        raise ValueError(f"{key} = {text} is no size: write 300MiB")
    return text


def read_text(path: str) -> tuple[str, str]:
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
        if os.path.islink(path):
            return "", f"{path} is a link: it is ignored, and nothing is limited; write the policy there itself"
        raise PolicyError(
            f"{path} cannot be read ({err.strerror}): ask root for a file of mode 644", path=path
        ) from err
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
