"""What doctor advises is pasted by root: no name that a neighbour chose stands in it, and none that it can replace."""

import os
import shlex
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu.coordination.leases.file_names import lease_name
from safe_gpu.doctor import run_checks
from safe_gpu.doctor.check import CheckedHost
from safe_gpu.doctor.state.directory import state_directory

NEIGHBOUR = 4711


@pytest.fixture
def used(state_dir: Path) -> Path:
    safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0).release_gpus()
    return state_dir


@pytest.mark.parametrize(
    "name",
    [
        "x; touch pwned #.lock",
        "a\n; touch pwned\n.lock",
        "$(touch pwned).lock",
        "\x1b[2J`touch pwned`.lock",
        "-rf .lock",
    ],
)
def test_names_of_others_stand_in_no_advice(used: Path, name: str) -> None:
    (used / "leases" / name).symlink_to("/etc/passwd")
    (used / "queue" / name.replace(".lock", ".ticket")).symlink_to("/etc/passwd")
    for check in run_checks():
        assert "touch" not in check.fix + check.detail
        assert "-rf " not in check.fix


def test_the_path_of_the_state_directory_is_quoted(open_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = open_tmp / "a b; touch pwned"
    (path / "leases").mkdir(parents=True)
    monkeypatch.setenv("SAFE_GPU_DIR", str(path))
    command = state_directory(CheckedHost()).fix.partition(": ")[2]
    assert shlex.split(command) == ["chmod", "1777", str(path)]


@pytest.mark.parametrize("broken", ["lease", "host.lock", "leases", "queue", "."])
def test_root_is_not_told_to_chmod_what_others_can_replace(used: Path, broken: str, ground: Any) -> None:
    """The owner puts a symbolic link in its place before the advice is followed."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to give files away")
    path = used / (f"leases/{lease_name(ground.uuids[0])}" if broken == "lease" else broken)
    path.touch()
    os.chown(path, NEIGHBOUR, NEIGHBOUR)
    path.chmod(0o700)
    fix = state_directory(CheckedHost()).fix
    as_root = fix.partition("root")[2] if path.is_dir() else fix
    assert "chmod" not in as_root


@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o770])
@pytest.mark.parametrize("owner", [0, NEIGHBOUR])
def test_a_directory_below_one_that_others_can_change(open_tmp: Path, monkeypatch, owner: int, mode: int) -> None:
    """Right above it or higher up: whoever may rename what is on the way puts a symbolic link there."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to give files away")
    for name in ("high/state", "high/low/state"):
        path = open_tmp / name
        (path / "leases").mkdir(parents=True)
        monkeypatch.setenv("SAFE_GPU_DIR", str(path))
        path.chmod(0o755)
        os.chown(open_tmp / "high", owner, 0)
        (open_tmp / "high").chmod(mode)
        fix = state_directory(CheckedHost()).fix
        if owner == 0 and mode == 0o1777:
            assert fix == f"as root: chmod 1777 {path}"
        else:
            assert fix.startswith("set SAFE_GPU_DIR, for all users")
        os.chown(path, NEIGHBOUR, NEIGHBOUR)
        assert state_directory(CheckedHost()).fix == f"as {NEIGHBOUR}: chmod 1777 {path}"


def test_stopped_waiters_do_not_fill_the_report(used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safe_gpu.doctor.state import claims as sharing
    from safe_gpu.status.facts import HostStatus, WaiterStatus

    host = CheckedHost()
    crowd = tuple(WaiterStatus(place, place + 10, "anna", 1, None, stopped=True) for place in range(1, 1500))
    host.__dict__["status"] = HostStatus("h", "d", "", str(used), 0.0, (), crowd)
    found = sharing.suspended(host)
    assert "1489 more" in found.detail
    assert len(found.detail) + len(found.fix) < 2000
