"""What a neighbour can make a command wait: not beyond its deadline, and with little memory, whatever lies there."""

import fcntl
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.real import long

import safe_gpu
from safe_gpu.coordination.leases.file_names import lease_name

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
    ("status", "--json"): (0, UNUSABLE),
    ("doctor",): (0, 1),
}


@pytest.fixture
def used(state_dir: Path, ground: Any) -> Path:
    """A state directory where each GPU was claimed once, and somebody waited. GPU 0 is claimed."""
    safe_gpu.GPUOwner(8, safe_gpu.NoPlaceholder(), affinity=None, timeout=0).release_gpus()
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
    """host.lock; or the lease of a GPU that is free by the driver, the note of another one, and a ticket."""
    if where == "host.lock":
        return [used / "host.lock"]
    (used / "faults").mkdir()
    (used / "faults").chmod(0o1777)
    return [used / name for name in (f"leases/{lease_name(uuids[1])}", f"faults/{uuids[2]}.4711", "queue/1.ticket")]


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


REQUEST = '{"pid": %d, "user": "x", "since": 1, "request": {"nb_gpus": %s, "gpus": ["%s"]}, "hold_for": %s}'
RUBBISH = [
    "",
    "\0",
    REQUEST % (1, "9" * 4000, "x", "1"),
    REQUEST % (1, "1e999", "x", "Infinity"),
    REQUEST % (-1, "1", "x", "NaN"),
    "[" * 60_000,
    '{"user": "' + "x" * 900_000,
]
CROWD = 1100


@pytest.fixture
def crowd(used: Path) -> Iterator[Callable[..., None]]:
    """Tickets with these contents, live or dead; every hundredth of the long ones, which take room on the disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * CROWD:
        pytest.skip("cannot hold so many locks here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as stack:

        def make(contents: list[str], *, live: bool) -> None:
            for number in range(1, CROWD + 1):
                content = contents[number % len(contents)]
                file = stack.enter_context(open(used / "queue" / f"{number}.ticket", "w"))
                file.write(content if len(content) < 5000 or number % 100 < len(contents) else "")
                file.flush()
                os.fchmod(file.fileno(), 0o644)
                if live:
                    fcntl.flock(file, fcntl.LOCK_EX)

        yield make
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@long
@pytest.mark.parametrize("live", [True, False], ids=["live", "dead"])
def test_a_crowd_of_rubbish(crowd: Any, check: Any, live: bool) -> None:
    crowd(RUBBISH, live=live)
    check()
    check({CLAIM: (LATE,) if live else (0,), ("status",): (0,)})


@long
@pytest.mark.parametrize("competes", [True, False])
def test_a_crowd_of_waiters(crowd: Any, check: Any, ground: Any, competes: bool) -> None:
    wanted = ground.uuids if competes else ["x"]
    requests = [REQUEST % (1, nb, '", "'.join(wanted), hold) for nb in "1278" for hold in (1, 3600, "null")]
    crowd(requests if competes else requests[:2], live=True)
    check()
    check({CLAIM: (LATE,) if competes else (0,), ("status",): (0,)})


def test_a_wide_process(used: Path, ground: Any, check: Any, wide: int) -> None:
    """It is in a record, in a ticket and on a GPU."""
    (used / "leases" / lease_name(ground.uuids[0])).write_text(f'{{"pid": {wide}, "user": "x", "command": "y"}}')
    ground.occupy(1, pid=wide)
    with open(used / "queue" / "1.ticket", "w") as file:
        file.write(REQUEST % (wide, "8", ground.uuids[5], "null"))
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        check({**COMMANDS, ("affinity", "--of", wide): (0, 1)})
