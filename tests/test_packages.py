"""Python packages that are missing or too old: one sentence that says what to install, nothing left behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import safe_gpu

ROOT = Path(safe_gpu.__file__).parents[1]
CLAIM = """
import os, safe_gpu
try:
    safe_gpu.claim_gpus(1, timeout=None)
except safe_gpu.SafeGpuError as err:
    print(type(err).__name__, isinstance(err, ImportError), err, os.environ.get("CUDA_VISIBLE_DEVICES"))
"""


@pytest.fixture(params=["missing", "too old"])
def without(request: pytest.FixtureRequest, tmp_path: Path):
    """An environment in which a package is missing or too old."""

    def make(name: str, **variables: str) -> dict[str, str]:
        missing = f"raise ModuleNotFoundError('No module named {name}', name='{name}')"
        (tmp_path / f"{name}.py").write_text(missing if request.param == "missing" else "__version__ = '0.1'")
        return {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", **variables}

    return make


def run(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=60)


def test_filelock_on_the_command_line(without, ground) -> None:
    done = run(without("filelock"), "-m", "safe_gpu", "run", "--", "true")
    assert (done.returncode, done.stdout) == (70, "")
    assert done.stderr.startswith("safe-gpu: the Python package filelock is missing or too old (")
    assert done.stderr.endswith("): pip install -U filelock\n")
    assert done.stderr.count("\n") == 1
    assert ground.tickets() == []


def test_filelock_in_python(without) -> None:
    done = run(without("filelock"), "-c", CLAIM)
    assert done.stdout.startswith("MissingPackageError True the Python package filelock is missing or too old")
    assert done.stdout.endswith("pip install -U filelock None\n")
    assert done.stderr == ""


def test_status_does_without_and_doctor_says_so(without, ground) -> None:
    ground.hold(0)
    for verb, code, said in (("status", 0, ": 7 of 8 GPUs free"), ("doctor", 1, "filelock is missing or too old")):
        done = run(without("filelock"), "-m", "safe_gpu", verb)
        assert (done.returncode, done.stderr) == (code, "")
        assert said in " ".join(done.stdout.split())


@pytest.mark.parametrize(("driver", "line"), [("nvml", "run -- /bin/true"), ("auto", "wait"), ("auto", "status")])
def test_nvidia_ml_py(without, tmp_path: Path, line: str, driver: str) -> None:
    done = run(without("pynvml", SAFE_GPU_DRIVER=driver, PATH=str(tmp_path)), "-m", "safe_gpu", *line.split())
    assert done.returncode in (69, 70)
    assert done.stdout == ""
    assert "nvidia-ml-py" in done.stderr
    assert done.stderr.count("\n") == 1
