"""What looks at a host have seen of its claims: for how long each GPU was looked at, and what was done there.

Root, whose cron line looks each minute, and the owner of the directory keep it in ``history/looks`` while the claim
lives. They tell the history now and then, and once more when the claim is gone. The looks of others add nothing.

A look stands for the time since the one before it. Where that is too long ago, the time counts as not looked at.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ..host.foreign_files import MOST_BYTES, as_int, as_list, as_seconds, as_text, as_time, open_to_read
from ..host.procfs import is_unknown_user, user_name
from .directory import Directory, replace_file
from .entry import Entry

NAME = "looks"
"""The file, in the directory of the history."""

MINUTE = 60.0
"""Seconds. All distances here are multiples of it."""

_LONGEST_DISTANCE = 10  # minutes between two looks; the page may be made every five minutes, without metrics

_HOUR = 60  # minutes
_DAY = 24 * _HOUR
_LATER = 6 * _HOUR  # between two lines of a claim that is a day old

_MOST_MEMORY = 1 << 62  # bytes

_BEGIN, _BETWEEN, _END = b'{"v":1,"claims":[\n', b",\n", b"\n]}\n"

_NONSENSE = (ValueError, TypeError, KeyError, OverflowError, RecursionError)

ClaimKey = tuple[int, int]
"""What identifies a claim on its host: the process, and the millisecond."""


class Use(NamedTuple):
    """What looks have seen of one GPU, or of several together. Times are seconds.

    Attributes:
        looked: for how long it was looked at.
        idle: in which it showed no work: no process of the claim was there, or its utilisation was 0.
        absent: in which no process of the claim was there.
        untold: in which the driver did not report the utilisation.
        used: the rest, each second times the utilisation, from 0 to 1.
        memory: the most bytes in use; 0 if that is not known.
    """

    looked: float = 0.0
    idle: float = 0.0
    absent: float = 0.0
    untold: float = 0.0
    used: float = 0.0
    memory: int = 0

    @property
    def told(self) -> float:
        """For how long the driver reported the utilisation."""
        return self.looked - self.untold

    @property
    def utilization(self) -> float | None:
        """The mean utilisation in percent; None if it is not known."""
        if self.told <= 0:
            return None
        return min(100.0, 100 * self.used / self.told)

    def times(self, factor: float) -> Use:
        """Return the same for a part of the time, or of the GPU."""
        return Use(
            looked=factor * self.looked,
            idle=factor * self.idle,
            absent=factor * self.absent,
            untold=factor * self.untold,
            used=factor * self.used,
            memory=self.memory,
        )

    def plus(self, other: Use) -> Use:
        """Return the sum of both, with the larger memory."""
        return Use(
            looked=self.looked + other.looked,
            idle=self.idle + other.idle,
            absent=self.absent + other.absent,
            untold=self.untold + other.untold,
            used=self.used + other.used,
            memory=max(self.memory, other.memory),
        )


class Sight(NamedTuple):
    """What one look sees of a claim on one GPU.

    Attributes:
        utilization: percent; None if the driver does not report it.
        memory: bytes in use; None if the driver does not report it.
        absent: whether no process of the claim is there; None if the driver does not report that.
    """

    utilization: int | None
    memory: int | None
    absent: bool | None

    def use(self, seconds: float) -> Use:
        """Return what was done in the time that this look stands for; nothing where the driver reports nothing."""
        if self.utilization is None and self.absent is None:
            return Use()
        use = Use(looked=seconds, memory=self.memory or 0)
        if self.absent:
            use = use._replace(absent=seconds)
        if self.absent or self.utilization == 0:
            use = use._replace(idle=seconds)
        if self.utilization is None:
            return use._replace(untold=seconds)
        return use._replace(used=seconds * min(self.utilization, 100) / 100)


class ClaimLooks(NamedTuple):
    """What looks have seen of one claim.

    Attributes:
        pid, since: the claim: its process, and when it was made, in Unix seconds.
        span: seconds from then to the latest look.
        uses: of each of its GPUs, in the order of its entry.
        gpus: their UUIDs; () as the history tells it.
        told: the ``span`` that the history was last told; 0 if it was told nothing.
    """

    pid: int
    since: float
    span: float
    uses: tuple[Use, ...]
    gpus: tuple[str, ...] = ()
    told: float = 0.0

    @property
    def key(self) -> ClaimKey:
        return claim_key(self.pid, self.since)

    @property
    def is_worth_telling(self) -> bool:
        """Whether there is something that the history was not told."""
        return self.span > self.told and any(use.looked for use in self.uses)

    @property
    def is_due(self) -> bool:
        """Whether it is time to tell the history, again or for the first time."""
        return self.is_worth_telling and self.span >= next_telling(self.told)

    def with_look(self, sights: Mapping[str, Sight], now: float) -> ClaimLooks:
        """Return it with one more look.

        Args:
            sights: UUID -> what was seen there. GPUs that are missing were not looked at.
            now: Unix seconds. If the clock was set back, nothing is added before it has caught up.
        """
        span = now - self.since
        seconds = span - self.span
        if seconds <= 0:
            return self
        if seconds > _LONGEST_DISTANCE * MINUTE:
            seconds = 0.0
        uses = []
        for uuid, use in zip(self.gpus, self.uses, strict=True):
            if uuid in sights:
                use = use.plus(sights[uuid].use(seconds))
            uses.append(use)
        return self._replace(span=span, uses=tuple(uses))

    def facts(self) -> dict[str, Any]:
        """Return it as an object of JSON: ``span``, and lists with a number for each GPU: ``used`` as in :class:`Use`,
        and those of its other fields that are not 0 of all GPUs, but ``missed`` in place of ``looked``: the rest of
        ``span``, which is mostly 0."""
        columns: dict[str, list[float]] = {
            "used": [use.used for use in self.uses],
            "missed": [self.span - use.looked for use in self.uses],
            "idle": [use.idle for use in self.uses],
            "absent": [use.absent for use in self.uses],
            "untold": [use.untold for use in self.uses],
            "memory": [use.memory for use in self.uses],
        }
        facts: dict[str, Any] = {"span": _rounded(self.span)}
        for name, column in columns.items():
            numbers = [_rounded(number) for number in column]
            if name == "used" or any(numbers):
                facts[name] = numbers
        return facts

    @classmethod
    def read(cls, pid: int, since: float, facts: object, gpus: Sequence[str] | None = None) -> ClaimLooks:
        """Return what such an object says, which anybody may have written. No time in it exceeds what it is a part of.

        Args:
            gpus: those of the claim; None: as many as the object tells of.

        Raises:
            ValueError: nonsense.
        """
        if not isinstance(facts, dict):
            raise ValueError("no object")
        span = as_seconds(facts.get("span"), 0)
        if span is None:
            raise ValueError("no span")
        columns = {name: as_list(facts.get(name)) for name in ("missed", *Use._fields)}
        number = len(columns["used"])
        if gpus is not None:
            number = len(gpus)
        if number == 0:
            raise ValueError("no GPUs")
        uses = []
        for place in range(number):
            looked = max(0.0, span - _seconds(columns["missed"], place))
            untold = min(_seconds(columns["untold"], place), looked)
            use = Use(
                looked=looked,
                idle=min(_seconds(columns["idle"], place), looked),
                absent=min(_seconds(columns["absent"], place), looked),
                untold=untold,
                used=min(_seconds(columns["used"], place), looked - untold),
                memory=_bytes(columns["memory"], place),
            )
            uses.append(use)
        return cls(pid, since, span, tuple(uses), tuple(gpus or ()))


def claim_key(pid: int, since: float) -> ClaimKey:
    """Return what identifies a claim."""
    return pid, round(since * 1000)


def next_telling(told: float) -> float:
    """Return at which age of a claim, in seconds, the history is told next: 1, 2, 4 ... minutes, then each hour for a
    day, then every six hours.

    Args:
        told: at which age it was told last.

    >>> [next_telling(age) / 3600 for age in (0, 59 * 60, 3700, 86000, 90000)]
    [0.016666666666666666, 1.0, 2.0, 24.0, 30.0]
    """
    minutes = told / MINUTE
    if minutes < _HOUR:
        age = 1
        while age <= minutes:
            age *= 2
        return min(age, _HOUR) * MINUTE
    distance = _HOUR
    if minutes >= _DAY:
        distance = _LATER
    return (minutes // distance + 1) * distance * MINUTE


def _rounded(number: float) -> float:
    """Return seconds to the millisecond, from 100 s on to a tenth, in as few characters as that takes."""
    digits = 3
    if number >= 100:
        digits = 1
    rounded = round(number, digits)
    if rounded == int(rounded):
        return int(rounded)
    return rounded


def _seconds(column: Sequence[object], place: int) -> float:
    """Return a number of a list; 0 where it has none there."""
    if place >= len(column):
        return 0.0
    return as_seconds(column[place], 0) or 0.0


def _bytes(column: Sequence[object], place: int) -> int:
    if place < len(column):
        with suppress(ValueError, TypeError, OverflowError):
            return as_int(column[place], 0, _MOST_MEMORY)
    return 0


class Looks:
    """What looks have seen of the claims of this host so far, as ``history/looks`` tells it.

    Attributes:
        claims: of those that hold GPUs, and of those that have ended since the latest look.
        ignored: why the file is ignored, a clause; "" if it counts, or is missing.

    Args:
        directory: of the history, while it is open.
    """

    def __init__(self, directory: Directory) -> None:
        self.claims: dict[ClaimKey, ClaimLooks] = {}
        self.ignored = ""
        self.path = os.path.join(directory.path, NAME)
        try:
            for claim in _read(directory):
                self.claims.setdefault(claim.key, claim)
        except FileNotFoundError:
            pass
        except OSError as err:
            self.ignored = str(err.strerror)
        except _NONSENSE as err:
            self.ignored = as_text(f"nonsense: {err}", 100)

    def use_of(self, entry: Entry, uuid: str) -> Use:
        """Return what was seen of a claim on one of its GPUs so far."""
        if entry.since is not None:
            known = self.claims.get(claim_key(entry.pid, entry.since))
            if known is not None and uuid in known.gpus:
                return known.uses[known.gpus.index(uuid)]
        return Use()

    def add(self, seen: Iterable[tuple[Entry, str, Sight]], now: float) -> None:
        """Add one look.

        Args:
            seen: claims, and what was seen on which of their GPUs; the most important claims first, if there are more
                than there is room for.
            now: Unix seconds.
        """
        entries: dict[ClaimKey, Entry] = {}
        sights: dict[ClaimKey, dict[str, Sight]] = {}
        for entry, uuid, sight in seen:
            if entry.since is not None:
                key = claim_key(entry.pid, entry.since)
                if entries.setdefault(key, entry) is entry:  # another entry may say that it is of the same process
                    sights.setdefault(key, {})[uuid] = sight
        known = self.claims
        self.claims = {}
        for key, entry in entries.items():
            claim = known.pop(key, None) or _first(entry)
            if claim.gpus == tuple(entry.gpus):
                claim = claim.with_look(sights[key], now)
            self.claims[key] = claim
        self.claims.update(known)

    def ended(self, living: Iterable[Entry]) -> list[ClaimLooks]:
        """Remove the claims that have ended, and return those of which the history is to be told."""
        keys = {claim_key(one.pid, one.since) for one in living if one.since is not None}
        gone = [claim for key, claim in self.claims.items() if key not in keys]
        for claim in gone:
            del self.claims[claim.key]
        return [claim for claim in gone if claim.is_worth_telling]

    def due(self) -> list[ClaimLooks]:
        """Return the claims that live and of which the history is to be told now."""
        return [claim for claim in self.claims.values() if claim.is_due]

    def note_told(self, claims: Iterable[ClaimLooks]) -> None:
        """Note that the history was told of these claims, so that it is not told again at once."""
        for claim in claims:
            self.claims[claim.key] = claim._replace(told=claim.span)

    def write(self, directory: Directory) -> None:
        """Put this in the place of the file. Claims for which there is no room are left out, the last ones.

        Raises:
            OSError: it cannot be written, or a directory has its name.
        """
        replace_file(directory.fd, NAME, self._content())

    def _content(self) -> bytes:
        lines: list[bytes] = []
        size = len(_BEGIN) + len(_END)
        for claim in self.claims.values():
            facts = {
                "claim": _identity(claim),
                "gpus": claim.gpus,
                "told": _rounded(claim.told),
                "looks": claim.facts(),
            }
            line = _json(facts)
            size += len(line) + len(_BETWEEN)
            if size > MOST_BYTES:
                break
            lines.append(line)
        return _BEGIN + _BETWEEN.join(lines) + _END


def _first(entry: Entry) -> ClaimLooks:
    """Return that of a claim at which nobody has looked yet."""
    assert entry.since is not None
    return ClaimLooks(entry.pid, entry.since, 0.0, (Use(),) * len(entry.gpus), tuple(entry.gpus))


def _json(facts: Mapping[str, Any]) -> bytes:
    return json.dumps(facts, separators=(",", ":")).encode()


def _identity(claim: ClaimLooks) -> list[float]:
    return [claim.pid, round(claim.since, 3)]


def line_of(claim: ClaimLooks) -> bytes:
    """Return the line by which the history is told of a claim.

    >>> line_of(ClaimLooks(4470, 1795184513.204, 60.0, (Use(looked=60.0, used=30.0),)))
    b'{"v":1,"claim":[4470,1795184513.204],"looks":{"span":60,"used":[30]}}\\n'
    """
    return _json({"v": 1, "claim": _identity(claim), "looks": claim.facts()}) + b"\n"


def adds_looks(directory: Directory) -> bool:
    """Return whether the looks of this user are added: those of root, and of the owner of the directory.

    Root of a container that does not know the owner could not write what root of the host keeps.
    """
    owner = os.fstat(directory.fd).st_uid
    return os.geteuid() in (0, owner) and not is_unknown_user(owner)


def _read(directory: Directory) -> list[ClaimLooks]:
    """Return what the file tells.

    Raises:
        OSError: it is missing, closed, or no file. _NONSENSE: it is nonsense, or of another user.
    """
    with open_to_read(NAME, os.O_NOFOLLOW, directory.fd) as file:
        _check(os.fstat(file.fileno()), os.fstat(directory.fd).st_uid)
        content = json.loads(file.read(MOST_BYTES) or b"")
    claims = []
    for facts in content["claims"]:
        pid, since = facts["claim"]
        pid = as_int(pid, 1, (1 << 31) - 1)
        gpus = [as_text(uuid, 100) for uuid in as_list(facts["gpus"])]
        claim = ClaimLooks.read(pid, as_time(since), facts["looks"], gpus)
        claims.append(claim._replace(told=as_seconds(facts["told"], 0) or 0.0))
    return claims


def _check(status: os.stat_result, owner: int) -> None:
    """Refuse a file that is not kept by root or by the owner of the directory.

    Raises:
        ValueError: so it is.
    """
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    if status.st_uid not in (0, owner):
        raise ValueError(f"it belongs to {user_name(status.st_uid)}")
    if status.st_mode & 0o022:
        raise ValueError(f"others may write it: mode {stat.S_IMODE(status.st_mode):04o}")
    if status.st_size > MOST_BYTES:
        raise ValueError(f"{status.st_size} bytes, of {MOST_BYTES} at most")
