"""The soak test finds what it is there to find, and finds nothing in claims as they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.real import long

SOAK = Path(__file__).parents[2] / "tools" / "soak.py"

pytestmark = [pytest.mark.timeout(300), long]


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for other users, other namespaces and a cleaner")


def soak(*words: str, seed: int = 1) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SOAK), "--seed", str(seed), "--processes", "16", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("broken", "words", "seed", "violations"),
    [
        ("backfill", (), 1, []),
        ("lease", (), 1, []),
        ("lease-after-fork", (), 4, []),
        ("host-lock", (), 1, []),
        ("queue", (), 1, []),
        ("second-poll", (), 3, []),
        pytest.param("turns", ("--order", "fair"), 1, ["waiters out of turn"], marks=as_root),
        ("ticket", (), 1, []),
        ("promise", (), 1, ["an expected start passed", "who said 4.0 s"]),  # it names who was let through
        pytest.param("limit", ("--policy",), 1, ["a user over the limit"], marks=as_root),
        pytest.param("limit-of-others", ("--policy",), 1, ["refused within the limit"], marks=as_root),
        pytest.param("limit-of-waiters", ("--policy",), 1, ["held up by a waiter at its limit"], marks=as_root),
        pytest.param("names", ("--cleaner",), 1, ["double booking"], marks=as_root),
        ("slots", ("--shares",), 1, ["refused while there was room"]),
        ("room", ("--shares",), 1, ["more promised than there is"]),
        pytest.param("door", ("--shares", "--islands"), 1, ["a share beside a whole claim"], marks=as_root),
        pytest.param("slot-names", ("--shares", "--islands"), 1, ["a whole claim beside a share"], marks=as_root),
    ],
)
def test_a_broken_build_is_caught(broken: str, words: tuple[str, ...], seed: int, violations: list[str]) -> None:
    ended = soak("--minutes", "2", *words, "--break", broken, seed=seed)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert all(text in ended.stdout for text in ["VIOLATION", *violations])


def test_claims_as_they_are() -> None:
    ended = soak("--minutes", "0.1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "0 violations" in ended.stdout
