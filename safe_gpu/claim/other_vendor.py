"""Hosts with GPUs of two vendors: a request that those of the default vendor can never satisfy, and the others can."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from ..drivers import may_be_several, open_drivers
from ..drivers.vendors import NAMES, meant_vendor
from ..errors import SafeGpuError, UnsatisfiableRequestError
from ..selection.choice import check_possible

if TYPE_CHECKING:
    from ..devices import GpuRequest
    from ..selection.request import Rules


def with_way_out(err: UnsatisfiableRequestError, request: GpuRequest, rules: Rules) -> UnsatisfiableRequestError:
    """The error of a claim, which also names the vendor to ask for where the GPUs of another one would do."""
    vendor = _that_fits(request, rules)
    if not vendor:
        return err
    way_out = request.spelling.setting("vendor", request.spelling.value(vendor))
    return UnsatisfiableRequestError(
        f"{err} (the {NAMES[vendor]} GPUs of this host would do: {way_out})", value=err.value, verdicts=err.verdicts
    )


def _that_fits(request: GpuRequest, rules: Rules) -> str:
    """The first vendor whose GPUs here can satisfy the request; "" if there is none, or the vendor was no default."""
    if request.vendor is not None or meant_vendor(os.environ, request.named_vendor) or not may_be_several():
        return ""
    with suppress(SafeGpuError):
        drivers, _ = open_drivers()
        try:
            for driver in drivers:
                with suppress(SafeGpuError):
                    snapshot = driver.snapshot()
                    check_possible(snapshot, request, rules=rules)
                    return snapshot.vendor
        finally:
            for driver in drivers:
                driver.close()
    return ""
