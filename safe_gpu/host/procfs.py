"""What ``/proc`` tells of processes and mounts, and whether this network namespace seems to be the host's.

The functions always read the real ``/proc``. If the kernel does not give an answer (another pid namespace, hidepid, a
process that has just exited), or none that can be parsed, the result is None or empty; no error is raised.

Users choose names that the kernel writes there, of processes, files, mounts and cgroups. It escapes line feeds in them,
and no other line breaks: so its text is split at line feeds only.
"""

import os
import pwd
import sys
import time
from _socket import if_nameindex  # the module socket takes 15 ms to import
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import NamedTuple, TypeVar

from .foreign_files import MOST_BYTES, printable, read_start
from .signals import DeferredSignals

_T = TypeVar("_T")

FIRST_PID_NAMESPACE = 4026531836
"""The inode of the initial PID namespace, a constant of the kernel (PROC_PID_INIT_INO)."""

_LONGEST_COMMAND = 1 << 12  # bytes of a command line

_MOST_FILES = 1 << 12  # descriptors of one process

_OVERFLOW_UID = 65534  # of users without a number, where /proc does not say

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


class _Task(NamedTuple):
    """What the kernel says of a process or a thread in /proc/PID/stat; a number is None if it cannot be parsed.

    ``start`` is in clock ticks since boot.
    """

    state: bytes
    parent: int | None
    session: int | None
    flags: int
    threads: int | None
    start: int | None

    @property
    def is_zombie(self) -> bool:
        """Whether all of the process has exited, and not only its first thread (pthread_exit(3))."""
        return self.state in (b"Z", b"X") and self.threads is not None and self.threads < 2

    @property
    def is_exiting(self) -> bool:
        return bool(self.flags & _PF_EXITING)


def _read(path: str, most: int = MOST_BYTES) -> bytes:
    return read_start(path, most) or b""


def _is_number(field: bytes) -> bool:
    return field.isdigit() and len(field) < 20


def _number(fields: Sequence[bytes], index: int) -> int | None:
    if index >= len(fields) or not _is_number(fields[index]):
        return None
    return int(fields[index])


def _task(task: int | str) -> _Task | None:
    """Return what the kernel says of a process, or of the thread ``PID/task/TID``; None if /proc does not show it."""
    # The name, field 2 in brackets, may contain blanks and brackets.
    fields = _read(f"/proc/{task}/stat").rpartition(b")")[2].split()
    if not fields:
        return None
    numbered = [b"", b"", b"", *fields]  # as in proc_pid_stat(5), where the state is field 3
    return _Task(
        state=numbered[3],
        parent=_number(numbered, 4),
        session=_number(numbered, 6),
        flags=_number(numbered, 9) or 0,
        threads=_number(numbered, 20),
        start=_number(numbered, 22),
    )


def _name_in_proc(pid: int) -> int | str:
    """Return the name of a process in /proc, which may be of another PID namespace than this process."""
    if pid == os.getpid():
        return _own_name_in_proc()
    return pid


def _own_name_in_proc() -> str:
    """Return the name of the first thread of this process. Of the process itself an emulator (qemu-user) shows
    another ``stat``, without a start."""
    try:
        return f"self/task/{os.readlink('/proc/self')}"
    except OSError:
        return "self"


def _status_numbers(pid: int, name: bytes) -> list[int]:
    """Return the numbers in one line of /proc/PID/status; none if there are other words in it."""
    for line in _read(f"/proc/{pid}/status").split(b"\n"):
        if not line.startswith(name):
            continue
        _, *fields = line.split()
        if not all(_is_number(field) for field in fields):
            return []
        return [int(field) for field in fields]
    return []


def _status_number(pid: int, name: bytes) -> int | None:
    """Return the first of these numbers; None if there is none."""
    numbers = _status_numbers(pid, name)
    if not numbers:
        return None
    return numbers[0]


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
    process = _task(pid)
    return process is not None and process.is_zombie


def is_forked() -> bool:
    """Return whether this process was forked, and has executed no program since."""
    process = _task(_own_name_in_proc())
    return process is not None and bool(process.flags & _PF_FORKNOEXEC)


def is_exiting(pid: int) -> bool:
    """Return whether the process has exited or all its threads are exiting, so that the kernel may have released its
    locks.

    The threads of a process that was killed take their time to free memory of a GPU, although the first has been a
    zombie for a while.
    """
    first_thread = _task(pid)  # before: one that ends meanwhile has ended
    if has_ended(pid):
        return True
    if first_thread is None or not first_thread.is_exiting:
        return False
    return all(_thread_is_exiting(thread) for thread in _other_threads(pid))


def _thread_is_exiting(thread: str) -> bool:
    """Return whether a thread exits, or is not shown any more."""
    task = _task(thread)
    return task is None or task.is_exiting


def _other_threads(pid: int) -> Iterator[str]:
    """Yield ``PID/task/TID`` of each thread but the first."""
    with suppress(OSError), os.scandir(f"/proc/{pid}/task") as threads:
        for thread in threads:
            if thread.name != str(pid):
                yield f"{pid}/task/{thread.name}"


def start_time(pid: int) -> int | None:
    """Return the start time of the process in clock ticks since boot. Pid and start time together identify one
    process."""
    process = _task(_name_in_proc(pid))
    if process is None:
        return None
    return process.start


def start_of_living(pid: int) -> int | None:
    """Return the same of a process that has not exited."""
    process = _task(_name_in_proc(pid))
    if process is None or process.is_zombie:
        return None
    return process.start


def is_start(recorded: int | None, pid: int, shown: int | None) -> bool:
    """Return whether a start time from a record is the one that the kernel reports here.

    The kernel adds to all start times the offset of the time namespace of who reads them (Linux 5.11, see
    time_namespaces(7)), so a record may have them as they are in another one: in the first, or in that of the process.

    Args:
        recorded: in clock ticks since boot; None is not known.
        shown: of :func:`start_time`.
    """
    if recorded is None or shown is None:
        return False
    if recorded == shown:
        return True
    own = _boot_offset("self")
    other = _boot_offset(pid)
    if own == other == 0:
        return False
    in_the_first = shown - own
    # Each offset may have a part of a tick.
    return abs(recorded - in_the_first) <= 1 or abs(recorded - in_the_first - other) <= 1


def _boot_offset(task: int | str) -> int:
    """Return what is added to the clock since boot in the time namespace of a process, in clock ticks.

    It is 0 where the kernel has no such namespaces, or does not report it. Of a process that has made one for its
    children the kernel reports that one's.
    """
    for line in _read(f"/proc/{task}/timens_offsets").split(b"\n"):
        fields = line.split()
        if len(fields) != 3 or fields[0] != b"boottime":
            continue
        _, seconds, nanoseconds = fields
        if _is_number(seconds.removeprefix(b"-")) and _is_number(nanoseconds):
            ticks = os.sysconf("SC_CLK_TCK")
            return int(seconds) * ticks + int(nanoseconds) * ticks // 10**9
    return 0


def seconds_running(pid: int) -> float | None:
    """Return how long ago the process started; None for a process that cannot be seen."""
    started = start_time(pid)
    if started is None:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


@cache
def pid_namespace() -> int | None:
    """Return the inode of this process's PID namespace, which identifies it on this host; None without /proc.

    Cached, because each of thousands of tickets is compared with it. unshare(2) and setns(2) change the namespace of
    later children only.
    """
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
    if namespace == FIRST_PID_NAMESPACE:
        return "outside this container"
    return "in another container"


def thread_group(pid: int) -> int | None:
    """Return the pid of the process that has this thread, which is ``pid`` for its main thread; None if it cannot be
    seen."""
    return _status_number(pid, b"Tgid:")


def parent_of(pid: int) -> int | None:
    """Return the parent's pid; None for a process that cannot be seen."""
    process = _task(pid)
    if process is None:
        return None
    return process.parent


def is_running(pid: int) -> bool:
    """Return whether the process runs or waits for a CPU."""
    process = _task(pid)
    return process is not None and process.state == b"R"


def is_stopped(pid: int, known: dict[int | bytes, bool] | None = None) -> bool:
    """Return whether the process is stopped (SIGSTOP, a suspended job) or frozen by a cgroup v2 freezer.

    Args:
        known: the answers for processes and cgroups, filled here, so that a look at thousands of tickets asks for each
            once.
    """
    if known is None:
        known = {}
    if pid not in known:
        process = _task(pid)
        known[pid] = (process is not None and process.state == b"T") or _is_frozen(pid, known)
    return known[pid]


def _is_frozen(pid: int, known: dict[int | bytes, bool]) -> bool:
    cgroup = _cgroup_of(pid)
    if cgroup is None:
        return False
    if cgroup not in known:
        known[cgroup] = b"frozen 1" in _read("/sys/fs/cgroup" + os.fsdecode(cgroup) + "/cgroup.events")
    return known[cgroup]


def _cgroup_of(pid: int) -> bytes | None:
    """Return the path of the cgroup v2 of a process; None if it is none of those that are seen here."""
    for line in _read(f"/proc/{pid}/cgroup").split(b"\n"):
        path = line.removeprefix(b"0::")
        if line.startswith(b"0::/") and b"/../" not in path + b"/":
            return path
    return None


def memory_left_in_cgroup() -> int | None:
    """Return the bytes of memory that the cgroups of this process leave it, without what the page cache would give
    back; None if none of them has a limit."""
    left = []
    for line in _read("/proc/self/cgroup").split(b"\n"):
        number, _, rest = line.partition(b":")
        controllers, _, path = rest.partition(b":")
        if number == b"0":
            files = _CGROUP_V2
        elif b"memory" in controllers.split(b","):
            files = _CGROUP_V1
        else:
            continue
        place = files.root + os.fsdecode(path).rstrip("/")
        while place.startswith(files.root):  # each of those above has a limit of its own
            found = _left_in(place, files)
            if found is not None:
                left.append(found)
            place = os.path.dirname(place)
    return min(left, default=None)


class _CgroupFiles(NamedTuple):
    """Where a version of cgroups tells of memory: the root, and the names of two files in each cgroup."""

    root: str
    limit: str
    usage: str


_CGROUP_V1 = _CgroupFiles("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
_CGROUP_V2 = _CgroupFiles("/sys/fs/cgroup", "memory.max", "memory.current")


def _left_in(place: str, files: _CgroupFiles) -> int | None:
    """Return the bytes that one cgroup leaves, by its own limit; None if it has none."""
    limit = _read(f"{place}/{files.limit}").strip()
    usage = _read(f"{place}/{files.usage}").strip()
    if not (_is_number(limit) and _is_number(usage)):  # "max", or no such file
        return None
    cache = 0
    for line in _read(f"{place}/memory.stat").split(b"\n"):
        name, _, value = line.partition(b" ")
        if name in (b"inactive_file", b"active_file") and _is_number(value):
            cache += int(value)
    return max(0, int(limit) - int(usage) + cache)


def descriptors(pid: int) -> Iterator[str]:
    """Yield the numbers of the open descriptors of a process, as far as this user may see them."""
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            yield entry.name


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


def may_descend_from(pid: int, ancestor: int) -> bool:
    """Return whether a process may have been started by another one, or by one that this has started.

    Its parents tell that while they live. The child of one that has ended has another parent, outside its session
    (setsid(2)) or the first process of the PID namespace: then it may have come of any older one of the session. One
    that has made a session of its own after that (a daemon) is not known any more.
    """
    family = [pid, *ancestors(pid)]
    if ancestor in family:
        return True
    elder = _task(ancestor)
    if elder is None or elder.session is None:
        return False
    others = {ancestor, *ancestors(ancestor)}
    oldest = pid  # that is no ancestor of both
    for one in family:
        if one in others:
            break
        oldest = one
    orphan = _task(oldest)
    if orphan is None or orphan.session != elder.session or oldest == orphan.session:
        return False
    parent = _task(orphan.parent or 0)
    if parent is not None and parent.session == elder.session and orphan.parent != 1:
        return False
    return orphan.start is not None and elder.start is not None and orphan.start >= elder.start


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
    # Before Python 3.11 the exception of a handler is lost where there is no such user.
    with suppress(KeyError, OverflowError), DeferredSignals():
        return pwd.getpwuid(uid).pw_name
    return str(uid)


@cache
def is_unknown_user(uid: int) -> bool:
    """Return whether this uid stands for all users whom the user namespace of this process does not know.

    Cached, because the owner of each of thousands of files is asked for.
    """
    if has_all_ids():
        return False
    overflow = _read("/proc/sys/kernel/overflowuid").strip()
    if not overflow.isdigit():
        return uid == _OVERFLOW_UID
    return uid == int(overflow)


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
    return _status_number(pid, b"Uid:")


def family_of(pid: int) -> tuple[int, tuple[int, ...]] | None:
    """Return the effective uid of the process, and the pids of it and its ancestors.

    None if it cannot be seen, and if it runs in a PID namespace of its own (a container), where parents tell nothing.
    """
    uids = _status_numbers(pid, b"Uid:")
    if len(uids) < 2:
        return None
    pids_in_namespaces = _status_numbers(pid, b"NSpid:")
    if len(pids_in_namespaces) != 1:
        return None
    _real, effective, *_ = uids
    return effective, (pid, *ancestors(pid))


def user_of(pid: int) -> str | None:
    """Return the login name of the process's effective user; None if the process has exited."""
    uid = uid_of(pid)
    if uid is None:
        return None
    return user_name(uid)


def command_of(pid: int, longest: int = 200) -> str | None:
    """Return the command line, arguments separated by blanks, cut to ``longest`` characters.

    Kernel threads and zombies have no command line; for them it is the name of the task.
    """
    return printable(" ".join(arguments_of(pid))[:longest]) or None


def arguments_of(pid: int) -> list[str]:
    """Return the program and its arguments, of which 4 KiB are read, printable or not; [""] if it has exited."""
    line = _read(f"/proc/{pid}/cmdline", _LONGEST_COMMAND).rstrip(b"\0")
    if not line:
        line = _read(f"/proc/{pid}/comm").strip()
    return line.decode("utf-8", "replace").split("\0")


def process_global(name: str, new: _T) -> _T:
    """Return the object that this process keeps under a name, which is ``new`` on the first call.

    It survives a reload of all modules, as by IPython's autoreload: locks that nobody knew of any more would be held to
    the end of the process.
    """
    objects = vars(sys).setdefault("_safe_gpu", {})
    kept: _T = objects.setdefault(name, new)
    return kept


def describe_process(pid: int) -> tuple[str, str] | None:
    """Return (user, command) of a process, or None if /proc does not show it."""
    user = user_of(pid)
    if user is None:
        return None
    return user, command_of(pid) or ""


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
        if number % 64 == 0 and time.thread_time() > until:
            break
        fields = line.split()
        if len(fields) < 8:
            continue
        _, kind, _, _, _, file, *_ = fields
        inode = file.rpartition(b":")[2]
        if kind == b"->" or inode not in wanted:  # -> is a process that waits for the lock
            continue
        pids_of_file = holders.setdefault(int(inode), [])
        pid = _number(fields, 4)
        if pid and pid not in pids_of_file:
            pids_of_file.append(pid)
    return holders


def lines_of(path: str) -> Iterator[bytes]:
    """Yield the lines of a table of the kernel, one at a time, since other users can make it long; no line if it cannot
    be read."""
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
    info = b"\n" + _read(f"/proc/self/fdinfo/{fd}", 4096)
    mount = info.partition(b"\nmnt_id:\t")[2].partition(b"\n")[0]
    for line in lines_of("/proc/self/mountinfo"):
        before, _, after = line.partition(b" - ")
        fields = before.split(b" ")
        if len(fields) > 4 and fields[0] == mount:
            kind = after.split(b" ")[0]
            return FileSystem(kind.decode("ascii", "replace"), os.fsdecode(fields[4]))
    return FileSystem()


@cache
def file_system_at(path: str, device: int) -> FileSystem:
    """Return the file system of a directory that is on this device.

    Cached, because a user who mounts file systems of FUSE can make the table of mounts long.
    """
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
    with suppress(OSError):
        return any(os.path.exists(f"/sys/class/net/{name}/device") for _, name in if_nameindex())
    return False
