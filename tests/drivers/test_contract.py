"""Which driver is opened; what every one promises, in the same words; whose a process number is, and memory in use."""

import html
import inspect
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from support import api
from support.forks import in_child
from support.processes import ALL_ARE_SEEN
from support.vendor_hosts import KfdHost

HIDDEN = 4_000_000  # above every pid that Linux gives
MIB = 1 << 20
MEMORY = 512 * MIB
NOT_SUPPORTED = 3


class Host:
    """A host of fake or simulated GPUs, its driver, and the means to put processes on its GPUs."""

    def __init__(self, name: str, fake_gpus: Any, mig: bool = False) -> None:
        self.fake_gpus = fake_gpus
        if name == "simulated":
            name += ":mig-h100" if mig else ":workstation-mixed"
        elif mig:
            fake_gpus.write({"mig": 0}, {"mig": 1, "instances": "MIG-0a,MIG-0b"}, {"mig": 0})
        else:
            fake_gpus.write(*({"bus": f"00000000:{bus}:00.0"} for bus in ("0A", "C1", "09")))
        if name == "nvml":
            fake_gpus.use_nvml_here()
        self.driver: Any = api.open_driver(name)

    def occupy(self, uuid: str, pid: int) -> Any:
        """A process with this pid is on the device until .close() of the result."""
        if self.driver.name.startswith("simulated"):
            return self.driver.occupy(uuid, memory=MEMORY, pid=pid)
        return SimpleNamespace(close=self.fake_gpus.process(uuid, pid, MEMORY, static=pid == HIDDEN).unlink)


@pytest.fixture(params=["nvml", "nvidia-smi", "simulated"])
def host(request: pytest.FixtureRequest, fake_gpus: Any, fake_nvidia_smi: Any) -> Iterator[Host]:
    host = Host(request.param, fake_gpus)
    yield host
    host.driver.close()


def test_every_question_is_passed_on_by_a_driver_that_is_awaited() -> None:
    questions = [name for name, value in vars(api.Driver).items() if inspect.isfunction(value) and name[0] != "_"]
    assert {"snapshot", "usage", "close"} <= set(questions)
    for name in questions:
        driver = Mock(spec=api.Driver, runtime=api.CUDA)
        driver.name = "nvml"
        parameters = list(inspect.signature(getattr(api.Driver, name)).parameters)[1:]
        arguments = [object() for _ in parameters]
        answer = getattr(api.patience.AwaitedDriver(driver, api.patience.Patience()), name)(*arguments)
        getattr(driver, name).assert_called_once_with(*arguments)
        assert name in ("rest", "close") or answer is getattr(driver, name).return_value


@pytest.mark.parametrize("vendor", api.VENDORS.values(), ids=list(api.VENDORS))
def test_why_a_driver_takes_long_depends_on_its_vendor(vendor: Any) -> None:
    for name in vendor.drivers:
        why = f"if this ends after seconds, {vendor.is_slow}; if it never ends, the driver hangs: {vendor.recover}"
        assert api.patience.why_late(name) == why


def test_an_idle_host(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = host.driver
    snapshot, runtime = driver.snapshot(), driver.runtime
    assert (snapshot.driver, bool(snapshot.driver_version)) == (driver.name, True)
    assert runtime.asks_library == (driver.host_topology() is None) == (not driver.name.startswith("simulated:"))
    assert len(snapshot.physical) == len(snapshot.gpus) == len({gpu.uuid for gpu in snapshot.gpus}) == 3
    keys = [api.bus_order(gpu.pci_bus_id) for gpu in snapshot.gpus]
    assert keys == sorted(keys)  # type: ignore[type-var]
    for index, gpu in enumerate(snapshot.gpus):
        assert (gpu.index, gpu.pci_bus_id, len(gpu.pci_bus_id)) == (index, gpu.pci_bus_id.lower(), 12)
        assert gpu.name
        assert (gpu.unusable, gpu.lost, gpu.mig_enabled, gpu.is_mig_instance) == (None, False, False, False)
        assert (gpu.processes, gpu.process_error, gpu.processes_supported) == ((), "", True)
        assert (gpu.memory_total or 0) > 1 << 30, "bytes"
        for scope in ("node", "socket"):
            cpus = driver.cpu_affinity(gpu.uuid, scope)
            assert cpus is None or (isinstance(cpus, frozenset) and cpus)
    assert driver.cpu_affinity("GPU-stranger", "node") is None
    linked = driver.linked(snapshot)
    examined = driver.examined(snapshot)
    assert [gpu.illness for gpu in examined.gpus] == [""] * len(snapshot.gpus)
    for fuller in (linked, examined, driver.detailed(snapshot)):  # more of the same poll
        assert [(gpu.uuid, gpu.processes) for gpu in fuller.gpus] == [(gpu.uuid, ()) for gpu in snapshot.gpus]
    assert all(gpu.nvlink_peers <= {peer.uuid for peer in linked.gpus} - {gpu.uuid} for gpu in linked.gpus)
    assert driver.snapshot() == snapshot, "nothing changes by itself"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert driver.snapshot() == snapshot, "visibility is of no concern"


@pytest.mark.parametrize("pid", [os.getpid(), HIDDEN], ids=["own", "hidden"])
def test_a_process_shows_on_its_gpu_and_goes(host: Host, pid: int) -> None:
    """A poll and the narrow question see the same, whatever the record said before."""
    before = host.driver.snapshot()
    gpus = before.gpus
    assert host.driver.usage(gpus) == gpus
    context = host.occupy(gpus[1].uuid, pid)
    during = host.driver.snapshot().gpus
    assert during[1].processes is not None
    assert [(process.pid, process.kind, process.memory_used) for process in during[1].processes] == [
        (pid, api.ProcessKind.COMPUTE, MEMORY)
    ]
    assert during[1].memory_used == (gpus[1].memory_used or 0) + MEMORY
    assert during[::2] == gpus[::2]
    assert host.driver.usage(gpus[1:2]) == during[1:2]
    assert host.driver.usage((gpus[2], gpus[1])) == (gpus[2], during[1]), "in the order of the question"
    context.close()
    assert host.driver.usage(during[1:2]) == gpus[1:2]
    assert host.driver.usage(()) == ()
    assert host.driver.snapshot() == before


def test_a_device_that_is_not_there(host: Host) -> None:
    here = host.driver.snapshot().gpus[0]
    stranger = api.Gpu(0, "GPU-stranger", "Ghost", here.pci_bus_id)
    gone, same = host.driver.usage((stranger, here))
    assert (gone.index, gone.uuid, gone.name, gone.lost, gone.processes) == (0, "GPU-stranger", "Ghost", True, None)
    assert gone.unusable
    assert gone.process_error
    assert same == here
    assert host.driver.snapshot().gpus[0] == here


def test_a_forked_child_may_ask(host: Host) -> None:
    before = host.driver.snapshot()
    assert in_child(lambda: host.driver.usage(before.gpus[:1]) == before.gpus[:1])
    assert in_child(lambda: host.driver.snapshot() == before)
    assert host.driver.usage(before.gpus[1:]) == before.gpus[1:]
    assert host.driver.snapshot() == before


@pytest.mark.parametrize("name", ["nvml", "simulated"])
def test_mig_instances_are_the_devices(fake_gpus: Any, name: str) -> None:
    snapshot = Host(name, fake_gpus, mig=True).driver.snapshot()
    assert snapshot.needs_uuids
    parents = {gpu.uuid: gpu for gpu in snapshot.gpus if gpu.mig_enabled}
    assert {gpu.unusable for gpu in parents.values()} == {"MIG mode is on: claim one of its instances"}
    instances = [gpu for gpu in snapshot.gpus if gpu.is_mig_instance]
    assert instances
    for gpu in instances:
        parent = parents[gpu.mig_parent or ""]
        assert gpu.uuid.startswith("MIG-")
        assert (gpu.index, gpu.pci_bus_id, gpu.unusable) == (parent.index, parent.pci_bus_id, None)
        behind = snapshot.gpus[snapshot.gpus.index(parent) + 1 :][: len(instances)]
        assert gpu in behind, "instances follow their GPU"


NO_NAMES = (
    *("[Unknown Error]", "ERR!", "N/A", "[GPU is lost]", "None", "Unknown", "[Insufficient Permissions]"),
    *("Not Supported", "GPU requires reset", "<error>", "Failed to get name"),
    "GPU access blocked by the operating system",
)


@pytest.mark.parametrize("name", ["nvml", "nvidia-smi"])
def test_an_error_in_place_of_a_product_name_is_no_model(fake_gpus: Any, fake_nvidia_smi: Any, name: str) -> None:
    """What was told before stays."""
    for said in NO_NAMES:
        for models, seen in ([said], [""]), (["NVIDIA H200", said], ["NVIDIA H200"] * 2):
            driver = Host(name, fake_gpus).driver
            for model, expected in zip(models, seen, strict=True):
                told = html.escape(model) if name == "nvidia-smi" else model
                fake_gpus.write({"name": "NVIDIA H200"}, {"name": told})
                gpus = driver.snapshot().gpus
                assert gpus[1].name == expected
                assert not api.are_mixed(gpus)
            driver.close()


# Whose a process number is, by real threads and processes and by files of /dev


def test_a_thread_stands_for_its_process() -> None:
    done = threading.Event()
    worker = threading.Thread(target=done.wait)
    worker.start()
    thread, pid = worker.native_id or 0, os.getpid()
    listed = (api.GpuProcess(thread, memory_used=5), api.GpuProcess(pid, memory_used=7), api.GpuProcess(HIDDEN))
    kinds = api.own_namespace_pids((api.GpuProcess(thread), api.GpuProcess(thread, api.ProcessKind.GRAPHICS)))
    found, reversed_ = api.own_namespace_pids(listed), api.own_namespace_pids(reversed(listed))
    done.set()
    worker.join()
    assert found == (api.GpuProcess(pid, memory_used=7), api.GpuProcess(HIDDEN, ended=ALL_ARE_SEEN))
    assert reversed_[1] == api.GpuProcess(pid, memory_used=7)
    assert [process.kind for process in kinds] == [api.ProcessKind.COMPUTE, api.ProcessKind.GRAPHICS]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_process_that_has_ended(is_first: bool, zombie: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another PID namespace it may be one that is not seen. A zombie may be giving its memory back."""
    namespace = api.procfs.FIRST_PID_NAMESPACE if is_first else 1
    monkeypatch.setattr(api.procfs, "pid_namespace", lambda: namespace)
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    listed = [api.GpuProcess(pid) for pid in (os.getpid(), os.getppid(), zombie, gone)]
    assert [process.ended for process in api.own_namespace_pids(listed)] == [False, False, False, is_first]


@pytest.mark.parametrize(
    ("driver", "version", "memory", "is_told"),
    [
        ("nvml", "525.60.13", None, True),
        ("nvml", "535.104.05", None, True),
        ("nvml", "535.113.01", None, False),  # the number of a thread
        ("nvml", "550.54.15", 1 << 30, True),  # told of processes only
        ("nvml", "565.57.01", 1 << 30, False),
        ("nvidia-smi", "570.144", 1 << 30, False),
        ("nvml", "570.148.08", 1 << 30, True),
        ("nvml", "575.51.03", 1 << 30, False),
        ("nvml", "575.57.08", None, True),
        ("nvml", "580.65.06", None, True),
        ("kfd", "6.8.5", None, True),
        ("nvml", "", 1 << 30, True),
    ],
)
def test_a_thread_that_has_ended_is_no_process(driver: str, version: str, memory: int | None, is_told: bool) -> None:
    snapshot = api.HostSnapshot((), driver, version)
    assert snapshot.has_ended(api.GpuProcess(7, memory_used=memory, ended=True)) == is_told
    assert not snapshot.has_ended(api.GpuProcess(7, memory_used=memory))


OPEN = "file = open({!r}, 'r+b')\n"
MAP = OPEN + "import mmap\nmemory = mmap.mmap(file.fileno(), 4096)\nfile.close()\n"


def test_who_has_a_device_open(fake_gpus: Any, child: Any, zombie: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another namespace's is a process that has none open, nor mapped, as far as that can be read.

    A zombie's descriptors and mappings are gone, which says nothing; so are those of a main thread that has ended.
    """
    devices = fake_gpus.devices("nvidiactl", "nvidia0", "nvidia-uvm")
    device, own = devices / "nvidia0", os.getpid()
    device.write_bytes(bytes(4096))
    codes = (OPEN.format(str(device)), MAP.format(str(device)), "")
    processes = [child(f"{code}say('open'); listen()", says="open") for code in codes]
    user, mapper, bystander = (process.pid for process in processes)
    listed = tuple(api.GpuProcess(pid, name="x") for pid in (user, mapper, bystander, own, zombie, HIDDEN))
    found = {process.pid: process.elsewhere for process in api.own_namespace_pids(listed)}
    assert found == {user: False, mapper: False, bystander: True, own: False, zombie: False, HIDDEN: False}
    assert [process.name for process in api.own_namespace_pids(listed)] == ["x", "x", None, "x", "x", "x"]
    assert api.own_namespace_pids((api.GpuProcess(bystander, api.ProcessKind.GRAPHICS),))[0].elsewhere
    with monkeypatch.context() as patch:  # one that has too much open, or may not be read
        patch.setattr(api.procfs, "open_files", lambda pid: None)
        assert not api.own_namespace_pids((api.GpuProcess(bystander),))[0].elsewhere
    (devices / "nvidiactl").unlink()
    assert not any(process.elsewhere for process in api.own_namespace_pids(listed)), "not NVIDIA's driver for Linux"


# Whose memory is in use


def judged(driver: Any, number: int = 0) -> tuple[str, str]:
    verdict = api.judge(driver.snapshot(), api.Selection())[number]
    return verdict.state, verdict.reason


def test_memory_that_the_driver_reserves(fake_gpus: Any) -> None:
    """Version 2 of the memory call leaves it out, so that a stranger of another container with 600 MiB is noticed."""
    fake_gpus.use_nvml_here()
    driver = api.NvmlDriver()
    fake_gpus.change(0, reserved=700 * MIB)
    assert judged(driver) == ("free", "")
    assert not driver.snapshot().gpus[0].counts_reserved
    fake_gpus.change(0, used=600 * MIB)
    assert "600 MiB of memory in use by no process" in judged(driver)[1]
    (gpu,) = driver.usage(driver.snapshot().gpus[:1])
    assert not api.judge(api.HostSnapshot((gpu, *driver.snapshot().gpus[1:])), api.Selection())[0].free
    fake_gpus.change(0, used=0, memory_v2_error=NOT_SUPPORTED)
    assert driver.snapshot().gpus[0].counts_reserved
    assert judged(driver) == ("free", "")
    fake_gpus.change(0, used=400 * MIB)
    assert judged(driver)[0] == "busy"


def test_page_cache_on_a_gpu_whose_memory_is_a_numa_node(fake_gpus: Any) -> None:
    fake_gpus.use_nvml_here()
    driver = api.NvmlDriver()
    fake_gpus.change(0, used=60 << 30, memory_node=1)
    fake_gpus.change(1, used=17 * MIB)
    fake_gpus.change(2, used=16 * MIB)
    fake_gpus.options(log=1)
    assert judged(driver)[0] == "free"
    assert fake_gpus.calls().count("nvmlDeviceGetNumaNodeId") == 2, "only where memory is unexplained"
    fake_gpus.change(1, used=60 << 30)
    assert judged(driver, 1)[0] == "busy"
    fake_gpus.process(fake_gpus.uuids[0], HIDDEN, 1 << 30, static=True)
    assert judged(driver)[0] == "busy"


def test_the_desktop_of_windows(fake_gpus: Any, fake_nvidia_smi: Any) -> None:
    fake_gpus.use_nvml_here()
    fake_gpus.change(0, used=2 << 30)
    devices = fake_gpus.devices("dxg")
    assert api.is_wsl()
    assert judged(api.NvmlDriver()) == judged(api.NvidiaSmiDriver()) == ("free", "")
    (devices / "nvidiactl").touch()
    assert not api.is_wsl()
    assert judged(api.NvmlDriver())[0] == judged(api.NvidiaSmiDriver())[0] == "busy"


# Which driver is opened, also on hosts with GPUs of both vendors, and what is said when none can be

AMD = "GPU-00000000000000abc"[:20]


@pytest.fixture
def opened_on(fake_gpus: Any, fake_nvidia_smi: Any, driver_libraries: Any, tmp_path: Path, monkeypatch: Any) -> Any:
    """``opened_on("AMD", "each")``: names of the drivers and numbers of their GPUs, or the class and text of an
    error, on a host with 8 NVIDIA GPUs unless words say otherwise.

    Of the host: ``AMD`` or ``graphics`` of a processor; ``empty`` or ``broken``, NVIDIA's driver; ``device``, its file
    in /dev; ``card``, an NVIDIA GPU on the bus; without ``module``, ``library`` or ``program`` of NVML and nvidia-smi.
    """

    def shown(driver: api.Driver) -> list[Any]:
        found = [driver.name, len(driver.snapshot().gpus)]
        driver.close()
        return found

    def answer(words: str, asked: str = "", driver: str = "auto") -> list[Any]:
        fake_gpus.use_nvml_here()
        fake_gpus.set(0 if "empty" in words else 8)
        fake_gpus.options(init_error=9 if "broken" in words else 0)
        host = KfdHost(tmp_path / "root")
        if "AMD" in words or "graphics" in words:
            host.gpu(0x03, 1, 0xABC, memory=512 << 20 if "graphics" in words else 64 << 30)
        else:
            shutil.rmtree(host.root)
        if "device" in words:
            (host.root / "dev").mkdir()
            (host.root / "dev/nvidiactl").touch()
        if "card" in words:
            for name, value in (("vendor", "0x10de"), ("class", "0x030200")):
                (host.pci / "0000:81:00.0").mkdir(exist_ok=True)
                (host.pci / "0000:81:00.0" / name).write_text(f"{value}\n")
        if "library" in words:
            driver_libraries.stand_ins["libnvidia-ml.so.1"] = str(tmp_path / "libnvidia-ml.so.1")
        if "module" in words:
            monkeypatch.setitem(sys.modules, "pynvml", None)
        if "program" in words:
            monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
        monkeypatch.setenv("SAFE_GPU_DRIVER", driver)
        monkeypatch.setenv("SAFE_GPU_FSROOT", str(host.root))
        try:
            if asked == "each":
                drivers, broken = api.open_drivers()
                return [*(shown(driver) for driver in drivers), *(error.partition(":")[0] for error in broken)]
            return shown(api.open_driver(vendor=asked or None))
        except api.SafeGpuError as err:
            return [type(err).__name__, str(err)]

    return answer


NVML, SMI, KFD = ["nvml", 8], ["nvidia-smi", 8], ["kfd", 1]
NOT_LOADED = "the NVIDIA kernel driver is not loaded"
NOTHING = "library program"


@pytest.mark.parametrize(
    ("words", "asked", "expected"),
    [
        ("", "", NVML),
        ("module", "", SMI),
        ("broken", "", ["NoDriverError", NOT_LOADED]),  # it is reported, not worked around
        ("", "amd", ["UnsatisfiableRequestError", "vendor='amd' asks for AMD GPUs, and this host has none"]),
        ("AMD", "", NVML),
        ("AMD", "amd", KFD),
        ("AMD empty", "", KFD),
        (f"AMD {NOTHING}", "", KFD),
        (f"AMD {NOTHING}", "nvidia", ["UnsatisfiableRequestError", "vendor='nvidia' asks for NVIDIA GPUs, and this"]),
        (f"AMD {NOTHING} device", "", ["NoDriverError", "there is no GPU driver here"]),
        ("AMD broken device", "", ["NoDriverError", NOT_LOADED]),
        ("AMD broken device", "each", [KFD, NOT_LOADED]),
        ("AMD broken card", "", ["NoDriverError", NOT_LOADED]),
        ("AMD broken", "", KFD),  # a library without a GPU, as one image has on all hosts
        ("graphics", "each", [NVML]),
    ],
)
def test_which_driver_is_opened(opened_on: Any, words: str, asked: str, expected: list[Any]) -> None:
    found = opened_on(words, asked)
    if str(expected[0]).endswith("Error"):
        found[1] = found[1][: len(expected[1])]
    assert found == expected


def test_no_driver_at_all_names_the_way_out(opened_on: Any) -> None:
    for missing, words in (("library", "libnvidia-ml.so.1"), ("module", "nvidia-ml-py is not installed")):
        error, message = opened_on(f"{missing} program")
        assert error == "NoDriverError"
        assert all(word in message for word in (words, "SAFE_GPU_DRIVER=simulated:dgx-a100"))


def test_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, known in (("NVML", "simulated:PRESET"), ("kfd:0", "simulated:PRESET"), ("simulated:dgx", "dgx-a100")):
        monkeypatch.setenv("SAFE_GPU_DRIVER", name)
        with pytest.raises(api.UnsatisfiableRequestError, match=known):
            api.open_driver()


def test_a_driver_that_was_named_and_has_no_such_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for driver, vendor in ("nvml", "amd"), ("nvidia-smi", "amd"), ("kfd", "nvidia"), ("simulated:mi250x", "nvidia"):
        monkeypatch.setenv("SAFE_GPU_DRIVER", driver)
        with pytest.raises(api.UnsatisfiableRequestError, match=f"vendor='{vendor}'") as caught:
            api.open_driver(vendor=vendor)
        assert f"SAFE_GPU_DRIVER={driver} has none: leave vendor= out, or unset SAFE_GPU_DRIVER" in str(caught.value)


def test_what_tells_the_vendor_of_this_process() -> None:
    nvidia = api.find_preset("laptop").devices[0].uuid
    for environment, vendor in (
        ({}, None),
        ({"ROCR_VISIBLE_DEVICES": AMD}, "amd"),
        ({"SAFE_GPU_EXPECT": nvidia, "ROCR_VISIBLE_DEVICES": AMD}, "nvidia"),
    ):
        assert api.meant_vendor(environment) == vendor


def test_what_a_uuid_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole UUID of an AMD GPU in `only` chooses the driver, as does one in ROCR_VISIBLE_DEVICES."""
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:two-vendors")
    assert [driver.snapshot().vendor for driver in api.open_drivers()[0]] == ["nvidia", "amd"]
    for request, environment, vendor in (
        ({"only": (AMD,)}, "", "amd"),
        ({}, AMD, "amd"),
        ({"vendor": "nvidia", "only": (AMD,)}, AMD, "nvidia"),
    ):
        monkeypatch.setenv("ROCR_VISIBLE_DEVICES", environment)
        with api.opened_driver(**api.parse_request(**request).driver) as driver:
            assert {gpu.vendor for gpu in driver.snapshot().gpus} == {vendor}
