#!/usr/bin/env python3
"""Runs a command with and without binding to the CPUs beside its GPUs, by turns, and prints what binding is worth.

    python tools/compare_binding.py --runs 5 -- python train.py --steps 200
    python tools/compare_binding.py -n 8 --figure 'throughput: (.*)' -- \\
        torchrun --no-python --nproc-per-node 8 BIND python train.py

It claims the GPUs once. It compares the time of a run, or the number that --figure finds in its output. BIND stands for
`safe-gpu bind` where each rank is bound next to its own GPU; without that word the whole command is bound. Both kinds
of runs go through `safe-gpu bind`, so that its start counts for both.

Pages are those of all processes of a run, by NUMA node, at the look that showed most of them. A page is remote if it is
on a node without a GPU of its process. A command that binds itself compares nothing: let it claim with affinity=None.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median

import common  # noqa: F401 - the package beside this script

import safe_gpu
from safe_gpu.affinity.placement import PlacementReport
from safe_gpu.affinity.planner import MEMORY_MODES, MODES
from safe_gpu.errors import GPUAffinityError, SafeGpuError
from safe_gpu.topology.cpulist import format_cpulist

UNBOUND, BOUND = "not bound", "bound"


@dataclass
class Arm:
    """The runs of one kind.

    Attributes:
        words: `safe-gpu bind` and its options.
        figures: seconds, or what --figure has found, of each run.
        pages: bytes of memory by node, in the look at a run that showed most.
        remote: those on nodes without a GPU of their process.
        masks: the CPUs that the main threads of a run's processes could use.
    """

    words: Sequence[str]
    figures: list[float] = field(default_factory=list)
    pages: Counter[int] = field(default_factory=Counter)
    remote: int = 0
    masks: set[frozenset[int]] = field(default_factory=set)

    def look(self, report: PlacementReport) -> None:
        """Keep what a look at the processes of a run shows."""
        pages: Counter[int] = Counter()
        remote = 0
        for process in report.processes:
            pages.update(process.memory or {})
            remote += sum(size for node, size in (process.memory or {}).items() if node not in process.gpu_nodes)
        self.masks = {process.threads[0].cpus_allowed for process in report.processes}
        if pages.total() > self.pages.total():
            self.pages, self.remote = pages, remote

    def run(self, command: Sequence[str], every: float, figure: str | None) -> None:
        """Run the command once.

        Raises:
            SystemExit: it failed, or its output has no figure.
        """
        at = command.index("BIND") if "BIND" in command else 0
        words = [*command[:at], *self.words, *command[at + (command[at] == "BIND") :]]
        with tempfile.TemporaryFile("w+") as output:
            began = time.monotonic()
            process = subprocess.Popen(words, stdout=output if figure else sys.stderr)
            while (code := process.poll()) is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(every)
                    continue
                with suppress(GPUAffinityError):  # it has ended meanwhile
                    self.look(safe_gpu.placement(process.pid))
            seconds = time.monotonic() - began
            output.seek(0)
            found = re.findall(figure, output.read()) if figure else [seconds]
        if code or not found:
            sys.exit(f"a run ended with {code}" if code else f"a run printed nothing that matches {figure!r}")
        self.figures.append(float(found[-1]))

    def line(self, unit: str) -> str:
        """Return a line of the table."""
        figures, total = sorted(self.figures), self.pages.total()
        text = f"median {median(figures):.4g}{unit} ({figures[0]:.4g} to {figures[-1]:.4g})"
        if not total:
            return f"{text}; pages were not seen: see --every"
        nodes = ", ".join(f"node {node} {size / 2**20:,.0f} MiB" for node, size in sorted(self.pages.items()))
        return f"{text}; pages: {nodes}; remote {100 * self.remote / total:.1f}%"


def compare(command: Sequence[str], arms: dict[str, Arm], runs: int, every: float, figure: str | None) -> None:
    """Run both kinds that many times; which goes first alternates, so that a drift of the host hits both alike."""
    for number in range(runs):
        for name in (UNBOUND, BOUND) if number % 2 == 0 else (BOUND, UNBOUND):
            arms[name].run(command, every, figure)
            print(f"run {number + 1} of {runs}, {name}: {arms[name].figures[-1]:.4g}", file=sys.stderr, flush=True)


def verdict(arms: dict[str, Arm], by_figure: bool) -> list[str]:
    """Return the lines for both kinds of runs, and what they tell about binding."""
    lines = [f"{name + ':':<10} {arm.line('' if by_figure else ' s')}" for name, arm in arms.items()]
    unbound, bound = (median(arm.figures) for arm in arms.values())
    ratio = bound / unbound if by_figure else unbound / bound
    lines.append(f"bound / not bound: {ratio:.2f} {'of the figure' if by_figure else 'times as fast'}")
    if arms[BOUND].masks == arms[UNBOUND].masks != set():
        masks = "; ".join(map(format_cpulist, arms[BOUND].masks))
        lines.append(f"nothing is compared: both kinds of runs may use the same CPUs ({masks})")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("-n", "--gpus", type=int, default=1, metavar="N", help="how many GPUs to claim (default: %(default)s)")
    add("--only", default=(), metavar="L", help="these GPUs: 0,3")
    add("--runs", type=int, default=5, metavar="N", help="of each kind (default: %(default)s)")
    add("--affinity", choices=MODES, default="node", metavar="M", help=f"one of {', '.join(MODES)} (default: node)")
    add("--memory", choices=MEMORY_MODES, help="NUMA memory policy of the bound runs")
    add("--figure", metavar="REGEX", help="compare the last number that the group of this pattern finds in the output")
    add(
        "--every",
        type=float,
        default=2.0,
        metavar="S",
        help="seconds between looks at the pages (default: %(default)s)",
    )
    add("command", nargs=argparse.REMAINDER, help="after --: the command")
    options = parser.parse_args()
    command = options.command[options.command[:1] == ["--"] :]
    if not command or options.runs < 1 or options.every <= 0:
        parser.error("a command after --, --runs from 1 up, and --every above 0 are needed")
    bind = [sys.executable, "-m", "safe_gpu", "bind"]
    memory = ["--memory", options.memory] if options.memory else []
    arms = {
        UNBOUND: Arm([*bind, "--affinity", "none", "--"]),
        BOUND: Arm([*bind, "--affinity", options.affinity, *memory, "--"]),
    }
    claim = {"only": options.only, "affinity": None, "delegate": True, "timeout": None}
    try:
        with safe_gpu.GPUOwner(options.gpus, safe_gpu.NoPlaceholder(), **claim) as owner:
            print(f"GPU {', '.join(map(str, owner.devices_taken))}", file=sys.stderr)
            compare(command, arms, options.runs, options.every, options.figure)
    except SafeGpuError as err:
        print(err, file=sys.stderr)
        return 1
    print("\n".join(verdict(arms, bool(options.figure))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
