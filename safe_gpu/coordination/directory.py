"""The state directory: where it is, why it cannot be used, and it and the directories in it while they are open.

Everybody may make files in them (mode 1777), and nobody but its owner removes those of others. So none is ever a
symbolic link, nothing in it is followed, and each appears finished or not at all.

``SAFE_GPU_DIR`` may name any directory or file of the system, or a user's own. So nobody is told to remove a directory,
to open it to all, or to change what is mounted there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from itertools import islice
from typing import NamedTuple, TypeVar

from ..errors import StateDirError
from ..host import procfs
from ..host.foreign_files import printable, printable_lines
from ..host.locks import Held
from ..host.procfs import NETWORK_TYPES, file_system_at
from ..settings.variables import host_setting

DEFAULT_DIR = "/tmp/safe-gpu"

ADMIN_DIR = "/var/lib/safe-gpu"
"""Where ``safe-gpu setup`` makes the state directory."""

PARTS = ("claims", "queue", "faults", "history")
"""The directories in the state directory."""

# O_NONBLOCK: the owner of a file may hold a file lease on it (F_SETLEASE), and then open(2) blocks for 45 seconds.
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

OPEN_DIR = OPEN_FILE | os.O_DIRECTORY

DIR_MODE = 0o1777

HOST_LOCK = "host.lock"

_OF_IMAGES = frozenset({"overlay", "fuse-overlayfs", "fuse.fuse-overlayfs"})  # file systems

_LONGEST_NAME = 255  # of any file

_ONE_BLOCK = 4096  # bytes of a directory that has few names, on all file systems

_MOST_TRIES = 100  # to make a file, while somebody removes it

# Of renameat2(2).
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2


def state_dir_path() -> str:
    """Return where the state directory is: ``SAFE_GPU_DIR``, else what root's file says, else ``/tmp/safe-gpu``;
    absolute.

    Raises:
        PolicyError: root's file has a mistake.
        StateDirError: ``SAFE_GPU_DIR`` is relative, and would name another directory in every working directory.
    """
    return _absolute(host_setting("state_dir", "SAFE_GPU_DIR", os.environ) or DEFAULT_DIR)


def _absolute(path: str) -> str:
    if not os.path.isabs(path):
        raise StateDirError(
            f"SAFE_GPU_DIR={path} is relative: started elsewhere, another process would use another directory and "
            "claim the same GPUs; set it to an absolute path",
            path=path,
        )
    return os.path.abspath(path)


def refusal(what: str, path: str, code: int | None, way_out: str = "") -> StateDirError:
    """Return the error with this problem and the ways out; another directory is always one. ``code`` is an errno."""
    ways_out = another_place(path)
    if way_out:
        ways_out = f"{way_out}, or {ways_out}"
    return StateDirError(f"{what}: {ways_out}", path=path, errno=code)


def another_place(path: str) -> str:
    """Return how all users get another state directory than the one at this path, or around it.

    One user who sets SAFE_GPU_DIR alone would wait in a queue that meets no other.
    """
    if f"{path}/".startswith(f"{DEFAULT_DIR}/"):
        return "ask root to run safe-gpu setup"
    if os.environ.get("SAFE_GPU_DIR"):
        return "set SAFE_GPU_DIR, for all users, to another directory"
    return "ask root to name another directory by safe-gpu setup --state-dir"


def refusal_of_error(path: str, err: OSError, *, verb: str = "opened", closed: str = "") -> StateDirError:
    """Return why it cannot be opened or made. ``closed`` is the way out of one that is not what it should be."""
    what = f"{path} cannot be {verb} ({err.strerror})"
    way_out = closed
    if err.errno in (errno.ELOOP, errno.EMLINK):
        what = f"{path} is a symbolic link, which is never followed"
    elif err.errno == errno.ENOTDIR and verb == "opened":
        what = f"{path} is not a directory, or it is a symbolic link, which is never followed"
    elif err.errno == errno.EWOULDBLOCK:
        what = f"{path} is kept under a file lease (F_SETLEASE)"
        way_out = "ask its owner or root to end that"
    elif err.errno in (errno.EACCES, errno.EPERM) and verb == "opened":
        what = f"{path} is closed to user {os.geteuid()} ({err.strerror})"
    elif err.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"no room for {path} ({err.strerror})"
        way_out = "free some space there"
    elif err.errno in (errno.EMFILE, errno.ENFILE):
        way_out = "let this process open more (ulimit -n)"
    elif err.errno == errno.EFBIG:
        what = f"{path} cannot be written ({err.strerror})"
        way_out = "let this process write files (ulimit -f)"
    elif err.errno in (errno.EINVAL, errno.EOPNOTSUPP) and verb == "opened":
        what = f"{path} cannot be made on this file system ({err.strerror})"
        way_out = ""
    elif err.errno == errno.EROFS:
        what = f"{path} is on a read-only file system"
        way_out = ""
    return refusal(what, path, err.errno, way_out)


def refusal_of_status(path: str, status: os.stat_result) -> StateDirError:
    """Return why a file of this kind, or with this mode, is not used."""
    if stat.S_ISREG(status.st_mode):
        has = f"mode {stat.S_IMODE(status.st_mode):04o}"
        if status.st_nlink > 1:
            has = f"{status.st_nlink} names (hard links) and {has}"
        what = f"{path} has {has} in place of 0666, so it may be a link to somebody's file elsewhere and is not used"
    else:
        what = f"{path} is not a regular file"
    owner = procfs.user_name(status.st_uid)
    way_out = f"ask its owner {owner} or root to remove this name"
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and _are_roots(os.path.dirname(path)):
        way_out = f"ask its owner {owner} to give it mode 0666 again (chmod 666), or root to remove this name"
    return refusal(what, path, errno.EPERM, way_out)


def _are_roots(path: str) -> bool:
    """Return whether a directory and all above it are root's, so that nobody can put a link in the place of a file of
    others there."""
    while os.stat(path).st_uid == 0:
        if path == "/":
            return True
        path = os.path.dirname(path)
    return False


def setup_command(path: str) -> str:
    """Return the command by which root makes a state directory its own, in place of this one or of its files."""
    from shlex import quote

    if path in (ADMIN_DIR, DEFAULT_DIR):
        return "safe-gpu setup"
    return f"safe-gpu setup --state-dir {quote(path)}"


def remover_of(path: str, user: int) -> int | None:
    """Return who can remove entries of this user, being neither that user nor root: the owner of the state directory or
    of ``claims``, sticky bit or not; None for nobody."""
    with suppress(OSError):
        for place in (path, f"{path}/claims"):
            owner = os.stat(place, follow_symlinks=False).st_uid
            if owner not in (0, user):
                return owner
    return None


_Opened = TypeVar("_Opened", bound="SharedDirectory")


def warning_about_container_dir(path: str) -> str:
    """Return a warning about a state directory in the image of a container that has not the network of the host; ""
    for none."""
    above = path
    while not os.path.isdir(above):
        above = os.path.dirname(above)
    try:
        device = os.stat(above).st_dev
    except OSError:
        return ""  # it has just been removed
    kind, point = procfs.file_system_at(above, device)
    if point != "/" or kind not in _OF_IMAGES or procfs.sees_network_devices():
        return ""
    return (
        f"the state directory {printable_lines(path)} belongs to this container, and claims outside it are not "
        f"seen, nor do they see this one, unless it has the network of the host: start it with -v {path}:{path}"
    )


def warning_about_removable_entries(path: str, *, doors: bool) -> str:
    """Return a warning that somebody can remove the entries of this user's claims; "" if nobody can, or if that harms
    no claim.

    A claim that has doors keeps its GPUs without its entry, in its own network namespace. Those of other processes
    cannot be read, but the host's has the network interfaces that are devices.

    Args:
        path: the state directory.
        doors: whether the claim has doors.
    """
    uid = remover_of(path, os.geteuid())
    if uid is None or (doors and procfs.sees_network_devices()):
        return ""
    why = "it has no doors (abstract sockets)"
    if doors:
        why = "this network namespace seems not to be the host's"
    ask = "ask root to run"
    if os.geteuid() == 0:
        ask = "as root"
    return (
        f"{procfs.user_name(uid)} can remove the entries of this claim in {printable(path)}, and nothing else "
        f"keeps others off its GPUs, since {why}: {ask}: {setup_command(path)}"
    )


class BorrowedDirectory(NamedTuple):
    """A directory that is open as the descriptor of another object of this process, which closes it."""

    path: str
    fd: int


class SharedDirectory:
    """An open directory that everybody may use; use it in ``with`` or close it.

    Args:
        path: absolute path, or a name below ``above``.
        above: an open directory that the name is relative to.
        make: whether it is made where it is missing. Who only looks makes nothing.

    Attributes:
        file: its device and inode.
        is_large: whether it may have had more than some dozens of names when it was opened.

    Raises:
        StateDirError: a symbolic link, not a directory, not writable, on a network file system, no room.
        FileNotFoundError: it is missing, and is not to be made.
    """

    fd = -1

    def __init__(
        self, path: str, above: SharedDirectory | BorrowedDirectory | None = None, *, make: bool = True
    ) -> None:
        self.path: str = path
        parent = None
        if above is not None:
            self.path = f"{above.path}/{path}"
            parent = above.fd
        while self.fd < 0:
            try:
                self.fd = os.open(path, OPEN_DIR, dir_fd=parent)
            except FileNotFoundError:
                if not make:
                    raise
                make_directory(path, self.path, parent)
            except OSError as err:
                raise refusal_of_error(self.path, err) from err
        status = os.fstat(self.fd)
        self.file = (status.st_dev, status.st_ino)
        self.is_large = status.st_size > _ONE_BLOCK
        try:
            if above is None:
                self._refuse_network_types(status)
            if not self._is_open_to_us(status):
                what = f"{self.path} has mode {stat.S_IMODE(status.st_mode):04o} and belongs to uid {status.st_uid}"
                raise refusal(f"{what}, so user {os.geteuid()} cannot work in it", self.path, errno.EACCES)
        except StateDirError:
            self.close()
            raise

    def _refuse_network_types(self, status: os.stat_result) -> None:
        kind = file_system_at(self.path, status.st_dev).kind
        if kind in NETWORK_TYPES:
            raise StateDirError(
                f"{self.path} is on a network file system ({kind}), where locks do not work as on a local one: "
                f"{another_place(self.path)}, on a local disk or tmpfs",
                path=self.path,
            )

    def _is_open_to_us(self, status: os.stat_result) -> bool:
        if stat.S_IMODE(status.st_mode) == DIR_MODE or status.st_uid == os.geteuid():
            return True
        return os.access(f"/proc/self/fd/{self.fd}", os.W_OK | os.X_OK, effective_ids=True)

    def __enter__(self: _Opened) -> _Opened:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it; safe to call twice."""
        fd = self.fd
        self.fd = -1
        if fd >= 0:
            os.close(fd)

    def names(self, most: int | None = None, *, longest: int = _LONGEST_NAME) -> set[str]:
        """Return the names in it.

        They are read through a descriptor of their own: threads and forked children that share one share its place in
        the listing, and each would miss some names.

        Args:
            most: of very many, some more than this are enough.
            longest: characters of those that matter.

        Raises:
            StateDirError: it cannot be read.
        """
        try:
            fd = os.open(".", OPEN_DIR, dir_fd=self.fd)
            try:
                if most is None:
                    return {name for name in os.listdir(fd) if len(name) <= longest}
                with os.scandir(fd) as found:
                    return {one.name for one in islice(found, most + 1)}
            finally:
                os.close(fd)
        except OSError as err:
            raise refusal_of_error(self.path, err) from err

    def has(self, name: str) -> bool:
        """Return whether there is a file or a directory of this name in it."""
        return os.access(name, os.F_OK, dir_fd=self.fd)

    def still_has(self, name: str, file: tuple[int, int] | None) -> bool:
        """Return whether a name in it still means the file with this device and inode. A cleaner may have removed it,
        and others made it again."""
        return file is not None and file == file_at(name, self.fd)

    def open_known(self, name: str, flags: int = OPEN_FILE, *, make: bool = False) -> tuple[int, os.stat_result]:
        """Return a descriptor of a file in it that everybody may write, and its status.

        A file of mode 0666 is everybody's anyway. Another one may be somebody's from elsewhere. O_CREAT is never used
        on a name that may exist: in a sticky directory fs.protected_regular refuses that even to root.

        Raises:
            FileNotFoundError: it is missing, and is not to be made.
            StateDirError: something else in its place, a file of another mode, or one that is closed to us.
        """
        for _ in range(_MOST_TRIES):
            try:
                fd = os.open(name, flags, dir_fd=self.fd)
            except FileNotFoundError:
                if not make:
                    raise
                self._make_file(name)
                continue
            except OSError as err:
                raise self.error(name, err) from err
            status = os.fstat(fd)
            if is_everybodys(status):
                return fd, status
            os.close(fd)
            raise refusal_of_status(os.path.join(self.path, name), status)
        path = os.path.join(self.path, name)
        raise refusal(f"{path} is removed at once, by its owner or a cleaner", path, errno.ENOENT)

    def _make_file(self, name: str) -> None:
        """Make it empty with its mode, whatever the umask, before it has its name; another process may be faster."""
        temporary = f".{name}.{os.urandom(8).hex()}"
        try:
            fd = os.open(temporary, OPEN_FILE | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self.fd)
            try:
                os.fchmod(fd, 0o666)
                with suppress(FileExistsError):
                    os.link(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)
            finally:
                os.close(fd)
                os.unlink(temporary, dir_fd=self.fd)
        except OSError as err:
            raise self.error(name, err) from err

    def keep_from_cleaners(self, *, by_children: bool) -> Held:
        """Return a descriptor of it, with a shared lock: systemd-tmpfiles skips a directory that somebody has locked.
        Nobody waits for it, so it goes without where a cleaner holds the lock just now.

        Raises:
            StateDirError: this process may open no more files.
        """
        try:
            fd = os.dup(self.fd)
        except OSError as err:
            raise refusal_of_error(self.path, err) from err
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return Held(fd, file=self.file, by_children=by_children)

    def error(self, name: str, err: OSError) -> StateDirError:
        """Return why a file in it cannot be opened or made."""
        return refusal_of_error(os.path.join(self.path, name), err, closed="ask its owner or root to remove this name")


class Directory(SharedDirectory):
    """An open directory of the state directory, such as ``claims``.

    Args:
        state_dir: absolute path of the state directory, or that directory while it is open, which is not closed here.
        name: of the directory in it.
        make: whether they are made where they are missing.

    Raises:
        StateDirError, FileNotFoundError: as :class:`SharedDirectory`.
    """

    def __init__(self, state_dir: str | SharedDirectory | BorrowedDirectory, name: str, *, make: bool = True) -> None:
        if not isinstance(state_dir, str):
            super().__init__(name, state_dir, make=make)
            return
        with SharedDirectory(state_dir, make=make) as above:
            super().__init__(name, above, make=make)


def replace_file(directory: int, name: str, content: bytes) -> None:
    """Put a file of mode 0644 with all of this content in the place of the one with this name, or of none.

    Args:
        directory: descriptor of the directory.

    Raises:
        OSError: it cannot be written, or a directory has its name. Nothing has changed.
    """
    temporary = f".{name}.{os.urandom(8).hex()}"
    fd = os.open(temporary, OPEN_FILE | os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory)
    try:
        with open(fd, "wb") as file:
            file.write(content)
            os.fchmod(fd, 0o644)
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise


def file_at(path: str, above: int | None = None) -> tuple[int, int] | None:
    """Return the device and inode of what a path means, which is not followed if it is a link; None of nothing."""
    try:
        status = os.stat(path, dir_fd=above, follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def is_everybodys(status: os.stat_result) -> bool:
    """Return whether it is a regular file that everybody may write."""
    return status.st_mode == stat.S_IFREG | 0o666


def make_directory(name: str, path: str, parent: int | None) -> None:
    """Make a directory of mode 1777, whatever the umask, unless another process is faster.

    It is made under another name, which begins with a dot, and renamed when it is ready. A process that is killed here
    leaves nothing with the final name that others cannot use. Its mode is set through a descriptor: the owner of the
    directory above may replace names there, and a link in the place of the new directory is not followed.

    Args:
        name: absolute, or below ``parent``, which is the descriptor of a directory.
        path: the same as an absolute path, for messages.

    Raises:
        StateDirError: no room, a read-only file system, a parent that is missing or closed.
    """
    above, last = os.path.split(name)
    temporary = os.path.join(above, f".{last}.{os.urandom(8).hex()}")
    try:
        os.mkdir(temporary, 0o700, dir_fd=parent)
        try:
            _open_to_all(temporary, parent)
            _rename_to_new(temporary, name, parent)
        finally:
            with suppress(OSError):  # it was renamed
                os.rmdir(temporary, dir_fd=parent)
    except OSError as err:
        if file_at(name, parent) is not None:
            return  # another process was faster
        if err.errno == errno.ENOENT and not os.path.isdir(os.path.dirname(path)):
            raise refusal(f"{os.path.dirname(path)} does not exist", path, err.errno, "create it") from err
        raise refusal_of_error(path, err, verb="created") from err


def _rename_to_new(source: str, target: str, parent: int | None) -> None:
    """Rename a directory, unless the target exists. rename(2) would replace an empty one of this user, and who has that
    one open could make nothing in it."""
    code = _renameat2(source, target, parent, _RENAME_NOREPLACE)
    if code in (0, errno.EEXIST):
        return
    if file_at(target, parent) is None:  # the kernel or the file system has no such call
        os.rename(source, target, src_dir_fd=parent, dst_dir_fd=parent)


def exchange(one: str, other: str, parent: int) -> None:
    """Let two names in a directory change places, at one moment.

    Raises:
        OSError: they cannot, as on file systems that have no such call.
    """
    code = _renameat2(one, other, parent, _RENAME_EXCHANGE)
    if code:
        raise OSError(code, os.strerror(code), one)


def _renameat2(source: str, target: str, parent: int | None, flags: int) -> int:
    """Return 0 or the error number of renameat2(2); ENOSYS in a Python without ctypes, or with glibc before 2.28."""
    try:
        import ctypes

        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (ImportError, AttributeError):
        return errno.ENOSYS
    above = parent
    if above is None:
        above = _AT_FDCWD
    if rename(above, os.fsencode(source), above, os.fsencode(target), flags) == 0:
        return 0
    return ctypes.get_errno()


def _open_to_all(name: str, parent: int | None) -> None:
    """Give the directory just made mode 1777; OSError if somebody has put another one in its place."""
    fd = os.open(name, OPEN_DIR, dir_fd=parent)
    try:
        if os.fstat(fd).st_uid != os.geteuid() or os.listdir(fd):
            raise PermissionError(errno.EPERM, "somebody replaced it while it was made", name)
        os.fchmod(fd, DIR_MODE)
    finally:
        os.close(fd)
