"""Cleaners of /tmp stay out of a state directory in which somebody claims or waits: the real systemd-tmpfiles."""

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import safe_gpu

TMPFILES = shutil.which("systemd-tmpfiles")
NOTHING = safe_gpu.NoPlaceholder()


@pytest.fixture
def clean(state_dir: Path) -> Callable[[], None]:
    """Clean the directory that the state directory lies in, as systemd does to /tmp; an age of 0 makes all old."""
    if TMPFILES is None:
        pytest.skip("needs systemd-tmpfiles")
    (state_dir.parent / "old file").touch()
    (state_dir.parent / "old").mkdir()
    (state_dir.parent / "old" / "file").touch()
    rules = state_dir.parent / "rules.conf"
    rules.write_text(f"d {state_dir.parent} - - - 0\nx {rules}\n")

    def run() -> None:
        done = subprocess.run([str(TMPFILES), "--clean", str(rules)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert not (state_dir.parent / "old").exists(), "the cleaner does its work"

    return run


def test_who_waits_keeps_cleaners_out(state_dir: Path, clean, ground, child, eventually) -> None:
    ground.hold(*range(8))
    waiter = child("import safe_gpu; safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), timeout=60); say('got it')")
    eventually(lambda: len(ground.tickets()) == 1)
    before = ground.tickets()
    clean()
    assert ground.tickets() == before
    ground.let_go()
    assert waiter.hear() == "got it"


def test_after_the_claim_it_is_cleaned(state_dir: Path, clean: Callable[[], None]) -> None:
    """Or the other tests would show nothing."""
    safe_gpu.GPUOwner(2, NOTHING, timeout=0, affinity=None).release_gpus()
    clean()
    assert not (state_dir / "host.lock").exists()


@pytest.mark.parametrize(
    "rest",
    [
        "say('there'); listen()",
        "owner.keep_across_exec(); os.execv('/bin/sh', ['sh', '-c', 'echo there; read line'])",
        "if os.fork(): os._exit(0)\nsay('there'); listen()",
    ],
    ids=["the claim itself", "the command of run", "a forked child that lives on"],
)
def test_who_has_a_claim_keeps_cleaners_out(state_dir: Path, clean, child: Any, rest: str) -> None:
    work = "import os, safe_gpu\nowner = safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), timeout=0, affinity=None)\n"
    holder = child(work + rest)
    assert holder.hear() == "there"
    clean()
    assert len(os.listdir(state_dir / "claims")) == 1
    holder.tell()


def test_the_directory_is_locked_for_exactly_as_long(state_dir: Path) -> None:
    owner = safe_gpu.GPUOwner(2, NOTHING, timeout=0, affinity=None)
    fd = os.open(state_dir, os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owner.release_gpus()
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)


def test_a_cleaner_at_work_is_not_waited_for(state_dir: Path) -> None:
    state_dir.mkdir()
    state_dir.chmod(0o1777)
    fd = os.open(state_dir, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        safe_gpu.GPUOwner(2, NOTHING, timeout=0, affinity=None).release_gpus()
    finally:
        os.close(fd)
