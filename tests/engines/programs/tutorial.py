"""The recipe of Dragon's tutorial on GPU affinity, which knows nothing of claims: tutorial.py RESULTS.

Each worker writes the GPU that it sees.
"""

import os
import sys
from pathlib import Path

from dragon.infrastructure.policy import Policy
from dragon.native.machine import Node, System
from dragon.native.pool import Pool


def find_gpus() -> list[tuple[str, int]]:
    nodes = [Node(huid) for huid in System().nodes]
    return [(node.hostname, gpu_id) for node in nodes for gpu_id in node.gpus]


def make_policies(all_gpus: list[tuple[str, int]], nprocs: int) -> list[Policy]:
    chosen = (all_gpus[number % len(all_gpus)] for number in range(nprocs))
    return [
        Policy(placement=Policy.Placement.HOST_NAME, host_name=host, gpu_affinity=[gpu_id]) for host, gpu_id in chosen
    ]


def my_gpu(results: str) -> None:
    path = Path(results, str(os.getpid()))
    path.with_suffix(".new").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    path.with_suffix(".new").rename(path)


def work(x: int) -> int:
    return x * x


if __name__ == "__main__":
    pool = Pool(
        policy=make_policies(find_gpus(), 4), processes_per_policy=1, initializer=my_gpu, initargs=(sys.argv[1],)
    )
    assert pool.map_async(work, range(32)).get(60) == [x * x for x in range(32)]
    pool.close()
    pool.join()
