"""What ``/proc`` tells of processes and mounts, and whether this network namespace seems to be the host's.

The functions always read the real ``/proc``. If the kernel does not give an answer (another pid namespace, hidepid, a
process that has just exited), or none that can be parsed, the result is None or empty; no error is raised.

Users choose names that the kernel writes there, of processes, files, mounts and cgroups. It escapes line feeds in them,
and no other line breaks: so its text is split at line feeds only.
"""

import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import NamedTuple, TypeVar

from .foreign_files import LIMIT, printable, read_start
from .signals import DeferredSignals

_T = TypeVar("_T")

FIRST_PID_NAMESPACE = 4026531836
"""The inode of the initial PID namespace, a constant of the kernel (PROC_PID_INIT_INO)."""

_LONGEST_COMMAND = 1 << 12  # bytes of a command line

_MOST_FILES = 1 << 12  # descriptors of one process

LONGEST_READ = 0.2
"""Seconds of processor time after which a table of the kernel, which other users can make long, is not read on."""

NETWORK_TYPES = frozenset(
    "9p acfs afs beegfs ceph cephfs cifs coda davfs fuse.ceph fuse.glusterfs fuse.juicefs fuse.mfs fuse.s3fs "
    "fuse.sshfs gfs gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 orangefs panfs pvfs2 "
    "smb2 smb3 smbfs weka wekafs".split()
)
"""File systems where flock(2) is something else: emulated by byte-range locks, local to the client, or absent."""

# Flags of a task in the kernel (linux/sched.h).
_PF_EXITING = 0x4  # set before the task's files are closed
_PF_FORKNOEXEC = 0x40


def _read(path: str, limit: int = LIMIT) -> bytes:
    return read_start(path, limit) or b""


def _is_number(field: bytes) -> bool:
    return field.isdigit() and len(field) < 20


def _number(fields: Sequence[bytes], index: int) -> int | None:
    return int(fields[index]) if len(fields) > index and _is_number(fields[index]) else None


def _stat_fields(task: int | str) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the third (state) on, or of ``PID/task/TID``. The second, the name, may
    contain blanks and brackets."""
    return _read(f"/proc/{task}/stat").rpartition(b")")[2].split()


def _status_numbers(pid: int, name: bytes) -> list[int]:
    """Return the numbers in one line of /proc/PID/status; none if there are other words in it."""
    for line in _read(f"/proc/{pid}/status").split(b"\n"):
        if line.startswith(name):
            _, *fields = line.split()
            return [int(field) for field in fields] if all(map(_is_number, fields)) else []
    return []


def exists(pid: int) -> bool:
    """Return whether /proc shows a process with this pid (zombies included)."""
    return os.path.exists(f"/proc/{pid}")


def pids() -> list[int]:
    """Return the pids that /proc shows, in ascending order."""
    return sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())


def has_ended(pid: int) -> bool:
    """Return whether the process has exited. A zombie has, unless only its first thread is one (pthread_exit(3)); a
    process that is only hidden from this user has not."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        pass  # it exists, but belongs to another user
    return _is_zombie(_stat_fields(pid))


def _is_zombie(fields: list[bytes]) -> bool:
    threads = _number(fields, 17)
    return fields[:1] in ([b"Z"], [b"X"]) and threads is not None and threads < 2


def is_forked() -> bool:
    """Return whether this process was forked, and has executed no program since."""
    return bool((_number(_stat_fields("self"), 6) or 0) & _PF_FORKNOEXEC)


def is_exiting(pid: int) -> bool:
    """Return whether the process has exited or all its threads are exiting, so that the kernel may have released its
    locks.

    The threads of a process that was killed take their time to free memory of a GPU, when the first is long a zombie.
    """
    fields = _stat_fields(pid)
    return has_ended(pid) or (
        bool(fields) and _leaves(fields) and all(_leaves(_stat_fields(thread)) for thread in _other_threads(pid))
    )


def _leaves(fields: list[bytes]) -> bool:
    """Return whether a thread with this line of /proc exits; one without any has gone."""
    return not fields or bool((_number(fields, 6) or 0) & _PF_EXITING)


def _other_threads(pid: int) -> Iterator[str]:
    """Yield ``PID/task/TID`` of each thread but the first."""
    with suppress(OSError), os.scandir(f"/proc/{pid}/task") as threads:
        yield from (f"{pid}/task/{thread.name}" for thread in threads if thread.name != str(pid))


def start_time(pid: int) -> int | None:
    """Return the start time of the process in clock ticks since boot. Pid and start time together identify one
    process."""
    return _number(_stat_fields("self" if pid == os.getpid() else pid), 19)  # /proc may be of another PID namespace


def start_of_living(pid: int) -> int | None:
    """Return the same of a process that has not exited."""
    fields = _stat_fields("self" if pid == os.getpid() else pid)
    return None if _is_zombie(fields) else _number(fields, 19)


def seconds_running(pid: int) -> float | None:
    """Return how long ago the process started; None for a process that cannot be seen."""
    started = start_time(pid)
    return None if started is None else time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


@cache  # unshare(2) and setns(2) change that of later children only
def pid_namespace() -> int | None:
    """Return the inode of this process's PID namespace, which identifies it on this host; None without /proc."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return None


os.register_at_fork(after_in_child=pid_namespace.cache_clear)


def namespace_text(namespace: int | None) -> str:
    """Return where the processes of a PID namespace are, seen from this one: "in a container" and the like; "" if
    here."""
    own = pid_namespace()
    if namespace is None or namespace == own:
        return ""
    if own == FIRST_PID_NAMESPACE:
        return "in a container"
    return "outside this container" if namespace == FIRST_PID_NAMESPACE else "in another container"


def thread_group(pid: int) -> int | None:
    """Return the pid of the process that has this thread, which is ``pid`` for its main thread; None if it cannot be
    seen."""
    with suppress(OSError, OverflowError, AttributeError):  # it takes the main thread only; old hosts lack it
        next(map(os.close, map(os.pidfd_open, (pid,))))  # one call, for a handler may raise after each
        return pid
    return next(iter(_status_numbers(pid, b"Tgid:")), None)


def parent_of(pid: int) -> int | None:
    """Return the parent's pid; None for a process that cannot be seen."""
    return _number(_stat_fields(pid), 1)


def is_stopped(pid: int, known: dict[int | bytes, bool] | None = None) -> bool:
    """Return whether the process is stopped (SIGSTOP, a suspended job) or frozen by a cgroup v2 freezer.

    Args:
        known: the answers for processes and cgroups, filled here, so that one look asks for each once.
    """
    known = {} if known is None else known
    if pid not in known:
        known[pid] = _stat_fields(pid)[:1] == [b"T"] or _is_frozen(pid, known)
    return known[pid]


def is_running(pid: int) -> bool:
    """Return whether the process runs or waits for a CPU."""
    return _stat_fields(pid)[:1] == [b"R"]


def _is_frozen(pid: int, known: dict[int | bytes, bool]) -> bool:
    for line in _read(f"/proc/{pid}/cgroup").split(b"\n"):
        if line.startswith(b"0::/") and b"/../" not in line + b"/":  # it is none of those that are seen here
            if line not in known:
                known[line] = b"frozen 1" in _read("/sys/fs/cgroup" + os.fsdecode(line[3:]) + "/cgroup.events")
            return known[line]
    return False


def open_files(pid: int | str) -> dict[int, str] | None:
    """Return descriptor -> the file it refers to, as the kernel writes it (``/path``, ``/path (deleted)``,
    ``pipe:[1]``).

    None if the process has exited, this user may not read its descriptors, or it has more than 4,096 of them.
    """
    directory = f"/proc/{pid}/fd"
    found: dict[int, str] = {}
    try:
        with os.scandir(directory) as entries:
            for number, entry in enumerate(entries):
                if number >= _MOST_FILES:
                    return None
                try:
                    found[int(entry.name)] = os.readlink(f"{directory}/{entry.name}")
                except OSError:
                    continue  # closed meanwhile
    except OSError:
        return None
    return found


def ancestors(pid: int) -> list[int]:
    """Return the pids of the parent, its parent and so on, as far as /proc shows them."""
    found: list[int] = []
    parent = parent_of(pid)
    while parent and parent not in found:
        found.append(parent)
        parent = parent_of(parent)
    return found


def descendants(pid: int) -> list[int]:
    """Return the pids of the children, their children and so on, in no particular order. They may change at any
    time."""
    children: dict[int | None, list[int]] = {}
    for one in pids():
        children.setdefault(parent_of(one), []).append(one)
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


@cache
def user_name(uid: int) -> str:
    """Return the login name of a uid, or the number as text if it has none.

    Cached, because a directory service may take seconds to answer.
    """
    import pwd

    # Before Python 3.11 the exception of a handler is lost where there is no such user.
    with suppress(KeyError, OverflowError), DeferredSignals():
        return pwd.getpwuid(uid).pw_name
    return str(uid)


@cache
def is_unknown_user(uid: int) -> bool:
    """Return whether this uid stands for all users whom the user namespace of this process does not know."""
    overflow = _read("/proc/sys/kernel/overflowuid").strip()
    return not has_all_ids() and uid == (int(overflow) if overflow.isdigit() else 65534)


@cache  # what was root of a user namespace stays that, and a claim asks several times
def has_all_ids() -> bool:
    """Return whether all users of the host are users here, or the kernel has no user namespaces."""
    return _read("/proc/self/uid_map").split() in ([], [b"0", b"0", b"4294967295"])


def uid_of(pid: int) -> int | None:
    """Return the effective uid of the process; None if it has exited."""
    with suppress(OSError):
        return os.stat(f"/proc/{pid}").st_uid
    return None


def real_uid_of(pid: int) -> int | None:
    """Return the real uid of the process, which a program that changes its user (su, sudo) has from who started it at
    first; None if it has exited or cannot be seen."""
    return next(iter(_status_numbers(pid, b"Uid:")), None)


def family_of(pid: int) -> tuple[int, tuple[int, ...]] | None:
    """Return the effective uid of the process, and the pids of it and its ancestors.

    None if it cannot be seen, and if it runs in a PID namespace of its own (a container), where parents tell nothing.
    """
    uids = _status_numbers(pid, b"Uid:")
    known = len(uids) > 1 and len(_status_numbers(pid, b"NSpid:")) == 1
    return (uids[1], (pid, *ancestors(pid))) if known else None


def user_of(pid: int) -> str | None:
    """Return the login name of the process's effective user; None if the process has exited."""
    uid = uid_of(pid)
    return None if uid is None else user_name(uid)


def command_of(pid: int, limit: int = 200) -> str | None:
    """Return the command line, arguments separated by blanks, cut to ``limit`` characters.

    Kernel threads and zombies have no command line; for them it is the name of the task.
    """
    return printable(" ".join(arguments_of(pid))[:limit]) or None


def arguments_of(pid: int) -> list[str]:
    """Return the program and its arguments, of which 4 KiB are read, printable or not; [""] if it has exited."""
    line = _read(f"/proc/{pid}/cmdline", _LONGEST_COMMAND).rstrip(b"\0") or _read(f"/proc/{pid}/comm").strip()
    return line.decode("utf-8", "replace").split("\0")


def lasting(name: str, new: _T) -> _T:
    """Return what this process has under a name, at first ``new``. It outlives a reload of all modules, as by IPython's
    autoreload: locks that nobody knew of any more would be held to the end of the process."""
    kept: _T = vars(sys).setdefault("_safe_gpu", {}).setdefault(name, new)
    return kept


def describe_process(pid: int) -> tuple[str, str] | None:
    """Return (user, command) of a process, or None if /proc does not show it."""
    user = user_of(pid)
    return None if user is None else (user, command_of(pid) or "")


def flock_holders(inodes: Collection[int]) -> dict[int, list[int]]:
    """Return inode -> pids that hold a flock or POSIX lock on it, from /proc/locks.

    Only inodes are compared, because on overlay file systems the device numbers in /proc/locks differ from those of
    stat. The kernel does not show locks held in other pid namespaces. It writes the table a page at a time, and leaves
    locks out where others come and go meanwhile. How long it takes depends on other users, so host.lock must not be
    held.
    """
    holders: dict[int, list[int]] = {}
    wanted = {b"%d" % inode for inode in inodes}
    until = time.thread_time() + LONGEST_READ
    for number, line in enumerate(lines_of("/proc/locks")):
        if not number % 64 and time.thread_time() > until:
            break
        fields = line.split()
        if len(fields) < 8 or fields[1] == b"->" or fields[5].rpartition(b":")[2] not in wanted:
            continue
        pid, known = _number(fields, 4), holders.setdefault(int(fields[5].rpartition(b":")[2]), [])
        if pid and pid not in known:
            known.append(pid)
    return holders


def lines_of(path: str) -> Iterator[bytes]:
    """Yield the lines of a table of the kernel, one at a time: other users can make it long. None if it cannot be
    read."""
    try:
        with open(path, "rb") as file:
            yield from file
    except OSError:
        return


class FileSystem(NamedTuple):
    """A file system as it is mounted: its type, and where. Each is "" where that is hidden."""

    kind: str = ""
    point: str = ""


def file_system_of(fd: int) -> FileSystem:
    """Return the file system that an open descriptor lies on, as in /proc/self/mountinfo.

    The mount is found by its id, not by device number: those differ on overlay and btrfs file systems.
    """
    info = b"\n" + (read_start(f"/proc/self/fdinfo/{fd}", 4096) or b"")
    mount = info.partition(b"\nmnt_id:\t")[2].partition(b"\n")[0]
    for line in lines_of("/proc/self/mountinfo"):
        fields, _, tail = line.partition(b" - ")
        number, _, _, _, point, *_ = [*fields.split(b" "), *[b""] * 5]
        if number == mount:
            return FileSystem(tail.split(b" ")[0].decode("ascii", "replace"), os.fsdecode(point))
    return FileSystem()


@cache
def file_system_at(path: str, device: int) -> FileSystem:
    """Return the file system of a directory that is on this device, looked up once: that takes longer than to take
    a lock."""
    try:
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return FileSystem()  # it was removed
    try:
        return file_system_of(fd)
    finally:
        os.close(fd)


def sees_network_devices() -> bool:
    """Return whether an interface of this network namespace is a device. /sys may be of another one, so it is not
    listed."""
    from _socket import if_nameindex  # the module socket takes 15 ms to import

    with suppress(OSError):
        return any(os.path.exists(f"/sys/class/net/{name}/device") for _, name in if_nameindex())
    return False
