"""Two claims of the same GPUs on two hosts, from opposite ends, over and over; the same for every engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from referee import meet, using

from safe_gpu import NotEnoughGpusError


def race(claim: Callable[..., Any], me: int, rounds: int) -> None:
    """Round by round: claims that may not wait, of which exactly one wins, then claims that may, which both win."""
    hosts = ["hosta", "hostb"] if me == 0 else ["hostb", "hosta"]
    wins = 0
    for number in range(rounds):
        patient = number % 2 == 1
        meet(f"start-{number}", me)
        refusal = None
        try:
            held = claim(nodes=hosts, gpus_per_node=8, timeout=100 if patient else 0)
        except NotEnoughGpusError as err:
            refusal = err
        if refusal is not None:
            assert not patient, refusal
            assert refusal.host in hosts
            assert refusal.verdicts
            meet(f"end-{number}", me)
            continue
        wins += 1
        assert [gpu.host for gpu in held.gpus] == [hosts[0]] * 8 + [hosts[1]] * 8
        with ExitStack() as marks:
            for gpu in held.gpus:
                marks.enter_context(using(gpu.uuid, host=gpu.host))
            if not patient:
                meet(f"end-{number}", me)  # held until the other one has failed
        held.release()
        if patient:
            meet(f"end-{number}", me)
    print(f"driver {me} won {wins} of {rounds}", flush=True)
