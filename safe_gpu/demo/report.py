"""The report that the demo prints: plain lines of at most 80 columns. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from ..wording.text import gpu_ranges, paint, plural, wrapped
from .referee import RefereeReport, in_time, rule

if TYPE_CHECKING:
    from ..gpus.devices import HostSnapshot
    from . import race_host
    from .racers import Outcome

# The most lines of a refusal that are printed: it names every GPU.
_REFUSAL_LINES = 4


def wrapped_lines(text: str, first: str = "", further: str = "  ") -> list[str]:
    return wrapped(text, 80, first, further)


def host_lines(host: race_host.RaceHost, asks: Sequence[int], simulated: str | None) -> list[str]:
    """Return the GPUs of the host, and what the race does with them.

    Args:
        host: the host.
        asks: the claims of the race on it; empty: there will be none.
        simulated: the name of the simulated host; None: the GPUs are real.
    """
    if not host.snapshot.gpus:
        return ["No GPU can be used on this host; `safe-gpu doctor` says why."]
    models = _models(host.snapshot)
    if simulated is None:
        lines = wrapped_lines(f"This host has {models}.")
        end = "Only the free ones are used. Each is held for a moment, and no process waits."
    else:
        lines = wrapped_lines(f"A race on a simulated host, {simulated}: {models}.")
        end = "The processes and locks are real, the GPUs are not. No real GPU is touched."
    if host.obstacle:
        return [*lines, *wrapped_lines(f"No GPU can be claimed: {host.obstacle}", "  ")]
    if simulated is None or not asks:
        lines += [line for text in _states(host) for line in wrapped_lines(text, "  ", "    ")]
    return [*lines, end] if asks else lines


def _models(snapshot: HostSnapshot) -> str:
    counted = Counter(gpu.name or "unknown GPU" for gpu in snapshot.physical)
    text = ", ".join(f"{number} x {name}" for name, number in counted.items())
    split = Counter(gpu.index for gpu in snapshot.gpus if gpu.is_mig_instance)
    for index, number in split.items():
        text += f"; GPU {index} is split into {plural(number, 'MIG instance')}"
    return text


def _states(host: race_host.RaceHost) -> list[str]:
    """Return a line for each state of GPUs."""
    groups: dict[str, list[str]] = {}
    parents = {gpu.mig_parent for gpu in host.snapshot.gpus}
    for verdict in host.verdicts:
        if verdict.gpu.uuid in parents:
            continue
        if verdict.free:
            text = "drives the display, so claims share it" if host.snapshot.shared_display else "free"
        elif verdict.state in ("claimed", "busy"):
            text = "in use (`safe-gpu status` shows by whom)"
        elif verdict.state == "outside" and host.visible_limit is not None:
            text = f"left out by {host.visible_limit.title}"
        else:
            text = verdict.reason
        groups.setdefault(text, []).append(verdict.gpu.label)
    return [f"GPU {gpu_ranges(labels)}: {text}" for text, labels in groups.items()]


def use_lines(heat: Iterable[Outcome], color: bool = False) -> list[str]:
    """Return how many processes had each GPU, in one line for each number."""
    users = Counter(gpu.label for outcome in heat for gpu in outcome.gpus)
    lines = []
    for number in sorted(set(users.values()), reverse=True):
        labels = [label for label in sorted(users, key=_in_order) if users[label] == number]
        text = f"{number} process{'es' * (number > 1)}" + (" at once" * (number > 1) or " each" * (len(labels) > 1))
        lines.append(f"  GPU {gpu_ranges(labels)}: {paint(text, 'red' if number > 1 else 'green', color)}")
    return lines


def _in_order(label: str) -> list[int]:
    return [int(number) for number in label.split(":")]


def rush_lines(races: Sequence[Sequence[Outcome]], color: bool = False) -> list[str]:
    """Return who got what and how soon in the first race, the message of one refusal, and the sum of the others."""
    timed = in_time(races[0])
    won = [(began, outcome) for began, outcome in timed if outcome.gpus]
    refused = [(began, outcome) for began, outcome in timed if outcome.refused]
    lines = use_lines(races[0], color)
    if won:
        got = f"{len(won)} process{'es' * (len(won) > 1)} got {plural(sum(len(outcome.gpus) for _, outcome in won))}"
        lines += wrapped_lines(f"{got} within {won[-1][0] * 1e3:.0f} ms{_further(races[1:])}.", "  ")
    for _, outcome in refused[:1]:
        lines.append(f"  {len(refused)} refused within {refused[-1][0] * 1e3:.0f} ms, one of them with the message:")
        message = []
        for text in outcome.refused.splitlines():
            indent = " " * (4 + len(text) - len(text.lstrip()))
            message += wrapped_lines(text.strip(), indent, indent + "  ")
        if len(message) > _REFUSAL_LINES:
            message[_REFUSAL_LINES - 1 :] = [f"      ... and {len(message) - _REFUSAL_LINES + 1} more lines"]
        lines += message
    return lines


def _further(races: Sequence[Sequence[Outcome]]) -> str:
    ruling = rule(*races)
    claims, refusals = plural(ruling.claims, "claim"), plural(ruling.refused, "refusal")
    return f"; {plural(len(races), 'more round')}: {claims}, {refusals}" if races else ""


def turns_lines(heat: Sequence[Outcome]) -> list[str]:
    """Return how many racers got their GPUs, and how long GPUs were idle between two claims."""
    last: dict[str, float] = {}
    gaps = []
    for began, outcome in in_time(heat):
        given_back = max((last.get(gpu.uuid, -math.inf) for gpu in outcome.gpus), default=-math.inf)
        if -math.inf < given_back <= began:  # otherwise it is a collision
            gaps.append((began - given_back) * 1e3)
        last.update((gpu.uuid, outcome.ended) for gpu in outcome.gpus)
    served = f"{sum(bool(outcome.gpus) for outcome in heat)} of {len(heat)} served"
    if gaps:
        served += f"; a freed GPU was idle for {median(gaps):.0f} ms (median), {max(gaps):.0f} ms at most"
    return wrapped_lines(f"{served}.", "  ")


def verdict_lines(ruling: RefereeReport, contrast: RefereeReport, color: bool = False) -> list[str]:
    """Return what the referee saw: of all races with safe_gpu, and of the one without."""
    events: dict[str, list[str]] = {}  # a line with a gap -> the processes to be named there
    for one in ruling.collisions:
        text = f"Collision: process % got GPU {one.label} ({one.uuid}), which process {one.rival} had."
        events.setdefault(text, []).append(str(one.pid))
    for outcome in ruling.failed:
        events.setdefault(f"Failure: process %: {outcome.failed}", []).append(str(outcome.pid))
    for outcome in ruling.trouble:
        text = f"Error of a GPU or its driver, in process %: {outcome.trouble}"
        events.setdefault(text, []).append(str(outcome.pid))
    met, claims = plural(len(ruling.collisions), "collision"), plural(ruling.claims, "claim")
    paragraphs = [
        *(text.replace("%", ", ".join(pids), 1) for text, pids in events.items()),
        f"Verdict: {met} in {claims} of {plural(ruling.taken)}; without safe_gpu, {len(contrast.collisions)} on "
        f"{plural(contrast.taken)}.",
        "A collision: two processes with one GPU at one time, whatever the claims say.",
    ]
    lines = [line for text in paragraphs for line in wrapped_lines(text)]
    result = "red" if ruling.fails else "green"
    return [paint(line, result, color and line.startswith("Verdict:")) for line in lines]
