"""The demo: a race on real GPUs if some are free, else on a simulated host."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, TextIO

from ..wording.text import paint
from . import race_host
from . import racers as racers_module
from .referee import rule
from .report import host_lines, rush_lines, turns_lines, use_lines, verdict_lines, wrapped_lines

if TYPE_CHECKING:
    from .racers import Outcome

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
    with racers_module.signals_at_the_end():
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
        wanted = race_host.wanted_host()
        if wanted is None:
            with race_host.simulated_host(race_host.DEFAULT_HOST):
                pass  # it makes a claim, so that all modules are imported before the race
        if not self._race(wanted):
            self._say("")
            self._race(race_host.DEFAULT_HOST)
        whole = rule(*(heat for races in self._races for heat in races))
        self._say("", *verdict_lines(whole, rule(self._contrast or ()), self._color))
        return 1 if any(rule(*races).fails for races in self._races) else 0

    def _race(self, simulated: str | None) -> bool:
        """Race on this host or on a simulated one; return whether there was a race, and a process got a GPU."""
        with race_host.simulated_host(simulated) if simulated is not None else nullcontext():
            host = race_host.look()
            asks = racers_module.plan_race(host, self._processes)
            self._say(*host_lines(host, asks, simulated))
            if not asks:
                return False
            if self._contrast is None:
                self._contrast = self._without(asks, simulated)
            self._rush(asks)
            if simulated is not None:
                self._section(
                    f"With safe_gpu, each waits for its turn and uses its GPUs for {racers_module.TURN * 1e3:.0f} ms:"
                )
                heat = racers_module.race(asks, racers_module.claim_in_turn)
                self._say(*turns_lines(heat))
                self._races.append([heat])
            elif not rule(*self._races[-1]).claims:
                self._say("", "No process got a GPU: others took them first, or the GPUs failed.")
                return False
            return True

    def _without(self, asks: Sequence[int], simulated: str | None) -> Sequence[Outcome]:
        """Race on a simulated host without safe_gpu: processes poll the driver, pick free GPUs and start up."""
        where = "" if simulated is not None else f"on a simulated host, {race_host.DEFAULT_HOST}, "
        self._section(f"Without safe_gpu, {where}{len(asks)} processes poll the driver and pick free GPUs:")
        with nullcontext() if simulated is not None else race_host.simulated_host(race_host.DEFAULT_HOST):
            heat = racers_module.race(asks, racers_module.poll_and_pick)
        self._say(*use_lines(heat, self._color))
        return heat

    def _rush(self, asks: Sequence[int]) -> None:
        """Let all racers claim at the same moment without waiting, in several rounds."""
        began = time.monotonic()
        self._section(f"With safe_gpu, {len(asks)} processes claim GPUs at the same moment, and none waits:")
        races: list[Sequence[Outcome]] = [racers_module.race(asks, racers_module.claim_at_once)]
        while len(races) < self._rounds and time.monotonic() - began < _ENOUGH:
            races.append(racers_module.race(asks, racers_module.claim_at_once))
        self._say(*rush_lines(races, self._color))
        self._races.append(races)

    def _section(self, title: str) -> None:
        self._say("", *(paint(line, "bold", self._color) for line in wrapped_lines(title)))

    def _say(self, *lines: str) -> None:
        for line in lines:
            print(line, file=self._stream)
        self._stream.flush()  # a race takes time, and forked racers must not inherit buffered text
