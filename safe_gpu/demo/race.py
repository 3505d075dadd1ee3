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
from ..text import gpu_ranges, plural
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
    """When each got its GPUs or was refused, in that order."""
    timed = [(outcome.began, outcome) for outcome in heat if outcome.began is not None]
    return sorted(timed, key=lambda one: one[0])


# The report that the demo prints: plain lines of at most 80 columns, equal lines merged.


# The most lines of a refusal that are printed: it names every GPU.
_REFUSAL_LINES = 8


def _wrapped(text: str, first: str = "", further: str = "  ") -> list[str]:
    return textwrap.wrap(
        printable(text),  # it may hold the command of another user's process
        80,
        initial_indent=first,
        subsequent_indent=further,
        break_on_hyphens=False,
    )


def host_lines(host: racers.RaceHost, asks: Sequence[int], simulated: str | None) -> list[str]:
    """The GPUs of the host, and what the race does with them.

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
    return [*lines, end if asks else "There is nothing to race for."]


def _models(snapshot: HostSnapshot) -> str:
    counted = Counter(gpu.name or "unknown GPU" for gpu in snapshot.physical)
    text = ", ".join(f"{number} x {name}" for name, number in counted.items())
    split = Counter(gpu.index for gpu in snapshot.gpus if gpu.is_mig_instance)
    for index, number in split.items():
        text += f"; GPU {index} is split into {plural(number, 'MIG instance')}"
    return text


def _states(host: racers.RaceHost) -> list[str]:
    """A line for each state of GPUs."""
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


def rush_lines(heat: Iterable[Outcome]) -> list[str]:
    """Who got what and when, all refusals as one line, and the message of one refusal."""
    timed = _in_time(heat)
    refused = [(began, outcome) for began, outcome in timed if outcome.refused]
    lines = []
    for began, outcome in timed:
        line = f"{began * 1e3:8.1f} ms  "
        if outcome.gpus:
            asked, got = plural(outcome.nb_gpus), ",".join(gpu.label for gpu in outcome.gpus)
            lines.append(f"{line}process {outcome.pid:<8d}asked for {asked:8s}got GPU {got}")
        elif outcome is refused[0][1]:
            others = f"es were refused, the last at {refused[-1][0] * 1e3:.1f} ms"
            lines.append(f"{line}{len(refused)} process{others if len(refused) > 1 else ' was refused'}")
    for _, outcome in refused[:1]:
        lines += ["", f"   Process {outcome.pid}, which asked for {plural(outcome.nb_gpus)}, was told:"]
        message = []
        for text in outcome.refused.splitlines():
            indent = " " * (5 + len(text) - len(text.lstrip()))
            message += _wrapped(text.strip(), indent, indent + "  ")
        if len(message) > _REFUSAL_LINES:
            message[_REFUSAL_LINES - 1 :] = [f"     ... and {len(message) - _REFUSAL_LINES + 1} more lines"]
        lines += message
    return lines


def turns_lines(heat: Sequence[Outcome]) -> list[str]:
    """How many racers got their GPUs, and how long GPUs were idle between two claims."""
    last: dict[str, float] = {}
    gaps = []
    for began, outcome in _in_time(heat):
        given_back = max((last.get(gpu.uuid, -math.inf) for gpu in outcome.gpus), default=-math.inf)
        if -math.inf < given_back <= began:  # otherwise it is a collision
            gaps.append((began - given_back) * 1e3)
        last.update((gpu.uuid, outcome.ended) for gpu in outcome.gpus)
    lines = [f"   {sum(bool(outcome.gpus) for outcome in heat)} of {len(heat)} served."]
    if gaps:
        times = f"median {median(gaps):.0f} ms, worst {max(gaps):.0f} ms"
        lines.append(f"   From a release to the next claim of that GPU: {times}.")
    return lines


def contrast_lines(heat: Iterable[Outcome]) -> list[str]:
    """The number of processes on each GPU that was picked."""
    users = Counter(gpu.label for outcome in heat for gpu in outcome.gpus)
    return [f"   GPU {label}: {number} process{'es at once' * (number > 1)}" for label, number in sorted(users.items())]


def verdict_lines(ruling: RefereeReport, contrast: RefereeReport) -> list[str]:
    """What the referee saw: of all races, and of the one without safe_gpu."""
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
        f"Verdict: {met} in {claims} of {plural(ruling.taken)}; {plural(ruling.refused, 'claim')} refused.",
        "  The referee does not rely on the claims: by one clock each process notes when it has a GPU and when it "
        "gives it back. No two such times may overlap.",
        f"  Without safe_gpu, {len(contrast.collisions)} of {plural(contrast.taken, 'chosen GPU')} were already in use "
        "by another process.",
    ]
    return [line for text in paragraphs for line in _wrapped(text)]


# The demo: a race on real GPUs if some are free, else on a simulated host.


# No round begins later than this after the start of the first one, seconds: contexts on real GPUs are slow.
_ENOUGH = 3.0


def run(processes: int | None = None, rounds: int = 5, stream: TextIO | None = None) -> int:
    """Run the races and print a report: who got which GPU and when, who was refused and why, how many collisions.

    On a host with real GPUs only free ones are claimed, no process waits, and each GPU is held for a moment. If none
    can be claimed, the race runs on a simulated host in a temporary directory. There the racers also wait for turns.
    At last the race is repeated without safe_gpu, on a simulated host. However the demo ends, it leaves no process and
    no file.

    Args:
        processes: the number of processes that claim at the same moment; default: twice as many as there are free
            GPUs, 4 to 32.
        rounds: the number of rounds; fewer if the contexts on the GPUs are slow.
        stream: where the report is printed; default: standard output.

    Returns:
        0; 1 if two processes had the same GPU, or a claim failed for another reason than too few free GPUs.

    Raises:
        NoDriverError: SAFE_GPU_DRIVER names a driver that does not work.
        UnsatisfiableRequestError: SAFE_GPU_DRIVER names no existing driver or simulated host.
        LockTimeout, StateDirError: the claims of this host cannot be read.
    """
    with racers.signals_at_the_end():
        return _Demo(stream or sys.stdout, processes, rounds).run()


class _Demo:
    """One run of the demo, with its races so far."""

    def __init__(self, stream: TextIO, processes: int | None, rounds: int) -> None:
        self._stream = stream
        self._processes = processes
        self._rounds = rounds
        self._sections = 0
        self._races: list[list[Sequence[Outcome]]] = []  # of each section

    def run(self) -> int:
        wanted = racers.wanted_host()
        if wanted is None:
            with racers.simulated_host(racers.DEFAULT_HOST):
                pass  # it makes a claim, so that all modules are imported before the race
        if not self._race(wanted):
            wanted = racers.DEFAULT_HOST
            self._say("")
            self._race(wanted)
        whole = rule(*(heat for races in self._races for heat in races))
        self._say("", *verdict_lines(whole, self._without(wanted)))
        return 1 if any(rule(*races).fails for races in self._races) else 0

    def _race(self, simulated: str | None) -> bool:
        """Race on this host or on a simulated one; returns whether there was a race, and somebody got a GPU."""
        with racers.simulated_host(simulated) if simulated is not None else nullcontext():
            host = racers.look()
            asks = racers.plan_race(host, self._processes)
            self._say(*host_lines(host, asks, simulated))
            if not asks:
                return False
            self._rush(asks)
            if simulated is not None:
                each = f"each waiting for its turn and using its GPUs for {racers.TURN * 1e3:.0f} ms"
                self._section(f"The same {len(asks)}, {each}:")
                heat = racers.race(asks, racers.claim_in_turn)
                self._say(*turns_lines(heat))
                self._races.append([heat])
            elif not rule(*self._races[-1]).claims:
                self._say("", "No process got a GPU: others took them first, or the GPUs failed.")
                return False
            return True

    def _rush(self, asks: Sequence[int]) -> None:
        """All racers claim at the same moment and none waits, in several rounds."""
        began = time.monotonic()
        self._section(f"{len(asks)} processes claim GPUs at the same moment, and none waits:")
        races: list[Sequence[Outcome]] = [racers.race(asks, racers.claim_at_once)]
        self._say(*rush_lines(races[0]))
        while len(races) < self._rounds and time.monotonic() - began < _ENOUGH:
            races.append(racers.race(asks, racers.claim_at_once))
        if len(races) > 1:
            ruling = rule(*races[1:])
            claims, refusals = plural(ruling.claims, "claim"), plural(ruling.refused, "refusal")
            self._say("", f"   {plural(len(races) - 1, 'more round')}: {claims}, {refusals}.")
        self._races.append(races)

    def _without(self, wanted: str | None) -> RefereeReport:
        """The race without safe_gpu, on a simulated host: processes poll the driver, pick a free GPU and start up."""
        with racers.simulated_host(wanted or racers.DEFAULT_HOST):
            asks = racers.plan_race(racers.look(), self._processes)
            where = "" if wanted else f"on a simulated host, {racers.DEFAULT_HOST}, "
            what = "processes without safe_gpu: they poll the driver, pick free GPUs and start up"
            self._section(f"For contrast, {where}{len(asks)} {what}:")
            heat = racers.race(asks, racers.poll_and_pick)
            self._say(*contrast_lines(heat))
            return rule(heat)

    def _section(self, title: str) -> None:
        self._sections += 1
        self._say("", *_wrapped(f"{self._sections}. {title}", "", "   "), "")

    def _say(self, *lines: str) -> None:
        for line in lines:
            print(line, file=self._stream)
        self._stream.flush()  # a race takes time, and forked racers must not inherit buffered text
