"""Conditions of requests: what every one of them owes its callers and other waiters, and the sets of GPUs together."""

from __future__ import annotations

import argparse
import inspect
import json
from typing import Any, get_type_hints

import pytest

from safe_gpu import GPUOwner, UnsatisfiableRequestError, claim_gpus
from safe_gpu.argument_style import ArgumentStyle
from safe_gpu.cli.parser import CommandLine, add_request
from safe_gpu.devices import Gpu, HostSnapshot
from safe_gpu.selection.choice import candidates
from safe_gpu.selection.request import (
    CONDITIONS,
    Condition,
    Conditions,
    MaxUtilization,
    MinMemory,
    Selection,
    parse_request,
)
from safe_gpu.selection.verdicts import judge

SAMPLES: dict[str, Any] = {
    "only": "1,3",
    "exclude": "0-2",
    "model": "A100",
    "min_memory": "20GiB",
    "max_utilization": 10,
}

every = pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.argument)


def gpu(index: int, **values: Any) -> Gpu:
    return Gpu(index, f"GPU-{index}", **{"processes": (), "memory_used": 0, **values})


@every
def test_it_is_an_argument_and_an_option(condition: type[Condition]) -> None:
    hints = get_type_hints(Conditions)
    assert set(hints) == {one.argument for one in CONDITIONS}
    for claim in (claim_gpus, GPUOwner):
        assert inspect.signature(claim).parameters[condition.argument].default in (None, ())
    parser = argparse.ArgumentParser()
    add_request(parser)
    option = CommandLine.option(condition.argument)
    text = str(SAMPLES[condition.argument])
    given_there = getattr(parser.parse_args([option, text]), condition.argument)
    assert parse_request(1, **{condition.argument: given_there}) == parse_request(1, **{condition.argument: text})
    assert condition.metavar in parser.format_help()


@every
def test_what_changes_stands_in_the_ticket(condition: type[Condition]) -> None:
    """Others judge GPUs for a waiter: by its ticket, where it depends on more than which GPU it is."""
    changes = condition.why_not_now is not Condition.why_not_now or condition.groups is not Condition.groups
    asked = parse_request(2, **{condition.argument: SAMPLES[condition.argument]})
    assert changes == bool(asked.ticket)
    said = json.loads(json.dumps(dict(asked.ticket)))
    assert Selection.from_ticket(2, said.items()) == (Selection(2, asked.conditions if changes else ()), True)


@pytest.mark.parametrize(
    "strange",
    [
        ("colour", "red"),
        ("near", "by"),
        ("near", 1),
        ("min_memory", -1),
        ("min_memory", True),
        ("max_utilization", 101),
    ],
)
def test_a_condition_that_is_not_known(strange: tuple[str, Any]) -> None:
    assert Selection.from_ticket(1, [strange, ("min_memory", 5)]) == (Selection(1, (MinMemory(5),)), False)


@pytest.mark.parametrize("value", [101, -1, "ten", "1000", True, 3.5, ""])
def test_bad_percentages(value: Any) -> None:
    with pytest.raises(UnsatisfiableRequestError, match=r"max_utilization=.* makes no sense: give percent"):
        parse_request(max_utilization=value)


@pytest.mark.parametrize(
    ("utilization", "state"),
    [(0, "free"), (10, "free"), (11, "busy"), (None, "busy")],
    ids=["idle", "at it", "above", "?"],
)
def test_a_busy_gpu(utilization: int | None, state: str) -> None:
    asked = parse_request(max_utilization="10%")
    (verdict,) = judge(HostSnapshot((gpu(0, utilization=utilization),)), asked, leased={})
    assert verdict.state == state
    assert state == "free" or "at most 10 % asked for" in verdict.reason
    assert MaxUtilization(10).met_by(gpu(0, utilization=utilization)) == (state == "free")


def test_a_lost_gpu_may_come_back() -> None:
    host = HostSnapshot((gpu(0), gpu(1, lost=True), gpu(2, lost=True)))
    asked = parse_request(exclude="2", spelling=ArgumentStyle)
    assert [one.index for one in candidates(host, asked)] == [0]
    assert [one.index for one in candidates(host, asked, lost=True)] == [0, 1]
