"""Markers say who has a GPU, one process at a time, and die with their makers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safe_gpu import procfs
from safe_gpu.demo.referee import Markers

ENTER = """
from safe_gpu.demo.referee import Markers
say(Markers(sys.argv[1]).enter("GPU-1"))
listen()
"""


@pytest.fixture
def other(child: Callable[..., Any], tmp_path: Path) -> Callable[[], Any]:
    """Start a process that has GPU-1, by its marker."""

    def start() -> Any:
        one = child(f"import sys; sys.argv = ['', {str(tmp_path)!r}]" + ENTER)
        assert one.hear() == "None"
        return one

    return start


def test_who_was_first(tmp_path: Path) -> None:
    markers = Markers(str(tmp_path))
    assert markers.enter("GPU-1") is None
    assert markers.enter("GPU-1") == os.getpid()
    assert markers.enter("MIG-GPU-1/0/1") is None
    markers.leave("GPU-1")
    assert markers.enter("GPU-1") is None


def test_only_its_maker_takes_a_marker_away(tmp_path: Path, other: Callable[[], Any]) -> None:
    markers, first = Markers(str(tmp_path)), other()
    assert markers.enter("GPU-1") == first.pid
    markers.leave("GPU-1")
    assert markers.enter("GPU-1") == first.pid


def test_a_marker_lives_no_longer_than_its_maker(
    tmp_path: Path, other: Callable[[], Any], eventually: Callable[[Callable[[], bool]], None]
) -> None:
    markers, first = Markers(str(tmp_path)), other()
    first.process.send_signal(9)
    eventually(lambda: procfs.is_exiting(first.pid))  # nobody has waited for it: its number is still taken
    assert markers.enter("GPU-1") is None
    assert markers.enter("GPU-1") == os.getpid()
    assert os.listdir(tmp_path) == ["GPU-1"]


def test_another_process_with_the_number_of_a_dead_one(tmp_path: Path, child: Callable[..., Any]) -> None:
    markers, heir = Markers(str(tmp_path)), child("listen()")
    os.symlink(f"{heir.pid} {procfs.start_time(heir.pid) - 1}", tmp_path / "GPU-1")
    assert markers.enter("GPU-1") is None


def test_two_that_clear_a_dead_marker_away_meet(
    tmp_path: Path, child: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find it dead; the slower one moves the faster one's marker away, and sees whose it is."""
    markers, dead, faster = Markers(str(tmp_path)), child(""), child("listen()")
    dead.finish()
    os.symlink(f"{dead.pid} 1", tmp_path / "GPU-1")
    rename = os.rename

    def late(path: str, aside: str) -> None:
        os.unlink(path)
        os.symlink(f"{faster.pid} {procfs.start_time(faster.pid)}", path)
        rename(path, aside)

    monkeypatch.setattr(os, "rename", late)
    assert markers.enter("GPU-1") == faster.pid
