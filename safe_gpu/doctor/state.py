"""Checks of the state directory: is it there, is it open to all, does locking work in it, does it stay."""

from __future__ import annotations

import os
import stat
import time

from .. import procfs
from ..coordination.files import NETWORK_TYPES, StateDir, file_system_type
from ..coordination.host_lock import HostLock, lock_file
from ..errors import LockTimeout, StateDirError
from .check import Finding, Host, failed, passed, skipped, warning

__all__ = [
    "cleaning",
    "file_system",
    "locks",
    "protected_regular",
    "removed_leases",
    "room",
    "state_directory",
]

_ELSEWHERE = "set SAFE_GPU_DIR, for all users, to a directory on a local disk that all of them can write (mode 1777)"
_PATIENCE = 5.0
_LONG_HOLD = 1.0

_KIB = 1 << 10
_LEAST_BYTES = 64 * _KIB
_LEAST_FILES = 64


def _existing(path: str) -> str:
    """The directory itself, or the nearest above it that exists."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def state_directory(host: Host) -> Finding:
    """Is it a plain directory that everybody can use?"""
    path = host.path
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return _not_there(path)
    except OSError as err:
        return failed(f"{path} cannot be looked at ({err.strerror})", _ELSEWHERE)
    if stat.S_ISLNK(status.st_mode):
        return failed(f"{path} is a symbolic link, which is never followed", f"rm {path}, or {_ELSEWHERE}")
    if not stat.S_ISDIR(status.st_mode):
        return failed(f"{path} is not a directory", f"rm {path}, or {_ELSEWHERE}")
    for part in (path, os.path.join(path, "leases"), os.path.join(path, "queue")):
        trouble = _trouble_with_directory(part)
        if trouble is not None:
            return trouble
    return _trouble_with_files(path) or _trouble_above(path) or passed(f"{path}, mode 1777, {_owner(status)}")


def _not_there(path: str) -> Finding:
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        return failed(f"{path} cannot be made: {parent} does not exist", f"mkdir -p {parent}, or {_ELSEWHERE}")
    if not os.access(parent, os.W_OK | os.X_OK):
        return failed(f"{path} cannot be made: {parent} is closed to you", f"mkdir -m 1777 {path} as root")
    return _trouble_above(path) or passed(f"{path} is not there yet: the first claim makes it")


def _owner(status: os.stat_result) -> str:
    return f"belongs to {procfs.user_name(status.st_uid)}"


def _trouble_with_directory(path: str) -> Finding | None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None  # a part that the first claim makes
    except OSError as err:
        return failed(f"{path} cannot be looked at ({err.strerror})", f"chmod 1777 {os.path.dirname(path)}")
    mode = stat.S_IMODE(status.st_mode)
    what = f"{path} has mode {mode:04o} and {_owner(status)}"
    if not stat.S_ISDIR(status.st_mode):
        return failed(f"{path} is not a plain directory", f"rm {path}")
    if not os.access(path, os.W_OK | os.X_OK | os.R_OK):
        return failed(f"{what}: it is closed to you", f"chmod 1777 {path}, as its owner or root")
    if mode & 0o777 != 0o777:
        return warning(f"{what}: other users cannot claim GPUs", f"chmod 1777 {path}, as its owner or root")
    if not mode & stat.S_ISVTX:
        return warning(f"{what}: anybody may remove the leases of others", f"chmod 1777 {path}, as its owner or root")
    return None


def _trouble_with_files(path: str) -> Finding | None:
    leases = os.path.join(path, "leases")
    names = [os.path.join(path, "host.lock")]
    if os.path.isdir(leases):
        names += sorted(entry.path for entry in os.scandir(leases) if entry.name.endswith(".lock"))
    for name in names:
        try:
            status = os.lstat(name)
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(status.st_mode):
            return failed(f"{name} is not a regular file, which is never opened", f"rm {name}, as its owner or root")
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o666 != 0o666:
            what = f"{name} has mode {mode:04o} and {_owner(status)}: it is closed to others"
            fix = f"chmod 666 {name}, as its owner or root"
            return warning(what, fix) if os.access(name, os.R_OK | os.W_OK) else failed(what, fix)
    return None


def _trouble_above(path: str) -> Finding | None:
    """A directory on the way that not everybody may enter splits a host's users: some claim, others do not see it."""
    above = os.path.dirname(path)
    while above != "/":
        try:
            status = os.stat(above)
        except OSError as err:
            return failed(f"{above}, above {path}, cannot be looked at ({err.strerror})", _ELSEWHERE)
        if not status.st_mode & stat.S_IXOTH:
            mode = stat.S_IMODE(status.st_mode)
            return warning(
                f"{above}, above {path}, has mode {mode:04o}: other users cannot come here, and claims do not protect "
                "against them",
                _ELSEWHERE,
            )
        above = os.path.dirname(above)
    return None


def file_system(host: Host) -> Finding:
    """Do locks work there as they must?"""
    where = _existing(host.path)
    try:
        fd = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as err:
        return skipped(f"{where} cannot be opened ({err.strerror})")
    try:
        kind = file_system_type(fd)
        read_only = bool(os.fstatvfs(fd).f_flag & os.ST_RDONLY)
    finally:
        os.close(fd)
    if kind in NETWORK_TYPES:
        return failed(
            f"{where} is on a network file system ({kind}), where locks do not work as on a local one", _ELSEWHERE
        )
    if read_only:
        return failed(f"{where} is on a read-only file system ({kind or 'unknown type'})", _ELSEWHERE)
    return passed(f"{kind or 'of unknown type'}, at {where}")


def room(host: Host) -> Finding:
    """Is there room for a few small files?"""
    where = _existing(host.path)
    numbers = os.statvfs(where)
    free = numbers.f_bavail * numbers.f_frsize
    if free < _LEAST_BYTES:
        return failed(f"{free // _KIB} KiB are free at {where}", f"free some space there, or {_ELSEWHERE}")
    if numbers.f_files and numbers.f_favail < _LEAST_FILES:
        return failed(f"{numbers.f_favail} inodes are free at {where}", f"remove some files there, or {_ELSEWHERE}")
    return passed(f"{free >> 20} MiB are free")


def locks(host: Host) -> Finding:
    """Take host.lock, make a file and see that a second lock on it is refused."""
    if not os.path.lexists(os.path.join(host.path, "host.lock")):
        return skipped(f"nothing has been locked in {host.path} yet")
    began = time.monotonic()
    try:
        with HostLock(began + _PATIENCE, host.path):
            waited = time.monotonic() - began
        excluded = _try_a_lock(host.path)
    except LockTimeout as err:
        fix = "end the process that holds it (it cannot be seen from here: look on the host, as root)"
        if err.pid is not None:
            fix = f"kill -CONT {err.pid} if it is stopped, else end it"
        return failed(f"host.lock was not to be had in {_PATIENCE:g} s: {err}", fix)
    except StateDirError as err:
        return failed(str(err), _ELSEWHERE)
    if not excluded:
        return failed(f"two locks on one file in {host.path} do not exclude each other", _ELSEWHERE)
    if waited > _LONG_HOLD:
        return warning(
            f"host.lock was held by others for {waited:.1f} s; it should be for microseconds",
            "look for a stopped or starved process that uses safe_gpu (safe-gpu status)",
        )
    return passed("host.lock was free, and locks exclude each other")


def _try_a_lock(path: str) -> bool:
    name = f".doctor.{os.getpid()}"
    with StateDir(path) as root, StateDir("leases", root) as directory:
        first = directory.open_or_create(name)
        try:
            second = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory.fd)
            try:
                return lock_file(first) and not lock_file(second)
            finally:
                os.close(second)
        except OSError as err:
            raise StateDirError(f"a lock in {path} failed ({err.strerror})", path=path, errno=err.errno) from err
        finally:
            directory.unlink(name)
            os.close(first)


# What others do to the directory

_RULES = ("etc/tmpfiles.d", "run/tmpfiles.d", "usr/local/lib/tmpfiles.d", "usr/lib/tmpfiles.d")
_AGED_TYPES = frozenset("dDevqQC")
_CLEANERS = ("etc/cron.daily/tmpwatch", "etc/cron.daily/tmpreaper")


def cleaning(host: Host) -> Finding:
    """Does something remove files there that were not touched for days, lease files that are held among them?"""
    exempt = "safe-gpu.conf"
    fix = f"as root: echo 'x {host.path}' > /etc/tmpfiles.d/{exempt}"
    for cleaner in _CLEANERS:
        if os.path.exists(os.path.join(host.root, cleaner)) and host.path.startswith(("/tmp/", "/var/tmp/")):
            return warning(f"/{cleaner} removes old files below /tmp", f"exempt {host.path} in its configuration")
    if not os.path.isdir(os.path.join(host.root, "run/systemd/system")):
        return passed("systemd, which would do it, does not run here")
    aged = ""
    longest = -1
    for kind, path, age, source in _rules(host):
        covers = _covers(path, host.path)
        if kind[0] in "xX" and covers:
            return passed(f"{source} exempts it")
        if kind[0] in _AGED_TYPES and covers and len(path) > longest:
            longest = len(path)
            aged = f"{path} after {age} ({source})" if age not in ("", "-") else ""
    if aged:
        return warning(f"systemd-tmpfiles removes files below {aged}, lease files that are held among them", fix)
    return passed("no rule of systemd-tmpfiles removes old files there")


def _rules(host: Host) -> list[tuple[str, str, str, str]]:
    """(type, path, age, file) of every line of tmpfiles.d(5); a file in /etc replaces its namesake in /usr/lib."""
    files: dict[str, str] = {}
    for directory in _RULES:
        try:
            names = os.listdir(os.path.join(host.root, directory))
        except OSError:
            continue
        for name in names:
            if name.endswith(".conf"):
                files.setdefault(name, f"{directory}/{name}")
    rules = []
    for name in sorted(files):
        for line in (host.read(files[name]) or "").splitlines():
            fields = line.split()
            if len(fields) >= 2 and not line.lstrip().startswith("#"):
                rules.append((fields[0], fields[1], fields[5] if len(fields) > 5 else "-", f"/{files[name]}"))
    return rules


def _covers(rule: str, path: str) -> bool:
    """Whether a rule's path or glob is the directory or one above it."""
    from fnmatch import fnmatchcase

    while path != "/":
        if fnmatchcase(path, rule.rstrip("/")):
            return True
        path = os.path.dirname(path)
    return False


def removed_leases(host: Host) -> Finding:
    """Are there claims whose lease file was removed under them? To others their GPUs look unclaimed."""
    leases = os.path.join(os.path.realpath(host.path), "leases") + "/"
    for pid in procfs.pids():
        for number, target in (procfs.open_files(pid) or {}).items():
            if target.startswith(leases) and target.endswith(".lock (deleted)") and _is_locked(pid, number):
                name = target[len(leases) :].removesuffix(".lock (deleted)")
                return warning(
                    f"the lease of {name} that process {pid} ({procfs.user_of(pid)}) holds was removed from {leases}: "
                    "only the driver's process list protects that GPU now",
                    "let nothing clean that directory; claim again in that process when it suits",
                )
    return passed("no process that can be looked at holds a lease that was removed")


def _is_locked(pid: int, number: int) -> bool:
    try:
        inode = os.stat(f"/proc/{pid}/fd/{number}").st_ino
    except OSError:
        return False
    return inode in procfs.flock_holders({inode})


def protected_regular(host: Host) -> Finding:
    """What the kernel's fs.protected_regular means for shared lock files."""
    value = host.read("proc/sys/fs/protected_regular")
    if value is None:
        return skipped("this kernel has no fs.protected_regular")
    meaning = {
        "0": "anybody may open others' files in sticky directories with O_CREAT",
        "1": "nobody may open others' files in world-writable sticky directories with O_CREAT",
        "2": "nobody may open others' files in group- or world-writable sticky directories with O_CREAT",
    }.get(value, "an unknown value")
    return passed(f"{value}: {meaning}; safe_gpu does not need to")
