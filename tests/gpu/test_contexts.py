"""Contexts of one claim, made one after the other, as claims do, and side by side in threads: how long that takes."""

from collections.abc import Callable
from typing import Any

import pytest
from support import api

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CONTEXTS = """
import threading, time
import safe_gpu
from safe_gpu.runtimes.cuda import CUDA

uuids = {uuids!r}
safe_gpu.claim_gpus(len(uuids), safe_gpu.NoPlaceholder(), only=uuids, timeout=60, affinity=None)
placeholder = safe_gpu.CudaPlaceholder()
placeholder.prepare()
held = {{}}
began = time.perf_counter()

def hold(device_no):
    held[device_no] = placeholder(device_no)

if {side_by_side}:
    threads = [threading.Thread(target=hold, args=(number,)) for number in range(len(uuids))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
else:
    for number in range(len(uuids)):
        hold(number)
seconds = time.perf_counter() - began
say(seconds, *(CUDA.shown_at(number) for number in sorted(held)))
"""


@pytest.fixture
def several() -> list[str]:
    """UUIDs of all whole GPUs of this machine that are free, of which there are at least two."""
    with api.opened_driver() as driver:
        snapshot = driver.snapshot()
    free = []
    for verdict in api.judge(snapshot, api.Selection()):
        if verdict.free and not verdict.gpu.is_piece:
            free.append(verdict.gpu.uuid)
    if len(free) < 2:
        pytest.skip("needs two GPUs that are free")
    return free


@pytest.mark.parametrize("attempt", [1, 2])
def test_contexts_one_after_the_other_and_side_by_side(
    several: list[str], child: Callable[..., Any], capsys: Any, attempt: int
) -> None:
    """Twice: with the first one, the kernel driver may have to initialise the GPUs."""
    taken = {}
    for side_by_side in (False, True):
        seconds, *shown = child(CONTEXTS.format(uuids=several, side_by_side=side_by_side)).finish().split()
        taken[side_by_side] = float(seconds)
        assert len(shown) == len(several)
    with capsys.disabled():
        print(f"\n{len(several)} contexts: {taken[False]:.2f} s one after the other, {taken[True]:.2f} s side by side")
