"""What holds the claimed GPUs: a placeholder on each. None is lost when a signal handler raises."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from ..runtimes import placeholders
from ..runtimes.visible_limit import prepare_only

if TYPE_CHECKING:
    from ..coordination.signals import DeferredSignals
    from ..runtimes.runtime import Runtime


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

    def prepare(self, runtime: Runtime, placeholder_fn: Any, logger: Any) -> None:
        """Import what the placeholder needs; None is the default of the runtime. Errors as for ``prepare_only``."""
        self.make = runtime.default_placeholder(logger) if placeholder_fn is None else placeholder_fn
        prepare_only(self.make, runtime)

    @property
    def on_gpu(self) -> bool:
        """Whether the driver sees a process on the GPU because of it; not so of ``NoPlaceholder``."""
        return placeholders.holds_gpu(self.make)

    def place(self) -> None:
        """Make the placeholder of the next ordinal.

        Raises:
            PlaceholderError: it cannot be made.
        """
        with self._signals, self._passing():  # nothing comes between the context and its place in the list
            self.placed.append(placeholders.allocate(self.make, len(self.placed)))

    def give_back(self, placeholder: Any) -> None:
        """Release one that is no longer in ``placed``."""
        with self._passing():
            placeholders.release(self.make, placeholder)

    def _passing(self) -> AbstractContextManager[object]:
        """In a placeholder of the program's own, which may take any time, handlers of signals run."""
        return nullcontext() if placeholders.is_builtin(self.make) else self._signals.passing()
