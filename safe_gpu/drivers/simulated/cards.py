"""A card of a simulated host, and the devices into which it can be divided.

A card is divided while the host runs, as an administrator divides a real one, even in use. Its **mode** is a few words:

* ``whole``: it is one GPU.
* ``mig 3g.40gb 40320 1g.10gb 9856``: MIG is on, with these instances, each with its MiB. ``3g.40gb/2`` is one that is
  divided into two compute instances, which have its memory together.
* ``partitions 8``: AMD's compute partitions.
* ``functions 2``: Intel's virtual functions, beside the card.

Names are those that real drivers give: the same instance of a GPU has the same UUID whenever it is made, the first
partition of a card has the UUID of the whole card, and a virtual function is known by its bus id.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ...gpus.devices import MIG_IS_ON, Gpu

MIB = 1 << 20

RESERVED = 4 * MIB
"""Memory that an idle device shows as used."""

WHOLE = "whole"
"""The mode of a card that is not divided."""

_MOST_PARTS = 63  # as of an Intel card

_CORES = 8  # of an AMD card that can be divided

_PARTITION_MODES = {2: "DPX", 4: "QPX", 8: "CPX"}

_LARGEST_PRIME = (1 << 128) - 159  # below 2**128


class _MigProfile(NamedTuple):
    """What a mode says of one GPU instance.

    Attributes:
        name: ``3g.40gb``.
        mib: its memory.
        compute_instances: how many it has.
        divided: whether the mode gives their number. Then they are named after it.
    """

    name: str
    mib: int
    compute_instances: int
    divided: bool


class Card(NamedTuple):
    """A card of a simulated host.

    Attributes:
        gpu: all of it, as an idle driver reports it; its index and links are set by its host.
        seed: from which the UUIDs of its partitions are made.
        mode: its mode where nobody has divided it.
    """

    gpu: Gpu
    seed: str
    mode: str = WHOLE

    def devices(self, mode: str) -> list[Gpu]:
        """Return what an idle driver reports of it in a mode; a GPU before its instances.

        Raises:
            ValueError: there is no such mode of this card.
        """
        words = mode.split()
        if words == [WHOLE]:
            return [self.gpu]
        kind = (self.gpu.vendor, *words[:1])
        if kind == ("nvidia", "mig"):
            return self._with_instances(mode)
        if kind == ("amd", "partitions"):
            return self._partitions(_number_of_parts(words[1:]))
        if kind == ("intel", "functions"):
            return [self.gpu, *self._functions(_number_of_parts(words[1:]))]
        raise ValueError(f"{self.gpu.name} has no mode {mode!r}")

    def _with_instances(self, mode: str) -> list[Gpu]:
        found = [self.gpu._replace(unusable=MIG_IS_ON, mig_enabled=True, utilization=None)]
        for compute_instances in self.gpu_instances(mode):
            found += compute_instances
        return found

    def gpu_instances(self, mode: str) -> list[list[Gpu]]:
        """Return the GPU instances of a card in a mode that :meth:`devices` accepts: of each its compute instances,
        which are the devices."""
        words = mode.split()
        if words[0] != "mig":
            return []
        found: list[list[Gpu]] = []
        number = 0  # by which MIG counts the devices of a GPU
        for place, profile in enumerate(_mig_profiles(words[1:])):
            compute_instances = []
            for part in range(profile.compute_instances):
                compute_instances.append(self._compute_instance(profile, place, part, number))
                number += 1
            found.append(compute_instances)
        return found

    def _compute_instance(self, profile: _MigProfile, place: int, part: int, number: int) -> Gpu:
        """Return compute instance ``part`` of the GPU instance at a place, device ``number`` of the card."""
        name = profile.name
        if profile.divided:
            name = f"1c.{name}"
        uuid = uuid_of("NVIDIA", f"{self.gpu.uuid} {profile.name} {place} {part}")
        instance = self.gpu._replace(
            uuid=uuid.replace("GPU", "MIG"),
            name=f"{self.gpu.name} MIG {name}",
            mig_parent=self.gpu.uuid,
            mig_instance=number,
            divided=profile.divided,
            utilization=None,
            temperature=None,
        )
        return with_memory(instance, profile.mib)

    def _partitions(self, number: int) -> list[Gpu]:
        if number not in _PARTITION_MODES:
            raise ValueError(f"{self.gpu.name} has no {number} partitions")
        found = []
        for partition in range(number):
            first_core = partition * _CORES // number
            uuid = uuid_of("AMD", f"{self.seed} {first_core}")
            gpu = self.gpu._replace(uuid=uuid, partition=True, mode=_PARTITION_MODES[number], utilization=None)
            found.append(with_memory(gpu, self._mib_of_part(number)))
        return found

    def _functions(self, number: int) -> list[Gpu]:
        slot, _, _ = self.gpu.pci_bus_id.rpartition(".")
        found = []
        for function in range(1, number + 1):
            bus_id = f"{slot}.{function}"
            gpu = self.gpu._replace(
                uuid=f"INTEL-{bus_id}", pci_bus_id=bus_id, place=self.gpu.uuid, partition=True, tiles=1
            )
            found.append(with_memory(gpu, self._mib_of_part(number)))
        return found

    def _mib_of_part(self, number: int) -> int:
        """Return the memory of each of a number of equal parts."""
        return (self.gpu.memory_total or 0) // MIB // number


def with_memory(gpu: Gpu, mib: int, used: int = RESERVED) -> Gpu:
    """Return an idle device with this memory in MiB, of which ``used`` bytes are in use."""
    total = mib * MIB
    used = min(used, total)
    return gpu._replace(counts_reserved=False, memory_total=total, memory_used=used, memory_free=total - used)


def uuid_of(vendor: str, text: str) -> str:
    """Return a UUID in the form of its vendor, ``NVIDIA`` or ``AMD``, of each text another one: the text times a number
    of 128 mixed bits, which loads no module."""
    number = int.from_bytes(text.encode(), "big")
    digits = f"{number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % _LARGEST_PRIME:032x}"
    if vendor == "AMD":
        return f"GPU-{digits[:16]}"
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def _mig_profiles(words: Sequence[str]) -> list[_MigProfile]:
    """Return the GPU instances that a mode lists, each by its profile and its MiB.

    Raises:
        ValueError: they are not in pairs, or a number is not one.
    """
    if len(words) > 2 * _MOST_PARTS:
        raise ValueError(f"{len(words)} words")
    found = []
    for profile, mib in zip(words[::2], words[1::2], strict=True):
        name, _, parts = profile.partition("/")
        number = 1
        if parts:
            number = _number_of_parts([parts])
        if int(mib) < 1:
            raise ValueError(f"{mib} MiB")
        found.append(_MigProfile(name, int(mib), number, divided=bool(parts)))
    return found


def _number_of_parts(words: Sequence[str]) -> int:
    """Return the only one of these words as a number of parts.

    Raises:
        ValueError: it is not a number, or a card never has that many.
    """
    number = int(" ".join(words))
    if not 1 <= number <= _MOST_PARTS:
        raise ValueError(f"{number} parts")
    return number
