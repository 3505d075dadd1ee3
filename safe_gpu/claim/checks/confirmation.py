"""The check with the GPUs held: a second poll must find them still free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...coordination.holders import living_claims
from ...coordination.older_package import older_package_counts, take_older_package_lock
from ...coordination.signals import DeferredSignals

if TYPE_CHECKING:
    from ..arguments import ClaimOptions
    from ..claim import Claim
    from ..host.host_view import HostView


def confirm(view: HostView, claim: Claim, options: ClaimOptions) -> bool:
    """Poll again, with the GPUs and the lock of the older package held. Return whether the GPUs are still free.

    If they are not, the claim is released.
    """
    if older_package_counts():
        deadline = None if options.timeout is None else options.deadline
        with DeferredSignals() as signals:
            claim.older = take_older_package_lock(deadline, options.logger, signals)
    view.polls.poll_again(claim.gpus)
    claim.before, claim.explained = view.snapshot, view.explained
    if claim.share is not None:
        view.see(one for one in living_claims() if one.file != claim.file)
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
