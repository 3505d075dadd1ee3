"""``doctor`` tries what a claim does, and tells each cause once. Each fix is followed, and then a claim works."""

import os
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.findings import environment, expect, finding
from support.forks import in_child
from support.processes import mounted
from support.seccomp import needs_known_calls, refuse

import safe_gpu
from safe_gpu import doctor

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount and to act as other users")


def claim() -> str:
    """Claim a GPU and give it back; return the error."""
    try:
        safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), timeout=0, affinity=None).release_gpus()
    except safe_gpu.StateDirError as err:
        return str(err)
    return ""


def wrong() -> dict[str, api.Check]:
    """Name of a check -> what it finds, of those that fail."""
    return {one.name: one for one in doctor.run_checks() if one.status == "failed"}


# An entry


@pytest.mark.parametrize("there", [(), (".",), (".", "claims")])
def test_a_trial_leaves_nothing_behind(state_dir: Path, there: tuple[str, ...]) -> None:
    for name in there:
        (state_dir / name).mkdir(mode=0o1777)
    before = sorted(state_dir.parent.rglob("*"))
    expect("trial entry", "passed", str(state_dir))
    assert sorted(state_dir.parent.rglob("*")) == before


@needs_root
@pytest.mark.parametrize("exists", [True, False])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool) -> None:
    with mounted(tmp_path / "disk", options="size=64k") as disk:
        monkeypatch.setenv("SAFE_GPU_DIR", str(disk / "state"))
        if exists:
            assert claim() == ""
        fill(disk / "fill")
        assert "No space left on device" in claim()
        failed = wrong()
        assert [*failed] == ["trial entry"]
        assert "free some space there" in failed["trial entry"].detail
        (disk / "fill").unlink()
        assert (claim(), wrong()) == ("", {})


def fill(path: Path) -> None:
    """Write until there is no room."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 1024)


@needs_root
@pytest.mark.parametrize("name", ["used", "new"])
def test_a_read_only_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with mounted(tmp_path / "disk") as disk:
        api.setup.make(str(disk / "used"))
        assert os.system(f"mount -o remount,ro {disk}") == 0
        monkeypatch.setenv("SAFE_GPU_DIR", str(disk / name))
        assert "read-only" in claim()
        (check,) = wrong()
        assert check == {"used": "trial entry", "new": "state directory"}[name]
        found = finding(check)
        assert "read-only" in found.detail
        assert "set SAFE_GPU_DIR, for all users, to another directory" in found.detail + found.fix
        monkeypatch.setenv("SAFE_GPU_DIR", str(tmp_path / "other"))
        assert (claim(), wrong()) == ("", {})


@needs_root
@pytest.mark.parametrize(("kind", "why"), [("hugetlbfs", "Invalid argument"), ("proc", "")])
def test_a_file_system_that_keeps_no_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, why: str
) -> None:
    with mounted(tmp_path / "disk", kind=kind) as disk:
        monkeypatch.setenv("SAFE_GPU_DIR", str(disk / "state"))
        assert why in claim()
        (found,) = wrong().values()
        assert why in found.detail
        assert "set SAFE_GPU_DIR, for all users, to another directory" in found.detail


def test_files_of_no_bytes(state_dir: Path) -> None:
    """``ulimit -f 0``. Python ignores the signal."""

    def limited() -> tuple[str, str, str]:
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        assert claim() == ""
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
        error = claim()
        found = finding("trial entry").detail
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        return error, found, claim()

    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    error, found, afterwards = in_child(limited)
    assert "File too large): let this process write files (ulimit -f), or set SAFE_GPU_DIR" in error
    assert "File too large): let this process write files (ulimit -f), or set SAFE_GPU_DIR" in found
    assert afterwards == ""


# Doors


@needs_known_calls
def test_doors_that_a_sandbox_refuses() -> None:
    def refused() -> api.Check:
        refuse("socket")
        return finding("doors of GPUs")

    expect("doors of GPUs", "passed")
    found = in_child(refused)
    assert found.status == "warning"
    assert found.detail.startswith("the doors of GPUs cannot be taken (Operation not permitted): ")
    assert found.fix.startswith("allow sockets of AF_UNIX in this sandbox")


# One cause


@pytest.mark.parametrize("prepare", ["chmod 700 {}", "chmod 755 {}", "chmod 1777 {}; mkdir -m 700 {}/claims"])
def test_a_closed_directory_is_one_finding(
    open_tmp: Path, as_user: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, prepare: str
) -> None:
    path = open_tmp / "state"
    path.mkdir()
    assert os.system(prepare.format(path, path)) == 0
    monkeypatch.setenv("SAFE_GPU_DIR", str(path))
    monkeypatch.setattr("safe_gpu.settings.variables.HOST_FILES", (str(open_tmp / "config.ini"),))

    def check(say: Callable[[object], None], listen: object) -> None:
        names = [
            name for name in wrong() if name != "Python packages"
        ]  # where the tests run as root, they may be closed
        say(" ".join([*names, finding("GPUs in service").status]))

    assert as_user(check, uid=65534).hear() == "state directory passed"


def test_a_relative_directory_is_one_finding(open_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DIR", "state")
    failed = wrong()
    assert [*failed] == ["state directory"]
    assert "set it to an absolute path" in failed["state directory"].detail
    monkeypatch.setenv("SAFE_GPU_DIR", str(open_tmp / "state"))
    assert wrong() == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose file it must be")
def test_a_mistake_in_roots_file_is_one_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.ini"
    path.write_text("[host]\nstate_dir = here\n")
    monkeypatch.delenv("SAFE_GPU_DIR")
    monkeypatch.setattr("safe_gpu.settings.variables.HOST_FILES", (str(path),))
    api.variables.read_anew()
    try:
        assert [*wrong()] == ["policy file"]
    finally:
        api.variables.read_anew()


def test_a_driver_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as another package that is a module ``pynvml`` too."""

    def broken() -> Any:
        raise AttributeError("module 'pynvml' has no attribute 'nvmlMemory_v2'")

    monkeypatch.setattr(import_module("safe_gpu.doctor.check"), "open_driver", broken)
    failed = wrong()
    assert [*failed] == ["GPU driver"]
    assert "AttributeError: module 'pynvml' has no" in failed["GPU driver"].detail


def test_a_simulated_host_is_told(monkeypatch: pytest.MonkeyPatch, fake_gpus: Any) -> None:
    expect("GPU driver", "warning", "these GPUs are simulated", environment(**os.environ), fix="unset SAFE_GPU_DRIVER")
    fake_gpus.use_nvml_here()
    monkeypatch.delenv("SAFE_GPU_DRIVER")
    found = finding("GPU driver", environment(**os.environ))
    assert (found.detail.startswith("nvml "), "simulated" in found.detail) == (True, False)
