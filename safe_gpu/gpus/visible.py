"""The GPUs to which a variable like CUDA_VISIBLE_DEVICES limits a process."""

from typing import NamedTuple

MASK, HIERARCHY, PCI_ORDER = "ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY", "ZE_ENABLE_PCI_ID_DEVICE_ORDER"


class VisibleLimit(NamedTuple):
    """The devices to which an inherited CUDA_VISIBLE_DEVICES limits this process.

    Attributes:
        value: the text of the variable.
        uuids: the devices it selects, in CUDA's order; a guess if ``ambiguous``.
        ambiguous: the text alone does not tell which devices are selected (see ``doubt``). Only CUDA can tell.
        uses_indices: the variable holds indices rather than UUIDs.
        doubt: why it is ambiguous, as a clause ("this host's GPUs are of different models and ..."), else "".
        frozen: CUDA is already initialised in this process, and its choice of GPUs is the limit, not the variable.
        name: the variable.
        library: which library reads it.
        lift: how to disregard the variable; "" where no message shall advise it, as in a batch job, in which the GPUs
            outside may be those of other jobs.
    """

    value: str
    uuids: tuple[str, ...] = ()
    ambiguous: bool = False
    uses_indices: bool = False
    doubt: str = ""
    frozen: bool = False
    name: str = "CUDA_VISIBLE_DEVICES"
    library: str = "CUDA"
    lift: str = "SAFE_GPU_FENCE=ignore"

    @property
    def clear_by(self) -> str:
        """What to set so that the variable is not ambiguous."""
        if self.name == MASK:
            return f"{HIERARCHY} and {PCI_ORDER}=1 with numbers in the order of the bus ids"
        return "CUDA_DEVICE_ORDER=PCI_BUS_ID with numbers as nvidia-smi shows them, or name UUIDs"

    @property
    def title(self) -> str:
        """What limits this process, as the subject of a sentence in a message."""
        if self.frozen:
            return f"{self.library}, already initialised in this process,"
        return f"{self.name}={self.value or repr(self.value) + ' (set, but empty)'}"

    def __contains__(self, uuid: object) -> bool:
        return uuid in self.uuids
