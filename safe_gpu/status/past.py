"""The claims of a host as its history tells them, together with those that hold GPUs now.

Anybody may have written any line of the history, so all of it is bounded, and nothing else depends on it.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..coordination.decoding import listed, moment, seconds, text, whole
from ..coordination.endings import Ending
from ..coordination.files import StateDir, state_dir_path
from ..coordination.history import LARGEST, HistoryDir, file_names, month_of
from ..coordination.host_lock import HostLock
from ..coordination.leases import Former, LeaseRecord, probe
from ..errors import LockTimeout, StateDirError
from .probe import is_untouched, mark_seen

__all__ = ["PastClaim", "claims_between", "merged"]

_PATIENCE = 5.0  # seconds that host.lock is waited for
_MOST_LEASES = 4096
_MOST_FILES = 400
_LONGEST_LINE = 1 << 16
_MONTH = 31 * 86400.0


@dataclass(frozen=True)
class PastClaim:
    """One claim. Times are Unix seconds.

    Attributes:
        pid, since: the process that claimed, and when.
        uid, user, host, job, command: as in its record; uid is -1 and texts are "" or None if they are not known.
        gpus: UUIDs. labels: their indices at that time, in the same order; () if they are not known.
        until: when it was to end by its own word, or None.
        running: whether it holds its GPUs now.
        seen: when it was last known to hold them.
        ended: when it was known to hold them no more; None if it runs, or nobody looked. Equal to ``seen`` if it was
            released, which tells the time exactly; a claim that died ended between the two.
    """

    pid: int
    since: float
    uid: int = -1
    user: str = ""
    host: str = ""
    job: str | None = None
    command: str | None = None
    gpus: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    until: float | None = None
    running: bool = False
    seen: float = 0.0
    ended: float | None = None

    @property
    def key(self) -> tuple[int, int]:
        """What identifies it on its host: the process, and the millisecond."""
        return self.pid, round(self.since * 1000)

    def overlaps(self, since: float, until: float) -> bool:
        """Whether it may have held GPUs in this time."""
        return self.since < until and (self.ended is None or self.ended >= since)


def claims_between(since: float, until: float) -> tuple[list[PastClaim], list[str]]:
    """The claims that held GPUs in this time, in the order in which they began, and warnings.

    Claims that began more than a month before ``since`` are known only if they are held now.
    """
    warnings: list[str] = []
    now = _now(warnings)
    found = merged([*_lines(since - _MONTH, warnings), *now])
    return [claim for claim in found if claim.overlaps(since, until)], warnings


def merged(told: Iterable[PastClaim | Ending]) -> list[PastClaim]:
    """Claims with their ends, in the order in which they began. Ends of claims that nobody told of are dropped."""
    claims: dict[tuple[int, int], PastClaim] = {}
    ends: dict[tuple[int, int], Ending] = {}
    for one in told:
        if isinstance(one, Ending):
            key = one.pid, round(one.since * 1000)
            ends[key] = _narrower(ends[key], one) if key in ends else one
            continue
        known = claims.get(one.key)
        if known is None:
            claims[one.key] = one
        else:
            claims[one.key] = replace(
                known,
                labels=known.labels or one.labels,
                running=known.running or one.running,
                seen=max(known.seen, one.seen),
            )
    in_order = sorted(claims.values(), key=lambda claim: claim.since)
    found = []
    next_claim: dict[str, float] = {}
    for claim in reversed(in_order):
        end = ends.get(claim.key)
        ended = _next_claim_of(claim, next_claim) if end is None else end.ended
        seen = claim.since if end is None else end.seen
        next_claim.update(dict.fromkeys(claim.gpus, claim.since))
        if claim.running:
            found.append(claim)
        else:
            found.append(replace(claim, seen=max(seen, claim.since), ended=ended))
    return found[::-1]


def _next_claim_of(claim: PastClaim, next_claim: dict[str, float]) -> float | None:
    """When one of its GPUs was claimed anew: an end of which nothing else is known was before that."""
    return min((next_claim[uuid] for uuid in claim.gpus if uuid in next_claim), default=None)


def _narrower(one: Ending, other: Ending) -> Ending:
    """Both tell of the same end, as seen on different GPUs."""
    exact = next((end for end in (one, other) if end.seen == end.ended), None)
    if exact is not None:
        return exact
    seen, ended = max(one.seen, other.seen), min(one.ended, other.ended)
    return one._replace(seen=seen, ended=ended) if seen <= ended else one


# The files


def _lines(since: float, warnings: list[str]) -> Iterator[PastClaim | Ending]:
    path = state_dir_path()
    if is_untouched(path):
        return
    try:
        with StateDir(path) as root, HistoryDir(root) as directory:
            for name in _files(directory, month_of(max(0.0, since))):
                yield from _file(directory, name, warnings)
    except FileNotFoundError:
        pass
    except (OSError, StateDirError) as err:
        warnings.append(f"the history cannot be read: {err}")


def _files(directory: StateDir, first: str) -> list[str]:
    months = {name[:7] for name in directory.names() if re.fullmatch(r"[0-9]{4}-[01][0-9](\.[0-9])?\.jsonl", name)}
    there = set(directory.names())
    wanted = [name for month in sorted(months) if month >= first for name in file_names(month) if name in there]
    return wanted[-_MOST_FILES:]


def _file(directory: StateDir, name: str, warnings: list[str]) -> Iterator[PastClaim | Ending]:
    try:
        fd = directory.open(name)
    except StateDirError as err:
        warnings.append(f"a part of the history cannot be read: {err}")
        return
    if fd is None:
        return
    with os.fdopen(fd, "rb") as file:
        left = LARGEST + _LONGEST_LINE
        while left > 0 and (line := file.readline(min(left, _LONGEST_LINE))):
            left -= len(line)
            yield from _line(line)


def _line(line: bytes) -> Iterator[PastClaim | Ending]:
    """What a line tells. A line that is incomplete, since there was no room, has the next one behind it."""
    start = line.rfind(b'{"v":')
    try:
        raw: Any = json.loads(line[max(start, 0) :].decode("utf-8", "replace"))
        ending = Ending.of(raw)
        if ending is not None:
            yield ending
        elif isinstance(raw, dict):
            yield _claim(raw)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return


def _claim(raw: dict[str, Any]) -> PastClaim:
    pid, since = raw["claim"]
    since = moment(since)
    gpus = tuple(text(uuid, 100) for uuid in listed(raw.get("gpus")))
    labels = tuple(text(label, 16) for label in listed(raw.get("labels")))
    if not since or not gpus:
        raise ValueError("no claim")
    return PastClaim(
        pid=whole(pid, 1, (1 << 31) - 1),
        since=since,
        uid=whole(raw.get("uid", -1), -1, 1 << 32),
        user=text(raw.get("user", ""), 64),
        host=text(raw.get("host", ""), 64),
        job=None if raw.get("job") is None else text(raw["job"], 100),
        command=None if raw.get("command") is None else text(raw["command"]),
        gpus=gpus,
        labels=labels if len(labels) == len(gpus) else (),
        until=seconds(raw.get("until"), 0),
        seen=since,
    )


# What is held now


def _now(warnings: list[str]) -> list[PastClaim | Ending]:
    """What lease files tell: claims that hold GPUs, and ends that no later claim has written into the history yet."""
    path = state_dir_path()
    if is_untouched(path):
        return []
    files: dict[str, tuple[bool, Former]] = {}
    try:
        with HostLock(time.monotonic() + _PATIENCE, path) as host:
            names = [
                name for name in host.leases.names() if name.endswith(".lock") and not name.endswith(".inner.lock")
            ]
            for name in names[:_MOST_LEASES]:
                try:
                    files[name] = probe(host, name), _read(host.leases, name)
                except StateDirError:
                    continue
    except (LockTimeout, StateDirError) as err:
        warnings.append(f"which claims hold GPUs now is not known: {err}")
        return []
    now = time.time()
    mark_seen(path, [name for name, (held, _) in files.items() if held])
    found: list[PastClaim | Ending] = []
    for held, former in files.values():
        record = former.record()
        if record is not None and record.since and record.gpus:
            found.append(_of_record(record, now if held else record.since, running=held))
        ending = None if held else Ending.decode(former.ending())
        if ending is not None:
            found.append(ending)
    return found


def _read(leases: StateDir, name: str) -> Former:
    fd = leases.open(name)
    if fd is None:
        return Former()
    try:
        return Former.of(fd)
    finally:
        os.close(fd)


def _of_record(record: LeaseRecord, seen: float, *, running: bool) -> PastClaim:
    names = ("pid", "since", "uid", "user", "host", "job", "command", "gpus", "until")
    return PastClaim(**{name: getattr(record, name) for name in names}, seen=seen, running=running)
