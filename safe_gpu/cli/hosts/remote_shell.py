"""Lines that start safe-gpu on another host, for any login shell there."""

import os
import re
from collections.abc import Sequence
from shlex import quote

from ...errors import SafeGpuError
from ...host.programs import find_program
from ...settings.other_hosts import setting_of_hosts

_NEWLINE = "_safe_gpu_newline"


def ssh_to(host: str, script: str, *options: str) -> list[str]:
    """Return the command that has ``sh`` on a host run a script of one line, without any question to the user.

    Raises:
        SafeGpuError: there is no ssh here.
    """
    ssh = find_program("ssh", os.environ)
    if ssh is None:
        raise SafeGpuError("there is no ssh on PATH: install OpenSSH's client to look at other hosts")
    return [ssh, *(options or ("-T",)), "-oBatchMode=yes", "-oConnectTimeout=5", "--", host, for_any_shell(script)]


def remote_command() -> str:
    """Return what starts safe-gpu on other hosts, as ``sh`` there reads it after ``exec``."""
    return setting_of_hosts("remote_command", os.environ) or "safe-gpu"


def for_any_shell(script: str) -> str:
    r"""Return ``sh -c SCRIPT`` as sh, csh and fish read it alike, with the script as one argument.

    Within quotes csh replaces ``!`` and fish reads ``\``; before a backslash, all of them take both as they are.

    >>> print(for_any_shell("echo 'hi!'"))
    sh -c 'echo '\''hi'\!\'
    """
    parts = re.findall(r"['\\!]|[^'\\!]+", script)
    return "sh -c " + "".join(f"\\{part}" if part in ("'", "\\", "!") else f"'{part}'" for part in parts)


def words_of_sh(words: Sequence[str]) -> str:
    """Return words as ``sh`` reads them, on one line: csh ends a command with its line, even within quotes."""
    text = " ".join(map(quote, words))
    return text.replace("\n", f"'\"${_NEWLINE}\"'")


NEWLINE_FOR_SH = f'{_NEWLINE}=$(printf "\\nx"); {_NEWLINE}=${{{_NEWLINE}%x}}'
"""What comes before such words."""
