"""What CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER mean, and how to write them. Pure: the environment is not read here.

The grammar is the CUDA driver's (CUDA Programming Guide, "CUDA Environment Variables"; MIG User Guide, "CUDA Device
Enumeration"). Details follow PyTorch's parser, which was compared with driver 525.60.13:

* The value is a comma-separated list of indices or of UUIDs. The first entry decides which; an entry of the other kind
  is invalid.
* Numbers are read as by C's strtol: leading blanks and a sign are accepted, and characters after the digits are
  ignored.
* A UUID may be shortened to a prefix that matches one device (``GPU-ab``, ``MIG-12``). The older form
  ``MIG-GPU-<uuid>/<gpu instance>/<compute instance>`` is accepted too.
* The list ends at the first invalid entry. An empty list, or one that names a device twice, selects no GPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..errors import UnsatisfiableRequestError

if TYPE_CHECKING:
    from ..devices import Gpu, HostSnapshot


_BLANKS = " \t\n\v\f\r"
# Compiled on first use by re's own cache, because most claims inherit no CUDA_VISIBLE_DEVICES.
_NUMBER = r"[+-]?[0-9]+"
_NUMBERED_INSTANCE = r"MIG-(GPU-[^/]+)/[0-9]+/[0-9]+"


class VisibleLimit(NamedTuple):
    """The devices to which an inherited CUDA_VISIBLE_DEVICES limits this process.

    Attributes:
        value: the text of the variable.
        uuids: the devices it selects, in CUDA's order; a guess if ``ambiguous``.
        ambiguous: the text alone does not tell which devices are selected (see ``doubt``). Only CUDA can tell.
        uses_indices: the variable holds indices rather than UUIDs.
        doubt: why it is ambiguous, as a clause ("this host's GPUs are of different models and ..."), else "".
        frozen: CUDA is already initialised in this process, and its choice of GPUs is the limit, not the variable.
        name: the variable. library: which library reads it.
    """

    value: str
    uuids: tuple[str, ...] = ()
    ambiguous: bool = False
    uses_indices: bool = False
    doubt: str = ""
    frozen: bool = False
    name: str = "CUDA_VISIBLE_DEVICES"
    library: str = "CUDA"

    @property
    def title(self) -> str:
        """What limits this process, as the subject of a sentence in a message."""
        if self.frozen:
            return f"{self.library}, already initialised in this process,"
        return f"{self.name}={self.value or repr(self.value) + ' (set, but empty)'}"

    def __contains__(self, uuid: object) -> bool:
        return uuid in self.uuids


def parse(value: str | None, snapshot: HostSnapshot, *, device_order: str | None = None) -> VisibleLimit | None:
    """Read CUDA_VISIBLE_DEVICES as CUDA would on this host.

    Args:
        value: the text of the variable; None if it is not set.
        snapshot: the host's devices.
        device_order: the text of CUDA_DEVICE_ORDER; any value but ``PCI_BUS_ID`` is CUDA's default, fastest first.

    Returns:
        The fence, or None if the variable is not set (every GPU is visible).

    Indices follow the PCI bus order, as in nvidia-smi, if ``device_order`` is ``PCI_BUS_ID`` or all GPUs are of one
    model. They are ambiguous in three cases:

    * The GPUs are of different models, the order is CUDA's own, and not all GPUs are named.
    * MIG is on. Depending on the driver version, a GPU with MIG counts as its first instance or hides the other GPUs.
    * An index is at or beyond that of a lost GPU, which CUDA does not count.

    The UUID of a GPU with MIG on selects its first instance.
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
            position = _whole(number.group()) if number else -1
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
    return VisibleLimit(value, tuple(gpu.uuid for gpu in chosen), bool(doubt), by_number, doubt)


def _whole(number: str) -> int:
    """The number, or one that no device has."""
    digits = number.lstrip("+-").lstrip("0")
    position = int(digits or 0) if len(digits) < 10 else 10**9
    return -position if number.startswith("-") else position


def _in_cuda_order(snapshot: HostSnapshot) -> list[Gpu]:
    """The devices that CUDA numbers, in PCI bus order.

    Lost GPUs are left out. A GPU with MIG on is replaced by its first instance.
    """
    order = []
    for gpu in snapshot.physical:
        shown = _first_instance(gpu, snapshot) if gpu.mig_enabled else gpu
        if shown is not None and not shown.lost:
            order.append(shown)
    return order


def _first_instance(parent: Gpu, snapshot: HostSnapshot) -> Gpu | None:
    return next((gpu for gpu in snapshot.gpus if gpu.mig_parent == parent.uuid), None)


def _by_uuid(entry: str, snapshot: HostSnapshot) -> tuple[Gpu | None, str]:
    """The one device whose UUID starts with ``entry`` (None if there is none), and why it is ambiguous, or ""."""
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
    """Why CUDA may read indices up to ``highest`` as other GPUs than ``chosen``; "" if it cannot."""
    if highest < 0:
        return ""  # "-1" selects no GPU on any host
    if any(gpu.mig_enabled for gpu in snapshot.gpus):
        return "MIG is on, and CUDA's numbers of the GPUs then depend on the driver version"
    usable = [gpu for gpu in snapshot.physical if not gpu.lost]
    if len(chosen) == len(usable):
        return ""  # all GPUs, so their order does not matter
    lost = next((gpu.index for gpu in snapshot.physical if gpu.lost), None)
    if lost is not None and highest >= lost:
        return f"GPU {lost} is lost, and from that index on CUDA's numbers differ from those of nvidia-smi"
    if chosen and device_order != "PCI_BUS_ID" and len({gpu.name for gpu in usable}) > 1:
        return (
            "the GPUs of this host are of different models, and without CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA numbers "
            "the fastest first"
        )
    return ""


def render(gpus: Sequence[Gpu], *, visible_as: str, snapshot: HostSnapshot) -> dict[str, str]:
    """The environment variables that make exactly these devices visible to CUDA, in this order.

    Args:
        gpus: the devices, in the order in which CUDA is to number them from 0.
        visible_as: ``"index"`` or ``"uuid"``. Indices also set CUDA_DEVICE_ORDER, because they depend on it.
        snapshot: the host's devices. If CUDA's numbers differ from nvidia-smi's (MIG on, a GPU lost), UUIDs are written
            even for ``"index"``.

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
