"""Checks of the state directory."""

import os
import stat
import time
from contextlib import suppress
from functools import partial
from shlex import quote

from ...coordination.files.file_system import NETWORK_TYPES, file_system_of
from ...coordination.files.lease_dir import LeaseDir
from ...coordination.files.location import CLOSING, DEFAULT_DIR
from ...coordination.files.shared_directory import DIR_MODE, PARTS
from ...coordination.files.state_dir import StateDir
from ...coordination.files.warnings import setup_command
from ...coordination.history import NAME, HistoryDir
from ...coordination.leases.file_names import leases_of, names_of_host
from ...coordination.locks.flock import lock_file
from ...coordination.locks.host_lock import HostLock
from ...errors import LockTimeout, PolicyError, StateDirError
from ...host import procfs
from ...host.programs import others_can_change
from ...settings.variables import host_setting
from ...status.history import claims_between
from ..check import CheckedHost, Finding, failed, gpus_named, passed, skipped, warning

_ELSEWHERE = "set SAFE_GPU_DIR, for all users, to a directory on a local disk that all of them can write (mode 1777)"

_PATIENCE = 5.0

_LONG_HOLD = 1.0

_KIB = 1 << 10

_LEAST_BYTES = 64 * _KIB

_LEAST_FILES = 64

_MOST_FILES = 1000  # whose owners are looked at: anybody can make more


def _is_state_dir(path: str) -> bool:
    """Return whether a directory is the default one, or has nothing in it but what a state directory has. Any other may
    have been named by mistake: nobody is told to remove it, or to open it to all."""
    with suppress(OSError):
        return path == DEFAULT_DIR or set() < set(os.listdir(path)) <= {*PARTS, *CLOSING, "host.lock", "simulated"}
    return False


def _existing(path: str) -> str:
    """Return the directory itself, or the nearest existing directory above it."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def state_directory(host: CheckedHost) -> Finding:
    """Check that it is a plain directory that every user can use. It is opened as a claim opens it."""
    path = host.path
    trouble = next(filter(None, (_trouble_with_mode(path, part) for part in (".", *PARTS[:2]))), None)
    if trouble:
        return trouble
    try:
        with StateDir(path, make=False) as root:
            _open_files(root, host)
            risk = _risk_of_owner(root, host)
            owner = procfs.user_name(os.fstat(root.fd).st_uid)
    except FileNotFoundError:
        return _not_there(path)
    except StateDirError as err:
        return failed(str(err), _ELSEWHERE)
    return _trouble_above(path) or risk or passed(f"{path}, mode 1777, belongs to {owner}")


def _not_there(path: str) -> Finding:
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        return failed(f"{path} cannot be created: no {parent}", f"mkdir -p {quote(parent)}, or {_ELSEWHERE}")
    if not os.access(parent, os.W_OK | os.X_OK):
        return failed(f"{path} cannot be created: you may not write to {parent}", f"as root: {setup_command(path)}")
    return _trouble_above(path) or passed(f"{path} does not exist yet: the first claim creates it")


def _risk_of_owner(root: StateDir, host: CheckedHost) -> Finding | None:
    """Return a finding if a user can remove what others rely on: the owner of a file or of its directory can, sticky
    bit or not. Where only one user has ever claimed, that harms nobody."""
    owners = {name: _owner(root, name) for name in (".", *PARTS, "host.lock")}
    missing: list[str] = []
    with suppress(FileNotFoundError), StateDir("leases", root, make=False) as leases:
        for one in host.status.gpus:
            own = {f"leases/{name}": _owner(leases, name) for name in leases_of([one.gpu.uuid])}
            missing += [one.label] * (None in own.values())
            owners |= own
    fix = f"as root: {setup_command(root.path)}"
    if name := next((name for name, uid in owners.items() if uid), None):
        uid = owners[name] or 0
        what = "it" if name.endswith(".lock") else "other users' files in it, root's too"
        text = f"{os.path.normpath(os.path.join(root.path, name))} belongs to {procfs.user_name(uid)}, who can remove "
        text += (
            f"{what}: if they did, waiters would lose their places in the queue, and some claims would lose their GPUs"
        )
        return warning(text, fix) if len(_users(root) | {uid}) > 1 else None
    if missing and _is_of_settings(host):
        text = f"{gpus_named(missing)}: no lease files of root's, so the first user to claim one can remove its lease"
        return warning(text, f"{fix}, again")
    return None


def _is_of_settings(host: CheckedHost) -> bool:
    """Return whether root's settings name this state directory."""
    try:
        return host_setting("state_dir", "", host.environ) == host.path
    except PolicyError:
        return False  # the check of the policy file reports it


def _owner(directory: StateDir, name: str) -> int | None:
    status = directory.status(name)
    return None if status is None else status.st_uid


def _users(root: StateDir) -> set[int]:
    """Return who has claimed or waited here, by the history and by the owners of files."""
    found = {claim.uid for claim in claims_between(0.0, time.time())[0] if claim.uid >= 0}
    for part in (".", *PARTS):
        with suppress(FileNotFoundError, StateDirError), StateDir(part, root, make=False) as directory:
            found.update(
                status.st_uid for name in directory.names()[:_MOST_FILES] if (status := directory.status(name))
            )
    return found


def _trouble_with_mode(
    above: str,
    part: str,
    closed: str = "other users cannot claim GPUs",
    open_to_all: str = "every user may remove the leases of other users",
) -> Finding | None:
    """Return a finding if a directory is not open to all users. One that is missing, or is no directory, is left to
    those who open it.

    No path into the state directory is followed.
    """
    path = os.path.normpath(os.path.join(above, part))
    try:
        root = os.open(above, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.stat(part, dir_fd=root, follow_symlinks=False)
        usable = os.access(part, os.W_OK | os.X_OK | os.R_OK, dir_fd=root, follow_symlinks=False)
    except OSError:
        return None
    finally:
        os.close(root)
    mode = stat.S_IMODE(status.st_mode)
    if mode == DIR_MODE or not stat.S_ISDIR(status.st_mode):
        return None
    what = f"{path} has mode {mode:04o} and belongs to {procfs.user_name(status.st_uid)}"
    fix = _opened_to_all(path, status) if _is_state_dir(above) else _ELSEWHERE
    if not usable:
        return failed(f"{what}: you may not use it", fix)
    if mode & 0o777 != 0o777:
        return warning(f"{what}: {closed}", fix)
    return None if mode & stat.S_ISVTX else warning(f"{what}: {open_to_all}", fix)


def _opened_to_all(path: str, status: os.stat_result) -> str:
    """Return how its owner sets the mode of a directory. Root is not told to change a name that another user can
    replace by a link: who can change a directory above."""
    if status.st_uid == 0 and others_can_change(os.path.dirname(path)) is not None:
        return _ELSEWHERE
    return f"as {procfs.user_name(status.st_uid)}: chmod 1777 {quote(path)}"


def _open_files(root: StateDir, host: CheckedHost) -> None:
    """Open host.lock and each lease. Other users may have made files of any other name.

    Raises:
        StateDirError: why one cannot be opened, or is not used.
    """
    with (
        suppress(FileNotFoundError),  # the first claim creates them
        LeaseDir("leases", root, make=False) as leases,
        StateDir("queue", root, make=False),
    ):
        leases.names_of_host = partial(names_of_host, [one.gpu.uuid for one in host.status.gpus])
        for directory, name in [(root, "host.lock"), *((leases, name) for name in leases.names_of_host())]:
            if (fd := directory.open(name)) is not None:
                os.close(fd)


def _trouble_above(path: str) -> Finding | None:
    """Return a finding if not all users may enter the directories above: users who may not would not see the claims."""
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
    """Check that it is on a local, writable file system. Locks do not work reliably on a network file system."""
    where = _existing(host.path)
    try:
        fd = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as err:
        return skipped(f"{where} cannot be opened ({err.strerror})")
    try:
        kind = file_system_of(fd).kind
        read_only = bool(os.fstatvfs(fd).f_flag & os.ST_RDONLY)
    finally:
        os.close(fd)
    if kind in NETWORK_TYPES:
        return failed(f"{where} is on a network file system ({kind}), where locks are not reliable", _ELSEWHERE)
    if read_only:
        return failed(f"{where} is on a read-only file system ({kind or 'unknown type'})", _ELSEWHERE)
    return passed(f"{kind or 'of unknown type'}, at {where}")


def room(host: CheckedHost) -> Finding:
    """Check that there is space for a few small files."""
    where = _existing(host.path)
    numbers = os.statvfs(where)
    free = numbers.f_bavail * numbers.f_frsize
    if free < _LEAST_BYTES:
        return failed(f"{free // _KIB} KiB are free at {where}", f"free some space there, or {_ELSEWHERE}")
    if numbers.f_files and numbers.f_favail < _LEAST_FILES:
        return failed(f"{numbers.f_favail} inodes are free at {where}", f"free some inodes there, or {_ELSEWHERE}")
    return passed(f"{free >> 20} MiB are free at {where}")


def locks(host: CheckedHost) -> Finding:
    """Check that host.lock can be taken, and that a second lock on a locked file is refused."""
    began = time.monotonic()
    try:
        with HostLock(began + _PATIENCE, host.path, make=False), StateDir(host.path, make=False) as root:
            waited = time.monotonic() - began
            fd = root.open_or_create("host.lock")
            try:
                excluded = not lock_file(fd)
            finally:
                os.close(fd)
    except FileNotFoundError:
        return skipped(f"nothing has been locked in {host.path} yet")
    except LockTimeout as err:
        fix = "end the process that holds it; it cannot be seen from here, so look on the host, as root"
        if err.overloaded:
            fix = "run fewer processes here at once, and check again"
        elif err.pid is not None:
            fix = f"kill -CONT {err.pid} if it is stopped, else end it"
        return failed(f"host.lock could not be taken within {_PATIENCE:g} s: {err}", fix)
    except StateDirError as err:
        return failed(str(err), _ELSEWHERE)
    if not excluded:
        return failed(f"two locks on one file in {host.path} do not exclude each other", _ELSEWHERE)
    if waited > _LONG_HOLD:
        return warning(
            f"host.lock was held by others for {waited:.1f} s; microseconds are normal",
            "look for a process that uses safe_gpu and is stopped or gets no CPU time (safe-gpu status)",
        )
    return passed("host.lock was free, and locks exclude each other")


def history(host: CheckedHost) -> Finding:
    """Check that every user's claims can be recorded. A claim does not fail where they cannot."""
    path = os.path.join(host.path, NAME)
    try:
        with HistoryDir():
            pass
    except FileNotFoundError:
        return passed("nothing has been recorded yet")
    except (OSError, StateDirError) as err:
        return warning(f"{path} cannot be opened, and claims may not be recorded: {err}", _ELSEWHERE)
    trouble = _trouble_with_mode(
        host.path, NAME, "claims of other users are not recorded", "every user may remove all of it"
    )
    return trouble or passed(f"{path}, mode 1777")


TOGETHER = "set SAFE_GPU_DIR, for all users and jobs, to a directory that all of them see, with mode 1777"

CLOCK_SLACK = 60.0

MOST_NAMED = 10  # processes that one finding names
