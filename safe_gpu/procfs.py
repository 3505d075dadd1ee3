"""What /proc tells of processes: who they are, when they began, whom they descend from, which locks they hold.

Everything here is a question to the running kernel (proc(5)), always under the real ``/proc``; an answer that cannot be
had (another pid namespace, hidepid, a process that just ended) is None or empty, never an error.
"""

from __future__ import annotations

import os
from functools import cache

__all__ = [
    "ancestors",
    "command_of",
    "descendants",
    "exists",
    "flock_holders",
    "has_ended",
    "is_stopped",
    "open_files",
    "pids",
    "printable",
    "start_time",
    "user_name",
    "user_of",
]


def _read(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


def _stat_fields(pid: int) -> list[bytes]:
    """Fields of /proc/PID/stat from the third (state) on; the name before them may hold blanks and brackets."""
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def exists(pid: int) -> bool:
    """Whether a process with this number can be seen from here (zombies included)."""
    return os.path.exists(f"/proc/{pid}")


def pids() -> list[int]:
    """All processes that can be seen, in ascending order."""
    return sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())


def has_ended(pid: int) -> bool:
    """Whether no such process runs (a zombie has ended); one that is merely hidden from this user has not."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        pass  # another user's
    return _stat_fields(pid)[:1] in ([b"Z"], [b"X"])


def start_time(pid: int) -> int | None:
    """Start of the process in clock ticks since boot; with the pid it names one process for ever."""
    fields = _stat_fields(pid)
    return int(fields[19]) if len(fields) > 19 else None


def parent_of(pid: int) -> int | None:
    """The parent's pid; None for a process that cannot be seen."""
    fields = _stat_fields(pid)
    return int(fields[1]) if len(fields) > 1 else None


def is_stopped(pid: int) -> bool:
    """Whether it is stopped (SIGSTOP, a suspended job) or frozen by a cgroup v2 freezer."""
    fields = _stat_fields(pid)
    if fields[:1] == [b"T"]:
        return True
    for line in _read(f"/proc/{pid}/cgroup").splitlines():
        if line.startswith(b"0::"):
            events = _read("/sys/fs/cgroup" + os.fsdecode(line[3:]) + "/cgroup.events")
            return b"frozen 1" in events
    return False


def open_files(pid: int) -> dict[int, str] | None:
    """Descriptor -> what it is open on, as the kernel words it (``/path``, ``/path (deleted)``, ``pipe:[1]``).

    None where the process is gone or this user may not look.
    """
    directory = f"/proc/{pid}/fd"
    try:
        numbers = os.listdir(directory)
    except OSError:
        return None
    found = {}
    for number in numbers:
        try:
            found[int(number)] = os.readlink(f"{directory}/{number}")
        except OSError:
            continue  # closed meanwhile
    return found


def ancestors(pid: int) -> list[int]:
    """The pids above this process, nearest first, as far as they can be seen."""
    found: list[int] = []
    parent = parent_of(pid)
    while parent and parent not in found:
        found.append(parent)
        parent = parent_of(parent)
    return found


def descendants(pid: int) -> list[int]:
    """The pids below this process, in no particular order; a moving target."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (parent := parent_of(int(name))):
            children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


@cache
def user_name(uid: int) -> str:
    """The login name of a uid, or the number as text where it has none.

    Asked once in a process: where a directory service answers, it can take seconds.
    """
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def user_of(pid: int) -> str | None:
    """Login name of the process's effective user."""
    try:
        return user_name(os.stat(f"/proc/{pid}").st_uid)
    except OSError:
        return None


def command_of(pid: int, limit: int = 200) -> str | None:
    """Its command line as people type it, cut to ``limit`` characters; the bare name for kernel threads and zombies."""
    arguments = _read(f"/proc/{pid}/cmdline").rstrip(b"\0")
    if arguments:
        text = arguments.replace(b"\0", b" ").decode("utf-8", "replace")
    else:
        text = _read(f"/proc/{pid}/comm").decode("utf-8", "replace").strip()
    return printable(text)[:limit] or None


def printable(text: str) -> str:
    """Text from others, fit for a terminal: what could move its cursor or reverse its letters becomes a blank."""
    return "".join(c if c.isprintable() else " " for c in text)


def flock_holders(inodes: set[int]) -> dict[int, list[int]]:
    """Inode -> pids that hold a flock or POSIX lock on it, by /proc/locks.

    Only the inode is compared: the device numbers shown there differ from stat's on overlay file systems. Locks of
    other pid namespaces are not shown by the kernel.
    """
    holders: dict[int, list[int]] = {}
    for line in _read("/proc/locks").decode("ascii", "replace").splitlines():
        fields = line.split()
        if len(fields) < 8 or fields[1] == "->":
            continue
        try:
            pid, inode = int(fields[4]), int(fields[5].rpartition(":")[2])
        except ValueError:
            continue
        if inode in inodes and pid > 0:
            holders.setdefault(inode, []).append(pid)
    return holders
