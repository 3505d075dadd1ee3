"""A history that several users write, and what one of them can do to the others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safe_gpu
from safe_gpu.coordination import history
from safe_gpu.status.past import claims_between

USERS = (4711, 4712, 4713)


def claim(say: Callable[[object], None], listen: Callable[[], str]) -> None:
    safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0).release_gpus()
    say("released")


def test_each_user_appends_to_the_same_file(state_dir: Path, as_user: Any, everything_imported: None) -> None:
    for uid in USERS:
        assert as_user(claim, uid=uid, umask=0o077).hear() == "released"
    assert len(list((state_dir / history.NAME).iterdir())) == 1

    def look(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        claims, warnings = claims_between(0, time.time() + 1)
        say(f"{[(one.uid, one.ended is not None) for one in claims]} {warnings}")

    assert as_user(look, uid=USERS[0]).hear() == f"{[(uid, True) for uid in USERS]} []"


def test_a_file_that_its_owner_closes_is_passed(state_dir: Path, as_user: Any, everything_imported: None) -> None:
    assert as_user(claim, uid=USERS[0]).hear() == "released"
    (file,) = (state_dir / history.NAME).iterdir()
    os.chmod(file, 0o600)
    assert as_user(claim, uid=USERS[1]).hear() == "released"
    claims, warnings = claims_between(0, time.time() + 1)
    assert [one.uid for one in claims] == [USERS[1]]  # root reads no closed file in a directory of another user
    assert "has mode 0600 in place of 0666" in warnings[0]


def test_a_file_under_a_file_lease_blocks_nobody(
    state_dir: Path, as_user: Any, file_lease: Any, everything_imported: None
) -> None:
    assert as_user(claim, uid=USERS[0]).hear() == "released"
    (file,) = (state_dir / history.NAME).iterdir()
    file_lease(file, USERS[0])
    assert as_user(claim, uid=USERS[1]).hear() == "released"
    assert len(list((state_dir / history.NAME).iterdir())) == 2


def test_nobody_removes_another_users_months(state_dir: Path, as_user: Any, everything_imported: None) -> None:
    assert as_user(claim, uid=USERS[0]).hear() == "released"
    (file,) = (state_dir / history.NAME).iterdir()
    old = [file.rename(file.with_name(f"{year}-{month:02}.jsonl")) for year, month in [(1999, 1)]]
    for number in range(30):
        other = file.with_name(f"{2000 + number // 12}-{number % 12 + 1:02}.jsonl")
        other.touch()
        os.chown(other, USERS[0], USERS[0])
    os.chown(file.parent, 0, 0)
    assert as_user(claim, uid=USERS[1]).hear() == "released"
    assert old[0].exists()
    file.unlink()
    assert as_user(claim, uid=USERS[0]).hear() == "released"
    assert not old[0].exists()
