"""The simulated hosts: what they are made of, and that their processes live and die with real ones."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import api


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def driver(state: Path) -> api.SimulatedDriver:
    return api.SimulatedDriver("dgx-a100", str(state))


def pids(snapshot: api.HostSnapshot, index: int = 0) -> list[int]:
    return [process.pid for process in snapshot.gpus[index].processes or ()]


def entries(state: Path) -> list[str]:
    return sorted(os.listdir(state / "simulated/dgx-a100"))


@pytest.fixture
def occupying(state: Path, child: Any) -> Callable[..., Any]:
    """Start another process that occupies GPU 0 of the same host, runs ``then`` and waits."""

    def start(then: str = "say()", before: str = "", state: Path = state) -> Any:
        process = child(f"""
import os, signal, sys
import safe_gpu.coordination.directory  # while this interpreter can still be read
from safe_gpu.drivers.simulated import SimulatedDriver
{before}
driver = SimulatedDriver("dgx-a100", {str(state)!r})
context = driver.occupy(driver.idle.gpus[0].uuid)
{then}
listen()
""")
        process.said = [int(word) for word in process.hear().split()]
        return process

    return start


# What the hosts are


@pytest.mark.parametrize("name", api.PRESETS)
def test_the_processors_fit_together(name: str, tmp_path: Path) -> None:
    driver = api.SimulatedDriver(name, str(tmp_path))
    topology = driver.host_topology()
    for parts in (topology.cores, topology.nodes.values(), topology.packages.values(), topology.llc):
        assert sorted(cpu for part in parts for cpu in part) == sorted(topology.cpus)
    assert all(any(core <= group for group in topology.llc) for core in topology.cores)
    assert all(any(group <= cpus for cpus in topology.nodes.values()) for group in topology.llc)
    for one, row in topology.distances.items():
        assert row[one] == 10 == min(row.values())
        assert all(topology.distances[other][one] == far for other, far in row.items())
    assert all(gpu.uuid not in gpu.nvlink_peers for gpu in driver.idle.gpus)
    assert [place.uuid for place in topology.gpus] == [gpu.uuid for gpu in driver.idle.physical]
    for place in topology.gpus:
        assert place.node_cpus == topology.nodes[place.numa_node] == driver.cpu_affinity(place.uuid, "node")
        assert place.socket_cpus == driver.cpu_affinity(place.uuid, "socket") >= place.node_cpus


# Processes


def test_contexts_of_one_process_add_up(driver: api.SimulatedDriver, state: Path) -> None:
    uuid = driver.idle.gpus[0].uuid
    first = driver.occupy(uuid, memory=1000)
    with driver.occupy(uuid, memory=500), driver.occupy(uuid, memory=7, kind=api.ProcessKind.GRAPHICS):
        shown = api.SimulatedDriver("dgx-a100", str(state)).snapshot().gpus[0].processes or ()
        assert [(one.pid, one.memory_used) for one in shown] == [(os.getpid(), 1500), (os.getpid(), 7)]
        assert [one.kind for one in shown] == [api.ProcessKind.COMPUTE, api.ProcessKind.GRAPHICS]
        for _ in range(2):
            first.close()
        assert sum(process.memory_used or 0 for process in driver.snapshot().gpus[0].processes or ()) == 507
    assert driver.snapshot() == driver.idle
    assert entries(state) == []


def test_devices_that_nothing_can_run_on(tmp_path: Path) -> None:
    driver = api.SimulatedDriver("mig-h100", str(tmp_path))
    parent, instance = driver.idle.gpus[:2]
    for uuid in (parent.uuid, "GPU-of-nobody", "../../escape"):
        with pytest.raises(api.PlaceholderError) as caught:
            driver.occupy(uuid)
        assert caught.value.uuid == uuid
    with driver.occupy(instance.uuid):
        assert pids(driver.snapshot(), 1) == [os.getpid()]


def test_a_killed_process_is_gone_before_anyone_buries_it(
    driver: api.SimulatedDriver, occupying: Any, state: Path
) -> None:
    """So is one that has become another program."""
    other = occupying()
    assert pids(driver.snapshot()) == [other.pid]
    other.process.send_signal(signal.SIGSTOP)
    assert pids(driver.snapshot()) == [other.pid]
    other.process.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert driver.usage(driver.idle.gpus) == driver.idle.gpus
    assert (driver.snapshot(), entries(state)) == (driver.idle, [])
    other = occupying("os.execv('/bin/sh', ['sh', '-c', 'echo; read line'])")
    assert (driver.snapshot(), other.process.poll()) == (driver.idle, None)


def test_a_child_does_not_keep_what_its_parent_held(
    driver: api.SimulatedDriver, occupying: Any, eventually: Any
) -> None:
    other = occupying("""
child = os.fork()
if not child:
    context.close()  # not the child's to close
    signal.pause()
say(child)
""")
    (child,) = other.said
    try:
        assert pids(driver.snapshot()) == [other.pid]
        other.kill()
        os.kill(child, 0)
        eventually(lambda: driver.snapshot() == driver.idle)  # once the child has run at all
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_poll_never_takes_a_new_context_for_a_dead_one(driver: api.SimulatedDriver, occupying: Any) -> None:
    uuid = driver.idle.gpus[0].uuid
    occupying("""
context.close()
say()
while True:
    driver.snapshot()
""")
    for _ in range(300):
        with driver.occupy(uuid):
            assert pids(driver.snapshot()) == [os.getpid()]
        assert driver.snapshot() == driver.idle


def test_what_the_dead_left_is_cleared_away_and_nothing_else(driver: api.SimulatedDriver, state: Path) -> None:
    uuid, place = driver.idle.gpus[0].uuid, state / "simulated/dgx-a100"
    dead, kept = f"{uuid}.1-1000-compute-5", ("notes", f"{uuid}.x-1000-compute-7")
    with driver.occupy(uuid, memory=5):
        stem, _, number = entries(state)[0].rpartition("-")
        taken = [f"{stem}-{int(number) + more}" for more in (1, 2)]
        for name in (dead, *kept, *taken):
            (place / name).touch()
        driver.occupy(uuid, memory=5).close()  # a taken name is passed over
        outside = state / "precious"
        outside.write_text("keep")
        (place / f"{uuid}.1-1000-compute-6").symlink_to(outside)
        assert pids(driver.snapshot()) == [os.getpid()]
        assert dead not in entries(state)
        assert set(kept) <= set(entries(state))
    assert outside.read_text() == "keep"
    assert driver.snapshot() == driver.idle


# The state directory


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as two users")
def test_users_with_narrow_umasks_share_the_host(open_tmp: Path, occupying: Any, state: Path) -> None:
    become = "from safe_gpu.coordination.doors import digest; digest(''); "
    become += "os.umask(0o077); os.setgid({0}); os.setuid({0})"
    seen = "say(*sorted(p.pid for p in driver.snapshot().gpus[0].processes))"
    driver = api.SimulatedDriver("dgx-a100", str(open_tmp / "state"))
    first, second = (occupying("say()", become.format(uid), open_tmp / "state") for uid in (54321, 54322))
    assert pids(driver.snapshot()) == sorted([first.pid, second.pid])
    third = occupying(seen, become.format(54323), open_tmp / "state")
    assert third.said == sorted([first.pid, second.pid, third.pid])
    third.kill()
    first.kill()
    # The second user may not remove what the dead first one left, and is not misled by it either.
    fourth = occupying(seen, become.format(54322), open_tmp / "state")
    assert fourth.said == sorted([second.pid, fourth.pid])


@pytest.mark.parametrize("level", ["", "simulated", "simulated/dgx-a100"])
def test_links_are_never_followed(driver: api.SimulatedDriver, tmp_path: Path, level: str, state: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    place = state / level
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)
    if level:  # in the place of the state directory a link stops the claim itself
        with pytest.raises(api.StateDirError, match="SAFE_GPU_DIR"):
            driver.snapshot()
    with pytest.raises(api.StateDirError, match="link"):
        driver.occupy(driver.idle.gpus[0].uuid)
    assert list(target.iterdir()) == []
    place.unlink()
    place.write_text("")
    with pytest.raises(api.StateDirError, match="SAFE_GPU_DIR"):
        driver.snapshot()


@pytest.mark.parametrize("broken", ["fchmod", "open"])
def test_a_full_disk(driver: api.SimulatedDriver, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uuid, real_open = driver.idle.gpus[0].uuid, os.open
    driver.occupy(uuid).close()
    descriptors = len(os.listdir("/proc/self/fd"))

    def full(*args: Any, **options: Any) -> int:
        if broken == "open" and not args[1] & os.O_CREAT:
            return real_open(*args, **options)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, broken, full)
        with pytest.raises(api.StateDirError, match="No space left on device") as caught:
            driver.occupy(uuid)
    assert caught.value.errno == 28
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert driver.snapshot() == driver.idle


def test_a_file_makes_a_gpu_ill(driver: api.SimulatedDriver, state: Path) -> None:
    well, ill = driver.idle.gpus[:2]
    context = driver.occupy(well.uuid)
    file = state / f"simulated/dgx-a100/{ill.uuid}.ill"
    file.write_text("a fan\nis broken\x1b[2J\n")
    for gpus in (driver.snapshot().gpus[:2], driver.usage((well, ill))):
        assert [(len(gpu.processes or ()), gpu.illness) for gpu in gpus] == [(1, ""), (0, "a fan is broken [2J")]
    file.unlink()
    context.close()
    assert driver.snapshot() == driver.idle


# The placeholder


def test_the_placeholder_takes_what_cuda_would_show(
    driver: api.SimulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    placeholder = driver.runtime.default_placeholder()
    for device_no, index in ((7, 7), (1, 2)):
        held = placeholder(device_no)
        assert [number for number in range(8) if pids(driver.snapshot(), number)] == [index]
        placeholder.release(held)
        assert driver.snapshot() == driver.idle
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,2")
    for wrong in (2, -1):
        with pytest.raises(api.PlaceholderError, match="CUDA_VISIBLE_DEVICES=5,2 shows 2"):
            placeholder(wrong)


# Cards that are divided

MIB = 1 << 20
MIG = "mig 3g.40gb/2 40320 1g.10gb 9856"


@pytest.mark.parametrize(
    ("preset", "mode", "labels", "pieces"),
    [
        ("dgx-a100", MIG, ["0", "0:0", "0:1", "0:2", "1"], [False, True, True, True, False]),
        ("mi300x-cpx", "partitions 2", ["0", "1", "2"], [True, True, True]),
        ("mi300x-cpx", "whole", ["0", "1"], [False, True]),
        ("max1550", "functions 2", ["0", "1", "2", "3"], [False, True, True, False]),
    ],
)
def test_a_card_is_divided_while_the_host_runs(
    tmp_path: Path, preset: str, mode: str, labels: list[str], pieces: list[bool]
) -> None:
    driver, other = (api.SimulatedDriver(preset, str(tmp_path)) for _ in range(2))
    before = driver.snapshot()
    card = before.gpus[0].whole
    driver.divide(card, mode)
    shown = other.snapshot()
    assert [gpu.label for gpu in shown.gpus][: len(labels)] == labels
    assert [gpu.is_piece for gpu in shown.gpus][: len(labels)] == pieces
    assert len({gpu.uuid for gpu in shown.gpus}) == len(shown.gpus)
    assert {gpu.whole for gpu in shown.gpus} == {gpu.whole for gpu in before.gpus}
    assert other.usage(shown.gpus) == shown.gpus
    driver.divide(card, api.find_preset(preset).cards[0].mode)
    assert other.snapshot() == before


def test_names_of_pieces_are_those_that_drivers_give(tmp_path: Path) -> None:
    """The first partition of a card has the name of the whole, and of the same number another one in another mode."""
    driver = api.SimulatedDriver("mi300x-cpx", str(tmp_path))
    card = driver.idle.gpus[0].whole
    uuids = {}
    for mode in ("whole", "partitions 2", "partitions 8"):
        driver.divide(card, mode)
        uuids[mode] = [gpu.uuid for gpu in driver.snapshot().gpus if gpu.whole == card]
    assert uuids["partitions 2"] == uuids["partitions 8"][::4]
    assert uuids["whole"] == uuids["partitions 8"][:1]
    mig = api.SimulatedDriver("dgx-a100", str(tmp_path))
    made = []
    for mode in (MIG, "whole", MIG):
        mig.divide(mig.idle.gpus[0].uuid, mode)
        made.append([gpu.uuid for gpu in mig.snapshot().gpus if gpu.is_piece])
    assert made[0] == made[2] != made[1] == []


def test_compute_instances_have_their_memory_together(tmp_path: Path) -> None:
    driver = api.SimulatedDriver("dgx-a100", str(tmp_path))
    driver.divide(driver.idle.gpus[0].uuid, MIG)
    _, first, second, alone, *_ = driver.snapshot().gpus
    with driver.occupy(first.uuid, memory=500 * MIB):
        for now in (driver.snapshot().gpus[1:4], driver.usage([first, second, alone])):
            used = [(gpu.memory_used or 0) - (first.memory_used or 0) for gpu in now]
            assert used == [500 * MIB, 500 * MIB, 0]
            assert [gpu.unexplained_memory for gpu in now] == [first.unexplained_memory] * 3
            assert [len(gpu.processes or ()) for gpu in now] == [1, 0, 0]
        assert driver.usage([second])[0].memory_beside == 500 * MIB


@pytest.mark.parametrize("mode", ["", "mig 3g.40gb", "mig 3g.40gb/9999999 1", "partitions 2", "functions 2", "whole 1"])
def test_what_is_no_mode_of_a_card(tmp_path: Path, mode: str) -> None:
    driver = api.SimulatedDriver("dgx-a100", str(tmp_path))
    with driver.occupy(driver.idle.gpus[1].uuid):
        pass  # makes the directory
    card = driver.idle.gpus[0].uuid
    with pytest.raises(ValueError):
        driver.divide(card, mode)
    Path(driver.tree.path, f"{card}.mode").write_text(mode)
    assert driver.snapshot() == driver.idle
    with pytest.raises(ValueError):
        driver.divide("GPU-of-nobody", "whole")
