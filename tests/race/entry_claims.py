"""Claims on entries and doors alone, as the protocol describes them, whole or broken on purpose."""

import fcntl
import os
import random
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from safe_gpu.coordination import entry
from safe_gpu.coordination.directory import Directory
from safe_gpu.coordination.doors import Doors
from safe_gpu.coordination.entry import Entries, Entry, make_entry, remove_entry
from safe_gpu.coordination.held import Held
from safe_gpu.coordination.socket_names import digest
from safe_gpu.errors import StateDirError

CAPACITY = 80  # of each GPU; shares are parts of it

BROKEN = {
    "one listing": "no second listing after the entry has its name",
    "names come again": "a name is a number alone, and the next claim may get that of a dead entry",
    "unlink by number": "who removes a dead entry removes all of its number",
    "door too early": "the doors are given back before the entry has its name",
    "lower stays": "of two who see each other the one with the lower number stays",
    "flock": "entries are locked by flock(2), and a neighbour locks them too",
    "no door of the token": "a claim inside another one does not ask for the doors of its token",
}
"""Builds that are broken on purpose. Each must be caught."""


@dataclass
class Claim:
    """What one process holds; also while it is being taken."""

    directory: Directory
    doors: Doors
    gpus: tuple[str, ...] = ()
    name: str = ""
    held: Held | None = None
    token: str = ""
    inside: str = ""
    file: tuple[int, int] = (0, 0)

    def release(self) -> None:
        self.doors.release()
        if self.held is not None:
            remove_entry(self.directory, self.name, self.held)


@dataclass
class Claimer:
    """A process that claims again and again in one state directory.

    Attributes:
        host_lock: whether it takes host.lock.
        broken: a key of BROKEN; "" is whole.
        withdrawals: how often it saw another claim after its own had its name.
    """

    state_dir: str
    gpus: Sequence[str]
    host_lock: bool = True
    broken: str = ""
    withdrawals: int = 0
    claims: Directory = field(init=False)
    entries: Entries = field(init=False)

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        self.claims = Directory(self.state_dir, "claims")
        self.entries = Entries(self.claims)

    def claim(
        self, number: int, deadline: float, *, share: int | None = None, delegate: bool = False, scope: str = ""
    ) -> Claim | None:
        """Return a claim; None where there were too few GPUs until the deadline, or the claim around it has ended."""
        while True:
            try:
                found = self._try(number, share, delegate, scope)
            except (StateDirError, FileNotFoundError):
                if self.claims.is_current():
                    raise
                found = None  # the directory was removed meanwhile
            if found is not None or time.monotonic() >= deadline:
                return found
            if scope and self._around(self.entries.look(), scope) is None:
                return None
            time.sleep(random.uniform(0.0005, 0.01))

    def _try(self, number: int, share: int | None, delegate: bool, scope: str) -> Claim | None:
        if not self.claims.is_current():
            self.claims.close()
            self.open()
        self.entries.look()
        claim = Claim(self.claims, Doors(), inside=digest(scope) if scope else "")
        try:
            with self._host_lock():
                living = self.entries.look([one.name for one in self.entries.look(()) if not one.nb_gpus])
                around = self._around(living, scope)
                if scope and around is None:
                    return None
                if not self._take(claim, living, around, number, share, delegate, scope):
                    claim.release()
                    return None
                self._make(claim, share)
            if not self._stays(claim, share, scope):
                self.withdrawals += 1
                claim.release()
                return None
        except BaseException:
            claim.release()
            raise
        self._clean()
        return claim

    def _take(
        self,
        claim: Claim,
        living: Sequence[Entry],
        around: Entry | None,
        number: int,
        share: int | None,
        delegate: bool,
        scope: str,
    ) -> bool:
        """Take doors of enough GPUs."""
        claim.token = f"{random.getrandbits(64):016x}" if delegate else ""
        taken: list[str] = []
        for uuid in self.gpus if around is None else around.gpus:
            if len(taken) == number:
                break
            if room(uuid, living, claim.inside) < (CAPACITY if share is None else share):
                continue
            known = {one.parts[uuid] for one in living if uuid in one.parts}
            if around is not None:
                done = claim.doors.take_inside(uuid, known, scope)
            elif share is not None:
                done = claim.doors.take_share(uuid, known)
            else:
                done = claim.doors.take_whole(uuid, known, claim.token)
            if done:
                taken.append(uuid)
        claim.gpus = tuple(taken)
        return len(taken) == number

    def _make(self, claim: Claim, share: int | None) -> None:
        said: dict[str, Any] = {
            "pid": os.getpid(),
            "gpus": dict.fromkeys(claim.gpus, share),
            "parts": dict(claim.doors.parts),
            "token": digest(claim.token) if claim.token else "",
            "inside": claim.inside,
        }
        if self.broken == "door too early":
            claim.doors.release()
        number = self.entries.next_number
        if self.broken == "names come again":
            names = [one for one in os.listdir(self.claims.fd) if one[0] != "."]
            number = max([int(one.partition(".")[0]) for one in names], default=0) + 1
        claim.name, claim.held = make_entry(self.claims, number, said, by_children=True)
        status = os.fstat(claim.held.fd)
        claim.file = status.st_dev, status.st_ino

    def _stays(self, claim: Claim, share: int | None, scope: str) -> bool:
        """Return whether a claim whose entry has its name may stay, by a second listing."""
        if self.broken == "one listing":
            return True
        living = [one for one in self.entries.look() if one.file != claim.file]
        if not self.claims.is_current():
            return False
        if scope and self._around(living, scope) is None:
            return False
        if self.broken == "lower stays":
            number = int(claim.name.partition(".")[0])
            living = [one for one in living if one.number <= number]
        least = CAPACITY if share is None else share
        return all(room(uuid, living, claim.inside) >= least for uuid in claim.gpus)

    def _around(self, living: Sequence[Entry], scope: str) -> Entry | None:
        """Return the claim around this process: a living one of this user with the hash of the token."""
        mine = (one for one in living if not one.nb_gpus and one.uid == os.geteuid())
        return next((one for one in mine if scope and one.token == digest(scope)), None)

    def _clean(self) -> None:
        if self.broken == "unlink by number":
            numbers = {name.partition(".")[0] for name in self.entries._dead}
            for name in os.listdir(self.claims.fd):
                if name.partition(".")[0] in numbers:
                    with suppress(OSError):
                        os.unlink(name, dir_fd=self.claims.fd)
        self.entries.remove_dead()

    @contextmanager
    def _host_lock(self) -> Iterator[None]:
        """Hold host.lock. Somebody may unlink its file: then who has it locked and who makes it anew go on at once."""
        held = self._locked() if self.host_lock else None
        try:
            yield
        finally:
            if held is not None:
                held.release()

    def _locked(self) -> Held:
        while True:
            fd = os.open(f"{self.state_dir}/host.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            held = Held(fd, unlock=lambda fd: fcntl.flock(fd, fcntl.LOCK_UN))
            fcntl.flock(fd, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(f"{self.state_dir}/host.lock")):
                    return held
            held.release()


def room(uuid: str, living: Collection[Entry], inside: str) -> int:
    """Return what is left of a GPU for a claim inside the one whose token has this hash, or inside none ("")."""
    claims = [one for one in living if not one.nb_gpus]
    outer = {(one.token, one.uid) for one in claims if one.token}
    used = 0
    for one in claims:
        is_around = inside != "" and one.token == inside
        beneath = one.inside != "" and (one.inside, one.uid) in outer
        if uuid in one.gpus and not is_around and (not beneath or one.inside == inside):
            used += CAPACITY if one.gpus[uuid] is None else one.gpus[uuid] or 0
    return CAPACITY - used


def break_build(build: str) -> None:
    """Break what stands in the package itself, in this process."""
    if build == "no door of the token":
        Doors.is_inside = lambda self, uuid, token: True  # type: ignore[method-assign]
    elif build == "names come again":
        calls = count()
        urandom = os.urandom
        os.urandom = lambda size: urandom(size) if next(calls) % 2 == 0 else bytes(size)  # the second is of the name
    elif build == "flock":
        entry.ofd_locks = lambda: False  # type: ignore[assignment]
