"""An entry: a file that says what one process holds, or what it wants, for as long as it keeps the file locked.

An entry belongs to its user, who alone can write it (mode 0644). So the kernel itself, by the owner of the file, says
whose it is. It is locked before it has a name and never again, so one that is not locked stays dead. To lock it needs a
descriptor that may write, which only its user has.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from ..host import procfs
from ..host.foreign_files import as_list, as_seconds, as_text, open_to_read, well_formed
from ..host.locks import Held, NoLocksError, is_locked, lock, read_lock, unlock
from ..host.programs import own_command
from ..host.signals import DeferredSignals
from .directory import OPEN_FILE, Directory, SharedDirectory, refusal
from .doors import MOST_PARTS

LARGEST = 1 << 15
"""Bytes of an entry."""

MOST_VALUES = 2048
"""Commas and opening brackets of an entry: a value takes a hundred times its bytes of memory, and long to parse. A
claim of 256 pieces that has a part of each has 1,300."""

LONGEST_NAME = 35
"""Characters of the name of an entry."""

LARGEST_GAP = 10**7
"""Between two numbers that count. Those behind a larger gap do not, or one huge number would use up all numbers."""

_NAME = re.compile(r"(?:0|[1-9][0-9]{0,17})\.[0-9a-f]{16}")
_UNFINISHED = re.compile(r"\.[0-9a-f]{16}")
_MOST_TRIES = 100  # to make one, while somebody removes what is being made
_MOST_GPUS = 256
_LONGEST_UUID = 100  # characters, as the next ones
_LONGEST_MODE = 8
_LONGEST_TEXT = 200
_LONGEST_LABEL = 16
_MOST_CONDITIONS = 24  # keys of a ticket beyond those of all entries
_LONGEST_CONDITION = 64  # characters of such a key, and of its value
_LARGEST_SHARE = 1 << 60
_LARGEST_NUMBER = 1 << 62

STRANGE = object()
"""Stands for a value of a ticket that no version of this package has written."""


class Entry(NamedTuple):
    """What a living process holds, or what it wants.

    Attributes:
        number: orders the entries of a directory by age.
        name: of the file, which is never used again.
        uid: the owner of the file; -1 of one whom the user namespace of this process does not know.
        file: its device and inode.
        gpus: UUID -> bytes of a share of it, None of all of it. Of a ticket: the GPUs that could ever do.
        parts: UUID -> K, of the GPUs of which it holds a part (see :mod:`~safe_gpu.coordination.doors`).
        pieces: GPU -> those of ``gpus`` that are pieces of it; none where it has all of a GPU that has another name.
        modes: GPU -> the mode that divides it into such pieces, where there are several.
        nb_gpus: how many it wants; 0 of a claim.
        display: it shares a GPU with an active display with all claims that say so.
        token: hash of the token of a claim that allows claims inside it; "" of others.
        inside: hash of the token of the claim that encloses it; "" of one that is inside none.
        pid, start, pidns, host: its process, as it sees itself: ``start`` in clock ticks since boot.
        job, command: its batch job and its command, for people; "" is unknown.
        since, until, queued: Unix seconds; None is unknown.
        version: of the format.
        more: what else it says: the conditions of a ticket, and of a claim what only the history tells.

    >>> Entry.read("7.00000000000000aa", 1000, (1, 2), b'{"v": 1, "gpus": {"GPU-5c89852c": null}}').gpus
    {'GPU-5c89852c': None}
    """

    number: int
    name: str
    uid: int
    file: tuple[int, int]
    gpus: Mapping[str, int | None]
    parts: Mapping[str, int]
    pieces: Mapping[str, tuple[str, ...]]
    modes: Mapping[str, str]
    nb_gpus: int
    display: bool
    token: str
    inside: str
    pid: int
    start: int
    pidns: int
    host: str
    job: str
    command: str
    since: float | None
    until: float | None
    queued: float | None
    version: int
    more: Mapping[str, Any]

    @classmethod
    def read(cls, name: str, uid: int, file: tuple[int, int], data: bytes) -> Entry:
        """Return what a file says.

        Raises:
            ValueError: nonsense.
        """
        facts = _Facts(data)
        nb_gpus = facts.number("nb_gpus", 0, _MOST_GPUS) or 0
        if nb_gpus:
            gpus = _parse_wanted(facts)
            more = _parse_conditions(facts)
        else:
            gpus = _parse_shares(facts)
            more = _parse_for_history(facts)
        pieces = _parse_pieces(facts, gpus)
        return cls(
            number=number_of(name),
            name=name,
            uid=uid,
            file=file,
            gpus=gpus,
            parts=_parse_parts(facts, gpus, pieces),
            pieces=pieces,
            modes=_parse_modes(facts, pieces),
            nb_gpus=nb_gpus,
            display=facts.content.get("display") is True,
            token=facts.text("token"),
            inside=facts.text("inside"),
            pid=facts.number("pid", 0, _LARGEST_NUMBER) or 0,
            start=facts.number("start", 0, _LARGEST_NUMBER) or 0,
            pidns=facts.number("pidns", 0, _LARGEST_NUMBER) or 0,
            host=facts.text("host"),
            job=facts.text("job"),
            command=facts.text("command"),
            since=facts.seconds("since"),
            until=facts.seconds("until"),
            queued=facts.seconds("queued"),
            version=facts.number("v", 1, 1 << 30) or 1,
            more=more,
        )


class _Facts:
    """The keys of an entry. A value of another kind than its key has, or out of its range, is as if it were missing.

    Raises:
        ValueError: it is no object of JSON, or of too many values.
    """

    def __init__(self, data: bytes) -> None:
        if data.count(b",") + data.count(b"[") + data.count(b"{") > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES} values")
        try:
            content = json.loads(data)
        except RecursionError as err:
            raise ValueError(str(err)) from err
        if not isinstance(content, dict):
            raise ValueError("no object")
        self.content: dict[str, Any] = content

    def text(self, key: str) -> str:
        value = self.content.get(key)
        if not isinstance(value, str):
            return ""
        return as_text(value, _LONGEST_TEXT)

    def number(self, key: str, least: int, most: int) -> int | None:
        return _whole(self.content.get(key), least, most)

    def seconds(self, key: str) -> float | None:
        return as_seconds(self.content.get(key), 0)

    def object(self, key: str) -> dict[str, Any]:
        value = self.content.get(key)
        if not isinstance(value, dict):
            return {}
        return value


def _whole(value: object, least: int, most: int) -> int | None:
    """Return a whole number within these bounds; None of anything else."""
    if type(value) is int and least <= value <= most:  # a bool is an int too
        return value
    return None


def _is_uuid(name: object) -> bool:
    return isinstance(name, str) and len(name) <= _LONGEST_UUID and name.isprintable()


def _parse_wanted(facts: _Facts) -> dict[str, int | None]:
    """Return the GPUs of a ticket."""
    gpus = facts.content.get("gpus")
    if not isinstance(gpus, (list, dict)) or len(gpus) > _MOST_GPUS:
        raise ValueError("no GPUs")
    return {uuid: None for uuid in gpus if _is_uuid(uuid)}


def _parse_shares(facts: _Facts) -> dict[str, int | None]:
    """Return the GPUs of a claim. A share that is none is all of the GPU."""
    gpus = facts.content.get("gpus")
    if not isinstance(gpus, dict) or len(gpus) > _MOST_GPUS:
        raise ValueError("no GPUs")
    return {uuid: _whole(share, 1, _LARGEST_SHARE) for uuid, share in gpus.items() if _is_uuid(uuid)}


def _parse_pieces(facts: _Facts, gpus: Mapping[str, int | None]) -> dict[str, tuple[str, ...]]:
    """Return the pieces of each GPU. Where it lists none of ``gpus``, it has all of that GPU."""
    names_of = facts.object("pieces")
    if len(names_of) > _MOST_GPUS:
        raise ValueError("no GPUs")
    pieces = {}
    for gpu, names in names_of.items():
        if _is_uuid(gpu):
            pieces[gpu] = tuple(name for name in as_list(names) if isinstance(name, str) and name in gpus)
    return pieces


def _parse_parts(
    facts: _Facts, gpus: Mapping[str, int | None], pieces: Mapping[str, tuple[str, ...]]
) -> dict[str, int]:
    """Return the numbers of parts. A part of pieces is not a share of their GPU, and its number is not one of a share's
    door."""
    numbers = facts.object("parts")
    parts = {}
    for name in (*gpus, *pieces):
        least = 0
        if name not in gpus and pieces[name]:
            least = MOST_PARTS
        part = _whole(numbers.get(name), least, least + MOST_PARTS - 1)
        if part is not None:
            parts[name] = part
    return parts


def _parse_modes(facts: _Facts, pieces: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    modes = facts.object("modes")
    return {gpu: as_text(modes[gpu], _LONGEST_MODE) for gpu in pieces if isinstance(modes.get(gpu), str)}


def _parse_conditions(facts: _Facts) -> dict[str, Any]:
    """Return what a ticket says beyond other entries, of bounded size."""
    conditions: dict[str, Any] = {}
    for key, value in facts.content.items():
        if key in Entry._fields or key == "v":
            continue
        if len(conditions) == _MOST_CONDITIONS:
            conditions[""] = STRANGE
            break
        if not is_plain(value):
            value = STRANGE
        conditions[key[:_LONGEST_CONDITION]] = value
    return conditions


def is_plain(value: object) -> bool:
    """Return whether a value may be that of a condition."""
    if isinstance(value, str):
        return len(value) <= _LONGEST_CONDITION
    return value is None or isinstance(value, (bool, int, float))


def _parse_for_history(facts: _Facts) -> dict[str, Any]:
    more: dict[str, Any] = {"waited": facts.seconds("waited"), "of": facts.number("of", 1, _LARGEST_SHARE)}
    labels = as_list(facts.content.get("labels"))[:_MOST_GPUS]
    labels = [as_text(label, _LONGEST_LABEL) for label in labels if isinstance(label, str)]
    if labels:
        more["labels"] = labels
    return more


def entry_names(names: Iterable[str]) -> set[str]:
    """Return those of some names that entries may have.

    >>> entry_names(["7.00000000000000aa", "07.00000000000000aa", "7"])
    {'7.00000000000000aa'}
    """
    return {name for name in names if _NAME.fullmatch(name)}


def is_unfinished_name(name: str) -> bool:
    """Return whether an entry that is being made may have this name."""
    return _UNFINISHED.fullmatch(name) is not None


def number_of(name: str) -> int:
    """Return the number of an entry with this name."""
    return int(name.partition(".")[0])


def order_of(name: str) -> tuple[int, str]:
    """Return what names of entries are ordered by: their numbers, which have no leading zeros, and then what is random.

    >>> order_of("9.00000000000000bb") < order_of("10.00000000000000aa")
    True
    """
    return len(name), name


def in_order(names: Iterable[str]) -> list[str]:
    """Return names of entries in the order of :func:`order_of`."""
    # Two sorts in C take a third of the time of one by order_of, which matters if there are many.
    return sorted(sorted(names), key=len)


def next_number(names: Collection[str]) -> int:
    """Return the number of a new entry beside those with these names: one above the highest that counts.

    >>> next_number(["1.00000000000000aa", "7.00000000000000aa"]), next_number([])
    (8, 1)
    """
    if not names:
        return 1
    longest = len(max(names, key=len))
    highest = number_of(max(name for name in names if len(name) == longest))
    if highest > LARGEST_GAP:  # it may not count
        highest = 0
        for number in sorted(number_of(name) for name in names):
            if number > highest + LARGEST_GAP:
                break
            highest = number
    return highest + 1


def facts_of_this_process(job: str | None, command: str | None = None) -> dict[str, Any]:
    """Return what an entry of this process says of it.

    Args:
        job: the batch job, for people.
        command: of what this process will execute, for people; None: of this process itself.
    """
    pid = os.getpid()
    return {
        "pid": pid,
        "start": procfs.start_time(pid) or 0,
        "pidns": procfs.pid_namespace() or 0,
        "host": os.uname().nodename,
        "job": well_formed(job or "")[:_LONGEST_TEXT],
        "command": well_formed(command or own_command() or "")[:_LONGEST_TEXT],
    }


def make_entry(directory: Directory, number: int, facts: Mapping[str, Any], *, by_children: bool) -> tuple[str, Held]:
    """Make an entry and return its name and its lock. What has a name is whole and locked.

    Args:
        number: :attr:`~safe_gpu.coordination.entries.Entries.next_number`.
        facts: what it says, see :class:`Entry`.
        by_children: whether forked children keep it: that of a claim they do, since they may be using the GPUs.

    Raises:
        StateDirError: no room, a read-only file system, or somebody keeps removing what is made.
    """
    data = json.dumps({"v": 1, **facts}).encode() + b"\n"
    if len(data) > LARGEST:
        problem = f"an entry of {len(data)} bytes is larger than {LARGEST}, and would be ignored"
        raise refusal(problem, directory.path, errno.EFBIG)
    for _ in range(_MOST_TRIES):
        temporary = f".{os.urandom(8).hex()}"
        name = f"{number}{temporary}"  # which nobody else has
        held = _try_to_make(directory, temporary, name, data, by_children=by_children)
        if held is not None:
            return name, held
    problem = f"what is made in {directory.path} is removed at once, by its owner or a cleaner"
    raise refusal(problem, directory.path, errno.ENOENT)


def try_making(directory: SharedDirectory) -> None:
    """Make, write and lock a file as an entry is made, and remove it: it gets no name of an entry.

    Raises:
        StateDirError: a claim would fail here for the same reason.
    """
    temporary = f".{os.urandom(8).hex()}"
    with ExitStack() as undo:
        held = _make_unfinished(directory, temporary, by_children=False, undo=undo)
        try:
            _write_and_lock(held.fd, b"{}\n")
        except OSError as err:
            raise directory.error(temporary, err) from err


def _try_to_make(directory: Directory, temporary: str, name: str, data: bytes, *, by_children: bool) -> Held | None:
    """Make an entry under a temporary name, lock it and give it its name; None where it was removed meanwhile."""
    with ExitStack() as undo:
        held = _make_unfinished(directory, temporary, by_children=by_children, undo=undo)
        try:
            _write_and_lock(held.fd, data)
            os.rename(temporary, name, src_dir_fd=directory.fd, dst_dir_fd=directory.fd)
            is_ours = directory.still_has(name, held.file)  # its owner may have put another file there
        except (FileNotFoundError, FileExistsError):
            return None
        except OSError as err:
            raise directory.error(temporary, err) from err
        if not is_ours:
            return None
        undo.pop_all()
    return held


def _make_unfinished(directory: SharedDirectory, temporary: str, *, by_children: bool, undo: ExitStack) -> Held:
    """Make an empty file that nobody else can open; ``undo`` removes it."""
    try:
        fd = os.open(temporary, OPEN_FILE | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory.fd)
    except OSError as err:
        raise directory.error(temporary, err) from err
    held = Held(fd, by_children=by_children, unlock=unlock)
    undo.callback(held.release)
    undo.callback(_remove_if_there, directory, temporary)
    return held


def _write_and_lock(fd: int, data: bytes) -> None:
    if os.write(fd, data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    lock(fd)
    try:
        os.fchmod(fd, 0o644)  # now that nobody else can lock it first
    except OSError as err:
        if err.errno != errno.EPERM:
            raise
        # It is ours, so its file system (vfat) has no such modes.
        raise OSError(errno.EOPNOTSUPP, f"its mode cannot be set: {err.strerror}") from err


def _remove_if_there(directory: SharedDirectory, name: str) -> None:
    with suppress(OSError):
        os.unlink(name, dir_fd=directory.fd)


def is_alive(directory: SharedDirectory, name: str) -> bool:
    """Return whether an entry still lives, as one who waits asks again and again."""
    with suppress(OSError), open_to_read(name, os.O_NOFOLLOW, directory.fd) as file:
        return is_locked(file.fileno())
    return False


def sleep_until_dead(directory: Directory, name: str, seconds: float | None) -> None:
    """Sleep until an entry is given back, or for that many seconds."""
    deadline = None
    if seconds is not None:
        deadline = time.monotonic() + seconds
    with DeferredSignals() as signals:
        try:
            held = read_lock(os.open(name, OPEN_FILE, dir_fd=directory.fd), fcntl.flock)
        except OSError:
            return
        try:
            held.wait(deadline, signals)
        except NoLocksError:
            pass  # who waits looks again
        finally:
            held.leave()
