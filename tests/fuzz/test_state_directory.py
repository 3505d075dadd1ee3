"""A real state directory with anybody's garbage in it: claims succeed, and commands show plain text, not too much."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.hostile import JUNK, TRICK, assert_plain, assert_shown_safely, bounded, broken_json, examples, open_files

import safe_gpu
from safe_gpu.cli import main
from safe_gpu.coordination.history import file_names, month_of

HELD = 4
"""GPUs of eight whose leases a neighbour holds, with anything in them."""

FINE, FINDINGS, LATE = 0, 1, 75
COMMANDS: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...] = (
    (("status",), (FINE,)),
    (("status", "--json"), (FINE,)),
    (("status", "--prometheus"), (FINE,)),
    (("history",), (FINE,)),
    (("history", "--json"), (FINE,)),
    (("history", "--by", "job"), (FINE,)),
    (("wait", "-n", "1", "--timeout", "0"), (FINE,)),
    (("wait", "-n", "8", "--timeout", "0"), (LATE,)),
    (("policy",), (FINE,)),
)

NOW = round(time.time(), 3)
RECORD = {
    "v": 1, "pid": os.getpid(), "start": 1, "uid": 1000, "user": "anna", "host": "gpu1", "job": "sge:4711.3",
    "command": "python train.py", "gpus": ["GPU-1"], "since": NOW - 60, "until": NOW + 60, "token": "", "pidns": None,
}  # fmt: skip
TICKET = {"pid": 1, "pidns": None, "user": "anna", "since": NOW - 5, "hold_for": 60.0,
          "request": {"nb_gpus": 1, "gpus": ["GPU-1"], "min_memory": None}}  # fmt: skip
FAULT = {"when": NOW, "error": "CUDA_ERROR_ECC_UNCORRECTABLE"}
CLAIM = {**RECORD, "claim": [os.getpid(), NOW - 60], "labels": ["0"]}
ENDING = {"v": 1, "claim": [os.getpid(), NOW - 60], "ended": NOW}
IDLE = {"v": 1, "claim": NOW - 60, "idle": NOW - 50}

NAMES = st.sampled_from(
    ["x", ".x", "GPU-1.lock", "1.ticket", "01.ticket", "9" * 18 + ".ticket", "9" * 40 + ".ticket", "-1.ticket",
     "\u0661.ticket", TRICK.replace("/", "").replace("\x00", ""), "\udcff\udcfe", "n" * 255, "2026-13.jsonl", "x.fault"]
)  # fmt: skip
Files = dict[str, bytes]


@st.composite
def garbage(draw: Any, uuids: list[str]) -> tuple[Files, Files]:
    """Contents of files by their path in the state directory, and of such that a neighbour keeps locked."""
    free, locked = {}, {}
    for number, uuid in enumerate(uuids):
        of_gpu = {**RECORD, "gpus": [uuid]}
        if draw(st.integers(0, 2)) == 0:
            (locked if number < HELD else free)[f"leases/{uuid}.lock"] = draw(broken_json(of_gpu, most=2))
        if draw(st.integers(0, 5)) == 0:
            free[f"leases/{uuid}.fault"] = draw(broken_json(FAULT, most=2))
        if draw(st.integers(0, 5)) == 0:
            free[f"history/{uuid}.idle"] = draw(broken_json(IDLE, most=2))
    for number in range(draw(st.integers(0, 3))):
        free[f"queue/{number + 1}.ticket"] = draw(broken_json(TICKET, most=2))
    month = month_of(NOW)
    for name in file_names(month)[: draw(st.integers(0, 2))]:
        lines = draw(st.lists(broken_json(CLAIM, most=2) | broken_json(ENDING, most=2), max_size=3))
        free[f"history/{name}"] = b"\n".join(lines)
    for _ in range(draw(st.integers(0, 2))):
        where = draw(st.sampled_from(["", "leases/", "queue/", "history/"]))
        free[where + draw(NAMES)] = draw(st.sampled_from(JUNK))
    free["host.lock"] = draw(st.sampled_from(JUNK[:3]))
    return free, locked


def write(state_dir: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = os.fsencode(state_dir) + b"/" + name.encode("utf-8", "surrogateescape")
        with open(path, "wb") as file:
            file.write(data)
        os.chmod(path, 0o666)


@contextlib.contextmanager
def locked_by_a_neighbour(state_dir: Path, names: list[str]) -> Iterator[None]:
    with contextlib.ExitStack() as kept:
        for name in names:
            path = state_dir / name
            path.touch()
            fcntl.flock(kept.enter_context(open(path)), fcntl.LOCK_EX)
        yield


@pytest.fixture
def uuids(ground: Any) -> list[str]:
    return list(ground.uuids)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[[tuple[str, ...], tuple[int, ...]], str]:
    """Run a command in this process and judge how it ends and what it shows; returns its output."""

    def command(arguments: tuple[str, ...], codes: tuple[int, ...]) -> str:
        capsys.readouterr()
        with bounded():
            code = main(list(arguments))
        out, err = capsys.readouterr()
        assert code in codes, (arguments, code, err[:500])
        assert_shown_safely(err)
        assert_shown_safely(out, 60_000)
        if "--json" in arguments:
            assert_plain(json.loads(out, parse_constant=pytest.fail))
        return out

    return command


def judge(run: Any, state_dir: Path, uuids: list[str], free: Files, locked: Files) -> None:
    shutil.rmtree(state_dir, ignore_errors=True)
    safe_gpu.GPUOwner(8, safe_gpu.NoPlaceholder(), affinity=None, timeout=0).release_gpus()
    (state_dir / "history").mkdir(mode=0o1777, exist_ok=True)
    before, environment = open_files(), dict(os.environ)
    write(state_dir, {**free, **locked})
    with locked_by_a_neighbour(state_dir, [f"leases/{uuid}.lock" for uuid in uuids[:HELD]]):
        for arguments, codes in COMMANDS:
            run(arguments, codes)
        with bounded(), safe_gpu.GPUOwner(8 - HELD, safe_gpu.NoPlaceholder(), affinity=None, timeout=0) as owner:
            assert owner.devices_taken == list(range(HELD, 8)), "garbage of others does not stand in the way"
            run(("status",), (FINE,))
        with contextlib.suppress(safe_gpu.NotEnoughGpusError):
            safe_gpu.GPUOwner(8, safe_gpu.NoPlaceholder(), affinity=None, timeout=0)
            pytest.fail("leases that a neighbour holds were taken")
    assert dict(os.environ) == environment
    assert open_files() <= before + 1
    with safe_gpu.GPUOwner(8, safe_gpu.NoPlaceholder(), affinity=None, timeout=0):
        pass


def test_garbage_in_every_file(run: Any, state_dir: Path, uuids: list[str]) -> None:
    @examples(6)
    @given(garbage(uuids))
    @example(({}, {}))
    @example(({f"leases/{uuid}.lock": json.dumps({**RECORD, "gpus": [TRICK]}).encode() for uuid in uuids}, {}))
    @example(({}, {f"leases/{uuids[0]}.lock": json.dumps({**RECORD, "gpus": [TRICK] * 900}).encode()}))
    @example(({}, {f"leases/{uuids[0]}.lock": json.dumps({**RECORD, "since": 1, "until": 9e10}).encode()}))
    @example(
        ({f"history/{month_of(NOW)}.jsonl": json.dumps({**CLAIM, "labels": [TRICK], "gpus": [TRICK]}).encode()}, {})
    )
    @example(({f"history/{month_of(NOW)}.jsonl": json.dumps({**CLAIM, "job": "x" * 60_000}).encode()}, {}))
    @example(({f"leases/{uuids[7]}.fault": json.dumps({"when": NOW, "error": TRICK * 99}).encode()}, {}))
    @example(({f"leases/{uuids[7]}.fault": b'{"when": NaN, "error": ""}'}, {}))
    def attack(files: tuple[Files, Files]) -> None:
        judge(run, state_dir, uuids, *files)

    attack()


def test_doctor_and_affinity_say_nothing_of_others(run: Any, state_dir: Path, uuids: list[str]) -> None:
    record = json.dumps(
        {**RECORD, **dict.fromkeys(("user", "host", "job", "command"), TRICK), "gpus": [TRICK]}
    ).encode()
    safe_gpu.GPUOwner(8, safe_gpu.NoPlaceholder(), affinity=None, timeout=0).release_gpus()
    write(state_dir, {**{f"leases/{uuid}.lock": record for uuid in uuids}, "queue/1.ticket": b"\x1b" * 70_000})
    for name in (TRICK, "\udcff" * 9):
        write(state_dir, {f"leases/{name}.fault": b"", f"queue/{name}.ticket": b"", f"{name}": b""})
    run(("doctor",), (FINE, FINDINGS))
    run(("doctor", "--json"), (FINE, FINDINGS))
    run(("affinity",), (FINE,))
    run(("affinity", "--json"), (FINE,))


@pytest.mark.parametrize(
    "content", [*JUNK[1:], json.dumps({**TICKET, "user": TRICK}).encode(), b'{"pid": ' + b"9" * 5000]
)
def test_a_live_ticket_that_makes_no_sense_is_waited_for(
    run: Any, state_dir: Path, uuids: list[str], content: bytes
) -> None:
    """It may stand for any request, so a claim behind it ends as one that waits does, and names what it waits for."""
    safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0).release_gpus()
    write(state_dir, {"queue/1.ticket": content})
    with locked_by_a_neighbour(state_dir, ["queue/1.ticket"]):
        run(("status",), (FINE,))
        run(("status", "--json"), (FINE,))
        run(("wait", "--timeout", "0"), (FINE, LATE))
    run(("wait", "--timeout", "0"), (FINE,))
