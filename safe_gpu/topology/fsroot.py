"""The directory below which ``sys`` and ``proc`` are read."""

import os

from ..errors import GPUAffinityError


def fsroot_or_default(fsroot: str | os.PathLike[str] | None) -> str:
    """Return the root directory of ``sys`` and ``proc``: ``fsroot`` if given, else ``SAFE_GPU_FSROOT``, else ``/``.

    Raises:
        GPUAffinityError: ``fsroot`` is not a path.
    """
    given = os.environ.get("SAFE_GPU_FSROOT") or "/" if fsroot is None else fsroot
    try:
        return os.path.normpath(os.fsdecode(given)) if given else "/"
    except TypeError as err:
        raise GPUAffinityError(f"fsroot must be a directory, not {given!r}") from err
