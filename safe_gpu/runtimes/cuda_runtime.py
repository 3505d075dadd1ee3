"""The CUDA driver library as a :class:`~safe_gpu.runtimes.runtime.Runtime`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .runtime import Runtime

if TYPE_CHECKING:
    from ..devices import Gpu
    from .placeholders import CudaPlaceholder


class CudaRuntime(Runtime):
    """CUDA in this process. A GPU is named by its UUID."""

    real = True

    def visible_if_initialized(self) -> tuple[str, ...] | None:
        """See :func:`~safe_gpu.runtimes.cuda.visible_if_initialized`."""
        from . import cuda

        return cuda.visible_if_initialized()

    def shown_at(self, ordinal: int) -> str | None:
        """See :func:`~safe_gpu.runtimes.cuda.uuid_of_ordinal`."""
        from . import cuda

        return cuda.uuid_of_ordinal(ordinal)

    def is_same(self, shown: str, gpu: Gpu) -> bool:
        """See :func:`~safe_gpu.runtimes.cuda.same_device`."""
        from . import cuda

        return cuda.same_device(shown, gpu.uuid)

    def contexts(self) -> frozenset[str]:
        """UUIDs of the GPUs on which this process has a primary context."""
        from .cuda_context import active_contexts

        return frozenset(active_contexts())

    def visible_in_child(self, env: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """See :func:`~safe_gpu.runtimes.library_child.visible_in_child`."""
        from .library_child import visible_in_child

        return visible_in_child(env)

    def try_gpu(self, gpu: Gpu, ordinal: int, logger: Any) -> None:
        """See :func:`~safe_gpu.runtimes.library_child.hold_in_child`."""
        from .library_child import hold_in_child

        hold_in_child(gpu.uuid)

    def default_placeholder(self, logger: Any = None) -> CudaPlaceholder:
        """A minimal allocation through the CUDA driver."""
        from .placeholders import CudaPlaceholder

        return CudaPlaceholder(logger)


CUDA = CudaRuntime()
