"""Plans beside the recorded answers of gpu_affinity (2,280 cases) and of torch.numa (1,032 sets of GPUs).

``peers.json.gz`` has the answers of gpu_affinity's planning functions (f35fb78) and of torch 2.13.0, with the hosts of
``peers.py`` in place of what they read from NVML, CUDA and /sys. An answer is one text of CPU lists for each case, with
"-" for a GPU that got nothing, or "error".
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Collection
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from affinity.peers import planner_cases, torch_cases

import safe_gpu
from safe_gpu.affinity.planner import plan
from safe_gpu.errors import GPUAffinityError
from safe_gpu.topology.cpulist import format_cpulist
from safe_gpu.topology.host import HostTopology

PAGE = Path(safe_gpu.__file__).parent / "affinity" / "README.md"


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[str]]:
    with gzip.open(Path(__file__).parent / "peers.json.gz") as file:
        document = json.load(file)
    answers = document["answers"]
    return {peer: [answers[number] for number in document[peer]] for peer in ("gpu_affinity", "torch")}


@pytest.fixture
def once_each(host: Callable[..., HostTopology]) -> Callable[..., HostTopology]:
    made = lru_cache(maxsize=None)(lambda text: host(**json.loads(text)))
    return lambda **shape: made(json.dumps(shape))


def ours(host: HostTopology, mask: frozenset[int], gpus: Collection[int], **options: Any) -> str:
    try:
        return ";".join(format_cpulist(share) for share in plan(host, allowed=mask, gpus=gpus, **options))
    except GPUAffinityError:
        return "error"


def reason(host: HostTopology, options: dict[str, Any], theirs: str) -> str:
    """Why an answer differs, as the first words of the row in the page; "" if no reason applies."""
    if max(map(len, host.cores)) > 2:
        return "more than two threads"
    if "-" in theirs.split(";") and options["mode"] == "single_unique":
        return "a GPU without a core"
    socket_is_wider = options["scope"] == "socket" and len(host.nodes) > len(host.packages)
    if options["mode"] == "all" and options["max_physical_cores"]:
        return "own node first" if socket_is_wider else "order of cores"
    if options["mode"].startswith("unique_") and socket_is_wider:
        return "cores are dropped"
    return ""


def test_the_planner_of_gpu_affinity(recorded: Any, once_each: Any) -> None:
    cases = list(planner_cases(once_each))
    assert len(cases) == len(recorded["gpu_affinity"]) == 2280
    found: Counter[str] = Counter()
    for (host, mask, processes, options), theirs in zip(cases, recorded["gpu_affinity"], strict=True):
        own = ours(host, mask, range(processes), **options)
        if own != theirs:
            why = reason(host, options, theirs)
            assert why, (options, theirs, own)
            found[why] += 1
    section = PAGE.read_text().partition("## What differs from gpu_affinity\n")[2]
    told = dict(re.findall(r"^\| \*\*([^*]+)\*\*.*\| (\d+) \|$", section, re.MULTILINE))
    assert found == {why: int(count) for why, count in told.items()}


def test_the_modes_of_torch(recorded: Any, once_each: Any) -> None:
    cases = list(torch_cases(once_each))
    assert len(cases) == len(recorded["torch"]) == 4 * 1032
    for (host, mask, gpus, mode), theirs in zip(cases, recorded["torch"], strict=True):
        assert ours(host, mask, gpus, mode=mode) == theirs, (gpus, mode)
