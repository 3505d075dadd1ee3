"""The error with which a claim fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...coordination.holders import claims_now
from ...errors import ClaimTimeout, NotEnoughGpusError
from ...gpus.devices import Holder
from ...selection.verdicts import fence_hint
from ..host.ancestors import refuse_gpus_of_ancestors
from .wait_status import ClaimAhead
from .wording import refusal_message

if TYPE_CHECKING:
    from ...coordination.entry import Entry
    from ...gpus.devices import GpuVerdict
    from ..host.host_view import HostView
    from ..limits import LimitReached


def refuse_if_ancestor_holds(view: HostView) -> None:
    """Call :func:`~safe_gpu.claim.host.ancestors.refuse_gpus_of_ancestors` with the present holders.

    Raises:
        NotEnoughGpusError: an ancestor of this process holds the GPUs that it waits for.
        StateDirError: the claims cannot be read.
    """
    _judge(view, holders_now(view))


def refusal(
    view: HostView,
    *,
    ticket: Entry | None,
    stopped: Entry | None = None,
    spent: LimitReached | None = None,
    position: int,
    waited: float,
    wait_limit: str = "",
) -> NotEnoughGpusError:
    """Return the error with which a claim fails: ClaimTimeout if it waited (``waited`` in seconds), else
    NotEnoughGpusError.

    ``ticket``, ``spent`` and ``position`` are those of :func:`wait_status`; ``stopped`` was passed, because its waiter
    is stopped; ``wait_limit`` is the policy file, if that set the timeout.

    Raises:
        NotEnoughGpusError, StateDirError: as in :func:`refuse_if_ancestor_holds`.
    """
    request, visible_limit = view.request, view.visible_limit
    holders = holders_now(view)
    verdicts = _judge(view, holders)
    unlimited = view.judge(holders, within_limit=False)
    hint = fence_hint(unlimited, visible_limit)
    frozen = visible_limit is not None and visible_limit.frozen
    if hint and visible_limit is not None and visible_limit.lift:
        hint += f" ({visible_limit.lift} disregards it)"
    ahead = None if ticket is None else ClaimAhead.of(ticket)
    passed = None if stopped is None else ClaimAhead.of(stopped)._replace(stopped=True)
    message = refusal_message(
        request,
        verdicts,
        hint=hint,
        ahead=ahead,
        passed=passed,
        spent=spent,
        position=position,
        waited=waited,
        wait_limit=wait_limit,
        elsewhere=frozen and sum(verdict.free for verdict in unlimited) >= request.nb_gpus,
    )
    if waited:
        return ClaimTimeout(message, nb_gpus=request.nb_gpus, verdicts=verdicts, timeout=waited)
    return NotEnoughGpusError(message, nb_gpus=request.nb_gpus, verdicts=verdicts)


def holders_now(view: HostView) -> dict[str, Holder]:
    """Return UUID -> holder of the GPUs that are held now. Takes no lock.

    Raises:
        StateDirError: the claims cannot be read.
    """
    uuids = () if view.around else (gpu.uuid for gpu in view.snapshot.gpus)
    claims, elsewhere = claims_now(uuids, view.snapshot.name_prefix)
    return {**dict.fromkeys(elsewhere, Holder(elsewhere=True)), **claims.holders(view.inside)}


def _judge(view: HostView, holders: dict[str, Holder]) -> tuple[GpuVerdict, ...]:
    verdicts = view.judge(holders)
    refuse_gpus_of_ancestors(verdicts, {gpu.uuid for gpu in view.usable}, view.request, inside=bool(view.around))
    return verdicts
