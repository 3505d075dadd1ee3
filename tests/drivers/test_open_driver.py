"""Which driver is opened, also on hosts with GPUs of both vendors, and what is said when none can be."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.kfd_host import KfdHost

from safe_gpu.drivers import open_driver, open_drivers, opened_driver
from safe_gpu.drivers.base import Driver
from safe_gpu.drivers.presets import PRESETS
from safe_gpu.drivers.vendors import meant_vendor
from safe_gpu.errors import SafeGpuError, UnsatisfiableRequestError
from safe_gpu.gpus.devices import vendor_of
from safe_gpu.selection.request import Selection, parse_request

AMD = "GPU-00000000000000abc"[:20]


@pytest.fixture
def amd(tmp_path: Path) -> KfdHost:
    host = KfdHost(tmp_path / "root")
    host.gpu(0x03, 1, 0xABC)
    return host


@pytest.fixture
def ask(
    fake_gpus: Any, driver_libraries: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Any]]:
    """``ask(root, "each")``: names of the drivers and numbers of their GPUs, or the class and text of an error.

    Words say what this host lacks: ``module``, ``library`` or ``program`` of NVML and nvidia-smi; or the vendor.
    """
    empty = tmp_path / "libnvidia-ml.so.1"
    empty.touch()

    def shown(driver: Driver) -> list[Any]:
        found = [driver.name, len(driver.snapshot().gpus)]
        driver.close()
        return found

    def answer(root: Path, *words: str, driver: str = "auto") -> list[Any]:
        fake_gpus.use_nvml_here()
        if "library" in words:
            driver_libraries.stand_ins["libnvidia-ml.so.1"] = str(empty)
        with monkeypatch.context() as patch:
            patch.setenv("SAFE_GPU_DRIVER", driver)
            patch.setenv("SAFE_GPU_FSROOT", str(root))
            if "module" in words:
                patch.setitem(sys.modules, "pynvml", None)
            if "program" in words:
                patch.setenv("PATH", str(tmp_path / "nowhere"))
            try:
                if "each" in words:
                    drivers, broken = open_drivers()
                    return [[shown(driver) for driver in drivers], broken]
                return shown(open_driver(vendor=next(iter({"nvidia", "amd"}.intersection(words)), None)))
            except SafeGpuError as err:
                return [type(err).__name__, str(err)]

    return answer


NOTHING = ("library", "program")


# ---- one vendor ----


def test_auto_prefers_nvml_and_takes_nvidia_smi_where_that_lacks(
    ask: Any, fake_gpus: Any, fake_nvidia_smi: Any, tmp_path: Path
) -> None:
    assert ask(tmp_path) == ask(tmp_path, driver="") == ["nvml", 8]
    assert ask(tmp_path, "module") == ask(tmp_path, "library") == ["nvidia-smi", 8]
    fake_gpus.options(init_error=9)
    error, message = ask(tmp_path)
    assert (error, "not loaded" in message) == ("NoDriverError", True), "it is reported, not worked around"


@pytest.mark.parametrize(
    ("driver", "missing", "words"),
    [
        ("auto", "library", ("There is no GPU driver here", "libnvidia-ml.so.1", "nor is the driver of AMD or Intel")),
        ("auto", "module", ("SAFE_GPU_DRIVER=simulated:dgx-a100", "nvidia-ml-py is not installed")),
        ("nvml", "library", ("libnvidia-ml.so.1",)),
        ("nvml", "module", ("pip install nvidia-ml-py",)),
    ],
)
def test_no_driver_at_all_names_the_way_out(
    ask: Any, tmp_path: Path, driver: str, missing: str, words: tuple[str, ...]
) -> None:
    error, message = ask(tmp_path, missing, "program", driver=driver)
    assert error == "NoDriverError"
    assert all(word in message for word in words)


def test_auto_takes_amd_gpus_where_there_is_no_nvidia_driver(ask: Any, amd: KfdHost) -> None:
    assert ask(amd.root, *NOTHING) == ["kfd", 1]
    with_nvidia_device(amd)
    assert ask(amd.root, *NOTHING)[0] == "NoDriverError"


@pytest.mark.parametrize("name", ["rocm", "NVML", "nvml:0", "nvidia-smi:x", "kfd:0", ":", "simulated", "simulated:dgx"])
def test_unknown_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", name)
    with pytest.raises(UnsatisfiableRequestError) as caught:
        open_driver()
    message = str(caught.value)
    assert "dgx-a100" in message if name.startswith("simulated") else repr(name) in message
    if not name.startswith("simulated"):
        assert all(choice in message for choice in ("auto", "nvml", "nvidia-smi", "kfd", "simulated:PRESET"))


# ---- both vendors ----


def with_nvidia_device(host: KfdHost) -> None:
    (host.root / "dev").mkdir()
    (host.root / "dev/nvidiactl").touch()


def test_nvidia_comes_first_and_a_choice_decides(ask: Any, fake_nvidia_smi: Any, amd: KfdHost) -> None:
    assert ask(amd.root) == ask(amd.root, "nvidia") == ["nvml", 8]
    assert ask(amd.root, "amd") == ["kfd", 1]
    assert ask(amd.root, "each") == [[["nvml", 8], ["kfd", 1]], []]
    assert ask(amd.root, "module", "each") == [[["nvidia-smi", 8], ["kfd", 1]], []]


def test_a_driver_without_gpus_gives_way(ask: Any, fake_gpus: Any, amd: KfdHost) -> None:
    fake_gpus.set(0)
    assert ask(amd.root) == ["kfd", 1]
    assert ask(amd.root, "nvidia") == ["nvml", 0]


def test_a_broken_driver_of_gpus_that_are_there_is_reported(ask: Any, fake_gpus: Any, amd: KfdHost) -> None:
    fake_gpus.options(init_error=9)
    with_nvidia_device(amd)
    error, message = ask(amd.root)
    assert error == "NoDriverError"
    assert "not loaded" in message
    assert ask(amd.root, "amd") == ["kfd", 1]
    shown, (broken,) = ask(amd.root, "each")
    assert shown == [["kfd", 1]]
    assert "not loaded" in broken


def test_a_driver_that_is_not_loaded_for_a_gpu_on_the_bus(ask: Any, fake_gpus: Any, amd: KfdHost) -> None:
    fake_gpus.options(init_error=9)
    card = amd.pci / "0000:81:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030200\n")
    assert ask(amd.root)[0] == "NoDriverError"
    (card / "class").write_text("0x020000\n")  # a network card
    assert ask(amd.root) == ["kfd", 1], "a library without a GPU, as one image has on all hosts"
    assert ask(amd.root, "each") == [[["kfd", 1]], []]


def test_a_host_of_one_vendor_has_none_of_the_other(ask: Any, amd: KfdHost, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    assert ask(plain, "amd") == [
        "UnsatisfiableRequestError",
        "vendor='amd' asks for AMD GPUs, and this host has none: leave vendor= out",
    ]
    error, message = ask(amd.root, "nvidia", *NOTHING)
    assert error == "UnsatisfiableRequestError"
    assert "NVIDIA GPUs, and this host has none" in message
    assert ask(plain, "nvidia", *NOTHING)[0] == ask(plain, "amd", *NOTHING)[0] == "NoDriverError"


@pytest.mark.parametrize(
    ("driver", "vendor"),
    [("nvml", "amd"), ("nvidia-smi", "amd"), ("kfd", "nvidia"), ("simulated:dgx-a100", "amd"),
     ("simulated:mi250x", "nvidia")],
)  # fmt: skip
def test_a_driver_that_was_named_and_has_no_such_gpus(
    driver: str, vendor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", driver)
    with pytest.raises(UnsatisfiableRequestError) as caught:
        open_driver(vendor=vendor)
    assert caught.value.value == vendor
    assert f"vendor={vendor!r}" in str(caught.value)
    assert f"SAFE_GPU_DRIVER={driver} has none: leave vendor= out, or unset SAFE_GPU_DRIVER" in str(caught.value)


@pytest.mark.parametrize("preset", PRESETS)
def test_simulated_hosts_have_a_driver_for_each_vendor(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", f"simulated:{preset}")
    drivers, broken = open_drivers()
    assert broken == []
    vendors = [driver.snapshot().vendor for driver in drivers]
    both, amd, intel = ["nvidia", "amd"], ["amd"], ["intel"]
    others = {"two-vendors": both, "mi250x": amd, "mi300x-cpx": amd, "max1550": intel, "arc-a770": intel}
    assert vendors == others.get(preset, ["nvidia"])
    for driver, vendor in zip(drivers, vendors, strict=True):
        snapshot = driver.snapshot()
        assert {gpu.vendor for gpu in snapshot.gpus} == {vendor}
        assert {vendor_of(gpu.uuid) for gpu in snapshot.gpus} == {vendor}
        assert open_driver(vendor=vendor).snapshot() == snapshot
        topology = driver.host_topology()
        assert topology is not None
        assert [place.uuid for place in topology.gpus] == [gpu.uuid for gpu in snapshot.physical]


@pytest.mark.parametrize(
    ("environment", "vendor"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "0"}, None),
        ({"ROCR_VISIBLE_DEVICES": "0"}, None),
        ({"ROCR_VISIBLE_DEVICES": AMD}, "amd"),
        ({"ROCR_VISIBLE_DEVICES": AMD, "SAFE_GPU_FENCE": "ignore"}, None),
        ({"SAFE_GPU_EXPECT": AMD}, "amd"),
        ({"SAFE_GPU_EXPECT": PRESETS["laptop"].devices[0].uuid, "ROCR_VISIBLE_DEVICES": AMD}, "nvidia"),
        ({"SAFE_GPU_SCOPE": "nobody's", "ROCR_VISIBLE_DEVICES": AMD}, "amd"),
    ],
)
def test_what_tells_the_vendor_of_this_process(environment: dict[str, str], vendor: str | None) -> None:
    assert meant_vendor(environment) == vendor


def test_what_a_uuid_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole UUID of an AMD GPU in `only` chooses the driver, as does one in ROCR_VISIBLE_DEVICES."""
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:two-vendors")
    for request, environment, vendor in (
        (Selection(), "", "nvidia"),
        (parse_request(only=(AMD,)), "", "amd"),
        (parse_request(only=("0", "1")), "", "nvidia"),
        (Selection(), AMD, "amd"),
        (parse_request(vendor="nvidia", only=(AMD,)), AMD, "nvidia"),
    ):
        monkeypatch.setenv("ROCR_VISIBLE_DEVICES", environment)
        with opened_driver(**request.driver) as driver:
            assert driver.snapshot().vendor == vendor


@pytest.mark.parametrize(
    "properties", [{"cpu_cores_count": 16}, {"memory": 512 << 20}], ids=["with CPU cores", "little memory"]
)
def test_integrated_graphics_beside_nvidia_gpus_are_not_shown(
    ask: Any, fake_gpus: Any, tmp_path: Path, properties: dict[str, int]
) -> None:
    host = KfdHost(tmp_path / "root")
    host.gpu(0x03, 1, 0, **properties)
    assert ask(host.root, "each") == [[["nvml", 8]], []]
    assert ask(host.root, "amd") == ["kfd", 1]
    fake_gpus.set(0)
    assert ask(host.root, "each") == [[["kfd", 1]], []]
    fake_gpus.options(init_error=9)
    with_nvidia_device(host)
