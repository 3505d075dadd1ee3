"""The rules of judging that users may change: when memory without a process makes a GPU busy, and process lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .request import parse_size

MEMORY_VARIABLE = "SAFE_GPU_UNEXPLAINED_MEMORY"

LEAST_LIMIT = 16 << 20
"""Bytes. The NVML driver asks for processes that only draw where more than this is in use without a process; below it
their memory would count as unexplained."""


class Rules(NamedTuple):
    """How GPUs are judged.

    Attributes:
        unexplained_limit: bytes that may be in use without a process; None: by what the driver counts as used.
        lists_optional: whether GPUs whose processes the driver can never list may be claimed, by lease and memory.
    """

    unexplained_limit: int | None = None
    lists_optional: bool = False

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Rules:
        """The rules that the environment sets.

        Raises:
            UnsatisfiableRequestError: ``SAFE_GPU_UNEXPLAINED_MEMORY`` is not a size.
        """
        limit = environ.get(MEMORY_VARIABLE)
        return cls(
            max(parse_size(limit, MEMORY_VARIABLE), LEAST_LIMIT) if limit else None,
            environ.get("SAFE_GPU_PROCESS_LIST") == "optional",
        )


DEFAULT_RULES = Rules()
"""The rules where the environment sets none."""
