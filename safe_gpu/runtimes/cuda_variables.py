"""CUDA_VISIBLE_DEVICES: what it means, and how it is written. Pure.

The grammar is the CUDA driver's (CUDA Programming Guide, "CUDA Environment Variables"; MIG User Guide, "CUDA Device
Enumeration"). Details follow PyTorch's parser (``_parse_visible_devices`` in ``torch/cuda/__init__.py``, pull requests
84879 and 92315), which was compared with driver 525.60.13:

* The value is a comma-separated list of indices or of UUIDs. The first entry decides which; an entry of the other kind
  is invalid.
* Numbers are read as by C's strtol: leading blanks and a sign are accepted, and characters after the digits are
  ignored. So ``0 1``, ``0;1`` and ``0-1`` are GPU 0, and ``cuda:0`` and ``GPU 0`` are none.
* A UUID may be shortened to a prefix that matches one device (``GPU-ab``, ``MIG-12``). The older form
  ``MIG-GPU-<uuid>/<gpu instance>/<compute instance>`` is accepted too.
* The list ends at the first invalid entry. An empty list, or one that names a device twice, selects no GPU.

CUDA does not count a GPU that is lost, so the GPUs behind it get lower numbers. A program that starts CUDA after that
opens other GPUs than those that were claimed for it. UUIDs keep their meaning.
"""

import re
from collections.abc import Sequence

from ..errors import UnsatisfiableRequestError
from ..gpus.devices import Gpu, HostSnapshot, VisibleLimit, are_mixed

CUDA = "CUDA_VISIBLE_DEVICES"

BLANKS = " \t\n\v\f\r"
"""What C takes for blanks."""

# Compiled on first use by re's own cache, because most claims inherit no CUDA_VISIBLE_DEVICES.
_NUMBER = r"([+-]?)0*([0-9]{1,9})"  # no host has more GPUs


def parse_cuda(value: str | None, snapshot: HostSnapshot, *, device_order: str | None = None) -> VisibleLimit | None:
    """Read CUDA_VISIBLE_DEVICES as CUDA would on this host.

    Args:
        value: the text of the variable; None if it is not set.
        snapshot: the host's devices.
        device_order: the text of CUDA_DEVICE_ORDER; any value but ``PCI_BUS_ID`` is CUDA's default, fastest first.

    Returns:
        The visible limit, or None if the variable is not set (every GPU is visible).

    Indices follow the PCI bus order, as in nvidia-smi, if ``device_order`` is ``PCI_BUS_ID`` or all GPUs are of one
    model. They are ambiguous in three cases:

    * The GPUs are of different models, the order is CUDA's own, and not all GPUs are named.
    * MIG is on. Depending on the driver version, a GPU with MIG counts as its first instance or hides the other GPUs.
    * An index is at or beyond that of a lost GPU, which CUDA does not count.

    The UUID of a GPU with MIG on selects its first instance.
    """
    if value is None:
        return None
    entries = [entry.lstrip(BLANKS) for entry in value.split(",")]
    by_number = re.match(_NUMBER, entries[0]) is not None and snapshot.by_uuid(entries[0]) is None
    if by_number:
        chosen, doubt = _chosen_by_number(entries, snapshot, device_order)
    else:
        chosen, doubt = _chosen_by_uuid(entries, snapshot)
    return VisibleLimit(
        value, tuple(gpu.uuid for gpu in chosen), ambiguous=bool(doubt), uses_indices=by_number, doubt=doubt
    )


def _chosen_by_number(
    entries: Sequence[str], snapshot: HostSnapshot, device_order: str | None
) -> tuple[list[Gpu], str]:
    """Return the devices that a list of numbers names, and why they are ambiguous, or ""."""
    shown = [_as_shown(gpu, snapshot) for gpu in snapshot.physical]
    countable = [gpu for gpu in shown if gpu is not None]  # in PCI bus order
    chosen: list[Gpu] = []
    highest = -1
    for entry in entries:
        number = re.match(_NUMBER, entry)
        if number is None:
            break
        position = int(number[1] + number[2])
        highest = max(highest, position)
        if not 0 <= position < len(countable):
            break
        if countable[position] in chosen:
            chosen = []
            break
        chosen.append(countable[position])
    return chosen, _doubt_about_numbers(highest, chosen, snapshot, device_order)


def _chosen_by_uuid(entries: Sequence[str], snapshot: HostSnapshot) -> tuple[list[Gpu], str]:
    """Return the devices that a list of UUIDs names, and why they are ambiguous, or ""."""
    chosen: list[Gpu] = []
    doubt = ""
    for entry in entries:
        found, doubt_about_entry = _by_uuid(entry, snapshot)
        doubt = doubt or doubt_about_entry
        if found is None:
            break
        if found in chosen:
            return [], doubt
        chosen.append(found)
    return chosen, doubt


def _as_shown(gpu: Gpu, snapshot: HostSnapshot) -> Gpu | None:
    """Return what CUDA shows for a device: the first instance of a GPU with MIG on, nothing of a lost one."""
    if gpu.lost:
        return None
    if not gpu.mig_enabled:
        return gpu
    for instance in snapshot.gpus:
        if instance.mig_parent == gpu.uuid:
            if instance.lost:
                return None
            return instance
    return None


def _by_uuid(entry: str, snapshot: HostSnapshot) -> tuple[Gpu | None, str]:
    """Return the one device whose UUID starts with ``entry`` (None if there is none), and why it is ambiguous, or
    ""."""
    matches = [gpu for gpu in snapshot.gpus if gpu.uuid == entry]
    if not matches:
        if not entry.startswith(("GPU-", "MIG-")):
            return None, ""
        matches = [gpu for gpu in snapshot.gpus if gpu.uuid.startswith(entry)]
    if len(matches) == 1:
        return _as_shown(matches[0], snapshot), ""
    numbered = re.fullmatch(r"MIG-(GPU-[^/]+)/[0-9]+/[0-9]+", entry)
    if numbered is None:
        return None, ""
    instances = [gpu for gpu in snapshot.gpus if gpu.mig_parent == numbered.group(1)]
    if not instances:
        return None, ""
    if len(instances) > 1:
        return instances[0], f"{entry} names a MIG instance by numbers that this driver no longer shows"
    return instances[0], ""


def _doubt_about_numbers(highest: int, chosen: Sequence[Gpu], snapshot: HostSnapshot, device_order: str | None) -> str:
    """Return why CUDA may read indices up to ``highest`` as other GPUs than ``chosen``; "" if it cannot."""
    if highest < 0:
        return ""  # "-1" selects no GPU on any host
    if any(gpu.mig_enabled for gpu in snapshot.gpus):
        return "MIG is on, and CUDA's numbers of the GPUs then depend on the driver version"
    usable = [gpu for gpu in snapshot.physical if not gpu.lost]
    if len(chosen) == len(usable):
        return ""  # all GPUs, so their order does not matter
    lost = [gpu.index for gpu in snapshot.physical if gpu.lost]
    if lost and highest >= lost[0]:
        return f"GPU {lost[0]} is lost, and from that index on CUDA's numbers differ from those of nvidia-smi"
    if chosen and device_order != "PCI_BUS_ID" and are_mixed(usable):
        return (
            "the GPUs of this host are of different models, and without CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA numbers "
            "the fastest first"
        )
    return ""


def render_cuda(gpus: Sequence[Gpu], *, visible_as: str, snapshot: HostSnapshot) -> dict[str, str]:
    """Return the environment variables that make exactly these devices visible to CUDA, in this order.

    Args:
        gpus: the devices, in the order in which CUDA is to number them from 0.
        visible_as: ``"index"`` or ``"uuid"``. Indices also set CUDA_DEVICE_ORDER, because they depend on it.
        snapshot: the host's devices. If CUDA's numbers differ from nvidia-smi's (MIG on, a GPU lost), UUIDs are written
            even for ``"index"``. Where CUDA does not take the UUID of one of the devices, its numbers are written.

    Raises:
        UnsatisfiableRequestError: ``visible_as`` is neither.
    """
    if visible_as not in ("index", "uuid"):
        problem = f'visible_as={visible_as!r} is unknown: use "index" or "uuid"'
        raise UnsatisfiableRequestError(problem, value=visible_as)
    if (visible_as == "uuid" or snapshot.needs_uuids) and all(gpu.named_by_uuid for gpu in gpus):
        return {CUDA: ",".join(gpu.uuid for gpu in gpus)}
    lost = [gpu.index for gpu in snapshot.physical if gpu.lost]
    numbers = []
    for gpu in gpus:
        lost_before = sum(index < gpu.index for index in lost)
        numbers.append(str(gpu.index - lost_before))
    return {CUDA: ",".join(numbers), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
