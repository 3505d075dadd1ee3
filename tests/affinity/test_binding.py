"""Real masks, real threads, real policies: each test changes a process of its own."""

import errno
import os
import platform
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from affinity.conftest import MASK, InChild, needs_two_cpus

from safe_gpu.affinity import binding as binding_module
from safe_gpu.affinity import memory_policy
from safe_gpu.affinity.binding import PartReport, bind_process, enter, leave, original_mask
from safe_gpu.errors import GPUAffinityError


def masks() -> dict[int, set[int]]:
    found = {}
    for tid in map(int, os.listdir("/proc/self/task")):
        try:
            found[tid] = os.sched_getaffinity(tid)
        except ProcessLookupError:
            continue  # it ended
    return found


@needs_two_cpus
def test_every_thread_moves_and_comes_back_to_its_own_mask(in_child: InChild) -> None:
    first, second = MASK[:2]

    def child() -> tuple[Any, ...]:
        with suppress(ImportError):
            import numpy

            numpy.ones((600, 600)) @ numpy.ones((600, 600))  # starts the pool of the BLAS library
        ready, done = threading.Barrier(4), threading.Event()

        def idle(mask: set[int]) -> None:
            os.sched_setaffinity(0, mask)
            ready.wait()
            done.wait()

        for mask in ({first}, {second}, {first, second}):
            threading.Thread(target=idle, args=(mask,)).start()
        ready.wait()
        seen = [masks()]
        report = bind_process({second})
        seen.append(masks())
        bind_process({first})
        seen.append(masks())
        start = original_mask()
        leave()
        seen.append(masks())
        done.set()
        return report, start, *seen

    report, start, before, bound, rebound, after = in_child(child)
    assert len(before) >= 4  # main, three of ours, and those of numpy
    assert len(set(map(frozenset, before.values()))) == 3
    assert all(mask == {second} for mask in bound.values())
    assert all(mask == {first} for mask in rebound.values())
    assert after == before
    assert start == set(MASK)
    assert report.threads.moved == len(before)
    assert f"to CPUs {second}" in str(report)


@needs_two_cpus
def test_threads_that_are_born_meanwhile(in_child: InChild) -> None:
    """A thread that starts others as fast as it can: whoever slips through the first look is found by a later one."""

    def child() -> bool:
        stop = threading.Event()

        def breed() -> None:
            while not stop.is_set():
                threads = [threading.Thread(target=stop.wait, args=(0.001,)) for _ in range(4)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()

        breeders = [threading.Thread(target=breed) for _ in range(2)]
        for breeder in breeders:
            breeder.start()
        right = True
        for cpu in MASK[:2] * 2:
            report = bind_process({cpu})
            right = right and report.ok and set(map(frozenset, masks().values())) == {frozenset([cpu])}
        leave()
        right = right and set(map(frozenset, masks().values())) == {frozenset(MASK)}
        stop.set()
        for breeder in breeders:
            breeder.join()
        return right

    assert in_child(child)


@needs_two_cpus
def test_moments_that_can_be_come_back_to(in_child: InChild) -> None:
    """A second call starts from the first mask; what a program bound before a claim is there again after it."""

    def child() -> list[set[int]]:
        seen = []
        bind_process({MASK[0]})
        enter()
        bind_process({MASK[1]})
        for step in (lambda: None, leave, leave, leave):
            step()
            seen += [os.sched_getaffinity(0), set(original_mask())]
        return seen

    everything = set(MASK)
    assert in_child(child) == [{MASK[1]}, everything, {MASK[0]}, everything, *[everything] * 4]


@needs_two_cpus
def test_a_forked_worker_starts_from_the_original_mask(in_child: InChild) -> None:
    """A DataLoader worker inherits the narrowed mask, and what it was before."""

    def child() -> tuple[Any, ...]:
        bind_process({MASK[0]})

        def worker() -> tuple[Any, ...]:
            inherited = os.sched_getaffinity(0)
            mine = bind_process({MASK[1]}).cpus
            leave()
            return inherited, mine, os.sched_getaffinity(0)

        return (*in_child(worker), os.sched_getaffinity(0))

    assert in_child(child) == ({MASK[0]}, {MASK[1]}, set(MASK), {MASK[0]})


def test_what_the_kernel_refuses_leaves_nothing_behind(in_child: InChild) -> None:
    def child() -> tuple[Any, ...]:
        before = masks()
        with pytest.raises(GPUAffinityError, match=r"CPUs 60000-60001.*it may use"):
            bind_process({60000, 60001})
        return before == masks(), len(binding_module._stack)

    assert in_child(child) == (True, 0)


def test_sets_that_are_none() -> None:
    for cpus in ((), {-1}, {1 << 40}):
        with pytest.raises(GPUAffinityError):
            bind_process(cpus)
        assert not binding_module._stack


# cgroups


@pytest.fixture
def cpuset() -> Iterator[Callable[[int], Callable[[], None]]]:
    """Makes a cpuset of one CPU and returns what a child calls to enter it."""
    made: list[Path] = []

    def make(cpu: int) -> Callable[[], None]:
        name = f"safe-gpu-test-{uuid.uuid4().hex[:8]}"
        old, new = Path("/sys/fs/cgroup/cpuset"), Path("/sys/fs/cgroup")
        try:
            root = old if old.is_dir() else new
            (root / name).mkdir()
            made.append(root / name)
            if root is new:
                (new / "cgroup.subtree_control").write_text("+cpuset")
            mems = (root / ("cpuset.mems" if root is old else "cpuset.mems.effective")).read_text().strip()
            (root / name / "cpuset.mems").write_text(mems)
            (root / name / "cpuset.cpus").write_text(str(cpu))
        except OSError as err:
            pytest.skip(f"no cpuset can be made here: {err}")
        return lambda: (made[-1] / "cgroup.procs").write_text("0") and None  # type: ignore[func-returns-value]

    yield make
    for path in made:
        path.rmdir()


@needs_two_cpus
def test_a_cpuset_is_respected(cpuset: Any, in_child: InChild) -> None:
    join = cpuset(MASK[1])

    def child() -> tuple[Any, ...]:
        join()
        report = bind_process(MASK[:2])
        with pytest.raises(GPUAffinityError):
            bind_process({MASK[0]})
        return report.cpus, report.threads.done, report.threads.asked, report.notes

    cpus, done, asked, notes = in_child(child)
    assert cpus == done == {MASK[1]}
    assert asked == set(MASK[:2])
    assert "cpuset" in " ".join(notes)


# Memory


@pytest.fixture
def memory_node() -> int:
    if memory_policy.get_policy() is None:
        pytest.skip("NUMA memory policies cannot be used here")
    return min(int(name[4:]) for name in os.listdir("/sys/devices/system/node") if name[4:].isdigit())


@pytest.mark.parametrize("mode", ["bind", "preferred"])
def test_memory_policy_is_set_inherited_and_given_back(in_child: InChild, memory_node: int, mode: str) -> None:
    def child() -> tuple[Any, ...]:
        before = memory_policy.get_policy()
        report = bind_process(None, [memory_node], mode)
        now = memory_policy.get_policy()
        maps = subprocess.run(["cat", "/proc/self/numa_maps"], check=True, capture_output=True, text=True).stdout
        bind_process(None, [memory_node], "bind")
        leave()
        return report, now, maps, before == memory_policy.get_policy()

    report, now, maps, restored = in_child(child)
    assert report.memory == PartReport(frozenset([memory_node]), frozenset([memory_node]), moved=1)
    assert report.threads == PartReport()
    assert now == memory_policy.policy_for(mode, [memory_node])
    word = "bind" if mode == "bind" else "prefer"
    assert f" {word}:{memory_node} " in maps  # another program, started after it
    assert restored
    assert f"memory {'bound to' if mode == 'bind' else 'preferred on'} node {memory_node}" in str(report)


def test_a_node_that_is_not_there_is_reported(in_child: InChild, memory_node: int) -> None:
    report = in_child(lambda: bind_process(None, [1000], "bind"))
    assert not report.ok
    assert report.memory.asked == {1000}
    assert not report.memory.done
    assert "Invalid argument" in str(report)


def test_an_architecture_whose_calls_are_not_known(monkeypatch: pytest.MonkeyPatch, in_child: InChild) -> None:
    monkeypatch.setattr(memory_policy, "_CALLS", {})
    report = in_child(lambda: bind_process(None, [0], "preferred"))
    assert platform.machine() in report.memory.refused[0] or "ENOSYS" in report.memory.refused[0]


@pytest.mark.parametrize(("kernel_knows_many", "nodes"), [(True, {0, 1}), (False, {0})])
def test_preferred_on_several_nodes(in_child: Any, monkeypatch: Any, kernel_knows_many: bool, nodes: set[int]) -> None:
    """MPOL_PREFERRED_MANY is of Linux 5.15; before, EINVAL: then the lowest node alone."""

    def kernel(call: int, mode: Any, *nodes: Any) -> None:
        if mode.value == 5 and not kernel_knows_many:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(memory_policy, "_call", kernel)
    monkeypatch.setattr(binding_module, "get_policy", lambda: None)  # it cannot be read back
    report = in_child(lambda: bind_process(None, [0, 1], "preferred"))  # where no thread is older
    assert (report.memory.done, report.as_asked) == (nodes, kernel_knows_many)
    assert bool(report.notes) is not kernel_knows_many


def test_memory_without_a_node() -> None:
    with pytest.raises(GPUAffinityError, match="NUMA node"):
        bind_process(None, [], "bind")
    with pytest.raises(GPUAffinityError, match="interleave"):
        bind_process(None, [0], "interleave")
