"""Directories appear finished: killed at any instant, their maker leaves nothing in anybody's way."""

import itertools
import os
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from safe_gpu.coordination.files import shared_directory
from safe_gpu.coordination.files import state_dir as state_dir_module
from safe_gpu.coordination.files.state_dir import StateDir

FIRST, SECOND = 54321, 54322


def make_all(path: Path) -> None:
    with StateDir(str(path)) as root:
        StateDir("leases", root).close()


def killed_at(step: int, path: Path) -> bool:
    """Make the directories as another user, and die before that call into the kernel; False where it came to none."""
    shared_directory.rename_new("/nowhere", "/nowhere/else", None)  # what it imports is there before the fork
    pid = os.fork()
    if pid == 0:
        left = step

        def profile(frame: Any, event: str, function: Any) -> None:
            nonlocal left
            if event == "c_call" and function.__module__ in ("posix", "ctypes", "_ctypes"):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            os.umask(0o077)
            os.setresuid(FIRST, FIRST, FIRST)
            sys.setprofile(profile)
            make_all(path)
        finally:
            sys.setprofile(None)
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as other users")
def test_killed_at_any_step_it_is_open_to_others(open_tmp: Path, as_user: Any) -> None:
    for step in itertools.count(1):
        path = open_tmp / str(step)
        if not killed_at(step, path):
            break

        def work(say: Any, listen: Any, path: Path = path) -> None:
            make_all(path)
            say("works")

        assert as_user(work, uid=SECOND).hear() == "works", f"killed at step {step}"
    assert step > 10


@pytest.mark.parametrize("trouble", ["no function", "not here"])
def test_without_renameat2_they_are_made_all_the_same(state_dir: Path, monkeypatch, trouble: str) -> None:
    import ctypes
    import errno

    if trouble == "no function":
        monkeypatch.setattr(ctypes, "CDLL", lambda *args, **options: object())
    else:
        monkeypatch.setattr(shared_directory, "rename_new", lambda *args: errno.EINVAL)
        monkeypatch.setattr(state_dir_module, "rename_new", lambda *args: errno.EINVAL)
    make_all(state_dir)
    for path in (state_dir, state_dir / "leases"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o1777
    assert sorted(os.listdir(state_dir)) == ["leases"]
    assert os.listdir(state_dir.parent) == ["state"]


def test_whoever_is_faster_keeps_the_name(state_dir: Path) -> None:
    shared_directory.make_directory(str(state_dir), str(state_dir), None)
    (state_dir / "precious").touch()
    shared_directory.make_directory(str(state_dir), str(state_dir), None)
    assert os.listdir(state_dir) == ["precious"]
    assert os.listdir(state_dir.parent) == ["state"]
