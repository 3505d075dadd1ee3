"""Which driver is opened, and what is said when none can be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.kfd_host import KfdHost

from safe_gpu.drivers import open_driver
from safe_gpu.errors import UnsatisfiableRequestError

ASK = """
import json, sys
if "no-module" in sys.argv:
    sys.modules["pynvml"] = None
from safe_gpu.drivers import open_driver
from safe_gpu.errors import SafeGpuError
try:
    driver = open_driver()
    print(json.dumps([driver.name, len(driver.snapshot().gpus)]))
except SafeGpuError as err:
    print(json.dumps([type(err).__name__, str(err)]))
"""


def ask(fake_gpus: Any, *arguments: str, **environment: str) -> Any:
    return json.loads(fake_gpus.python(ASK, *arguments, **environment))


def test_auto_prefers_nvml(fake_gpus: Any, fake_nvidia_smi: Any) -> None:
    assert ask(fake_gpus, SAFE_GPU_DRIVER="auto") == ["nvml", 8]
    assert ask(fake_gpus, SAFE_GPU_DRIVER="") == ["nvml", 8]


def test_auto_without_the_module(fake_gpus: Any, fake_nvidia_smi: Any) -> None:
    assert ask(fake_gpus, "no-module", SAFE_GPU_DRIVER="auto") == ["nvidia-smi", 8]


def test_auto_without_the_library(fake_gpus: Any, fake_nvidia_smi: Any, tmp_path: Any) -> None:
    (tmp_path / "libnvidia-ml.so.1").touch()
    assert ask(fake_gpus, SAFE_GPU_DRIVER="auto", LD_LIBRARY_PATH=str(tmp_path)) == ["nvidia-smi", 8]


def test_auto_reports_a_driver_that_is_not_loaded(fake_gpus: Any, fake_nvidia_smi: Any) -> None:
    fake_gpus.options(init_error=9)
    error, message = ask(fake_gpus, SAFE_GPU_DRIVER="auto")
    assert error == "NoDriverError"
    assert "not loaded" in message


@pytest.mark.parametrize("arguments", [(), ("no-module",)])
def test_no_driver_at_all_names_the_way_out(fake_gpus: Any, tmp_path: Any, arguments: tuple[str, ...]) -> None:
    (tmp_path / "libnvidia-ml.so.1").touch()
    error, message = ask(
        fake_gpus, *arguments, SAFE_GPU_DRIVER="auto", LD_LIBRARY_PATH=str(tmp_path), PATH=str(tmp_path)
    )
    assert error == "NoDriverError"
    assert "SAFE_GPU_DRIVER=simulated:dgx-a100" in message
    assert ("nvidia-ml-py is not installed" if arguments else "libnvidia-ml.so.1") in message


def test_auto_takes_amd_gpus_where_there_is_no_nvidia_driver(fake_gpus: Any, tmp_path: Any) -> None:
    (tmp_path / "libnvidia-ml.so.1").touch()
    (tmp_path / "root").mkdir()
    KfdHost(tmp_path / "root").gpu(0x03, 1, 0xABC)
    place = {"LD_LIBRARY_PATH": str(tmp_path), "PATH": str(tmp_path), "SAFE_GPU_FSROOT": str(tmp_path / "root")}
    assert ask(fake_gpus, SAFE_GPU_DRIVER="auto", **place) == ["kfd", 1]
    (tmp_path / "root/dev").mkdir()
    (tmp_path / "root/dev/nvidiactl").touch()
    assert ask(fake_gpus, SAFE_GPU_DRIVER="auto", **place)[0] == "NoDriverError"


def test_nvml_by_name_without_the_module(fake_gpus: Any) -> None:
    error, message = ask(fake_gpus, "no-module", SAFE_GPU_DRIVER="nvml")
    assert error == "NoDriverError"
    assert "pip install nvidia-ml-py" in message


def test_nvml_by_name_without_the_library(fake_gpus: Any, tmp_path: Any) -> None:
    (tmp_path / "libnvidia-ml.so.1").touch()
    error, message = ask(fake_gpus, SAFE_GPU_DRIVER="nvml", LD_LIBRARY_PATH=str(tmp_path))
    assert error == "NoDriverError"
    assert "libnvidia-ml.so.1" in message


def test_the_environment_decides_unless_a_name_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:laptop")
    assert open_driver().name == "simulated:laptop"
    assert open_driver("simulated:big-16").name == "simulated:big-16"


@pytest.mark.parametrize("name", ["rocm", "NVML", "nvml:0", "nvidia-smi:x", "kfd:0", ":", "simulated", "simulated:dgx"])
def test_unknown_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", name)
    with pytest.raises(UnsatisfiableRequestError) as caught:
        open_driver()
    message = str(caught.value)
    assert "dgx-a100" in message if name.startswith("simulated") else repr(name) in message
    if not name.startswith("simulated"):
        assert all(choice in message for choice in ("auto", "nvml", "nvidia-smi", "kfd", "simulated:PRESET"))
