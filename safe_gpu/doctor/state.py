"""Checks of the state directory, of what stands in it, and of who sees it."""

import os
import stat
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress

from ..coordination.closed import closed_file, closed_now, drained_gpus, ignored_closed, read_closed
from ..coordination.crowds import sentence_on_crowd
from ..coordination.directory import (
    ADMIN_DIR,
    DEFAULT_DIR,
    DIR_MODE,
    HOST_LOCK,
    PARTS,
    Directory,
    SharedDirectory,
    another_place,
    make_directory,
    remover_of,
    setup_command,
    state_dir_path,
    warning_about_container_dir,
)
from ..coordination.doors import Doors
from ..coordination.entries import living_entries
from ..coordination.entry import Entry, try_making
from ..coordination.holders import claims_now, holder_of, living_claims
from ..coordination.host_lock import Host
from ..errors import StateDirError
from ..gpus.devices import Gpu, GpuProcess
from ..host import procfs
from ..host.signals import DeferredSignals
from ..status.beside import Bystanders
from ..status.processes import ProcessTable
from ..wording.text import plural
from .check import Check, CheckedHost, failed, labels, passed, skipped, warning

_ELSEWHERE = "set SAFE_GPU_DIR, for all users, to a directory on a local disk that all of them can write (mode 1777)"

PATIENCE = 5.0
"""Seconds that host.lock is waited for."""

_MOST_TOLD = 8  # of what any user can write more


def drained(host: CheckedHost) -> Check:
    """Check whether root, or the owner of the state directory, has taken GPUs out of use."""
    closed = closed_now()
    ignored = list(ignored_closed())
    if directory(host).status == "failed":  # which tells why nothing can be read there
        ignored = [text for text in ignored if not text.startswith(f"{state_dir_path()}/")]
    shown = {gpu.uuid: gpu.label for gpu in host.snapshot.gpus if gpu.uuid in closed}
    unknown = [uuid for uuid in closed if uuid not in shown]
    del unknown[_MOST_TOLD:]  # by the word of the owner, who may have written anything
    texts = [f"GPU {label} {closed[uuid]}" for uuid, label in shown.items()]
    texts += [f"GPU {uuid} {closed[uuid]}" for uuid in unknown]
    texts += ignored
    if not texts:
        return passed("no GPU is drained")
    fixes = [*_ways_to_resume(shown, by_root=True), *_ways_to_resume(shown, by_root=False)]
    reserved = [label for uuid, label in shown.items() if uuid not in drained_gpus()]
    if reserved:
        fixes.append(f"safe-gpu resume {' '.join(reserved)} says how the reservation is cancelled")
    if ignored:
        fixes.append("remove what is ignored, and drain again with safe-gpu drain")
    return warning("; ".join(texts), "; ".join(fixes))


def _ways_to_resume(shown: Mapping[str, str], *, by_root: bool) -> list[str]:
    """Return what ends the drains of root, or of the owner of the state directory: only who wrote them can.

    Args:
        shown: UUID -> label of the closed GPUs that the driver shows.
    """
    closed = read_closed(by_root=by_root)
    here = [shown[uuid] for uuid in closed.reasons if uuid in shown]
    others = len(closed.reasons) - len(here)
    ways = []
    if here and not by_root and closed.user == procfs.user_name(0):  # root's command writes root's own file
        others += len(here)
    elif here:
        ways.append(f"as {closed.user}: safe-gpu resume {' '.join(here)}, when they may be claimed again")
    if others:
        path = closed_file(by_root=by_root)
        ways.append(f"as {closed.user}: take {plural(others, 'line')} of GPUs that resume does not know out of {path}")
    return ways


def directory(host: CheckedHost) -> Check:
    """Check that it is a plain directory that every user can use. It is opened as a claim opens it."""
    path = state_dir_path()
    real = os.path.realpath(path)
    doubt = warning_about_container_dir(real)
    if doubt:
        return warning(doubt, f"start the container with -v {real}:{real}")
    try:
        with SharedDirectory(path, make=False) as root:
            return _trouble_inside(root) or _trouble_above(path) or _trouble_with_owner(root)
    except FileNotFoundError:
        return _not_there(path)
    except StateDirError as err:
        return failed(str(err), _way_out(path))


def _trouble_inside(root: SharedDirectory) -> Check | None:
    """Return a finding if a directory or host.lock is not as all users need it. Each is opened as a claim opens it.

    Raises:
        StateDirError: this user cannot use one of them.
    """
    if os.path.lexists(os.path.join(root.path, HOST_LOCK)):
        fd, _ = root.open_known(HOST_LOCK)
        os.close(fd)
    findings = [_trouble_with_mode(root, root.path)]
    for part in PARTS:
        with suppress(FileNotFoundError), Directory(root, part, make=False) as one:  # the first claim makes it
            findings.append(_trouble_with_mode(one, root.path))
    for found in findings:
        if found is not None:
            return found
    return None


def _trouble_with_owner(root: SharedDirectory) -> Check:
    """Check that no older build is used here, and that only root can remove what others rely on."""
    path = root.path
    if root.has("leases"):
        what = f"{path}/leases is of an older build, whose claims are not seen"
        return warning(what, "end what uses it, and remove it")
    uid = remover_of(path, os.geteuid())
    if uid is not None:
        what = f"{procfs.user_name(uid)} can remove other users' files in {path}, root's too"
        effect = "waiters would lose their places in the queue, and claims without doors their GPUs"
        return warning(f"{what}: then {effect}", f"as root: {setup_command(path)}")
    owner = procfs.user_name(os.fstat(root.fd).st_uid)
    return passed(f"{path}, mode 1777, belongs to {owner}")


def _way_out(path: str) -> str:
    """Return what to do about a state directory that somebody has chosen: by mistake, it may be any directory."""
    if path in (DEFAULT_DIR, ADMIN_DIR):
        return f"as root: {setup_command(path)}"
    return _ELSEWHERE


def _not_there(path: str) -> Check:
    parent = os.path.dirname(path)
    if os.path.isdir(parent) and os.statvfs(parent).f_flag & os.ST_RDONLY:
        return failed(f"{path} cannot be created: {parent} is on a read-only file system", another_place(path))
    if not os.access(parent, os.W_OK | os.X_OK):
        detail = f"{path} cannot be created: there is no {parent} to which you may write"
        if not os.path.isdir(parent):
            return failed(detail, "create that directory, open to all users (mode 755)")
        return failed(detail, f"as root: {setup_command(path)}")
    return _trouble_above(path) or passed(f"{path} does not exist yet: the first claim creates it")


def _trouble_with_mode(one: SharedDirectory, path: str) -> Check | None:
    """Return a finding if a directory that this user can use is not open to all; ``path`` is the state directory."""
    status = os.fstat(one.fd)
    mode = stat.S_IMODE(status.st_mode)
    if mode == DIR_MODE:
        return None
    effect = "every user may remove files of other users"
    if mode & 0o777 != 0o777:
        effect = "other users cannot claim GPUs"
    what = f"{one.path} has mode {mode:04o} and belongs to {procfs.user_name(status.st_uid)}"
    return warning(f"{what}: {effect}", _way_out(path))


def _trouble_above(path: str) -> Check | None:
    """Return a finding if not all users may enter the directories above: users who may not would not see the claims."""
    above = os.path.dirname(path)
    while above != "/":
        mode = stat.S_IMODE(os.stat(above).st_mode)
        if not mode & stat.S_IXOTH:
            what = f"{above}, above {path}, has mode {mode:04o}"
            effect = "other users cannot enter it, and claims do not protect GPUs from them"
            return warning(f"{what}: {effect}", _ELSEWHERE)
        above = os.path.dirname(above)
    return None


def locks(host: CheckedHost) -> Check:
    """Check that host.lock can be taken."""
    path = state_dir_path()
    for name in (HOST_LOCK, "claims", "queue"):
        if not os.path.lexists(os.path.join(path, name)):
            return skipped(f"nothing has been locked in {path} yet")
    with DeferredSignals() as signals, Host(path) as entries:
        entries.prepare()
        with entries.locked(time.monotonic() + PATIENCE, signals):
            return passed("host.lock was free")


def trial_entry(host: CheckedHost) -> Check:
    """Check that a claim can make, write and lock its entry. The file of this trial never gets the name of an entry.

    The state directory is not made here. Where it is missing, the trial is in a directory that is removed again.
    """
    path = state_dir_path()
    with DeferredSignals(), ExitStack() as undo:
        directory = _existing(path)
        if directory is None:
            temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.urandom(8).hex()}")
            make_directory(temporary, temporary, None)
            undo.callback(os.rmdir, temporary)
            directory = SharedDirectory(temporary, make=False)
        undo.callback(directory.close)
        try_making(directory)
    return passed(f"an entry can be made and locked in {path}")


def _existing(path: str) -> SharedDirectory | None:
    """Return ``claims`` while it is open, else the state directory, in which it would be made; None without either."""
    try:
        return Directory(path, "claims", make=False)
    except FileNotFoundError:
        pass
    try:
        return SharedDirectory(path, make=False)
    except FileNotFoundError:
        return None


def doors(host: CheckedHost) -> Check:
    """Check that a claim can take the door of a GPU, by one that no GPU has."""
    trial = Doors()
    try:
        trial.take_whole(f"doctor-{os.urandom(8).hex()}", parts_here=())
    except OSError as err:
        what = f"the doors of GPUs cannot be taken ({err.strerror or err})"
        effect = "processes with another state directory or a private /tmp do not see the claims of this one"
        fix = "allow sockets of AF_UNIX in this sandbox or container, and more open files (ulimit -n)"
        return warning(f"{what}: {effect}", fix)
    finally:
        trial.release()
    return passed("the door of a GPU can be taken")


def entries(host: CheckedHost) -> Check:
    """Check that every claim and every ticket counts, and that there are not too many names to look at."""
    path = state_dir_path()
    ignored: list[str] = []
    crowds = []
    for part in ("claims", "queue"):
        living_entries(path, part, ignored)
        crowd = sentence_on_crowd(path, part)
        if crowd:
            crowds.append(crowd)
    found = [*ignored, *crowds]
    if not found:
        return passed("every claim and every ticket counts")
    fix = "ask the owners of these files, or root, to end what keeps them and to remove them"
    if crowds:
        fix += f"; as root, while nobody waits: {setup_command(path)}"
    return warning("; ".join(found[:_MOST_TOLD]), fix)


def process_namespace(host: CheckedHost) -> Check:
    """Check that the processes that the driver reports are visible."""
    processes = [process for gpu in host.snapshot.gpus for process in gpu.processes or ()]
    unseen = {process.pid for process in processes if process.elsewhere or _is_unknown_here(process)}
    if unseen or procfs.pid_namespace() not in (None, procfs.FIRST_PID_NAMESPACE):
        whose = "processes of the host"
        if unseen:
            whose = f"{len(unseen)} of {len({process.pid for process in processes})} processes on the GPUs"
        what = f"{whose} cannot be seen from here (a container?)"
        effect = "their claims are respected and their GPUs count as busy, but their users are not known"
        return warning(f"{what}: {effect}", "start the container with --pid=host")
    if not os.path.exists("/proc/self/stat"):
        what = "there is no /proc here: nothing is known of other processes, and claims bind no CPUs"
        return warning(what, "mount /proc in this chroot, sandbox or container")
    if os.geteuid() != 0 and not os.path.exists("/proc/1/stat"):
        what = "/proc is mounted with hidepid: the commands and users of other users' processes are not visible"
        fix = "ask root to add you to the group of the mount option gid=, or to remount /proc without hidepid"
        return warning(what, fix)
    return passed("all processes of the host can be seen")


def _is_unknown_here(process: GpuProcess) -> bool:
    """Return whether a process may be one of another PID namespace, of which nothing is seen here."""
    return not process.ended and not procfs.exists(process.pid) and procfs.has_ended(process.pid)


def ended_processes(host: CheckedHost) -> Check:
    """Check that the driver lists no process that has ended. Its memory stays in use until the GPU is reset."""
    gpus_of: dict[int, list[Gpu]] = {}  # by the number of such a process
    for gpu in host.snapshot.gpus:
        for process in gpu.processes or ():
            if host.snapshot.has_ended(process):
                gpus_of.setdefault(process.pid, []).append(gpu)
    if not gpus_of:
        return passed("the driver lists no process that has ended")
    texts = []
    for pid, gpus in gpus_of.items():
        texts.append(f"{labels(gpus)}: process {pid} has ended and the driver keeps its memory")
    return warning("; ".join(texts[:_MOST_TOLD]), f"reset the GPU if that lasts: {host.vendor.recover}")


def elsewhere(host: CheckedHost) -> Check:
    """Check, by their doors, that no GPUs are claimed in another state directory."""
    _, beyond = claims_now(host.snapshot.gpus, host.snapshot.name_prefix, living_claims)
    held = [gpu for gpu in host.snapshot.gpus if gpu.uuid in beyond and beyond[gpu.uuid].elsewhere]
    if not held:
        return passed("no GPU is claimed in another state directory")
    what = f"{labels(held)}: claimed in another state directory, which has a queue of its own"
    fix = "set state_dir in /etc/safe-gpu/config.ini, and no other SAFE_GPU_DIR, in all sessions of this host"
    return warning(what, fix)


def beside(host: CheckedHost) -> Check:
    """Check that claimed GPUs are used by their claims alone, as far as can be seen."""
    snapshot = host.snapshot
    claims, beyond = claims_now(snapshot.gpus, snapshot.name_prefix, living_claims)
    names = {gpu.uuid: gpu.label for gpu in snapshot.gpus}
    bystanders = Bystanders(claims, beyond, names, ProcessTable(claims.living))
    texts = []
    for gpu in snapshot.gpus:
        texts += [f"{labels([gpu])}: {one.text}" for one in bystanders.beside(gpu, snapshot)]
    if not texts:
        return passed("no process without a claim is seen on a claimed GPU")
    fix = "ask the users of these processes to end them, and to start them with safe-gpu run"
    return warning("; ".join(texts[:_MOST_TOLD]), fix)


def modes(host: CheckedHost) -> Check:
    """Check that no GPU has been divided differently during a claim."""
    gpus = host.snapshot.gpus
    claims, _ = claims_now(gpus, host.snapshot.name_prefix, living_claims)
    gpus_of: dict[str, list[Gpu]] = {}  # by the sentence on them
    users: dict[str, str] = {}  # name of an entry -> who has it
    for gpu in gpus:
        for entry in claims.in_the_way(gpu.uuid)[:_MOST_TOLD]:
            held_as = claims.held_as(entry, gpu.uuid)
            if held_as is None or not held_as.outdated:
                continue
            if entry.name not in users:
                users[entry.name] = _user_of(entry)
            gpus_of.setdefault(f"{held_as.text} ({users[entry.name]})", []).append(gpu)
    if not gpus_of:
        return passed("no mode was changed during a claim")
    texts = [f"{labels(of)}: {text}" for text, of in gpus_of.items()]
    fix = "ask their users to end these claims; next time drain a GPU before its mode is changed"
    return warning("; ".join(texts[:_MOST_TOLD]), fix)


def _user_of(entry: Entry) -> str:
    holder = holder_of(entry)
    return f"process {holder.pid or '?'} of {holder.user or '?'}"
