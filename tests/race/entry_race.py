"""A race of claims, with kill -9, children left behind, and directories that are removed.

Two detectors look for doubles (see :mod:`support.stage`). A third one looks for entries of dead processes that still
count.
"""

import argparse
import ctypes
import fcntl
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from support.broken import BROKEN, break_build
from support.stage import DYING, Referee, words

import safe_gpu
from safe_gpu.claim.search import search
from safe_gpu.coordination import host_lock
from safe_gpu.coordination.directory import Directory
from safe_gpu.coordination.entry import is_alive
from safe_gpu.drivers.presets import preset
from safe_gpu.errors import SafeGpuError
from safe_gpu.host import procfs
from safe_gpu.selection.sharing import share_capacity

PRESET = "dgx-a100"
GPUS = [gpu.uuid for gpu in preset(PRESET).gpus()]
CAPACITY = share_capacity(preset(PRESET).gpus()[0]) or 0
NEIGHBOUR = 4711
FOUND = ("DOUBLE", "LOST", "GHOST", "DIED")
"""What a race must not find: two on one GPU, a lost update, a dead entry that counts, an error that nobody expects."""


class PackageClaim:
    """A claim of this package.

    Attributes:
        inside: whether it is inside another one.
    """

    def __init__(self, gpus: Sequence[str], number: int, patience: float, share: int | None, delegate: bool) -> None:
        sizes = {"share": str(share)} if share else {}
        nothing = safe_gpu.NoPlaceholder()
        options = {"timeout": patience, "affinity": None, "only": tuple(gpus), "delegate": delegate, **sizes}
        self.owner = safe_gpu.GPUOwner(number, nothing, **options)  # type: ignore[arg-type]
        self.gpus = tuple(gpu.uuid for gpu in self.owner.gpus)
        self.release = self.owner.release_gpus
        assert self.owner._claim is not None
        self.inside = bool(self.owner._claim.inside)


class ClientClaim:
    """A claim of the client in C, which is told to end, or killed."""

    inside = False

    def __init__(self, process: "subprocess.Popen[str]", uuids: Sequence[str]) -> None:
        self.process, self.gpus = process, tuple(uuids)

    def release(self) -> None:
        if random.random() < 0.2:
            self.process.kill()
        self.process.communicate("\n")


def claim(
    client: str, gpus: Sequence[str], number: int, patience: float, share: int | None = None, *, delegate: bool = False
) -> PackageClaim | ClientClaim | None:
    """Return a claim, of the client in C if its path is given; None where there were too few GPUs."""
    if not client:
        try:
            return PackageClaim(gpus, number, patience, share, delegate)
        except safe_gpu.NotEnoughGpusError:
            return None
    words = [client, "-n", number, "-g", ",".join(gpus), "-m", CAPACITY, "-s", share or 0, "-t", patience, "-p", PRESET]
    process = subprocess.Popen(
        [*map(str, words), "sh", "-c", "echo $CUDA_VISIBLE_DEVICES $SAFE_GPU_SCOPE; read line"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    uuids, _, scope = process.stdout.readline().strip().partition(" ")
    if uuids:
        found = ClientClaim(process, uuids.split(","))
        found.inside = bool(scope)
        return found
    _, errors = process.communicate()
    if process.returncode != 75:
        raise AssertionError(f"the client in C ended with {process.returncode}: {errors}")
    return None


def compete(referee: Referee, options: argparse.Namespace, number: int) -> None:
    """Claim again and again: whole GPUs, shares, and for claims inside."""
    elsewhere = options.directories and number % 4 == 3
    os.environ["SAFE_GPU_DIR"] = str(referee.directory / (f"private{number}" if elsewhere else "state"))
    gpus, client = GPUS[: options.gpus], options.client if number % 2 == 1 else ""
    while True:
        part = random.choice([None, 2, 3, 4]) if options.shares and number % 3 == 0 else None
        share = None if part is None else (CAPACITY * part // 8 >> 20) << 20
        delegate = options.inside and share is None and not client and random.random() < 0.3
        wanted = 1 if share else random.choice([1, 1, 2])
        try:
            mine = claim(client, gpus, wanted, random.choice([0, 0.3, 2]), share, delegate=delegate)
        except SafeGpuError as err:
            referee.note("ERROR", type(err).__name__, err)
            continue
        if mine is None:
            referee.note("REFUSED")
            continue
        locks = [fd for uuid in mine.gpus for fd in referee.begin(uuid, share)]
        counts = {uuid: referee.count(uuid) for uuid in mine.gpus}
        if delegate:
            work_inside(referee, mine, locks, options)
        if options.orphans and random.random() < 0.1 and not os.fork():
            time.sleep(random.uniform(0, 0.05))
            os._exit(0)
        time.sleep(random.uniform(0, 0.02))
        if random.random() < 0.15:
            os.kill(os.getpid(), signal.SIGKILL)
        if share is None:
            for uuid, count in counts.items():
                referee.count(uuid, count + 1)
                referee.note("COUNTED", uuid)
        referee.end(locks)
        referee.note("CLAIMED", share, delegate)
        mine.release()


def work_inside(
    referee: Referee, outer: PackageClaim | ClientClaim, locks: list[int], options: argparse.Namespace
) -> None:
    """Let two children claim inside a claim. They may outlive it, and keep its entry."""
    children = []
    for _ in range(2):
        pid = os.fork()
        if pid:
            children.append(pid)
            continue
        try:
            for fd in locks:
                os.close(fd)  # of what the claim around it uses
            if random.random() < 0.5:
                outer.owner._claim._entry.release()  # type: ignore[union-attr]
            if random.random() < 0.5:
                time.sleep(random.uniform(0, 0.02))
            claim_inside(referee, options)
        except BaseException as err:
            referee.note("DIED", "inside", type(err).__name__, err)
        finally:
            os._exit(0)
    if random.random() < 0.3:
        time.sleep(random.uniform(0, 0.02))
        os.kill(os.getpid(), signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)


def claim_inside(referee: Referee, options: argparse.Namespace) -> None:
    """Claim one GPU of the claim around, or any where that has ended."""
    client = options.client if random.random() < 0.5 else ""
    mine = claim(client, GPUS[: options.gpus], 1, 0.3)
    referee.note("NOTHING" if mine is None else "INSIDE" if mine.inside else "OUTSIDE")
    if mine is None:
        return
    (uuid,) = mine.gpus
    until = time.monotonic() + DYING
    locks = [] if mine.inside else referee.begin(uuid, None)
    while mine.inside and not locks:
        if lock := referee.lock(uuid, "inside"):
            locks.append(lock)
        elif time.monotonic() > until or referee.lives(uuid, "inside"):
            referee.note("DOUBLE", uuid, "inside", os.getpid())
            return
        else:
            time.sleep(0.001)
    time.sleep(random.uniform(0, 0.03))
    if random.random() < 0.2:
        os.kill(os.getpid(), signal.SIGKILL)
    referee.end(locks)
    mine.release()


def disturb(referee: Referee) -> None:
    """Lock and read what others made, as another user."""
    os.setresgid(NEIGHBOUR, NEIGHBOUR, NEIGHBOUR)
    os.setresuid(NEIGHBOUR, NEIGHBOUR, NEIGHBOUR)
    kept: list[int] = []
    while True:
        with suppress(OSError):
            for name in os.listdir(referee.directory / "state" / "claims"):
                with suppress(OSError):
                    fd = os.open(referee.directory / "state" / "claims" / name, os.O_RDONLY | os.O_NONBLOCK)
                    kept.append(fd)
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.02)
        for fd in kept[:-50]:
            os.close(fd)
        del kept[:-50]


def watch(referee: Referee) -> None:
    """Look for entries that count although their process has ended and left nothing behind."""
    suspects: dict[str, float] = {}
    while True:
        with (
            suppress(OSError, SafeGpuError),
            Directory(str(referee.directory / "state"), "claims", make=False) as claims,
        ):
            for name in os.listdir(claims.fd):
                with suppress(OSError, ValueError):
                    pid = json.loads((Path(claims.path) / name).read_bytes())["pid"]
                    if is_alive(claims, name) and procfs.has_ended(pid):
                        began = suspects.setdefault(name, time.monotonic())
                        if time.monotonic() - began > 3 * DYING:
                            referee.note("GHOST", name)
        time.sleep(0.1)


def race(directory: Path, options: argparse.Namespace) -> Counter[str]:
    """Race for a while and return how often each word was noted."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    referee = Referee(directory, CAPACITY)
    directory.chmod(0o777)
    for name in [name for name in os.environ if name.startswith("SAFE_GPU_")]:
        del os.environ[name]
    os.environ.update(
        SAFE_GPU_DRIVER=f"simulated:{PRESET}",
        SAFE_GPU_SIMULATED_DIR=str(directory / "tree"),
        SAFE_GPU_LEGACY_LOCK="never",
    )
    logging.getLogger("safe_gpu").addHandler(logging.NullHandler())
    search._import_all()  # not by each process
    if options.host_lock == "off":
        host_lock.lock_file = lambda fd, path: True
    workers = {f"worker{n}": lambda n=n: compete(referee, options, n) for n in range(options.processes)}
    if os.geteuid() == 0:
        workers["neighbour"] = lambda: disturb(referee)
    if not options.orphans:
        workers["watcher"] = lambda: watch(referee)
    running: dict[int, str] = {}

    def start(name: str) -> None:
        pid = os.fork()
        if pid:
            running[pid] = name
            return
        try:
            if options.networks and name.startswith("worker") and ctypes.CDLL(None).unshare(0x40000000):
                raise OSError("cannot make a network namespace")
            random.seed(os.urandom(8))
            break_build(options.broken)
            workers[name]()
        except BaseException as err:
            referee.note("DIED", name, type(err).__name__, err)
        finally:
            os._exit(1)

    for name in workers:
        start(name)
    end = time.monotonic() + options.seconds
    try:
        while time.monotonic() < end:
            time.sleep(0.05)
            if random.random() < 0.3:
                victim = random.choice([pid for pid, name in running.items() if name.startswith("worker")])
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
            if options.host_lock == "unlinked":
                with suppress(OSError):
                    os.unlink(directory / "state" / "host.lock")
            if options.directories and random.random() < 0.05:
                shutil.rmtree(directory / "state", ignore_errors=True)
            with suppress(ChildProcessError):
                while (pid := os.waitpid(-1, os.WNOHANG)[0]) > 0:
                    if pid in running:
                        start(running.pop(pid))
            if options.until_found and any(word in FOUND for word in words(directory)):
                break
    finally:
        with suppress(ChildProcessError):
            while True:  # what the workers have left behind too
                for pid in procfs.descendants(os.getpid()):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                os.waitpid(-1, 0)
    noted = Counter(words(directory))
    for uuid in GPUS:
        lines = (directory / "log").read_text().split("\n")
        counted = sum(line == f"COUNTED {uuid}" for line in lines)
        # A process may be killed between its write and its note: then the counter is ahead.
        if referee.count(uuid) < counted:
            noted["LOST"] += counted - referee.count(uuid)
    return noted


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--gpus", type=int, default=3)
    parser.add_argument("--host-lock", choices=("on", "off", "unlinked"), default="on")
    parser.add_argument("--broken", choices=("", *BROKEN), default="")
    parser.add_argument("--shares", action="store_true")
    parser.add_argument("--inside", action="store_true", help="claims inside claims")
    parser.add_argument("--orphans", action="store_true", help="children outlive their parents")
    parser.add_argument("--directories", action="store_true", help="several state directories, and rm -rf")
    parser.add_argument("--networks", action="store_true", help="a network for each process: doors are not seen")
    parser.add_argument("--client", default="", help="path of the client in C, which every second process uses")
    parser.add_argument("--until-found", action="store_true", help="end with the first fault")
    return parser.parse_args(arguments)


def main() -> int:
    options = options_of(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="race-") as directory:
        noted = race(Path(directory), options)
        print(dict(sorted(noted.items())))
        lines = (Path(directory) / "log").read_text().split("\n")
        for line in [line for line in lines if line.startswith((*FOUND, "ERROR"))][:10]:
            print(line)
    return int(any(noted[word] for word in FOUND))


if __name__ == "__main__":
    sys.exit(main())
