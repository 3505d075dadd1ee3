"""System calls that a sandbox refuses."""

import ctypes
import errno
import platform
import struct

import pytest

_NUMBERS = {
    "x86_64": {"sched_getaffinity": 204, "sched_setaffinity": 203, "socket": 41},
    "aarch64": {"sched_getaffinity": 123, "sched_setaffinity": 122, "socket": 198},
}

needs_known_calls = pytest.mark.skipif(
    platform.machine() not in _NUMBERS, reason="the numbers of the calls are not known here"
)

# Of linux/prctl.h, linux/seccomp.h and linux/bpf_common.h.
_SET_NO_NEW_PRIVS = 38
_SET_SECCOMP = 22
_MODE_FILTER = 2
_LOAD = 0x20
_JUMP_IF_EQUAL = 0x15
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_ANSWER = 0x00050000


def refuse(*calls: int | str) -> None:
    """A seccomp filter on this process, for good: these calls answer EPERM. Names are those of ``_NUMBERS``."""
    steps = [(_LOAD, 0, 0, 0)]  # the number of the call
    for left, call in zip(range(len(calls), 0, -1), calls, strict=True):
        number = call if isinstance(call, int) else _NUMBERS[platform.machine()][call]
        steps.append((_JUMP_IF_EQUAL, left, 0, number))
    steps.append((_RETURN, 0, 0, _ALLOW))
    steps.append((_RETURN, 0, 0, _ANSWER | errno.EPERM))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    program = struct.pack("HP", len(steps), ctypes.addressof(code))
    assert libc.prctl(_SET_SECCOMP, _MODE_FILTER, program, 0, 0) == 0
