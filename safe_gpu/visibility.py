"""What CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER mean, and how to write them. Pure: no environment is read here.

The grammar is the CUDA driver's (CUDA Programming Guide, "CUDA Environment Variables"; MIG User Guide, "CUDA Device
Enumeration"; details as PyTorch's parser was matched against the driver 525.60.13):

* a comma-separated list of indices or of UUIDs; the first entry decides which, an entry of the other kind is invalid;
* numbers are read as C's strtol does: leading blanks and a sign are skipped, what follows the digits is ignored;
* a UUID may be shortened to a prefix that fits one device (``GPU-ab``, ``MIG-12``); the older
  ``MIG-GPU-<uuid>/<gpu instance>/<compute instance>`` is understood too;
* the list ends at the first invalid entry; an empty list, or one that names a device twice, shows no GPU at all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .errors import UnsatisfiableRequestError

if TYPE_CHECKING:
    from .devices import Gpu, HostSnapshot

__all__ = ["Fence", "parse", "render"]

_BLANKS = " \t\n\v\f\r"
# Compiled when first used, by re's own cache: most claims inherit no CUDA_VISIBLE_DEVICES.
_NUMBER = r"[+-]?[0-9]+"
_NUMBERED_INSTANCE = r"MIG-(GPU-[^/]+)/[0-9]+/[0-9]+"


class Fence(NamedTuple):
    """The devices that an inherited CUDA_VISIBLE_DEVICES leaves to this process.

    Attributes:
        value: the text of the variable.
        uuids: what it shows, in CUDA's order; the best guess where ``ambiguous``.
        ambiguous: the text alone does not tell which devices these are (see ``doubt``); ask the CUDA driver, or refuse.
        uses_indices: it holds numbers rather than UUIDs.
        doubt: why it is ambiguous, as a clause ("this host's GPUs are of different models and ..."), else "".
        frozen: it is not the variable but CUDA, awake in this process already, that leaves no other choice.
    """

    value: str
    uuids: tuple[str, ...] = ()
    ambiguous: bool = False
    uses_indices: bool = False
    doubt: str = ""
    frozen: bool = False

    @property
    def title(self) -> str:
        """What stands in the way, for messages."""
        if self.frozen:
            return "CUDA, awake in this process already,"
        return f"CUDA_VISIBLE_DEVICES={self.value or repr(self.value) + ' (set, but empty)'}"

    def __contains__(self, uuid: object) -> bool:
        return uuid in self.uuids


def parse(value: str | None, snapshot: HostSnapshot, *, device_order: str | None = None) -> Fence | None:
    """Read CUDA_VISIBLE_DEVICES as CUDA would on this host.

    Args:
        value: the variable's text; None where it is not set.
        snapshot: the host's devices.
        device_order: the text of CUDA_DEVICE_ORDER; anything but ``PCI_BUS_ID`` is CUDA's default, fastest first.

    Returns:
        The fence, or None when the variable is not set (every GPU is visible).

    Indices count by PCI bus, as nvidia-smi does, if ``device_order`` says so or all GPUs are of one model. They are
    ambiguous on mixed GPUs in CUDA's own order (unless all GPUs are named), on hosts with MIG on (a GPU with MIG counts
    as its first instance, or hides the others, depending on the driver version) and beyond a lost GPU (which CUDA does
    not count). A GPU with MIG on that is named by UUID shows its first instance.
    """
    if value is None:
        return None
    entries = [entry.lstrip(_BLANKS) for entry in value.split(",")]
    by_number = re.match(_NUMBER, entries[0]) is not None
    countable = _in_cuda_order(snapshot)
    chosen: list[Gpu] = []
    highest = -1
    doubt = ""
    for entry in entries:
        if by_number:
            number = re.match(_NUMBER, entry)
            position = int(number.group()) if number else -1
            highest = max(highest, position)
            found = countable[position] if 0 <= position < len(countable) else None
        else:
            found, doubtful = _by_uuid(entry, snapshot)
            doubt = doubt or doubtful
        if found is None:
            break
        if found in chosen:
            chosen = []
            break
        chosen.append(found)
    if by_number:
        doubt = _doubt_about_numbers(highest, chosen, snapshot, device_order)
    return Fence(value, tuple(gpu.uuid for gpu in chosen), bool(doubt), by_number, doubt)


def _in_cuda_order(snapshot: HostSnapshot) -> list[Gpu]:
    """The devices that CUDA numbers, by PCI bus: lost GPUs are not counted, a GPU with MIG on is its first instance."""
    order = []
    for gpu in snapshot.physical:
        shown = _first_instance(gpu, snapshot) if gpu.mig_enabled else gpu
        if shown is not None and not shown.lost:
            order.append(shown)
    return order


def _first_instance(parent: Gpu, snapshot: HostSnapshot) -> Gpu | None:
    return next((gpu for gpu in snapshot.gpus if gpu.mig_parent == parent.uuid), None)


def _by_uuid(entry: str, snapshot: HostSnapshot) -> tuple[Gpu | None, str]:
    """The one device whose UUID starts with ``entry``, and what is doubtful about that."""
    if not entry.startswith(("GPU-", "MIG-")):
        return None, ""
    matches = [gpu for gpu in snapshot.gpus if gpu.uuid == entry] or [
        gpu for gpu in snapshot.gpus if gpu.uuid.startswith(entry)
    ]
    if len(matches) == 1:
        found = matches[0]
        if found.lost:
            return None, ""
        return (_first_instance(found, snapshot) if found.mig_enabled else found), ""
    numbered = re.fullmatch(_NUMBERED_INSTANCE, entry)
    if numbered is None:
        return None, ""
    instances = [gpu for gpu in snapshot.gpus if gpu.mig_parent == numbered.group(1)]
    if len(instances) > 1:
        return instances[0], f"{entry} names a MIG instance by numbers that this driver no longer shows"
    return (instances[0] if instances else None), ""


def _doubt_about_numbers(highest: int, chosen: Sequence[Gpu], snapshot: HostSnapshot, device_order: str | None) -> str:
    """Why numbers up to ``highest``, read as ``chosen``, may mean other GPUs to CUDA; "" when they cannot."""
    if highest < 0:
        return ""  # "-1" shows nothing on every host
    if any(gpu.mig_enabled for gpu in snapshot.gpus):
        return "MIG is on, and CUDA's numbers of the GPUs then depend on the driver version"
    usable = [gpu for gpu in snapshot.physical if not gpu.lost]
    if len(chosen) == len(usable):
        return ""  # all of them, in whatever order
    lost = next((gpu.index for gpu in snapshot.physical if gpu.lost), None)
    if lost is not None and highest >= lost:
        return f"GPU {lost} is lost, and CUDA's numbers from there on are not those of nvidia-smi"
    if chosen and device_order != "PCI_BUS_ID" and len({gpu.name for gpu in usable}) > 1:
        return (
            "the GPUs of this host are of different models, and without CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA numbers "
            "the fastest first"
        )
    return ""


def render(gpus: Sequence[Gpu], *, visible_as: str, snapshot: HostSnapshot) -> dict[str, str]:
    """The environment variables that show exactly these devices to CUDA, in this order.

    Args:
        gpus: the devices, as CUDA shall number them from 0.
        visible_as: ``"index"`` or ``"uuid"``; indices also fix CUDA_DEVICE_ORDER, without which they mean other GPUs.
        snapshot: the host's devices. Where CUDA's numbers differ from nvidia-smi's (MIG on, a GPU lost), UUIDs are
            written whatever was asked for.

    Raises:
        UnsatisfiableRequestError: ``visible_as`` is neither.
    """
    if visible_as not in ("index", "uuid"):
        raise UnsatisfiableRequestError(
            f'visible_as={visible_as!r} is unknown: use "index" or "uuid"', value=visible_as
        )
    if visible_as == "uuid" or snapshot.needs_uuids:
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in gpus)}
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(str(gpu.index) for gpu in gpus),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
