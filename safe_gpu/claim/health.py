"""Which GPUs seem ill, so that a claim takes them last."""

from collections.abc import Iterable

from ..gpus.devices import Gpu
from ..selection.verdicts import Rules, why_wedged


class Health:
    """What one claim knows of ill GPUs, by polls and by what the driver says of those that it was asked about.

    Args:
        rules: how GPUs are judged.

    Attributes:
        has_waited: whether the claim has waited. A GPU that it gets then may still show the utilisation of a process
            that has just ended.
    """

    def __init__(self, rules: Rules) -> None:
        self.has_waited = False
        self._rules = rules
        self._examined: dict[str, Gpu] = {}  # name of a GPU -> the record of the device that was examined

    def driver_says(self, gpu: Gpu) -> str:
        """Return what the driver has said against a device, or the GPU of which it is a piece; "" for nothing."""
        return gpu.illness or self._known(gpu).illness

    def why_ill(self, gpu: Gpu) -> str:
        """Return why a device seems ill by what is known so far; "" if it seems well."""
        said = self.driver_says(gpu)
        if said or self.has_waited:
            return said
        return why_wedged(self._known(gpu), self._rules)

    def unexamined(self, gpus: Iterable[Gpu]) -> list[Gpu]:
        """Return those of these devices that seem well, and about whose GPUs the driver was not asked yet."""
        return [gpu for gpu in gpus if gpu.whole not in self._examined and not self.why_ill(gpu)]

    def learn(self, examined: Iterable[Gpu]) -> None:
        """Keep what the driver says of these devices."""
        self._examined.update((gpu.whole, gpu) for gpu in examined)

    def _known(self, gpu: Gpu) -> Gpu:
        return self._examined.get(gpu.whole, gpu)
