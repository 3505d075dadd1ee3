"""Where processes run: real ones, on CPUs and with threads that the test chose."""

import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from affinity.conftest import MASK, needs_two_cpus, no_driver
from support import api
from support.forks import in_child

pytestmark = needs_two_cpus

# A process with a second thread, on another CPU, and a child of its own; it says when all are there.
FAMILY = """
import os, subprocess, threading
first, second = {}, {}
os.sched_setaffinity(0, [first])
def other():
    os.sched_setaffinity(0, [second])
    ready.set()
    stop.wait()
ready, stop = threading.Event(), threading.Event()
threading.Thread(target=other, daemon=True).start()
ready.wait()
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
child.stdin.write(b"."); child.stdout.read(1)  # from now on /proc shows its environment
say(child.pid)
listen()
"""


@pytest.fixture
def family(child: Any) -> Callable[..., tuple[int, int]]:
    """Starts one; returns the pids of the process and of its child."""

    def start(**environment: str) -> tuple[int, int]:
        process = child(FAMILY.format(*MASK), env=environment)
        return process.pid, int(process.hear())

    return start


def test_threads_children_and_memory(four_gpus: Any, family: Any) -> None:
    pid, child = family()
    report = api.placement(pid, driver=four_gpus, gpus=[0])
    parent, below = report.processes
    assert (parent.pid, below.pid, below.parent) == (pid, child, pid)
    main, other = parent.threads
    assert (main.tid, main.cpu, main.node, main.cpus_allowed, main.matches) == (pid, MASK[0], 0, {MASK[0]}, True)
    assert (other.cpu, other.node, other.cpus_allowed, other.matches) == (MASK[1], 1, {MASK[1]}, False)
    assert main.mems_allowed
    assert (parent.gpus, parent.gpu_nodes, parent.gpu_source, parent.matches) == ((0,), {0}, "given", False)
    assert (below.gpus, below.gpu_source, below.matches) == ((0,), "parent", True)
    assert parent.memory is None or sum(parent.memory.values()) > 1 << 20
    first, second = str(report).split("process ")[1:]
    for line in ("GPU node: 0 (GPU 0 by given)", "CPU node: 0 ", "GPU and CPU NUMA nodes do NOT match"):
        assert line in first
    assert "GPU and CPU NUMA nodes match" in second
    document = json.loads(json.dumps(report.as_dict()))
    process = document["processes"][0]
    assert (document["matches"], process["gpu_nodes"]) == (report.matches, "0") == (False, "0")
    assert process["threads"][0]["cpus_allowed"] == str(MASK[0])


def test_the_drivers_process_list_knows_the_gpu(four_gpus: Any, family: Any) -> None:
    pid, child = family()
    four_gpus.gpus[1] = four_gpus.gpus[1]._replace(processes=(api.GpuProcess(child),))
    parent, below = api.placement(pid, driver=four_gpus).processes
    assert (parent.gpus, parent.matches) == ((), None)
    assert (below.gpus, below.gpu_source, below.matches) == ((1,), "driver", False)


def test_this_process_and_a_forked_worker(four_gpus: Any) -> None:
    """A claim sets the variable after the start, and a forked worker shows its parent's old environment."""

    def child() -> Any:
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"
        worker = os.fork()
        if worker == 0:
            signal.pause()
        report = api.placement(driver=four_gpus)
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
        return report, os.getpid(), worker

    report, pid, worker = in_child(child)
    assert [process.pid for process in report.processes] == [pid, worker]
    assert [process.gpus for process in report.processes] == [(1,), (1,)]
    assert [process.gpu_source for process in report.processes] == ["CUDA_VISIBLE_DEVICES", "parent"]


def test_a_memory_policy_changes_the_policy_and_not_the_cpuset(four_gpus: Any) -> None:
    def child() -> Any:
        before = api.placement(driver=four_gpus, gpus=[0]).processes[0]
        try:
            api.set_policy(api.policy_for("bind", [0]))
        except OSError as err:
            return err
        return before, *(api.placement(driver=four_gpus, gpus=[gpu]) for gpu in (0, 1))

    found = in_child(child)
    if isinstance(found, OSError):
        pytest.skip(f"memory policies cannot be set here: {found}")
    before, here, there = found
    after = here.processes[0]
    assert before.threads[0].mems_allowed == after.threads[0].mems_allowed
    assert (before.policy, after.policy, after.policy_nodes, after.memory_matches) == ("default", "bind", {0}, True)
    assert "memory policy: bind on node 0" in str(there)
    assert "GPU node and memory policy do NOT match" in str(there)
    process = there.as_dict()["processes"][0]
    assert (process["policy"], process["policy_nodes"], process["memory_matches"]) == ("bind", "0", False)


def test_the_policy_of_this_process_is_that_of_the_calling_thread(four_gpus: Any) -> None:
    """The kernel tells that of the first thread."""

    def child() -> Any:
        try:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(api.set_policy, api.policy_for("bind", [0])).result()
                return pool.submit(api.placement, driver=four_gpus, gpus=[0]).result().processes[0].policy
        except OSError as err:
            return err

    policy = in_child(child)
    if isinstance(policy, OSError):
        pytest.skip(f"memory policies cannot be set here: {policy}")
    assert policy == "bind"


BOUND_CHILD = """
from safe_gpu.affinity.memory_policy import policy_for, set_policy
try:
    set_policy(policy_for("preferred", [0]))
    say("set")
except OSError as err:
    say(err)
listen()
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/numa_maps"), reason="this kernel has no numa_maps")
def test_the_policy_of_another_process(four_gpus: Any, child: Any) -> None:
    other = child(BOUND_CHILD)
    said = other.hear()
    if said != "set":
        pytest.skip(f"memory policies cannot be set here: {said}")
    found = api.placement(other.pid, driver=four_gpus, gpus=[0]).processes[0]
    assert (found.policy, found.policy_nodes, found.memory_matches) == ("preferred", {0}, True)
    assert found.memory is not None
    assert sum(found.memory.values()) > 1 << 20


def test_numa_maps() -> None:
    for text, expected in (
        ("", None),
        ("7f00 default anon=3 dirty=3 N0=2 N1=1 kernelpagesize_kB=4", ({0: 8192, 1: 4096}, "default", set())),
        ("7f00 bind:0-1,3 file=/a\\040b N3=1 kernelpagesize_kB=2048", ({3: 2 << 20}, "bind", {0, 1, 3})),
        ("7f00 bind=static:2", ({}, "bind", {2})),
        (f"7f00 local N0={'9' * 5000}", ({}, "local", set())),
    ):
        found = api.parse_numa_maps(text.encode().splitlines())
        assert (tuple(found.values()) or None) == expected


def test_a_gpu_is_named_in_either_numbering(four_gpus: Any, family: Any) -> None:
    pid, _ = family(CUDA_VISIBLE_DEVICES="1,0")

    def gpus(**named: Any) -> list[tuple[int, ...]]:
        return [process.gpus for process in api.placement(pid, driver=four_gpus, **named).processes]

    assert gpus() == [(1, 0), (1, 0)]
    assert gpus(ordinal=0) == [(1,), (1,)]
    # The child shows its parent's old environment, and means the same GPU all the same.
    assert gpus(ordinal=1) == gpus(gpus=0) == gpus(gpus="GPU-0") == [(0,), (0,)]
    for named in ({"gpus": 0, "ordinal": 0}, {"gpus": 7}, {"ordinal": 2}):
        with pytest.raises(api.GPUAffinityError):
            gpus(**named)
    none: list[Any] = [0, -1, "1", True, 1.5, 1 << 30]
    for pid in none:
        with pytest.raises(api.GPUAffinityError, match=str(pid)):
            api.placement(pid, driver=four_gpus)


def test_without_a_driver_the_rest_is_told(four_gpus: Any, family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.drivers, "open_driver", no_driver)
    pid, _ = family()
    report = api.placement(pid)
    assert (report.matches, report.processes[0].threads[0].node) == (None, 0)
    assert "no NVIDIA driver" in str(report)
    assert api.placement(pid, gpus=["1"]).processes[0].gpu_nodes == {1}  # the kernel's own list of GPUs


def test_a_thread_that_sleeps_since_it_was_bound_matches(four_gpus: Any) -> None:
    """It still shows the CPU from before; where it may run is what counts."""

    def child() -> Any:
        sleeping, stop = threading.Event(), threading.Event()

        def sleep() -> None:
            os.sched_setaffinity(0, {MASK[1]})
            sleeping.set()
            stop.wait()

        threading.Thread(target=sleep).start()
        sleeping.wait()
        for tid in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(tid), {MASK[0]})
        report = api.placement(driver=four_gpus, gpus=[0])
        stop.set()
        return report.matches

    assert in_child(child) is True
