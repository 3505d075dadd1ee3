"""Runs the demo: a race on real GPUs if some are free, else on a simulated host."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from . import report
from .children import cleaned_up
from .plan import Plan, plan_race
from .racers import TURN, RaceResult, claim_at_once, claim_in_turn, poll_and_pick, race
from .stage import DEFAULT_HOST, RaceHost, look, simulated_host, wanted_host
from .verdict import RefereeReport, add_up, rule

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
    printer = report.Printer(sys.stdout if stream is None else stream)
    with cleaned_up():
        return _Demo(printer, processes, rounds).run()


class _Demo:
    """One run of the demo, with the rulings of its races so far."""

    def __init__(self, printer: report.Printer, processes: int | None, rounds: int) -> None:
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
        self._printer.say(*report.host_lines(host, plan, None))
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
        self._printer.say(*report.host_lines(host, plan, name))
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
        self._printer.say(*report.rush_lines(heat))
        rulings = [rule(heat)]
        while len(rulings) < self._rounds and time.monotonic() - began < _ENOUGH:
            rulings.append(rule(race(plan.asks, claim_at_once, pause)))
        if len(rulings) > 1:
            self._printer.say("", *report.rounds_lines(len(rulings) - 1, add_up(rulings[1:])))
        self._exclusive.append(add_up(rulings))
        return self._exclusive[-1].claims

    def _turns(self, plan: Plan) -> None:
        """All racers claim at the same moment, wait for their turns and release the GPUs after a moment."""
        self._printer.section(
            f"The same {len(plan.asks)}, each waiting for its turn and using its GPUs for {TURN * 1e3:.0f} ms:"
        )
        heat = race(plan.asks, claim_in_turn, _SIMULATED_PAUSE)
        self._printer.say(*report.turns_lines(heat))
        self._exclusive.append(rule(heat))

    def _share(self, plan: Plan, pause: float) -> None:
        """All racers claim the one GPU, which drives the display."""
        self._printer.section(
            f"{len(plan.asks)} processes claim the one GPU at the same moment. It drives the display, so claims share "
            "it with the desktop and with each other:"
        )
        heat = race(plan.asks, claim_at_once, pause)
        self._printer.say(*report.shared_lines(heat))
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
        self._printer.say(*report.contrast_lines(heat))
        self._contrast = rule(heat)

    def _verdict(self) -> int:
        exclusive = add_up(self._exclusive) if self._exclusive else None
        self._printer.say("", *report.verdict_lines(exclusive, self._shared, self._contrast, self._labels))
        return 1 if any(ruling.fails for ruling in (*self._exclusive, self._shared) if ruling is not None) else 0
