"""NVIDIA gpu_affinity's enumerations, member for member.

A room of their own, since making them takes longer than most claims take to bind: options are plain text.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["Mode", "Multithreading", "Scope"]


class _Text(str, Enum):
    def __str__(self) -> str:
        return str(self.value)


class Mode(_Text):
    """gpu_affinity's modes."""

    ALL = "all"
    SINGLE = "single"
    SINGLE_UNIQUE = "single_unique"
    UNIQUE_INTERLEAVED = "unique_interleaved"
    UNIQUE_CONTIGUOUS = "unique_contiguous"


class Scope(_Text):
    """What counts as near a GPU: the CPUs of its NUMA node, or of its processor socket."""

    NODE = "node"
    SOCKET = "socket"


class Multithreading(_Text):
    """All hardware threads of a physical core, or only the lowest that is allowed."""

    ALL_LOGICAL = "all_logical"
    SINGLE_LOGICAL = "single_logical"
