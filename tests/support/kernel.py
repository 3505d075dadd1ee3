"""What processes of tests ask of Linux, for which Python has no function, and signals to processes that may be gone."""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import suppress

from safe_gpu.host import procfs

_SET_PDEATHSIG, _SET_DUMPABLE, _SET_CHILD_SUBREAPER = 1, 4, 36  # prctl(2)
NEW_MOUNTS, NEW_PIDS, NEW_NETWORK = 0x00020000, 0x20000000, 0x40000000  # unshare(2)
_BIND, _PRIVATE, _RECURSIVE = 4096, 1 << 18, 16384  # mount(2)
_DETACH = 2  # umount(2)


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library that returns 0 if it succeeds.

    Raises:
        OSError: it does not.
    """
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)


def end_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when the one that started it is gone."""
    _call("prctl", _SET_PDEATHSIG, number, 0, 0, 0)


def let_others_look() -> None:
    """Let other processes of this user look at this one in /proc, as after exec(2), though its user has changed."""
    _call("prctl", _SET_DUMPABLE, 1, 0, 0, 0)


def adopt_orphans() -> None:
    """From now on, processes whose parents have ended become children of this one, if they descend from it."""
    _call("prctl", _SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def leave_network() -> None:
    """Go into a new network namespace, where nobody else's sockets are seen.

    Raises:
        OSError: this process may not make one.
    """
    _call("unshare", NEW_NETWORK)


def come_back(namespace: int) -> None:
    """Go back into a namespace, by a descriptor of its file in /proc."""
    _call("setns", namespace, 0)


def leave_mounts(more: int = 0) -> None:
    """Go into a new mount namespace, whose mounts are seen nowhere else.

    Args:
        more: further namespaces, such as :data:`NEW_PIDS`.

    Raises:
        OSError: this process may not make one.
    """
    _call("unshare", NEW_MOUNTS | more)
    _call("mount", b"none", b"/", None, _PRIVATE | _RECURSIVE, None)


def bind_mount(source: str, target: str) -> None:
    """Let a directory be seen in the place of another one.

    Raises:
        OSError: such as FileNotFoundError, if either is not there.
    """
    _call("mount", source.encode(), target.encode(), None, _BIND, None)


def unmount(place: str) -> None:
    """Take away what is mounted there, once nobody uses it any more."""
    _call("umount2", place.encode(), _DETACH)


def mount_proc() -> None:
    """Mount /proc anew, which shows the processes of the PID namespace of this process."""
    _call("mount", b"proc", b"/proc", b"proc", 0, None)


def send_signal(pid: int, number: int) -> bool:
    """Send a signal. Returns whether there was such a process."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def ended_children() -> Iterator[int]:
    """Yield the numbers of the children that have ended, until there is none that has; they are gone then."""
    with suppress(ChildProcessError):
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid


def end_descendants() -> None:
    """Kill all processes that descend from this one, and wait until nothing of them is left.

    Those whose parents have ended are found after :func:`adopt_orphans`.
    """
    with suppress(ChildProcessError):
        while True:
            for pid in procfs.descendants(os.getpid()):
                send_signal(pid, signal.SIGKILL)
            os.waitpid(-1, 0)
