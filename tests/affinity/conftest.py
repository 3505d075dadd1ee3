"""Hosts for the tests: saved sysfs trees of any shape, and topologies worked out from a few numbers."""

import os
import platform
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.seccomp import refuse

MASK = sorted(os.sched_getaffinity(0))
needs_two_cpus = pytest.mark.skipif(len(MASK) < 2, reason="needs two CPUs")

needs_known_calls = pytest.mark.skipif(
    platform.machine() not in api.memory_policy.CALL_NUMBERS, reason="the numbers of the calls are not known here"
)


def refuse_memory_policies() -> None:
    """A filter on this process like Docker's: set_mempolicy and get_mempolicy answer EPERM."""
    refuse(*api.memory_policy.CALL_NUMBERS[platform.machine()])


def cpus(text: str) -> frozenset[int]:
    found = api.parse_cpulist(text)
    assert found is not None
    return found


@lru_cache
def as_list(cpus: frozenset[int]) -> str:
    """Deliberately not the package's own formatter: single numbers are a list too."""
    return ",".join(str(cpu) for cpu in sorted(cpus))


@lru_cache
def as_mask(cpus: frozenset[int]) -> str:
    value = sum(1 << cpu for cpu in cpus)
    groups = [f"{value >> shift & 0xFFFFFFFF:08x}" for shift in range(0, max(value.bit_length(), 1), 32)]
    return ",".join(reversed(groups))


class SavedTree:
    """A root directory with ``sys`` and ``proc`` in the manner of a saved host."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __fspath__(self) -> str:
        return str(self.root)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def cpus(
        self,
        cores: Sequence[Iterable[int]],
        *,
        packages: Sequence[Iterable[int]] = (),
        package_ids: Sequence[int] | None = None,
        caches: Sequence[Iterable[int]] = (),
        masks: bool = False,
        old_names: bool = False,
        offline: Collection[int] = (),
        as_the_kernel: bool = False,
    ) -> None:
        """CPUs with their siblings, packages and last-level caches.

        ``masks`` writes hex masks instead of lists; ``as_the_kernel`` writes both and names offline CPUs nowhere.
        """
        base = "sys/devices/system/cpu"
        siblings, socket = ("thread_siblings", "core_siblings") if old_names else ("core_cpus", "package_cpus")
        writers = [(as_mask, "", "map")] * (masks or as_the_kernel) + [(as_list, "_list", "list")] * (not masks)
        for cpu in offline:
            self.write(f"{base}/cpu{cpu}/online", "0")
        unnamed = offline if as_the_kernel else ()
        cores, packages, caches = (
            [frozenset(group).difference(unnamed) for group in groups] for groups in (cores, packages, caches)
        )
        everything = frozenset().union(*cores)
        packages = packages or [everything]
        for core in cores:
            for cpu in core.difference(offline):
                number, package = next((n, group) for n, group in enumerate(packages) if cpu in group)
                for put, suffix, _ in writers:
                    self.write(f"{base}/cpu{cpu}/topology/{siblings}{suffix}", put(core))
                    self.write(f"{base}/cpu{cpu}/topology/{socket}{suffix}", put(package))
                identity = number if package_ids is None else package_ids[number]
                self.write(f"{base}/cpu{cpu}/topology/physical_package_id", str(identity))
                cache = next((group for group in caches if cpu in group), None)
                if cache is not None:
                    for index, (level, kind, shared) in enumerate([("1", "Data", core), ("3", "Unified", cache)]):
                        path = f"{base}/cpu{cpu}/cache/index{index}"
                        self.write(f"{path}/level", level)
                        self.write(f"{path}/type", kind)
                        for put, _, suffix in writers:
                            self.write(f"{path}/shared_cpu_{suffix}", put(shared))
        if not masks:
            self.write(f"{base}/online", as_list(everything.difference(offline)))

    def nodes(
        self,
        nodes: Mapping[int, Iterable[int]],
        *,
        distance: Callable[[int, int], int] | None = None,
        masks: bool = False,
    ) -> None:
        base = "sys/devices/system/node"
        for node, cpus in nodes.items():
            name, put = ("cpumap", as_mask) if masks else ("cpulist", as_list)
            self.write(f"{base}/node{node}/{name}", put(frozenset(cpus)))
            if distance is not None:
                self.write(f"{base}/node{node}/distance", " ".join(str(distance(node, to)) for to in sorted(nodes)))
        if not masks:
            self.write(f"{base}/online", as_list(frozenset(nodes)))

    def gpu(self, bus_id: str, *, node: int | None = None, cpus: Iterable[int] | None = None, **files: str) -> None:
        base = f"sys/bus/pci/devices/{bus_id}"
        for name, text in {"vendor": "0x10de", "class": "0x030200", **files}.items():
            self.write(f"{base}/{name}", text)
        if node is not None:
            self.write(f"{base}/numa_node", str(node))
        if cpus is not None:
            self.write(f"{base}/local_cpulist", as_list(frozenset(cpus)))


@pytest.fixture
def saved_tree(tmp_path: Path) -> SavedTree:
    return SavedTree(tmp_path / "fsroot")


def make_host(
    *,
    cores_per_node: int,
    nodes: int,
    nodes_per_package: int = 1,
    smt: int = 2,
    gpu_nodes: Sequence[int | None] = (),
    caches_per_node: int = 1,
    distances: bool = False,
    ids: Sequence[int] = (),
    dense: bool = False,
    order: Sequence[int] | None = None,
) -> api.HostTopology:
    """A regular host numbered as Linux does on x86: thread t of core c is CPU ``c + t * number of cores``.

    ``dense`` numbers the threads of a core next to each other; ``ids`` are the numbers of the nodes, and ``order`` is
    that in which cores are listed.
    """
    count = cores_per_node * nodes
    cores = [
        frozenset(range(core * smt, (core + 1) * smt) if dense else range(core, count * smt, count))
        for core in range(count)
    ]
    names = ids or range(nodes)
    package_of = {node: at // nodes_per_package for at, node in enumerate(names)}

    def groups(size: int, first: int = 0, last: int = count) -> list[frozenset[int]]:
        """CPUs of the cores from ``first`` on, ``size`` cores in each group."""
        return [frozenset().union(*cores[at : min(at + size, last)]) for at in range(first, last, size)]

    def distance(a: int, b: int) -> int:
        return 10 if a == b else 12 if package_of[a] == package_of[b] else 32

    return api.HostTopology(
        cpus=frozenset(range(count * smt)),
        cores=[cores[at] for at in order or range(count)],
        nodes=dict(zip(names, groups(cores_per_node), strict=True)),
        packages=dict(enumerate(groups(nodes_per_package * cores_per_node))),
        llc=[
            cache
            for first in range(0, count, cores_per_node)
            for cache in groups(max(1, cores_per_node // caches_per_node), first, first + cores_per_node)
        ],
        distances={a: {b: distance(a, b) for b in names} for a in names} if distances else {},
        gpus=[api.GpuLocality(index, f"GPU-{index}", node) for index, node in enumerate(gpu_nodes)],
    )


class FakeDriver(api.Driver):
    """A driver that says what it is told to say, or raises ``error`` where it is polled."""

    runtime = api.Runtime()
    name = "nvml"

    def __init__(self, gpus: Sequence[api.Gpu] = (), affinity: Any = None) -> None:
        self.gpus = list(gpus)
        self.affinity = affinity or {}
        self.own: api.HostTopology | None = None
        self.error: Exception | None = None

    def snapshot(self) -> api.HostSnapshot:
        if self.error is not None:
            raise self.error
        return api.HostSnapshot(tuple(self.gpus))

    def usage(self, gpus: Sequence[api.Gpu]) -> tuple[api.Gpu, ...]:
        return tuple(gpus)

    def cpu_affinity(self, uuid: str, scope: str) -> frozenset[int] | None:
        return self.affinity.get((uuid, scope))

    def host_topology(self) -> api.HostTopology | None:
        return self.own

    def close(self) -> None: ...


def no_driver(name: str | None = None, **choice: Any) -> Any:
    raise api.NoDriverError("there is no NVIDIA driver here")


def save_two_nodes(tree: SavedTree, bus_ids: Iterable[str]) -> None:
    """Two nodes of one real CPU each, with the GPUs by turns."""
    first, second = (MASK * 2)[:2]
    tree.cpus([(first,), (second,)])
    tree.nodes({0: [first], 1: [second]}, distance=lambda a, b: 10 if a == b else 21)
    for number, bus_id in enumerate(bus_ids):
        tree.gpu(bus_id, node=number % 2)


@pytest.fixture
def four_gpus(saved_tree: SavedTree, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Two nodes of one real CPU each, GPUs 0 and 2 on the first, 1 and 3 on the second."""
    bus_ids = [f"0000:0{number + 1}:00.0" for number in range(4)]
    save_two_nodes(saved_tree, bus_ids)
    driver = FakeDriver([api.Gpu(n, f"GPU-{n}{n}ab", pci_bus_id=bus_id) for n, bus_id in enumerate(bus_ids)])
    monkeypatch.setenv("SAFE_GPU_FSROOT", os.fspath(saved_tree))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(api.drivers, "open_driver", lambda name=None, **choice: driver)
    return driver


@pytest.fixture
def four_gpus_env(saved_tree: SavedTree, fake_gpus: Any) -> dict[str, str]:
    """The same host for child processes: their environment."""
    fake_gpus.set(4)
    save_two_nodes(saved_tree, [gpu["bus"].lower().removeprefix("0000") for gpu in fake_gpus.gpus])
    return {**fake_gpus.env, "SAFE_GPU_FSROOT": os.fspath(saved_tree)}
