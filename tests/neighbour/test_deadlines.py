"""What a neighbour can make a command wait: not beyond its deadline, and with little memory, whatever lies there."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.claims import claim
from support.real import long

NEIGHBOUR = 4711
MOST = 64  # MiB beyond a bare interpreter
LONGEST = 300_000  # characters of output

TIMEOUT = 0.1
# Seconds beyond the deadline, for slow machines. A file lease blocks every open for 45, and a FIFO for ever.
SLACK = 20.0

LATE, UNUSABLE = 75, 73  # exit codes

CLAIM = ("run", "-n", 1, "--timeout", TIMEOUT, "--", "true")
# One GPU is claimed, so that a claim of eight waits.
COMMANDS: dict[tuple[object, ...], tuple[int, ...]] = {
    ("run", "-n", 8, "--timeout", TIMEOUT, "--", "true"): (LATE, UNUSABLE),
    ("wait", "-n", 8, "--timeout", TIMEOUT): (LATE, UNUSABLE),
    ("status", "--json"): (0,),
    ("doctor",): (0, 1),
}


@pytest.fixture
def used(state_dir: Path, ground: Any) -> Path:
    """A state directory where each GPU was claimed once. GPU 0 is claimed."""
    claim(8).release_gpus()
    ground.hold(0)
    return state_dir


@pytest.fixture
def check(cost: Callable[..., Any]) -> Callable[..., None]:
    """Run every command, or one that is to end with one of these codes."""

    def run(commands: dict[tuple[object, ...], tuple[int, ...]] = COMMANDS) -> None:
        for command, codes in commands.items():
            taken = cost(*command)
            assert taken.code in codes, f"{command}: {taken}"
            assert "Traceback" not in taken.err + taken.out, f"{command}: {taken}"
            assert taken.seconds < TIMEOUT + SLACK, f"{command}: {taken}"
            assert taken.mebibytes < MOST, f"{command}: {taken}"
            assert len(taken.out) + len(taken.err) < LONGEST, f"{command}: {taken}"

    return run


def places(where: str, used: Path, uuids: list[str]) -> list[Path]:
    """host.lock; or an entry of a claim, the note of a GPU, and a ticket."""
    if where == "host.lock":
        return [used / "host.lock"]
    (used / "faults").mkdir()
    (used / "faults").chmod(0o1777)
    return [used / name for name in (f"claims/{entry_name(1)}", f"faults/{uuids[2]}.4711", f"queue/{entry_name(1)}")]


def entry_name(number: int) -> str:
    return f"{number}.{number:016x}"


@pytest.mark.parametrize("where", ["host.lock", "others"])
def test_file_leases(used: Path, ground: Any, file_lease: Any, check: Any, where: str) -> None:
    for path in places(where, used, ground.uuids):
        path.touch()
        file_lease(path, NEIGHBOUR)
    check()
    check({CLAIM: (UNUSABLE,) if where == "host.lock" else (0,)})


@long
@pytest.mark.parametrize("kind", ["FIFO", "directory", "terabyte", "link"])
@pytest.mark.parametrize("where", ["host.lock", "others"])
def test_other_kinds_of_files(used: Path, ground: Any, check: Any, where: str, kind: str, open_tmp: Path) -> None:
    precious = open_tmp / "precious"
    precious.write_text("precious")
    for path in places(where, used, ground.uuids):
        path.unlink(missing_ok=True)
        if kind == "FIFO":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        elif kind == "link":
            path.symlink_to(precious)
        else:
            path.touch()
            path.chmod(0o666)
            os.truncate(path, 1 << 40)
    check()
    check({CLAIM: (UNUSABLE,) if where == "host.lock" and kind != "terabyte" else (0,)})
    assert precious.read_text() == "precious"


def test_a_wide_process(used: Path, ground: Any, entry_of: Any, check: Any, wide: int) -> None:
    """It is in a claim, in a ticket and on a GPU."""
    ground.hold(2, pid=wide)
    ground.occupy(1, pid=wide)
    entry_of(NEIGHBOUR, {"pid": wide, "nb_gpus": 8, "gpus": ground.uuids[5:6]}, part="queue")
    check({**COMMANDS, ("affinity", "--of", wide): (0, 1)})
