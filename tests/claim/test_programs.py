"""Claims in users' own programs: copies of the owner, closed descriptors, frozen apps, notebooks, worker pools."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import safe_gpu

from .conftest import claim, in_fork


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, pickle.dumps, lambda one: copy.deepcopy({"gpus": one})]
)
def test_an_owner_is_neither_copied_nor_pickled(ground: Any, duplicate: Callable[[Any], object]) -> None:
    with claim(2) as owner:
        with pytest.raises(TypeError, match=r"owner\.devices_taken or owner\.gpus.*release_gpus\(\)"):
            duplicate(owner)
        assert owner.devices_taken == [0, 1]
        assert duplicate([owner.devices_taken, owner.gpus])


def _others_files(first: int, last: int, path: Path) -> list[int]:
    """Close these descriptors, as daemons do, and open files of the program's own under the same numbers."""
    taken = [fd for fd in range(first, last) if _is_open(fd)]
    os.closerange(first, last)
    path.write_text("kept")
    for fd in taken:
        own = os.open(path, os.O_RDWR)
        if own != fd:
            os.dup2(own, fd)
            os.close(own)
    return taken


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("placeholder", [safe_gpu.NoPlaceholder, lambda: None])
def test_a_release_leaves_files_alone_that_have_its_old_numbers(
    ground: Any, tmp_path: Path, placeholder: Callable[[], Any]
) -> None:
    def daemon() -> list[object]:
        owner = safe_gpu.GPUOwner(2, placeholder(), affinity=None, timeout=0)
        used = {int(fd) for fd in os.listdir("/proc/self/fd") if _of_ours(int(fd))}
        taken = _others_files(min(used), max(used) + 1, tmp_path / "own")
        child = os.fork()
        if child == 0:
            owner.release_gpus()
            os._exit(sum(not _is_open(fd) for fd in taken))
        lost_in_child = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        owner.release_gpus()
        return [len(used) > 2, lost_in_child, sum(not _is_open(fd) for fd in taken), (tmp_path / "own").read_text()]

    assert in_fork(daemon) == [True, 0, 0, "kept"]


def _of_ours(fd: int) -> bool:
    try:
        target = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False  # the one that listed them
    return target.startswith((os.environ["SAFE_GPU_DIR"], "socket:"))
