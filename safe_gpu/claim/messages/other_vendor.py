"""A request that the GPUs of the default vendor can never satisfy, and those of another one on this host can."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from ...drivers import may_be_several, open_drivers
from ...drivers.vendors import meant_vendor
from ...errors import SafeGpuError, UnsatisfiableRequestError
from ...gpus.vendors import VENDORS
from ...selection.choice import check_possible

if TYPE_CHECKING:
    from ...selection.request import Selection
    from ...selection.verdicts import Rules


def with_way_out(err: UnsatisfiableRequestError, request: Selection, rules: Rules) -> UnsatisfiableRequestError:
    """Return the error of a claim, with the vendor to ask for if its GPUs here can satisfy the request."""
    vendor = _that_fits(request, rules)
    if not vendor:
        return err
    way_out = request.spelling.setting("vendor", request.spelling.value(vendor))
    return UnsatisfiableRequestError(
        f"{err} (the {VENDORS[vendor].title} GPUs of this host fit: {way_out})", value=err.value, verdicts=err.verdicts
    )


def _that_fits(request: Selection, rules: Rules) -> str:
    """Return the first vendor whose GPUs here can satisfy the request; "" if there is none, or the vendor was no
    default."""
    if request.vendor is not None or meant_vendor(os.environ, request.named_vendor) or not may_be_several():
        return ""
    with suppress(SafeGpuError):
        drivers, _ = open_drivers()
        try:
            for driver in drivers:
                with suppress(SafeGpuError):
                    snapshot = driver.snapshot()
                    check_possible(snapshot, request.resolved(snapshot), rules=rules)
                    return snapshot.vendor
        finally:
            for driver in drivers:
                driver.close()
    return ""
