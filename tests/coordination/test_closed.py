"""Closed GPUs: who may write the files, and what of them counts."""

import os
import subprocess
from pathlib import Path

import pytest
from support import api

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")

ANNA, BEN = 4711, 4712
LINES = "GPU-0 - - - a fan\nGPU-1 1 2 user:4711 course\nGPU-2 1 2 user:4711 course\n"


@pytest.fixture
def files(open_tmp: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> dict[bool, Path]:
    """By whether it is root's: the file in the directory of settings, and that in Anna's state directory."""
    monkeypatch.setenv("SAFE_GPU_POLICY", str(open_tmp / "etc" / "config.ini"))
    (open_tmp / "etc").mkdir()
    state_dir.mkdir()
    os.chown(state_dir, ANNA, ANNA)
    return {by_root: Path(api.closed.closed_file(by_root=by_root)) for by_root in (False, True)}


@needs_root
def test_what_both_files_say_counts_and_root_comes_first(files: dict[bool, Path], state_dir: Path) -> None:
    """A line that says nothing is told, and the others count."""
    above = api.SharedDirectory(str(state_dir))
    assert (api.closed.drained_gpus(), api.closed.all_windows(), api.closed.ignored_closed()) == ({}, (), ())
    assert not api.closed.has_closed_file(above)
    files[False].write_text(LINES)
    os.chown(files[False], ANNA, ANNA)
    assert api.closed.has_closed_file(above)
    assert api.closed.drained_gpus() == {"GPU-0": "drained by 4711: a fan"}
    assert api.closed.all_windows() == (api.Window(1, 2, ("GPU-1", "GPU-2"), "user:4711", "course", "4711"),)
    files[True].write_text("GPU-0 - - -\nGPU-3 a fan\nGPU-1 3 4 -\n")
    assert api.closed.drained_gpus() == {"GPU-0": "drained by root"}
    assert [one.by for one in api.closed.all_windows()] == ["4711", "root"]
    assert api.closed.read_closed(by_root=False, state_dir=str(state_dir)).reasons == {"GPU-0": "a fan"}
    assert api.closed.ignored_closed() == (f"{files[True]} has a line that closes no GPU, and is ignored: GPU-3 a fan",)
    files[False].unlink()
    assert api.closed.has_closed_file(above)
    above.close()


@needs_root
@pytest.mark.parametrize("by_root", [True, False])
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (f"chown {BEN} closed", f"belongs to {BEN}, and the directory does not"),
        ("chmod 664 closed", "can be written by others"),
        ("head -c 70000 /dev/zero > closed", "has more than 65536 bytes"),
        ("mv closed other; ln -s other closed", "cannot be read (Too many levels of symbolic links)"),
        ("rm closed; mkfifo closed", "is not a regular file"),
        ("rm closed; mkdir closed", "cannot be read (Is a directory)"),
    ],
)
def test_a_file_that_others_may_have_written_closes_nothing(
    files: dict[bool, Path], by_root: bool, spoil: str, why: str
) -> None:
    files[by_root].write_text(LINES)
    assert list(api.closed.drained_gpus()) == ["GPU-0"]
    subprocess.run(spoil, shell=True, check=True, cwd=files[by_root].parent, timeout=60)
    assert (api.closed.drained_gpus(), api.closed.all_windows()) == ({}, ())
    (told,) = api.closed.ignored_closed()
    assert told.startswith(f"{files[by_root]} ")
    assert why in told
    if not by_root:  # nor is a link followed that stands in place of the state directory
        files[False].parent.rename(files[False].parent.with_name("moved"))
        files[False].parent.symlink_to("moved")
        assert (api.closed.drained_gpus(), api.closed.ignored_closed()) == ({}, ())


def test_whom_a_window_binds() -> None:
    course = api.Window(1, 2, ("GPU-1",), f"user:{ANNA}")
    group = api.Window(1, 2, ("GPU-1",), f"group:{BEN}")
    api.closed.look_up_admitted_users([course, group], [0, ANNA])
    assert api.closed.windows_against([course, group], 0) == []
    assert api.closed.windows_against([course, group], ANNA) == [group]
    assert api.closed.windows_against([course, group], BEN) == [course, group]
