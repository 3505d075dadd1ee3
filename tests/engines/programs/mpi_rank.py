"""One MPI rank, started under ``safe-gpu bind``: claims its GPU, meets the others, and writes what it has.

mpi_rank.py DIRECTORY
"""

import json
import os
import socket
import sys
from pathlib import Path

from mpi4py import MPI
from scenarios import using

import safe_gpu

world = MPI.COMM_WORLD
with safe_gpu.GPUOwner(1, timeout=10, affinity=None) as owner, using(owner.gpus[0].uuid):
    sizes = world.allreduce(1)  # all ranks hold their GPU at this point
    found = {
        "rank": world.rank,
        "ranks": sizes,
        "host": socket.gethostname(),
        "visible": os.environ["CUDA_VISIBLE_DEVICES"],
        "uuid": owner.gpus[0].uuid,
        "expect": os.environ.get("SAFE_GPU_EXPECT"),
    }
    path = Path(sys.argv[1], f"rank{world.rank}")
    path.with_suffix(".new").write_text(json.dumps(found))
    path.with_suffix(".new").rename(path)
    world.Barrier()
