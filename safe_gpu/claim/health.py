"""Which GPUs a claim takes last: those that seem ill, and those on which a claim failed."""

import time
from collections.abc import Iterable, Mapping

from ..drivers.base import Driver
from ..gpus.devices import Gpu, GpuFault, HostSnapshot, recent_faults
from ..selection.verdicts import Rules, why_wedged


class Health:
    """What one claim knows of ill GPUs, by polls and by what the driver says of those that it was asked about.

    Args:
        rules: how GPUs are judged.

    Attributes:
        faults: UUID -> note, of the GPUs on which a claim failed and none has worked since.
        has_waited: whether the claim has waited. A GPU that it gets then may still show the utilisation of a process
            that has just ended.
    """

    def __init__(self, rules: Rules) -> None:
        self.faults: Mapping[str, GpuFault] = {}
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

    def examine(self, gpus: Iterable[Gpu], driver: Driver, snapshot: HostSnapshot) -> list[Gpu]:
        """Ask the driver whether these devices of its latest poll are ill, about each GPU once. No lock may be held.

        Returns:
            Those that seemed well before, and seem ill now.

        Raises:
            NoDriverError: the driver is gone.
        """
        asked = [gpu for gpu in gpus if gpu.whole not in self._examined and not self.why_ill(gpu)]
        if not asked:
            return []
        examined = driver.examined(snapshot, {gpu.uuid for gpu in asked})
        for gpu in asked:
            self._examined[gpu.whole] = examined.by_uuid(gpu.uuid) or gpu
        return [gpu for gpu in asked if self.why_ill(gpu)]

    def last_choices(self, gpus: Iterable[Gpu]) -> frozenset[str]:
        """Return the UUIDs of the devices that are taken only if the others are too few: those of these that seem ill,
        and those on which a claim failed."""
        ill = [gpu.uuid for gpu in gpus if self.why_ill(gpu)]
        return frozenset([*ill, *recent_faults(self.faults, time.time())])

    def _known(self, gpu: Gpu) -> Gpu:
        return self._examined.get(gpu.whole, gpu)
