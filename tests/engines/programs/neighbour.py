"""Another user of the host: claims, uses and gives back GPUs until a file says stop, or holds some until then.

neighbour.py STOP_FILE NB_GPUS        over and over
neighbour.py STOP_FILE NB_GPUS hold   once, and holds them
"""

import os
import sys
import time

from scenarios import using, wait

import safe_gpu

stop, count = sys.argv[1], int(sys.argv[2])
if sys.argv[3:] == ["hold"]:
    with safe_gpu.GPUOwner(count, timeout=60, affinity=None) as owner, using(*(gpu.uuid for gpu in owner.gpus)):
        print("holding", owner.devices_taken, flush=True)
        wait(lambda: os.path.exists(stop), "the end", 300)
    sys.exit()
rounds = 0
while not os.path.exists(stop):
    try:
        owner = safe_gpu.GPUOwner(count, timeout=1, affinity=None)
    except safe_gpu.NotEnoughGpusError:
        continue
    with owner, using(*(gpu.uuid for gpu in owner.gpus)):
        time.sleep(0.02)
    rounds += 1
    print("round", rounds, flush=True)
    time.sleep(0.02)
