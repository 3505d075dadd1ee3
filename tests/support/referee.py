"""A referee who knows nothing of claims: who has what of which GPU, and whether that may be."""

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

DYING = 5.0  # seconds that a process takes to close its descriptors at most
_EXITING = 0x4  # PF_EXITING in the flags of /proc/PID/stat


class Part(NamedTuple):
    """What a claim has of a card.

    Attributes:
        share: how much of that; None is all of it.
        inside: whether the claim is inside that of another one who has some of the card.
        piece: the name of a piece of the card; "" is the card.
        mode: of the card, as long as it has such pieces.
    """

    share: int | None = None
    inside: bool = False
    piece: str = ""
    mode: str = ""


def booked_twice(parts: Iterable[Part], capacity: int) -> str:
    """What is wrong with those that have some of a card at one moment; "" if nothing is.

    Args:
        capacity: of the card, in the unit of shares.
    """
    outer: list[Part] = []
    inner: list[Part] = []
    for part in parts:
        if part.inside:
            inner.append(part)
        else:
            outer.append(part)
    for one, other in combinations(inner, 2):
        if _clash(one, other):
            return "booked twice inside one claim"
    for one, other in combinations(outer, 2):
        what = _clash(one, other)
        if what:
            return what
    if sum(part.share for part in outer if part.share is not None and not part.piece) > capacity:
        return "more promised than there is"
    return ""


def _clash(one: Part, other: Part) -> str:
    """What is wrong with two parts of a card beside each other; "" if nothing is."""
    if bool(one.piece) != bool(other.piece):
        return "a piece beside all of the GPU, or a share of that"
    if one.mode != other.mode:
        return "pieces of two modes"
    if one.piece != other.piece or (one.share is not None and other.share is not None):
        return ""
    if one.piece:
        return "a piece twice"
    if one.share is None and other.share is None:
        return "booked twice"
    return "a share beside a whole claim"


class Mark:
    """What a claim has of a card, as the referee knows it: a file that its processes keep locked.

    Attributes:
        facts: ``uuid`` of the card, the fields of :class:`Part`, ``pid`` and ``start`` of the process that signed it
            last, and more.
    """

    def __init__(self, fd: int, path: str, facts: dict[str, Any]) -> None:
        self.fd = fd
        self.path = path
        self.facts = facts

    def close(self) -> None:
        """In a child: it has nothing of that GPU."""
        os.close(self.fd)

    def end(self) -> None:
        """The GPU is given back next. Children that still have the mark have nothing of the GPU either."""
        with suppress(OSError):
            os.unlink(self.path)
            fcntl.flock(self.fd, fcntl.LOCK_UN)
            os.close(self.fd)


class Referee:
    """Notes who has what of which card, in files of its own.

    Who gets some of a card makes a mark, a file that is locked before it has its name, and looks at the other marks of
    that card then. So of two that come at once one sees the other.

    Args:
        directory: where its files are; it is made, open to all users.
        capacity: of each card, in the unit of shares.
        proc: where processes are seen as on the host.
    """

    def __init__(self, directory: str, capacity: int, proc: str = "/proc") -> None:
        self.capacity = capacity
        self.proc = proc
        self.log = f"{directory}/log"
        self._marks = f"{directory}/marks"
        with suppress(FileExistsError):
            os.makedirs(self._marks)
            os.chmod(self._marks, 0o777)
            Path(self.log).touch()
            os.chmod(self.log, 0o666)

    def tell(self, event: str, **facts: Any) -> None:
        """Append an event to the log; one write, so that lines of several processes do not mix."""
        line = {"at": round(time.monotonic(), 4), "event": event, "pid": self.pid(), **facts}
        with open(self.log, "ab", buffering=0) as file:
            file.write(json.dumps(line, default=str).encode()[:4000] + b"\n")

    def events(self) -> list[dict[str, Any]]:
        """All that was told, in this order; each has ``event``, ``pid`` and ``at``, of ``time.monotonic()``."""
        return [json.loads(line) for line in Path(self.log).read_text().splitlines()]

    def violations(self) -> list[str]:
        """What it has seen that must not be."""
        return [f"{event['what']}: {event}" for event in self.events() if event["event"] == "violation"]

    def begin(
        self,
        uuid: str,
        share: int | None = None,
        *,
        inside: bool = False,
        piece: str = "",
        mode: str = "",
        **facts: Any,
    ) -> Mark:
        """Mark what this process has of a card, and tell if then it is booked twice.

        Whoever else has some of it may be dying just now.

        Args:
            uuid: of the card.
            share, inside, piece, mode: as of :class:`Part`.
        """
        fd, path = tempfile.mkstemp(prefix=".", dir=self._marks)
        fcntl.flock(fd, fcntl.LOCK_EX)
        facts.update(uuid=uuid, share=share, inside=inside, piece=piece, mode=mode)
        mark = Mark(fd, f"{self._marks}/{uuid}{os.path.basename(path)}", facts)
        self.sign(mark)
        os.fchmod(fd, 0o666)
        os.rename(path, mark.path)
        until = time.monotonic() + DYING
        while True:
            there = self.held(uuid)
            what = self._what_is_wrong(there, inside)
            if not what:
                return mark
            living = [one for one in there if self.lives(one["pid"], one["start"])]
            if self._what_is_wrong(living, inside) or time.monotonic() > until:
                rivals = [one for one in there if one["pid"] != facts["pid"]]
                self.tell("violation", what=what, uuid=uuid, rivals=rivals)
                return mark
            time.sleep(0.001)

    def _what_is_wrong(self, marks: Iterable[dict[str, Any]], inside: bool) -> str:
        """What is wrong with these marks, for one who comes and is inside another claim, or is not: one that is inside
        of what has ended counts for whoever comes next."""
        parts = [Part(one["share"], one["inside"] and inside, one["piece"], one["mode"]) for one in marks]
        return booked_twice(parts, self.capacity)

    def sign(self, mark: Mark) -> None:
        """From now on this process is the one that has to live as long as the mark counts."""
        pid = self.pid()
        mark.facts.update(pid=pid, start=self.start_time(pid))
        os.pwrite(mark.fd, json.dumps(mark.facts).encode().ljust(600), 0)  # in whole: others read it

    def held(self, uuid: str = "") -> list[dict[str, Any]]:
        """The facts of all marks that were held when this was called, and still are: of a card, or of all."""
        found = []
        for name in os.listdir(self._marks):
            if name.startswith(".") or not name.startswith(uuid):
                continue
            with suppress(FileNotFoundError), open(f"{self._marks}/{name}", "rb", buffering=0) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    os.unlink(file.name)
                except BlockingIOError:
                    found.append(json.loads(file.read()))
        return found

    def pid(self) -> int:
        """This process's number on the host, which is another one inside a PID namespace."""
        return int(os.readlink(f"{self.proc}/self"))

    def start_time(self, pid: int) -> str:
        """When a process started, in clock ticks since boot; "" if it is gone or exits."""
        try:
            words = Path(f"{self.proc}/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return ""
        has_ended = words[0] in "ZX"
        if has_ended or int(words[6]) & _EXITING:
            return ""
        return words[19]

    def lives(self, pid: int, start: str) -> bool:
        """Whether the process with this number and start lives."""
        return start != "" and self.start_time(pid) == start
