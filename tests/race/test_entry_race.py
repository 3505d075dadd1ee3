"""Claims race without a double."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.real import REQUIRED
from support.vendor_hosts import HipHost

RACE = Path(__file__).parent / "entry_race.py"
SECONDS = "6" if REQUIRED else "2"
NETWORKS = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make network namespaces")
WAYS = [
    pytest.param("--host-lock on --shares --inside"),
    pytest.param("--host-lock off --shares --orphans"),
    pytest.param("--host-lock off --shares --inside --directories"),
    pytest.param("--host-lock unlinked --shares --inside --networks --users", marks=NETWORKS),
    "--processes 64 --gpus 8 --work",
    "--preset mi250x --work",
    "--preset mi300x-cpx --work --shares",
]


def race(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(RACE), *words], capture_output=True, text=True, timeout=110)


@pytest.mark.parametrize("way", WAYS)
def test_nobody_collides(way: str) -> None:
    nobody_collides(*way.split())


def test_nobody_collides_on_a_host_of_hip(tmp_path: Path, build_library: Callable[..., Path]) -> None:
    """HIP chooses by the variables, once in a process, and the kernel shows its use."""
    host = HipHost(tmp_path, build_library("hip.c", "libamdhip64.so"))
    nobody_collides("--hip", str(host.library), "--root", str(host.root), "--work")


def nobody_collides(*words: str) -> None:
    done = race("--seconds", SECONDS, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'claimed'" in done.stdout
