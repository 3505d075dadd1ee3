"""``doctor`` on the policy file and on the history."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from safe_gpu.doctor import CHECKS
from safe_gpu.doctor.check import CheckedHost, Finding

FUNCTIONS = dict(CHECKS)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose file a policy must be")


def finding(name: str, **environ: str) -> Finding:
    found = FUNCTIONS[name](CheckedHost(environ=environ))
    assert bool(found.fix) == (found.status in ("warning", "failed"))
    assert "\n" not in found.detail + found.fix
    return found


@as_root
@pytest.mark.parametrize(
    ("text", "mode", "status", "says"),
    [
        ("[default]\nmax_gpus = 4\n[user anna]\nmax_gpus = 1", 0o644, "passed", "2 sections"),
        ("[default]\nmax_gpus = many", 0o644, "failed", ":2: max_gpus = many is not a number"),
        ("[default]\nmax_gpus = 4", 0o666, "warning", "mode 0666): it is ignored"),
    ],
)
def test_a_policy(tmp_path: Path, text: str, mode: int, status: str, says: str) -> None:
    path = tmp_path / "policy.ini"
    path.write_text(text)
    path.chmod(mode)
    found = finding("policy", SAFE_GPU_POLICY=str(path))
    assert found.status == status
    assert says in found.detail
    assert ("line 2" in found.fix) == (status == "failed")


@as_root
def test_a_policy_that_counts_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "policy.ini"
    found = finding("policy", SAFE_GPU_POLICY=str(path))
    assert (found.status, found.fix) == ("warning", "unset SAFE_GPU_POLICY")
    path.write_text("[default]\nmax_gpus = 4")
    path.chmod(0o644)
    os.chown(path, 54321, -1)
    assert "not to root" in finding("policy", SAFE_GPU_POLICY=str(path)).detail
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert "is a link" in finding("policy", SAFE_GPU_POLICY=str(path)).detail


def test_a_host_without_a_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("safe_gpu.settings.POLICY_FILE", str(tmp_path / "policy.ini"))
    assert finding("policy").status == "skipped"


@pytest.mark.parametrize(
    ("mode", "status", "says"),
    [(0o1777, "passed", "mode 1777"), (0o1755, "warning", "not recorded"), (0o777, "warning", "remove")],
)
def test_the_history(state_dir: Path, mode: int, status: str, says: str) -> None:
    assert finding("history").status == "passed"
    (state_dir / "history").mkdir(parents=True)
    state_dir.chmod(0o1777)
    (state_dir / "history").chmod(mode)
    found = finding("history")
    assert found.status == status
    assert says in found.detail
    assert not found.fix or "chmod 1777" in found.fix


def test_a_history_that_is_no_directory(state_dir: Path) -> None:
    state_dir.mkdir()
    (state_dir / "history").symlink_to("/tmp")
    found = finding("history")
    assert (found.status, "may not be recorded" in found.detail) == ("warning", True)
