"""What doctor advises is pasted by root: no name that a neighbour chose stands in it, and none that it can replace."""

import os
import shlex
from pathlib import Path

import pytest

from safe_gpu.coordination.directory import PARTS, Directory
from safe_gpu.doctor import CheckedHost, run_checks
from safe_gpu.doctor.state import directory

NEIGHBOUR = 4711

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")


@pytest.fixture
def used(state_dir: Path) -> Path:
    for part in PARTS:
        Directory(str(state_dir), part).close()
    return state_dir


@pytest.mark.parametrize(
    "name", ["x; touch pwned #", "a\n; touch pwned\n", "$(touch pwned)", "\x1b[2J`touch pwned`", "-rf "]
)
def test_names_of_others_stand_in_no_advice(used: Path, name: str) -> None:
    for part in PARTS:
        (used / part / name).symlink_to("/etc/passwd")
    for check in run_checks():
        assert "touch" not in check.fix + check.detail
        assert "-rf " not in check.fix


@as_root
def test_the_path_of_the_state_directory_is_quoted(open_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = open_tmp / "a b; touch pwned"
    Directory(str(path), "claims").close()
    os.chown(path, NEIGHBOUR, NEIGHBOUR)
    monkeypatch.setenv("SAFE_GPU_DIR", str(path))
    command = directory(CheckedHost()).fix.partition(": ")[2]
    assert shlex.split(command) == ["safe-gpu", "setup", "--state-dir", str(path)]


@as_root
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777, 0o1777])
@pytest.mark.parametrize("broken", ["host.lock", *PARTS, "."])
def test_root_is_not_told_to_change_what_others_can_replace(used: Path, broken: str, mode: int) -> None:
    """The owner puts a symbolic link in its place before the advice is followed."""
    path = used / broken
    path.touch()
    os.chown(path, NEIGHBOUR, NEIGHBOUR)
    path.chmod(mode)
    words = directory(CheckedHost()).fix.split()
    assert not {"chmod", "chown", "mv", "rm"} & {*words}
