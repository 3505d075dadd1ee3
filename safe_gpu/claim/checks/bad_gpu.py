"""A claim that gets a bad GPU: it notes that for the claims to come, and takes other GPUs if it still can.

CUDA reads CUDA_VISIBLE_DEVICES once. After a context was attempted in this process the choice of GPUs is fixed, so
another GPU needs another process. What can be known before is asked in a child process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ...coordination.faults import clear_fault, write_fault
from ...coordination.signals import DeferredSignals
from ...coordination.state_dir import state_dir_path
from ...errors import CudaInitializedError, NoDriverError, PlaceholderError, StateDirError
from ...gpus.devices import Gpu, GpuFault
from ...runtimes.causes import blames_gpu
from ...selection.choice import capacity
from ...selection.verdicts import LAST_CHOICE_TEXT

if TYPE_CHECKING:
    from ..claim import Claim
    from ..host.host_view import HostView


class BadGpuFallback:
    """What one claim learns of bad GPUs, from its first GPU to its last placeholder.

    Args:
        view: of this claim.
        logger: gets a warning for each bad GPU.
    """

    def __init__(self, view: HostView, logger: Any) -> None:
        self._view = view
        self._logger = logger
        self._sound: set[str] = set()  # worked in a child of this process
        self._failed_here = False  # a placeholder has failed in this process
        self._of_the_gpu = False  # the latest failure speaks of the GPU

    def try_suspects(self, claim: Claim) -> None:
        """Try the claimed GPUs of which an earlier claim noted a failure, before this process touches them.

        CUDA_VISIBLE_DEVICES has been set. After a failure in this process, all GPUs of the next claim are tried.

        Raises:
            PlaceholderError: one of them still fails.
        """
        doubtful = [
            (device_no, gpu)
            for device_no, gpu in enumerate(claim.gpus)
            if self._failed_here or gpu.uuid in self._view.faults
        ]
        if not doubtful or self._is_fixed():  # this process may be on the GPU already, and keep a child out
            return
        for device_no, gpu in doubtful:
            reason = self._try(gpu, device_no)
            if reason:
                self._of_the_gpu = True
                raise _error(f"GPU {gpu.label} was tried first and failed: {reason}", gpu, device_no)

    def described(self, err: PlaceholderError, gpu: Gpu, device_no: int, others: str) -> PlaceholderError:
        """Return the error of a placeholder in this process, with the GPU and the ``others`` on it."""
        self._failed_here = True
        self._logger.error("Failed to acquire placeholder on GPU %s: %s", gpu.label, err)
        self._of_the_gpu = blames_gpu(err, rivals=bool(others))
        return _error(str(err), gpu, device_no, others)

    def exclude(self, claim: Claim, err: PlaceholderError) -> None:
        """Note which of the claimed GPUs is bad, and return if the claim may try others.

        Raises:
            PlaceholderError: the error as it is, if it does not speak of a GPU; or with what to do about that GPU.
        """
        bad = self._bad(claim, err)
        if not bad:
            raise err

        fault = GpuFault(time.time(), str(err))
        self._with_notes(bad, lambda state_dir, uuid: write_fault(state_dir, uuid, fault))
        last = f"GPU {_labels(bad)} is taken last for {LAST_CHOICE_TEXT}"
        uuids = {gpu.uuid for gpu in bad}
        if capacity([gpu for gpu in self._view.usable if gpu.uuid not in uuids]) < self._view.request.nb_gpus:
            raise _further(err, f"{last}, but this claim can get too few others") from err
        if self._is_fixed():
            raise _further(err, f"{last}: start a new process") from err
        self._logger.warning("%s; %s, and this claim tries others", err, last)
        self._view.give_up(dict.fromkeys(uuids, f"it failed in this claim: {err}"))

    def clear_notes(self, claim: Claim, *, holding: bool) -> None:
        """Clear the notes on the GPUs of a claim that works.

        Args:
            holding: whether a placeholder is on them.
        """
        noted = [gpu for gpu in claim.gpus if gpu.uuid in self._view.faults]
        sound = [gpu for gpu in noted if holding or gpu.uuid in self._sound]
        if sound:
            self._with_notes(sound, clear_fault)

    # What is bad

    def _bad(self, claim: Claim, err: PlaceholderError) -> list[Gpu]:
        if not self._of_the_gpu:
            return []
        suspects = [gpu for gpu in claim.gpus if gpu.uuid == err.uuid]
        if len(claim.gpus) > 1 and _of_init(err):  # cuInit looks at all visible GPUs and does not say which is bad
            suspects = [gpu for device_no, gpu in enumerate(claim.gpus) if self._try(gpu, device_no)]
        bad = [gpu for gpu in suspects if gpu.uuid not in self._sound]
        if suspects and not bad:
            raise _further(err, f"GPU {_labels(suspects)} works in another process: start a new process") from err
        return bad

    def _is_fixed(self) -> bool:
        """Return whether CUDA is initialised in this process, so that its GPUs cannot be changed any more."""
        try:
            return self._view.polls.driver.runtime.visible_if_initialized() is not None
        except CudaInitializedError:
            return True

    # Trials

    def _try(self, gpu: Gpu, device_no: int) -> str:
        """Try a claimed GPU without touching CUDA in this process. Returns what is wrong with it, or ""."""
        if gpu.uuid in self._sound:
            return ""
        try:
            self._view.polls.driver.runtime.try_gpu(gpu, device_no, self._logger)
        except (NoDriverError, PlaceholderError) as err:
            if blames_gpu(err) or "did not answer" in str(err):
                return str(err)
            self._logger.warning("GPU %s could not be tried: %s", gpu.label, err)
            return ""
        self._sound.add(gpu.uuid)
        return ""

    def _with_notes(self, gpus: Iterable[Gpu], change: Callable[[str, str], None]) -> None:
        """Change the notes on these GPUs. A note that cannot be changed does no harm."""
        try:
            with DeferredSignals():
                for gpu in gpus:
                    change(state_dir_path(), gpu.uuid)
        except (StateDirError, OSError) as err:
            self._logger.warning("the note that a GPU failed cannot be changed: %s", err)


def _of_init(err: BaseException) -> bool:
    while err.__cause__ is not None:
        err = err.__cause__
    return "cuInit" in str(err)


def _labels(gpus: Iterable[Gpu]) -> str:
    return ",".join(gpu.label for gpu in gpus)


def _error(text: str, gpu: Gpu, device_no: int, others: str = "") -> PlaceholderError:
    on_it = f"; on it: {others}" if others else ""
    return PlaceholderError(f"{text} [GPU {gpu.label}, {gpu.uuid}{on_it}]", device_no=device_no, uuid=gpu.uuid)


def _further(err: PlaceholderError, text: str) -> PlaceholderError:
    return PlaceholderError(f"{err}; {text}", device_no=err.device_no, uuid=err.uuid)
