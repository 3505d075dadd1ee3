"""The library of a vendor, as a claim asks it.

None of this has run on AMD or Intel hardware. ``tools/first_run_amd.py`` checks there what is taken for granted here.
"""

import os
from collections.abc import Mapping
from typing import Any

from ..errors import NoDriverError
from ..gpus.devices import Gpu, HostSnapshot
from ..gpus.visible import HIERARCHY
from .child import ask_child
from .placeholders import (
    CudaPlaceholder,
    HipPlaceholder,
    LevelZeroPlaceholder,
    NoPlaceholder,
    allocate,
    module_of,
    release,
)
from .visible_devices import render_visible


class Runtime:
    """A vendor's library, through which programs use its GPUs, as it is in this process.

    This class is for GPUs that no library knows: simulated ones.

    Nothing but the placeholder initialises the library in this process. A GPU that the library shows is named by a text
    that only :meth:`is_same` compares with a GPU of the driver.

    Attributes:
        title: what messages call the library.
        asks_library: whether there is such a library, and the GPUs of the driver are those that it sees here.
    """

    title = "CUDA"
    asks_library = False

    def visible_if_initialized(self) -> tuple[str, ...] | None:
        """Return the GPUs that the library sees in this process, in the order of its ordinals; None: it is not
        initialised.

        Raises:
            CudaInitializedError: it is initialised, but its GPUs cannot be listed.
        """
        return None

    def shown_at(self, ordinal: int) -> str | None:
        """Return the GPU with this ordinal; "" if there is none, None if the library is not initialised or cannot be
        asked."""
        return None

    def is_same(self, shown: str, gpu: Gpu) -> bool:
        """Return whether a GPU that the library shows is this GPU of the driver."""
        return shown == gpu.uuid

    def contexts(self) -> frozenset[str]:
        """Return the UUIDs of the GPUs on which this process has a context that is known to the library."""
        return frozenset()

    def visible_in_child(self, env: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """Return the GPUs that the library shows to a child process with this environment (None: that of this process).

        Raises:
            NoDriverError: it could not be asked.
        """
        raise NoDriverError("these GPUs are simulated", driver="simulated")

    def try_gpu(self, gpu: Gpu, ordinal: int, logger: Any) -> None:
        """Use a GPU, which this process knows by this ordinal, without initialising the library in this process.

        Raises:
            NoDriverError, PlaceholderError: it does not work; the message says why.
        """
        trial = self.default_placeholder(logger)
        release(trial, allocate(trial, ordinal))

    def default_placeholder(self, logger: Any = None) -> Any:
        """Return the placeholder that holds these GPUs when the caller names none."""
        raise NotImplementedError


class _LibraryRuntime(Runtime):
    """What the runtimes of all vendors have in common."""

    asks_library = True

    def visible_if_initialized(self) -> tuple[str, ...] | None:
        visible: tuple[str, ...] | None = module_of(self.title).visible_if_initialized()
        return visible

    def shown_at(self, ordinal: int) -> str | None:
        shown: str | None = module_of(self.title).shown_at(ordinal)
        return shown

    def visible_in_child(self, env: Mapping[str, str] | None = None) -> tuple[str, ...]:
        return ask_child("list", os.environ if env is None else env, library=self.title)

    def try_gpu(self, gpu: Gpu, ordinal: int, logger: Any) -> None:
        """Hold a GPU in a child process."""
        only = render_visible([gpu], visible_as="uuid", snapshot=HostSnapshot((gpu,)))
        ask_child("hold", {**os.environ, **only}, library=self.title)


class CudaRuntime(_LibraryRuntime):
    """CUDA in this process. A GPU is named by its UUID."""

    def is_same(self, shown: str, gpu: Gpu) -> bool:
        from . import cuda

        return cuda.same_device(shown, gpu.uuid)

    def contexts(self) -> frozenset[str]:
        from . import cuda

        return cuda.active_contexts()

    def default_placeholder(self, logger: Any = None) -> CudaPlaceholder:
        return CudaPlaceholder(logger)


class HipRuntime(_LibraryRuntime):
    """HIP in this process. A GPU is named by UUID and bus id."""

    title = "HIP"

    def is_same(self, shown: str, gpu: Gpu) -> bool:
        from . import hip

        return hip.is_same_gpu(shown, gpu.uuid, gpu.pci_bus_id)

    def default_placeholder(self, logger: Any = None) -> HipPlaceholder:
        return HipPlaceholder(logger)


class LevelZeroRuntime(_LibraryRuntime):
    """Level Zero in this process. A GPU is named by its bus id, and ordinals count cards."""

    title = "Level Zero"

    def is_same(self, shown: str, gpu: Gpu) -> bool:
        return shown == gpu.pci_bus_id

    def try_gpu(self, gpu: Gpu, ordinal: int, logger: Any) -> None:
        """Hold a card in a child process, under the hierarchy in which its number is the index."""
        cards = {**os.environ, HIERARCHY: "COMPOSITE"}
        only = render_visible([gpu], visible_as="index", snapshot=HostSnapshot((gpu,)), environ=cards)
        ask_child("hold", {**cards, **only}, library=self.title)

    def default_placeholder(self, logger: Any = None) -> LevelZeroPlaceholder | NoPlaceholder:
        placeholder = LevelZeroPlaceholder(logger)
        try:
            placeholder.prepare()
        except NoDriverError as err:
            placeholder.logger.warning(f"No placeholder is put on the GPUs, so others see them as free: {err}")
            return NoPlaceholder(logger)
        return placeholder


CUDA = CudaRuntime()

HIP = HipRuntime()

LEVEL_ZERO = LevelZeroRuntime()
