"""What people read: why a claim was refused, what a waiter waits for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .devices import GpuRequest, GpuVerdict

__all__ = ["WaitNews", "format_age", "refusal_message", "waiting_message"]


class WaitNews(NamedTuple):
    """What a waiter may tell its user. ``position`` is 1 for the head of those who compete for the same GPUs."""

    position: int
    free: int
    needed: int
    verdicts: tuple[GpuVerdict, ...]


def format_age(seconds: float) -> str:
    """How long something lasts, in the two largest units: ``45 s``, ``12 min``, ``3 h 20 min``, ``2 d 4 h``.

    >>> format_age(12_000)
    '3 h 20 min'
    """
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes < 60:
        return f"{minutes} min"
    if hours < 24:
        return f"{hours} h {minutes % 60} min" if minutes % 60 else f"{hours} h"
    return f"{days} d {hours % 24} h" if hours % 24 else f"{days} d"


def _plural(number: int, thing: str = "GPU") -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _lines(verdicts: Sequence[GpuVerdict]) -> list[str]:
    lines = []
    for verdict in verdicts:
        gpu = verdict.gpu
        reason = verdict.reason or ("free, shared with the display" if verdict.state == "display" else "free")
        lines.append(f"  GPU {gpu.label} ({gpu.name or gpu.uuid}): {reason}")
    return lines


def refusal_message(
    request: GpuRequest,
    verdicts: Sequence[GpuVerdict],
    *,
    hint: str = "",
    position: int = 1,
    waited: float = 0.0,
) -> str:
    """Why a request was not met: one sentence, then every GPU with its reason.

    Args:
        verdicts: of every device, with holders.
        hint: how far CUDA_VISIBLE_DEVICES stands in the way, see ``selection.fence_hint``; a sentence without its stop.
        position: in the queue; above 1 others were first.
        waited: seconds that the claim waited.
    """
    free = sum(verdict.free for verdict in verdicts)
    after = f" after {format_age(waited)}" if waited else ""
    text = f"{_plural(request.nb_gpus)} asked for, {free} free{after}"
    if position > 1:
        text += f", and {_plural(position - 1, 'claim')} waiting ahead"
    advice = "wait longer (timeout=)" if waited else "wait for them (timeout=)"
    text += f": {advice}, or ask for fewer." if request.nb_gpus > 1 else f": {advice}."
    if hint:
        text += f" {hint}."
    return "\n".join([text, *_lines(verdicts)])


def waiting_message(news: WaitNews, now: float | None = None) -> str:
    """One line on a wait: place in the queue, free of needed, who holds the rest and since when."""
    moment = time.time() if now is None else now
    holders: dict[str, list[str]] = {}
    for verdict in news.verdicts:
        if verdict.free or verdict.state in ("outside", "unusable"):
            continue
        who = verdict.reason
        if verdict.state == "claimed" and verdict.holder is not None:
            who = f"{verdict.user or 'unknown user'} (pid {verdict.pid or '?'}"
            who += f", job {verdict.holder.job}" if verdict.holder.job else ""
            who += f") for {format_age(moment - verdict.holder.since)}" if verdict.holder.since else ")"
        holders.setdefault(who, []).append(verdict.gpu.label)
    text = f"waiting for {_plural(news.needed)}: position {news.position}, {news.free} of {news.needed} free"
    rest = "; ".join(f"GPU {','.join(labels)}: {who}" for who, labels in holders.items())
    return f"{text}; {rest}" if rest else text
