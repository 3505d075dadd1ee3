"""A claim's CPUs: divided over the whole host, cut to the mask, and bound for real, in processes of their own."""

import ctypes
import errno
import logging
import os
import platform
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from affinity.conftest import MASK, FakeDriver, SavedTree, cpus, make_host, needs_two_cpus
from hypothesis import given, settings
from hypothesis import strategies as st
from support import api
from support.forks import in_child
from support.seccomp import needs_known_calls, refuse

import safe_gpu

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")

TWO_ON_ONE = {"cores_per_node": 8, "nodes": 1, "gpu_nodes": [0, 0]}
ONE_EACH = {"cores_per_node": 4, "nodes": 2, "gpu_nodes": [0, 1]}
THREE = {"cores_per_node": 4, "nodes": 2, "gpu_nodes": [0, 0, 1]}


def test_shares_are_of_the_host_and_cut_to_the_mask() -> None:
    """GPU 0 has cores 0-3 of 8 and GPU 1 cores 4-7, whoever asks, although each mask alone would divide otherwise.

    The cut may leave nothing, for a GPU or for all of them.
    """
    none = "this process may use none of the CPUs 0-3 of GPU"
    for shape, mode, gpus, mask, expected, notes in (
        (TWO_ON_ONE, "exclusive", [1], "0-7", {1: "4-7"}, ()),
        (THREE, "exclusive", [2, 0], "0-7", {2: "4-7", 0: "0-1"}, ()),
        (ONE_EACH, "node", [0], "5-6", {0: "5-6"}, (f"{none} 0", "CPUs 5-6 are remote to GPU 0 (on NUMA node 0)")),
        (THREE, "node", [0, 2], "5", {0: "5", 2: "5"}, (f"{none} 0", "CPUs 5 are remote to GPU 0 (on NUMA node 0)")),
    ):
        found = api.claim_shares(make_host(**shape, smt=1), api.AffinityOptions(mode=mode), gpus, cpus(mask))
        assert found.shares == {index: cpus(share) for index, share in expected.items()}
        assert found.cpus == frozenset().union(*found.shares.values())
        assert found.notes == notes


def test_isolated_cpus_are_left_out_before_cores_are_divided() -> None:
    for shape, isolated, mode, gpu, mask, share, remote in (
        (TWO_ON_ONE, "4-7", "exclusive", 1, "0-3", "2-3", False),
        (TWO_ON_ONE, "0-1", "unique_interleaved", 1, "0-7", "3,5,7", False),
        # A part of which the mask has nothing: the other CPUs of the node come before the whole mask.
        (TWO_ON_ONE, "", "exclusive", 1, "0-3", "0-3", False),
        # The whole node of a GPU is isolated, which does not keep claims of the other GPU from their part.
        (ONE_EACH, "4-7", "exclusive", 0, "0-3", "0-3", False),
        (ONE_EACH, "4-7", "exclusive", 1, "0-7", "0-3", True),
        # Whose mask has isolated CPUs only was put there on purpose.
        (ONE_EACH, "4-7", "node", 1, "4-6", "4-6", False),
        (TWO_ON_ONE, "0-7", "exclusive", 1, "0-7", "4-7", False),
    ):
        topology = replace(make_host(**shape, smt=1), isolated=cpus(isolated))
        found = api.claim_shares(topology, api.AffinityOptions(mode=mode), [gpu], cpus(mask))
        assert (found.shares, found.remote) == ({gpu: cpus(share)}, remote)


@settings(max_examples=60)
@given(st.integers(4, 24), st.integers(2, 4), st.sampled_from(api.MODES), st.data())
def test_never_wider_than_the_mask_and_never_in_anothers_way(cores: int, gpus: int, mode: str, data: Any) -> None:
    topology = make_host(cores_per_node=cores, nodes=1, gpu_nodes=[0] * gpus)
    masks = [data.draw(st.frozensets(st.integers(0, 2 * cores - 1), min_size=1)) for _ in range(2)]
    first, second = (api.claim_shares(topology, api.AffinityOptions(mode), [index], masks[index]) for index in (0, 1))
    for found, mask in zip((first, second), masks, strict=True):
        assert found.cpus
        assert found.cpus <= mask
    if mode in api.DIVIDING_MODES and not (first.notes or second.notes):
        assert not first.cpus & second.cpus


# Real masks, real threads, real policies


def masks() -> dict[int, set[int]]:
    found = {}
    for tid in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # it ended
            found[tid] = os.sched_getaffinity(tid)
    return found


@needs_two_cpus
def test_every_thread_moves_and_comes_back_to_its_own_mask() -> None:
    first, second = MASK[:2]

    def child() -> Any:
        ready, done = threading.Barrier(4), threading.Event()

        def idle(mask: set[int]) -> None:
            os.sched_setaffinity(0, mask)
            ready.wait()
            done.wait()

        for mask in ({first}, {second}, {first, second}):
            threading.Thread(target=idle, args=(mask,)).start()
        ready.wait()
        yield masks()
        for cpu in (second, first):
            yield api.bind_process({cpu})
            yield masks()
        yield api.original_mask()
        api.restore_state()
        yield masks()
        done.set()

    before, report, bound, _, rebound, start, after = in_child(lambda: list(child()))
    assert len(before) == 4
    assert len(set(map(frozenset, before.values()))) == 3
    assert bound == {thread: {second} for thread in before}
    assert rebound == {thread: {first} for thread in before}
    assert (after, start) == (before, set(MASK))
    assert report.threads.moved == 4
    assert f"to CPUs {second}" in str(report)


@needs_two_cpus
def test_threads_that_are_born_meanwhile() -> None:
    """A thread that starts others as fast as it can: whoever slips through the first look is found by a later one."""

    def child() -> Any:
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
        for cpu in MASK[:2] * 2:
            yield api.bind_process({cpu}).ok and all(mask == {cpu} for mask in masks().values())
        api.restore_state()
        yield all(mask == set(MASK) for mask in masks().values())
        stop.set()
        for breeder in breeders:
            breeder.join()

    assert in_child(lambda: list(child())) == [True] * 5


@needs_two_cpus
def test_moments_that_can_be_come_back_to() -> None:
    """A second call starts from the first mask; what a program bound before a claim is there again after it."""

    def child() -> Any:
        api.bind_process({MASK[0]})
        api.save_state()
        api.bind_process({MASK[1]})
        for _ in range(4):
            yield os.sched_getaffinity(0), set(api.original_mask())
            api.restore_state()

    now, original = zip(*in_child(lambda: list(child())), strict=True)
    assert now == ({MASK[1]}, {MASK[0]}, set(MASK), set(MASK))
    assert original == (set(MASK),) * 4


@needs_two_cpus
def test_a_forked_worker_starts_from_the_original_mask() -> None:
    """A DataLoader worker inherits the narrowed mask, and what it was before."""

    def worker() -> Any:
        yield os.sched_getaffinity(0)
        yield set(api.bind_process({MASK[1]}).cpus)
        api.restore_state()
        yield os.sched_getaffinity(0)

    def child() -> Any:
        api.bind_process({MASK[0]})
        return [*in_child(lambda: list(worker())), os.sched_getaffinity(0)]

    assert in_child(child) == [{MASK[0]}, {MASK[1]}, set(MASK), {MASK[0]}]


def test_what_cannot_be_bound_leaves_nothing_behind() -> None:
    def child() -> bool:
        before = masks()
        with pytest.raises(api.GPUAffinityError, match=r"CPUs 60000-60001.*it may use"):
            api.bind_process({60000, 60001})
        return before == masks() and not api.binding._stack

    assert in_child(child)
    for none in ((), {-1}, {1 << 40}):
        with pytest.raises(api.GPUAffinityError):
            api.bind_process(none)
    with pytest.raises(api.GPUAffinityError):
        api.bind_claim([], FakeDriver(), options=api.AffinityOptions())  # type: ignore[arg-type]
    for nodes, mode, names in (([], "bind", "NUMA node"), ([0], "interleave", "interleave")):
        with pytest.raises(api.GPUAffinityError, match=names):
            api.bind_process(None, nodes, mode)
    assert not api.binding._stack


# cgroups


@pytest.fixture
def cpuset() -> Iterator[Path]:
    """A cpuset of one CPU."""
    old, new = Path("/sys/fs/cgroup/cpuset"), Path("/sys/fs/cgroup")
    root = old if old.is_dir() else new
    made = root / f"safe-gpu-test-{uuid.uuid4().hex[:8]}"
    try:
        made.mkdir()
    except OSError as err:
        pytest.skip(f"no cpuset can be made here: {err}")
    try:
        if root is new:
            (new / "cgroup.subtree_control").write_text("+cpuset")
        mems = (root / ("cpuset.mems" if root is old else "cpuset.mems.effective")).read_text().strip()
        (made / "cpuset.mems").write_text(mems)
        (made / "cpuset.cpus").write_text(str(MASK[1]))
        yield made
    except OSError as err:
        pytest.skip(f"no cpuset can be made here: {err}")
    finally:
        made.rmdir()


@needs_two_cpus
def test_a_cpuset_is_respected(cpuset: Path) -> None:
    def child() -> tuple[Any, ...]:
        (cpuset / "cgroup.procs").write_text("0")
        report = api.bind_process(MASK[:2])
        with pytest.raises(api.GPUAffinityError):
            api.bind_process({MASK[0]})
        return report.cpus, report.threads.done, report.threads.asked, report.notes

    cpus, done, asked, notes = in_child(child)
    assert cpus == done == {MASK[1]}
    assert asked == set(MASK[:2])
    assert "cpuset" in " ".join(notes)


# Memory


@pytest.fixture
def memory_node() -> int:
    if api.memory_policy.get_policy() is None:
        pytest.skip("NUMA memory policies cannot be used here")
    return min(int(name[4:]) for name in os.listdir("/sys/devices/system/node") if name[4:].isdigit())


def test_nodes_of_a_policy_are_read_from_all_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(which: int, mode: Any, words: Any, *more: object) -> None:
        words[0], words[2] = 0b101, 1

    monkeypatch.setattr(api.memory_policy, "call_kernel", answer)
    policy = api.memory_policy.get_policy()
    assert policy is not None
    assert policy.nodes == {0, 2, 128}


def test_memory_policy_is_set_inherited_and_given_back(memory_node: int) -> None:
    def child() -> Any:
        before = api.memory_policy.get_policy()
        yield api.bind_process(None, [memory_node], "bind")
        yield api.memory_policy.get_policy()
        yield subprocess.run(["cat", "/proc/self/numa_maps"], check=True, capture_output=True, text=True).stdout
        api.bind_process(None, [memory_node], "preferred")
        api.restore_state()
        yield before == api.memory_policy.get_policy()

    report, now, maps, restored = in_child(lambda: list(child()))
    assert report.memory == api.PartReport(frozenset([memory_node]), frozenset([memory_node]), moved=1)
    assert report.threads == api.PartReport()
    assert now == api.memory_policy.policy_for("bind", [memory_node])
    assert f" bind:{memory_node} " in maps  # another program, started after it
    assert restored
    assert f"memory bound to node {memory_node}" in str(report)


def test_memory_that_the_kernel_refuses(monkeypatch: pytest.MonkeyPatch, memory_node: int) -> None:
    """A node that is not there, and an architecture whose calls are not known."""
    report = in_child(lambda: api.bind_process(None, [1000], "bind"))
    assert (report.ok, report.memory.asked, report.memory.done) == (False, {1000}, set())
    assert "Invalid argument" in str(report)
    monkeypatch.setattr(api.memory_policy, "CALL_NUMBERS", {})
    report = in_child(lambda: api.bind_process(None, [0], "preferred"))
    assert platform.machine() in report.memory.refused[0] or "ENOSYS" in report.memory.refused[0]


@pytest.mark.parametrize(("kernel_knows_many", "nodes"), [(True, {0, 1}), (False, {0})])
def test_preferred_on_several_nodes(monkeypatch: Any, kernel_knows_many: bool, nodes: set[int]) -> None:
    """MPOL_PREFERRED_MANY is of Linux 5.15; before, EINVAL: then the lowest node alone."""

    def kernel(call: int, mode: Any, *nodes: Any) -> None:
        if mode.value == 5 and not kernel_knows_many:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(api.memory_policy, "call_kernel", kernel)
    monkeypatch.setattr(api.binding, "get_policy", lambda: None)  # it cannot be read back
    report = in_child(lambda: api.bind_process(None, [0, 1], "preferred"))  # where no thread is older
    assert (report.memory.done, report.as_asked) == (nodes, kernel_knows_many)
    assert bool(report.notes) is not kernel_knows_many


# Claims

GPUS = [api.Gpu(number, f"GPU-{number}", pci_bus_id=f"0000:0{number + 1}:00.0") for number in range(3)]


NO_PROC = "the threads of this process are not known: mount /proc"
NO_MASK = "the CPUs that this process may use are not known (Operation not permitted): allow sched_getaffinity"


def claim_where(prepare: Callable[[], object], **options: Any) -> tuple[bool, list[str]]:
    """Claim in a child process that is prepared so; return whether it was bound, and its warnings."""

    def claim() -> tuple[bool, list[str]]:
        warnings: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("safe_gpu").addHandler(handler)
        prepare()
        with safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), **options) as owner:
            return owner.binding is not None, warnings

    found: tuple[bool, list[str]] = in_child(claim)
    return found


def hide_proc() -> None:
    """In a mount namespace of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x20000) == 0  # CLONE_NEWNS
    assert libc.mount(b"none", b"/", None, 0x44000, None) == 0  # MS_REC | MS_PRIVATE
    assert libc.mount(b"none", b"/proc", b"tmpfs", 0, None) == 0


def refuse_masks() -> None:
    refuse("sched_getaffinity", "sched_setaffinity")


@pytest.mark.parametrize(
    ("prepare", "why"),
    [pytest.param(hide_proc, NO_PROC, marks=needs_root), pytest.param(refuse_masks, NO_MASK, marks=needs_known_calls)],
)
def test_a_claim_stands_where_it_cannot_be_bound(prepare: Callable[[], None], why: str) -> None:
    is_bound, warnings = claim_where(prepare)
    assert not is_bound
    (warning,) = [text for text in warnings if "CPU affinity" in text]
    assert warning.startswith(f"CPU affinity was left as it is: {why}")
    assert claim_where(prepare, affinity=None)[0] is False

    def ask() -> list[str]:
        prepare()
        found = []
        for work in (lambda: safe_gpu.bind(0), lambda: safe_gpu.GPUOwner(1, affinity="exclusive")):
            with pytest.raises(safe_gpu.GPUAffinityError) as caught:
                work()
            found.append(str(caught.value))
        return [*found, *safe_gpu.bind(0, strict=False).threads.refused]

    assert all(text.startswith(why) for text in in_child(ask))


@pytest.fixture
def small_host(saved_tree: SavedTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """A saved host whose first CPUs are those that this process really has: one on each of two nodes."""
    first, second = MASK[:2]
    saved_tree.cpus([(first,), (second,), (5000,)])
    saved_tree.nodes({0: [first], 1: [second], 2: [5000]}, distance=lambda a, b: 10 if a == b else 20)
    for number in range(3):
        saved_tree.gpu(f"0000:0{number + 1}:00.0", node=number)
    monkeypatch.setenv("SAFE_GPU_FSROOT", os.fspath(saved_tree))


@needs_two_cpus
@pytest.mark.parametrize("mode", ["node", "exclusive"])
@pytest.mark.usefixtures("small_host")
def test_a_claim_is_bound_and_given_back(mode: str) -> None:
    def child() -> Any:
        api.bind_process({MASK[0]})  # which is there again after the claim
        for chosen in ([GPUS[0]], [GPUS[1]], GPUS[:2], [GPUS[2]]):
            report = api.bind_claim(chosen, FakeDriver(GPUS), options=api.AffinityOptions(mode))  # type: ignore[arg-type]
            assert report.remote == bool(report.notes) != report.as_asked
            yield os.sched_getaffinity(0), report.notes[:1]
            api.restore_state()
        yield os.sched_getaffinity(0)

    one, two, both = [(set(cpus), ()) for cpus in ({MASK[0]}, {MASK[1]}, MASK[:2])]
    remote = set(MASK), ("this process may use none of the CPUs 5000 of GPU 2",)
    assert in_child(lambda: list(child())) == [one, two, both, remote, {MASK[0]}]


@needs_two_cpus
@pytest.mark.usefixtures("small_host")
def test_the_default_reads_no_whole_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the cores, sockets and caches of each CPU, nor the places of other GPUs."""
    driver: Any = FakeDriver(GPUS)
    driver.error = AssertionError("the driver was polled")
    for fact in ("cores", "packages", "llc"):
        monkeypatch.setattr(api.SysfsHost, fact, property(lambda host: pytest.fail("the whole host was read")))
    assert in_child(lambda: api.bind_near(GPUS[1:2], driver, options=api.AffinityOptions()).cpus) == {MASK[1]}


def test_nodes_of_cpus(saved_tree: SavedTree) -> None:
    driver: Any = FakeDriver()
    assert api.nodes_of_cpus([3], driver, saved_tree) is None
    saved_tree.cpus([(0,), (1,), (2,), (3,)])
    saved_tree.nodes({0: [0, 1], 8: [2, 3]})
    assert api.nodes_of_cpus([3], driver, saved_tree) == {8}
    driver.own = make_host(cores_per_node=2, nodes=2, smt=1)
    assert api.nodes_of_cpus([1, 2], driver, "/") == {0, 1}


def test_the_nearest_memory_of_a_node(saved_tree: SavedTree) -> None:
    saved_tree.cpus([(0,), (1,), (2,), (3,)])
    saved_tree.nodes({number: [number] for number in range(4)})
    saved_tree.gpu("0000:01:00.0", node=1)
    for has, sizes, distances, nodes in (
        ("0-3", [1, 1, 1, 1], "16 10 16 16", {1}),
        ("0,2-3", [1, 0, 1, 1], "16 10 16 32", {0, 2}),
        ("0,2-3", [1, 0, 1, 1], "", {0, 2, 3}),
        ("", [1, 0, 1, 1], "32 10 16 16", {2, 3}),  # before Linux 2.6.24
        ("\0", [0, 0, 0, 0], "16 10 28 12", {1}),  # they cannot all be without memory
    ):
        base = "sys/devices/system/node"
        saved_tree.write(f"{base}/node1/distance", distances)
        saved_tree.write(f"{base}/has_memory", has)
        for node, size in enumerate(sizes):
            saved_tree.write(f"{base}/node{node}/meminfo", f"Node {node} MemTotal:   {size * 4096} kB")
        topology = api.read_topology(saved_tree)
        found, lacks = api.with_memory(topology, api.memory_nodes(topology, [0]))
        assert found == nodes
        assert [line.partition(",")[0] for line in lacks] == ["NUMA node 1 has no memory"] * (found != {1})


@settings(max_examples=60)
@given(st.integers(1, 32), st.sampled_from([1, 2, 4]), st.data())
def test_parts_are_whole_cores_and_make_up_the_share(cores: int, smt: int, data: st.DataObject) -> None:
    topology = make_host(cores_per_node=cores, nodes=1, smt=smt, dense=True)
    share = data.draw(st.frozensets(st.integers(0, cores * smt - 1), min_size=1))
    most = sum(not core.isdisjoint(share) for core in topology.cores)
    parts = api.split_share(share, topology, data.draw(st.integers(1, most)))
    assert frozenset().union(*parts) == share
    assert sum(map(len, parts)) == len(share)
    for core in topology.cores:
        assert sum(not core.isdisjoint(part) for part in parts) <= 1
