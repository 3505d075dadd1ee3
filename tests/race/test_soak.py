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
        ("no doors nor locks", (), 1, ["booked twice"]),
        pytest.param("no doors", ("--islands",), 1, [], marks=as_root),
        ("one poll", (), 3, []),
        ("backfill", (), 1, []),
        ("no queue", (), 1, []),
        ("ticket stays", (), 1, []),
        ("promise", (), 1, ["an expected start passed", "who said 4.0 s"]),  # it names who was let through
        pytest.param("turns", ("--order", "fair"), 1, ["waiters out of turn"], marks=as_root),
        pytest.param("limit", ("--policy",), 1, ["a user over the limit"], marks=as_root),
        pytest.param("limit of others", ("--policy",), 1, ["refused within the limit"], marks=as_root),
        pytest.param("limit of waiters", ("--policy",), 1, ["held up by a waiter at its limit"], marks=as_root),
        ("room", ("--shares",), 1, ["more promised than there is"]),
        pytest.param("share without the door", ("--shares", "--islands"), 1, ["a share beside a whole"], marks=as_root),
        pytest.param("parts not asked", ("--shares", "--islands"), 1, ["a share beside a whole"], marks=as_root),
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
