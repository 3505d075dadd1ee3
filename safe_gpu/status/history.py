"""The claims of a host as its history tells them, together with those that hold GPUs now.

Any user may have written any line of the history, so all of it is bounded, and nothing else depends on it.

A claim that died ended between two moments, so each sum has a lower and an upper bound.
"""

import json
import math
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import date, timedelta
from io import BytesIO
from itertools import chain, islice
from typing import Any, NamedTuple

from ..coordination.directory import Directory, state_dir_path
from ..coordination.entries import Entries
from ..coordination.entry import Entry
from ..coordination.history import LARGEST, HistoryDir, file_names, line_of_entry, lines_of_dead, month_of, months_kept
from ..coordination.looks import ClaimKey, ClaimLooks, Looks, Use, claim_key
from ..host import procfs
from ..host.foreign_files import as_int, as_list, as_seconds, as_text, as_time, printable
from ..wording.text import Column, gpu_ranges
from .table import table
from .usage import UseFacts, lines_after_table, sentence_on_looks

MOST = 50_000
"""Claims that are kept."""

_MOST_OF_ONE = 8  # GPUs of each of them, on average

MOST_LATER = 4096  # GPUs of claims that began after the time that is asked for

MOST_LOOKED_AT = 2 * MOST  # GPUs of claims of which looks are kept

_MOST_LINES = LARGEST // 64  # of a file; none of ours is shorter

_LONGEST_LINE = 1 << 16

_TOO_MANY = "there are more claims than can be kept, and the first are left out: ask for a shorter time"

_MONTH = 31 * 86400.0

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
        looks: what looks have seen of it; None if nobody has looked.
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
    looks: ClaimLooks | None = None

    @property
    def part(self) -> float:
        """How much of each GPU it held, from 0 to 1."""
        if not self.share or not self.of:
            return 1.0
        return min(1.0, self.share / self.of)

    @property
    def knows_its_end(self) -> bool:
        """Whether it was released, or runs; else it died."""
        return self.running or self.seen == self.ended

    @property
    def key(self) -> ClaimKey:
        """What identifies it on its host."""
        return claim_key(self.pid, self.since)

    def held(self, since: float, until: float) -> tuple[float, float, float]:
        """Return from when it held its GPUs in this time, until when at least, and until when at most.

        ``until`` is at most now: a claim that runs holds them up to then.
        """
        begin = max(self.since, self.not_before, since)
        if self.running:
            end = max(begin, until)
            return begin, end, end
        last = until
        if self.ended is not None:
            last = min(self.ended, until)
        return begin, max(begin, min(self.seen, until)), max(begin, last)

    def uses(self, since: float, until: float) -> list[Use]:
        """Return what looks have seen of each of its GPUs in this time; a share counts as its part of them.

        Looks at a claim are told as one sum, which is spread evenly over its time up to the latest look.
        """
        looks = self.looks
        if looks is None or looks.span <= 0 or len(looks.uses) != len(self.gpus):
            return [Use()] * len(self.gpus)
        begin, _, last = self.held(since, until)
        seconds = max(0.0, min(last, self.since + looks.span) - begin)
        factor = self.part * min(1.0, seconds / looks.span)
        return [use.times(factor) for use in looks.uses]

    def use(self, since: float, until: float) -> Use:
        """Return the same of all its GPUs together."""
        return total_use(self.uses(since, until))

    def overlaps(self, since: float, until: float) -> bool:
        """Return whether it may have held GPUs in this time."""
        return self.since < until and (self.ended is None or self.ended >= since)


def total_use(uses: Iterable[Use]) -> Use:
    """Return the sum."""
    total = Use()
    for use in uses:
        total = total.plus(use)
    return total


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
    told = chain(_told(dead), _told(_lines(since, warnings)), _looks_now(warnings), running)
    found = [claim for claim in merged(told, until, warnings) if claim.overlaps(since, until)]
    return found, list(dict.fromkeys(warnings))


def merged(
    told: Iterable[PastClaim | ClaimEnd | ClaimLooks], until: float = math.inf, warnings: list[str] | None = None
) -> list[PastClaim]:
    """Return claims with their ends and looks, in the order in which they began. Those of unknown claims are dropped.

    Args:
        told: ends, looks, and claims without them.
        until: claims that began then or later are left out; they only tell when others had ended.
        warnings: gets a sentence if there were more claims than are kept.
    """
    kept = _Kept(until)
    for one in told:
        if isinstance(one, ClaimEnd):
            kept.end(one)
        elif isinstance(one, ClaimLooks):
            kept.add_looks(one)
        else:
            kept.add(one)
    if kept.dropped and warnings is not None:
        warnings.append(_TOO_MANY)
    found = []
    by_begin = sorted(kept.claims.values(), key=lambda claim: claim.since)
    for claim in reversed(by_begin):
        found.append(kept.with_end(claim)._replace(looks=kept.looks.get(claim.key)))
        kept.note_begin(claim)
    found.reverse()
    return found


class _Kept:
    """Claims in bounded memory, whatever the files say: if there are too many, those read first are dropped.

    Attributes:
        claims: without their ends.
        ends: of them, the narrowest of each.
        looks: at them and at others, the last ones of each.
        next_claim: UUID -> when it was next claimed: after ``until``, or by the last claim of :meth:`note_begin`.
        next_whole: UUID -> when it was next claimed without others, by the last of these.
        dropped: whether any claim was dropped.
    """

    def __init__(self, until: float) -> None:
        self.claims: dict[ClaimKey, PastClaim] = {}
        self.ends: dict[ClaimKey, ClaimEnd] = {}
        self.looks: dict[ClaimKey, ClaimLooks] = {}
        self.next_claim: dict[str, float] = {}
        self.next_whole: dict[str, float] = {}
        self.dropped = False
        self._until = until
        self._gpus = 0  # of these claims
        self._gpus_looked_at = 0

    def add(self, claim: PastClaim) -> None:
        """Add a claim; what is already known of it stays."""
        if claim.since >= self._until:
            for uuid in claim.gpus[: MOST_LATER - len(self.next_claim)]:
                self.next_claim[uuid] = min(claim.since, self.next_claim.get(uuid, claim.since))
            return
        if claim.running:  # its owner says whose it is, and anybody may have written its line
            self._remove(claim.key)  # it is to be dropped last
        if claim.key not in self.claims:
            self.claims[claim.key] = claim
            self._gpus += len(claim.gpus)
        if len(self.claims) > MOST or self._gpus > _MOST_OF_ONE * MOST:
            self.dropped = True
            for key in list(islice(self.claims, len(self.claims) // 2)):
                self._remove(key)

    def end(self, end: ClaimEnd) -> None:
        """Add the end of a claim that has been added. Of several the narrowest counts."""
        key = claim_key(end.pid, end.since)
        if key not in self.claims:
            return
        known = self.ends.get(key)
        if known is None or end.ended - end.seen < known.ended - known.seen:
            self.ends[key] = end

    def add_looks(self, looks: ClaimLooks) -> None:
        """Add looks at a claim, which are told before the claim is. Of several lines the last one counts."""
        if looks.since >= self._until:
            return
        self._remove_looks(looks.key)  # these are to be dropped last
        self.looks[looks.key] = looks
        self._gpus_looked_at += len(looks.uses)
        if len(self.looks) > MOST or self._gpus_looked_at > MOST_LOOKED_AT:
            for key in list(islice(self.looks, (len(self.looks) + 1) // 2)):
                self._remove_looks(key)

    def _remove_looks(self, key: ClaimKey) -> None:
        looks = self.looks.pop(key, None)
        if looks is not None:
            self._gpus_looked_at -= len(looks.uses)

    def with_end(self, claim: PastClaim) -> PastClaim:
        """Return a claim with its end, as far as that is known; all that began after it have been noted."""
        end = self.ends.get(claim.key)
        if end is not None and not claim.running:
            claim = claim._replace(seen=max(end.seen, claim.since), ended=end.ended)
        if claim.knows_its_end:
            return claim
        next_claim = self._next_claim_of(claim)
        if next_claim is None or (claim.ended is not None and claim.ended <= next_claim):
            return claim
        seen = claim.seen
        if seen > next_claim:  # the GPUs were seen held by another one
            seen = claim.since
        return claim._replace(seen=seen, ended=next_claim)

    def _next_claim_of(self, claim: PastClaim) -> float | None:
        """Return when one of its GPUs was claimed again, by a claim that this one was in the way of."""
        later = self.next_claim
        if claim.share is not None:
            later = self.next_whole
        return min((later[uuid] for uuid in claim.gpus if uuid in later), default=None)

    def note_begin(self, claim: PastClaim) -> None:
        """Note when a claim took its GPUs, for those that began before it."""
        for uuid in claim.gpus:
            self.next_claim[uuid] = claim.since
            if claim.share is None:
                self.next_whole[uuid] = claim.since

    def _remove(self, key: ClaimKey) -> None:
        claim = self.claims.pop(key, None)
        if claim is not None:
            self._gpus -= len(claim.gpus)
            self.ends.pop(key, None)


def _lines(since: float, warnings: list[str]) -> Iterator[bytes]:
    """Read what may matter from this time on."""
    first = month_of(max(0.0, since - _MONTH))
    months = [month for month in months_kept(time.time()) if month >= first]
    for name in chain.from_iterable(file_names(month) for month in months):
        try:
            lines = BytesIO(_start_of(name))
        except FileNotFoundError:
            continue
        except OSError as err:
            warnings.append(f"a part of the history cannot be read: {err}")
            continue
        yield from islice(lines, _MOST_LINES)


def _start_of(name: str) -> bytes:
    with HistoryDir() as directory:
        fd, _ = directory.open_known(name)
        with open(fd, "rb", buffering=0) as file:
            return file.read(LARGEST + _LONGEST_LINE)


def _told(lines: Iterable[bytes]) -> Iterator[PastClaim | ClaimEnd | ClaimLooks]:
    for line in lines:
        one = parse_line(line)
        if one is not None:
            yield one


def _looks_now(warnings: list[str]) -> list[ClaimLooks]:
    """Return what looks have seen of the claims that hold GPUs now; the history has not been told all of it."""
    try:
        with HistoryDir() as directory:
            looks = Looks(directory)
    except OSError:
        return []
    if looks.ignored:
        warnings.append(f"{printable(looks.path)} is ignored ({looks.ignored})")
    return list(looks.claims.values())


def parse_line(line: bytes) -> PastClaim | ClaimEnd | ClaimLooks | None:
    """Read a line. A line that is incomplete, since there was no room, is followed by the next one."""
    line = line[-_LONGEST_LINE:]
    begin = max(line.rfind(b'{"v":'), 0)
    try:
        raw: Any = json.loads(line[begin:].decode("utf-8", "replace"))
        pid, since = raw["claim"]
        pid = as_int(pid, 1, (1 << 31) - 1)
        since = as_time(since)
        if "ended" in raw:
            return _end_of_claim(pid, since, raw["ended"])
        if "looks" in raw:
            return ClaimLooks.read(pid, since, raw["looks"])
        return _claim(pid, since, raw)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _end_of_claim(pid: int, since: float, when: Any) -> ClaimEnd | None:
    """Return the end of a claim that is given as a time, or as two times between which it is."""
    if isinstance(when, list):
        seen, ended = [as_time(moment) for moment in when]
    else:
        seen = as_time(when)
        ended = seen
    if not 0 < since <= seen <= ended:
        return None
    return ClaimEnd(pid, since, seen, ended)


def _claim(pid: int, since: float, raw: Mapping[str, Any]) -> PastClaim | None:
    gpus = tuple(as_text(uuid, 100) for uuid in as_list(raw.get("gpus")))
    labels = tuple(as_text(label, 16) for label in as_list(raw.get("labels")))
    if not since or not gpus:
        return None
    if len(labels) != len(gpus) or not all(_LABEL.fullmatch(label) for label in labels):
        labels = ()
    return PastClaim(
        pid,
        since,
        uid=as_int(raw.get("uid", -1), -1, 1 << 32),
        user=_text(raw.get("user"), 64) or "",
        host=_text(raw.get("host"), 64) or "",
        job=_text(raw.get("job"), 100),
        command=_text(raw.get("command"), 200),
        gpus=gpus,
        labels=labels,
        until=as_seconds(raw.get("until"), 0),
        seen=since,
        share=_size(raw.get("share")),
        of=_size(raw.get("of")),
        waited=as_seconds(raw.get("waited"), 0),
    )


def _text(value: object, most: int) -> str | None:
    if value is None:
        return None
    return as_text(value, most)


def _size(value: object) -> int | None:
    if value is None:
        return None
    return as_int(value, 1, 1 << 62)


def _claims_now(warnings: list[str]) -> tuple[list[PastClaim], list[bytes]]:
    """Return the claims that hold GPUs now, and lines of those that died and were not removed yet."""
    running: list[PastClaim] = []
    dead: list[bytes] = []
    try:
        with Directory(state_dir_path(), "claims", make=False) as directory:
            entries = Entries(directory)
            for entry in entries.look():
                claim = parse_line(line_of_entry(entry))
                if isinstance(claim, PastClaim):
                    running.append(_running(entry, claim))
            dead.extend(_lines_of_dead(entries, warnings))
    except FileNotFoundError:
        pass
    except OSError as err:
        warnings.append(f"which claims hold GPUs now is not known: {err}")
    return running, dead


def _lines_of_dead(entries: Entries, warnings: list[str]) -> Iterator[bytes]:
    """Return the lines of claims that died, at most as much as a file of the history may have."""
    now = time.time()
    size = 0
    for entry in entries.dead():
        lines = lines_of_dead([entry], now)
        size += sum(len(line) for line in lines)
        if size > LARGEST:
            warnings.append(_TOO_MANY)
            return
        yield from lines


def _running(entry: Entry, claim: PastClaim) -> PastClaim:
    now = time.time()
    return claim._replace(running=True, seen=now, not_before=_began(entry, now))


def _began(entry: Entry, now: float) -> float:
    """Return when the process of an entry began, by the boot clock; 0.0 if that is not known here."""
    if entry.pidns != procfs.pid_namespace():
        return 0.0
    if not procfs.is_start(entry.start, entry.pid, procfs.start_time(entry.pid)):
        return 0.0
    age = procfs.seconds_running(entry.pid)
    if age is None:
        return 0.0
    return now - age - _TICK


class GpuHours(NamedTuple):
    """What claims with the same ``key`` used: their number, and GPU-hours between ``least`` and ``most``.

    ``waits`` are seconds, of the claims that began in this time and say how long they waited. ``use`` is what looks
    have seen of their GPUs, in GPU-seconds.
    """

    key: str
    claims: int
    least: float
    most: float
    waits: list[float]
    use: Use = Use()


def hours_held(claim: PastClaim, since: float, until: float) -> tuple[float, float]:
    """Return for how many seconds a claim held each of its GPUs in this time, at least and at most.

    A share counts as its part of them. ``until`` is at most now.
    """
    begin, sure, last = claim.held(since, until)
    return claim.part * (sure - begin), claim.part * (last - begin)


def gpu_hours_by(claims: Iterable[PastClaim], by: str, since: float, until: float) -> list[GpuHours]:
    """Return the sums by user, gpu, job or host, the largest first; by day and week in their order."""
    claims = list(claims)
    labels: dict[str, str] = {}
    for claim in claims:
        labels.update(zip(claim.gpus, claim.labels, strict=False))
    sums: dict[str, GpuHours] = {}
    for claim in claims:
        for part in _parts(claim, by, since, until, labels):
            use = sums.get(part.key)
            if use is None:
                use = GpuHours(part.key, 0, 0.0, 0.0, [])
            least, most = hours_held(claim, part.begin, part.end)
            uses = claim.uses(part.begin, part.end)
            sums[part.key] = use._replace(
                claims=use.claims + 1,
                least=use.least + least * len(part.places) / 3600,
                most=use.most + most * len(part.places) / 3600,
                use=use.use.plus(total_use(uses[place] for place in part.places)),
            )
            if claim.waited is not None and claim.since >= part.begin:
                use.waits.append(claim.waited)
    if by in _CALENDAR:
        return sorted(sums.values(), key=lambda use: use.key)
    return sorted(sums.values(), key=lambda use: (-use.most, use.key))


class _Part(NamedTuple):
    """What a claim counts for under one key: those of its GPUs that have these places, in a time."""

    key: str
    places: Sequence[int]
    begin: float
    end: float


def _parts(claim: PastClaim, by: str, since: float, until: float, labels: Mapping[str, str]) -> list[_Part]:
    if by == "gpu":
        return [_Part(_name(uuid, labels), [place], since, until) for place, uuid in enumerate(claim.gpus)]
    places = range(len(claim.gpus))
    if by in _CALENDAR:
        last = until
        if not claim.running and claim.ended:
            last = min(claim.ended, until)
        days = calendar(by, max(claim.since, since), last)
        return [_Part(first_day, places, begin, end) for first_day, begin, end in days]
    keys = {"user": claim.user or "?", "job": claim.job or "(no job)", "host": claim.host or "?"}
    return [_Part(keys[by], places, since, until)]


def _name(uuid: str, labels: Mapping[str, str]) -> str:
    if uuid not in labels:
        return uuid
    return f"{labels[uuid]} {uuid}"


_CALENDAR = {"day": 1, "week": 7}


def calendar(by: str, begin: float, end: float) -> Iterator[tuple[str, float, float]]:
    """Return the days, or the weeks from Monday on, of local time in a span: first day, beginning and end. A moment is
    a span too."""
    while begin <= end:
        first = date.fromtimestamp(begin)
        if by == "week":
            first -= timedelta(first.weekday())
        after = time.mktime((first + timedelta(_CALENDAR[by])).timetuple())
        if after <= begin:
            return
        yield first.isoformat(), begin, min(after, end)
        if after >= end:
            return
        begin = after


def table_of_claims(
    claims: Sequence[PastClaim], since: float, until: float, width: int, *, whole_names: bool = False
) -> list[str]:
    """Return a title and a line for each claim, none of them wider than ``width`` columns but for whole names, and a
    sentence on what was not looked at."""
    uses = [claim.use(since, until) for claim in claims]
    facts_of_uses = [UseFacts.of(use) for use in uses]
    held = sum(len(claim.gpus) * hours_held(claim, since, until)[1] for claim in claims)
    jobs = [claim.job or "" for claim in claims]
    most = 24
    most_of_job = 30
    if width < 100:
        jobs = [job.rpartition(":")[2] for job in jobs]
        most = 8
        most_of_job = 12
    facts = [
        Column("USER", [claim.user or "?" for claim in claims], most=most, whole=whole_names),
        Column("GPU", [_gpus(claim) for claim in claims], most=most),
        Column("JOB", jobs, most=most_of_job),
        Column("FROM", [time.strftime("%Y-%m-%d %H:%M", time.localtime(claim.since)) for claim in claims]),
        Column("TO", [_end(claim) for claim in claims]),
        Column("GPU-HOURS", [_hours_of(claim, since, until) for claim in claims], right=True),
        Column("USED", [_used(claim, use) for claim, use in zip(claims, facts_of_uses, strict=True)], right=True),
        Column("IDLE", [use.idle_text() for use in facts_of_uses], right=True),
        Column("COMMAND", [claim.command or "?" for claim in claims], most=200),
    ]
    return [*table(facts, width), *_lines_on_looks(held / 3600, total_use(uses), width)]


def _lines_on_looks(held: float, use: Use, width: int) -> list[str]:
    """Return what follows a table; nothing if nobody has looked at the claims in it, or all of the time was looked at.

    Args:
        held: the GPU-hours of these claims.
    """
    if use.looked <= 0:
        return []
    return lines_after_table(sentence_on_looks(held, use.looked / 3600), width)


def table_of_use(found: Sequence[GpuHours], by: str, width: int, *, whole_names: bool = False) -> list[str]:
    """Return a title, a line for each key, and the sum, none of them wider than ``width`` columns but for whole names,
    and a sentence on what was not looked at."""
    total = _total(found, by)
    rows = list(found)
    if len(found) > 1:
        rows.append(total)
    uses = [UseFacts.of(one.use) for one in rows]
    facts = [
        Column(by.upper(), [one.key for one in rows], most=64, whole=whole_names),
        Column("CLAIMS", [str(one.claims or "") for one in rows], right=True),
        Column("GPU-HOURS", [hours(one.least, one.most) for one in rows], right=True),
        Column("USED", [use.used_text() for use in uses], right=True),
        Column("IDLE", [use.idle_text() for use in uses], right=True),
    ]
    return [*table(facts, width), *_lines_on_looks(total.most, total.use, width)]


def _total(found: Collection[GpuHours], by: str) -> GpuHours:
    """Return the sum, with the number of claims where each counts for one key."""
    claims = 0
    least = 0.0
    most = 0.0
    for one in found:
        least += one.least
        most += one.most
        if by == "user":
            claims += one.claims
    return GpuHours("total", claims, least, most, [], total_use(one.use for one in found))


def hours(least: float, most: float) -> str:
    """Return GPU-hours; both bounds where they differ.

    >>> hours(1.256, 1.256), hours(0.0, 2.5)
    ('1.26', '0.00-2.50')
    """
    low = f"{least:.2f}"
    high = f"{most:.2f}"
    if low == high:
        return low
    return f"{low}-{high}"


def _gpus(claim: PastClaim) -> str:
    if claim.labels:
        return gpu_ranges(claim.labels)
    if len(claim.gpus) > 1:
        return f"{len(claim.gpus)} GPUs"
    return claim.gpus[0][:12]


def _end(claim: PastClaim) -> str:
    """Return ``12:30``, ``by 12:30`` where only that is known, ``now``, or "?"."""
    if claim.running:
        return "now"
    if claim.ended is None:
        return "?"
    form = "%m-%d %H:%M"
    if date.fromtimestamp(claim.since) == date.fromtimestamp(claim.ended):
        form = "%H:%M"
    end = time.strftime(form, time.localtime(claim.ended))
    if claim.ended - claim.seen < 60:
        return end
    return f"by {end}"


def _used(claim: PastClaim, use: UseFacts) -> str:
    return use.used_text(of_gpu=claim.share is not None)


def _hours_of(claim: PastClaim, since: float, until: float) -> str:
    least, most = hours_held(claim, since, until)
    return hours(least * len(claim.gpus) / 3600, most * len(claim.gpus) / 3600)
