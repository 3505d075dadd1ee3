"""Whether the indices in CUDA_VISIBLE_DEVICES still mean the GPUs of the claim that wrote them. Pure.

CUDA does not count a GPU that is lost, so the GPUs behind it get lower numbers. A program that starts CUDA after that
opens other GPUs than those that were claimed for it. UUIDs keep their meaning.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from .visible_devices import parse

if TYPE_CHECKING:
    from ..devices import HostSnapshot


def stale_indices(value: str | None, device_order: str | None, claimed: Collection[str], snapshot: HostSnapshot) -> str:
    """What is wrong with the indices, and what to do: a sentence without the full stop. "" if nothing is wrong.

    Args:
        value, device_order: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER of this process; None if not set.
        claimed: UUIDs of the GPUs of the claim inside which this process runs.
        snapshot: the host now.
    """
    if snapshot.vendor != "nvidia":
        return ""  # ROCR_VISIBLE_DEVICES holds UUIDs
    fence = parse(value, snapshot, device_order=device_order)
    if fence is None or not fence.uses_indices or not claimed:
        return ""
    foreign = [gpu for gpu in snapshot.gpus if gpu.uuid in fence and gpu.uuid not in claimed]
    lacking = sum(entry.strip()[:1].isdigit() for entry in fence.value.split(",")) > len(fence.uuids)
    if not foreign and not lacking:
        return ""
    if foreign:
        meant = f"GPU {','.join(gpu.label for gpu in foreign)}, which this claim does not hold"
    else:
        meant = "fewer GPUs than this claim holds"
    lost = [gpu.label for gpu in snapshot.gpus if gpu.lost]
    gone = sum(snapshot.by_uuid(uuid) is None for uuid in claimed)
    causes = []
    if lost:
        causes.append(f"GPU {','.join(lost)} is lost")
    if gone:
        causes.append("a claimed GPU is gone")
    why = f", since {' and '.join(causes)}" if causes else ""
    mine = [gpu.uuid for gpu in snapshot.gpus if gpu.uuid in claimed and not gpu.lost]
    way_out = f"set CUDA_VISIBLE_DEVICES={','.join(mine)} before CUDA starts" if mine else "end this claim"
    return (
        f"CUDA_VISIBLE_DEVICES={fence.value} now means {meant}{why}: {way_out} "
        "(--visible-as uuid keeps a claim from this)"
    )
