"""The referee of a race: it knows nothing of leases, only when each process had which GPU. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .racers import Outcome


class Collision(NamedTuple):
    """``pid`` took a GPU that ``rival`` had at that time."""

    label: str
    uuid: str
    pid: int
    rival: int


class RefereeReport(NamedTuple):
    """The ruling on one race, or on several.

    Attributes:
        claims: the number of claims that succeeded.
        taken: the number of GPUs that these claims got.
        refused: the number of claims that were refused.
        collisions: every GPU that a process took while another one had it.
        failed: the racers with any other error.
        trouble: the racers whose GPU or driver failed.
    """

    claims: int = 0
    taken: int = 0
    refused: int = 0
    collisions: tuple[Collision, ...] = ()
    failed: tuple[Outcome, ...] = ()
    trouble: tuple[Outcome, ...] = ()

    @property
    def fails(self) -> bool:
        """Whether claims failed to exclude each other, or failed. Errors of GPUs count only if no claim succeeded."""
        return bool(self.collisions or self.failed or (self.trouble and not self.claims))


def rule(*races: Sequence[Outcome]) -> RefereeReport:
    """Rule on races."""
    outcomes = [outcome for heat in races for outcome in heat]
    winners = [outcome for outcome in outcomes if outcome.gpus]
    return RefereeReport(
        claims=len(winners),
        taken=sum(len(outcome.gpus) for outcome in winners),
        refused=sum(bool(outcome.refused) for outcome in outcomes),
        collisions=tuple(found for heat in races for found in _collisions(heat)),
        failed=tuple(outcome for outcome in outcomes if outcome.failed),
        trouble=tuple(outcome for outcome in outcomes if outcome.trouble),
    )


def _collisions(heat: Iterable[Outcome]) -> Iterator[Collision]:
    latest: dict[str, Outcome] = {}  # UUID -> the process that has the GPU for longest
    for began, outcome in in_time(heat):
        for gpu in outcome.gpus:
            rival = latest.get(gpu.uuid)
            if rival is not None and rival.ended > began:
                yield Collision(gpu.label, gpu.uuid, outcome.pid, rival.pid)
            if rival is None or outcome.ended > rival.ended:
                latest[gpu.uuid] = outcome


def in_time(heat: Iterable[Outcome]) -> list[tuple[float, Outcome]]:
    """Return when each got its GPUs or was refused, in that order."""
    timed = [(outcome.began, outcome) for outcome in heat if outcome.began is not None]
    return sorted(timed, key=lambda one: one[0])
