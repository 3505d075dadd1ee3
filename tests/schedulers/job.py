"""The program of the test jobs: claim GPUs, or take what one is given, and tell the referee.

    job.py claim N [--hold S|go] [--timeout S] [--debug-sleep S] [--placeholders-meet N] [--fail]
    job.py given [--hold S|go]

It believes only CUDA_VISIBLE_DEVICES, or ROCR_VISIBLE_DEVICES on a host with AMD GPUs. Two detectors see a GPU that is
used twice, neither of which is safe_gpu's: a lock file for each GPU of each host, and a log of the times. ``given``
does not import safe_gpu at all.
"""

import argparse
import contextlib
import fcntl
import json
import os
import pathlib
import sys
import time

REFEREE = os.environ["REFEREE"]
AMD = os.environ.get("SAFE_GPU_DRIVER") == "simulated:mi250x"
VISIBLE = "ROCR_VISIBLE_DEVICES" if AMD else "CUDA_VISIBLE_DEVICES"
HOST = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
ABOUT = ("JOB_ID", "SGE_TASK_ID", "SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


def tell(event: str, **facts: object) -> None:
    about = {"event": event, "time": time.monotonic(), "pid": os.getpid(), "parent": os.getppid(), "host": HOST}
    log = os.open(f"{REFEREE}/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.write(log, json.dumps({**about, **facts}).encode() + b"\n")  # one write to an appending file is not torn
    os.close(log)


def until(condition, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            tell("stuck")
            sys.exit("stuck")
        time.sleep(0.01)


def use_gpus(hold: str, **facts: object) -> None:
    """Hold what the variable names, with the eyes open for others who hold it too."""
    gpus = [gpu for gpu in os.environ.get(VISIBLE, "").split(",") if gpu]
    locks = []
    for gpu in gpus:
        lock = os.open(f"{REFEREE}/{HOST}-{gpu}.used", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("collision", gpu=gpu)
        locks.append(lock)
    about = {name: os.environ[name] for name in ABOUT if name in os.environ}
    tell("claim", gpus=gpus, cpus=sorted(os.sched_getaffinity(0)), about=about, **facts)
    if hold == "go":
        until(lambda: os.path.exists(f"{REFEREE}/go"))
    else:
        time.sleep(float(hold))
    tell("end", gpus=gpus)
    for lock in locks:
        os.close(lock)


def meeting(parties: int):
    """A placeholder that is ready only when as many others are being made at the same time."""
    from safe_gpu.drivers import open_driver

    hold = open_driver().runtime.default_placeholder()

    def placeholder(device_no: int) -> object:
        tell("meet")
        until(lambda: pathlib.Path(REFEREE, "log").read_text().count('"meet"') >= parties)
        return hold(device_no)

    return placeholder


def own_entry():
    """What the entry of this process's claim says; those of others come and go."""
    for path in pathlib.Path(os.environ["SAFE_GPU_DIR"], "claims").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError):
            entry = json.loads(path.read_text())
            if entry["pid"] == os.getpid():
                return entry
    raise AssertionError("no entry")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["claim", "given"])
    parser.add_argument("number", nargs="?", default="1")
    parser.add_argument("--hold", default="0.2")
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--debug-sleep", type=float, default=0.0)
    parser.add_argument("--placeholders-meet", type=int)
    parser.add_argument("--fail", action="store_true")
    args = parser.parse_args()
    if args.mode == "given":
        use_gpus(args.hold)
        return

    import logging

    import safe_gpu

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    allowed = os.sched_getaffinity(0)
    options = {} if args.timeout is None else {"timeout": args.timeout}
    tell("start")
    owner = safe_gpu.claim_gpus(
        args.number if args.number == "job" else int(args.number),
        meeting(args.placeholders_meet) if args.placeholders_meet else None,
        debug_sleep=args.debug_sleep,
        **options,
    )
    if args.fail:
        tell("failing", gpus=owner.devices_taken)
        sys.exit(1)
    shown = [gpu.uuid for gpu in owner.gpus] if AMD else map(str, owner.devices_taken)
    assert os.environ[VISIBLE] == ",".join(shown)
    assert os.sched_getaffinity(0) <= allowed
    use_gpus(args.hold, job=own_entry()["job"], indices=owner.devices_taken)
    safe_gpu.release_gpus()


if __name__ == "__main__":
    main()
