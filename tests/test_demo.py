"""The race that anyone can watch, and its referee."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu import demo
from safe_gpu.coordination import host_lock, leases, waiting
from safe_gpu.drivers.simulated import SimulatedDriver
from safe_gpu.referee import Markers, Watch


def run(*arguments: Any) -> tuple[int, str]:
    story = io.StringIO()
    status = demo.run(*arguments, story)
    return status, story.getvalue()


def test_it_tells_who_got_what_and_who_was_refused_and_why() -> None:
    before = dict(os.environ)
    status, story = run(12, 2)
    assert status == 0
    assert "simulated host, dgx-a100: 8 x NVIDIA A100" in story
    told = [line for line in story.splitlines() if " asked for " in line]
    assert len(told) == 12
    got = [line.rpartition("GPU ")[2].split(",") for line in told if "got GPU" in line]
    labels = [label for line in got for label in line]
    assert len(labels) == len(set(labels))
    assert {*labels} <= set("01234567")
    assert len(got) + sum("was refused" in line for line in told) == 12
    assert "claimed by process" in story
    assert "12 of 12 served" in story
    assert ", 0 collisions." in story
    assert dict(os.environ) == before
    assert not Path(os.environ["SAFE_GPU_DIR"]).exists(), "the shared state directory is none of its business"


def test_the_contrast_shows_what_happens_without() -> None:
    _, story = run(8, 1)
    (line,) = [line for line in story.splitlines() if "Without safe_gpu" in line]
    collisions, taken = (int(word) for word in line.split() if word.isdigit())
    assert taken == 10
    assert collisions > 0


def test_a_broken_claim_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (host_lock, leases, waiting):
        monkeypatch.setattr(module, "lock_file", lambda fd: True)
    # With a placeholder the claims would notice each other by themselves.
    monkeypatch.setattr(demo, "claim_gpus", partial(safe_gpu.claim_gpus, placeholder_fn=safe_gpu.NoPlaceholder()))
    status, story = run(8, 1)
    assert status == 1
    assert "Collision: process " in story
    assert ", 0 collisions." not in story


def in_racers_only(monkeypatch: pytest.MonkeyPatch, claim: Callable[..., Any]) -> None:
    parent = os.getpid()

    def either(*arguments: Any, **options: Any) -> Any:
        return (safe_gpu.claim_gpus if os.getpid() == parent else claim)(*arguments, **options)

    monkeypatch.setattr(demo, "claim_gpus", either)


def test_a_claim_that_fails_otherwise_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise safe_gpu.StateDirError("no room anywhere")

    in_racers_only(monkeypatch, broken)
    status, story = run(4, 1)
    assert status == 1
    assert "no room anywhere" in story


def test_a_racer_that_dies_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    in_racers_only(monkeypatch, lambda *arguments, **options: os._exit(3))
    status, story = run(4, 1)
    assert status == 1
    assert "ended without a word" in story


def test_the_preset_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:workstation-mixed")
    status, story = run(4, 1)
    assert status == 0
    assert "workstation-mixed: 3 x " in story


RACE = "import sys\nfrom safe_gpu import demo\nsys.exit(demo.run(6, 2))"


def test_on_real_gpus_only_free_ones_are_touched(fake_gpus: Any) -> None:
    for uuid in fake_gpus.uuids[:5]:
        fake_gpus.process(uuid, 999_999, static=True)
    story = fake_gpus.python(RACE)
    assert "A race for the GPUs of this host: 8, of which 3 free just now (5, 6, 7)." in story
    assert ", 0 collisions." in story
    got = {label for line in story.splitlines() if "got GPU" in line for label in line.rpartition("GPU ")[2].split(",")}
    assert got == {"5", "6", "7"}
    assert "from one's release" not in story.lower(), "nobody waits on a shared host"
    assert not list((fake_gpus.directory / "procs").glob("*/[0-9]*[0-9]")), "a context was left on a GPU"


@pytest.mark.parametrize(("gpus", "why"), [(2, "none of them is free"), (1, "it drives the display")])
def test_where_no_real_gpu_can_be_had_it_says_so_and_simulates(fake_gpus: Any, gpus: int, why: str) -> None:
    fake_gpus.set(gpus, display=int(gpus == 1))
    if gpus == 2:
        for uuid in fake_gpus.uuids:
            fake_gpus.process(uuid, 999_999, static=True)
    story = fake_gpus.python(RACE)
    assert f"{why}" in story
    assert "simulated host, dgx-a100" in story
    assert ", 0 collisions." in story


def test_on_the_command_line(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(safe_gpu.__file__).parents[1])}
    del environment["SAFE_GPU_DRIVER"]  # the driver's libraries are unusable here
    done = subprocess.run(
        [sys.executable, "-m", "safe_gpu", "demo"], env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "There is no NVIDIA GPU here" in done.stdout
    assert ", 0 collisions." in done.stdout
    assert done.stderr == ""


# The referee


def test_markers_know_who_was_first(tmp_path: Path) -> None:
    markers = Markers(str(tmp_path))
    assert markers.enter("GPU-1") is None
    assert markers.enter("GPU-1") == os.getpid()
    assert markers.enter("MIG-GPU-1/0/1") is None
    markers.leave("GPU-1")
    assert markers.enter("GPU-1") is None


def test_a_marker_is_taken_away_by_its_maker_only(tmp_path: Path) -> None:
    markers = Markers(str(tmp_path))
    pid = os.fork()
    if pid == 0:
        os._exit(markers.enter("GPU-1") is not None)
    assert os.waitpid(pid, 0)[1] == 0
    assert markers.enter("GPU-1") == pid
    markers.leave("GPU-1")
    assert markers.enter("GPU-1") == pid


def test_the_watch_sees_processes_that_meet() -> None:
    driver = SimulatedDriver("dgx-a100")
    first, second, third = (gpu.uuid for gpu in driver.idle.gpus[:3])
    with driver.occupy(first), driver.occupy(first, pid=1):
        watch = Watch(lambda: driver, 0.001)
        with driver.occupy(second), driver.occupy(first, pid=2), driver.occupy(third, pid=3, kind="graphics"):
            looks, sightings = watch.stop()
    assert looks > 0
    assert [sighting.uuid for sighting in sightings] == [first]
    (sighting,) = sightings
    assert sighting.newcomers == {2}
    assert sighting.residents == {1, os.getpid()}
    assert sighting.concerns(frozenset({2}))
    assert not sighting.concerns(frozenset({1}))
