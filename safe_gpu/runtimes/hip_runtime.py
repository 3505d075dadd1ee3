"""The HIP runtime as a :class:`~safe_gpu.runtimes.runtime.Runtime`, and its default placeholder.

None of this has run on AMD hardware. ``tools/first_run_amd.py`` checks there what is taken for granted here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .placeholders import Base, failed, name_of
from .runtime import Runtime

if TYPE_CHECKING:
    from ..devices import Gpu
    from .hip_memory import HipMemory


class HipRuntime(Runtime):
    """HIP in this process. A GPU is named by UUID and bus id."""

    title = "HIP"
    real = True

    def visible_if_initialized(self) -> tuple[str, ...] | None:
        """See :func:`~safe_gpu.runtimes.hip.visible_if_initialized`."""
        from . import hip

        return hip.visible_if_initialized()

    def shown_at(self, ordinal: int) -> str | None:
        """See :func:`~safe_gpu.runtimes.hip.shown_at`."""
        from . import hip

        return hip.shown_at(ordinal)

    def is_same(self, shown: str, gpu: Gpu) -> bool:
        """See :func:`~safe_gpu.runtimes.hip.is_same_gpu`."""
        from . import hip

        return hip.is_same_gpu(shown, gpu.uuid, gpu.pci_bus_id)

    def visible_in_child(self, env: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """The GPUs that HIP shows to a child process with this environment."""
        from .library_child import ask_child

        return ask_child("list", os.environ if env is None else env, library="HIP")

    def try_gpu(self, gpu: Gpu, ordinal: int, logger: Any) -> None:
        """Allocate memory on a GPU in a child process."""
        from ..devices import HostSnapshot
        from .library_child import ask_child
        from .variables import render_visible

        only = render_visible([gpu], visible_as="uuid", snapshot=HostSnapshot((gpu,)))
        ask_child("hold", {**os.environ, **only}, library="HIP")

    def default_placeholder(self, logger: Any = None) -> HipPlaceholder:
        """A minimal allocation through HIP."""
        return HipPlaceholder(logger)


HIP = HipRuntime()


class HipPlaceholder(Base):
    """The default on AMD GPUs: a small allocation through HIP, freed on release.

    HIP stays initialised in this process, so that the kernel may list it on the GPU until it ends.
    """

    def prepare(self) -> None:
        """Map libamdhip64. This does not initialise HIP.

        Raises:
            NoDriverError: this host has none.
        """
        from . import hip

        hip.load()

    def _allocate(self, device_no: int) -> HipMemory:
        from . import hip
        from .hip_memory import HipMemory

        try:
            return HipMemory(device_no)
        except hip.HipCallError as err:
            raise failed(name_of(self), device_no, err, library="HIP") from err

    def release(self, placeholder: HipMemory) -> None:
        """Free the allocation."""
        placeholder.release()
