"""Runs the demo: the races, the referee's count of collisions, and the report."""

from __future__ import annotations

import math
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from statistics import median
from typing import NamedTuple, TextIO

from ..devices import HostSnapshot
from ..procfs import printable
from ..text import gpu_ranges, paint, plural
from . import racers
from .racers import Outcome

# The referee: it knows nothing of leases, only when each process had which GPU. Pure.


class Collision(NamedTuple):
    """``pid`` took a GPU that ``rival`` had at that time."""

    label: str
    uuid: str
    pid: int
    rival: int


class RefereeReport(NamedTuple):
    """The ruling on one race, or on several.

    Attributes:
        claims: the number of claims that succeeded.
        taken: the number of GPUs that these claims got.
        refused: the number of claims that were refused.
        collisions: every GPU that a process took while another one had it.
        failed: the racers with any other error.
        trouble: the racers whose GPU or driver failed.
    """

    claims: int = 0
    taken: int = 0
    refused: int = 0
    collisions: tuple[Collision, ...] = ()
    failed: tuple[Outcome, ...] = ()
    trouble: tuple[Outcome, ...] = ()

    @property
    def fails(self) -> bool:
        """Whether claims failed to exclude each other, or failed. Errors of GPUs count only if no claim succeeded."""
        return bool(self.collisions or self.failed or (self.trouble and not self.claims))


def rule(*races: Sequence[Outcome]) -> RefereeReport:
    """Rule on races."""
    outcomes = [outcome for heat in races for outcome in heat]
    winners = [outcome for outcome in outcomes if outcome.gpus]
    return RefereeReport(
        claims=len(winners),
        taken=sum(len(outcome.gpus) for outcome in winners),
        refused=sum(bool(outcome.refused) for outcome in outcomes),
        collisions=tuple(found for heat in races for found in _collisions(heat)),
        failed=tuple(outcome for outcome in outcomes if outcome.failed),
        trouble=tuple(outcome for outcome in outcomes if outcome.trouble),
    )


def _collisions(heat: Iterable[Outcome]) -> Iterator[Collision]:
    latest: dict[str, Outcome] = {}  # UUID -> the process that has the GPU for longest
    for began, outcome in _in_time(heat):
        for gpu in outcome.gpus:
            rival = latest.get(gpu.uuid)
            if rival is not None and rival.ended > began:
                yield Collision(gpu.label, gpu.uuid, outcome.pid, rival.pid)
            if rival is None or outcome.ended > rival.ended:
                latest[gpu.uuid] = outcome


def _in_time(heat: Iterable[Outcome]) -> list[tuple[float, Outcome]]:
    """Return when each got its GPUs or was refused, in that order."""
    timed = [(outcome.began, outcome) for outcome in heat if outcome.began is not None]
    return sorted(timed, key=lambda one: one[0])


# The report that the demo prints: plain lines of at most 80 columns, equal lines merged.


# The most lines of a refusal that are printed: it names every GPU.
_REFUSAL_LINES = 4


def _wrapped(text: str, first: str = "", further: str = "  ") -> list[str]:
    return textwrap.wrap(
        printable(text),  # it may hold the command of another user's process
        80,
        initial_indent=first,
        subsequent_indent=further,
        break_on_hyphens=False,
    )


def host_lines(host: racers.RaceHost, asks: Sequence[int], simulated: str | None) -> list[str]:
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
        lines = _wrapped(f"This host has {models}.")
        end = "Only the free ones are used. Each is held for a moment, and no process waits."
    else:
        lines = _wrapped(f"A race on a simulated host, {simulated}: {models}.")
        end = "The processes and locks are real, the GPUs are not. No real GPU is touched."
    if host.obstacle:
        return [*lines, *_wrapped(f"No GPU can be claimed: {host.obstacle}", "  ")]
    if simulated is None or not asks:
        lines += [line for text in _states(host) for line in _wrapped(text, "  ", "    ")]
    return [*lines, end] if asks else lines


def _models(snapshot: HostSnapshot) -> str:
    counted = Counter(gpu.name or "unknown GPU" for gpu in snapshot.physical)
    text = ", ".join(f"{number} x {name}" for name, number in counted.items())
    split = Counter(gpu.index for gpu in snapshot.gpus if gpu.is_mig_instance)
    for index, number in split.items():
        text += f"; GPU {index} is split into {plural(number, 'MIG instance')}"
    return text


def _states(host: racers.RaceHost) -> list[str]:
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
    timed = _in_time(races[0])
    won = [(began, outcome) for began, outcome in timed if outcome.gpus]
    refused = [(began, outcome) for began, outcome in timed if outcome.refused]
    lines = use_lines(races[0], color)
    if won:
        got = f"{len(won)} process{'es' * (len(won) > 1)} got {plural(sum(len(outcome.gpus) for _, outcome in won))}"
        lines += _wrapped(f"{got} within {won[-1][0] * 1e3:.0f} ms{_further(races[1:])}.", "  ")
    for _, outcome in refused[:1]:
        lines.append(f"  {len(refused)} refused within {refused[-1][0] * 1e3:.0f} ms, one of them with the message:")
        message = []
        for text in outcome.refused.splitlines():
            indent = " " * (4 + len(text) - len(text.lstrip()))
            message += _wrapped(text.strip(), indent, indent + "  ")
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
    for began, outcome in _in_time(heat):
        given_back = max((last.get(gpu.uuid, -math.inf) for gpu in outcome.gpus), default=-math.inf)
        if -math.inf < given_back <= began:  # otherwise it is a collision
            gaps.append((began - given_back) * 1e3)
        last.update((gpu.uuid, outcome.ended) for gpu in outcome.gpus)
    served = f"{sum(bool(outcome.gpus) for outcome in heat)} of {len(heat)} served"
    if gaps:
        served += f"; a freed GPU was idle for {median(gaps):.0f} ms (median), {max(gaps):.0f} ms at most"
    return _wrapped(f"{served}.", "  ")


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
    lines = [line for text in paragraphs for line in _wrapped(text)]
    result = "red" if ruling.fails else "green"
    return [paint(line, result, color and line.startswith("Verdict:")) for line in lines]


# The demo: a race on real GPUs if some are free, else on a simulated host.


# No round begins later than this after the start of the first one, seconds: contexts on real GPUs are slow.
_ENOUGH = 3.0


def run(processes: int | None = None, rounds: int = 5, stream: TextIO | None = None, *, color: bool = False) -> int:
    """Run the races and print a report: first without safe_gpu, then with it, then the number of collisions.

    The race without safe_gpu is always on a simulated host. The others are on real GPUs that are free, where no process
    waits and each GPU is held for a moment. If none can be claimed, they run on a simulated host in a temporary
    directory, where the racers also wait for turns. However the demo ends, it leaves no process and no file.

    Args:
        processes: the number of processes that claim at the same moment; default: twice as many as there are free
            GPUs, 4 to 32.
        rounds: the number of rounds; fewer if the contexts on the GPUs are slow.
        stream: where the report is printed; default: standard output.
        color: paint the report.

    Returns:
        0; 1 if two processes had the same GPU, or a claim failed for another reason than too few free GPUs.

    Raises:
        NoDriverError: SAFE_GPU_DRIVER names a driver that does not work.
        UnsatisfiableRequestError: SAFE_GPU_DRIVER names no existing driver or simulated host.
        LockTimeout, StateDirError: the claims of this host cannot be read.
    """
    with racers.signals_at_the_end():
        return _Demo(stream or sys.stdout, processes, rounds, color).run()


class _Demo:
    """One run of the demo, with its races so far."""

    def __init__(self, stream: TextIO, processes: int | None, rounds: int, color: bool) -> None:
        self._stream = stream
        self._processes = processes
        self._rounds = rounds
        self._color = color
        self._races: list[list[Sequence[Outcome]]] = []  # of each section with safe_gpu
        self._contrast: Sequence[Outcome] | None = None

    def run(self) -> int:
        wanted = racers.wanted_host()
        if wanted is None:
            with racers.simulated_host(racers.DEFAULT_HOST):
                pass  # it makes a claim, so that all modules are imported before the race
        if not self._race(wanted):
            self._say("")
            self._race(racers.DEFAULT_HOST)
        whole = rule(*(heat for races in self._races for heat in races))
        self._say("", *verdict_lines(whole, rule(self._contrast or ()), self._color))
        return 1 if any(rule(*races).fails for races in self._races) else 0

    def _race(self, simulated: str | None) -> bool:
        """Race on this host or on a simulated one; return whether there was a race, and a process got a GPU."""
        with racers.simulated_host(simulated) if simulated is not None else nullcontext():
            host = racers.look()
            asks = racers.plan_race(host, self._processes)
            self._say(*host_lines(host, asks, simulated))
            if not asks:
                return False
            if self._contrast is None:
                self._contrast = self._without(asks, simulated)
            self._rush(asks)
            if simulated is not None:
                self._section(
                    f"With safe_gpu, each waits for its turn and uses its GPUs for {racers.TURN * 1e3:.0f} ms:"
                )
                heat = racers.race(asks, racers.claim_in_turn)
                self._say(*turns_lines(heat))
                self._races.append([heat])
            elif not rule(*self._races[-1]).claims:
                self._say("", "No process got a GPU: others took them first, or the GPUs failed.")
                return False
            return True

    def _without(self, asks: Sequence[int], simulated: str | None) -> Sequence[Outcome]:
        """Race on a simulated host without safe_gpu: processes poll the driver, pick free GPUs and start up."""
        where = "" if simulated is not None else f"on a simulated host, {racers.DEFAULT_HOST}, "
        self._section(f"Without safe_gpu, {where}{len(asks)} processes poll the driver and pick free GPUs:")
        with nullcontext() if simulated is not None else racers.simulated_host(racers.DEFAULT_HOST):
            heat = racers.race(asks, racers.poll_and_pick)
        self._say(*use_lines(heat, self._color))
        return heat

    def _rush(self, asks: Sequence[int]) -> None:
        """Let all racers claim at the same moment without waiting, in several rounds."""
        began = time.monotonic()
        self._section(f"With safe_gpu, {len(asks)} processes claim GPUs at the same moment, and none waits:")
        races: list[Sequence[Outcome]] = [racers.race(asks, racers.claim_at_once)]
        while len(races) < self._rounds and time.monotonic() - began < _ENOUGH:
            races.append(racers.race(asks, racers.claim_at_once))
        self._say(*rush_lines(races, self._color))
        self._races.append(races)

    def _section(self, title: str) -> None:
        self._say("", *(paint(line, "bold", self._color) for line in _wrapped(title)))

    def _say(self, *lines: str) -> None:
        for line in lines:
            print(line, file=self._stream)
        self._stream.flush()  # a race takes time, and forked racers must not inherit buffered text
