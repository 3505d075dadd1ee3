"""Where the state directory of this host is."""

import os
from functools import cache

from ...errors import StateDirError
from ...settings.variables import host_setting

DEFAULT_DIR = "/tmp/safe-gpu"


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
