#!/usr/bin/env python3
"""Shows two processes that claim GPUs at the same moment, with a long delay between the choice and the use of a GPU.

    . .venv/bin/activate
    python tools/gpu-acquisitor.py --id 1 --nb-gpus 1 & python tools/gpu-acquisitor.py --id 2 --nb-gpus 2

Each instance chooses its GPUs and then sleeps for --sleep seconds before it puts anything on them. Meanwhile nvidia-smi
shows these GPUs as free. The second instance does not choose them, and it does not wait for the first one either: a
claim takes its GPUs at once, under a lock that it holds for a moment only.

Without a GPU use --backend simulated.
"""

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

try:
    from safe_gpu import safe_gpu
    from safe_gpu.errors import SafeGpuError
    from safe_gpu.runtimes import placeholders
    from safe_gpu.runtimes.cuda import CudaPlaceholder
except ModuleNotFoundError:
    sys.exit(f"safe_gpu is not installed for {sys.executable}: activate its environment first (. .venv/bin/activate)")


PLACEHOLDERS: dict[str, Callable[[logging.Logger], Any]] = {
    "pytorch": placeholders.PytorchPlaceholder,
    "tf": placeholders.TensorflowPlaceholder,
    "pycuda": placeholders.PyCudaPlaceholder,
    "cuda": CudaPlaceholder,
}


SLEEP = "delay between choosing the GPUs and using them, and duration of the work (default: %(default)s)"
BACKEND = "the placeholder: of a framework, of the CUDA driver, or on a simulated host (default: %(default)s)"


def work(backend: str, owner: safe_gpu.GPUOwner) -> list[Any]:
    """Put something on every claimed GPU. Frameworks number the claimed GPUs from 0."""
    numbers = range(len(owner.devices_taken))
    if backend == "pytorch":
        import torch

        return [torch.ones((2, 2), device=f"cuda:{number}") * 2 for number in numbers]
    if backend == "tf":
        import tensorflow

        results = []
        for number in numbers:
            with tensorflow.device(f"GPU:{number}"):
                results.append(tensorflow.constant([1.0]) + 1.0)
        return results
    if backend == "pycuda":
        import pycuda.driver

        for context in owner.placeholders:
            context.push()
            try:
                memory = pycuda.driver.mem_alloc(32)
                pycuda.driver.memcpy_htod(memory, bytes(32))
                memory.free()
            finally:
                pycuda.driver.Context.pop()
    return []  # the placeholder's context is on the GPU already


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sleep", type=float, default=10.0, metavar="SECONDS", help=SLEEP)
    add("--id", default="1", help="name of this instance in the log (default: %(default)s)")
    add("--nb-gpus", type=int, default=1, metavar="N", help="number of GPUs (default: %(default)s)")
    add("--backend", choices=[*PLACEHOLDERS, "simulated"], default="pytorch", help=BACKEND)
    add("--explicit-owner-object", action="store_true", help="construct a GPUOwner instead of calling claim_gpus()")
    args = parser.parse_args()

    logging.basicConfig(format="%(name)s %(asctime)s [%(levelname)s] %(message)s")
    logger = logging.getLogger(f"GPUOwner{args.id}")
    logger.setLevel(logging.INFO)
    steps: dict[str, float] = {}  # the first word of each message -> when it came first

    def note(record: logging.LogRecord) -> bool:
        steps.setdefault(record.getMessage().split()[0], time.monotonic())
        return True

    logger.addFilter(note)
    if args.backend == "simulated" and not os.environ.get("SAFE_GPU_DRIVER", "").startswith("simulated:"):
        os.environ["SAFE_GPU_DRIVER"] = "simulated:dgx-a100"

    make = PLACEHOLDERS.get(args.backend)  # None: the default of the driver, which a simulated host uses
    claim = safe_gpu.GPUOwner if args.explicit_owner_object else safe_gpu.claim_gpus
    try:
        owner = claim(args.nb_gpus, make and make(logger), logger, args.sleep)
    except SafeGpuError as err:
        logger.error("%s", err)
        return 1
    logger.info(
        "Allocated devices: %s (chosen and claimed in %.2f s; it took another %.1f s to put something on them, "
        "and no other claim had to wait for that)",
        owner.devices_taken,
        steps["Set"] - steps["acquiring"],
        time.monotonic() - steps["Set"],
    )
    results = work(args.backend, owner)
    time.sleep(args.sleep)
    del results
    owner.release_gpus()
    logger.info("With safe-gpu 2.0 one of two instances really waited for the other; now claims run side by side")
    logger.info("Finished")
    return 0


if __name__ == "__main__":
    sys.exit(main())
