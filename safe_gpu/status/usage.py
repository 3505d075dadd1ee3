"""How much of some GPU-hours was used, for people and for programs. Pure."""

from typing import NamedTuple

from ..coordination.looks import Use
from ..wording.text import format_bytes, wrapped

NOBODY_LOOKED = "Nobody has looked at these GPUs while they were claimed: let root's cron do it (ADMIN.md, Metrics)."
"""What a report says that has no looks."""


class UseFacts(NamedTuple):
    """What looks have seen of some GPU-hours. None is not known: nobody has looked, or no driver reports it.

    Attributes:
        gpu_hours_looked: GPU-hours that were looked at.
        gpu_hours_idle: those of them without work.
        gpu_hours_absent: those of them without a process of the claim.
        utilization: the mean utilisation of the GPUs in percent.
        memory_most: the most bytes that were in use on one of the GPUs.
    """

    gpu_hours_looked: float = 0.0
    gpu_hours_idle: float | None = None
    gpu_hours_absent: float | None = None
    utilization: float | None = None
    memory_most: int | None = None

    @classmethod
    def of(cls, use: Use) -> "UseFacts":
        """Return those of a sum in GPU-seconds."""
        if use.looked <= 0:
            return cls()
        utilization = use.utilization
        if utilization is not None:
            utilization = round(utilization, 2)
        return cls(
            gpu_hours_looked=round(use.looked / 3600, 4),
            gpu_hours_idle=round(use.idle / 3600, 4),
            gpu_hours_absent=round(use.absent / 3600, 4),
            utilization=utilization,
            memory_most=use.memory or None,
        )

    def used_text(self, *, of_gpu: bool = False) -> str:
        """Return the mean utilisation, or the most memory where no driver reports it; "" if nobody has looked.

        Args:
            of_gpu: whether it is that of a GPU which others use too.

        >>> UseFacts(1.0, utilization=49.6).used_text(), UseFacts(1.0, memory_most=5 << 30).used_text()
        ('50%', '5 GiB')
        """
        if self.utilization is None:
            if self.memory_most is None:
                return ""
            return format_bytes(self.memory_most)
        percent = f"{self.utilization:.0f}%"
        if of_gpu:
            return f"{percent} of GPU"
        return percent

    def idle_text(self) -> str:
        """Return for how many GPU-hours there was no work; "" if nobody has looked."""
        if self.gpu_hours_idle is None:
            return ""
        return f"{self.gpu_hours_idle:.2f}"


def sentence_on_looks(held: float, looked: float) -> str:
    """Return how many GPU-hours were not looked at; "" for none.

    Args:
        held: all of them.
        looked: those that were looked at.
    """
    if looked <= 0:
        return NOBODY_LOOKED
    missing = f"{max(0.0, held - looked):.2f}"
    if missing == "0.00":
        return ""
    return f"{missing} of {held:.2f} GPU-hours were not looked at; USED and IDLE are of the others."


def lines_after_table(sentence: str, width: int) -> list[str]:
    """Return a sentence, wrapped to the width of a table, below an empty line; nothing for ""."""
    if sentence == "":
        return []
    return ["", *wrapped(sentence, width)]
