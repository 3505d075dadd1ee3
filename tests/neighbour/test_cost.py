"""What a neighbour can make a command cost: no time beyond its deadline, and little memory, whatever lies there."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.claims import claim
from support.real import long

from safe_gpu.affinity import placement as placements
from safe_gpu.host import procfs

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
    """host.lock; or an entry of a claim, the note of a GPU, a ticket, and the history."""
    if where == "host.lock":
        return [used / "host.lock"]
    (used / "faults").mkdir()
    (used / "faults").chmod(0o1777)
    names = (f"claims/{entry_name(1)}", f"faults/{uuids[2]}.4711", f"queue/{entry_name(1)}")
    return [*(used / name for name in names), *(used / "history").glob("*.jsonl")]


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


# Wide processes and long texts


def test_of_a_wide_process_little_is_read(wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    genuine = procfs.read_start

    def spied(path: str, limit: int = 1 << 16) -> bytes | None:
        data = genuine(path, limit)
        sizes.append((path.rpartition("/")[2], len(data or b"")))
        return data

    monkeypatch.setattr(procfs, "read_start", spied)
    monkeypatch.setattr(placements, "read_start", spied)
    assert (procfs.command_of(wide) or "").startswith("wide")
    placements.placement(wide)
    assert max(size for name, size in sizes if name == "cmdline") <= 4096
    assert max(size for name, size in sizes if name == "environ") == 65536


@pytest.mark.parametrize("text", ["a" + "\u0301" * 60_000, "x" * 60_000])
def test_long_texts_in_entries_are_cut(ground: Any, cost: Callable[..., Any], text: str) -> None:
    ground.hold(*range(8), job=text[:2000], command=text[:50_000].encode()[:60_000].decode(errors="ignore"))
    for arguments in ((), ("--json",)):
        taken = cost("status", *arguments)
        assert taken.code == 0
        assert len(taken.out) < (32_000 if arguments else 8_000)
        assert taken.mebibytes < MOST


def test_a_process_with_too_many_descriptors_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert procfs.open_files(os.getpid())
    monkeypatch.setattr(procfs, "_MOST_FILES", 1)
    assert procfs.open_files(os.getpid()) is None
