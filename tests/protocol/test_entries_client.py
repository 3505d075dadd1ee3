"""A client in C of the protocol that comes, which races with the files of this package."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

RACE = Path(__file__).parents[1] / "race" / "entry_race.py"
NETWORKS = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make network namespaces")


def race(client: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RACE), "--client", client, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


@pytest.mark.parametrize(
    "way", ["--host-lock on", "--host-lock off --orphans", pytest.param("--networks", marks=NETWORKS)]
)
def test_both_race_and_nobody_collides(build: Callable[..., str], way: str) -> None:
    client = build("entries.c", "-Wall", "-Wextra", "-Werror")
    done = race(client, "--seconds", "10", "--shares", *way.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"'CLAIMED': (\d+)", done.stdout)[1]) > 10, done.stdout


@NETWORKS
@pytest.mark.parametrize(("flag", "way"), [("-DONE_LISTING", "--networks"), ("-DNO_DOORS", "--directories")])
def test_a_broken_client_is_caught(build: Callable[..., str], flag: str, way: str) -> None:
    """It takes host.lock, so the others do not."""
    done = race(build("entries.c", flag), "--seconds", "90", "--until-found", "--host-lock", "off", way)
    assert done.returncode == 1, done.stdout + done.stderr
