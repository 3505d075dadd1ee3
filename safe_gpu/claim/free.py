"""Functions that claim nothing: they list, judge and wait for GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..coordination.closed import closed_now
from ..coordination.holders import claims_now
from ..drivers import opened_driver
from ..gpus.devices import Holder
from ..host.procfs import describe_process
from ..selection.request import Conditions, Selection, parse_request
from ..selection.verdicts import Rules, judge
from ..wording.argument_style import ArgumentStyle
from .arguments import read_options
from .host.host_view import HostView
from .search.search import wait_until_free
from .times import DEFAULT, DefaultTimeout

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..gpus.devices import Gpu, GpuVerdict, HostSnapshot
    from ..gpus.visible import VisibleLimit
    from .messages.wait_status import WaitStatus


def wait_for_gpus(
    nb_gpus: int | str | tuple[int, int] = 1,
    *,
    timeout: float | str | DefaultTimeout | None = None,
    hold_for: float | str | DefaultTimeout | None = DEFAULT,
    vendor: str | None = None,
    logger: Any = None,
    on_wait: Callable[[WaitStatus], None] | None = None,
    spelling: type[ArgumentStyle] = ArgumentStyle,
    **conditions: Unpack[Conditions],
) -> tuple[Gpu, ...]:
    """Wait in the queue until a claim with these arguments would succeed, but claim nothing. The errors are the same.

    Args:
        conditions: ``min_memory``, ``model`` and the others of :func:`~safe_gpu.claim_gpus`.

    Returns:
        The GPUs that the claim would have got. Another process may take them at any time.
    """
    arguments = {name: value for name, value in locals().items() if name != "conditions"}
    options = read_options(**arguments, **conditions)
    with opened_driver(**options.request.driver) as driver:
        return wait_until_free(HostView(driver, driver.snapshot(), options.request), options)


def get_free_gpus(*, vendor: str | None = None) -> list[str]:
    """Return the indices of the GPUs that nobody holds or uses, in numeric order. The result may be outdated at once.

    CUDA_VISIBLE_DEVICES is not considered, and GPUs that this process holds are not free. A MIG instance is ``"3:1"``.

    Args:
        vendor: as for :func:`~safe_gpu.claim_gpus`, whose default it has too.
    """
    request = parse_request(1, vendor=vendor)
    with opened_driver(**request.driver) as driver:
        snapshot = driver.snapshot()
    return [verdict.gpu.label for verdict in current_verdicts(snapshot, Selection()) if verdict.free]


def current_verdicts(
    snapshot: HostSnapshot, request: Selection, visible_limit: VisibleLimit | None = None, *, inside: str = ""
) -> tuple[GpuVerdict, ...]:
    """Return which GPUs of a new poll a request could have, with the holders of the others.

    Args:
        inside: hash of the token of the claim inside which it would be made; "" for none.

    Raises:
        StateDirError: the claims cannot be read.
        UnsatisfiableRequestError: a variable that sets a rule has no valid value.
    """
    uuids = () if inside else (gpu.uuid for gpu in snapshot.gpus)
    claims, elsewhere = claims_now(uuids, snapshot.name_prefix)
    claimed = {**dict.fromkeys(elsewhere, Holder(elsewhere=True)), **claims.holders(inside)}
    rules = Rules.of(os.environ)._replace(drained=closed_now())
    return judge(
        snapshot, request, claimed=claimed, visible_limit=visible_limit, describe=describe_process, rules=rules
    )
