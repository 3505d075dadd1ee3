"""The check with the leases held: a second poll must find the GPUs still free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...coordination.files.state_dir import opened
from ...coordination.locks.legacy_lock import take_legacy_lock
from ...coordination.signals import DeferredSignals

if TYPE_CHECKING:
    from ..arguments import ClaimOptions
    from ..held import Claim
    from ..host.host_view import HostView


def confirm(view: HostView, claim: Claim, options: ClaimOptions) -> bool:
    """Poll again, with the leases and the lock of the older package held. Return whether the GPUs are still
    free.

    If they are not, or the claim around this one has ended, the claim is released.
    """
    if not view.outer.still_has(claim.gpus, view.scope):
        claim.release()
        return False
    with DeferredSignals() as signals:
        claim.legacy = take_legacy_lock(None if options.timeout is None else options.deadline, options.logger, signals)
    view.polls.poll_again(claim.gpus)
    claim.before, claim.explained = view.snapshot, view.explained
    if claim.beneath:
        with opened("leases") as leases:
            view.see_sharers(leases, claim.gpus)
    now = (view.snapshot.by_uuid(gpu.uuid) for gpu in claim.gpus)
    verdicts = {verdict.gpu.uuid: verdict for verdict in view.judge({}, [gpu for gpu in now if gpu is not None])}
    for gpu in claim.gpus:
        verdict = verdicts.get(gpu.uuid)
        if verdict is None or not verdict.free:
            reason = "it is gone" if verdict is None else verdict.reason
            options.logger.info("GPU %s was taken meanwhile (%s): starting over", gpu.label, reason)
            claim.release()
            view.polls.poll()  # before others are chosen
            return False
    claim.gpus = tuple(verdicts[gpu.uuid].gpu for gpu in claim.gpus)
    return True
