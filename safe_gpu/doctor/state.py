"""Checks of the state directory: whether it exists, all users may use it, locks work in it, and files in it persist."""

from __future__ import annotations

import os
import stat
import time
from shlex import quote

from .. import procfs
from ..coordination.files import NETWORK_TYPES, PARTS, RULE, StateDir, file_system_type, root_owns
from ..coordination.leases import leases_of
from ..coordination.locks import HostLock, lock_file
from ..errors import LockTimeout, StateDirError
from ..programs import others_can_change
from .check import CheckedHost, Finding, failed, passed, skipped, warning

_ELSEWHERE = "set SAFE_GPU_DIR, for all users, to a directory on a local disk that all of them can write (mode 1777)"
_PATIENCE = 5.0
_LONG_HOLD = 1.0

_OPEN = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_KIB = 1 << 10
_LEAST_BYTES = 64 * _KIB
_LEAST_FILES = 64


def _existing(path: str) -> str:
    """The directory itself, or the nearest existing directory above it."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def state_directory(host: CheckedHost) -> Finding:
    """Is it a plain directory that every user can use?"""
    path = host.path
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return _not_there(path)
    except OSError as err:
        return failed(f"{path} cannot be examined ({err.strerror})", _ELSEWHERE)
    if stat.S_ISLNK(status.st_mode):
        return failed(f"{path} is a symbolic link, which is never followed", f"rm {quote(path)}, or {_ELSEWHERE}")
    if not stat.S_ISDIR(status.st_mode):
        return failed(f"{path} is not a directory", f"rm {quote(path)}, or {_ELSEWHERE}")
    try:
        root = os.open(path, _OPEN)
    except OSError as err:
        return failed(f"{path} cannot be examined ({err.strerror})", _ELSEWHERE)
    try:
        troubles = (_trouble_with_directory(root, path, part) for part in (".", "leases", "queue"))
        trouble = next(filter(None, troubles), None) or _trouble_with_files(root, host)
        risk = _risk_of_owner(root, path)
    finally:
        os.close(root)
    return trouble or _trouble_above(path) or risk or passed(f"{path}, mode 1777, {_owner(status)}")


def _not_there(path: str) -> Finding:
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        return failed(f"{path} cannot be created: no {parent}", f"mkdir -p {quote(parent)}, or {_ELSEWHERE}")
    if not os.access(parent, os.W_OK | os.X_OK):
        return failed(
            f"{path} cannot be created: you may not write to {parent}", f"as root: mkdir -m 1777 {quote(path)}"
        )
    return _trouble_above(path) or passed(f"{path} does not exist yet: the first claim creates it")


def _owner(status: os.stat_result) -> str:
    return f"belongs to {procfs.user_name(status.st_uid)}"


def _at(root: int, name: str) -> os.stat_result:
    """The status of a name in the state directory."""
    return os.stat(name, dir_fd=root, follow_symlinks=False)


def _risk_of_owner(root: int, path: str) -> Finding | None:
    """The sticky bit does not bind the owner of a directory."""
    for part in (".", *PARTS):
        try:
            uid = _at(root, part).st_uid
        except OSError:
            continue  # the first claim creates it
        if uid:
            return warning(
                f"{_join(path, part)} belongs to {procfs.user_name(uid)}, who can remove other users' files in it, "
                "root's too: waiters would lose their places, and claims that have only their lease files their GPUs",
                f"as root: {root_owns(path)}, which makes them root's at boot",
            )
    return None


def _join(path: str, part: str) -> str:
    return os.path.normpath(os.path.join(path, part))


def _trouble_with_directory(root: int, above: str, part: str) -> Finding | None:
    path = _join(above, part)
    try:
        status = _at(root, part)
    except FileNotFoundError:
        return None  # the first claim creates it
    except OSError as err:
        return failed(f"{path} cannot be examined ({err.strerror})", _ELSEWHERE)
    mode = stat.S_IMODE(status.st_mode)
    what = f"{path} has mode {mode:04o} and {_owner(status)}"
    if not stat.S_ISDIR(status.st_mode):
        return failed(f"{path} is not a plain directory", f"rm {quote(path)}, as its owner or root")
    if not os.access(part, os.W_OK | os.X_OK | os.R_OK, dir_fd=root, follow_symlinks=False):
        return failed(f"{what}: you may not use it", opened_to_all(path, status))
    if mode & 0o777 != 0o777:
        return warning(f"{what}: other users cannot claim GPUs", opened_to_all(path, status))
    if not mode & stat.S_ISVTX:
        return warning(f"{what}: every user may remove the leases of other users", opened_to_all(path, status))
    return None


def opened_to_all(path: str, status: os.stat_result) -> str:
    """How to set the mode of a directory. Root is never told to change a name that another user can replace by a link.
    That is who can change a directory above, and the owner of the name where that one is sticky."""
    command = f"chmod 1777 {quote(path)}"
    for_root = others_can_change(os.path.dirname(path)) is None
    if status.st_uid == 0:
        return f"as root: {command}" if for_root else _ELSEWHERE
    if status.st_uid == os.geteuid():
        return command
    way_out = f"as root, which ends no claim: rm -r {quote(path)}" if for_root else _ELSEWHERE
    return f"as {procfs.user_name(status.st_uid)}: {command}; or {way_out}"


def _trouble_with_files(root: int, host: CheckedHost) -> Finding | None:
    seen: dict[tuple[int, int], str] = {}
    # Other users may have made files of any other name.
    for name in ("host.lock", *(f"leases/{name}" for name in leases_of(one.gpu.uuid for one in host.status.gpus))):
        try:
            status = _at(root, name)
        except OSError:
            continue
        path = os.path.join(host.path, name)
        fix = f"rm {quote(path)}, as its owner or root"
        if (other := seen.setdefault((status.st_dev, status.st_ino), name)) != name:
            what = f"{path} is closed: a hard link, the same file as {other}; who made it is not known"
            return failed(what, f"rm {quote(path)}, as root")
        if not stat.S_ISREG(status.st_mode):
            return failed(f"{path} is not a regular file, and safe_gpu opens no other kind", fix)
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o666 != 0o666:
            what = f"{path} has mode {mode:04o} and {_owner(status)}: other users may not open it"
            mine = os.access(name, os.R_OK | os.W_OK, dir_fd=root, follow_symlinks=False)
            return warning(what, fix) if mine else failed(what, fix)
    return None


def _trouble_above(path: str) -> Finding | None:
    """A finding if not all users may enter the directories above: users who may not would not see the claims."""
    above = os.path.dirname(path)
    while above != "/":
        try:
            status = os.stat(above)
        except OSError as err:
            return failed(f"{above}, above {path}, cannot be examined ({err.strerror})", _ELSEWHERE)
        if not status.st_mode & stat.S_IXOTH:
            mode = stat.S_IMODE(status.st_mode)
            return warning(
                f"{above}, above {path}, has mode {mode:04o}: other users cannot enter it, and claims do not protect "
                "GPUs from them",
                _ELSEWHERE,
            )
        above = os.path.dirname(above)
    return None


def file_system(host: CheckedHost) -> Finding:
    """Is it on a local, writable file system? Locks do not work reliably on a network file system."""
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
        return failed(f"{where} is on a network file system ({kind}), where locks are not reliable", _ELSEWHERE)
    if read_only:
        return failed(f"{where} is on a read-only file system ({kind or 'unknown type'})", _ELSEWHERE)
    return passed(f"{kind or 'of unknown type'}, at {where}")


def room(host: CheckedHost) -> Finding:
    """Is there space for a few small files?"""
    where = _existing(host.path)
    numbers = os.statvfs(where)
    free = numbers.f_bavail * numbers.f_frsize
    if free < _LEAST_BYTES:
        return failed(f"{free // _KIB} KiB are free at {where}", f"free some space there, or {_ELSEWHERE}")
    if numbers.f_files and numbers.f_favail < _LEAST_FILES:
        return failed(f"{numbers.f_favail} inodes are free at {where}", f"remove some files there, or {_ELSEWHERE}")
    return passed(f"{free >> 20} MiB are free")


def locks(host: CheckedHost) -> Finding:
    """Can host.lock be taken, and is a second lock on a locked file refused?"""
    began = time.monotonic()
    try:
        with HostLock(began + _PATIENCE, host.path, make=False):
            waited = time.monotonic() - began
            excluded = not _locks_again(host.path)
    except FileNotFoundError:
        return skipped(f"nothing has been locked in {host.path} yet")
    except LockTimeout as err:
        fix = "end the process that holds it; it cannot be seen from here, so look on the host, as root"
        if err.pid is not None:
            fix = f"kill -CONT {err.pid} if it is stopped, else end it"
        return failed(f"host.lock could not be taken within {_PATIENCE:g} s: {err}", fix)
    except StateDirError as err:
        return failed(str(err), _ELSEWHERE)
    if not excluded:
        return failed(f"two locks on one file in {host.path} do not exclude each other", _ELSEWHERE)
    if waited > _LONG_HOLD:
        return warning(
            f"host.lock was held by others for {waited:.1f} s; normal are microseconds",
            "look for a process that uses safe_gpu and is stopped or gets no CPU time (safe-gpu status)",
        )
    return passed("host.lock was free, and locks exclude each other")


def _locks_again(path: str) -> bool:
    """Whether host.lock, which this process holds, can be locked a second time."""
    with StateDir(path, make=False) as root:
        fd = root.open("host.lock")
    if fd is None:
        return False
    try:
        return lock_file(fd)
    except OSError as err:
        raise StateDirError(f"a lock in {path} failed ({err.strerror})", path=path, errno=err.errno) from err
    finally:
        os.close(fd)


# Other programs that remove or protect files

_RULES = ("etc/tmpfiles.d", "run/tmpfiles.d", "usr/local/lib/tmpfiles.d", "usr/lib/tmpfiles.d")
_AGED_TYPES = frozenset("dDevqQC")
_CLEANERS = ("etc/cron.daily/tmpwatch", "etc/cron.daily/tmpreaper")


def cleaning(host: CheckedHost) -> Finding:
    """Does something remove old files there? It would also remove lease files that are held."""
    fix = f"as root: echo {quote(f'x {host.path}')} > {RULE}"
    for cleaner in _CLEANERS:
        if os.path.exists(os.path.join(host.root, cleaner)) and host.path.startswith(("/tmp/", "/var/tmp/")):
            return warning(f"/{cleaner} removes old files below /tmp", f"exempt {host.path} in its configuration")
    if not os.path.isdir(os.path.join(host.root, "run/systemd/system")):
        return passed("systemd, which removes old files, does not run here")
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
        return warning(f"systemd-tmpfiles removes files below {aged}, also lease files that are held", fix)
    return passed("no rule of systemd-tmpfiles removes old files there")


def _rules(host: CheckedHost) -> list[tuple[str, str, str, str]]:
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
    """Whether a rule's path or glob matches the directory or one above it."""
    from fnmatch import fnmatchcase

    while path != "/":
        if fnmatchcase(path, rule.rstrip("/")):
            return True
        path = os.path.dirname(path)
    return False


def removed_leases(host: CheckedHost) -> Finding:
    """Are there claims whose lease file was removed? Other processes see their GPUs as unclaimed."""
    leases = os.path.join(os.path.realpath(host.path), "leases") + "/"
    for pid in procfs.pids():
        for number, target in (procfs.open_files(pid) or {}).items():
            if target.startswith(leases) and target.endswith(".lock (deleted)") and _is_locked(pid, number):
                name = target[len(leases) :].removesuffix(".lock (deleted)")
                return warning(
                    f"the lease of {name} that process {pid} ({procfs.user_of(pid)}) holds was removed from {leases}: "
                    "its name and the driver's process list protect that GPU now, but not from older versions",
                    "stop what removes files from that directory; then release and claim again in that process",
                )
    return passed("no process that can be examined holds a lease that was removed")


def _is_locked(pid: int, number: int) -> bool:
    try:
        inode = os.stat(f"/proc/{pid}/fd/{number}").st_ino
    except OSError:
        return False
    return inode in procfs.flock_holders({inode})


def protected_regular(host: CheckedHost) -> Finding:
    """The value of fs.protected_regular, which restricts opening files of other users in sticky directories."""
    value = host.read("proc/sys/fs/protected_regular")
    if value is None:
        return skipped("this kernel has no fs.protected_regular")
    meaning = {
        "0": "O_CREAT may open files of other users in sticky directories",
        "1": "O_CREAT may not open files of other users in world-writable sticky directories",
        "2": "O_CREAT may not open files of other users in group- or world-writable sticky directories",
    }.get(value, "an unknown value")
    return passed(f"{value}: {meaning}; safe_gpu does not depend on it")
