"""ZE_AFFINITY_MASK: what it means, and how it is written. Pure.

Level Zero reads ZE_AFFINITY_MASK (Core Programming Guide of its specification; ``parseAffinityMask`` of Intel's
compute runtime): a list of ordinals, whose order means nothing. An empty list, or "default", hides nothing, and entries
that name no device are ignored. What an ordinal names depends on ZE_FLAT_DEVICE_HIERARCHY: a card under COMPOSITE,
where ``1.0`` is its first tile, and a tile under FLAT and COMBINED, counted through all cards. The default has changed
between versions and differs between GPUs. Devices are counted in the order of their bus ids only under
ZE_ENABLE_PCI_ID_DEVICE_ORDER=1. A claim takes whole cards, so a card of which the mask shows a part is outside.
"""

import re
from collections.abc import Mapping, Sequence

from ..gpus.devices import HIERARCHY, MASK, PCI_ORDER, Gpu, HostSnapshot, VisibleLimit, are_mixed
from .cuda_variables import BLANKS

SELECTOR = "ONEAPI_DEVICE_SELECTOR"

_MOST_TILES = 16


def _ordinals(snapshot: HostSnapshot, *, cards: bool) -> dict[str, range]:
    """Return UUID -> the numbers of the card. Cards that are not listed, such as integrated GPUs, have one tile."""
    tiles = {gpu.index: gpu.tiles for gpu in snapshot.gpus}
    numbers: dict[int, range] = {}
    first = 0
    for index in range(max(tiles, default=-1) + 1):
        count = 1
        if not cards:
            count = tiles.get(index, 1)
        numbers[index] = range(first, first + count)
        first += count
    return {gpu.uuid: numbers[gpu.index] for gpu in snapshot.gpus}


def _hierarchy(environ: Mapping[str, str]) -> str:
    """Return the hierarchy that is set; "" if none is, or none that Level Zero knows."""
    value = environ.get(HIERARCHY, "").upper()
    if value not in ("COMPOSITE", "FLAT", "COMBINED"):
        return ""
    return value


def read_level_zero(environ: Mapping[str, str], snapshot: HostSnapshot) -> VisibleLimit | None:
    """Return the cards that ZE_AFFINITY_MASK shows whole, in the order of their bus ids; None if it limits nothing."""
    value = environ.get(MASK, "")
    if value in ("", "default"):
        return None
    hierarchy = _hierarchy(environ)
    listed = snapshot.physical
    named = _tiles_in_mask(value, composite=hierarchy == "COMPOSITE")
    tiles_of = _tiles_of_cards(snapshot, composite=hierarchy == "COMPOSITE")
    uuids = [gpu.uuid for gpu in listed if tiles_of[gpu.uuid] <= named]
    doubt = ""
    if not hierarchy and any(gpu.tiles > 1 for gpu in listed):
        doubt = f"without {HIERARCHY} it depends on the driver whether its numbers are those of cards or of tiles"
    elif are_mixed(listed) and environ.get(PCI_ORDER) != "1" and len(uuids) < len(listed):
        doubt = f"the GPUs of this host are of different models, and without {PCI_ORDER}=1 their order is the driver's"
    return VisibleLimit(
        value, tuple(uuids), ambiguous=bool(doubt), uses_indices=True, doubt=doubt, name=MASK, library="Level Zero"
    )


def _tiles_in_mask(mask: str, *, composite: bool) -> set[tuple[int, int]]:
    """Return what a mask names, as (number, tile): each tile of a device that it names as a whole.

    Args:
        composite: whether a number names a card, a part of which can be named too.
    """
    named: set[tuple[int, int]] = set()
    for entry in mask.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\.([0-9]{1,9}))?", entry.strip(BLANKS))
        if match is None:
            continue
        number, tile = match.groups()
        if tile is None:
            named.update((int(number), each) for each in range(_MOST_TILES))
        elif composite:
            named.add((int(number), int(tile)))
    return named


def _tiles_of_cards(snapshot: HostSnapshot, *, composite: bool) -> dict[str, set[tuple[int, int]]]:
    """Return for each card what a mask must name so that it is shown whole; as of :func:`_tiles_in_mask`."""
    ordinals = _ordinals(snapshot, cards=composite)
    found = {}
    for gpu in snapshot.gpus:
        tiles = 1
        if composite:
            tiles = gpu.tiles
        found[gpu.uuid] = {(number, tile) for number in ordinals[gpu.uuid] for tile in range(tiles)}
    return found


def render_level_zero(gpus: Sequence[Gpu], *, snapshot: HostSnapshot, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make exactly these cards visible, with all their tiles.

    Numbers are the only names that there are. ONEAPI_DEVICE_SELECTOR counts what the mask leaves. It is written where
    it is set and holds numbers.
    """
    hierarchy = _hierarchy(environ) or "FLAT"
    ordinals = _ordinals(snapshot, cards=hierarchy == "COMPOSITE")
    numbers: list[int] = []
    for gpu in gpus:
        numbers += ordinals[gpu.uuid]
    written = {MASK: ",".join(str(number) for number in numbers), HIERARCHY: hierarchy, PCI_ORDER: "1"}
    if re.search(r"[0-9]", environ.get(SELECTOR, "").replace("level_zero", "")):
        written[SELECTOR] = "level_zero:" + ",".join(str(number) for number in range(len(numbers)))
    return written
