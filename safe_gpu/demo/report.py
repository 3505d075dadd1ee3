"""The report that the demo prints: plain lines of at most 80 columns, equal lines merged."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

from ..procfs import describe_process, printable
from ..text import gpu_ranges, plural
from .verdict import RefereeReport, add_up

if TYPE_CHECKING:
    from ..devices import HostSnapshot
    from .plan import Plan
    from .racers import Outcome, RaceResult
    from .stage import RaceHost


_WIDTH = 80
# The most lines of a refusal that are printed: it names every GPU.
_REFUSAL_LINES = 8


class Printer:
    """Prints lines and numbered sections to one stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._sections = 0

    def say(self, *lines: str) -> None:
        """Print lines and flush the stream."""
        for line in lines:
            print(line, file=self._stream)
        self._stream.flush()  # a race takes time, and forked racers must not inherit buffered text

    def section(self, title: str) -> None:
        """Print a numbered headline."""
        self._sections += 1
        self.say("", *_wrapped(f"{self._sections}. {title}", "", "   "), "")


def _wrapped(text: str, first: str, further: str) -> list[str]:
    return textwrap.wrap(
        printable(text),  # it may hold the command of another user's process
        _WIDTH,
        initial_indent=first,
        subsequent_indent=further,
        break_on_hyphens=False,
    )


# ----------------------------------------------------------------------------------------------------------------------
# Before a race


def host_lines(host: RaceHost, plan: Plan | None, simulated: str | None) -> list[str]:
    """The GPUs of the host, and what the race does with them.

    Args:
        host: the host.
        plan: the race on it; None: there will be none.
        simulated: the name of the simulated host; None: the GPUs are real.
    """
    if not host.snapshot.gpus:
        return ["No NVIDIA GPU can be used on this host; `safe-gpu doctor` says why."]
    if simulated is not None:
        return [
            *_wrapped(f"A race on a simulated host, {simulated}: {_models(host.snapshot)}.", "", "  "),
            "The processes and locks are real, the GPUs are not. No real GPU is touched.",
        ]
    lines = _wrapped(f"This host has {_models(host.snapshot)}.", "", "  ")
    if host.obstacle:
        return [*lines, *_wrapped(f"No GPU can be claimed: {host.obstacle}", "  ", "  ")]
    lines += [line for text in _states(host) for line in _wrapped(text, "  ", "    ")]
    if plan is None:
        return [*lines, "None of them can be claimed now."]
    if plan.shared:
        return lines
    return [*lines, "Only the free ones are used. Each is held for a moment, and no process waits."]


def _models(snapshot: HostSnapshot) -> str:
    counted = Counter(gpu.name or "unknown GPU" for gpu in snapshot.physical)
    text = ", ".join(f"{number} x {name}" for name, number in counted.items())
    split = Counter(gpu.index for gpu in snapshot.gpus if gpu.is_mig_instance)
    for index, number in split.items():
        text += f"; GPU {index} is split into {plural(number, 'MIG instance')}"
    return text


def _states(host: RaceHost) -> list[str]:
    """A line for each state of GPUs."""
    groups: dict[str, list[str]] = {}
    parents = {gpu.mig_parent for gpu in host.snapshot.gpus}
    for verdict in host.verdicts:
        if verdict.gpu.uuid in parents:
            continue
        if verdict.free:
            text = "drives the display" if host.snapshot.shared_display else "free"
        elif verdict.state in ("claimed", "busy"):
            text = "in use (`safe-gpu status` shows by whom)"
        elif verdict.state == "outside" and host.fence is not None:
            text = f"left out by {host.fence.title}"
        else:
            text = verdict.reason
        groups.setdefault(text, []).append(verdict.gpu.label)
    return [f"GPU {gpu_ranges(labels)}: {text}" for text, labels in groups.items()]


# ----------------------------------------------------------------------------------------------------------------------
# After a heat


def rush_lines(heat: RaceResult) -> list[str]:
    """Who got what and when, all refusals as one line, and the message of one refusal."""
    lines = _got(heat)
    refused = _in_time(heat.refused)
    if not refused:
        return [line for _, line in lines]
    first, last = refused[0], refused[-1]
    what = "1 process was refused" if first is last else f"{len(refused)} processes were refused"
    until = "" if first is last else f", the last at {(last.began or 0.0) * 1e3:.1f} ms"
    lines = sorted([*lines, (first.began or 0.0, f"{_clock(first)}  {what}{until}")])
    return [*(line for _, line in lines), "", *_refusal(first)]


def _got(heat: RaceResult) -> list[tuple[float, str]]:
    """For each winner, the time in seconds after the start signal, and a line."""
    return [
        (
            outcome.began or 0.0,
            f"{_clock(outcome)}  process {outcome.pid:<8d}asked for {plural(outcome.ask.nb_gpus, 'GPU'):8s}"
            f"got GPU {','.join(outcome.labels)}",
        )
        for outcome in _in_time(heat.winners)
    ]


def _clock(outcome: Outcome) -> str:
    return f"{(outcome.began or 0.0) * 1e3:8.1f} ms"


def rounds_lines(number: int, ruling: RefereeReport) -> list[str]:
    """The results of further rounds."""
    claims, refusals = plural(ruling.claims, "claim"), plural(ruling.refused, "refusal")
    return [f"   {number} more {'round' if number == 1 else 'rounds'}: {claims}, {refusals}."]


def _in_time(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return sorted((one for one in outcomes if one.began is not None), key=lambda one: one.began or 0.0)


def _refusal(outcome: Outcome) -> list[str]:
    message = [line for text in outcome.refused.splitlines() for line in _refusal_line(text)]
    if len(message) > _REFUSAL_LINES:
        message = [*message[: _REFUSAL_LINES - 1], f"     ... and {len(message) - _REFUSAL_LINES + 1} more lines"]
    asked = plural(outcome.ask.nb_gpus, "GPU")
    return [f"   Process {outcome.pid}, which asked for {asked}, was told:", *message]


def _refusal_line(text: str) -> list[str]:
    indent = " " * (5 + len(text) - len(text.lstrip()))
    return _wrapped(text.strip(), indent, indent + "  ")


def turns_lines(heat: RaceResult) -> list[str]:
    """How many racers got their GPUs, and how long GPUs were idle between two claims."""
    lines = [f"   {len(heat.winners)} of {len(heat.outcomes)} served."]
    gaps = sorted(_gaps(heat))
    if gaps:
        median, worst = gaps[len(gaps) // 2] * 1e3, gaps[-1] * 1e3
        lines.append(f"   From a release to the next claim of that GPU: median {median:.0f} ms, worst {worst:.0f} ms.")
    return lines


def _gaps(heat: RaceResult) -> list[float]:
    """For each claim that took over GPUs, the seconds since the last of them was released."""
    last: dict[str, float] = {}
    gaps = []
    for outcome in _in_time(heat.winners):
        given_back = [last[uuid] for uuid in outcome.uuids if uuid in last]
        if given_back and outcome.began is not None and outcome.began >= max(given_back):  # otherwise it is a collision
            gaps.append(outcome.began - max(given_back))
        if outcome.ended is not None:
            last.update(dict.fromkeys(outcome.uuids, outcome.ended))
    return gaps


def shared_lines(heat: RaceResult) -> list[str]:
    """Who shares the display's GPU, and who was refused for lack of memory."""
    lines = [line for _, line in _got(heat)]
    for outcome in _in_time(heat.refused):
        lines += ["", *_refusal(outcome)]
    if any(outcome.ask.min_memory for outcome in heat.refused):
        lines += [
            "",
            "   It had asked for all of the GPU's memory. Claims share this GPU, but each",
            "   still checks that enough memory is free.",
        ]
    return lines


def contrast_lines(heat: RaceResult) -> list[str]:
    """The number of processes on each GPU that was picked."""
    users = Counter(label for outcome in heat.winners for label in outcome.labels)
    return [f"   GPU {label}: {_on_it(number)}" for label, number in sorted(users.items())]


def _on_it(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes at once"


# ----------------------------------------------------------------------------------------------------------------------
# The verdict


def verdict_lines(
    exclusive: RefereeReport | None,
    shared: RefereeReport | None,
    contrast: RefereeReport | None,
    labels: dict[str, str],
) -> list[str]:
    """What the referee saw.

    Args:
        exclusive: the ruling on all races in which claims exclude each other; None: there was none.
        shared: the ruling on all races in which they do not; None: there was none.
        contrast: the ruling on the race without safe_gpu; None: there was none.
        labels: UUID -> label of the GPU.
    """
    events = _events(add_up(filter(None, (exclusive, shared))), labels)
    lines = [line for text in events for line in _wrapped(text, "", "  ")]
    if shared is not None:
        claims = f"{plural(shared.claims, 'claim')} shared the display's GPU, as they may"
        lines += _wrapped(f"Verdict: {claims}; {plural(shared.refused, 'claim')} refused.", "", "  ")
    if exclusive is not None:
        claims = f"{plural(exclusive.claims, 'claim')} of {plural(exclusive.taken, 'GPU')}"
        lines += _wrapped(
            f"Verdict: {plural(exclusive.collisions, 'collision')} in {claims}; "
            f"{plural(exclusive.refused, 'claim')} refused.",
            "",
            "  ",
        )
        lines += _wrapped(
            "The referee does not rely on the claims: each winner set a marker that only one process can set, and a "
            f"separate process polled the driver {plural(exclusive.looks, 'time')} for the processes on each GPU. It "
            f"saw {exclusive.shown} of the {exclusive.claims} winners there.",
            "  ",
            "  ",
        )
    if contrast is not None:
        lines += _wrapped(
            f"Without safe_gpu, {contrast.collisions} of {plural(contrast.taken, 'chosen GPU')} were already in use by "
            "another process.",
            "  ",
            "  ",
        )
    return lines


def _events(ruling: RefereeReport, labels: dict[str, str]) -> list[str]:
    met: dict[tuple[str, int], list[int]] = {}
    for clash in ruling.clashes:
        if clash.witness == "marker":
            met.setdefault((clash.uuid, clash.pids[1]), []).append(clash.pids[0])
    lines = [
        f"Collision: process {_list(pids)} got {_gpu(uuid, labels)}, which process {rival or 'unknown'} had."
        for (uuid, rival), pids in met.items()
    ]
    lines += [
        f"Collision: the driver showed processes {_list(clash.pids)} on {_gpu(clash.uuid, labels)} together."
        for clash in ruling.clashes
        if clash.witness == "driver"
    ]
    for visit in dict.fromkeys(ruling.visits):
        lines.append(
            f"Not a claim: {', '.join(map(_process, visit.strangers))} came onto {_gpu(visit.uuid, labels)} during the "
            "race without claiming it. A claim detects that, but cannot prevent it."
        )
    lines += [f"Failure: process {outcome.pid}: {outcome.failed}" for outcome in ruling.failed]
    troubles: dict[str, list[int]] = {}
    for outcome in ruling.trouble:
        troubles.setdefault(outcome.trouble, []).append(outcome.pid)
    for text, pids in troubles.items():
        lines.append(f"Error of a GPU or its driver, in process {_list(pids)}: {text}")
    for text in dict.fromkeys(ruling.blind):
        lines.append(f"The watch on the driver stopped early: {text}")
    return lines


def _gpu(uuid: str, labels: dict[str, str]) -> str:
    return f"GPU {labels[uuid]} ({uuid})" if uuid in labels else uuid


def _process(pid: int) -> str:
    who = ", ".join(filter(None, describe_process(pid) or ())) if pid else ""
    return f"process {pid or 'unknown'}{f' ({who})' if who else ''}"


def _list(pids: Sequence[int]) -> str:
    return ", ".join(map(str, pids))
