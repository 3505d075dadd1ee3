"""The history of a host: one file for each month, to which claims append lines of JSON; written after host.lock.

A claim never waits for it and never fails for it: where a line cannot be written (no room, another user's file that is
closed, a symbolic link), it is lost. The files grow to a bounded size and are kept for two years.

A claim is written down when it ends: by itself or, if it died, by the process that removes its entry. Its user and root
do so when they claim or look at the status. Until then its entry has the facts.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from ..host.foreign_files import printable, well_formed
from ..host.procfs import pid_namespace, user_name
from ..host.programs import program_names
from .directory import DIR_MODE, OPEN_FILE, BorrowedDirectory, Directory, SharedDirectory, state_dir_path
from .entry import Entry

NAME = "history"
"""The directory, in the state directory."""

LARGEST = 8 << 20
"""Bytes from which on nothing is appended to a file. The next part of the month is begun then."""

PARTS = 4
"""Files of a month at most; what comes after that is lost."""

_MOST_NAMES = 4096  # that are listed

_MONTHS = 24  # whose files are kept

_OLD = r"[0-9]{4}-(0[1-9]|1[0-2])(\.[1-3])?\.jsonl|\..*\.[0-9a-f]{16}"


class HistoryDir(Directory):
    """The directory, while it is open. Who only looks makes nothing.

    Raises:
        StateDirError, FileNotFoundError: as :class:`~safe_gpu.coordination.directory.Directory`.
    """

    def __init__(self, state_dir: SharedDirectory | BorrowedDirectory | None = None, *, make: bool = False) -> None:
        super().__init__(state_dir or state_dir_path(), NAME, make=make)


def month_of(when: float) -> str:
    """Return the month of a time in Unix seconds, in UTC.

    >>> month_of(0)
    '1970-01'
    """
    return time.strftime("%Y-%m", time.gmtime(when))


def months_kept(now: float) -> list[str]:
    """Return the months whose files are kept, in their order: that of a time in Unix seconds, in UTC, and those before
    it.

    >>> months_kept(0)[0], months_kept(0)[-1]
    ('1968-02', '1970-01')
    """
    year, month = time.gmtime(now)[:2]
    last = 12 * year + month - 1
    return [f"{number // 12}-{number % 12 + 1:02}" for number in range(last - _MONTHS + 1, last + 1)]


def file_names(month: str) -> list[str]:
    """Return the files of a month, in the order in which they are filled.

    >>> file_names("2026-11")
    ['2026-11.jsonl', '2026-11.1.jsonl', '2026-11.2.jsonl', '2026-11.3.jsonl']
    """
    return [f"{month}.jsonl", *(f"{month}.{part}.jsonl" for part in range(1, PARTS))]


def append(lines: Iterable[bytes], now: float, state_dir: SharedDirectory | BorrowedDirectory | None = None) -> bool:
    """Append whole lines to the file of the month; no lock is taken. Returns whether that was done. The caller holds
    handlers of signals back.

    Args:
        now: Unix seconds.
        state_dir: while it is open; None opens that of this process.
    """
    data = b"".join(lines)
    if not data:
        return True
    try:
        with HistoryDir(state_dir, make=True) as directory:
            return any(_append(directory, name, data, now) for name in file_names(month_of(now)))
    except OSError:
        return False


def _append(directory: Directory, name: str, data: bytes, now: float) -> bool:
    with suppress(OSError):  # somebody else's, and closed: the next part takes it
        fd, status = directory.open_known(name, OPEN_FILE | os.O_WRONLY | os.O_APPEND, make=True)
        try:
            if not status.st_size:
                _remove_old(directory, now)
            return status.st_size < LARGEST and os.write(fd, data) == len(data)
        finally:
            os.close(fd)
    return False


def _remove_old(directory: Directory, now: float) -> None:
    """Remove the files of this user from months that are not kept, and those that a kill has left unfinished.

    Names prove nothing and anybody can make some, so months are counted by the calendar. Root and the owner of the
    directory could remove files of others too. A directory that is not one of ours may be somebody's own.
    """
    status = os.fstat(directory.fd)
    if stat.S_IMODE(status.st_mode) != DIR_MODE or status.st_uid not in (0, os.geteuid()):
        return
    oldest = months_kept(now)[0]
    for name in directory.names(_MOST_NAMES):
        if name < oldest and re.fullmatch(_OLD, name):
            with suppress(OSError):
                if os.stat(name, dir_fd=directory.fd, follow_symlinks=False).st_uid == os.geteuid():
                    os.unlink(name, dir_fd=directory.fd)


def claim_line(facts: Mapping[str, Any], *, uid: int) -> bytes:
    """Return the line of a claim; b"" of one that has none: a claim inside another one, or on a shared display, and
    what says no time or no GPUs.

    Args:
        facts: what its entry says, by the keys of :class:`~safe_gpu.coordination.entry.Entry`; ``waited``; ``labels``,
            the indices of its GPUs; and ``of``, the bytes of each GPU that could be shared.
    """
    gpus = facts.get("gpus")
    if facts.get("inside") or facts.get("display") or facts.get("nb_gpus"):
        return b""
    if not (gpus and facts.get("pid") and facts.get("since")):
        return b""
    user = ""
    if uid >= 0:
        user = user_name(uid)
    # The entry may have the whole command, by the wish of its user, and is soon gone; this line stays.
    command = program_names((facts.get("command") or "").split())
    fields: dict[str, Any] = {
        "v": 1,
        "claim": [facts["pid"], round(facts["since"], 3)],
        "uid": uid,
        "user": user,
        "host": well_formed(facts.get("host") or "") or None,
        "job": well_formed(facts.get("job") or "") or None,
        "command": printable(well_formed(command)) or None,
        "gpus": list(gpus),
        "labels": facts.get("labels", ()),
        "until": facts.get("until"),
    }
    if facts.get("waited") is not None:
        fields["waited"] = facts["waited"]
    share, *_ = gpus.values()  # of each the same
    if share is not None:
        fields["share"] = share
        fields["of"] = facts.get("of")
    return json.dumps(fields).encode() + b"\n"


def end_line(pid: int, since: float, seen: float, ended: float) -> bytes:
    """Return the line with the end of a claim, which was at ``ended`` if that is ``seen`` too, else between them.

    >>> end_line(4470, 1795184513.204, 1795191713.2, 1795191713.2)
    b'{"v": 1, "claim": [4470, 1795184513.204], "ended": 1795191713.200}\\n'
    """
    when = f"[{seen:.3f}, {ended:.3f}]"
    if seen == ended:
        when = f"{ended:.3f}"
    return f'{{"v": 1, "claim": [{pid}, {since:.3f}], "ended": {when}}}\n'.encode()


def line_of_entry(entry: Entry) -> bytes:
    """Return the line of a claim as its entry tells it, as :func:`claim_line`."""
    return claim_line({**entry.more, **entry._asdict()}, uid=entry.uid)


def is_in_history(entry: Entry) -> bool:
    """Return whether a claim has a line: it is neither inside another one nor on a shared display."""
    return bool(entry.pid and entry.since and entry.gpus) and not (entry.inside or entry.display)


def lines_of_dead(entries: Iterable[Entry], now: float) -> list[bytes]:
    """Return two lines of each claim that died: its own, and one with its end.

    Args:
        now: when it was found dead, in Unix seconds.
    """
    lines = []
    for entry in entries:
        line = line_of_entry(entry)
        since = entry.since
        if line and since and since <= now:
            seen, ended = _end_of_dead(entry, since, now)
            lines += [line, end_line(entry.pid, since, seen, ended)]
    return lines


def _end_of_dead(entry: Entry, since: float, now: float) -> tuple[float, float]:
    """Return when it was last seen, and when it was found dead."""
    seen = max(since, _last_seen(entry.gpus))
    if entry.start and entry.pidns == pid_namespace():
        # It has lived no longer than since its process started, by the boot clock: the other may have jumped.
        most = since + time.clock_gettime(time.CLOCK_BOOTTIME) - entry.start / os.sysconf("SC_CLK_TCK")
        if seen <= most:  # else it is from before a reboot
            now = min(now, most)
    now = round(now, 3)
    return max(round(since, 3), round(min(seen, now - 1e-3), 3)), now  # not the same: that would be known exactly


def mark_seen(directory: Directory, uuid: str, *, make: bool = True) -> None:
    """Note that a GPU is held now. Errors are ignored.

    A claim that dies is then known to have lived until now.

    Args:
        make: whether to make the mark where it is missing, of a name that the driver has told.
    """
    with suppress(OSError):
        fd = directory.open_known(_seen(uuid), OPEN_FILE | os.O_WRONLY, make=make)[0]
        try:
            os.utime(fd)
        finally:
            os.close(fd)


def _last_seen(uuids: Iterable[str]) -> float:
    """Return when one of these GPUs was last seen held; 0 if nobody has noted it."""
    seen = 0.0
    with suppress(OSError), HistoryDir() as directory:
        for uuid in uuids:
            with suppress(OSError, ValueError):  # of an entry: its user may have written a NUL
                seen = max(seen, os.stat(_seen(uuid), dir_fd=directory.fd, follow_symlinks=False).st_mtime)
    return seen


def _seen(uuid: str) -> str:
    return f"{uuid.replace('/', '_')}.seen"
