"""The rules of judging that users may change."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from ..settings.variables import host_setting
from .values import parse_size

if TYPE_CHECKING:
    from ..gpus.devices import Gpu

MEMORY_VARIABLE = "SAFE_GPU_UNEXPLAINED_MEMORY"

LEAST_LIMIT = 16 << 20
"""Bytes. The NVML driver asks for processes that only draw where more than this is in use without a process; below it
their memory would count as unexplained."""


class Rules(NamedTuple):
    """How GPUs are judged.

    Attributes:
        unexplained_limit: bytes that may be in use without a process; None: by what the driver counts as used.
        lists_optional: whether GPUs whose processes the driver can never list may be claimed, by lease and memory.
        drained: UUID -> why nobody may claim it now.
    """

    unexplained_limit: int | None = None
    lists_optional: bool = False
    drained: Mapping[str, str] = {}

    def why_drained(self, gpu: "Gpu") -> str:
        """Return why nobody may claim a device, or the one that it is an instance of; "" if somebody may."""
        return self.drained.get(gpu.uuid) or self.drained.get(gpu.mig_parent or "", "")

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "Rules":
        """Return the rules that the environment and root's file set.

        Raises:
            UnsatisfiableRequestError: ``SAFE_GPU_UNEXPLAINED_MEMORY`` is not a size.
        """
        limit = host_setting("unexplained_memory", MEMORY_VARIABLE, environ)
        return cls(
            max(parse_size(limit, MEMORY_VARIABLE), LEAST_LIMIT) if limit else None,
            environ.get("SAFE_GPU_PROCESS_LIST") == "optional",
        )


DEFAULT_RULES = Rules()
"""The rules where the environment sets none."""
