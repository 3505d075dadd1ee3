"""How a claim ended: one short line in its lease file, for the claim that takes the lease next.

A claim that is released writes when. One that died leaves its record; the process that finds the lease free writes an
interval: when the lease was last seen held (the time of the file's last change), and when it was found free.
"""

import json
from typing import Any, NamedTuple

from ...host.decoding import as_int, as_time

LONGEST = 127
"""Bytes of such a line at most. A record is always longer, so the size of a lease file tells one from the other."""

_BEGINNING = b'{"v": 1, "claim": ['


class ClaimEnd(NamedTuple):
    """The end of the claim that process ``pid`` made at ``since``. Times are Unix seconds.

    It ended between ``seen``, when it was last known to be alive, and ``ended``, equal if that is known exactly.
    """

    pid: int
    since: float
    seen: float
    ended: float

    def encode(self) -> bytes:
        """Return one line of JSON, at most :data:`LONGEST` bytes."""
        when = f"{self.ended:.3f}" if self.seen == self.ended else f"[{self.seen:.3f}, {self.ended:.3f}]"
        return _BEGINNING + f'{self.pid}, {self.since:.3f}], "ended": {when}}}\n'.encode()

    @classmethod
    def decode(cls, data: bytes) -> "ClaimEnd | None":
        """Return the line, or None if it is something else. Anybody may have written it."""
        if len(data) > LONGEST or not data.startswith(_BEGINNING):
            return None
        try:
            return cls.of(json.loads(data))
        except (ValueError, RecursionError):
            return None

    @classmethod
    def of(cls, raw: Any) -> "ClaimEnd | None":
        """Return the end that a decoded line tells of, or None."""
        try:
            pid, since = raw["claim"]
            when = raw["ended"]
            seen, ended = map(as_time, when if isinstance(when, list) else (when, when))
            found = cls(as_int(pid, 1, (1 << 31) - 1), as_time(since), seen, ended)
        except (ValueError, TypeError, KeyError, OverflowError):
            return None
        return found if 0 < found.since <= found.seen <= found.ended else None


def end_of_dead_claim(pid: int, since: float, changed: float, now: float) -> ClaimEnd | None:
    """Return the end of a claim whose lease was found free at ``now``, its file last changed at ``changed``.

    None if the times in the record make no sense.
    """
    if not 0 < since <= now:
        return None
    return ClaimEnd(pid, since, min(max(since, changed), now), now)
