"""The demo on simulated hosts of every kind: it ends well, with a true verdict."""

import errno
import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

import safe_gpu
from safe_gpu.coordination import socket_names as names
from safe_gpu.coordination.leases import lease as leases
from safe_gpu.coordination.leases import watcher
from safe_gpu.coordination.locks import host_lock as host_lock_module
from safe_gpu.coordination.queue import waiter as waiting
from safe_gpu.demo import race_host
from safe_gpu.demo import racers as racers_module
from safe_gpu.drivers import presets
from safe_gpu.drivers.preset_parts import Cpus, Preset, SimulatedGpu

HEADLESS = Preset(
    "headless-1",
    Cpus(packages=1, nodes=1, cores=8, llc=8),
    (SimulatedGpu("GPU-00000000-0000-1111-2222-000000000000", 1, 0, "NVIDIA L40S", 46068),),
)


@pytest.fixture(autouse=True)
def headless_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.PRESETS, HEADLESS.name, HEADLESS)


@pytest.mark.parametrize(
    ("preset", "asked", "labels"),
    [
        ("headless-1", [1, 1, 1, 1], "0"),
        ("workstation-mixed", [1, 1, 1, 2, 1, 1], "0 1 2"),
        ("mig-h100", [1] * 10, "0:0 0:1 0:2 0:3 1"),
        ("dgx-a100", [1, 1, 1, 2] * 4, "0 1 2 3 4 5 6 7"),
        ("mi250x", [1, 1, 1, 2] * 4, "0 1 2 3 4 5 6 7"),
        ("two-vendors", [1, 1, 1, 2] * 2, "0 1 2 3"),
    ],
)
def test_claims_exclude_each_other(watch_a_demo: Any, preset: str, asked: list[int], labels: str) -> None:
    run = watch_a_demo(preset)
    assert run.code == 0
    assert f"A race on a simulated host, {preset}: " in run.text
    assert run.got
    assert run.got <= set(labels.split())
    winners, taken = run.number
    assert taken == len(run.got), "each GPU once"
    refused = re.search(r"(\d+) refused within", run.claims)
    assert winners + (int(refused[1]) if refused else 0) == len(asked)
    assert f"{len(asked)} of {len(asked)} served" in run.text
    claims, gpus = winners + len(asked), taken + sum(asked)
    verdict = re.match(
        rf"Verdict: 0 collisions in {claims} claims of {gpus} GPUs; without safe_gpu, (\d+) on (\d+)", run.verdict
    )
    assert verdict is not None
    assert 0 < int(verdict[1]) < int(verdict[2])


def test_where_claims_share_the_only_gpu_the_race_moves(watch_a_demo: Any) -> None:
    run = watch_a_demo("laptop", 4)
    assert run.code == 0
    assert "GPU 0: drives the display, so claims share it" in run.text
    assert "A race on a simulated host, dgx-a100: " in run.text
    assert run.verdict.startswith("Verdict: 0 collisions in ")


def test_further_rounds_are_summed_up(watch_a_demo: Any) -> None:
    assert re.search(r"1 more round: \d claims?, \d refusals?\.", watch_a_demo("headless-1", 4, rounds=2).text)


def test_a_broken_claim_is_found_out(watch_a_demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (host_lock_module, watcher, leases, waiting):
        monkeypatch.setattr(module, "lock_file", lambda fd: True)
    monkeypatch.setattr(names, "take_name", Mock(side_effect=OSError(errno.EPERM, "not permitted")))
    # With a placeholder the claims would notice each other by themselves.
    monkeypatch.setattr(race_host, "claim_gpus", partial(safe_gpu.claim_gpus, placeholder_fn=safe_gpu.NoPlaceholder()))
    monkeypatch.setattr(
        racers_module, "claim_gpus", partial(safe_gpu.claim_gpus, placeholder_fn=safe_gpu.NoPlaceholder())
    )
    run = watch_a_demo("dgx-a100", 8)
    assert run.code == 1
    assert "Collision: process " in run.text
    assert "Verdict: 0 collisions" not in run.text


@pytest.mark.parametrize(
    ("name", "broken", "told"),
    [
        ("claim_gpus", Mock(side_effect=safe_gpu.StateDirError("no room anywhere")), "no room anywhere"),
        ("claim_gpus", lambda *arguments, **options: os._exit(3), "exited without a report"),
        ("claim_gpus", Mock(side_effect=ZeroDivisionError), "ZeroDivisionError"),
        ("release_gpus", Mock(side_effect=RuntimeError), "could not release its GPUs"),
    ],
)
def test_whatever_else_happens_to_a_racer_is_a_failure(
    watch_a_demo: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: str,
    broken: Callable[..., Any],
    told: str,
) -> None:
    parent, whole = os.getpid(), getattr(racers_module, name)

    def chosen(*arguments: Any, **options: Any) -> Any:
        return (whole if os.getpid() == parent else broken)(*arguments, **options)

    monkeypatch.setattr(racers_module, name, chosen)
    run = watch_a_demo("headless-1", 4)
    assert run.code == 1
    assert told in " ".join(run.text.split())
    assert capfd.readouterr().err == "", "no traceback"


def test_where_temporary_files_are_no_good_memory_serves(watch_a_demo: Any, monkeypatch: Any, tmp_path: Any) -> None:
    tried = []

    def refuse_first(*arguments: Any, **options: Any) -> Any:
        tried.append(os.environ["SAFE_GPU_DIR"])
        if len(tried) == 1:
            raise safe_gpu.StateDirError("a network's file system")
        return safe_gpu.claim_gpus(*arguments, **options)

    monkeypatch.setattr(race_host, "claim_gpus", refuse_first)
    monkeypatch.setattr(racers_module, "claim_gpus", refuse_first)
    assert watch_a_demo("headless-1", 4).code == 0
    assert tried[0].startswith(str(tmp_path))
    assert tried[1].startswith("/dev/shm/")
    assert not os.path.exists(tried[1])
