"""Errors: one root, the bases that callers catch, data that survives pickling and copying."""

from __future__ import annotations

import copy
import errno
import inspect
import multiprocessing
import pickle
import sys
from typing import Any

import pytest

import safe_gpu
from safe_gpu import errors
from safe_gpu.devices import Gpu, GpuProcess, GpuVerdict, LeaseHolder
from safe_gpu.errors import SafeGpuError
from safe_gpu.runtimes.cuda import CudaCallError

VERDICTS = (GpuVerdict(Gpu(0, "GPU-0"), "claimed", "claimed by process 7", 7, "ada", LeaseHolder(7, "ada", start=12)),)
PROCESSES = (GpuProcess(7, memory_used=1 << 30),)

# Class, its own attributes, the classes by which callers catch it.
TABLE: list[tuple[type[SafeGpuError], dict[str, Any], tuple[type[BaseException], ...]]] = [
    (errors.SafeGpuError, {}, (Exception,)),
    (errors.NoDriverError, {"driver": "nvml"}, ()),
    (errors.NotEnoughGpusError, {"nb_gpus": 2, "verdicts": VERDICTS}, (RuntimeError,)),
    (
        errors.ClaimTimeout,
        {"nb_gpus": 2, "verdicts": VERDICTS, "timeout": 1.5},
        (errors.NotEnoughGpusError, TimeoutError, RuntimeError),
    ),
    (
        errors.GpuContendedError,
        {"nb_gpus": 2, "verdicts": VERDICTS, "uuid": "GPU-0", "processes": PROCESSES},
        (errors.NotEnoughGpusError, RuntimeError),
    ),
    (errors.UnsatisfiableRequestError, {"value": 9, "verdicts": VERDICTS}, (ValueError, RuntimeError)),
    (errors.AlreadyClaimedError, {"devices": (0, 1)}, (RuntimeError,)),
    (
        errors.LockTimeout,
        {"path": "/tmp/x", "errno": errno.EAGAIN, "pid": 7, "user": "ada"},
        (TimeoutError, OSError),
    ),
    (errors.StateDirError, {"path": "/tmp/x", "errno": errno.ENOSPC}, (OSError,)),
    (errors.CudaInitializedError, {"visible": ("GPU-0",)}, (RuntimeError,)),
    (errors.PlaceholderError, {"device_no": 1, "uuid": "GPU-0"}, (RuntimeError,)),
    (errors.PolicyError, {"path": "/etc/x", "line": 3}, (RuntimeError,)),
    (errors.WrongDeviceError, {"device_no": 1, "expected": "GPU-0", "actual": "GPU-1"}, (RuntimeError,)),
    (errors.GPUAffinityError, {}, (RuntimeError,)),
    (errors.HolderLostError, {"host": "node1"}, (RuntimeError,)),
    (errors.MissingPackageError, {}, (ImportError,)),
    (CudaCallError, {"call": "cuInit", "code": 3, "name": "CUDA_ERROR_NOT_INITIALIZED"}, ()),
]
CLASSES = pytest.mark.parametrize(
    ("kind", "attributes", "bases"), TABLE, ids=lambda value: getattr(value, "__name__", "")
)


def test_the_table_is_complete() -> None:
    everything = {value for name, value in vars(errors).items() if inspect.isclass(value) and name in errors.__all__}
    assert everything == {row[0] for row in TABLE} - {CudaCallError}


@CLASSES
def test_bases(kind: type[SafeGpuError], attributes: dict[str, Any], bases: tuple[type[BaseException], ...]) -> None:
    assert issubclass(kind, (SafeGpuError,))
    for base in bases:
        assert issubclass(kind, base)


@CLASSES
def test_message_and_attributes(kind: type[SafeGpuError], attributes: dict[str, Any], bases: object) -> None:
    error = kind("it is so: do that", **attributes)
    assert str(error) == error.message == "it is so: do that"
    assert {name: getattr(error, name) for name in attributes} == attributes
    assert "it is so" in repr(error)
    empty = kind()
    assert str(empty) == ""
    assert all(hasattr(empty, name) for name in attributes)


@CLASSES
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_keeps_everything(
    kind: type[SafeGpuError], attributes: dict[str, Any], bases: object, protocol: int
) -> None:
    error = kind("it is so: do that", **attributes)
    error.hint = "extra"  # type: ignore[attr-defined]
    for clone in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error), copy.deepcopy(error)):
        assert type(clone) is kind
        assert str(clone) == "it is so: do that"
        assert {name: getattr(clone, name) for name in attributes} == attributes
        assert clone.args == error.args
        assert clone.hint == "extra"


@CLASSES
def test_sequences_come_out_as_tuples(kind: type[SafeGpuError], attributes: dict[str, Any], bases: object) -> None:
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in attributes.items()}
    error = kind("x", **lists)
    assert {name: getattr(error, name) for name in attributes} == attributes


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with Python 3.11")
def test_notes_survive_pickling() -> None:
    error = errors.NotEnoughGpusError("busy")
    error.add_note("seen on node1")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["seen on node1"]


def _fail(number: int) -> None:
    safe_gpu.claim_gpus(number, timeout=0)


def test_they_cross_process_boundaries() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool, pytest.raises(errors.UnsatisfiableRequestError) as caught:
        pool.apply(_fail, (9,))
    assert caught.value.value == 9
    assert len(caught.value.verdicts) == 8
    assert caught.value.verdicts[0].gpu.name == "NVIDIA A100-SXM4-80GB"


def test_the_older_name_of_a_missing_driver() -> None:
    assert errors.NvidiasmiError is errors.NoDriverError is safe_gpu.NvidiasmiError


def test_what_callers_of_the_older_package_catch() -> None:
    # It raised RuntimeError when too few GPUs were free.
    for kind in (errors.NotEnoughGpusError, errors.UnsatisfiableRequestError, errors.AlreadyClaimedError):
        assert issubclass(kind, RuntimeError)


@pytest.mark.parametrize("kind", [errors.LockTimeout, errors.StateDirError])
def test_an_errno_may_be_missing(kind: type[Any]) -> None:
    error = kind("closed", path="/tmp/x")
    assert error.errno is None
    assert pickle.loads(pickle.dumps(error)).errno is None
