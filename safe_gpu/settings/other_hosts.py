"""The other hosts of a user, and what starts safe-gpu there."""

import os
import stat
from collections.abc import Mapping

from ..errors import PolicyError
from ..host.foreign_files import LIMIT, open_to_read
from ..host.programs import is_root
from .host_file import host_names, host_values, parse
from .variables import existing_policy

_KEYS = ("hosts", "remote_command")

_MODE = 0o644


def known_hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts that SAFE_GPU_HOSTS, the user's file or root's names, the first that does.

    Raises:
        ValueError: SAFE_GPU_HOSTS names none that can be. PolicyError: as :func:`setting_of_hosts`.
    """
    return host_names(environ.get("SAFE_GPU_HOSTS") or setting_of_hosts("hosts", environ) or "")


def setting_of_hosts(key: str, environ: Mapping[str, str]) -> str | None:
    """Return ``hosts`` or ``remote_command`` as the user's own file has it in ``[host]``, else as root's does.

    Raises:
        PolicyError: a file cannot be read, or is wrong. What a user runs on other hosts is never another user's choice.
    """
    home = environ.get("HOME") or os.path.expanduser("~")
    values = _values_of_user(os.path.join(home, ".config", "safe-gpu", "config.ini"))
    if key not in values and (path := existing_policy(environ)) is not None:
        values = host_values(path)
    return values.get(key)


def _values_of_user(path: str) -> Mapping[str, str]:
    try:
        # Users keep such files by links, but root's HOME may be another user's, who would choose what root reads.
        with open_to_read(path, os.O_NOFOLLOW if is_root() else 0) as file:
            status, data = os.fstat(file.fileno()), file.read(LIMIT) or b""
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as err:
        raise PolicyError(f"{path} cannot be read: {err}", path=path) from err
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or mode & ~_MODE:
        raise PolicyError(f"{path} must be a file of your own with mode {_MODE:o} at most: chmod 644 {path}", path=path)
    sections = parse(data.decode("utf-8", "replace"), path)
    values: Mapping[str, str] = next((one.values for one in sections if one.kind == "host"), {})
    if others := [key for key in values if key not in _KEYS]:
        raise PolicyError(f"{path}: {others[0]} is for root's file; here {' and '.join(_KEYS)} count", path=path)
    return values
