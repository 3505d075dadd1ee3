"""Functions that claim nothing: list the free GPUs, judge all GPUs, and wait until enough are free."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import settings
from ..argument_style import ArgumentStyle
from ..coordination.holders import lease_holders
from ..coordination.leases import drained_gpus
from ..coordination.locks import MINIMUM_PATIENCE, HostLock
from ..devices import Gpu
from ..drivers import opened_driver
from ..procfs import describe_process
from ..selection.request import Rules, Selection, parse_request
from ..selection.verdicts import judge
from .options import read_options
from .search import wait_until_free
from .times import DEFAULT, DefaultTimeout
from .view import HostView

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..devices import GpuVerdict, HostSnapshot
    from ..runtimes.visible_devices import VisibleLimit
    from ..selection.request import Conditions
    from .messages import WaitStatus


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
        return wait_until_free(HostView.of(driver, driver.snapshot(), options.request), options)


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
    snapshot: HostSnapshot, request: Selection, visible_limit: VisibleLimit | None = None, *, inner: bool = False
) -> tuple[GpuVerdict, ...]:
    """Return which GPUs of a new poll a request could have, with the holders of the others.

    Args:
        inner: whether the claim would be made inside another claim.

    Raises:
        LockTimeout, StateDirError: the leases cannot be read.
        UnsatisfiableRequestError: a variable that sets a rule has no valid value.
    """
    leased = lease_holders(snapshot.gpus, inner=inner, prefix=snapshot.name_prefix)
    rules = Rules.of(os.environ)._replace(drained=drained_gpus())
    return judge(snapshot, request, leased=leased, visible_limit=visible_limit, describe=describe_process, rules=rules)


def remaining_quota(snapshot: HostSnapshot, nb_gpus: int) -> float:
    """Return how many GPUs more the policy of this host lets this user hold; ``math.inf`` if nothing limits that.

    Args:
        nb_gpus: how many would be claimed at once.

    Raises:
        UnsatisfiableRequestError: the policy never allows that many.
        PolicyError: the policy file cannot be used. LockTimeout, StateDirError: the leases cannot be read.
    """
    path = settings.existing_policy(os.environ)
    if path is None:
        return math.inf
    import logging

    from .quota import check_count, quota_of

    quota = quota_of(path, logging.getLogger("safe_gpu").warning)
    if quota is None or quota.limits.max_gpus is None:
        return math.inf
    check_count(nb_gpus, quota.limits)
    with HostLock(time.monotonic() + MINIMUM_PATIENCE) as host:
        spent = quota.holdings(host.leases, snapshot.gpus, {}).own_spent(Selection(quota.limits.max_gpus + 1))
    assert spent is not None  # one GPU more than the limit is never allowed
    return spent.most - spent.held
