"""Binding by number in real processes: which GPU is meant, what is said, and what child processes know of it."""

import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
from affinity.conftest import MASK, needs_known_calls, needs_two_cpus, no_driver, refuse_memory_policies
from support import api
from support.forks import in_child

import safe_gpu

pytestmark = needs_two_cpus


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What the package has logged, in this process or a child of it."""
    caplog.set_level("INFO", "safe_gpu")
    return lambda: [f"{record.levelname} {record.getMessage()}" for record in caplog.records]


def test_neighbours_mean_what_they_say(four_gpus: Any, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs 0 and 2 are next to the first CPU, 1 and 3 next to the second."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,0")

    def bound(bind: Callable[[], Any]) -> Any:
        def child() -> Any:
            return sorted(bind()), said(), safe_gpu.placement(driver=four_gpus).processes[0]

        return in_child(child)

    first, second = MASK[:2]
    ordinal = "CUDA ordinal {} with CUDA_VISIBLE_DEVICES=3,0"
    for bind, cpu, index, named in (
        (lambda: safe_gpu.set_affinity(1, 2), first, 0, ordinal.format(1)),
        (lambda: safe_gpu.bind(ordinal=0).cpus, second, 3, ordinal.format(0)),
        (lambda: safe_gpu.bind(gpus="GPU-33").cpus, second, 3, ""),
    ):
        cpus, (line,), found = bound(bind)
        assert (cpus, found.gpus, found.gpu_source) == ([cpu], (index,), "SAFE_GPU_BOUND")
        assert line.startswith(f"INFO next to GPU {index} (GPU-{index}{index}ab)")
        assert f": bound 1 thread to CPUs {cpu}" in line
        assert named in line
    cpus, (line,), found = bound(lambda: safe_gpu.bind().cpus)
    assert (cpus, found.gpus, found.gpu_source) == ([first, second], (3, 0), "CUDA_VISIBLE_DEVICES")
    assert line.startswith("INFO next to GPU 3,0, all that CUDA_VISIBLE_DEVICES=3,0 shows: bound ")
    safe_gpu.wrap_command(["true"], mode="node", ordinal=0)
    assert said()[-1].endswith(f": numactl --physcpubind={second} true")


def test_a_node_by_its_number(four_gpus: Any, said: Any, saved_tree: Any, monkeypatch: Any) -> None:
    """Node 2 has a CPU that this process may not use."""
    saved_tree.cpus([(MASK[0],), (MASK[1],), (5000,)])
    saved_tree.nodes({0: [MASK[0]], 1: [MASK[1]], 2: [5000]})
    monkeypatch.setenv("SAFE_GPU_DRIVER", "nvml")
    monkeypatch.setattr(api.drivers, "open_driver", no_driver)

    def child() -> Any:
        found = [sorted(safe_gpu.bind(node=node).cpus) for node in (1, 0)]
        return found, said(), safe_gpu.bind(node=1, mode=None, memory="bind").memory.asked

    found, lines, asked = in_child(child)
    assert (found, asked) == ([[MASK[1]], [MASK[0]]], {1})
    assert lines[:2] == [f"INFO next to NUMA node {node}: bound 1 thread to CPUs {MASK[node]}" for node in (1, 0)]
    for wrong, why in (
        ({"node": 2}, rf"may use no CPU of NUMA node 2: the node has 5000, the mask {MASK[0]}"),
        ({"node": 3}, "no NUMA node 3: it has 0-2"),
        *(({"node": 1, **more}, "node=1 names no GPU") for more in ({"gpus": 0}, {"ordinal": 0})),
    ):
        with pytest.raises(safe_gpu.GPUAffinityError, match=why):
            safe_gpu.bind(**wrong)
        assert not safe_gpu.bind(**wrong, strict=False).ok
    assert "SAFE_GPU_BOUND" not in os.environ


BOTH = (MASK * 2)[:2]
FIRST, SECOND = BOTH[:1], BOTH[1:]


@pytest.mark.parametrize(
    ("isolated", "allowed", "mode", "expected"),
    [
        ("5000-5001", BOTH, "exclusive", [FIRST, SECOND]),
        ("5000-5001", FIRST, "exclusive", [FIRST, FIRST]),
        (f"{BOTH[0]},{BOTH[1]}", BOTH, "node", [BOTH, BOTH]),
        ("5000-", BOTH, "exclusive", [BOTH, BOTH]),
    ],
)
def test_all_divide_the_same_cpus(
    four_gpus: Any, saved_tree: Any, capsys: Any, isolated: str, allowed: list[int], mode: str, expected: Any
) -> None:
    """GPUs 0 and 1 are on a node of four cores, of which this process has the first two."""
    del four_gpus.gpus[2:]
    saved_tree.cpus([FIRST, SECOND, (5000,), (5001,)])
    saved_tree.nodes({0: [*BOTH, 5000, 5001], 1: []})
    saved_tree.gpu("0000:02:00.0", node=0)
    saved_tree.write("sys/devices/system/cpu/isolated", isolated)
    saved_tree.write("sys/devices/system/cpu/nohz_full", f"{BOTH[0]},{BOTH[1]},5000-5001")
    shown = ["affinity", "--json", "--mode", mode, "--allowed", ",".join(map(str, allowed))]

    def child() -> Any:
        os.sched_setaffinity(0, allowed)
        for gpu in (0, 1):
            with safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), only=gpu, affinity=mode) as owner:
                yield owner.cpus
            yield safe_gpu.bind(gpu, mode=mode).cpus
            yield api.parse_cpulist(safe_gpu.wrap_command(["true"], gpu=gpu, mode=mode)[1].partition("=")[2])
            api.main(shown)
            yield api.parse_cpulist(json.loads(capsys.readouterr().out)["gpus"][gpu]["cpus"])

    assert in_child(lambda: list(child())) == [set(expected[0])] * 4 + [set(expected[1])] * 4


@needs_known_calls
@pytest.mark.parametrize(
    ("refused", "warning"), [(True, "refused: .* node 0: Operation not permitted"), (False, "node 1 has no")]
)
def test_memory_that_is_not_as_asked_warns(
    four_gpus: Any, four_gpus_env: Any, saved_tree: Any, command: Any, said: Any, refused: bool, warning: str
) -> None:
    """Whoever asks, in a container that refuses memory policies and next to a node without memory."""
    gpu = 0 if refused else 1

    def cause() -> None:
        if refused:
            refuse_memory_policies()
        else:
            saved_tree.write("sys/devices/system/node/has_memory", "0")

    def child() -> Any:
        cause()
        with safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), only=gpu, memory="bind") as owner:
            reports = [owner.binding]
        reports += [safe_gpu.bind(gpu, memory="preferred"), safe_gpu.bind(node=gpu, memory="bind")]
        api.enter_worker([MASK[gpu]], gpu, "bind")
        return reports, [line for line in said() if re.match(f"WARNING .*{warning}", line)]

    reports, lines = in_child(child)
    assert len(lines) == 4
    for report in reports:
        assert (report.cpus, report.as_asked) == ({MASK[gpu]}, False)
        assert report.memory.done == (set() if refused else {0})
    words = ["bind", "--node", str(gpu), "--memory", "bind", "--", "true"]
    done = command.run(*words, env=four_gpus_env, preexec_fn=cause)
    assert (done.returncode, len(re.findall(warning, done.stderr))) == (0, 1), done.stderr


SHOW = """
import json, os, safe_gpu
found = safe_gpu.placement().processes[0]
print(json.dumps([found.gpus, found.gpu_source, sorted(os.sched_getaffinity(0))]))
"""


def test_a_rank_of_a_launcher_knows_its_gpu(command: Any, four_gpus_env: dict[str, str]) -> None:
    environment = {**four_gpus_env, "CUDA_VISIBLE_DEVICES": "3,0", "LOCAL_RANK": "1"}
    for options, index in ([], 0), (["--gpu", "3"], 3):
        done = command.run("bind", *options, "--", sys.executable, "-c", SHOW, env=environment)
        assert json.loads(done.stdout) == [[index], "SAFE_GPU_BOUND", [MASK[index % 2]]], done.stderr
        assert done.stderr == ""


def test_unbound_rather_than_not_at_all(four_gpus: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """A rank beyond the visible GPUs is told."""
    ran: list[list[str]] = []  # the commands that this process would have become
    monkeypatch.setattr(os, "execv", lambda path, command: (ran.append(command), sys.exit(0)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,0")
    with monkeypatch.context() as patch:
        patch.setenv("LOCAL_RANK", "5")
        assert in_child(lambda: (api.main(["bind", "--", "true"]), ran)) == (0, [["true"]])
    assert "local rank 5 is beyond the 2 visible GPUs" in capfd.readouterr().err
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for options, code, why in (
        (["--gpu", "4"], 78, "this host has no GPU 4"),
        (["--mode", "exclusive"], 78, "1 physical core near 2 GPUs"),
        (["--node", "1", "--gpu", "0"], 2, "--node"),
        ([], 69, "no NVIDIA driver"),
    ):
        if why == "no NVIDIA driver":
            monkeypatch.setattr(api.drivers, "open_driver", no_driver)
        assert api.main(["bind", *options, "--", "/bin/echo", "ran"]) == code
        assert (ran, why in capfd.readouterr().err) == ([], True)
        if code != 2:
            assert api.main(["bind", "--if-possible", *options, "--", "/bin/echo", "ran"]) == 0
            assert ran.pop() == ["/bin/echo", "ran"]
            assert re.match(f"safe-gpu: not bound: .*{why}", capfd.readouterr().err)


def test_the_command_line_shows_some_gpus_of_either_numbering(four_gpus: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,0")

    def shown(*options: str) -> list[int]:
        assert api.main(["affinity", "--json", *options]) == 0
        return [gpu["index"] for gpu in json.loads(capsys.readouterr().out)["gpus"]]

    assert shown() == [0, 1, 2, 3]
    assert shown("--ordinal", "0") == [3]
    assert shown("--gpu", "0,2") == [0, 2]
    assert api.main(["affinity", "--gpu", "0", "--ordinal", "0"]) == 2


def test_a_process_that_cannot_be_asked_is_told_its_gpu(
    child: Any, four_gpus: Any, four_gpus_env: dict[str, str], capsys: Any
) -> None:
    """What a process has set in its environment since it started is not in /proc."""
    environment = {**four_gpus_env, "CUDA_VISIBLE_DEVICES": "3,0"}
    rank = child("import safe_gpu; safe_gpu.bind(ordinal=1); say('bound'); listen()", env=environment, says="bound")
    for options, gpus, matches in (([], [3, 0], True), (["--gpu", "3"], [3], False), (["--ordinal", "1"], [0], True)):
        api.main(["affinity", "--of", str(rank.pid), "--json", *options])
        process = json.loads(capsys.readouterr().out)["processes"][0]
        assert (process["gpus"], process["matches"]) == (gpus, matches)
    rank.tell()


# Two numberings of GPUs: the index of nvidia-smi, and the ordinal of CUDA after CUDA_VISIBLE_DEVICES

EIGHT = api.HostSnapshot(tuple(api.Gpu(number, f"GPU-{number}{number}ab", name="A100") for number in range(8)))
MIXED = api.HostSnapshot(
    (api.Gpu(0, "GPU-00", name="T400"), api.Gpu(1, "GPU-11", name="H100"), api.Gpu(2, "GPU-22", name="H100"))
)
GPU_0, INSTANCE = (
    api.Gpu(0, "GPU-00", name="H100", mig_enabled=True),
    api.Gpu(0, "MIG-01", name="H100", mig_parent="GPU-00"),
)
MIG = api.HostSnapshot((GPU_0, INSTANCE._replace(mig_instance=0), api.Gpu(1, "GPU-11", name="H100")))


def test_names_are_those_of_nvidia_smi() -> None:
    assert [gpu.index for gpu in api.by_name("5-7", EIGHT).gpus] == [5, 6, 7]
    assert api.by_name([1, "GPU-22"], EIGHT).title == "GPU 1,2"
    assert [gpu.uuid for gpu in api.by_name(0, MIG).gpus] == ["GPU-00"]  # and not its instances once more
    assert [gpu.uuid for gpu in api.by_name("MIG-01", MIG).gpus] == ["MIG-01"]
    with pytest.raises(api.GPUAffinityError, match=r"no GPU 9: it has GPU 0-7"):
        api.by_name(9, EIGHT)


def test_ordinals_count_what_cuda_shows() -> None:
    for shown, ordinal, index in ((None, 3, 3), ("7,2", 1, 2), ("GPU-55,GPU-1", 1, 1)):
        found = api.by_ordinal(ordinal, EIGHT, {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown})
        assert ([gpu.index for gpu in found.gpus], found.notes) == ([index], ())
        assert found.title.startswith(f"GPU {index} (GPU-{index}{index}ab), CUDA ordinal {ordinal}")
    for shown, wrong, names in (
        ("7,2", 2, "no GPU 2: 2 are visible with CUDA_VISIBLE_DEVICES=7,2"),
        ("0,0", 0, "shows no GPU"),
        ("7", -1, "ordinal=-1"),
    ):
        with pytest.raises(api.GPUAffinityError, match=names):
            api.by_ordinal(wrong, EIGHT, {"CUDA_VISIBLE_DEVICES": shown})
    lost = api.HostSnapshot((api.Gpu(0, "GPU-0", lost=True), api.Gpu(1, "GPU-1")))
    assert [gpu.index for gpu in api.visible(lost, {}).gpus] == [1]
    for snapshot, environ, certain in (
        (MIXED, {}, False),
        (MIXED, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, True),
        (MIXED, {"CUDA_VISIBLE_DEVICES": "GPU-11"}, True),
        (MIG, {"CUDA_VISIBLE_DEVICES": "0"}, False),
    ):
        notes = api.by_ordinal(0, snapshot, environ).notes
        assert (bool(notes), all("not certain which GPU" in note for note in notes)) == (not certain, True)


def test_what_was_bound_is_known_while_it_is_visible() -> None:
    """A MIG instance is part of its GPU."""
    for snapshot, bound, shown, indices in (
        (EIGHT, "GPU-55ab,GPU-11ab", "1,5,6", [5, 1]),
        (EIGHT, "GPU-55ab", "1,2", None),  # a claim or launcher has chosen other GPUs since
        (EIGHT, "GPU-55ab,GPU-11ab", "5", None),
        (MIG, "GPU-00", "MIG-01", [0]),
        (MIG, "MIG-01", "GPU-00", [0]),
    ):
        found = api.remembered(snapshot, {api.BOUND: bound, "CUDA_VISIBLE_DEVICES": shown})
        assert (found and [gpu.index for gpu in found.gpus]) == indices
    assert api.remembered(EIGHT, {}) is None


RANK = """
import json, os, threading
import safe_gpu
asked, told = {}, threading.Event()
def elsewhere():  # a thread that was there before the claim, as a warmed-up numpy has
    told.wait()
    asked["thread"] = sorted(os.sched_getaffinity(0))
thread = threading.Thread(target=elsewhere)
thread.start()
owner = safe_gpu.claim_gpus(1, affinity="exclusive")
told.set()
thread.join()
say(json.dumps([owner.devices_taken, sorted(os.sched_getaffinity(0)), sorted(owner.cpus), asked["thread"]]))
listen()
"""


def test_each_rank_has_cores_of_its_own(saved_tree: Any, four_gpus_env: Any, fake_gpus: Any, child: Any) -> None:
    """Two GPUs on one node of two real cores."""
    first, second = MASK[:2]
    saved_tree.nodes({0: [first, second]})
    fake_gpus.write(*({**gpu, "node_cpus": f"{first},{second}"} for gpu in fake_gpus.gpus[::2]))
    ranks = [
        child(RANK, env={**four_gpus_env, "OMPI_COMM_WORLD_LOCAL_RANK": str(number), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
        for number in range(2)
    ]
    held = sorted(json.loads(rank.hear()) for rank in ranks)
    assert held == [[[0], [first], [first], [first]], [[1], [second], [second], [second]]]
