"""Chooses the claims of a race for a host. Pure: a function of a snapshot and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..devices import GpuRequest
from ..errors import UnsatisfiableRequestError
from ..selection.choice import check_possible

if TYPE_CHECKING:
    from ..devices import GpuVerdict, HostSnapshot
    from ..runtimes.visible_devices import VisibleLimit


_FEWEST, _MOST = 4, 32
# Free memory that the contexts of all racers need on a GPU that they share with a desktop, bytes.
_ROOM_TO_SHARE = 1 << 30


class RacerRequest(NamedTuple):
    """The claim of one racer; ``min_memory`` in bytes, as in ``claim_gpus``."""

    nb_gpus: int = 1
    min_memory: int | None = None


class Plan(NamedTuple):
    """A race, with one entry for each racer.

    ``shared`` means that the claims do not exclude each other, because the GPU drives the display.
    """

    asks: tuple[RacerRequest, ...]
    shared: bool = False


def plan_race(
    snapshot: HostSnapshot, verdicts: Sequence[GpuVerdict], fence: VisibleLimit | None = None, racers: int | None = None
) -> Plan | None:
    """The race for this host, or None if no GPU can be claimed now.

    Args:
        snapshot: one poll of the driver.
        verdicts: of every device, for a claim of one GPU by this process.
        fence: the GPUs that CUDA_VISIBLE_DEVICES allows; None: all.
        racers: the number of racers; default: twice as many as free GPUs, 4 to 32. On a shared GPU it is 2 or 3.
    """
    free = [verdict.gpu for verdict in verdicts if verdict.free]
    if not free:
        return None
    if snapshot.shared_display:
        return _shared(snapshot)
    pairs = _possible(snapshot, 2, fence)
    number = racers or max(_FEWEST, min(_MOST, 2 * len(free)))
    return Plan(tuple(RacerRequest(2 if pairs and i % 4 == 3 else 1) for i in range(number)))


def _shared(snapshot: HostSnapshot) -> Plan | None:
    """Two racers that share the GPU, and one that asks for all its memory and is refused, as the desktop uses some."""
    gpu = snapshot.physical[0]
    if gpu.memory_free is not None and gpu.memory_free < _ROOM_TO_SHARE:
        return None
    asks = [RacerRequest(), RacerRequest()]
    if gpu.memory_total is not None and gpu.memory_free is not None and gpu.memory_free < gpu.memory_total:
        asks.append(RacerRequest(min_memory=gpu.memory_total))
    return Plan(tuple(asks), shared=True)


def _possible(snapshot: HostSnapshot, nb_gpus: int, fence: VisibleLimit | None) -> bool:
    """Whether one claim can ever get this number of GPUs: False on a host with one GPU, and for MIG instances."""
    try:
        check_possible(snapshot, GpuRequest(nb_gpus), fence)
    except UnsatisfiableRequestError:
        return False
    return True
