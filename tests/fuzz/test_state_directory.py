"""A real state directory with anybody's garbage in it: claims succeed, and commands show plain text, not too much."""

import contextlib
import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import hostile
from support.hostile import CLAIM, ENDING, FAULT, JUNK, NOW, RECORD, TICKET, TRICK, bounded, broken_json, open_files

import safe_gpu
from safe_gpu.coordination.history import file_names, month_of

HELD = 4
"""GPUs of eight whose leases a neighbour holds, with anything in them."""

FINE, FINDINGS, LATE = 0, 1, 75
COMMANDS = (
    "status", "status --json", "status --prometheus", "history", "history --json", "history --by job",
    "history --report month", "wait -n 1 --timeout 0", "policy",
)  # fmt: skip

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
            free[f"faults/{uuid}.0"] = draw(broken_json(FAULT, most=2))
        if draw(st.integers(0, 5)) == 0:
            free[f"history/{uuid}.idle"] = draw(st.sampled_from(JUNK))
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


def changed(document: dict[str, Any], **values: Any) -> bytes:
    return json.dumps({**document, **values}).encode()


def write(state_dir: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = os.fsencode(state_dir) + b"/" + name.encode("utf-8", "surrogateescape")
        os.makedirs(os.path.dirname(path), exist_ok=True)
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


def judge(run: Any, state_dir: Path, uuids: list[str], free: Files, locked: Files) -> None:
    shutil.rmtree(state_dir, ignore_errors=True)
    safe_gpu.GPUOwner(8, safe_gpu.NoPlaceholder(), affinity=None, timeout=0).release_gpus()
    (state_dir / "history").mkdir(mode=0o1777, exist_ok=True)
    before, environment = open_files(), dict(os.environ)
    write(state_dir, {**free, **locked})
    with locked_by_a_neighbour(state_dir, [f"leases/{uuid}.lock" for uuid in uuids[:HELD]]):
        for arguments in COMMANDS:
            run(arguments)
        run("wait -n 8 --timeout 0", LATE)
        with bounded(), safe_gpu.GPUOwner(8 - HELD, safe_gpu.NoPlaceholder(), affinity=None, timeout=0) as owner:
            assert owner.devices_taken == list(range(HELD, 8)), "garbage of others does not stand in the way"
            run("status")
        with contextlib.suppress(safe_gpu.NotEnoughGpusError):
            safe_gpu.GPUOwner(8, safe_gpu.NoPlaceholder(), affinity=None, timeout=0)
            pytest.fail("leases that a neighbour holds were taken")
    assert dict(os.environ) == environment
    assert open_files() <= before + 1
    with safe_gpu.GPUOwner(8, safe_gpu.NoPlaceholder(), affinity=None, timeout=0):
        pass


def test_garbage_in_every_file(run: Any, state_dir: Path, uuids: list[str]) -> None:
    @hostile.examples(4)
    @given(garbage(uuids))
    @hostile.with_examples(
        [{}, {}],
        [{f"leases/{uuid}.lock": changed(RECORD, gpus=[TRICK]) for uuid in uuids}, {}],
        [{}, {f"leases/{uuids[0]}.lock": changed(RECORD, gpus=[TRICK] * 900)}],
        [{}, {f"leases/{uuids[0]}.lock": changed(RECORD, since=1, until=9e10)}],
        [{f"history/{month_of(NOW)}.jsonl": changed(CLAIM, labels=[TRICK], gpus=[TRICK])}, {}],
        [{f"history/{month_of(NOW)}.jsonl": changed(CLAIM, job="x" * 60_000)}, {}],
        [{f"faults/{uuids[7]}.0": changed(FAULT, error=TRICK * 99)}, {}],
        [{f"faults/{uuids[7]}.0": changed(FAULT, when=math.nan, error="")}, {}],
    )
    def attack(files: tuple[Files, Files]) -> None:
        judge(run, state_dir, uuids, *files)

    attack()


def test_doctor_and_affinity_say_nothing_of_others(run: Any, state_dir: Path, uuids: list[str]) -> None:
    record = changed(RECORD, user=TRICK, host=TRICK, job=TRICK, command=TRICK, gpus=[TRICK])
    safe_gpu.GPUOwner(8, safe_gpu.NoPlaceholder(), affinity=None, timeout=0).release_gpus()
    write(state_dir, {**{f"leases/{uuid}.lock": record for uuid in uuids}, "queue/1.ticket": b"\x1b" * 70_000})
    for name in (TRICK, "\udcff" * 9):
        write(state_dir, {f"faults/{name}.0": b"", f"queue/{name}.ticket": b"", f"{name}": b""})
    run("doctor", FINE, FINDINGS)
    run("doctor --json", FINE, FINDINGS)
    run("affinity")
    run("affinity --json")


@pytest.mark.parametrize("content", [*JUNK[1:], changed(TICKET, user=TRICK), b'{"pid": ' + b"9" * 5000])
def test_a_live_ticket_that_makes_no_sense_is_waited_for(run: Any, state_dir: Path, uuids: Any, content: bytes) -> None:
    """It may stand for any request, so a claim behind it ends as one that waits does, and names what it waits for."""
    safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0).release_gpus()
    write(state_dir, {"queue/1.ticket": content})
    with locked_by_a_neighbour(state_dir, ["queue/1.ticket"]):
        run("status")
        run("status --json")
        run("wait --timeout 0", FINE, LATE)
    run("wait --timeout 0")
