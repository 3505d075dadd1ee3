"""The NUMA memory policy of the calling thread, by raw system call."""

import errno
import os
from collections.abc import Iterable
from typing import NamedTuple

from ..topology.cpulist import format_cpulist

CALL_NUMBERS = {"x86_64": (238, 239), "aarch64": (237, 236)}
"""Machine -> the numbers of set_mempolicy and get_mempolicy (syscall_64.tbl and asm-generic/unistd.h in the kernel)."""

# Values of MPOL_* in linux/mempolicy.h.
_DEFAULT = 0
_PREFERRED = 1
_BIND = 2
_PREFERRED_MANY = 5

_FLAGS = 0xE000  # MPOL_F_STATIC_NODES, MPOL_F_RELATIVE_NODES and MPOL_F_NUMA_BALANCING: bits of the mode

_NAMES = ("default", "preferred", "bind", "interleave", "local", "preferred")  # by number

_BITS = 4096  # no kernel supports more nodes; get_mempolicy needs at least as many bits as the kernel has nodes

_WORD = 64


class MemoryPolicy(NamedTuple):
    """A policy in the kernel's terms; ``mode`` is an ``MPOL_`` number with its flags."""

    mode: int = _DEFAULT
    nodes: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        """ "default", "preferred", "bind", "interleave", "local" or "other"."""
        mode = self.mode & ~_FLAGS
        if mode >= len(_NAMES):
            return "other"
        return _NAMES[mode]

    def __str__(self) -> str:
        if not self.nodes:
            return self.name
        if len(self.nodes) == 1:
            return f"{self.name} on node {format_cpulist(self.nodes)}"
        return f"{self.name} on nodes {format_cpulist(self.nodes)}"


def policy_for(mode: str, nodes: Iterable[int]) -> MemoryPolicy:
    """Return the policy for mode "preferred" or "bind" on some nodes.

    "bind" does not fall back to other nodes: the kernel kills a process that fills its nodes.
    """
    wanted = frozenset(nodes)
    if mode == "bind":
        return MemoryPolicy(_BIND, wanted)
    if len(wanted) == 1:
        return MemoryPolicy(_PREFERRED, wanted)
    return MemoryPolicy(_PREFERRED_MANY, wanted)


def get_policy() -> MemoryPolicy | None:
    """Return the calling thread's policy; None if the kernel or a container's filter refuses to tell."""
    import ctypes

    mode = ctypes.c_int()
    words = (ctypes.c_ulong * (_BITS // _WORD))()
    try:
        call_kernel(1, ctypes.byref(mode), words, ctypes.c_ulong(_BITS + 1), None, ctypes.c_ulong(0))
    except OSError:
        return None
    nodes: set[int] = set()
    for number, word in enumerate(words):
        if word:
            nodes.update(number * _WORD + bit for bit in range(_WORD) if word >> bit & 1)
    return MemoryPolicy(mode.value, frozenset(nodes))


def set_policy(policy: MemoryPolicy) -> MemoryPolicy:
    """Set the calling thread's policy and return the one in effect.

    The two differ on kernels before 5.15, which support "preferred" for one node only: the lowest node is used then.

    Raises:
        OSError: the kernel or a container's filter refuses.
    """
    import ctypes

    mask = None
    bits = 0
    if policy.nodes:
        mask = (ctypes.c_ulong * (max(policy.nodes) // _WORD + 1))()
        for node in policy.nodes:
            mask[node // _WORD] |= 1 << node % _WORD
        bits = len(mask) * _WORD + 1  # the kernel subtracts one from the number of bits that it is given
    try:
        call_kernel(0, ctypes.c_int(policy.mode), mask, ctypes.c_ulong(bits))
        return policy
    except OSError as err:
        if policy.mode != _PREFERRED_MANY or err.errno != errno.EINVAL:
            raise
    return set_policy(MemoryPolicy(_PREFERRED, frozenset([min(policy.nodes)])))


def call_kernel(which: int, *arguments: object) -> None:
    """Call set_mempolicy (0) or get_mempolicy (1).

    Raises:
        OSError: the kernel refuses it, or has no such call.
    """
    import ctypes

    numbers = CALL_NUMBERS.get(os.uname().machine)
    if numbers is None or ctypes.sizeof(ctypes.c_ulong) * 8 != _WORD:
        raise OSError(errno.ENOSYS, f"the call's number is not known for {os.uname().machine}")
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    if syscall(ctypes.c_long(numbers[which]), *arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
