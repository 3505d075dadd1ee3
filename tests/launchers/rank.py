"""What every rank of the launcher tests does: claim one GPU, and hold it until all ranks hold theirs.

    rank.py DIRECTORY RANKS
    rank.py DIRECTORY RANKS METHOD FAILING      RANKS processes of multiprocessing, of which FAILING raises; -1: none

A placeholder is ready only when all ranks are making theirs, so ranks that wait for each other's placeholder hang. Each
rank leaves a file in DIRECTORY while it holds its GPU.
"""

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import safe_gpu
from safe_gpu.drivers import open_driver
from safe_gpu.schedulers.job import current


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the other ranks did not come")
        time.sleep(0.005)


def rank(directory: Path, ranks: int, failing: bool = False) -> None:
    def gather(name: str) -> None:
        (directory / f"{os.getpid()}.{name}").touch()
        until(lambda: len(list(directory.glob(f"*.{name}"))) >= ranks)

    def placeholder(device_no: int) -> object:
        gather("placing")
        return open_driver().runtime.default_placeholder()(device_no)

    context = current()
    owner = safe_gpu.claim_gpus(1, placeholder)
    facts = {
        "gpus": owner.devices_taken,
        "visible": os.environ["CUDA_VISIBLE_DEVICES"],
        "local_rank": context.local_rank,
        "local_size": context.local_size,
    }
    (directory / f"{os.getpid()}.new").write_text(json.dumps(facts))
    (directory / f"{os.getpid()}.new").rename(directory / f"{os.getpid()}.json")
    until(lambda: len(list(directory.glob("*.json"))) >= ranks)
    if failing:
        raise RuntimeError("this rank fails")
    safe_gpu.release_gpus()


def processes(directory: Path, ranks: int, method: str, failing: int) -> None:
    context = multiprocessing.get_context(method)
    started = [context.Process(target=rank, args=(directory, ranks, n == failing)) for n in range(ranks)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    codes = [process.exitcode for process in started]
    assert codes == [int(n == failing) for n in range(ranks)], codes
    # At once, without waiting for anything: whatever became of the ranks, all GPUs are free.
    assert len(safe_gpu.claim_gpus(8, timeout=0).devices_taken) == 8


if __name__ == "__main__":
    place, number = Path(sys.argv[1]), int(sys.argv[2])
    if len(sys.argv) == 3:
        rank(place, number)
    else:
        processes(place, number, sys.argv[3], int(sys.argv[4]))
