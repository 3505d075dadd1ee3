"""Claims race without a double, also of two users with different umasks, either of whom may come first."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.actor import GONE
from support.real import REQUIRED, long
from support.stage import Stage, import_everything, let_go
from support.vendor_hosts import HipHost

RACE = Path(__file__).parent / "entry_race.py"
PIECES_RACE = Path(__file__).parent / "pieces_race.py"
SECONDS = os.environ.get("RACE_SECONDS") or ("4" if REQUIRED else "0.7")  # a broken build is caught within ten claims
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for other users and network namespaces")
WAYS = [
    pytest.param("--host-lock off --shares --networks", marks=ROOT),  # fails within a second where no entry is locked
    "--host-lock off --shares --inside --directories",  # and this one where there are no doors
    pytest.param("--host-lock off --shares --orphans", marks=long),
    pytest.param("--host-lock on --shares --inside", marks=long),
    pytest.param("--host-lock unlinked --shares --inside --networks --users", marks=[ROOT, long]),
    pytest.param("--preset mi250x --work", marks=long),
    pytest.param("--preset mi300x-cpx --work --shares", marks=long),
    pytest.param("--processes 64 --gpus 8 --work", marks=long),
]


def race(path: Path, *words: str) -> str:
    command = [sys.executable, str(path), "--seconds", SECONDS, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110 + float(SECONDS))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def nobody_collides(*words: str) -> None:
    assert "'claimed'" in race(RACE, *words)


@pytest.mark.parametrize("way", WAYS)
def test_nobody_collides(way: str) -> None:
    nobody_collides(*way.split())


@long
def test_nobody_collides_on_a_host_of_hip(tmp_path: Path, build_library: Callable[..., Path]) -> None:
    """HIP chooses by the variables, once in a process, and the kernel shows its use."""
    host = HipHost(tmp_path, build_library("hip.c", "libamdhip64.so"))
    nobody_collides("--hip", str(host.library), "--root", str(host.root), "--work")


@pytest.mark.parametrize("vendor", ["amd", *(pytest.param(vendor, marks=long) for vendor in ("mig", "intel"))])
@pytest.mark.parametrize(
    "way",
    [
        pytest.param("--host-lock on --shares", marks=long),
        "--host-lock off --directories --shares",
        pytest.param("--host-lock off --networks --shares", marks=[ROOT, long]),
    ],
)
def test_nobody_has_a_gpu_and_another_one_a_piece_of_it(vendor: str, way: str) -> None:
    """While the GPUs are divided differently all the time."""
    told = race(PIECES_RACE, "--vendor", vendor, *way.split())
    for event in ("claimed piece", "claimed whole", "computed", "divided") if REQUIRED else ("claimed", "divided"):
        assert event in told


# Two users


@pytest.fixture
def stage() -> Iterator[Stage]:
    import_everything()
    stage = Stage()
    yield stage
    stage.close()


@ROOT
@pytest.mark.parametrize("umasks", [(0o077, 0o022), (0o022, 0o077)], ids=["strict first", "open first"])
def test_two_users_share_a_state_directory(stage: Stage, umasks: tuple[int, int]) -> None:
    """One makes everything; the other one claims, waits, and outlives it."""
    stage.renew(first_use=True)
    mask, other_mask = umasks
    holder = stage.start("the holder", stage.claims(6), umask=mask)
    holder.expect("holds")
    guest = stage.start("the guest", stage.claims(2), other=True, umask=other_mask)
    guest.expect("holds")
    for other in (False, True):
        refused = stage.start("a third", stage.claims(1), other=other, umask=mask)
        assert sorted(refused.expect("refused")[2]) == sorted([holder.pid] * 6 + [guest.pid] * 2)
        refused.end()
    waiter = stage.start("the waiter", stage.claims(8, 60.0), other=True, umask=other_mask)
    stage.until_queued(waiter)
    holder.end()
    let_go(guest)
    waiter.expect("holds")
    for one in (guest, waiter):
        one.end()


@ROOT
def test_two_users_make_the_state_directory_at_once(stage: Stage) -> None:
    """Neither finds the state directory, so both make it."""
    for number in range(2):
        stage.renew(first_use=True)
        umasks = [(0o077, 0o022)[(one + number) % 2] for one in range(12)]
        racers = [
            stage.start(f"racer {one}", stage.claims(1), other=bool(one % 2), umask=umask)
            for one, umask in enumerate(umasks)
        ]
        said = [racer.expect("holds", "refused") for racer in racers]
        held = [uuid for word, uuids, *_ in said if word == "holds" for uuid in uuids]
        assert len(held) == len(set(held)) == 8
        for racer, (word, *_) in zip(racers, said, strict=True):
            if word == "holds":
                let_go(racer)
            assert racer.hear() == GONE
            racer.end()
        assert stage.flaws() == []
        assert stage.referee.violations() == []
