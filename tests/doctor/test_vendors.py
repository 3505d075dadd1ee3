"""doctor and demo on hosts with AMD GPUs, and with GPUs of both vendors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.vendor_hosts import KfdHost

import safe_gpu
from safe_gpu.cli.commands import main


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def find(**environment: str) -> dict[str, dict[str, str]]:
        """Name of a check -> its finding."""
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        main(["doctor", "--json"])
        return {one["name"]: one for one in json.loads(capsys.readouterr().out)["checks"]}

    return find


def test_rows_on_a_simulated_amd_host(doctor: Any) -> None:
    found = doctor(SAFE_GPU_DRIVER="simulated:mi300x-cpx")
    assert "CUDA" not in found
    assert "CUDA_VISIBLE_DEVICES" not in found
    assert found["ROCR_VISIBLE_DEVICES"]["status"] == "passed"
    texts = [f"{one['detail']} {one['fix']}" for one in found.values()]
    wrong = [text for text in texts if any(word in text for word in ("nvidia-smi", "Xid", "NVML", "CUDA can"))]
    assert wrong == []
    assert found["HIP"]["detail"] == "safe_gpu does not ask HIP about these GPUs"


def test_a_tree_without_gpus(doctor: Any, tmp_path: Path) -> None:
    KfdHost(tmp_path)
    found = doctor(SAFE_GPU_DRIVER="kfd", SAFE_GPU_FSROOT=str(tmp_path))
    assert found["GPU driver"]["status"] == "failed"
    assert "--device /dev/kfd" in found["GPU driver"]["fix"]


def test_the_other_vendor(doctor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:two-vendors")
    with safe_gpu.GPUOwner(1, vendor="amd", timeout=0, affinity=None, delegate=True):
        inside = doctor()
    assert "HIP" in inside, "a claim inside a claim of AMD GPUs gets those"
    found = doctor()
    assert "CUDA" in found
