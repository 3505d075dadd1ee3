"""Checks of the state directory, of what stands in it, and of who sees it."""

import fcntl
import os
import stat
import time
from functools import partial

from ..claim.checks import doubt_of_image
from ..coordination import older_package as older
from ..coordination.closed import closed_now, ignored_closed
from ..coordination.directory import DIR_MODE, HOST_LOCK, PARTS, Directory, SharedDirectory
from ..coordination.doors import digest
from ..coordination.holders import Claims, claims_now, living_claims
from ..coordination.host_lock import Host
from ..coordination.signals import DeferredSignals
from ..coordination.state_dir import ADMIN_DIR, DEFAULT_DIR, remover_of, setup_command
from ..errors import LockTimeout, StateDirError
from ..host import procfs
from .check import Check, failed, passed, skipped, warning
from .host import CheckedHost

_ELSEWHERE = "set SAFE_GPU_DIR, for all users, to a directory on a local disk that all of them can write (mode 1777)"

_PATIENCE = 5.0

_LONG_HOLD = 1.0


def drained(host: CheckedHost) -> Check:
    """Check whether root, or the owner of the state directory, has taken GPUs out of use."""
    known = {gpu.uuid: gpu.label for gpu in host.snapshot.gpus}
    found = {known.get(uuid, uuid): reason for uuid, reason in closed_now().items()}
    texts = "; ".join([*(f"GPU {label} {reason}" for label, reason in found.items()), *(ignored := ignored_closed())])
    fixes = [f"safe-gpu resume {' '.join(found)}, when they may be claimed again"] if found else []
    fixes += ["remove what is ignored, and drain again with safe-gpu drain"] if ignored else []
    return warning(texts, "; ".join(fixes)) if texts else passed("no GPU is drained")


def directory(host: CheckedHost) -> Check:
    """Check that it is a plain directory that every user can use. It is opened as a claim opens it."""
    path = host.path
    real, trouble = os.path.realpath(path), None
    if doubt := doubt_of_image(real):
        return warning(doubt, f"start the container with -v {real}:{real}")
    try:
        with SharedDirectory(path, make=False) as root:
            trouble = _trouble_with_mode(root, path)
            owner = procfs.user_name(os.fstat(root.fd).st_uid)
            older_build = "leases" in root.names()
            if os.path.lexists(os.path.join(path, HOST_LOCK)):
                os.close(root.open_file(HOST_LOCK))
        for part in PARTS:
            try:
                with Directory(path, part, make=False) as one:
                    trouble = trouble or _trouble_with_mode(one, path)
            except FileNotFoundError:
                pass  # the first claim makes it
    except FileNotFoundError:
        return _not_there(path)
    except StateDirError as err:
        return failed(str(err), _way_out(path))
    if trouble := trouble or _trouble_above(path):
        return trouble
    if (uid := remover_of(path, os.geteuid())) is not None:
        return warning(
            f"{procfs.user_name(uid)} can remove other users' files in {path}, root's too: then waiters would lose "
            "their places in the queue, and claims without doors their GPUs",
            f"as root: {setup_command(path)}",
        )
    if older_build:
        return warning(
            f"{path}/leases is of an older build, whose claims are not seen", "end what uses that build, and remove it"
        )
    return passed(f"{path}, mode 1777, belongs to {owner}")


def _way_out(path: str) -> str:
    """Return what to do about a state directory that somebody has chosen: by mistake, it may be any directory."""
    return f"as root: {setup_command(path)}" if path in (DEFAULT_DIR, ADMIN_DIR) else _ELSEWHERE


def _not_there(path: str) -> Check:
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        return failed(f"{path} cannot be created: there is no {parent}", f"create that directory, or {_ELSEWHERE}")
    if not os.access(parent, os.W_OK | os.X_OK):
        return failed(f"{path} cannot be created: you may not write to {parent}", f"as root: {setup_command(path)}")
    return _trouble_above(path) or passed(f"{path} does not exist yet: the first claim creates it")


def _trouble_with_mode(one: SharedDirectory, path: str) -> Check | None:
    """Return a finding if a directory that this user can use is not open to all; ``path`` is the state directory."""
    status = os.fstat(one.fd)
    mode = stat.S_IMODE(status.st_mode)
    if mode == DIR_MODE:
        return None
    closed = "other users cannot claim GPUs" if mode & 0o777 != 0o777 else "every user may remove what is others'"
    what = f"{one.path} has mode {mode:04o} and belongs to {procfs.user_name(status.st_uid)}"
    return warning(f"{what}: {closed}", _way_out(path))


def _trouble_above(path: str) -> Check | None:
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


def locks(host: CheckedHost) -> Check:
    """Check that host.lock can be taken, and that a second lock on a locked file is refused."""
    if not all(os.path.lexists(os.path.join(host.path, name)) for name in (HOST_LOCK, "claims", "queue")):
        return skipped(f"nothing has been locked in {host.path} yet")
    began = time.monotonic()
    try:
        with DeferredSignals() as signals, Host(host.path) as entries:
            entries.look()
            with entries.locked(began + _PATIENCE, signals):
                waited = time.monotonic() - began
                excluded = entries.directory is not None and _is_locked(entries.directory.open_file(HOST_LOCK))
    except LockTimeout as err:
        fix = "end the process that holds it; it cannot be seen from here, so look on the host, as root"
        if err.overloaded:
            fix = "run fewer processes here at once, and check again"
        elif err.pid is not None:
            fix = f"kill -CONT {err.pid} if it is stopped, else end it"
        return failed(f"host.lock could not be taken within {_PATIENCE:g} s: {err}", fix)
    except (StateDirError, OSError) as err:
        return failed(str(err), _way_out(host.path))
    if not excluded:
        return failed(f"two locks on one file in {host.path} do not exclude each other", _ELSEWHERE)
    if waited > _LONG_HOLD:
        return warning(
            f"host.lock was held by others for {waited:.1f} s; microseconds are normal",
            "look for a process that uses safe_gpu and is stopped or gets no CPU time (safe-gpu status)",
        )
    return passed("host.lock was free, and locks exclude each other")


def _is_locked(fd: int) -> bool:
    """Return whether a file is locked by others; its descriptor is closed."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def process_namespace(host: CheckedHost) -> Check:
    """Check that the processes that the driver reports are visible."""
    processes = [process for gpu in host.snapshot.gpus for process in gpu.processes or ()]
    unseen = {
        one.pid for one in processes if one.elsewhere or (not procfs.exists(one.pid) and procfs.has_ended(one.pid))
    }
    if unseen:
        return warning(
            f"{len(unseen)} of {len({one.pid for one in processes})} processes on the GPUs cannot be seen from here (a "
            "container?): their GPUs count as busy, but their users are not known",
            "start the container with --pid=host",
        )
    if os.geteuid() != 0 and not os.path.exists("/proc/1/stat"):
        return warning(
            "/proc is mounted with hidepid: the commands and users of other users' processes are not visible",
            "ask root to add you to the group of the mount option gid=, or to remount /proc without hidepid",
        )
    if procfs.pid_namespace() not in (None, procfs.FIRST_PID_NAMESPACE):
        return warning(
            "this is not the initial pid namespace (a container?): claims made outside are respected, but their "
            "processes cannot be shown",
            "start the container with --pid=host",
        )
    return passed("all processes of the host can be seen")


def elsewhere(host: CheckedHost) -> Check:
    """Check, by their doors, that no GPUs are claimed in another state directory."""
    uuids = [gpu.uuid for gpu in host.snapshot.gpus]
    _, found = claims_now(uuids, host.snapshot.name_prefix, partial(living_claims, host.path))
    if not found:
        return passed("no GPU is claimed in another state directory")
    names = host.named(uuid for uuid in uuids if uuid in found)
    return warning(
        f"{names}: claimed in another state directory, whose queue does not meet this one",
        "set state_dir in /etc/safe-gpu/config.ini, and no other SAFE_GPU_DIR, in all sessions of this host",
    )


def scope(host: CheckedHost) -> Check:
    """Check that SAFE_GPU_SCOPE, which a claim sets for claims inside it, belongs to a living claim of this user."""
    token = host.environ.get("SAFE_GPU_SCOPE")
    if not token:
        return passed("not set: this is not inside another claim")
    claims = Claims(living_claims(host.path))
    around = claims.around(token)
    if around is not None:
        return passed(f"this is inside the claim of process {around.pid}, {host.named(sorted(around.gpus))}")
    for claim in claims.living:
        if claim.token == digest(token):
            user = procfs.user_name(claim.uid)
            return warning(
                f"SAFE_GPU_SCOPE belongs to the claim of process {claim.pid} of {user}, another user: it is ignored",
                "unset SAFE_GPU_SCOPE, and claim as that user",
            )
    return warning(
        f"SAFE_GPU_SCOPE={token} belongs to no living claim of this host (it leaks through qsub -V, ssh, sudo and "
        "tmux): it is ignored",
        "unset SAFE_GPU_SCOPE",
    )


def older_package(host: CheckedHost) -> Check:
    """Check whether safe-gpu 1.x or 2.0 is in use here, and whether its lock can be taken too."""
    path, directory = older.LOCK_FILE, os.path.dirname(older.LOCK_FILE)
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
