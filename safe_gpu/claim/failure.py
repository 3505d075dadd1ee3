"""A placeholder that fails: what is said of it, and which GPU is the cause, so that claims take it last."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from ..coordination.faults import write_fault
from ..drivers.base import Driver
from ..errors import NoDriverError, PlaceholderError, SafeGpuError
from ..gpus.devices import LAST_CHOICE, Gpu, GpuFault
from ..host.procfs import describe_process
from ..runtimes import placeholders
from ..runtimes.causes import Circumstances, blames_gpu, is_explained, likely_cause, root_of, seconds_last
from ..runtimes.visible_devices import render_visible
from ..selection.verdicts import users_of
from .checks import change_notes, process_text
from .claim import Claim
from .view import HostView

# For so long a child process may take that starts CUDA on one GPU, in seconds.
_PATIENCE = 30.0


class FailedPlaceholder:
    """A placeholder that failed on a GPU of a claim.

    Args:
        device_no: the ordinal of the GPU.
        err: the error.
    """

    def __init__(
        self, view: HostView, claim: Claim, driver: Driver, placeholder: Any, device_no: int, err: PlaceholderError
    ) -> None:
        self._view = view
        self._claim = claim
        self._driver = driver
        self._placeholder = placeholder
        self._own_context = placeholders.makes_own_context(placeholder)
        self._device_no = device_no
        self._err = err

    def error(self, works_on: Callable[[int], bool], logger: Any) -> PlaceholderError:
        """Return the error of the claim: with the likely cause, the GPU, and who else is on it. If the GPU is the
        cause, that is noted for the claims to come, which take it last.

        Args:
            works_on: tries the placeholder on another GPU of the claim, by its ordinal, and returns whether it works.
        """
        blamed = self._blamed(works_on)
        device_no = self._device_no
        if blamed is not None:
            device_no = blamed
        gpu = self._claim.gpus[device_no]
        where = self._circumstances(gpu)
        what = self._what_failed(where)
        logger.error("Failed to acquire placeholder on GPU %s: %s", gpu.label, what)
        facts = f"GPU {gpu.label}, {gpu.uuid}"
        if where.others:
            facts += f"; on it: {where.others}"
        text = f"{what} [{facts}]"
        if blamed is not None:
            text += self._note(gpu, text, seconds_last(self._err, where), logger)
        return PlaceholderError(text, device_no=device_no, uuid=gpu.uuid)

    def _note(self, gpu: Gpu, text: str, lasts: float, logger: Any) -> str:
        """Note that a claim failed on a GPU, for that many seconds, and return what the error says of that; "" if it is
        not to be noted."""
        if not lasts:
            return ""
        fault = GpuFault(time.time(), text, lasts)
        change_notes([gpu], lambda state_dir, uuid: write_fault(state_dir, uuid, fault), logger)
        how_long = "an hour"
        if lasts == LAST_CHOICE:
            how_long = "a day"
        return f"; GPU {gpu.label} is taken last for {how_long}: start a new process"

    def _what_failed(self, where: Circumstances) -> str:
        """Return what has failed and why, for people."""
        name = placeholders.name_of(self._placeholder)
        if self._driver.is_simulated and isinstance(self._placeholder, placeholders.Base):
            return f"{name} needs a GPU, and those of {self._driver.name} are simulated: leave placeholder_fn out"
        text = str(self._err)
        cause = self._err.__cause__
        if cause is not None:
            text = text.removesuffix(likely_cause(cause))  # which was guessed without the facts
        return f"{text}{likely_cause(root_of(self._err), where)}"

    def _blamed(self, works_on: Callable[[int], bool]) -> int | None:
        """Return the ordinal of the GPU that may be the cause; None if no single GPU is."""
        number = len(self._claim.gpus)
        if number == 1:
            return self._device_no
        # The start of CUDA or HIP looks at all visible GPUs and does not say which is bad.
        failed_at_start = any(call in str(root_of(self._err)) for call in ("cuInit", "hipGetDeviceCount"))
        if not failed_at_start and blames_gpu(self._err):
            return self._device_no
        if not self._own_context or is_explained(self._err, self._circumstances(self._claim.gpus[self._device_no])):
            return None
        if failed_at_start:
            return self._failing_alone()
        if self._device_no > 0 or any(works_on(other) for other in range(1, number)):
            return self._device_no
        return None

    def _failing_alone(self) -> int | None:
        """Return the ordinal of the first GPU on which CUDA does not start in a process that sees no other; None if it
        starts on all, or on none."""
        failing: int | None = None
        working = False
        for device_no, gpu in enumerate(self._claim.gpus):
            if self._starts_on(gpu):
                working = True
            elif failing is None:
                failing = device_no
            if working and failing is not None:
                return failing
        return None

    def _starts_on(self, gpu: Gpu) -> bool:
        shown = render_visible([gpu], visible_as="uuid", snapshot=self._claim.before, environ=os.environ)
        try:
            return bool(self._driver.runtime.visible_in_child({**os.environ, **shown}, patience=_PATIENCE))
        except NoDriverError:
            return False

    def _circumstances(self, gpu: Gpu) -> Circumstances:
        """Return what is known of a GPU now."""
        view = self._view
        try:
            (now,) = self._driver.usage((gpu,))
            processes = [process for process in now.processes or () if process.pid not in view.own]
            others = ", ".join(process_text(process) for process in users_of(now, processes, describe_process))
        except SafeGpuError as err:
            now = gpu._replace(memory_free=None)
            others = str(err)
        return Circumstances(now, others, self._own_context, view.is_frozen)
