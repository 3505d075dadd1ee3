"""What a claim asks of the library through which programs use the GPUs of one vendor. See :class:`Runtime`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..devices import Gpu


class Runtime:
    """A vendor's library as it is in this process. This class is for GPUs that no library knows: simulated ones.

    Nothing but the placeholder initialises the library in this process. A GPU that the library shows is named by a text
    that only :meth:`is_same` compares with a GPU of the driver.

    Attributes:
        title: what messages call the library.
        real: whether there is such a library, and the GPUs of the driver are those that it sees in this process.
    """

    title = "CUDA"
    real = False

    def visible_if_initialized(self) -> tuple[str, ...] | None:
        """The GPUs that the library sees in this process, in the order of its ordinals; None: it is not initialised.

        Raises:
            CudaInitializedError: it is initialised, but its GPUs cannot be listed.
        """
        return None

    def shown_at(self, ordinal: int) -> str | None:
        """The GPU with this ordinal; "" if there is none, None if the library is not initialised or cannot be asked."""
        return None

    def is_same(self, shown: str, gpu: Gpu) -> bool:
        """Whether a GPU that the library shows is this GPU of the driver."""
        return shown == gpu.uuid

    def contexts(self) -> frozenset[str]:
        """UUIDs of the GPUs on which this process has a context that is known to the library."""
        return frozenset()

    def visible_in_child(self, env: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """The GPUs that the library shows to a child process with this environment (None: that of this process).

        Raises:
            NoDriverError: it could not be asked.
        """
        from ..errors import NoDriverError

        raise NoDriverError("these GPUs are simulated", driver="simulated")

    def try_gpu(self, gpu: Gpu, ordinal: int, logger: Any) -> None:
        """Use a GPU, which this process knows by this ordinal, without initialising the library in this process.

        Raises:
            NoDriverError, PlaceholderError: it does not work; the message says why.
        """
        from .placeholders import allocate, release

        trial = self.default_placeholder(logger)
        release(trial, allocate(trial, ordinal))

    def default_placeholder(self, logger: Any = None) -> Any:
        """The placeholder that holds these GPUs when the caller names none."""
        raise NotImplementedError
