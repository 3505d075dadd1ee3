"""The claims of a host as its history tells them, together with those that hold GPUs now.

Any user may have written any line of the history, so all of it is bounded, and nothing else depends on it.

A claim that died ended between two moments, so each sum has a lower and an upper bound.
"""

import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, timedelta
from io import BytesIO
from itertools import chain, islice
from typing import Any, NamedTuple

from ..coordination.directory import Directory, state_dir_path
from ..coordination.entries import Entries
from ..coordination.entry import Entry
from ..coordination.history import LARGEST, HistoryDir, file_names, line_of_entry, lines_of_dead, month_of, months_kept
from ..host import procfs
from ..host.foreign_files import as_int, as_list, as_seconds, as_text, as_time
from ..wording.text import Column, gpu_ranges
from .table import table

_MOST = 50_000  # claims that are kept

_MOST_OF_ONE = 8  # GPUs of each of them, on average

_MOST_LATER = 4096  # GPUs of claims that began after the time that is asked for

_MOST_LINES = LARGEST // 64  # of a file; none of ours is shorter

_LONGEST_LINE = 1 << 16

_TOO_MANY = "there are more claims than can be kept, and the first are left out: ask for a shorter time"

_MONTH = 31 * 86400.0

_TEXTS = {"user": 64, "host": 64, "job": 100, "command": 200}  # characters that are kept

_LABEL = re.compile("([0-9]+:)?[0-9]+")

_TICK = 1.0  # seconds, in which the two clocks are read and rounded


class PastClaim(NamedTuple):
    """One claim. Times are Unix seconds.

    Attributes:
        pid: the process that claimed.
        since: when it did.
        uid: as in its line, like ``user``, ``host``, ``job`` and ``command``; -1 if not known, as "" or None there.
        gpus: UUIDs.
        labels: their indices at that time, in the same order; () if they are not known.
        until: when its holder expected it to end, or None.
        running: whether it holds its GPUs now.
        seen: when it was last known to hold them.
        ended: when it was first known not to hold them; None if it runs, or nobody looked. Equal to ``seen`` if it was
            released, which tells the time exactly; a claim that died ended between the two.
        share: bytes that it held of each GPU; None of whole GPUs.
        of: bytes of each GPU that could be shared; None of whole GPUs.
        waited: seconds that it waited for its GPUs; None if not known.
        not_before: of a claim that runs, the start of its process by the boot clock: ``since`` is by a clock that may
            have jumped since.
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
    share: int | None = None
    of: int | None = None
    waited: float | None = None
    not_before: float = 0.0

    @property
    def part(self) -> float:
        """How much of each GPU it held, from 0 to 1."""
        return min(1.0, self.share / self.of) if self.share and self.of else 1.0

    @property
    def knows_its_end(self) -> bool:
        """Whether it was released, or runs; else it died."""
        return self.running or self.seen == self.ended

    @property
    def key(self) -> tuple[int, int]:
        """What identifies it on its host: the process, and the millisecond."""
        return self.pid, round(self.since * 1000)

    def held(self, since: float, until: float) -> tuple[float, float, float]:
        """Return from when it held its GPUs in this time, until when at least, and until when at most.

        ``until`` is at most now: a claim that runs holds them up to then.
        """
        begin = max(self.since, self.not_before, since)
        last = until if self.running or self.ended is None else min(self.ended, until)
        return begin, max(begin, until if self.running else min(self.seen, until)), max(begin, last)

    def overlaps(self, since: float, until: float) -> bool:
        """Return whether it may have held GPUs in this time."""
        return self.since < until and (self.ended is None or self.ended >= since)


class ClaimEnd(NamedTuple):
    """The end of the claim that process ``pid`` made at ``since``. Times are Unix seconds.

    It ended between ``seen``, when it was last known to be alive, and ``ended``, equal if that is known exactly.
    """

    pid: int
    since: float
    seen: float
    ended: float


def claims_between(since: float, until: float) -> tuple[list[PastClaim], list[str]]:
    """Return the claims that held GPUs in this time, in the order in which they began, and warnings.

    Claims that began more than a month before ``since`` are known only if they are held now.
    """
    warnings: list[str] = []
    running, dead = _claims_now(warnings)
    told = chain(map(_line, dead), map(_line, _lines(since, warnings)), running)
    found = [claim for claim in merged(filter(None, told), until, warnings) if claim.overlaps(since, until)]
    return found, [*dict.fromkeys(warnings)]


def merged(
    told: Iterable[PastClaim | ClaimEnd], until: float = math.inf, warnings: list[str] | None = None
) -> list[PastClaim]:
    """Return claims with their ends, in the order in which they began. Ends of unknown claims are dropped.

    Args:
        told: ends, and claims without them.
        until: claims that began then or later are left out; they only tell when others had ended.
        warnings: gets a sentence if there were more claims than are kept.
    """
    kept = _Kept(until)
    for one in told:
        kept.end(one) if isinstance(one, ClaimEnd) else kept.add(one)
    if kept.dropped and warnings is not None:
        warnings.append(_TOO_MANY)
    found = []
    for claim in sorted(kept.claims.values(), key=lambda claim: claim.since)[::-1]:
        end = kept.ends.get(claim.key)
        if end is not None and not claim.running:
            claim = claim._replace(seen=max(end.seen, claim.since), ended=end.ended)
        if not claim.knows_its_end:  # it ended before one of its GPUs was claimed anew
            later = kept.next_claim if claim.share is None else kept.next_whole
            anew = min((later[uuid] for uuid in claim.gpus if uuid in later), default=None)
            if anew is not None and (claim.ended is None or anew < claim.ended):
                seen = claim.seen if claim.seen <= anew else claim.since  # the GPUs were seen held by another one
                claim = claim._replace(seen=seen, ended=anew)
        found.append(claim)
        for later in (kept.next_claim, *([kept.next_whole] if claim.share is None else [])):
            later.update(dict.fromkeys(claim.gpus, claim.since))
    return found[::-1]


class _Kept:
    """Claims in bounded memory, whatever the files say: if there are too many, those read first are dropped.

    Attributes:
        claims: without their ends.
        ends: of them, the narrowest of each.
        next_claim: UUID -> when it was first claimed after ``until``.
        next_whole: UUID -> when it was next claimed without others, of the claims that are kept.
        dropped: whether any claim was dropped.
    """

    def __init__(self, until: float) -> None:
        self.claims: dict[tuple[int, int], PastClaim] = {}
        self.ends: dict[tuple[int, int], ClaimEnd] = {}
        self.next_claim: dict[str, float] = {}
        self.next_whole: dict[str, float] = {}
        self.dropped = False
        self._until = until
        self._gpus = 0  # of these claims

    def add(self, claim: PastClaim) -> None:
        """Add a claim; what is already known of it stays."""
        if claim.since >= self._until:
            for uuid in claim.gpus[: _MOST_LATER - len(self.next_claim)]:
                self.next_claim[uuid] = min(claim.since, self.next_claim.get(uuid, claim.since))
            return
        if claim.running:  # its owner says whose it is, and anybody may have written its line
            self._remove(claim.key)  # it is to be dropped last
        if claim.key not in self.claims:
            self.claims[claim.key] = claim
            self._gpus += len(claim.gpus)
        if len(self.claims) > _MOST or self._gpus > _MOST_OF_ONE * _MOST:
            self.dropped = True
            for key in [*self.claims][: len(self.claims) // 2]:
                self._remove(key)

    def end(self, end: ClaimEnd) -> None:
        """Add the end of a claim that has been added. Of several the narrowest counts."""
        key = end.pid, round(end.since * 1000)
        if key in self.claims:
            self.ends[key] = min(self.ends.get(key, end), end, key=lambda one: one.ended - one.seen)

    def _remove(self, key: tuple[int, int]) -> None:
        if claim := self.claims.pop(key, None):
            self._gpus -= len(claim.gpus)
            self.ends.pop(key, None)


def _lines(since: float, warnings: list[str]) -> Iterator[bytes]:
    """Read what may matter from this time on."""
    first = month_of(max(0.0, since - _MONTH))
    for name in chain.from_iterable(file_names(month) for month in months_kept(time.time()) if month >= first):
        try:
            with HistoryDir() as directory, open(directory.open_known(name)[0], "rb", buffering=0) as file:
                lines = BytesIO(file.read(LARGEST + _LONGEST_LINE))
        except FileNotFoundError:
            continue
        except OSError as err:
            warnings.append(f"a part of the history cannot be read: {err}")
            continue
        yield from islice(lines, _MOST_LINES)


def _line(line: bytes) -> PastClaim | ClaimEnd | None:
    """Read a line. A line that is incomplete, since there was no room, is followed by the next one."""
    line = line[-_LONGEST_LINE:]
    try:
        raw: Any = json.loads(line[max(line.rfind(b'{"v":'), 0) :].decode("utf-8", "replace"))
        pid, since = raw["claim"]
        pid, since = as_int(pid, 1, (1 << 31) - 1), as_time(since)
        if "ended" not in raw:
            return _claim(pid, since, raw)
        when = raw["ended"]
        seen, ended = map(as_time, when if isinstance(when, list) else (when, when))
        return ClaimEnd(pid, since, seen, ended) if 0 < since <= seen <= ended else None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _claim(pid: int, since: float, raw: Mapping[str, Any]) -> PastClaim | None:
    gpus = tuple(as_text(uuid, 100) for uuid in as_list(raw.get("gpus")))
    labels = tuple(as_text(label, 16) for label in as_list(raw.get("labels")))
    if not since or not gpus:
        return None
    if len(labels) != len(gpus) or not all(map(_LABEL.fullmatch, labels)):
        labels = ()
    told: dict[str, Any] = {name: as_text(raw[name], _TEXTS[name]) for name in _TEXTS if raw.get(name) is not None}
    told |= {name: as_int(raw[name], 1, 1 << 62) for name in ("share", "of") if raw.get(name) is not None}
    told |= {name: as_seconds(raw.get(name), 0) for name in ("until", "waited")}
    uid = as_int(raw.get("uid", -1), -1, 1 << 32)
    return PastClaim(pid, since, uid, gpus=gpus, labels=labels, seen=since, **told)


def _claims_now(warnings: list[str]) -> tuple[list[PastClaim], list[bytes]]:
    """Return the claims that hold GPUs now, and lines of those that died and were not removed yet."""
    running: list[PastClaim] = []
    dead: list[bytes] = []
    try:
        with Directory(state_dir_path(), "claims", make=False) as directory:
            entries = Entries(directory)
            for entry in entries.look():
                claim = _line(line_of_entry(entry))
                running += [_running(entry, claim)] if isinstance(claim, PastClaim) else []
            size, now = 0, time.time()
            for lines in (lines_of_dead([entry], now) for entry in entries.dead()):
                size += sum(map(len, lines))
                if size > LARGEST:  # as of a file of the history
                    warnings.append(_TOO_MANY)
                    break
                dead += lines
    except FileNotFoundError:
        pass
    except OSError as err:
        warnings.append(f"which claims hold GPUs now is not known: {err}")
    return running, dead


def _running(entry: Entry, told: PastClaim) -> PastClaim:
    now, began = time.time(), 0.0
    is_here = entry.pidns == procfs.pid_namespace()
    if is_here and procfs.is_start(entry.start, entry.pid, procfs.start_time(entry.pid)):
        age = procfs.seconds_running(entry.pid)
        began = 0.0 if age is None else now - age - _TICK
    return told._replace(running=True, seen=now, not_before=began)


class GpuHours(NamedTuple):
    """What claims with the same ``key`` used: their number, and GPU-hours between ``least`` and ``most``.

    ``waits`` are seconds, of the claims that began in this time and say how long they waited.
    """

    key: str
    claims: int
    least: float
    most: float
    waits: list[float]


def hours_held(claim: PastClaim, since: float, until: float) -> tuple[float, float]:
    """Return for how many seconds a claim held each of its GPUs in this time, at least and at most.

    A share counts as its part of them. ``until`` is at most now.
    """
    begin, sure, last = claim.held(since, until)
    return claim.part * (sure - begin), claim.part * (last - begin)


def gpu_hours_by(claims: Iterable[PastClaim], by: str, since: float, until: float) -> list[GpuHours]:
    """Return the sums by user, gpu, job or host, the largest first; by day and week in their order."""
    claims = list(claims)
    labels = {uuid: label for claim in claims for uuid, label in zip(claim.gpus, claim.labels, strict=False)}
    sums: dict[str, GpuHours] = {}
    for claim in claims:
        for key, number, begin, end in _parts(claim, by, since, until, labels):
            least, most = (seconds * number / 3600 for seconds in hours_held(claim, begin, end))
            _, claims_before, least_before, most_before, waits = sums.get(key, GpuHours(key, 0, 0.0, 0.0, []))
            if claim.waited is not None and claim.since >= begin:
                waits.append(claim.waited)
            sums[key] = GpuHours(key, claims_before + 1, least_before + least, most_before + most, waits)
    return sorted(sums.values(), key=lambda use: (0 if by in _CALENDAR else -use.most, use.key))


def _parts(
    claim: PastClaim, by: str, since: float, until: float, labels: Mapping[str, str]
) -> Iterable[tuple[str, int, float, float]]:
    """Return the keys that a claim counts for, each with a number of GPUs and a time."""
    number = len(claim.gpus)
    if by == "gpu":
        return [(f"{labels[uuid]} {uuid}" if uuid in labels else uuid, 1, since, until) for uuid in claim.gpus]
    if by in _CALENDAR:
        last = until if claim.running else min(claim.ended or until, until)
        return [(key, number, begin, end) for key, begin, end in calendar(by, max(claim.since, since), last)]
    keys = {"user": claim.user or "?", "job": claim.job or "(no job)", "host": claim.host or "?"}
    return [(keys[by], number, since, until)]


_CALENDAR = {"day": 1, "week": 7}


def calendar(by: str, begin: float, end: float) -> Iterator[tuple[str, float, float]]:
    """Return the days, or the weeks from Monday on, of local time in a span: first day, beginning and end. A moment is
    a span too."""
    while begin <= end:
        day = date.fromtimestamp(begin)
        first = day - timedelta(day.weekday() if by == "week" else 0)
        after = time.mktime((first + timedelta(_CALENDAR[by])).timetuple())
        if after <= begin:
            return
        yield first.isoformat(), begin, min(after, end)
        if after >= end:
            return
        begin = after


def table_of_claims(claims: Sequence[PastClaim], since: float, until: float, width: int) -> list[str]:
    """Return a title and a line for each claim; no line is wider than ``width`` columns."""
    wide = width >= 100
    jobs = [claim.job or "" for claim in claims]
    facts = [
        Column("USER", [claim.user or "?" for claim in claims], most=24 if wide else 8),
        Column("GPU", [_gpus(claim) for claim in claims], most=24 if wide else 8),
        Column("JOB", [job if wide else job.rpartition(":")[2] for job in jobs], most=30 if wide else 12),
        Column("FROM", [time.strftime("%Y-%m-%d %H:%M", time.localtime(claim.since)) for claim in claims]),
        Column("TO", [_end(claim) for claim in claims]),
        Column("GPU-HOURS", [_use(claim, since, until) for claim in claims], right=True),
        Column("COMMAND", [claim.command or "?" for claim in claims], most=200),
    ]
    return table(facts, width)


def table_of_use(found: Sequence[GpuHours], by: str, width: int) -> list[str]:
    """Return a title, a line for each key, and the sum."""
    rows = [*found]
    if len(found) > 1:
        claims = sum(one.claims for one in found) if by == "user" else 0
        rows.append(GpuHours("total", claims, sum(one.least for one in found), sum(one.most for one in found), []))
    facts = [
        Column(by.upper(), [one.key for one in rows], most=64),
        Column("CLAIMS", [str(one.claims or "") for one in rows], right=True),
        Column("GPU-HOURS", [hours(one.least, one.most) for one in rows], right=True),
    ]
    return table(facts, width)


def hours(least: float, most: float) -> str:
    """Return GPU-hours; both bounds where they differ.

    >>> hours(1.256, 1.256), hours(0.0, 2.5)
    ('1.26', '0.00-2.50')
    """
    low, high = f"{least:.2f}", f"{most:.2f}"
    return low if low == high else f"{low}-{high}"


def _gpus(claim: PastClaim) -> str:
    if not claim.labels:
        return f"{len(claim.gpus)} GPUs" if len(claim.gpus) > 1 else claim.gpus[0][:12]
    return gpu_ranges(claim.labels)


def _end(claim: PastClaim) -> str:
    """Return ``12:30``, ``by 12:30`` where only that is known, ``now``, or "?"."""
    if claim.running:
        return "now"
    if claim.ended is None:
        return "?"
    same_day = time.localtime(claim.since)[:3] == time.localtime(claim.ended)[:3]
    end = time.strftime("%H:%M" if same_day else "%m-%d %H:%M", time.localtime(claim.ended))
    return end if claim.ended - claim.seen < 60 else f"by {end}"


def _use(claim: PastClaim, since: float, until: float) -> str:
    least, most = (seconds * len(claim.gpus) / 3600 for seconds in hours_held(claim, since, until))
    return hours(least, most)
