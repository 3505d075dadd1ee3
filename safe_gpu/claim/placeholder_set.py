"""What holds the claimed GPUs: a placeholder on each, none of which is lost when a signal handler raises."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from ..errors import PlaceholderError
from ..runtimes import placeholders
from .host.visible_limit import prepare_only

if TYPE_CHECKING:
    from ..coordination.signals import DeferredSignals
    from ..drivers.base import Driver


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

    def prepare(self, driver: Driver, placeholder_fn: Any, logger: Any) -> None:
        """Import what the placeholder needs; None is the default of the driver. Errors as for ``prepare_only``."""
        self.make = driver.runtime.default_placeholder(logger) if placeholder_fn is None else placeholder_fn
        self._simulated = driver.name if driver.is_simulated and isinstance(self.make, placeholders.Base) else ""
        prepare_only(self.make, driver.runtime)

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
