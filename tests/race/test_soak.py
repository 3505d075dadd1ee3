"""The soak test finds what it is there to find, and finds nothing in claims as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "tools" / "soak.py"

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.environ.get("SAFE_GPU_REQUIRE_REAL") != "1", reason="takes minutes; .ci/run runs it"),
]


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="other users, and a cleaner, need root")


def soak(*words: str, seed: int = 1) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SOAK), "--seed", str(seed), "--processes", "16", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("broken", "seed"),
    [
        ("backfill", 1),
        ("lease", 1),
        ("lease-after-fork", 4),
        ("host-lock", 1),
        ("queue", 1),
        ("second-poll", 3),
        ("ticket", 1),
    ],
)
def test_a_broken_build_is_caught(broken: str, seed: int) -> None:
    ended = soak("--minutes", "2", "--break", broken, seed=seed)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "VIOLATION" in ended.stdout


def test_a_build_that_breaks_its_promises_is_caught_and_the_violation_names_who_was_let_through() -> None:
    ended = soak("--minutes", "2", "--break", "promise")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "an expected start passed" in ended.stdout
    assert "who said 4.0 s" in ended.stdout


@as_root
@pytest.mark.parametrize(
    ("broken", "violation"),
    [
        ("limit", "a user over the limit"),
        ("limit-of-others", "refused within the limit"),
        ("limit-of-waiters", "held up by a waiter at its limit"),
    ],
)
def test_a_build_that_counts_limits_wrongly_is_caught(broken: str, violation: str) -> None:
    ended = soak("--minutes", "2", "--policy", "--break", broken)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert violation in ended.stdout


@as_root
def test_a_build_without_names_is_caught_where_a_cleaner_is_at_work() -> None:
    ended = soak("--minutes", "2", "--break", "names", "--cleaner")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "double booking" in ended.stdout


def test_claims_as_they_are() -> None:
    ended = soak("--minutes", "0.1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "0 violations" in ended.stdout
