"""The enumerations of NVIDIA gpu_affinity, with the same members.

They have a module of their own because creating them takes longer than most bindings: the rest of the package uses
plain strings.
"""

from __future__ import annotations

from enum import Enum


class _Text(str, Enum):
    def __str__(self) -> str:
        return str(self.value)


class Mode(_Text):
    """The modes of gpu_affinity."""

    ALL = "all"
    SINGLE = "single"
    SINGLE_UNIQUE = "single_unique"
    UNIQUE_INTERLEAVED = "unique_interleaved"
    UNIQUE_CONTIGUOUS = "unique_contiguous"


class Scope(_Text):
    """Which CPUs count as near a GPU: those of its NUMA node, or those of its processor socket."""

    NODE = "node"
    SOCKET = "socket"


class Multithreading(_Text):
    """All hardware threads of a physical core, or only the lowest allowed one."""

    ALL_LOGICAL = "all_logical"
    SINGLE_LOGICAL = "single_logical"
