"""Runs the demo: the race, the referee's ruling, and the report."""

from __future__ import annotations

import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from ..procfs import describe_process, printable
from ..text import gpu_ranges, plural
from .racers import TURN, Plan, RaceResult, claim_at_once, claim_in_turn, plan_race, poll_and_pick, race
from .referee import DEFAULT_HOST, RaceHost, cleaned_up, look, simulated_host, wanted_host

if TYPE_CHECKING:
    from ..devices import HostSnapshot
    from .racers import Outcome, Plan, RaceResult
    from .referee import RaceHost


# The referee's ruling on a race: which of the facts of both detectors are collisions. Pure.


class Collision(NamedTuple):
    """A collision: these processes had the GPU at the same time. ``witness``: "marker" or "driver"."""

    uuid: str
    pids: tuple[int, ...]
    witness: str


class Intruder(NamedTuple):
    """Other processes came onto a GPU of a racer. They do not claim, so no lock keeps them off."""

    uuid: str
    strangers: tuple[int, ...]
    racers: tuple[int, ...]


class RefereeReport(NamedTuple):
    """The ruling on one race, or on several.

    Attributes:
        claims: the number of claims that succeeded.
        taken: the number of GPUs that these claims got.
        refused: the number of claims that were refused.
        collisions: how often a process took a GPU that another one had, by the detector that saw more such cases.
        clashes: these cases, as each detector saw them.
        visits: see :class:`Visit`.
        looks: the number of polls of the driver.
        shown: the number of claims whose process the driver showed on all of their GPUs.
        failed: the racers with any other error.
        trouble: the racers whose GPU or driver failed.
        blind: why a watch stopped early.
    """

    claims: int = 0
    taken: int = 0
    refused: int = 0
    collisions: int = 0
    clashes: tuple[Collision, ...] = ()
    visits: tuple[Intruder, ...] = ()
    looks: int = 0
    shown: int = 0
    failed: tuple[Outcome, ...] = ()
    trouble: tuple[Outcome, ...] = ()
    blind: tuple[str, ...] = ()

    @property
    def fails(self) -> bool:
        """Whether claims failed to exclude each other, or failed. Errors of GPUs count only if no claim succeeded."""
        return bool(self.collisions or self.failed or (self.trouble and not self.claims))


def rule(heat: RaceResult, *, shared: bool = False) -> RefereeReport:
    """Rule on a race.

    Two racers on one GPU are a collision. A racer on a GPU with a process from before the start is a collision too. Any
    other process that came later is a visitor. If claims share the GPU (``shared``), there are no collisions.
    """
    ruling = RefereeReport(
        claims=len(heat.winners),
        taken=sum(len(outcome.uuids) for outcome in heat.winners),
        refused=len(heat.refused),
        looks=heat.watched.looks,
        shown=sum(_shown(outcome, heat.watched.shown) for outcome in heat.winners),
        failed=tuple(outcome for outcome in heat.outcomes if outcome.failed),
        trouble=tuple(outcome for outcome in heat.outcomes if outcome.trouble),
        blind=tuple(filter(None, [heat.watched.trouble])),
    )
    return ruling if shared else ruling._replace(**_encounters(heat))


def _encounters(heat: RaceResult) -> dict[str, Any]:
    by_marker = [
        Collision(uuid, (outcome.pid, rival), "marker")
        for outcome in heat.outcomes
        for uuid, rival in zip(outcome.uuids, outcome.rivals, strict=True)
        if rival >= 0
    ]
    racer_of = {number: outcome for outcome in heat.outcomes for number in (outcome.pid, *outcome.known_as)}
    together: dict[str, set[int]] = {}
    visits = []
    for sighting in heat.watched.sightings:
        racers = {racer_of[pid].pid for pid in sighting.newcomers if pid in racer_of}
        strangers = sighting.newcomers - racer_of.keys()
        holders = {pid for pid in racers if sighting.uuid in racer_of[pid].uuids}
        if len(racers) > 1:
            together.setdefault(sighting.uuid, set()).update(racers)
        if holders and sighting.residents:
            together.setdefault(sighting.uuid, set()).update(holders | sighting.residents)
        if racers and strangers:
            visits.append(Intruder(sighting.uuid, tuple(sorted(strangers)), tuple(sorted(racers))))
    by_driver = [Collision(uuid, tuple(sorted(pids)), "driver") for uuid, pids in together.items()]
    return {
        "collisions": max(len(by_marker), sum(len(clash.pids) - 1 for clash in by_driver)),
        "clashes": (*by_marker, *by_driver),
        "visits": tuple(visits),
    }


def add_up(rulings: Iterable[RefereeReport]) -> RefereeReport:
    """The sum of several rulings."""
    total: tuple[Any, ...] = RefereeReport()
    for ruling in rulings:
        total = tuple(one + other for one, other in zip(total, ruling, strict=True))
    return RefereeReport(*total)


def _shown(outcome: Outcome, shown: frozenset[tuple[str, int]]) -> bool:
    numbers = (outcome.pid, *outcome.known_as)
    return all(any((uuid, number) in shown for number in numbers) for uuid in outcome.uuids)


# The report that the demo prints: plain lines of at most 80 columns, equal lines merged.


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


# Runs the demo: a race on real GPUs if some are free, else on a simulated host.


# No round begins later than this after the start of the first one, seconds: contexts on real GPUs are slow.
_ENOUGH = 3.0
# Pause between two polls of the referee, seconds. It is longer for a real driver, which has other callers.
_REAL_PAUSE, _SIMULATED_PAUSE = 0.02, 0.001


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
    printer = Printer(sys.stdout if stream is None else stream)
    with cleaned_up():
        return _Demo(printer, processes, rounds).run()


class _Demo:
    """One run of the demo, with the rulings of its races so far."""

    def __init__(self, printer: Printer, processes: int | None, rounds: int) -> None:
        self._printer = printer
        self._processes = processes
        self._rounds = rounds
        self._exclusive: list[RefereeReport] = []  # one for each section
        self._shared: RefereeReport | None = None
        self._contrast: RefereeReport | None = None
        self._labels: dict[str, str] = {}

    def run(self) -> int:
        simulated = wanted_host()
        exclusive = simulated is None and self._on_real_gpus()
        if simulated is None and not exclusive:
            simulated = DEFAULT_HOST
            self._printer.say("")
        with simulated_host(simulated or DEFAULT_HOST):
            if simulated is not None:
                exclusive = self._on_simulated_gpus(simulated)
            if exclusive:
                self._without(real=simulated is None)
        return self._verdict()

    def _on_real_gpus(self) -> bool:
        """Race on this host if possible; returns whether the race showed claims that exclude each other."""
        host, plan = self._plan()
        self._printer.say(*host_lines(host, plan, None))
        if plan is None:
            return False
        with simulated_host(DEFAULT_HOST):
            pass  # it makes a claim, so that all modules are imported before the race
        if plan.shared:
            self._share(plan, _REAL_PAUSE)
            self._printer.say("", "On GPUs without a display claims exclude each other, as on a simulated host:")
            return False
        if self._rush(plan, _REAL_PAUSE):
            return True
        self._printer.say("", "No process got a GPU: others took them first, or the GPUs failed.")
        return False

    def _on_simulated_gpus(self, name: str) -> bool:
        """Race on the simulated host that the environment names; returns the same as :meth:`_on_real_gpus`."""
        host, plan = self._plan()
        assert plan is not None, "no other process uses this simulated host"
        self._printer.say(*host_lines(host, plan, name))
        if plan.shared:
            self._share(plan, _SIMULATED_PAUSE)
            return False
        self._rush(plan, _SIMULATED_PAUSE)
        self._turns(plan)
        return True

    def _plan(self) -> tuple[RaceHost, Plan | None]:
        host = look()
        self._labels.update((gpu.uuid, gpu.label) for gpu in host.snapshot.gpus)
        return host, plan_race(host.snapshot, host.verdicts, host.fence, self._processes)

    # The races

    def _rush(self, plan: Plan, pause: float) -> int:
        """All racers claim at the same moment and none waits, in several rounds; the number of successful claims."""
        began = time.monotonic()
        self._printer.section(f"{len(plan.asks)} processes claim GPUs at the same moment, and none waits:")
        heat = race(plan.asks, claim_at_once, pause)
        self._printer.say(*rush_lines(heat))
        rulings = [rule(heat)]
        while len(rulings) < self._rounds and time.monotonic() - began < _ENOUGH:
            rulings.append(rule(race(plan.asks, claim_at_once, pause)))
        if len(rulings) > 1:
            self._printer.say("", *rounds_lines(len(rulings) - 1, add_up(rulings[1:])))
        self._exclusive.append(add_up(rulings))
        return self._exclusive[-1].claims

    def _turns(self, plan: Plan) -> None:
        """All racers claim at the same moment, wait for their turns and release the GPUs after a moment."""
        self._printer.section(
            f"The same {len(plan.asks)}, each waiting for its turn and using its GPUs for {TURN * 1e3:.0f} ms:"
        )
        heat = race(plan.asks, claim_in_turn, _SIMULATED_PAUSE)
        self._printer.say(*turns_lines(heat))
        self._exclusive.append(rule(heat))

    def _share(self, plan: Plan, pause: float) -> None:
        """All racers claim the one GPU, which drives the display."""
        self._printer.section(
            f"{len(plan.asks)} processes claim the one GPU at the same moment. It drives the display, so claims share "
            "it with the desktop and with each other:"
        )
        heat = race(plan.asks, claim_at_once, pause)
        self._printer.say(*shared_lines(heat))
        self._shared = rule(heat, shared=True)

    def _without(self, *, real: bool) -> None:
        """The race without safe_gpu, on a simulated host: processes poll the driver, pick a free GPU and start up."""
        _, plan = self._plan()
        assert plan is not None, "no other process uses this simulated host"
        where = f"on a simulated host, {DEFAULT_HOST}, " if real else ""
        self._printer.section(
            f"For contrast, {where}{len(plan.asks)} processes without safe_gpu: they poll the driver, pick free GPUs "
            "and start up:"
        )
        heat: RaceResult = race(plan.asks, poll_and_pick, _SIMULATED_PAUSE)
        self._printer.say(*contrast_lines(heat))
        self._contrast = rule(heat)

    def _verdict(self) -> int:
        exclusive = add_up(self._exclusive) if self._exclusive else None
        self._printer.say("", *verdict_lines(exclusive, self._shared, self._contrast, self._labels))
        return 1 if any(ruling.fails for ruling in (*self._exclusive, self._shared) if ruling is not None) else 0
