"""Checks of the state directory, the policy file and the history, and of other users' claims."""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from glob import glob
from pathlib import PurePath
from shlex import quote

from .. import policy as rules
from .. import procfs
from ..coordination import legacy
from ..coordination.files import DIR_MODE, NETWORK_TYPES, PARTS, RULE, LeaseDir, StateDir, file_system_type, root_owns
from ..coordination.history import NAME, HistoryDir
from ..coordination.leases import names_of_host
from ..coordination.locks import HostLock, lock_file
from ..coordination.mounts import Mount, in_container, is_of_image, mount_of, parse_mounts, private_to
from ..devices import HostSnapshot
from ..errors import LockTimeout, PolicyError, StateDirError
from ..programs import others_can_change
from ..settings import policy_file
from ..status.facts import ClaimStatus
from ..text import format_bytes, plural
from .check import CheckedHost, Finding, failed, gpus_named, passed, skipped, warning

# Checks of the state directory: whether it exists, all users may use it, locks work in it, and files in it persist.


_ELSEWHERE = "set SAFE_GPU_DIR, for all users, to a directory on a local disk that all of them can write (mode 1777)"
_PATIENCE = 5.0
_LONG_HOLD = 1.0

_KIB = 1 << 10
_LEAST_BYTES = 64 * _KIB
_LEAST_FILES = 64

# Errors of what can be removed: another kind of file, a link, one that may be somebody's from elsewhere.
_REMOVABLE = (errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.EMLINK, errno.EPERM)


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
            trouble = _trouble_with_files(root, host)
            risk = _risk_of_owner(root)
            owner = procfs.user_name(os.fstat(root.fd).st_uid)
            others = _other_owners(root)
    except FileNotFoundError:
        return _not_there(path)
    except StateDirError as err:
        return failed(str(err), (f"rm {quote(err.path)}, or " if err.errno in _REMOVABLE else "") + _ELSEWHERE)
    return trouble or _trouble_above(path) or risk or passed(f"{path}, mode 1777, belongs to {owner}{others}")


def _other_owners(root: StateDir) -> str:
    """Return whose host.lock and history are, where they are not those of the owner of the directory."""
    found = ""
    for name in ("host.lock", NAME):
        with suppress(OSError):
            uid = os.stat(name, dir_fd=root.fd, follow_symlinks=False).st_uid
            if uid != os.fstat(root.fd).st_uid:
                found += f", {name} to {procfs.user_name(uid)}"
    return found


def _not_there(path: str) -> Finding:
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        return failed(f"{path} cannot be created: no {parent}", f"mkdir -p {quote(parent)}, or {_ELSEWHERE}")
    if not os.access(parent, os.W_OK | os.X_OK):
        return failed(
            f"{path} cannot be created: you may not write to {parent}", f"as root: mkdir -m 1777 {quote(path)}"
        )
    return _trouble_above(path) or passed(f"{path} does not exist yet: the first claim creates it")


def _risk_of_owner(root: StateDir) -> Finding | None:
    """Return a finding if the owner of the directory is not root: the sticky bit does not bind an owner."""
    for part in (".", *PARTS):
        with suppress(OSError):  # the first claim creates it
            uid = os.stat(part, dir_fd=root.fd, follow_symlinks=False).st_uid
            if uid:
                return warning(
                    f"{os.path.normpath(os.path.join(root.path, part))} belongs to {procfs.user_name(uid)}, who can "
                    "remove other users' files in it, root's too: waiters would lose their places, and claims that "
                    "have only their lease files their GPUs",
                    f"as root: {root_owns(root.path)}, which makes them root's at boot",
                )
    return None


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
    fix = _opened_to_all(path, status)
    if not usable:
        return failed(f"{what}: you may not use it", fix)
    if mode & 0o777 != 0o777:
        return warning(f"{what}: {closed}", fix)
    return None if mode & stat.S_ISVTX else warning(f"{what}: {open_to_all}", fix)


def _opened_to_all(path: str, status: os.stat_result) -> str:
    """Return how to set the mode of a directory. Root is never told to change a name that another user can replace by a
    link. That is who can change a directory above, and the owner of the name where that one is sticky."""
    command = f"chmod 1777 {quote(path)}"
    for_root = others_can_change(os.path.dirname(path)) is None
    if status.st_uid == 0:
        return f"as root: {command}" if for_root else _ELSEWHERE
    if status.st_uid == os.geteuid():
        return command
    way_out = f"as root, which ends no claim: rm -r {quote(path)}" if for_root else _ELSEWHERE
    return f"as {procfs.user_name(status.st_uid)}: {command}; or {way_out}"


def _trouble_with_files(root: StateDir, host: CheckedHost) -> Finding | None:
    """Return a finding on host.lock or a lease. Other users may have made files of any other name."""
    try:
        with LeaseDir("leases", root, make=False) as leases, StateDir("queue", root, make=False):
            leases.names_of_host = partial(names_of_host, [one.gpu.uuid for one in host.status.gpus])
            files = [(root, "host.lock"), *((leases, name) for name in leases.names_of_host())]
            return next(filter(None, (_trouble_with_file(*file) for file in files)), None)
    except FileNotFoundError:
        return None  # the first claim creates it


def _trouble_with_file(directory: StateDir, name: str) -> Finding | None:
    fd = directory.open(name)
    if fd is None:
        return None
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    os.close(fd)
    if mode & 0o666 == 0o666:
        return None
    path = os.path.join(directory.path, name)
    return warning(
        f"{path} has mode {mode:04o}: other users may not open it", f"rm {quote(path)}, as its owner or root"
    )


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
    """Check that there is space for a few small files."""
    where = _existing(host.path)
    numbers = os.statvfs(where)
    free = numbers.f_bavail * numbers.f_frsize
    if free < _LEAST_BYTES:
        return failed(f"{free // _KIB} KiB are free at {where}", f"free some space there, or {_ELSEWHERE}")
    if numbers.f_files and numbers.f_favail < _LEAST_FILES:
        return failed(f"{numbers.f_favail} inodes are free at {where}", f"remove some files there, or {_ELSEWHERE}")
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
        if err.pid is not None:
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


# Other programs that remove or protect files

_RULES = ("etc/tmpfiles.d", "run/tmpfiles.d", "usr/local/lib/tmpfiles.d", "usr/lib/tmpfiles.d")
_AGED_TYPES = frozenset("dDevqQC")
_CLEANERS = ("etc/cron.daily/tmpwatch", "etc/cron.daily/tmpreaper")


def cleaning(host: CheckedHost) -> Finding:
    """Check that nothing removes old files there. It would also remove lease files that are held."""
    fix = f"as root: echo {quote(f'x {host.path}')} > {RULE}"
    for cleaner in _CLEANERS:
        if os.path.exists(os.path.join(host.root, cleaner)) and host.path.startswith(("/tmp/", "/var/tmp/")):
            return warning(f"/{cleaner} removes old files below /tmp", f"exempt {host.path} in its configuration")
    if not os.path.isdir(os.path.join(host.root, "run/systemd/system")):
        return passed("systemd, which removes old files, does not run here")
    above = (host.path, *PurePath(host.path).parents)
    aged, longest = "", -1
    for kind, path, age, source in _rules(host):
        covers = any(fnmatchcase(str(one), path.rstrip("/")) for one in above)
        if kind[0] in "xX" and covers:
            return passed(f"{source} exempts {host.path}")
        if kind[0] in _AGED_TYPES and covers and len(path) > longest:
            longest = len(path)
            aged = f"{path} after {age} ({source})" if age not in ("", "-") else ""
    if aged:
        return warning(f"systemd-tmpfiles removes files below {aged}, also lease files that are held", fix)
    return passed(f"no rule of systemd-tmpfiles removes old files from {host.path}")


def _rules(host: CheckedHost) -> Iterator[tuple[str, str, str, str]]:
    """Yield (type, path, age, file) of every line of tmpfiles.d(5); a file in /etc replaces its namesake in
    /usr/lib."""
    files: dict[str, str] = {}
    for directory in _RULES:
        for name in glob("*.conf", root_dir=os.path.join(host.root, directory)):
            files.setdefault(name, f"{directory}/{name}")
    for _, file in sorted(files.items()):
        for line in (host.read(file) or "").splitlines():
            fields = line.split()
            if len(fields) >= 2 and not fields[0].startswith("#"):
                yield fields[0], fields[1], fields[5] if len(fields) > 5 else "-", f"/{file}"


def removed_leases(host: CheckedHost) -> Finding:
    """Check that no claim has lost its lease file. Other processes would see its GPUs as unclaimed."""
    leases = os.path.join(os.path.realpath(host.path), "leases") + "/"
    for pid in procfs.pids():
        for number, target in (procfs.open_files(pid) or {}).items():
            if target.startswith(leases) and target.endswith(".lock (deleted)"):
                try:
                    inode = os.stat(f"/proc/{pid}/fd/{number}").st_ino
                except OSError:
                    continue
                if inode not in procfs.flock_holders({inode}):
                    continue
                name = target[len(leases) :].removesuffix(".lock (deleted)")
                return warning(
                    f"the lease of {name} that process {pid} ({procfs.user_of(pid)}) holds was removed from {leases}: "
                    "its name and the driver's process list protect that GPU now, but not from older versions",
                    "stop what removes files from that directory; then release and claim again in that process",
                )
    return passed("no process that can be examined holds a lease that was removed")


def protected_regular(host: CheckedHost) -> Finding:
    """Report the value of fs.protected_regular, which restricts opening files of other users in sticky directories."""
    value = host.read("proc/sys/fs/protected_regular")
    if value is None:
        return skipped("this kernel has no fs.protected_regular")
    meaning = {
        "0": "O_CREAT may open files of other users in sticky directories",
        "1": "O_CREAT may not open files of other users in world-writable sticky directories",
        "2": "O_CREAT may not open files of other users in group- or world-writable sticky directories",
    }.get(value, "an unknown value")
    return passed(f"{value}: {meaning}; safe_gpu does not depend on it")


# Checks of the policy file, and of the directory with the history of claims.


def policy(host: CheckedHost) -> Finding:
    """Check that the policy file is read, and that every line of it is right."""
    path = policy_file(host.environ)
    try:
        found, ignored = rules.read(path)
    except PolicyError as err:
        fix = f"as root: correct line {err.line}" if err.line else "as root: make it a short text file of mode 644"
        return failed(f"claims fail: {err}", fix)
    if ignored:
        return warning(
            ignored.partition(";")[0], f"as root: write the limits into a file of root's with mode 644, {path}"
        )
    if found is not None:
        return passed(f"{path}, {plural(len(found.sections), 'section')}")
    if host.environ.get("SAFE_GPU_POLICY"):
        return warning(f"SAFE_GPU_POLICY={path} does not exist: nothing is limited", "unset SAFE_GPU_POLICY")
    return skipped(f"there is no {path}: nothing is limited")


def history(host: CheckedHost) -> Finding:
    """Check that every user's claims can be recorded. A claim does not fail where they cannot."""
    path = os.path.join(host.path, NAME)
    try:
        with StateDir(host.path, make=False) as root, HistoryDir(root):
            pass
    except FileNotFoundError:
        return passed("nothing has been recorded yet")
    except (OSError, StateDirError) as err:
        fix = _ELSEWHERE if isinstance(err, StateDirError) else f"rm {quote(path)}, as its owner or root"
        return warning(f"{path} cannot be opened, and claims may not be recorded: {err}", fix)
    trouble = _trouble_with_mode(
        host.path, NAME, "claims of other users are not recorded", "every user may remove all of it"
    )
    return trouble or passed(f"{path}, mode 1777")


# Checks whether all users of a host see the same claims and processes, and checks the claims of other users.


_TOGETHER = "set SAFE_GPU_DIR, for all users and jobs, to a directory that all of them see, with mode 1777"

_CLOCK_SLACK = 60.0
_MOST = 10  # processes that one finding names


# Mounts


def _location(path: str, mounts: list[Mount]) -> tuple[str, str] | None:
    """Return (device, path inside the file system): equal for two paths if they are the same directory."""
    mount = mount_of(path, mounts)
    if mount is None:
        return None
    return mount.device, os.path.normpath(os.path.join(mount.root, os.path.relpath(path, mount.point)))


def private_directory(host: CheckedHost) -> Finding:
    """Check that all jobs of this host see the same state directory."""
    path = os.path.realpath(host.path)
    mounts = parse_mounts(host.read("proc/self/mountinfo") or "")
    mount = mount_of(path, mounts)
    if mount is None:
        return skipped("/proc/self/mountinfo cannot be read")
    contained = in_container(mounts, host.root)
    mount_it = f"start the container with -v {path}:{path} (docker, podman, nerdctl) or --bind {path} (apptainer)"
    if contained and is_of_image(mount):
        return warning(
            f"{path} belongs to this container and is not mounted from the host: claims inside and "
            "outside do not see each other unless the container has the network of the host, where claims meet by name",
            mount_it,
        )
    sign = _sign_of_privacy(mount, host)
    if sign:
        return warning(
            f"{path} is on {mount.point}, which {sign}: claims here and elsewhere exclude each other, but do not show "
            "who made them, and their queues do not meet",
            _TOGETHER,
        )
    own, first = host.link("proc/self/ns/mnt"), host.link("proc/1/ns/mnt")
    if own is not None and own == first:
        if contained and mount.point != "/":
            return passed(f"{path} is mounted into this container ({mount.root} of {mount.source} at {mount.point})")
        return passed(f"{path} is the same for all processes of this host or container")
    outside = parse_mounts(host.read("proc/1/mountinfo") or "")
    if not outside:
        return passed(f"no sign that {path} is private; this user may not compare it with the rest of the host")
    if _location(path, mounts) != _location(path, outside):
        return warning(
            f"{path} is private to this mount namespace: the rest of the host has another directory at that path",
            mount_it if is_of_image(mount) else _TOGETHER,  # a container with the host's other namespaces
        )
    return passed(f"{path} is the same directory for the rest of the host")


def _sign_of_privacy(mount: Mount, host: CheckedHost) -> str:
    """Return why a mount is known to be private, as the end of a sentence; "" if there is no sign of that."""
    private = private_to(mount.root)
    if private:
        return f"is {private}"
    if mount.point in ("/tmp", "/dev/shm", "/var/tmp"):
        try:
            status = os.stat(os.path.join(host.root, mount.point[1:]))
        except OSError:
            return ""
        if status.st_uid and not status.st_mode & 0o007:
            return f"only {procfs.user_name(status.st_uid)} may use (schedulers set up such directories for one job)"
    return ""


def process_namespace(host: CheckedHost) -> Finding:
    """Check that the processes that the driver reports are visible."""
    snapshot = host.snapshot or HostSnapshot(())
    processes = [process for gpu in snapshot.gpus for process in gpu.processes or ()]
    unseen = {
        one.pid for one in processes if one.elsewhere or (not procfs.exists(one.pid) and procfs.has_ended(one.pid))
    }
    if unseen:
        return warning(
            f"{len(unseen)} of {len({one.pid for one in processes})} processes on the GPUs cannot be seen from here (a "
            "container?): their GPUs count as busy, but their users are not known",
            "start the container with --pid=host",
        )
    mount = mount_of("/proc", parse_mounts(host.read("proc/self/mountinfo") or ""))
    option = re.search(r"hidepid=(?!0|off)\w+", mount.options) if mount else None
    if option and os.geteuid() != 0:
        return warning(
            f"/proc is mounted with {option[0]}: the commands and users of other users' processes are not visible",
            "ask root to add you to the group of the mount option gid=, or to remount /proc without hidepid",
        )
    if host.link("proc/self/ns/pid") not in (None, f"pid:[{procfs.FIRST_PID_NAMESPACE}]"):
        return warning(
            "this is not the initial pid namespace (a container?): claims made outside are respected, but their "
            "processes cannot be shown",
            "start the container with --pid=host",
        )
    return passed("all processes of the host can be seen")


# Claims and waiters


def _claims(host: CheckedHost) -> Iterator[tuple[str, ClaimStatus]]:
    for one in host.status.gpus:
        for claim in (*one.claims, one.inner):
            if claim is not None:
                yield one.label, claim


def suspended(host: CheckedHost) -> Finding:
    """Check that no process is stopped that holds GPUs or waits for them."""
    stopped: dict[int | None, str] = {}
    holding: dict[tuple[int | None, str], list[str]] = {}
    for label, claim in _claims(host):
        if claim.stopped:
            holding.setdefault((claim.pid, claim.user or "unknown"), []).append(label)
    for (pid, user), labels in holding.items():
        stopped[pid] = f"process {pid} ({user}), which holds {gpus_named(list(dict.fromkeys(labels)))}"
    for waiter in host.status.queue:
        if waiter.stopped:
            text = f"process {waiter.pid} ({waiter.user or 'unknown'}), which waits at place {waiter.position}"
            stopped.setdefault(waiter.pid, text)
    if stopped:
        pids, texts = list(stopped)[:_MOST], list(stopped.values())[:_MOST]
        more = f"; and {len(stopped) - _MOST} more" if len(stopped) > _MOST else ""
        return warning(
            f"stopped: {'; '.join(texts)}{more}",
            f"resume the job (qmod -usj, scontrol resume), or kill -CONT {' '.join(map(str, pids))}, or end it",
        )
    if host.status.warnings:
        return skipped(host.status.warnings[0])
    return passed("no process that holds GPUs or waits for them is stopped")


def overused(host: CheckedHost) -> Finding:
    """Check that no claim uses more of a GPU than its share."""
    found = [
        f"process {claim.pid} ({claim.user or 'unknown'}) uses {format_bytes(used)} of GPU {one.label}, where it has a "
        f"share of {format_bytes(claim.share)}"
        for one in host.status.gpus
        for claim in one.shares
        if claim.share is not None and (used := claim.memory_used or 0) > claim.share
    ]
    if found:
        fix = "ask its user to end it, or to claim a larger share: until then these GPUs take no new shares"
        return warning("; ".join(found[:_MOST]), fix)
    shared = sum(bool(one.shares) for one in host.status.gpus)
    return passed(f"{plural(shared)} shared, and no claim uses more than its share" if shared else "no GPU is shared")


def other_directories(host: CheckedHost) -> Finding:
    """Check, by the names that the kernel has, that no GPUs are claimed whose leases are in another state directory."""
    found: dict[str, list[str]] = {}
    for one in host.status.gpus:
        if one.claim is not None and one.claim.elsewhere is not None:
            who = f" (process {one.claim.pid} of {one.claim.user})" if one.claim.pid else ""
            where = one.claim.elsewhere or "a directory that cannot be seen from here (root can see it)"
            found.setdefault(f"{where}{who}", []).append(one.label)
    if not found:
        return passed("no claim has its leases elsewhere")
    texts = "; ".join(f"{gpus_named(labels)} in {where}" for where, labels in found.items())
    return warning(
        f"claimed in other state directories, whose queues do not meet this one: {texts}",
        "set state_dir in /etc/safe-gpu/config.ini, and no other SAFE_GPU_DIR, in all sessions of this host",
    )


def clock(host: CheckedHost) -> Finding:
    """Check that no claim or ticket has a time in the future."""
    now = time.time()
    times = [(claim.since, f"the claim of GPU {label}") for label, claim in _claims(host)]
    times += [(waiter.since, f"the wait at place {waiter.position}") for waiter in host.status.queue]
    for since, what in times:
        if since is not None and since > now + _CLOCK_SLACK:
            return warning(
                f"{what} began {round(since - now)} s in the future",
                "set the clock of this host (timedatectl set-ntp true); the shown ages are wrong until then, but "
                "claims work",
            )
    return passed("no claim has a time in the future")


def older_package(host: CheckedHost) -> Finding:
    """Check whether safe-gpu 1.x or 2.0 is in use here, and whether its lock can be taken too."""
    path, directory = legacy.LOCK_FILE, os.path.dirname(legacy.LOCK_FILE)
    # The file must not be opened: closing any descriptor of it would drop a POSIX lock that this process holds on it.
    try:
        inode = os.stat(path).st_ino
        closed = not os.access(path, os.R_OK | os.W_OK)
    except FileNotFoundError:
        return passed("safe-gpu 1.x or 2.0 has not been used here")
    except OSError:
        inode, closed = 0, True
    if closed:
        return warning(
            f"safe-gpu 1.x or 2.0 is used here, and you may not open its lock {path}: its users may collide with you",
            f"have its users upgrade, and then as root: rm -r {directory}",
        )
    if host.environ.get("SAFE_GPU_LEGACY_LOCK") == "never":
        return warning("safe-gpu 1.x or 2.0 is used here, and its lock is not taken", "unset SAFE_GPU_LEGACY_LOCK")
    holders = procfs.flock_holders({inode}).get(inode, [])
    now = f"; process {holders[0]} ({procfs.user_of(holders[0])}) holds it now" if holders else ""
    return passed(f"safe-gpu 1.x or 2.0 has been used here: claims take its lock too{now}")
