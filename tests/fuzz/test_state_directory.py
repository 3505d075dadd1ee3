"""A real state directory with anybody's garbage in it: claims succeed, and commands show plain text, not too much."""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import hostile
from support.hostile import CLAIM, ENDING, ENTRY, FAULT, JUNK, NOW, TICKET, TRICK, bounded, broken_json, open_files

import safe_gpu
from safe_gpu.coordination.history import file_names, month_of
from safe_gpu.host.locks import lock

HELD = 4
"""GPUs of eight that a neighbour holds."""

FINE, FINDINGS, LATE = 0, 1, 75
COMMANDS = (
    "status", "status --json", "status --prometheus", "history", "history --json", "history --by job",
    "history --report month", "wait -n 1 --timeout 0", "policy",
)  # fmt: skip

AA = "a" * 16
NAMES = st.sampled_from(
    ["x", ".x", f".{AA}", f"01.{AA}", f"{'9' * 18}.{AA}", f"{'9' * 40}.{AA}", f"-1.{AA}", f"\u0661.{AA}",
     TRICK.replace("/", "").replace("\x00", ""), "\udcff\udcfe", "n" * 255, "2026-13.jsonl", "x.fault"]
)  # fmt: skip
Files = dict[str, bytes]


@st.composite
def garbage(draw: Any, uuids: list[str]) -> tuple[Files, Files]:
    """Contents of files by their path in the state directory, and of such that are kept locked."""
    dead, living = {}, {}
    for number, uuid in enumerate(uuids):
        of_gpu = {**ENTRY, "gpus": {uuid: None}}
        if draw(st.integers(0, 2)) == 0:
            (living if number < HELD else dead)[f"claims/{number}.{AA}"] = draw(broken_json(of_gpu, most=2))
        if draw(st.integers(0, 5)) == 0:
            dead[f"faults/{uuid}.0"] = draw(broken_json(FAULT, most=2))
        if draw(st.integers(0, 5)) == 0:
            dead[f"history/{uuid}.idle"] = draw(st.sampled_from(JUNK))
    for number in range(draw(st.integers(0, 3))):
        (living if draw(st.booleans()) else dead)[f"queue/{number + 1}.{AA}"] = draw(broken_json(TICKET, most=2))
    month = month_of(NOW)
    for name in file_names(month)[: draw(st.integers(0, 2))]:
        lines = draw(st.lists(broken_json(CLAIM, most=2) | broken_json(ENDING, most=2), max_size=3))
        dead[f"history/{name}"] = b"\n".join(lines)
    for _ in range(draw(st.integers(0, 2))):
        where = draw(st.sampled_from(["", "claims/", "queue/", "history/"]))
        dead[where + draw(NAMES)] = draw(st.sampled_from(JUNK))
    dead["host.lock"] = draw(st.sampled_from(JUNK[:3]))
    return dead, living


def changed(document: dict[str, Any], **values: Any) -> bytes:
    return json.dumps({**document, **values}).encode()


def write(state_dir: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = os.fsencode(state_dir) + b"/" + name.encode("utf-8", "surrogateescape")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
        os.chmod(path, 0o644 if name.startswith(("claims/", "queue/")) else 0o666)


@contextlib.contextmanager
def locked(state_dir: Path, names: Iterable[str]) -> Iterator[None]:
    """Lock these files as living entries are."""
    with contextlib.ExitStack() as kept:
        for name in names:
            lock(kept.enter_context(open(state_dir / name, "r+b")).fileno())
        yield


def judge(run: Any, state_dir: Path, ground: Any, dead: Files, living: Files) -> None:
    shutil.rmtree(state_dir, ignore_errors=True)
    ground.hold(*range(HELD), uid=4711)
    (state_dir / "history").mkdir(mode=0o1777, exist_ok=True)
    before, environment = open_files(), dict(os.environ)
    write(state_dir, {**dead, **living})
    with locked(state_dir, living):
        for arguments in COMMANDS:
            run(arguments)
        run("wait -n 8 --timeout 0", LATE)
        run("doctor --json", FINE, FINDINGS)
        run("affinity --json")
        with bounded(), safe_gpu.GPUOwner(8 - HELD, safe_gpu.NoPlaceholder(), affinity=None, timeout=0) as owner:
            assert owner.devices_taken == list(range(HELD, 8)), "garbage of others does not stand in the way"
            run("status")
            run("history")  # with the ends of the dead
        with contextlib.suppress(safe_gpu.NotEnoughGpusError):
            safe_gpu.GPUOwner(8, safe_gpu.NoPlaceholder(), affinity=None, timeout=0)
            pytest.fail("GPUs that a neighbour holds were taken")
    assert dict(os.environ) == environment
    assert open_files() <= before + 1
    ground.let_go()
    with safe_gpu.GPUOwner(8, safe_gpu.NoPlaceholder(), affinity=None, timeout=0):
        pass


def test_garbage_in_every_file(run: Any, state_dir: Path, ground: Any) -> None:
    uuids = ground.uuids

    @hostile.examples(4)
    @given(garbage(uuids))
    @hostile.with_examples(
        [{}, {}],
        [{f"claims/{number}.{AA}": changed(ENTRY, gpus={TRICK: None}) for number in range(8)}, {}],
        [{}, {f"claims/9.{AA}": changed(ENTRY, gpus={TRICK: TRICK})}],
        [{}, {f"claims/9.{AA}": changed(ENTRY, host=TRICK, job=TRICK, command=TRICK)}],
        [{}, {f"claims/9.{AA}": changed(ENTRY, gpus={uuids[0]: None}, since=1, until=9e10)}],
        [{}, {f"queue/9.{AA}": changed(TICKET, gpus=[TRICK], command=TRICK)}],
        [{}, {f"queue/9.{AA}": changed(TICKET, near=TRICK, **{TRICK: TRICK})}],
        [{f"history/{month_of(NOW)}.jsonl": changed(CLAIM, labels=[TRICK], gpus=[TRICK])}, {}],
        [{f"history/{month_of(NOW)}.jsonl": changed(CLAIM, job="x" * 60_000)}, {}],
        [{f"faults/{uuids[7]}.0": changed(FAULT, error=TRICK * 99)}, {}],
        [{f"faults/{uuids[7]}.0": changed(FAULT, when=math.nan, error="")}, {}],
    )
    def attack(files: tuple[Files, Files]) -> None:
        judge(run, state_dir, ground, *files)

    attack()
