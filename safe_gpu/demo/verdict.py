"""The referee's ruling on a race: which of the facts of both detectors are collisions. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .racers import Outcome, RaceResult


class Collision(NamedTuple):
    """A collision: these processes had the GPU at the same time. ``witness``: "marker" or "driver"."""

    uuid: str
    pids: tuple[int, ...]
    witness: str


class Intruder(NamedTuple):
    """Other processes came onto a GPU of a racer. They do not claim, so no lock keeps them off."""

    uuid: str
    strangers: tuple[int, ...]
    racers: tuple[int, ...]


class RefereeReport(NamedTuple):
    """The ruling on one race, or on several.

    Attributes:
        claims: the number of claims that succeeded.
        taken: the number of GPUs that these claims got.
        refused: the number of claims that were refused.
        collisions: how often a process took a GPU that another one had, by the detector that saw more such cases.
        clashes: these cases, as each detector saw them.
        visits: see :class:`Visit`.
        looks: the number of polls of the driver.
        shown: the number of claims whose process the driver showed on all of their GPUs.
        failed: the racers with any other error.
        trouble: the racers whose GPU or driver failed.
        blind: why a watch stopped early.
    """

    claims: int = 0
    taken: int = 0
    refused: int = 0
    collisions: int = 0
    clashes: tuple[Collision, ...] = ()
    visits: tuple[Intruder, ...] = ()
    looks: int = 0
    shown: int = 0
    failed: tuple[Outcome, ...] = ()
    trouble: tuple[Outcome, ...] = ()
    blind: tuple[str, ...] = ()

    @property
    def fails(self) -> bool:
        """Whether claims failed to exclude each other, or failed. Errors of GPUs count only if no claim succeeded."""
        return bool(self.collisions or self.failed or (self.trouble and not self.claims))


def rule(heat: RaceResult, *, shared: bool = False) -> RefereeReport:
    """Rule on a race.

    Two racers on one GPU are a collision. A racer on a GPU with a process from before the start is a collision too. Any
    other process that came later is a visitor. If claims share the GPU (``shared``), there are no collisions.
    """
    ruling = RefereeReport(
        claims=len(heat.winners),
        taken=sum(len(outcome.uuids) for outcome in heat.winners),
        refused=len(heat.refused),
        looks=heat.watched.looks,
        shown=sum(_shown(outcome, heat.watched.shown) for outcome in heat.winners),
        failed=tuple(outcome for outcome in heat.outcomes if outcome.failed),
        trouble=tuple(outcome for outcome in heat.outcomes if outcome.trouble),
        blind=tuple(filter(None, [heat.watched.trouble])),
    )
    return ruling if shared else ruling._replace(**_encounters(heat))


def _encounters(heat: RaceResult) -> dict[str, Any]:
    by_marker = [
        Collision(uuid, (outcome.pid, rival), "marker")
        for outcome in heat.outcomes
        for uuid, rival in zip(outcome.uuids, outcome.rivals, strict=True)
        if rival >= 0
    ]
    racer_of = {number: outcome for outcome in heat.outcomes for number in (outcome.pid, *outcome.known_as)}
    together: dict[str, set[int]] = {}
    visits = []
    for sighting in heat.watched.sightings:
        racers = {racer_of[pid].pid for pid in sighting.newcomers if pid in racer_of}
        strangers = sighting.newcomers - racer_of.keys()
        holders = {pid for pid in racers if sighting.uuid in racer_of[pid].uuids}
        if len(racers) > 1:
            together.setdefault(sighting.uuid, set()).update(racers)
        if holders and sighting.residents:
            together.setdefault(sighting.uuid, set()).update(holders | sighting.residents)
        if racers and strangers:
            visits.append(Intruder(sighting.uuid, tuple(sorted(strangers)), tuple(sorted(racers))))
    by_driver = [Collision(uuid, tuple(sorted(pids)), "driver") for uuid, pids in together.items()]
    return {
        "collisions": max(len(by_marker), sum(len(clash.pids) - 1 for clash in by_driver)),
        "clashes": (*by_marker, *by_driver),
        "visits": tuple(visits),
    }


def add_up(rulings: Iterable[RefereeReport]) -> RefereeReport:
    """The sum of several rulings."""
    total: tuple[Any, ...] = RefereeReport()
    for ruling in rulings:
        total = tuple(one + other for one, other in zip(total, ruling, strict=True))
    return RefereeReport(*total)


def _shown(outcome: Outcome, shown: frozenset[tuple[str, int]]) -> bool:
    numbers = (outcome.pid, *outcome.known_as)
    return all(any((uuid, number) in shown for number in numbers) for uuid in outcome.uuids)
