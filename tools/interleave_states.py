"""Tells when two schedules have come to the same state, from where they go on alike.

The state of a racer is what it has done and has seen until now. What it sees besides the locks and names that it tries
is the content of files, as others have left them, and what the driver says, which is what all hold. What a dead one has
done does not count, but what is left of it. Times are left out, but for whose is next.
"""

from collections.abc import Collection
from typing import Any

from interleave_racer import CONTENT, GETS, HELD


class World:
    """All processes and files, as far as they matter to what comes next."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}  # thread -> what it has done and seen
        self._held: set[tuple[str, str]] = set()
        self._files: dict[str, int] = {}
        self._left: dict[str, list[str]] = {}  # of the dead: what is still to be closed

    def step(self, task: str, racer: str, what: str) -> None:
        """A thread makes a step."""
        call, _, thing = what.removesuffix(HELD).partition(" ")
        free = not what.endswith(HELD)
        if call == "dying":
            self._left[racer].pop(0)
            call, thing = "close", thing.removeprefix("closes ")
        seen: Any = frozenset(self._files.items())
        if call == "connect":
            seen = any(name == thing for name, _ in self._held)
        elif call == "poll":
            seen = seen, frozenset(one for one in self._held if one[0] == "context")
        elif thing.endswith("host.lock") and not free:
            seen = 0
        self._seen[task] = hash((self._seen.get(task), what, seen))
        if call in ("unlock", "close", "end"):
            self._held.discard((thing, racer))
        elif call in ("bind", "start") and free:
            self._held.add((thing, racer))
        elif call == "try" and free:
            self._held.add((thing.partition(" ")[2], racer))
        elif call in ("rename", "write"):
            self._files[thing] = 0
        elif call == "unlink":
            self._files.pop(thing, None)

    def hear(self, task: str, racer: str, what: str, about: Collection[Any]) -> None:
        """A thread says something."""
        if what == CONTENT:
            self._files.update([about])  # type: ignore[list-item]
        elif what == GETS:
            self._held.add((*about, racer))  # type: ignore[arg-type]
        elif what == "dies":
            (self._left[racer],) = about
            self._seen = {name: seen for name, seen in self._seen.items() if name[0].upper() != racer}
        else:
            self._seen[task] = hash((self._seen.get(task), what, repr(about)))
            if what == "has":
                self._files[f"scope-{racer}"] = 0

    def state(self, *more: Any) -> int:
        """Return what tells this state from others, with what else matters."""
        living = {name: seen for name, seen in self._seen.items() if name[0].upper() not in self._left}
        left = tuple(sorted((name, tuple(labels)) for name, labels in self._left.items()))
        return hash((frozenset(living.items()), frozenset(self._files.items()), left, more))
