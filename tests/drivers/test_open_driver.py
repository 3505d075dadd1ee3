"""Which driver is opened, also on hosts with GPUs of both vendors, and what is said when none can be."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from support.vendor_hosts import KfdHost

from safe_gpu.drivers import meant_vendor, open_driver, open_drivers, opened_driver
from safe_gpu.drivers.base import Driver
from safe_gpu.drivers.presets import preset
from safe_gpu.errors import SafeGpuError, UnsatisfiableRequestError
from safe_gpu.selection.request import parse_request

AMD = "GPU-00000000000000abc"[:20]


@pytest.fixture
def ask(fake_gpus: Any, fake_nvidia_smi: Any, driver_libraries: Any, tmp_path: Path, monkeypatch: Any) -> Any:
    """``ask("8 GPUs, AMD", "each")``: names of the drivers and numbers of their GPUs, or the class and text of an
    error, on a host with 8 NVIDIA GPUs unless words say otherwise.

    Of the host: ``AMD`` or ``graphics`` of a processor; ``empty`` or ``broken``, NVIDIA's driver; ``device``, its file
    in /dev; ``card``, an NVIDIA GPU on the bus; without ``module``, ``library`` or ``program`` of NVML and nvidia-smi.
    """

    def shown(driver: Driver) -> list[Any]:
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
                drivers, broken = open_drivers()
                return [*(shown(driver) for driver in drivers), *(error.partition(":")[0] for error in broken)]
            return shown(open_driver(vendor=asked or None))
        except SafeGpuError as err:
            return [type(err).__name__, str(err)]

    return answer


NVML, SMI, KFD = ["nvml", 8], ["nvidia-smi", 8], ["kfd", 1]
NOT_LOADED = "The NVIDIA kernel driver is not loaded"
NOTHING = "library program"


@pytest.mark.parametrize(
    ("host", "asked", "expected"),
    [
        ("", "", NVML),
        ("module", "", SMI),
        ("broken", "", ["NoDriverError", NOT_LOADED]),  # it is reported, not worked around
        ("", "amd", ["UnsatisfiableRequestError", "vendor='amd' asks for AMD GPUs, and this host has none"]),
        (NOTHING, "amd", ["NoDriverError", "There is no GPU driver here"]),
        ("AMD", "", NVML),
        ("AMD", "amd", KFD),
        ("AMD", "each", [NVML, KFD]),
        ("AMD empty", "", KFD),
        ("AMD empty", "nvidia", ["nvml", 0]),
        (f"AMD {NOTHING}", "", KFD),
        (f"AMD {NOTHING}", "nvidia", ["UnsatisfiableRequestError", "vendor='nvidia' asks for NVIDIA GPUs, and this"]),
        (f"AMD {NOTHING} device", "", ["NoDriverError", "There is no GPU driver here"]),
        ("AMD broken device", "", ["NoDriverError", NOT_LOADED]),
        ("AMD broken device", "each", [KFD, NOT_LOADED]),
        ("AMD broken card", "", ["NoDriverError", NOT_LOADED]),
        ("AMD broken", "", KFD),  # a library without a GPU, as one image has on all hosts
        ("AMD broken", "each", [KFD]),
        ("graphics", "each", [NVML]),
        ("graphics empty", "each", [KFD]),
    ],
)
def test_which_driver_is_opened(ask: Any, host: str, asked: str, expected: list[Any]) -> None:
    found = ask(host, asked)
    if str(expected[0]).endswith("Error"):
        found[1] = found[1][: len(expected[1])]
    assert found == expected


@pytest.mark.parametrize(
    ("missing", "driver", "words"),
    [
        ("library", "auto", ("There is no GPU driver here", "libnvidia-ml.so.1", "nor is the driver of AMD or Intel")),
        ("module", "auto", ("SAFE_GPU_DRIVER=simulated:dgx-a100", "nvidia-ml-py is not installed")),
        ("module", "nvml", ("pip install nvidia-ml-py",)),
    ],
)
def test_no_driver_at_all_names_the_way_out(ask: Any, missing: str, driver: str, words: tuple[str, ...]) -> None:
    error, message = ask(f"{missing} program", driver=driver)
    assert error == "NoDriverError"
    assert all(word in message for word in words)


def test_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rocm", "NVML", "nvml:0", "kfd:0", ":", "simulated", "simulated:dgx"):
        monkeypatch.setenv("SAFE_GPU_DRIVER", name)
        with pytest.raises(UnsatisfiableRequestError) as caught:
            open_driver()
        simulated = name.startswith("simulated")
        known = ("dgx-a100",) if simulated else (repr(name), "auto", "nvml", "nvidia-smi", "kfd", "simulated:PRESET")
        assert all(words in str(caught.value) for words in known)


def test_a_driver_that_was_named_and_has_no_such_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for driver, vendor in ("nvml", "amd"), ("nvidia-smi", "amd"), ("kfd", "nvidia"), ("simulated:mi250x", "nvidia"):
        monkeypatch.setenv("SAFE_GPU_DRIVER", driver)
        with pytest.raises(UnsatisfiableRequestError, match=f"vendor='{vendor}'") as caught:
            open_driver(vendor=vendor)
        assert caught.value.value == vendor
        assert f"SAFE_GPU_DRIVER={driver} has none: leave vendor= out, or unset SAFE_GPU_DRIVER" in str(caught.value)


def test_what_tells_the_vendor_of_this_process() -> None:
    nvidia = preset("laptop").devices[0].uuid
    for environment, vendor in (
        ({}, None),
        ({"ROCR_VISIBLE_DEVICES": AMD}, "amd"),
        ({"SAFE_GPU_EXPECT": nvidia, "ROCR_VISIBLE_DEVICES": AMD}, "nvidia"),
    ):
        assert meant_vendor(environment) == vendor


def test_what_a_uuid_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole UUID of an AMD GPU in `only` chooses the driver, as does one in ROCR_VISIBLE_DEVICES."""
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:two-vendors")
    assert [driver.snapshot().vendor for driver in open_drivers()[0]] == ["nvidia", "amd"]
    for request, environment, vendor in (
        ({}, "", "nvidia"),
        ({"only": (AMD,)}, "", "amd"),
        ({"only": ("0", "1")}, "", "nvidia"),
        ({}, AMD, "amd"),
        ({"vendor": "nvidia", "only": (AMD,)}, AMD, "nvidia"),
    ):
        monkeypatch.setenv("ROCR_VISIBLE_DEVICES", environment)
        with opened_driver(**parse_request(**request).driver) as driver:
            assert {gpu.vendor for gpu in driver.snapshot().gpus} == {vendor}
