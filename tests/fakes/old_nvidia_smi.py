"""What the older package asks of nvidia-smi, answered over the files of the fake NVML (nvml.c describes them)."""

import os
import sys

ROOT = os.environ["FAKE_GPU_DIR"]


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gpus():
    with open(os.path.join(ROOT, "gpus")) as file:
        found = [dict(pair.split("=", 1) for pair in line.split()) for line in file]
    return [(gpu["uuid"], gpu["bus"].upper()) for gpu in found]


def processes():
    for uuid, bus in gpus():
        directory = os.path.join(ROOT, "procs", uuid)
        for name in os.listdir(directory) if os.path.isdir(directory) else ():
            if name.isdigit() and alive(name):
                yield name, bus


for argument in sys.argv[1:]:
    if argument == "-q":
        print(f"Attached GPUs                             : {len(gpus())}")
        for _ in gpus():
            print("    Display Mode                          : Disabled")
    elif argument == "--query-gpu=index,gpu_bus_id":
        print("".join(f"{index}, {bus}\n" for index, (_, bus) in enumerate(gpus())), end="")
    elif argument == "--query-compute-apps=pid,gpu_bus_id":
        print("".join(f"{pid}, {bus}\n" for pid, bus in processes()), end="")
