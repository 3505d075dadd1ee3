"""Nonsense in arguments, environment and state directory: a clear error at once that names it, and nothing left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu.coordination import files
from safe_gpu.errors import (
    GPUAffinityError,
    NoDriverError,
    PlaceholderError,
    SafeGpuError,
    StateDirError,
    UnsatisfiableRequestError,
)

PACKAGE_ROOT = str(Path(safe_gpu.__file__).parents[1])

# (arguments, class, what the message must hold)
ARGUMENTS = [
    ({"nb_gpus": 0}, UnsatisfiableRequestError, ["nb_gpus=0", "1 or more"]),
    ({"nb_gpus": -1}, UnsatisfiableRequestError, ["nb_gpus=-1"]),
    ({"nb_gpus": 2.5}, UnsatisfiableRequestError, ["nb_gpus=2.5", "whole number"]),
    ({"nb_gpus": 2.0}, UnsatisfiableRequestError, ["nb_gpus=2.0"]),
    ({"nb_gpus": True}, UnsatisfiableRequestError, ["nb_gpus=True"]),
    ({"nb_gpus": None}, UnsatisfiableRequestError, ["nb_gpus=None"]),
    ({"nb_gpus": "two"}, UnsatisfiableRequestError, ["nb_gpus='two'", "'job'"]),
    ({"nb_gpus": "2"}, UnsatisfiableRequestError, ["nb_gpus='2'"]),
    ({"nb_gpus": "job"}, UnsatisfiableRequestError, ["SAFE_GPU_NB_GPUS"]),
    ({"nb_gpus": 9}, UnsatisfiableRequestError, ["9 GPUs", "only 8"]),
    ({"nb_gpus": 10**30}, UnsatisfiableRequestError, ["only 8"]),
    ({"timeout": -1}, UnsatisfiableRequestError, ["timeout=-1", "None"]),
    ({"timeout": "soon"}, UnsatisfiableRequestError, ["timeout='soon'", "15m"]),
    ({"timeout": float("nan")}, UnsatisfiableRequestError, ["timeout=nan"]),
    ({"timeout": []}, UnsatisfiableRequestError, ["timeout=[]"]),
    ({"timeout": True}, UnsatisfiableRequestError, ["timeout=True"]),
    ({"affinity": "numa"}, GPUAffinityError, ["numa", "node", "core-complex"]),
    ({"affinity": 3}, GPUAffinityError, ["3", "node"]),
    ({"memory": "interleave"}, GPUAffinityError, ["interleave", "preferred", "bind"]),
    ({"min_memory": "lots"}, UnsatisfiableRequestError, ["min_memory='lots'", "20GiB"]),
    ({"min_memory": -5}, UnsatisfiableRequestError, ["min_memory=-5"]),
    ({"min_memory": 1.5}, UnsatisfiableRequestError, ["min_memory=1.5"]),
    ({"min_memory": "1TiB"}, UnsatisfiableRequestError, ["1024 GiB", "80 GiB in all"]),
    ({"model": ""}, UnsatisfiableRequestError, ["model=''"]),
    ({"model": 100}, UnsatisfiableRequestError, ["model=100"]),
    ({"model": "H100"}, UnsatisfiableRequestError, ["model='H100'", "A100"]),
    ({"only": "8"}, UnsatisfiableRequestError, ["only=8", "has GPU 0-7"]),
    ({"only": "x"}, UnsatisfiableRequestError, ["only='x'"]),
    ({"only": 1.5}, UnsatisfiableRequestError, ["only=1.5"]),
    ({"only": "GPU-"}, UnsatisfiableRequestError, ["only=GPU-", "GPU-ef7dbe0b"]),
    ({"exclude": "0-7"}, UnsatisfiableRequestError, ["none fits"]),
    ({"exclude": b"0"}, UnsatisfiableRequestError, ["exclude=b'0'"]),
    ({"visible_as": "name"}, UnsatisfiableRequestError, ["visible_as='name'", "index", "uuid"]),
    ({"debug_sleep": -1}, UnsatisfiableRequestError, ["debug_sleep=-1"]),
    ({"debug_sleep": "1"}, UnsatisfiableRequestError, ["debug_sleep='1'"]),
    ({"debug_sleep": float("inf")}, UnsatisfiableRequestError, ["debug_sleep=inf"]),
    ({"debug_sleep": None}, UnsatisfiableRequestError, ["debug_sleep=None"]),
    ({"logger": "print"}, UnsatisfiableRequestError, ["logger='print'"]),
    ({"placeholder_fn": "torch"}, PlaceholderError, ["placeholder_fn='torch'", "PytorchPlaceholder()"]),
    ({"placeholder_fn": safe_gpu.PytorchPlaceholder}, PlaceholderError, ["PytorchPlaceholder()"]),
]
VARIABLES = [
    ("SAFE_GPU_DRIVER", "opencl", UnsatisfiableRequestError, ["'opencl'", "nvml", "simulated:PRESET"]),
    ("SAFE_GPU_DRIVER", "nvml:0", UnsatisfiableRequestError, ["'nvml:0'"]),
    ("SAFE_GPU_DRIVER", "simulated:dgx", UnsatisfiableRequestError, ["'dgx'", "dgx-a100", "laptop"]),
    ("SAFE_GPU_DRIVER", "simulated", UnsatisfiableRequestError, ["dgx-a100"]),
    ("SAFE_GPU_TIMEOUT", "soon", UnsatisfiableRequestError, ["SAFE_GPU_TIMEOUT='soon'", "15m"]),
    ("SAFE_GPU_TIMEOUT", "-3", UnsatisfiableRequestError, ["SAFE_GPU_TIMEOUT='-3'"]),
    (
        "SAFE_GPU_LEGACY_LOCK",
        "maybe",
        UnsatisfiableRequestError,
        ["SAFE_GPU_LEGACY_LOCK=maybe", "auto, always or never"],
    ),
]


def refused(kind: type[SafeGpuError], parts: list[str], **arguments: Any) -> SafeGpuError:
    with pytest.raises(SafeGpuError) as caught:
        safe_gpu.claim_gpus(**arguments)
    assert type(caught.value) is kind, caught.value
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    return caught.value


@pytest.mark.parametrize(("arguments", "kind", "parts"), ARGUMENTS, ids=lambda value: str(value)[:40])
def test_arguments(
    arguments: dict[str, Any], kind: type[SafeGpuError], parts: list[str], untouched: Callable[[], Any]
) -> None:
    with untouched():
        # For ever, unless the argument says otherwise: what makes no sense is not waited for.
        error = refused(kind, parts, **{"timeout": None, **arguments})
    if isinstance(error, UnsatisfiableRequestError):
        assert isinstance(error, ValueError)
        assert isinstance(error, RuntimeError)
    state = Path(os.environ["SAFE_GPU_DIR"])
    assert not state.exists(), "no lock was needed to see that"
    assert safe_gpu.claim_gpus(1, timeout=0).devices_taken == [0]


@pytest.mark.parametrize(("name", "value", "kind", "parts"), VARIABLES)
def test_variables(
    name: str,
    value: str,
    kind: type[SafeGpuError],
    parts: list[str],
    monkeypatch: pytest.MonkeyPatch,
    untouched: Callable[[], Any],
) -> None:
    monkeypatch.setenv(name, value)
    with untouched():
        refused(kind, parts)
    assert not Path(os.environ["SAFE_GPU_DIR"]).exists()


@pytest.mark.parametrize("value", ["", "auto"])
def test_no_driver_at_all(value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = """
import safe_gpu
try:
    safe_gpu.claim_gpus(timeout=None)
except safe_gpu.NvidiasmiError as err:
    print(type(err).__name__, err.driver, err)
"""
    environment = {**os.environ, "SAFE_GPU_DRIVER": value, "PATH": str(tmp_path), "PYTHONPATH": PACKAGE_ROOT}
    child = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert child.stdout.startswith("NoDriverError"), child.stderr
    assert "SAFE_GPU_DRIVER=simulated:dgx-a100" in child.stdout
    assert not Path(os.environ["SAFE_GPU_DIR"]).exists()


def test_a_driver_without_gpus(host: Any, monkeypatch: pytest.MonkeyPatch, untouched: Callable[[], Any]) -> None:
    monkeypatch.setattr(type(host), "snapshot", lambda self: safe_gpu.devices.HostSnapshot(()))
    with untouched():
        error = refused(NoDriverError, ["there is no GPU here"], timeout=None)
    assert error.driver == "simulated:dgx-a100"  # type: ignore[attr-defined]


# The state directory


def state_error(untouched: Callable[[], Any], *parts: str) -> StateDirError:
    with untouched():
        error = refused(StateDirError, [*parts, "SAFE_GPU_DIR"], timeout=None)
    assert isinstance(error, StateDirError)
    assert isinstance(error, OSError)
    return error


def test_a_symbolic_link_in_place_of_the_state_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, untouched: Callable[[], Any]
) -> None:
    (tmp_path / "real").mkdir(mode=0o777)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv("SAFE_GPU_DIR", str(tmp_path / "link"))
    error = state_error(untouched, str(tmp_path / "link"), "symbolic link")
    assert error.path == str(tmp_path / "link")
    assert list((tmp_path / "real").iterdir()) == []


@pytest.mark.parametrize("name", ["host.lock", "leases", "queue"])
def test_a_symbolic_link_inside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, untouched: Callable[[], Any], name: str
) -> None:
    state = Path(os.environ["SAFE_GPU_DIR"])
    state.mkdir()
    state.chmod(0o1777)
    target = tmp_path / "target"
    target.write_text("precious") if name == "host.lock" else target.mkdir()
    (state / name).symlink_to(target)
    state_error(untouched, str(state / name), "symbolic link")
    if name == "host.lock":
        assert target.read_text() == "precious"


def test_a_file_in_place_of_the_state_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, untouched: Callable[[], Any]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SAFE_GPU_DIR", str(tmp_path / "file"))
    state_error(untouched, str(tmp_path / "file"), "not a directory")


def test_a_state_directory_whose_parent_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, untouched: Callable[[], Any]
) -> None:
    monkeypatch.setenv("SAFE_GPU_DIR", str(tmp_path / "missing" / "state"))
    state_error(untouched, str(tmp_path / "missing"), "does not exist")


def test_a_state_directory_on_a_network_file_system(
    host: Any, monkeypatch: pytest.MonkeyPatch, untouched: Callable[[], Any]
) -> None:
    monkeypatch.setattr(files, "_local_devices", set())
    monkeypatch.setattr(files, "file_system_type", lambda fd: "nfs4")
    state_error(untouched, os.environ["SAFE_GPU_DIR"], "network file system (nfs4)")


def test_a_state_directory_that_another_user_closed(open_tmp: Path, as_user: Any) -> None:
    closed = open_tmp / "closed"
    closed.mkdir()
    closed.chmod(0o700)

    def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        os.environ["SAFE_GPU_DIR"] = str(closed)
        for claim in (lambda: safe_gpu.claim_gpus(timeout=None), safe_gpu.get_free_gpus):
            try:
                claim()
            except StateDirError as err:
                say(err)
        say(os.environ.get("CUDA_VISIBLE_DEVICES"))

    other = as_user(work, uid=65534)
    for _ in range(2):
        message = other.hear()
        assert str(closed) in message
        assert "chmod 1777" in message or "mode 1777" in message
        assert "SAFE_GPU_DIR" in message
    assert other.hear() == "None"


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system without room for a single byte more."""
    mount = tmp_path / "full"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=1777", "tmpfs", str(mount)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def fill(mount: Path) -> None:
    with suppress(OSError), open(mount / "filler", "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def test_a_full_disk(host: Any, full_disk: Path, monkeypatch: pytest.MonkeyPatch, untouched: Callable[[], Any]) -> None:
    monkeypatch.setenv("SAFE_GPU_DIR", str(full_disk / "state"))
    with safe_gpu.GPUOwner(1, lambda number: None, timeout=0):
        pass
    for path in full_disk.glob("state/leases/*.lock"):
        path.write_text("")  # its page must be had anew
    fill(full_disk)
    state_error(untouched, str(full_disk / "state"), "free some space")
    (full_disk / "filler").unlink()
    with safe_gpu.GPUOwner(8, lambda number: None, timeout=0) as claimed:
        assert claimed.devices_taken == list(range(8))


def test_a_disk_quota_that_ends_in_the_middle_of_a_record(host: Any, child: Any) -> None:
    # Any user can play that: no file may grow beyond ten bytes.
    code = """
import os, resource, signal, safe_gpu
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
try:
    safe_gpu.claim_gpus(2, timeout=None)
except safe_gpu.StateDirError as err:
    say(err)
say(os.environ.get("CUDA_VISIBLE_DEVICES"))
listen()
"""
    process = child(code)
    assert re.search(r"leases/GPU-.*free some space", process.hear())
    assert process.hear() == "None"
    assert len(safe_gpu.get_free_gpus()) == 8


def test_no_descriptors_left(host: Any, child: Any) -> None:
    code = """
import os, resource, safe_gpu
safe_gpu.claim_gpus(1, timeout=0)
safe_gpu.release_gpus()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
results = []
for room in range(3, 40):
    resource.setrlimit(resource.RLIMIT_NOFILE, (room, hard))
    try:
        results.append(len(safe_gpu.claim_gpus(8, timeout=0).devices_taken))
        safe_gpu.release_gpus()
    except Exception as err:
        results.append(type(err).__name__)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) <= 4, (room, os.listdir("/proc/self/fd"))
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
say(*results)
"""
    results = child(code).hear().split()
    assert results[-1] == "8"
    assert "StateDirError" in results
