"""A claim that is killed at any step leaves nothing in anybody's way."""

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.real import REQUIRED

import safe_gpu

NOTHING = safe_gpu.NoPlaceholder()
TWO_USERS = (54321, 54322)


def claim(track: Any, nb_gpus: int = 2, **options: Any) -> Callable[[Any], None]:
    return lambda line: track.claim_and_hold(line, nb_gpus, **options)


def first_claim(nb_gpus: int = 2) -> None:
    safe_gpu.GPUOwner(nb_gpus, None, timeout=0, affinity=None).release_gpus()


@pytest.mark.parametrize("first_use", [True, False], ids=["of the first claim ever", "of a later claim"])
def test_killed_at_every_step(track: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first_use: bool) -> None:
    """Each call that enters the kernel is a step; the claim is killed before it, for every one of them in CI."""

    def prepare(number: int) -> None:
        if first_use:
            track.use(tmp_path / str(number))
            monkeypatch.setenv("SAFE_GPU_DIR", str(track.state_dir))

    if not first_use:
        first_claim()
    for step in itertools.count(1, 1 if REQUIRED else 3):
        prepare(step)
        racer = track.start(claim(track, die_at=step))
        said = racer.hear()
        if said[0] == "holds":
            break  # the claim was over before that step
        assert os.WTERMSIG(racer.join()) == signal.SIGKILL
        track.claim_all()
        assert track.files() == []
    assert step > 80


def test_a_waiter_killed_at_any_step_is_passed(track: Any) -> None:
    """Steps beyond those of taking a ticket fall into its wait, where it looks again and again."""
    for step in range(1, 250, 9):
        holder = track.start(claim(track, 8))
        assert holder.hear()[0] == "holds"
        waiter = track.start(claim(track, 1, timeout=None, die_at=step))
        assert waiter.hear() == ("gone",)
        holder.tell("let go")
        assert holder.hear() == ("done",)
        track.claim_all()
        assert track.files() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as other users")
@pytest.mark.parametrize("umasks", [(0o077, 0o022), (0o022, 0o077)], ids=["strict first", "open first"])
def test_two_users_share_a_state_directory(track: Any, umasks: tuple[int, int]) -> None:
    """One makes everything, under a umask; the other one claims, waits, and outlives it."""
    (first, second), (mask, other_mask) = TWO_USERS, umasks
    holder = track.start(claim(track, 6), uid=first, umask=mask)
    assert holder.hear()[0] == "holds"
    guest = track.start(claim(track, 2), uid=second, umask=other_mask)
    assert guest.hear()[0] == "holds"
    for user in TWO_USERS:
        refused = track.start(claim(track, 1), uid=user, umask=mask)
        word, error = refused.hear()
        assert word == "refused"
        holders = [verdict.pid for verdict in error.verdicts]
        assert sorted(holders) == sorted([holder.pid] * 6 + [guest.pid] * 2)
    waiter = track.start(claim(track, 8, timeout=60.0), uid=second, umask=other_mask)
    holder.end()
    guest.tell("let go")
    assert guest.hear() == ("done",)
    assert waiter.hear()[0] == "holds"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as other users")
def test_two_users_come_first_at_once(track: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither finds the state directory, so both make it."""
    base = track.state_dir.parent
    for number in range(5):
        track.use(base / str(number))
        monkeypatch.setenv("SAFE_GPU_DIR", str(track.state_dir))
        racers = [
            track.start(
                claim(track, 1, placeholder=NOTHING if i % 4 < 2 else None),
                uid=TWO_USERS[i % 2],
                umask=(0o077, 0o022)[(i + number) % 2],
            )
            for i in range(12)
        ]
        said = [racer.hear() for racer in racers]
        held = [uuid for word in said if word[0] == "holds" for uuid in word[1]]
        assert [word[2] for word in said if word[0] == "holds" and word[2]] == []
        assert len(held) == len(set(held)) == 8
        for racer, word in zip(racers, said, strict=True):
            if word[0] == "holds":
                racer.tell("let go")
                assert racer.hear() == ("done",)
            racer.join()
        track.claim_all()
