"""The demo on simulated hosts of every kind: it ends well, with a true verdict."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import safe_gpu
from safe_gpu.coordination import leases
from safe_gpu.coordination import locks as host_lock
from safe_gpu.coordination import queue as waiting
from safe_gpu.coordination import socket_names as names
from safe_gpu.demo import racers
from safe_gpu.devices import Gpu
from safe_gpu.drivers import presets
from safe_gpu.drivers.presets import Cpus, Preset, SimulatedGpu


def host_of(count: int) -> Preset:
    """A headless host with so many equal GPUs."""
    gpus = (
        SimulatedGpu(f"GPU-{i:08x}-0000-1111-2222-{i:012x}", 1 + 16 * i, 0, "NVIDIA L40S", 46068) for i in range(count)
    )
    return Preset(f"headless-{count}", Cpus(packages=1, nodes=1, cores=8, llc=8), tuple(gpus))


class OneLost(Preset):
    """A host whose GPU 1 the driver has lost."""

    def gpus(self) -> tuple[Gpu, ...]:
        return tuple(replace(gpu, lost=True) if gpu.index == 1 else gpu for gpu in super().gpus())


@pytest.fixture(autouse=True)
def further_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    three = host_of(3)
    for host in (host_of(1), host_of(2), OneLost("one-lost", three.cpus, three.devices)):
        monkeypatch.setitem(presets.PRESETS, host.name, host)


@pytest.mark.parametrize(
    ("preset", "asked", "labels"),
    [
        ("headless-1", [1, 1, 1, 1], "0"),
        ("headless-2", [1, 1, 1, 2], "0 1"),
        ("workstation-mixed", [1, 1, 1, 2, 1, 1], "0 1 2"),
        ("one-lost", [1, 1, 1, 2], "0 2"),
        ("mig-h100", [1] * 10, "0:0 0:1 0:2 0:3 1"),
        ("dgx-a100", [1, 1, 1, 2] * 4, "0 1 2 3 4 5 6 7"),
        ("big-16", [1, 1, 1, 2] * 8, "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15"),
    ],
)
def test_claims_exclude_each_other(watch_a_demo: Any, preset: str, asked: list[int], labels: str) -> None:
    run = watch_a_demo(preset)
    assert run.code == 0
    assert f"A race on a simulated host, {preset}: " in run.text
    got = [label for labels in run.got for label in labels]
    assert len(got) == len(set(got))
    assert set(got) <= set(labels.split())
    assert got, "somebody gets something where something is free"
    refused = re.search(r"(\d+) process(?:es were| was) refused", run.text)
    assert len(run.got) + (int(refused[1]) if refused else 0) == len(asked)
    assert f"{len(asked)} of {len(asked)} served." in run.text
    taken = sum(len(one) for one in run.got) + sum(asked)
    claims = len(run.got) + len(asked)
    assert run.verdict.startswith(f"Verdict: 0 collisions in {claims} claims of {taken} GPU")
    assert "Without safe_gpu, " in run.verdict


def test_where_claims_share_the_only_gpu_the_race_moves(watch_a_demo: Any) -> None:
    run = watch_a_demo("laptop")
    assert run.code == 0
    assert "GPU 0: drives the display, so claims share it" in run.text
    assert "A race on a simulated host, dgx-a100: " in run.text
    assert run.verdict.startswith("Verdict: 0 collisions in ")


def test_models_are_named_and_not_taken_for_one_another(watch_a_demo: Any) -> None:
    text = " ".join(watch_a_demo("workstation-mixed").text.split())
    assert "1 x NVIDIA RTX A2000 12GB, 1 x NVIDIA GeForce RTX 4090, 1 x NVIDIA GeForce RTX 3090." in text


def test_alike_refusals_are_one_line_and_one_of_them_is_shown(watch_a_demo: Any) -> None:
    run = watch_a_demo("headless-2", 9)
    assert len(re.findall(r"refused, the last at", run.text)) == 1
    assert len(re.findall(r"was told:", run.text)) == 1


def test_the_contrast_shows_what_happens_without(watch_a_demo: Any) -> None:
    run = watch_a_demo("dgx-a100", 8)
    found = re.search(r"Without safe_gpu, (\d+) of (\d+) chosen GPUs", run.verdict)
    assert found is not None
    assert 0 < int(found[1]) < int(found[2])


def test_further_rounds_are_summed_up(watch_a_demo: Any) -> None:
    assert re.search(r"1 more round: \d claims?, \d refusals?\.", watch_a_demo("headless-1", 4, rounds=2).text)


def refuse(name: str) -> None:
    raise OSError(errno.EPERM, "not permitted")


def test_a_broken_claim_is_found_out(watch_a_demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (host_lock, leases, waiting):
        monkeypatch.setattr(module, "lock_file", lambda fd: True)
    monkeypatch.setattr(names, "bind", refuse)
    # With a placeholder the claims would notice each other by themselves.
    monkeypatch.setattr(racers, "claim_gpus", partial(safe_gpu.claim_gpus, placeholder_fn=safe_gpu.NoPlaceholder()))
    run = watch_a_demo("dgx-a100", 8)
    assert run.code == 1
    assert "Collision: process " in run.text
    assert "Verdict: 0 collisions" not in run.text


def replace_in_racers(monkeypatch: pytest.MonkeyPatch, name: str, broken: Callable[..., Any]) -> None:
    parent, whole = os.getpid(), getattr(racers, name)

    def chosen(*arguments: Any, **options: Any) -> Any:
        return (whole if os.getpid() == parent else broken)(*arguments, **options)

    monkeypatch.setattr(racers, name, chosen)


def test_a_claim_that_fails_otherwise_is_a_failure(watch_a_demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise safe_gpu.StateDirError("no room anywhere")

    replace_in_racers(monkeypatch, "claim_gpus", broken)
    run = watch_a_demo("dgx-a100", 4)
    assert run.code == 1
    assert "no room anywhere" in " ".join(run.text.split())


def test_a_racer_that_dies_is_a_failure(watch_a_demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_in_racers(monkeypatch, "claim_gpus", lambda *arguments, **options: os._exit(3))
    run = watch_a_demo("dgx-a100", 4)
    assert run.code == 1
    assert "exited without a report" in " ".join(run.text.split())


def test_a_bug_in_a_racer_is_a_failure_without_a_traceback(
    watch_a_demo: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    replace_in_racers(monkeypatch, "claim_gpus", lambda *arguments, **options: 1 / 0)
    run = watch_a_demo("dgx-a100", 4)
    assert run.code == 1
    assert "ZeroDivisionError" in run.text
    assert capfd.readouterr().err == ""


def test_gpus_that_are_not_given_back_are_a_failure(watch_a_demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError

    replace_in_racers(monkeypatch, "release_gpus", broken)
    run = watch_a_demo("dgx-a100", 4)
    assert run.code == 1
    assert "could not release its GPUs" in " ".join(run.text.split())


def test_where_temporary_files_are_no_good_memory_serves(
    watch_a_demo: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    tried = []

    def refuse_first(*arguments: Any, **options: Any) -> Any:
        tried.append(os.environ["SAFE_GPU_DIR"])
        if len(tried) == 1:
            raise safe_gpu.StateDirError("a network's file system")
        return safe_gpu.claim_gpus(*arguments, **options)

    monkeypatch.setattr(racers, "claim_gpus", refuse_first)
    assert watch_a_demo("headless-1", 4).code == 0
    assert tried[0].startswith(str(tmp_path))
    assert tried[1].startswith("/dev/shm/")
    assert not os.path.exists(tried[1])
