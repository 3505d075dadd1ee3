"""Errors: one root, the bases that callers catch, data that survives pickling; and packages that are missing."""

import copy
import errno
import inspect
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu import errors
from safe_gpu.errors import SafeGpuError
from safe_gpu.gpus.devices import Gpu, GpuProcess, GpuVerdict, Holder
from safe_gpu.runtimes.library import CudaCallError

VERDICTS = (GpuVerdict(Gpu(0, "GPU-0"), "claimed", "claimed by process 7", 7, "ada", Holder(7, "ada", start=12)),)
PROCESSES = (GpuProcess(7, memory_used=1 << 30),)
TOO_FEW = {"nb_gpus": 2, "verdicts": VERDICTS}
PATH = {"path": "/tmp/x"}

# Class, its own attributes, the classes by which callers catch it. The older package raised RuntimeError.
TABLE: list[tuple[type[SafeGpuError], dict[str, Any], tuple[type[BaseException], ...]]] = [
    (errors.SafeGpuError, {}, (Exception,)),
    (errors.NoDriverError, {"driver": "nvml"}, ()),
    (errors.NotEnoughGpusError, TOO_FEW, (RuntimeError,)),
    (errors.ClaimTimeout, {**TOO_FEW, "timeout": 1.5}, (errors.NotEnoughGpusError, TimeoutError, RuntimeError)),
    (
        errors.GpuContendedError,
        {**TOO_FEW, "uuid": "GPU-0", "processes": PROCESSES},
        (errors.NotEnoughGpusError, RuntimeError),
    ),
    (errors.UnsatisfiableRequestError, {"value": 9, "verdicts": VERDICTS}, (ValueError, RuntimeError)),
    (errors.AlreadyClaimedError, {"devices": (0, 1)}, (RuntimeError,)),
    (
        errors.LockTimeout,
        {**PATH, "errno": errno.EAGAIN, "pid": 7, "user": "ada", "overloaded": True},
        (TimeoutError, OSError),
    ),
    (errors.StateDirError, {**PATH, "errno": errno.ENOSPC}, (OSError,)),
    (errors.CudaInitializedError, {"visible": ("GPU-0",)}, (RuntimeError,)),
    (errors.PlaceholderError, {"device_no": 1, "uuid": "GPU-0"}, (RuntimeError,)),
    (errors.PolicyError, {**PATH, "line": 3}, (RuntimeError,)),
    (errors.WrongDeviceError, {"device_no": 1, "expected": "GPU-0", "actual": "GPU-1"}, (RuntimeError,)),
    (errors.GPUAffinityError, {}, (ValueError, RuntimeError)),
    (errors.HolderLostError, {"host": "node1"}, (RuntimeError,)),
    (errors.MissingPackageError, {}, (ImportError,)),
    (CudaCallError, {"call": "cuInit", "code": 3, "name": "CUDA_ERROR_NOT_INITIALIZED"}, ()),
]
CLASSES = pytest.mark.parametrize(
    ("kind", "attributes", "bases"), TABLE, ids=lambda value: getattr(value, "__name__", "")
)


def test_the_table_is_complete() -> None:
    classes = {value for name, value in vars(errors).items() if inspect.isclass(value) and name[0] != "_"}
    assert {one for one in classes if issubclass(one, SafeGpuError)} == {row[0] for row in TABLE} - {CudaCallError}


@CLASSES
def test_bases_message_and_attributes(kind: type[SafeGpuError], attributes: dict[str, Any], bases: Any) -> None:
    assert all(issubclass(kind, base) for base in (SafeGpuError, *bases))
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in attributes.items()}
    error = kind("it is so: do that", **lists)
    assert str(error) == error.message == "it is so: do that"
    assert {name: getattr(error, name) for name in attributes} == attributes, "sequences come out as tuples"
    assert "it is so" in repr(error)
    empty = kind()
    assert str(empty) == ""
    assert vars(empty).keys() == {"message", *attributes}
    assert list(inspect.signature(kind).parameters) == ["message", *attributes]
    with pytest.raises(TypeError, match="nb_gpu'"):
        kind("x", **{**attributes, "nb_gpu": 1})


@CLASSES
def test_pickling_keeps_everything(kind: type[SafeGpuError], attributes: dict[str, Any], bases: object) -> None:
    error = kind("it is so: do that", **attributes)
    error.hint = "extra"  # type: ignore[attr-defined]
    error.message = "n1: it is so"  # as an engine adds the host
    pickled = [pickle.dumps(error, protocol) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    for clone in (*map(pickle.loads, pickled), copy.copy(error), copy.deepcopy(error)):
        assert type(clone) is kind
        assert str(clone) == "n1: it is so"
        assert vars(clone) == {"message": "n1: it is so", "hint": "extra", **attributes}


def test_what_may_be_missing_or_added() -> None:
    for kind in (errors.LockTimeout, errors.StateDirError):
        assert pickle.loads(pickle.dumps(kind("closed", path="/tmp/x"))).errno is None
    if sys.version_info >= (3, 11):
        error = errors.NotEnoughGpusError("busy")
        error.add_note("seen on node1")
        assert pickle.loads(pickle.dumps(error)).__notes__ == ["seen on node1"]
    assert errors.NvidiasmiError is errors.NoDriverError is safe_gpu.NvidiasmiError


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


@pytest.mark.parametrize(("driver", "line"), [("nvml", "run -- /bin/true"), ("auto", "wait"), ("auto", "status")])
def test_nvidia_ml_py(without, tmp_path: Path, line: str, driver: str) -> None:
    done = run(without("pynvml", SAFE_GPU_DRIVER=driver, PATH=str(tmp_path)), "-m", "safe_gpu", *line.split())
    assert done.returncode in (69, 70)
    assert done.stdout == ""
    assert "nvidia-ml-py" in done.stderr
    assert done.stderr.count("\n") == 1
