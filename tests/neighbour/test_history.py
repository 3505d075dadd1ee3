"""A history that several users write, and what one of them can do to the others."""

import csv
import io
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu.coordination import history
from safe_gpu.status import history as past
from safe_gpu.status.history import claims_between

USERS = (4711, 4712, 4713)
MOST = 256  # MiB beyond an empty history
PART = 8  # of which these tests take one, of the bounds too: full files take long to write
SMALL = f"""
from safe_gpu.coordination import history
history.LARGEST //= {PART}
from safe_gpu.status import history as claims
for bound in ("_MOST", "_MOST_LATER"):
    setattr(claims, bound, getattr(claims, bound) // {PART})
"""


def claim(say: Callable[[object], None], listen: Callable[[], str]) -> None:
    safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0).release_gpus()
    say("released")


def test_each_user_appends_to_the_same_file(state_dir: Path, as_user: Any) -> None:
    for uid in USERS:
        assert as_user(claim, uid=uid, umask=0o077).hear() == "released"
    assert len(list((state_dir / history.NAME).iterdir())) == 1

    def look(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        claims, warnings = claims_between(0, time.time() + 1)
        say(f"{[(one.uid, one.ended is not None) for one in claims]} {warnings}")

    assert as_user(look, uid=USERS[0]).hear() == f"{[(uid, True) for uid in USERS]} []"


def test_a_file_that_its_owner_closes_is_passed(state_dir: Path, as_user: Any) -> None:
    assert as_user(claim, uid=USERS[0]).hear() == "released"
    (file,) = (state_dir / history.NAME).iterdir()
    os.chmod(file, 0o600)
    assert as_user(claim, uid=USERS[1]).hear() == "released"
    claims, warnings = claims_between(0, time.time() + 1)
    assert [one.uid for one in claims] == [USERS[1]]  # root reads no closed file in a directory of another user
    assert "has mode 0600 in place of 0666" in warnings[0]


NOW = 1_795_000_000.0  # in November 2026


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")
def test_names_of_months_that_never_were_remove_nothing(state_dir: Path) -> None:
    """Root, and the owner of the directory, may unlink everybody's files, but do so with their own only."""
    state_dir.mkdir()
    state_dir.chmod(0o1777)
    directory = state_dir / history.NAME
    assert history.append([b"{}\n"], NOW - 31 * 86400)
    odd = [f"2026-0{letter}.jsonl" for letter in "abcdefghijklmnopqrstuvwxyz:;<=>"]
    odd += ["2020-13.jsonl", "2020-00.jsonl", "2020-01.4.jsonl", "2020-01.jsonl.old", "2020-01.idle"]
    others = ["2020-01.jsonl", "2026-08.jsonl", "2026-08.1.jsonl"]
    kept = ["2024-12.jsonl", "2026-10.jsonl", "2026-12.jsonl", "9999-12.jsonl"]
    for name in [*odd, *others, *kept, "2024-11.3.jsonl", "2020-02.jsonl"]:
        (directory / name).touch()
    for name in others:
        os.chown(directory / name, USERS[0], USERS[0])
    directory.chmod(0o755)  # perhaps somebody's own directory
    assert history.append([b"{}\n"], NOW)
    (directory / "2026-11.jsonl").unlink()
    assert (directory / "2020-02.jsonl").exists()
    directory.chmod(0o1777)
    assert history.append([b"{}\n"], NOW)
    assert sorted(os.listdir(directory)) == sorted([*odd, *others, *kept, "2026-11.jsonl"])


# What a neighbour writes


@pytest.fixture
def directory(state_dir: Path) -> Path:
    """The directory of the history of a host that has been used."""
    for path in (state_dir, state_dir / "claims", state_dir / history.NAME):
        path.mkdir()
        path.chmod(0o1777)
    return state_dir / history.NAME


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o666)


COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def line(number: int, **facts: object) -> bytes:
    """A claim, with as few bytes as that takes."""
    told = {"claim": [number % 1_000_000 + 1, int(time.time()) - 60 - number // 1_000_000], **facts}
    return COMPACT.encode(told).encode() + b"\n"


WIDE = "\U0001f600"  # makes each character of a text take four bytes


def long_fields(number: int) -> bytes:
    lengths = {"user": 64, "host": 64, "job": 100, "command": 200}
    texts = {key: f"{number}{WIDE}".ljust(length, "x") for key, length in lengths.items()}
    return line(number, **texts, gpus=[f"{number}{WIDE}".ljust(100, "g")], labels=[f"{number}{WIDE}"])


def as_ours(number: int) -> bytes:
    """A claim that might wait for its end."""
    return b'{"v": 1, "claim": [%d, %d.5], "uid": 1, "gpus": ["a"]}\n' % (number + 1, time.time() - 60)


def many_gpus(number: int) -> bytes:
    gpus = [f"{1024 * number + gpu:x}" for gpu in range(1024)]
    return line(number, gpus=gpus, labels=gpus)


@pytest.mark.parametrize(
    ("files", "write_line", "arguments"),
    [
        (1, lambda number: line(number, gpus=["a"]), ()),
        (2, lambda number: line(number, ended=int(time.time())), ()),
        (2, as_ours, ("--by", "user")),
        (2, long_fields, ("--json",)),
        (2, many_gpus, ("--by", "gpu")),
        (1, lambda number: line(number, gpus=["a"], user=f"{number}", waited=1e9), ("--report", "year")),
    ],
    ids=["short", "ends", "ours", "long fields", "GPUs", "waits"],
)
def test_full_files_take_little_memory(
    directory: Path,
    cost: Callable[..., Any],
    files: int,
    write_line: Callable[[int], bytes],
    arguments: tuple[str, ...],
) -> None:
    def lines(first: int) -> Iterator[bytes]:
        size, number = 0, first
        while size < history.LARGEST // PART:
            yield (data := write_line(number))
            size, number = size + len(data), number + 1

    empty = cost("history", *arguments, before=SMALL)
    for part, name in enumerate(history.file_names(history.month_of(time.time()))[:files]):
        write(directory / name, b"".join(lines(part * 400_000 // PART)))
    taken = cost("history", *arguments, before=SMALL)
    assert taken.code == 0
    assert taken.err.count("\n") <= 1
    assert taken.mebibytes - empty.mebibytes < MOST / PART + 1  # the allocator rounds


def test_the_future_is_not_read_and_a_file_of_empty_lines_is_left_soon(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)
    read: list[bytes] = []
    genuine = past._line
    monkeypatch.setattr(past, "_line", lambda line: read.append(line) or genuine(line))
    now = line(1, gpus=["a"])
    write(directory / "2026-11.jsonl", now)
    for name in ("2026-12.jsonl", "2027-01.2.jsonl", "9999-01.jsonl"):
        write(directory / name, line(2, gpus=["a"]))
    claims, warnings = claims_between(0, NOW)
    assert ([one.pid for one in claims], warnings) == ([2], [])
    assert read == [now]
    write(directory / "2026-11.jsonl", b"\n" * history.LARGEST)
    claims_between(0, NOW)
    assert len(read) == 1 + history.LARGEST // 64


def test_a_spreadsheet_runs_no_cell(directory: Path, command: Any) -> None:
    text = '=HYPERLINK("http://x","y")'
    facts = {"user": text, "host": text, "job": text, "command": text, "gpus": [text], "labels": [text]}
    write(directory / history.file_names(history.month_of(time.time()))[0], line(1, **facts))
    for arguments in ((), ("--by", "user"), ("--by", "gpu"), ("--by", "job"), ("--report", "month")):
        done = command.run("history", "--csv", *arguments)
        row = next(csv.DictReader(io.StringIO(done.stdout)))
        numbers = {key for key, cell in row.items() if key == "uid" or not cell.strip("0123456789.")}
        assert row.get("uid", "-1") == "-1"
        assert not [cell for key, cell in row.items() if key not in numbers and cell[0] in "=+-@"]


# Entries of neighbours


@pytest.mark.parametrize("hostile", ["link", "file", "many"])
def test_a_hostile_directory_of_claims_costs_what_runs_now(
    directory: Path, hostile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("safe_gpu.coordination.entry.MOST_NAMES", 2)
    write(directory / history.file_names(history.month_of(time.time()))[0], line(1, gpus=["a"]))
    claims = directory.parent / "claims"
    if hostile == "many":
        for number in range(3):
            write(claims / f"{number}", b"")
    else:
        claims.rmdir()
        claims.touch() if hostile == "file" else claims.symlink_to("/etc")
    (one,), (warning,) = claims_between(0, time.time() + 1)
    assert one.pid == 2
    assert "which claims hold GPUs now is not known" in warning
