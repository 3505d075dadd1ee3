"""Checks of the policy file, and of the directory with the history of claims."""

from __future__ import annotations

import os
import stat
from shlex import quote

from .. import policy as rules
from ..coordination.history import NAME
from ..errors import PolicyError
from ..settings import policy_file
from ..text import plural
from .check import CheckedHost, Finding, failed, passed, skipped, warning
from .state import opened_to_all


def policy(host: CheckedHost) -> Finding:
    """Does the policy file count, and is every line of it right?"""
    path = policy_file(host.environ)
    try:
        found, ignored = rules.read(path)
    except PolicyError as err:
        fix = f"as root: correct line {err.line}" if err.line else "as root: make it a short text file of mode 644"
        return failed(f"claims fail: {err}", fix)
    if ignored:
        return warning(
            ignored.partition(";")[0], f"as root: write the limits into a file of root's with mode 644, {path}"
        )
    if found is not None:
        return passed(f"{path}, {plural(len(found.sections), 'section')}")
    if host.environ.get("SAFE_GPU_POLICY"):
        return warning(f"SAFE_GPU_POLICY={path} does not exist: nothing is limited", "unset SAFE_GPU_POLICY")
    return skipped(f"there is no {path}: nothing is limited")


def history(host: CheckedHost) -> Finding:
    """Can every user's claims be recorded? A claim does not fail where they cannot."""
    path = os.path.join(host.path, NAME)
    try:
        root = os.open(host.path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.stat(NAME, dir_fd=root, follow_symlinks=False)
        finally:
            os.close(root)
    except FileNotFoundError:
        return passed("nothing has been recorded yet")
    except OSError as err:
        return warning(
            f"{path} cannot be examined ({err.strerror}): claims may not be recorded", f"look at {path} as root"
        )
    if not stat.S_ISDIR(status.st_mode):
        return warning(
            f"{path} is not a plain directory: no claim is recorded", f"rm {quote(path)}, as its owner or root"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o777 != 0o777:
        return warning(
            f"{path} has mode {mode:04o}: claims of other users are not recorded", opened_to_all(path, status)
        )
    if not mode & stat.S_ISVTX:
        return warning(f"{path} has mode {mode:04o}: every user may remove it all", opened_to_all(path, status))
    return passed(f"{path}, mode {mode:04o}")
