"""The NVML driver against a real shared library with made-up GPUs: faults, old and odd drivers, MIG, forks."""

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pynvml
import pytest
from support import api
from support.claims import claim
from support.forks import in_child
from support.processes import ALL_ARE_SEEN

# nvmlReturn_t, as the fake answers it
UNINITIALIZED, NOT_SUPPORTED, NO_PERMISSION, INSUFFICIENT_SIZE = 1, 3, 4, 7
DRIVER_NOT_LOADED, TIMEOUT, FUNCTION_NOT_FOUND, GPU_IS_LOST = 9, 10, 13, 15
RESET_REQUIRED, VERSION_MISMATCH, UNKNOWN = 16, 18, 999

HIDDEN = 4_000_000  # above every pid that Linux gives: what a container sees of the host's processes


@pytest.fixture
def host(fake_gpus: Any) -> Any:
    fake_gpus.use_nvml_here()
    return fake_gpus


@pytest.fixture
def driver(host: Any) -> Iterator[api.nvml.NvmlDriver]:
    opened = api.nvml.NvmlDriver()
    yield opened
    opened.close()


def state(gpu: api.Gpu) -> tuple[str, str]:
    """What a claim would say of it."""
    verdict, _ = api.judge(api.HostSnapshot((gpu, api.Gpu(1, "GPU-other"))), api.Selection())
    return verdict.state, verdict.reason


def pids(gpu: api.Gpu) -> set[tuple[int, str]]:
    assert gpu.processes is not None, gpu.process_error
    return {(process.pid, process.kind) for process in gpu.processes}


# ---- identity and order ----


def test_dynamic_fields(host: Any, driver: api.nvml.NvmlDriver) -> None:
    host.write(
        {"used": 5 << 20, "util": 37, "temp": 66, "fan": 30, "mode": 3, "display": 1},
        {"mode": 2, "util": "NA", "used": 2**64 - 1},
    )
    first, second = driver.detailed(driver.snapshot()).gpus
    assert (first.memory_used, first.memory_free) == (5 << 20, (80 << 30) - (5 << 20))
    assert (first.utilization, first.compute_mode, first.display_active) == (
        37,
        api.ComputeMode.EXCLUSIVE_PROCESS,
        True,
    )
    assert (second.utilization, second.compute_mode, second.display_active) == (None, api.ComputeMode.PROHIBITED, False)
    assert (first.temperature, second.temperature, second.memory_used) == (66, 41, None)
    assert [(gpu.fan, gpu.power, gpu.power_limit) for gpu in (first, second)] == [(30, 62, 400), (None, 62, 400)]


def test_nvlink(host: Any, driver: api.nvml.NvmlDriver) -> None:
    host.set(4)
    one, two, *_ = host.uuids
    host.change(0, nvlink=two)
    host.change(3, p2p_error=TIMEOUT)
    plain = driver.snapshot()
    assert not any(gpu.nvlink_peers for gpu in plain.gpus)
    assert [gpu.nvlink_peers for gpu in driver.linked(plain).gpus] == [{two}, {one}, set(), set()]


def links_asked_for(host: Any, nb_gpus: int, **options: Any) -> int:
    """How many pairs of GPUs a claim asks about."""
    host.options(log=1)
    host.calls()
    claim(nb_gpus, **options).release_gpus()
    calls = host.calls()
    assert "nvmlDeviceGetCount_v2" in calls
    return int(calls.count("nvmlDeviceGetP2PStatus"))


def test_links_are_asked_for_among_free_candidates_where_there_is_a_choice(host: Any) -> None:
    host.process(host.uuids[7], HIDDEN, static=True)
    assert links_asked_for(host, 1) == 0
    assert links_asked_for(host, 7) == 0, "there are no others"
    assert links_asked_for(host, 2, only=[0, 1, 7]) == 0
    assert links_asked_for(host, 2, exclude=[0, 1, 2, 3]) == 3, "GPU 4, 5 and 6"
    assert links_asked_for(host, (2, 3), exclude=[0, 1, 2, 3]) == 0


def test_links_are_asked_for_once(host: Any) -> None:
    host.change(0, nvlink=host.uuids[5])
    assert links_asked_for(host, 2) == 28
    assert links_asked_for(host, 3) == links_asked_for(host, 2, near="nvlink") == 0
    with claim(2) as claimed:
        assert claimed.devices_taken == [0, 5], "what was asked for counts"
    host.write(*host.gpus, {"uuid": host.uuid("GPU", 99), "bus": "00000000:F0:00.0"})
    assert links_asked_for(host, 2) == 8, "those of a new GPU"


def test_links_of_a_gpu_with_mig_are_asked_for_when_it_is_off(host: Any) -> None:
    host.change(0, nvlink=host.uuids[5])
    host.change(1, mig=1, instances=host.uuid("MIG", 1))
    assert links_asked_for(host, 2, near="nvlink") == 21, "seven GPUs can have links"
    host.change(1, mig=0, instances="")
    assert links_asked_for(host, 2, near="nvlink") == 7
    host.change(1, mig=1, instances=host.uuid("MIG", 1))
    host.change(1, mig=0, instances="")
    assert links_asked_for(host, 2, near="nvlink") == 0, "they are the same after MIG"


def test_a_link_that_is_not_told_is_asked_for_again(host: Any, driver: api.nvml.NvmlDriver) -> None:
    host.set(2)
    host.change(0, p2p_error=TIMEOUT)
    assert not any(gpu.nvlink_peers for gpu in driver.linked(driver.snapshot()).gpus)
    host.set(2)
    host.change(0, nvlink=host.uuids[1])
    host.change(1, nvlink=host.uuids[0])
    assert [gpu.nvlink_peers for gpu in driver.linked(driver.snapshot()).gpus] == [{host.uuids[1]}, {host.uuids[0]}]


def test_gpus_that_claims_hold_are_no_choice(host: Any, driver: api.nvml.NvmlDriver, monkeypatch: Any) -> None:
    """As far as they are known: a claim polls the driver first, and then looks for claims."""
    monkeypatch.setenv("SAFE_GPU_FENCE", "ignore")  # CUDA_VISIBLE_DEVICES is that of the claim
    with claim(5):
        view = api.HostView(driver, driver.snapshot(), api.parse_request(2))
        view.update_others(api.Claims(api.living_claims(), view.snapshot.gpus), None)
        api.nvml.LINKS.clear()
        host.options(log=1)
        view.polls.poll()
    assert host.calls().count("nvmlDeviceGetP2PStatus") == 3


# ---- processes ----


def test_what_only_draws_is_not_asked_for(host: Any, driver: api.nvml.NvmlDriver) -> None:
    for kind in ("", "graphics"):
        host.process(host.uuids[0], os.getpid(), 3 << 20, kind=kind)
    host.process(host.uuids[1], HIDDEN, None, static=True)
    gpus = driver.snapshot().gpus
    (own,) = gpus[0].processes or ()
    assert (own.pid, own.kind, own.memory_used) == (os.getpid(), api.ProcessKind.COMPUTE, 3 << 20)
    assert os.path.basename(sys.executable) in (own.name or "")
    assert gpus[1].processes == (api.GpuProcess(HIDDEN, api.ProcessKind.COMPUTE, None, None, ended=ALL_ARE_SEEN),)
    assert driver.usage(gpus) == gpus
    detailed = driver.detailed(driver.snapshot()).gpus
    assert detailed[0].processes == (own, own._replace(kind=api.ProcessKind.GRAPHICS))


RESET = "the driver recommends the recovery action Reset"
ILLNESSES = [
    ({}, ""),
    ({"recovery": 1}, RESET),
    ({"recovery": 4}, "the driver recommends the recovery action Drain and Reset"),
    ({"recovery": 99}, "the driver recommends the recovery action number 99"),
    ({"recovery": 1, "remap": "failed"}, RESET),
    ({"remap": "failed"}, "a row of its memory is broken and could not be remapped"),
    ({"remap": "pending"}, "a row of its memory is broken and is remapped at the next reset"),
    ({"recovery": "NA", "remap": "NA"}, ""),
    ({"field_error": NOT_SUPPORTED, "remap_error": UNKNOWN, "util_error": UNKNOWN}, ""),
]


@pytest.mark.parametrize(("values", "illness"), ILLNESSES)
def test_what_the_driver_says_against_a_gpu(host: Any, driver: api.nvml.NvmlDriver, values: Any, illness: str) -> None:
    host.change(1, util=3, **values)
    snapshot = driver.snapshot()
    assert {gpu.illness for gpu in snapshot.gpus} == {""}, "a poll does not ask"
    well, found = driver.examined(snapshot).gpus[:2]
    assert (well.illness, found.illness, well.utilization) == ("", illness, 0)
    assert found.utilization == (None if "util_error" in values else 3)


def test_only_the_gpus_in_question_are_examined(host: Any, driver: api.nvml.NvmlDriver) -> None:
    host.set(8, recovery=1, util=7)
    snapshot = driver.snapshot()
    host.options(log=1)
    examined = driver.examined(snapshot, {host.uuids[3]})
    asked = ("GetHandleByUUID", "GetUtilizationRates", "GetFieldValues", "GetRemappedRows")
    assert host.calls() == [f"nvmlDevice{name}" for name in asked]
    assert [gpu.illness for gpu in examined.gpus] == [""] * 3 + [RESET] + [""] * 4
    assert examined.gpus[3]._replace(illness="", utilization=None) == snapshot.gpus[3]


def test_an_instance_is_as_ill_as_its_gpu_and_a_lost_gpu_is_lost(host: Any, driver: api.nvml.NvmlDriver) -> None:
    host.write({"mig": 1, "instances": "MIG-a,MIG-b", "recovery": 2, "remap": "failed"}, {"recovery": 1}, {})
    snapshot = driver.snapshot()
    host.change(1, lost=1)
    examined = driver.examined(snapshot).gpus
    assert [gpu.illness for gpu in examined] == ["the driver recommends the recovery action Reboot"] * 3 + ["", ""]
    assert [gpu.lost for gpu in examined] == [False] * 3 + [True, False]


def test_an_older_package_does_not_know_the_recovery_action(host: Any, driver: Any, monkeypatch: Any) -> None:
    host.set(1, recovery=1, remap="pending")
    monkeypatch.delattr(pynvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION")
    (gpu,) = driver.examined(driver.snapshot()).gpus
    assert gpu.illness == "a row of its memory is broken and is remapped at the next reset"


@pytest.mark.parametrize("flags", [(), ("-DNO_V3",), ("-DNO_V3", "-DNO_MIG")])
def test_every_generation_of_driver(host: Any, flags: tuple[str, ...]) -> None:
    host.variant(*flags)
    host.use_nvml_here()
    host.set(3, used=100 << 20, node_cpus="0-3,64-67,4000", socket_cpus="0-7")
    kinds = [api.ProcessKind.COMPUTE] * 3 + [api.ProcessKind.GRAPHICS, api.ProcessKind.MPS]
    for number, kind in enumerate(kinds):
        kind = "" if kind == api.ProcessKind.COMPUTE else kind
        host.process(host.uuids[1], HIDDEN + number, (10 + number) << 20, static=True, kind=kind)
    driver = api.nvml.NvmlDriver()
    gpus = driver.detailed(driver.snapshot()).gpus
    assert [gpu.uuid for gpu in gpus] == host.uuids
    assert driver.usage(gpus[::2]) == gpus[::2]
    assert [gpu.pci_bus_id for gpu in gpus] == ["0000:07:00.0", "0000:0f:00.0", "0000:17:00.0"]
    assert gpus[0].processes == gpus[2].processes == ()
    assert gpus[0].memory_used == 100 << 20
    assert {(process.pid, process.kind, process.memory_used) for process in gpus[1].processes or ()} == {
        (HIDDEN + number, kind, (10 + number) << 20) for number, kind in enumerate(kinds)
    }
    assert driver.cpu_affinity(host.uuids[0], "node") == {0, 1, 2, 3, 64, 65, 66, 67, 4000}
    assert driver.cpu_affinity(host.uuids[0], "socket") == set(range(8))
    host.change(1, node_cpus="")
    assert driver.cpu_affinity(host.uuids[1], "node") is None, "an empty set is no answer"


@pytest.mark.parametrize("code", [NOT_SUPPORTED, FUNCTION_NOT_FOUND])
@pytest.mark.parametrize("flag", ["-DNO_V3", "-DNO_MPS"])
def test_a_gpu_that_cannot_list(host: Any, code: int, flag: str) -> None:
    host.variant(flag)
    host.use_nvml_here()
    for number in (0, 2):
        host.process(host.uuids[number], HIDDEN, static=True)
    host.change(0, v3_error=code)
    host.change(1, compute_error=code)
    host.change(2, mps_error=code, graphics_error=code, used=1 << 30)
    gpus = api.nvml.NvmlDriver().snapshot().gpus
    assert (gpus[1].processes, gpus[1].processes_supported) == (None, False)
    assert pids(gpus[0]) == pids(gpus[2]) == {(HIDDEN, api.ProcessKind.COMPUTE)}
    assert gpus[3].processes == ()


@pytest.mark.parametrize("field", ["compute_error", "mps_error", "graphics_error"])
@pytest.mark.parametrize("code", [NO_PERMISSION, INSUFFICIENT_SIZE, UNKNOWN, 12345])
def test_a_list_that_fails_this_time(host: Any, driver: api.nvml.NvmlDriver, field: str, code: int) -> None:
    host.change(0, used=32 << 20)  # on a GPU that is all free only the first list is asked for
    gpus = driver.snapshot().gpus
    host.change(0, **{field: code})
    for first, second, *_ in (driver.snapshot().gpus, driver.usage(gpus)):
        assert (first.processes, first.processes_supported, first.unusable) == (None, True, None)
        assert "processes" in first.process_error
        assert state(first)[0] == "busy"
        assert second == gpus[1]
    host.change(0, **{field: 0})
    assert driver.snapshot().gpus == driver.usage((first, *gpus[1:])) == gpus, "what was said before is forgotten"


# ---- faults of one GPU ----


def test_an_unanswered_question_costs_its_answer_only(host: Any) -> None:
    for question, name, value in (
        ("name", "name", ""),
        ("memory", "memory_total", None),
        ("util", "utilization", None),
        ("mode", "compute_mode", api.ComputeMode.DEFAULT),
        ("mig", "mig_enabled", False),
    ):
        host.set(2)
        host.change(1, **{f"{question}_error": UNKNOWN})
        driver = api.nvml.NvmlDriver()
        gpu = driver.detailed(driver.snapshot()).gpus[1]
        driver.close()
        api.nvml.KNOWN.clear()
        assert getattr(gpu, name) == value
        assert (gpu.uuid, gpu.unusable, gpu.processes) == (host.uuids[1], None, ())


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("values", [{"lost": 1}, {"lost": 2}, {"handle_error": UNKNOWN}])
def test_a_gpu_lost_between_polls_keeps_its_identity(host: Any, driver: Any, values: Any, restart: bool) -> None:
    poll = driver.snapshot()
    before = poll.gpus
    assert driver.shows_same(poll)
    host.change(3, **values)
    if restart:
        driver.close()
    assert not driver.shows_same(poll)
    for now in (driver.snapshot().gpus, driver.usage(before)):
        lost = now[3]
        assert (lost.lost, lost.processes, state(lost)[0]) == (True, None, "unusable")
        same = ("index", "uuid", "name", "pci_bus_id")
        assert [getattr(lost, name) for name in same] == [getattr(before[3], name) for name in same]
        assert [gpu for gpu in now if not gpu.lost] == [gpu for gpu in before if gpu.index != 3]
        assert api.HostSnapshot(now).needs_uuids
    host.set(8)
    assert not driver.shows_same(poll._replace(gpus=now)), "it is back"
    assert driver.snapshot().gpus == driver.usage(now) == before


@pytest.mark.parametrize("code", [GPU_IS_LOST, RESET_REQUIRED])
@pytest.mark.parametrize("field", ["memory", "util", "mode", "mig", "compute", "graphics", "mps", "display"])
def test_a_gpu_lost_during_the_poll(host: Any, driver: api.nvml.NvmlDriver, field: str, code: int) -> None:
    host.set(2, mig=0, used=32 << 20)
    driver.snapshot()
    host.change(0, **{f"{field}_error": code})
    first, other = driver.detailed(driver.snapshot()).gpus
    assert (first.uuid, first.lost, bool(first.unusable), other.lost) == (host.uuids[0], True, True, False)


def test_a_gpu_that_this_process_may_not_open_and_two_with_one_uuid(host: Any, driver: api.nvml.NvmlDriver) -> None:
    host.change(0, handle_error=NO_PERMISSION)
    snapshot = driver.snapshot()
    assert "closed to this process" in (snapshot.gpus[0].unusable or "")
    assert not snapshot.gpus[0].lost
    assert snapshot.needs_uuids, "CUDA does not number it either"
    host.write({}, {"uuid": host.uuids[0]})
    assert [(gpu.uuid, gpu.lost) for gpu in driver.snapshot().gpus] == [(host.uuids[0], False), ("unknown-1", True)]


# ---- the session ----


@pytest.mark.parametrize(("code", "words"), [(DRIVER_NOT_LOADED, "modprobe"), (NO_PERMISSION, "/dev/nvidiactl")])
def test_nvml_that_does_not_start(host: Any, code: int, words: str) -> None:
    host.options(init_error=code)
    with pytest.raises(api.NoDriverError, match=words) as caught:
        api.nvml.NvmlDriver()
    assert caught.value.driver == "nvml"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# What each of these modules of the name pynvml lacks of what is used
OLD_MODULES = {
    "nvidia-ml-py3 7.352, pynvml 8 and 11.0": ["nvmlMemory_v2", "nvmlDeviceGetComputeRunningProcesses_v3"],
    "some that has the memory": ["nvmlDeviceGetComputeRunningProcesses_v3"],
    "another one of this name": ["NVMLError", "nvmlInit"],
}


@pytest.mark.parametrize("lacks", OLD_MODULES.values(), ids=OLD_MODULES)
def test_an_old_module_of_the_name_is_refused(host: Any, monkeypatch: pytest.MonkeyPatch, lacks: list[str]) -> None:
    for name in lacks:
        monkeypatch.delattr(pynvml, name)
    with pytest.raises(api.MissingPackageError) as caught:
        api.nvml.NvmlDriver()
    message = str(caught.value)
    assert pynvml.__file__ in message
    assert f"has no {lacks[0]}" in message
    assert "pip install --force-reinstall nvidia-ml-py" in message
    monkeypatch.setenv("PATH", str(host.directory))  # where no nvidia-smi is
    with pytest.raises(api.NoDriverError) as refused:
        api.open_driver("auto")
    assert message in str(refused.value)


def test_without_the_module_the_package_is_missing_and_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(api.MissingPackageError, match=r"\(pip install nvidia-ml-py\)$") as caught:
        api.nvml.NvmlDriver()
    assert isinstance(caught.value, api.NoDriverError), "so that programs go on without a GPU"
    assert caught.value.driver == "nvml"


REDIRECTOR = """
import importlib.abc, sys, warnings
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "pynvml":
            warnings.warn("The pynvml package is deprecated.", FutureWarning, stacklevel=2)
sys.meta_path.insert(0, Finder())
from safe_gpu.drivers import open_driver
print(len(open_driver("nvml").snapshot().gpus))
warnings.warn("from here on they are errors again")
"""


def test_a_warning_at_the_import_of_pynvml_is_not_shown_and_no_error(host: Any) -> None:
    """As that of the package pynvml 13, which forwards to nvidia-ml-py."""
    command = [sys.executable, "-W", "error", "-c", REDIRECTOR]
    done = subprocess.run(command, env=host.env, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{len(host.uuids)}\n"
    assert "FutureWarning" not in done.stderr
    assert done.stderr.endswith("UserWarning: from here on they are errors again\n")


@pytest.mark.parametrize(
    ("release", "says"),
    [
        ("# R35 (release), REVISION: 4.1, GCID: 33958178, BOARD: t186ref, EABI: aarch64", "R35 to JetPack 6 or newer"),
        ("# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64", "nvidia-ml-py"),
        ("", "nvidia-ml-py"),
    ],
)
def test_a_jetson_without_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str, says: str) -> None:
    def load_file(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nv_tegra_release").write_text(f"{release}\n")
    monkeypatch.setenv("SAFE_GPU_FSROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(api.nvml_calls, "load_file", load_file)
    for driver in ("auto", "nvml"):
        with pytest.raises(api.NoDriverError, match=says):
            api.open_driver(driver)


@pytest.mark.parametrize("code", [UNINITIALIZED, DRIVER_NOT_LOADED, VERSION_MISMATCH])
def test_a_driver_that_goes_and_comes_back(host: Any, driver: api.nvml.NvmlDriver, code: int) -> None:
    before = driver.snapshot()
    host.options(session_error=code)
    for question in (
        driver.snapshot,
        lambda: driver.usage(before.gpus),
        lambda: driver.cpu_affinity(host.uuids[0], "node"),
    ):
        with pytest.raises(api.NoDriverError):
            question()
    host.options(driver_version="580.1")
    assert driver.usage(before.gpus) == before.gpus
    after = driver.snapshot()
    assert (after.gpus, after.driver_version) == (before.gpus, "580.1")
    pynvml.nvmlShutdown()  # by another who uses NVML here
    assert driver.snapshot() == after
    pynvml.nvmlShutdown()
    assert driver.usage(before.gpus) == before.gpus


def sessions(host: Any) -> list[str]:
    """How sessions began and ended since this was asked last."""
    return [name for name in host.calls() if name in ("nvmlInitWithFlags", "nvmlShutdown")]


BEGINS, ENDS = "nvmlInitWithFlags", "nvmlShutdown"


@pytest.mark.parametrize(
    ("values", "rests"),
    [
        ([{"persistence": 1}, {"persistence": 1}], True),
        ([{"persistence": 1}, {"persistence": 0}], False),
        ([{"persistence": 1}, {}], False),  # not supported
        ([{"persistence": 1}, {"persistence_error": UNKNOWN}], False),
        ([{"persistence": 1}, {"lost": 1}], True),  # nothing of it is initialised
        ([{"persistence": 1}, {"handle_error": NO_PERMISSION}], True),
        ([], True),
    ],
)
def test_a_session_rests_where_gpus_stay_initialized_without_it(host: Any, values: Any, rests: bool) -> None:
    host.write(*values)
    host.options(log=1)
    driver = api.nvml.NvmlDriver()
    before = driver.snapshot()
    assert sessions(host) == [BEGINS]
    driver.rest()
    assert sessions(host) == ([ENDS] if rests else [])
    driver.rest()
    assert sessions(host) == [], "it has no session to end"
    assert driver.snapshot() == before, "with new handles"
    assert sessions(host) == ([BEGINS] if rests else [])
    driver.close()


def test_whether_gpus_stay_initialized_is_asked_once_a_minute(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    host.set(2, persistence=1)
    host.options(log=1)
    driver = api.nvml.NvmlDriver()
    for _ in range(3):
        driver.snapshot()
        driver.rest()
    assert host.calls().count("nvmlDeviceGetPersistenceMode") == 2
    host.set(2, persistence=0)
    now = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: now)
    driver.snapshot()
    driver.rest()
    assert sessions(host) == [BEGINS], "it has been turned off meanwhile"
    driver.close()


def test_a_driver_that_goes_before_a_pause_is_told_by_the_next_question(host: Any) -> None:
    driver = api.nvml.NvmlDriver()
    host.options(session_error=DRIVER_NOT_LOADED)
    driver.rest()
    with pytest.raises(api.NoDriverError):
        driver.snapshot()
    driver.close()


def test_threads_share_a_driver(host: Any, driver: api.nvml.NvmlDriver) -> None:
    expected = driver.snapshot()
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda _: driver.snapshot(), range(8))) == [expected] * 8


def test_a_forked_child_opens_its_own_session(host: Any, driver: api.nvml.NvmlDriver, monkeypatch: Any) -> None:
    """Also one that was forked while another thread polled."""
    before, count = driver.snapshot(), pynvml.nvmlDeviceGetCount
    asked, answered = threading.Event(), threading.Event()

    def slow() -> Any:
        asked.set()
        answered.wait()
        return count()

    def child() -> bool:
        pynvml.nvmlDeviceGetCount = count
        same = driver.snapshot() == before
        driver.close()
        return same

    host.options(log=1)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", slow)
    thread = threading.Thread(target=driver.snapshot)
    thread.start()
    asked.wait()
    assert in_child(child)
    answered.set()
    thread.join()
    assert driver.snapshot() == before
    calls = host.calls()
    assert (calls.count("nvmlInitWithFlags"), calls.count("nvmlShutdown")) == (1, 1), "the child's own session only"


# ---- MIG ----


@pytest.mark.parametrize("code", [0, NOT_SUPPORTED])
@pytest.mark.parametrize("kind", ["", "graphics"])
def test_compute_instances_have_the_memory_of_their_gpu_instance(host: Any, driver: Any, code: int, kind: str) -> None:
    host.write({"mig": 1, "instances": "MIG-a,MIG-b,MIG-c", "gi": "3,3,5", "ci": "0,1,0", "imem": 20 << 30})
    host.change(0, icompute_error=code)
    idle = driver.snapshot().gpus
    host.process("MIG-b", HIDDEN, 5 << 30, static=True, kind=kind)
    gpus = driver.snapshot().gpus
    assert driver.usage(idle) == gpus
    _, first, second, other = gpus
    assert [gpu.memory_used for gpu in (first, second, other)] == [5 << 30, 5 << 30, 0]
    assert [gpu.memory_beside for gpu in (first, second, other)] == [5 << 30, 0, 0]
    assert [state(gpu)[0] for gpu in (first, second, other)] == ["free", "busy", "free"]
    assert [gpu.divided for gpu in (first, second, other)] == [True, True, False]
    host.change(0, iused=2 << 30)
    assert [gpu.unexplained_memory for gpu in driver.usage((first, second, other))] == [2 << 30] * 3
    host.process("MIG-b", HIDDEN, None, static=True, kind=kind)
    assert [gpu.unexplained_memory for gpu in driver.snapshot().gpus[1:]] == [0, 0, 2 << 30], "it cannot be told"


def test_where_an_instance_is_mute(host: Any, driver: api.nvml.NvmlDriver) -> None:
    """A process without ids counts there. GPU 1 is cut in two with a gap between the slots, GPU 2 has no instance."""
    host.write(
        {"mig": 0}, {"mig": 1, "instances": "MIG-a,,MIG-c", "imem": 20 << 30, "node_cpus": "0-3", "mode": 3}, {"mig": 1}
    )
    process = host.process(host.uuids[1], HIDDEN, static=True)
    assert [pids(gpu) for gpu in driver.snapshot().gpus[2:4]] == [set(), set()]
    host.change(1, icompute_error=NOT_SUPPORTED)
    assert [pids(gpu) for gpu in driver.snapshot().gpus[2:4]] == [{(HIDDEN, api.ProcessKind.COMPUTE)}] * 2
    process.unlink()
    host.change(1, icompute_error=UNKNOWN, imemory_error=NO_PERMISSION)
    _, parent, first, *_ = driver.snapshot().gpus
    assert parent.processes == ()
    assert (first.processes, first.processes_supported, first.memory_total) == (None, True, None)


# ---- the narrow question, and what may have happened since the poll ----


def test_the_memory_of_a_process_that_starts_meanwhile_is_not_that_of_nobody(
    host: Any, driver: api.nvml.NvmlDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    (before,) = driver.snapshot().gpus[:1]
    lists = pynvml.nvmlDeviceGetComputeRunningProcesses_v3

    def after_it_has_started(*args: Any) -> Any:
        host.process(host.uuids[0], HIDDEN, 1 << 30, static=True)
        return lists(*args)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses_v3", after_it_has_started)
    (gpu,) = driver.usage((before,))
    assert (pids(gpu), gpu.memory_used) == ({(HIDDEN, api.ProcessKind.COMPUTE)}, 0)


@pytest.mark.parametrize("values", [{}, {"memory_error": NOT_SUPPORTED}])
def test_what_draws_is_seen_where_the_memory_of_another_is_not_told(host: Any, driver: Any, values: Any) -> None:
    """Such as an MPS server's, or one's own; and where the driver does not tell how much is in use at all."""
    host.change(0, **values)
    if not values:
        host.process(host.uuids[0], os.getpid(), None)
    host.process(host.uuids[0], HIDDEN, 2 << 30, static=True, kind="graphics")
    for gpu, *_ in (driver.snapshot().gpus, driver.usage(driver.snapshot().gpus[:1])):
        (verdict, _) = api.judge(
            api.HostSnapshot((gpu, api.Gpu(1, "GPU-other"))), api.Selection(), api.Known(own={os.getpid()})
        )
        assert (verdict.state, verdict.pid) == ("busy", HIDDEN)


def test_a_gpu_in_place_of_another(host: Any, driver: api.nvml.NvmlDriver) -> None:
    """As many as before, and all of the earlier ones but the last have moved on by one number."""
    poll = driver.snapshot()
    gpus = poll.gpus
    host.write({"uuid": "GPU-new", "bus": "00000000:01:00.0"}, *host.gpus[:-1])
    assert [gpu.uuid for gpu in driver.snapshot().gpus] == ["GPU-new", *(gpu.uuid for gpu in gpus[:-1])]
    assert not driver.shows_same(poll)
    gone, other = driver.usage((gpus[-1], gpus[0]))
    assert (gone.uuid, gone.lost, other.lost) == (gpus[-1].uuid, True, False)
    assert "no longer shown by the driver" in state(gone)[1]


def test_mig_turned_on_cut_anew_and_turned_off(host: Any, driver: api.nvml.NvmlDriver) -> None:
    host.write({"mig": 0}, {"mig": 0})
    poll = driver.snapshot()
    before = poll.gpus
    assert driver.shows_same(poll)
    host.change(0, mig=1, instances="MIG-a,MIG-b")
    assert not driver.shows_same(poll), "CUDA numbers the GPUs otherwise now"
    changed, same = driver.usage(before)
    assert (state(changed)[1], same) == ("MIG mode is on: claim one of its instances", before[1])
    parent, first, second, _ = gpus = driver.snapshot().gpus
    assert driver.usage(gpus) == gpus
    host.process("MIG-b", HIDDEN, static=True)
    assert [pids(gpu) for gpu in driver.usage((first, second))] == [set(), {(HIDDEN, api.ProcessKind.COMPUTE)}]
    host.change(0, instances="MIG-b,MIG-c")  # MIG-b has another number now: the next poll shows it
    assert [(gpu.label, gpu.lost) for gpu in driver.usage((first, second))] == [("0:0", True), ("0:1", True)]
    host.change(0, mig=0, instances="")
    assert driver.usage((parent, first))[0] == before[0]


# ---- a real one ----


@pytest.mark.gpu
def test_a_real_driver() -> None:
    driver = api.nvml.NvmlDriver()
    snapshot = driver.snapshot()
    assert snapshot.gpus
    assert snapshot.driver_version
    for gpu in snapshot.gpus:
        assert gpu.uuid.startswith(("GPU-", "MIG-"))
        assert gpu.name
        assert gpu.processes_supported
        assert gpu.memory_total is None or gpu.memory_total > 1 << 30
    assert [gpu.uuid for gpu in driver.snapshot().gpus] == [gpu.uuid for gpu in snapshot.gpus]
    driver.close()
