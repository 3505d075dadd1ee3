"""The files of closed GPUs: who may write them, and what of them counts."""

import os
import subprocess
from pathlib import Path

import pytest

from safe_gpu.coordination.closed import (
    all_windows,
    binding,
    closed_file,
    drained_gpus,
    find_admitted,
    has_closed_file,
    ignored_closed,
    read_closed,
)
from safe_gpu.gpus.windows import Window

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose file one of them is")

ANNA, BEN = 4711, 4712
LINES = "GPU-0 - - - a fan\nGPU-1 1 2 user:4711 course\nGPU-2 1 2 user:4711 course\n"


@pytest.fixture
def files(open_tmp: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> dict[bool, Path]:
    """By whether it is root's: the file in the directory of settings, and that in Anna's state directory."""
    monkeypatch.setenv("SAFE_GPU_POLICY", str(open_tmp / "etc" / "config.ini"))
    (open_tmp / "etc").mkdir()
    state_dir.mkdir()
    os.chown(state_dir, ANNA, ANNA)
    return {by_root: Path(closed_file(by_root=by_root)) for by_root in (False, True)}


def test_what_both_files_say_counts_and_root_comes_first(files: dict[bool, Path], state_dir: Path) -> None:
    assert (drained_gpus(), all_windows(), ignored_closed()) == ({}, (), ())
    files[False].write_text(LINES)
    os.chown(files[False], ANNA, ANNA)
    assert drained_gpus() == {"GPU-0": "drained by 4711: a fan"}
    assert all_windows() == (Window(1, 2, ("GPU-1", "GPU-2"), "user:4711", "course", "4711"),)
    files[True].write_text("GPU-0 - - -\nGPU-1 3 4 -\n")
    assert drained_gpus() == {"GPU-0": "drained by root"}
    assert [one.by for one in all_windows()] == ["4711", "root"]
    assert read_closed(by_root=False, state_dir=str(state_dir)).reasons == {"GPU-0": "a fan"}
    assert ignored_closed() == ()


@pytest.mark.parametrize("by_root", [True, False])
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (f"chown {BEN} closed", f"belongs to {BEN}, and the directory does not"),
        ("chmod 664 closed", "can be written by others"),
        ("head -c 70000 /dev/zero > closed", "has more than 65536 bytes"),
        ("mv closed other; ln -s other closed", "cannot be read (Too many levels of symbolic links)"),
        ("rm closed; mkfifo closed", "is no regular file"),
        ("rm closed; mkdir closed", "cannot be read (Is a directory)"),
    ],
)
def test_a_file_that_others_may_have_written_closes_nothing(
    files: dict[bool, Path], by_root: bool, spoil: str, why: str
) -> None:
    files[by_root].write_text(LINES)
    assert list(drained_gpus()) == ["GPU-0"]
    subprocess.run(spoil, shell=True, check=True, cwd=files[by_root].parent, timeout=60)
    assert (drained_gpus(), all_windows()) == ({}, ())
    (told,) = ignored_closed()
    assert told.startswith(f"{files[by_root]} ")
    assert why in told
    if not by_root:  # nor is a link followed that stands in place of the state directory
        files[False].parent.rename(files[False].parent.with_name("moved"))
        files[False].parent.symlink_to("moved")
        assert (drained_gpus(), ignored_closed()) == ({}, ())


def test_a_line_that_says_nothing_is_told_and_the_others_count(files: dict[bool, Path]) -> None:
    files[True].write_text(f"GPU-3 a fan\n{LINES}")
    assert list(drained_gpus()) == ["GPU-0"]
    assert len(all_windows()) == 1
    assert ignored_closed() == (f"{files[True]} has a line that closes no GPU, and is ignored: GPU-3 a fan",)


@pytest.mark.parametrize("by_root", [True, False])
def test_whether_there_is_a_file(files: dict[bool, Path], state_dir: Path, by_root: bool) -> None:
    above = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert not has_closed_file(above)
        files[by_root].touch()
        assert has_closed_file(above)
    finally:
        os.close(above)


def test_whom_a_window_binds() -> None:
    course = Window(1, 2, ("GPU-1",), f"user:{ANNA}")
    group = Window(1, 2, ("GPU-1",), f"group:{BEN}")
    find_admitted([course, group], [0, ANNA])
    assert binding([course, group], 0) == []
    assert binding([course, group], ANNA) == [group]
    assert binding([course, group], BEN) == [course, group]
