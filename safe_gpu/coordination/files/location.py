"""Where the files of this host are: the state directory, and those that close GPUs."""

import os
from functools import cache

from ...errors import StateDirError
from ...settings.variables import host_setting, policy_directory

DEFAULT_DIR = "/tmp/safe-gpu"

CLOSING = ("drained", "windows")
"""Files that close GPUs to new claims: for good, and for a time."""


def state_dir_path() -> str:
    """Return where the state directory is: ``SAFE_GPU_DIR``, else what root's file says, else ``/tmp/safe-gpu``;
    absolute.

    Raises:
        PolicyError: root's file has a mistake.
        StateDirError: ``SAFE_GPU_DIR`` is relative, and would name another directory in every working directory.
    """
    return _absolute(host_setting("state_dir", "SAFE_GPU_DIR", os.environ) or DEFAULT_DIR)


@cache  # every claim asks several times
def _absolute(path: str) -> str:
    if not os.path.isabs(path):
        raise StateDirError(
            f"SAFE_GPU_DIR={path} is relative: started elsewhere, another process would use another directory and "
            "claim the same GPUs; set it to an absolute path",
            path=path,
        )
    return os.path.abspath(path)


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
