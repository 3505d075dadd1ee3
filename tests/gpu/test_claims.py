"""Claims of a real GPU: the driver shows them, CUDA opens what was claimed, and they end with their process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from safe_gpu.runtimes.cuda import same_device

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

IN_MAIN = "owner = claim(uuid)"
IN_THREAD = """
owners = []
thread = threading.Thread(target=lambda: owners.append(claim(uuid)))
thread.start()
thread.join()
owner, = owners
"""


@pytest.mark.parametrize("code", [IN_MAIN, IN_THREAD], ids=["main thread", "another thread"])
def test_a_claim_opens_its_gpu_and_no_other(gpu: Any, claimer: Any, code: str) -> None:
    process = claimer(f"{code}\nsay(owner.gpus[0].uuid, *map(repr, opened()))\nlisten()")
    claimed, first, second = process.hear().split()
    assert claimed == gpu.uuid
    assert same_device(first.strip("'"), gpu.uuid)
    assert second == "''", "CUDA sees more than the claimed GPU"


@pytest.mark.parametrize("code", [IN_MAIN, IN_THREAD], ids=["main thread", "another thread"])
def test_the_driver_lists_our_process(gpu: Any, claimer: Any, code: str) -> None:
    process = claimer(f"{code}\nsay('holds')\nlisten()", says="holds")
    gpu.expect(process.pid)


def test_a_released_gpu_is_free_while_its_process_lives(gpu: Any, claimer: Any) -> None:
    released = "safe_gpu.release_gpus(); say('released'); listen()"
    first = claimer(f"claim(uuid); say('holds'); listen(); {released}", says="holds")
    first.tell()
    assert first.hear() == "released"
    second = claimer("say(claim(uuid).gpus[0].uuid); listen()")
    assert second.hear() == gpu.uuid
    assert first.process.poll() is None


@pytest.mark.usefixtures("exclusive")
def test_a_claim_is_refused_what_another_holds(gpu: Any, claimer: Any) -> None:
    first = claimer("claim(uuid); say('holds'); listen()", says="holds")
    refused = """
try:
    claim(uuid, timeout=0)
except safe_gpu.NotEnoughGpusError as err:
    say([verdict.pid for verdict in err.verdicts if verdict.gpu.uuid == uuid])
"""
    assert claimer(refused).hear() == f"[{first.pid}]"


def test_a_killed_claim_ends(gpu: Any, claimer: Any) -> None:
    first = claimer("claim(uuid); say('holds'); listen()", says="holds")
    first.kill()
    assert claimer("say(claim(uuid).gpus[0].uuid)").hear() == gpu.uuid


@pytest.mark.usefixtures("exclusive")
def test_several_race_for_one_gpu_and_each_has_it_alone(claimer: Any, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    code = f"""
owner = claim(uuid, timeout=200)
os.mkdir({str(inside)!r})      # fails where another process is inside
opened_now = opened()
os.rmdir({str(inside)!r})
safe_gpu.release_gpus()
say(opened_now[0])
"""
    racers = [claimer(code) for _ in range(5)]
    assert len({racer.hear() for racer in racers}) == 1
    assert [racer.process.wait(60) for racer in racers] == [0] * 5
