"""What holds the claimed GPUs: a placeholder on each, none of which is lost when a signal handler raises."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from ..errors import CudaInitializedError, PlaceholderError
from ..runtimes import placeholders

if TYPE_CHECKING:
    from ..coordination.signals import DeferredSignals
    from ..drivers.base import Driver
    from ..runtimes.library import Runtime

initializers: dict[int, str] = {}
"""Pid of a process in which a claim's placeholder initialised CUDA -> the name of that placeholder. CUDA stays
initialised when the placeholder is released."""


class PlaceholderSet:
    """The placeholders of a claim.

    Attributes:
        make: called with an ordinal; returns a placeholder.
        placed: the placeholders, by ordinal.
    """

    def __init__(self, signals: DeferredSignals) -> None:
        self.make: Any = None
        self.placed: list[Any] = []
        self._signals = signals
        self._simulated = ""
        self._was_initialized = False

    def prepare(self, driver: Driver, placeholder_fn: Any, logger: Any) -> None:
        """Import what the placeholder needs, and check that this does no more; None is the default of the driver.

        Raises:
            CudaInitializedError: it initialised the library.
            PlaceholderError: as for :func:`~safe_gpu.runtimes.placeholders.prepare`.
        """
        runtime = driver.runtime
        self.make = runtime.default_placeholder(logger) if placeholder_fn is None else placeholder_fn
        self._simulated = driver.name if driver.is_simulated and isinstance(self.make, placeholders.Base) else ""
        self._was_initialized = runtime.visible_if_initialized() is not None
        placeholders.prepare(self.make)
        if not self._was_initialized and runtime.visible_if_initialized() is not None:
            raise CudaInitializedError(
                "the placeholder's prepare() initialised CUDA, which fixed the GPUs that this process sees: prepare() "
                "may only import; initialise CUDA when the placeholder is called"
            )

    def remember_initializer(self, runtime: Runtime) -> None:
        """Store whether the placeholders have initialised CUDA, for the error of a later claim."""
        if not self._was_initialized and runtime.shown_at(0) is not None:
            initializers[os.getpid()] = placeholders.name_of(self.make)

    @property
    def on_gpu(self) -> bool:
        """Whether the driver sees a process on the GPU because of it; not so of ``NoPlaceholder``."""
        return placeholders.holds_gpu(self.make)

    @property
    def own_function(self) -> str:
        """The name of the program's own placeholder; "" for one of this package."""
        return "" if placeholders.is_builtin(self.make) else placeholders.name_of(self.make)

    def place(self) -> None:
        """Make the placeholder of the next ordinal.

        Raises:
            PlaceholderError: it cannot be made.
        """
        try:
            with self._signals, self._passing():  # nothing comes between the context and its place in the list
                self.placed.append(placeholders.allocate(self.make, len(self.placed)))
        except PlaceholderError as err:
            if not self._simulated:
                raise
            raise PlaceholderError(
                f"{placeholders.name_of(self.make)} needs a GPU, and those of {self._simulated} are simulated: leave "
                "placeholder_fn out",
                device_no=err.device_no,
            ) from err

    def give_back(self, placeholder: Any) -> None:
        """Release one that is no longer in ``placed``."""
        with self._passing():
            placeholders.release(self.make, placeholder)

    def _passing(self) -> AbstractContextManager[object]:
        """Let handlers of signals run in a placeholder of the program's own, which may take any time."""
        return nullcontext() if placeholders.is_builtin(self.make) else self._signals.delivering()
