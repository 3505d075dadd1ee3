"""Where the files of this host are: the state directory, and those that close GPUs."""

import os

from ...settings.variables import policy_directory
from ..state_dir import state_dir_path

CLOSING = ("drained", "windows")
"""Files that close GPUs to new claims: for good, and for a time."""


def drain_file(*, by_root: bool, name: str = CLOSING[0]) -> str:
    """Return the file of drained GPUs, or that with this name: root's, beside its settings of the host, or that of the
    owner of the state directory, in it."""
    return os.path.join(policy_directory(os.environ) if by_root else state_dir_path(), name)


def has_closing_file(queue: int) -> bool:
    """Return whether there is a file that closes GPUs. No path into the state directory is followed: ``queue`` is a
    descriptor of a directory in it."""
    root = policy_directory(os.environ)
    return any(
        os.access(f"../{name}", os.F_OK, dir_fd=queue) or os.access(f"{root}/{name}", os.F_OK) for name in CLOSING
    )
