#!/usr/bin/env python3
"""Measures planning and reading a topology on generated hosts. No GPU is needed.

Planning 1,024 CPUs for 16 GPUs must stay under 20 ms in every mode; the exit code is 1 if it does not.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from safe_gpu.affinity.cpu_shares import node_cpus_of
from safe_gpu.affinity.options import MODES
from safe_gpu.affinity.planner import plan
from safe_gpu.devices import Gpu, HostSnapshot
from safe_gpu.runtimes.runtime import Runtime
from safe_gpu.topology import GpuLocality, HostTopology, read_topology

BUDGET_MS = 20.0


def large_host(cores: int = 512, nodes: int = 8, packages: int = 2, gpus: int = 16) -> HostTopology:
    """A host with two threads per core, numbered as Linux does on x86."""
    threads = [frozenset({core, core + cores}) for core in range(cores)]

    def of(part: int, parts: int) -> frozenset[int]:
        return frozenset().union(*threads[part * cores // parts : (part + 1) * cores // parts])

    return HostTopology(
        cpus=frozenset(range(2 * cores)),
        cores=threads,
        nodes={node: of(node, nodes) for node in range(nodes)},
        packages={package: of(package, packages) for package in range(packages)},
        llc=[of(part, cores // 8) for part in range(cores // 8)],
        distances={a: {b: 10 if a == b else 32 for b in range(nodes)} for a in range(nodes)},
        gpus=[GpuLocality(index, f"GPU-{index}", index * nodes // gpus) for index in range(gpus)],
    )


def save(host: HostTopology, root: Path) -> None:
    """Write the host as a sysfs tree."""

    def write(path: str, text: object) -> None:
        file = root / "sys" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def listed(cpus: frozenset[int]) -> str:
        return ",".join(map(str, sorted(cpus)))

    for core in host.cores:
        for cpu in core:
            base = f"devices/system/cpu/cpu{cpu}"
            package = next(number for number, cpus in host.packages.items() if cpu in cpus)
            write(f"{base}/topology/physical_package_id", package)
            write(f"{base}/topology/core_cpus_list", listed(core))
            levels = [("Data", core), ("Instruction", core), ("Unified", core)]
            levels.append(("Unified", next(group for group in host.llc if cpu in group)))
            for index, (kind, shared) in enumerate(levels):
                write(f"{base}/cache/index{index}/type", kind)
                write(f"{base}/cache/index{index}/level", max(1, index))
                write(f"{base}/cache/index{index}/shared_cpu_list", listed(shared))
    write("devices/system/cpu/online", f"0-{len(host.cpus) - 1}")
    for node, cpus in host.nodes.items():
        write(f"devices/system/node/node{node}/cpulist", listed(cpus))
        write(f"devices/system/node/node{node}/distance", " ".join(map(str, host.distances[node].values())))
    for gpu in host.gpus:
        for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", gpu.numa_node)):
            write(f"bus/pci/devices/0000:{gpu.index + 1:02x}:00.0/{name}", text)


class SilentDriver:
    """A driver that does not know the places of GPUs, so that sysfs is read."""

    name = "bench"
    runtime = Runtime()

    def snapshot(self) -> HostSnapshot:
        return HostSnapshot(())

    def cpu_affinity(self, uuid: str, scope: str) -> frozenset[int] | None:
        return None

    def host_topology(self) -> HostTopology | None:
        return None

    def close(self) -> None: ...


def best_ms(action: Callable[[], object], repeats: int) -> float:
    """Milliseconds of the fastest run, which other processes disturbed least."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times) * 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    host = large_host()
    worst = 0.0
    print(f"plan, {len(host.cpus)} CPUs and {len(host.gpus)} GPUs (best of {repeats}, budget {BUDGET_MS:.0f} ms):")
    for mode in MODES:
        times = [best_ms(partial(plan, host, mode=mode, scope=scope), repeats) for scope in ("node", "socket")]
        worst = max(worst, *times)
        print(f"  {mode:18}  node scope {times[0]:6.2f} ms  socket scope {times[1]:6.2f} ms")
    for cores in (128, 512):
        tree = Path(tempfile.mkdtemp(prefix="bench-topology-"))
        try:
            save(large_host(cores=cores), tree)
            whole = best_ms(partial(read_topology, tree), repeats)
            gpu = Gpu(15, "GPU-15", pci_bus_id="0000:10:00.0")
            one = best_ms(partial(node_cpus_of, gpu, SilentDriver(), tree), repeats)
        finally:
            shutil.rmtree(tree)
        print(f"read a saved host of {2 * cores} CPUs: all of it {whole:6.2f} ms, one GPU's node {one:6.3f} ms")
    if worst > BUDGET_MS:
        print(f"over budget: {worst:.1f} ms", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
