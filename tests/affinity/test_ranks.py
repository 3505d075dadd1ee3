"""Ranks that claim side by side: each its own GPU and, where the cores suffice, its own cores."""

from __future__ import annotations

import json
import os
from typing import Any

from affinity.conftest import MASK, needs_two_cpus

RANK = """
import json, os, threading
import safe_gpu
asked, told = {}, threading.Event()
def elsewhere():  # a thread that was there before the claim, as a warmed-up numpy has
    told.wait()
    asked["thread"] = sorted(os.sched_getaffinity(0))
thread = threading.Thread(target=elsewhere)
thread.start()
owner = safe_gpu.claim_gpus(1, affinity="exclusive")
told.set()
thread.join()
facts = {"gpus": owner.devices_taken, "cpus": sorted(os.sched_getaffinity(0)), "said": sorted(owner.cpus)}
say(json.dumps({**facts, **asked}))
listen()
"""


@needs_two_cpus
def test_each_rank_has_cores_of_its_own(state_dir: Any, saved_tree: Any, fake_gpus: Any, child: Any) -> None:
    """Two GPUs on one node of two real cores."""
    first, second = MASK[:2]
    saved_tree.cpus([(first,), (second,)])
    saved_tree.nodes({0: [first, second]})
    fake_gpus.set(2, node_cpus=f"{first},{second}")
    for gpu in fake_gpus.gpus:
        saved_tree.gpu(gpu["bus"].lower().removeprefix("0000"), node=0)
    environment = {**fake_gpus.env, "SAFE_GPU_FSROOT": os.fspath(saved_tree)}
    ranks = [
        child(RANK, env={**environment, "OMPI_COMM_WORLD_LOCAL_RANK": str(number), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
        for number in range(2)
    ]
    held = sorted((json.loads(rank.hear()) for rank in ranks), key=lambda facts: facts["gpus"])
    assert [facts["gpus"] for facts in held] == [[0], [1]]
    assert [facts["cpus"] for facts in held] == [[first], [second]]
    assert all(facts["said"] == facts["thread"] == facts["cpus"] for facts in held)
