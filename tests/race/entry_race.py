"""A race of claims, with kill -9, children left behind, and directories that are removed.

A referee (see :mod:`support.referee`) looks for GPUs that are booked twice, and with --work the driver's list of
processes is a second one. A watcher looks for entries of dead processes that still count.
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
from contextlib import suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from support.actor import become
from support.broken import BROKEN, break_build
from support.referee import Mark, Referee
from support.stage import import_everything, simulate

import safe_gpu
from safe_gpu.coordination import host_lock
from safe_gpu.coordination.directory import Directory
from safe_gpu.coordination.entry import is_alive
from safe_gpu.drivers import opened_driver
from safe_gpu.errors import SafeGpuError
from safe_gpu.host import procfs
from safe_gpu.runtimes.hip import HIP
from safe_gpu.selection.sharing import share_capacity

NEIGHBOUR = 4711
USERS = (4712, 4713)
DYING = 1.0  # seconds that an entry may count after the end of its process
FOUND = ("violation", "ghost", "died")
"""What a race must not find: two on one GPU, a dead entry that counts, an error that nobody expects."""


class PackageClaim:
    """A claim of this package.

    Attributes:
        inside: whether it is inside another one.
    """

    def __init__(self, number: int, *, work: bool, **options: Any) -> None:
        self.owner = safe_gpu.GPUOwner(number, None if work else safe_gpu.NoPlaceholder(), affinity=None, **options)
        self.gpus = tuple(gpu.uuid for gpu in self.owner.gpus)
        self.release = self.owner.release_gpus
        assert self.owner._claim is not None
        self.inside = bool(self.owner._claim.inside)


class ClientClaim:
    """A claim of the client in C, which is told to end, or killed."""

    def __init__(self, process: "subprocess.Popen[str]", said: str) -> None:
        uuids, _, scope = said.strip().partition(" ")
        self.process, self.gpus, self.inside = process, tuple(filter(None, uuids.split(","))), bool(scope)

    def release(self) -> None:
        if random.random() < 0.2:
            self.process.kill()
        self.process.communicate("\n")


class Race:
    """What all processes of a race know.

    Attributes:
        gpus: UUIDs of those that are raced for.
    """

    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        self.directory, self.options = directory, options
        with opened_driver() as driver:
            gpus = [gpu for gpu in driver.snapshot().gpus if not gpu.unusable]
        self.gpus = [gpu.uuid for gpu in gpus][: options.gpus]
        self.capacity = share_capacity(gpus[0]) or 0
        self.referee = Referee(str(directory / "referee"), self.capacity)
        self.tell = self.referee.tell

    def claim(
        self, client: str, number: int, patience: float, share: int | None = None, *, delegate: bool = False
    ) -> PackageClaim | ClientClaim | None:
        """Return a claim, of the client in C if its path is given; None where there were too few GPUs."""
        if not client:
            options = {"timeout": patience, "only": tuple(self.gpus), "delegate": delegate, "share": share}
            try:
                return PackageClaim(number, work=self.options.work, **options)
            except safe_gpu.NotEnoughGpusError:
                return None
        named, preset = ("-g", ",".join(self.gpus)), ("-p", self.options.preset)
        words = [client, "-n", number, *named, "-m", self.capacity, "-s", share or 0, "-t", patience, *preset]
        command = [*map(str, words), "sh", "-c", "echo $CUDA_VISIBLE_DEVICES $SAFE_GPU_SCOPE; read line"]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = subprocess.Popen(command, text=True, **streams)
        assert process.stdout is not None
        found = ClientClaim(process, process.stdout.readline())
        if found.gpus:
            return found
        _, errors = process.communicate()
        if process.returncode != 75:
            raise AssertionError(f"the client in C ended with {process.returncode}: {errors}")
        return None

    def compete(self, number: int) -> None:
        """Claim again and again: whole GPUs, shares, and for claims inside."""
        options = self.options
        elsewhere = options.directories and number % 4 == 3
        os.environ["SAFE_GPU_DIR"] = str(self.directory / (f"private{number}" if elsewhere else "state"))
        client = options.client if number % 2 == 1 else ""
        while True:
            part = random.choice([None, 2, 3, 4]) if options.shares and number % 3 == 0 else None
            share = None if part is None else (self.capacity * part // 8 >> 20) << 20
            delegate = options.inside and share is None and not client and random.random() < 0.3
            wanted = 1 if share else random.choice([1, 1, 2])
            try:
                mine = self.claim(client, wanted, random.choice([0, 0.3, 2]), share, delegate=delegate)
            except SafeGpuError as err:
                self.tell("error", error=repr(err))
                continue
            if mine is None:
                self.tell("refused")
                continue
            marks = [self.referee.begin(uuid, share) for uuid in mine.gpus]
            if options.work and share is None and isinstance(mine, PackageClaim):
                self.look_for_company(mine)
            if delegate:
                self.work_inside(mine, marks)
            if options.orphans and random.random() < 0.1 and not os.fork():
                time.sleep(random.uniform(0, 0.05))
                os._exit(0)
            time.sleep(random.uniform(0, 0.02))
            if random.random() < 0.15:
                os.kill(os.getpid(), signal.SIGKILL)
            for mark in marks:
                mark.end()
            self.tell("claimed", share=share, delegate=delegate)
            mine.release()
            if options.hip:  # HIP chooses its GPUs once in a process
                return

    def look_for_company(self, mine: PackageClaim) -> None:
        """Tell of other processes that the driver, or HIP of other GPUs that it shows, on the GPUs of this claim."""
        with opened_driver() as driver:
            snapshot = driver.snapshot()
        for gpu in mine.owner.gpus:
            now = snapshot.by_uuid(gpu.uuid)
            pids = {process.pid for process in (now and now.processes) or ()} - {os.getpid()}
            if rivals := [pid for pid in pids if self.referee.start_time(pid)]:
                self.tell("violation", what="company on the driver's list", uuid=gpu.uuid, rivals=rivals)
        if self.options.hip:
            shown = HIP.load().all_shown()
            if not all(HIP.is_same(*pair) for pair in zip(shown, mine.owner.gpus, strict=True)):
                self.tell("violation", what="HIP shows others", shown=shown, claimed=mine.gpus)

    def work_inside(self, outer: PackageClaim | ClientClaim, marks: list[Mark]) -> None:
        """Let two children claim inside a claim. They may outlive it, and keep its entry."""
        children = []
        for _ in range(2):
            pid = os.fork()
            if pid:
                children.append(pid)
                continue
            try:
                for mark in marks:
                    mark.close()  # of what the claim around it uses
                if random.random() < 0.5:
                    outer.owner._claim.entry.release()  # type: ignore[union-attr]
                if random.random() < 0.5:
                    time.sleep(random.uniform(0, 0.02))
                self.claim_inside()
            except BaseException as err:
                self.tell("died", who="inside", error=repr(err))
            finally:
                os._exit(0)
        if random.random() < 0.3:
            time.sleep(random.uniform(0, 0.02))
            os.kill(os.getpid(), signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)

    def claim_inside(self) -> None:
        """Claim one GPU of the claim around, or any where that has ended."""
        mine = self.claim(self.options.client if random.random() < 0.5 else "", 1, 0.3)
        self.tell("nothing" if mine is None else "inside" if mine.inside else "outside")
        if mine is None:
            return
        marks = [self.referee.begin(uuid, inside=mine.inside) for uuid in mine.gpus]
        time.sleep(random.uniform(0, 0.03))
        if random.random() < 0.2:
            os.kill(os.getpid(), signal.SIGKILL)
        for mark in marks:
            mark.end()
        mine.release()

    def disturb(self) -> None:
        """Lock and read what others made, as another user."""
        become(NEIGHBOUR)
        kept: list[int] = []
        claims = self.directory / "state" / "claims"
        while True:
            with suppress(OSError):
                for name in os.listdir(claims):
                    with suppress(OSError):
                        kept.append(os.open(claims / name, os.O_RDONLY | os.O_NONBLOCK))
                        fcntl.flock(kept[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(0.02)
            for fd in kept[:-50]:
                os.close(fd)
            del kept[:-50]

    def watch(self) -> None:
        """Look for entries that count although their process has ended and left nothing behind."""
        suspects: dict[str, float] = {}
        while True:
            with (
                suppress(OSError, SafeGpuError),
                Directory(str(self.directory / "state"), "claims", make=False) as claims,
            ):
                for name in os.listdir(claims.fd):
                    with suppress(OSError, ValueError):
                        pid = json.loads((Path(claims.path) / name).read_bytes())["pid"]
                        if is_alive(claims, name) and procfs.has_ended(pid):
                            began = suspects.setdefault(name, time.monotonic())
                            if time.monotonic() - began > 3 * DYING:
                                self.tell("ghost", name=name)
            time.sleep(0.1)

    def run(self) -> list[dict[str, Any]]:
        """Race for a while. Returns what was told."""
        options = self.options
        workers = {f"worker{n}": lambda n=n: self.compete(n) for n in range(options.processes)}
        if os.geteuid() == 0:
            workers["neighbour"] = self.disturb
        if not options.orphans:
            workers["watcher"] = self.watch
        running: dict[int, str] = {}

        def start(name: str) -> None:
            pid = os.fork()
            if pid:
                running[pid] = name
                return
            try:
                if options.networks and name.startswith("worker") and ctypes.CDLL(None).unshare(0x40000000):
                    raise OSError("cannot make a network namespace")
                if options.users and name.startswith("worker"):
                    become(USERS[int(name[-1]) % 2])
                if options.hip:
                    ctypes.CDLL(options.hip)
                random.seed(os.urandom(8))
                break_build(options.broken)
                workers[name]()
            except BaseException as err:
                self.tell("died", who=name, error=repr(err))
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
                        os.unlink(self.directory / "state" / "host.lock")
                if options.directories and random.random() < 0.05:
                    shutil.rmtree(self.directory / "state", ignore_errors=True)
                with suppress(ChildProcessError):
                    while (pid := os.waitpid(-1, os.WNOHANG)[0]) > 0:
                        if options.hip:  # what the kernel does
                            shutil.rmtree(Path(options.root, "sys/class/kfd/kfd/proc", str(pid)), ignore_errors=True)
                        if pid in running:
                            start(running.pop(pid))
                if options.until_found and any(told["event"] in FOUND for told in self.referee.events()):
                    break
        finally:
            with suppress(ChildProcessError):
                while True:  # what the workers have left behind too
                    for pid in procfs.descendants(os.getpid()):
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    os.waitpid(-1, 0)
        return self.referee.events()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--gpus", type=int, default=3)
    parser.add_argument("--preset", default="dgx-a100", help="the simulated host")
    parser.add_argument("--work", action="store_true", help="claims have something on their GPUs")
    parser.add_argument("--hip", default="", metavar="LIBRARY", help="a fake HIP, whose host is the directory --root")
    parser.add_argument("--root", default="")
    parser.add_argument("--host-lock", choices=("on", "off", "unlinked"), default="on")
    parser.add_argument("--break", dest="broken", choices=("", *BROKEN), default="")
    parser.add_argument("--shares", action="store_true")
    parser.add_argument("--inside", action="store_true", help="claims inside claims")
    parser.add_argument("--orphans", action="store_true", help="children outlive their parents")
    parser.add_argument("--directories", action="store_true", help="several state directories, and rm -rf")
    parser.add_argument("--networks", action="store_true", help="a network for each process: doors are not seen")
    parser.add_argument("--users", action="store_true", help="of two users; needs root")
    parser.add_argument("--client", default="", help="path of the client in C, which every second process uses")
    parser.add_argument("--until-found", action="store_true", help="end with the first fault")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    logging.getLogger("safe_gpu").addHandler(logging.NullHandler())
    with tempfile.TemporaryDirectory(prefix="race-") as directory:
        os.chmod(directory, 0o777)
        simulate(options.preset, f"{directory}/state", SAFE_GPU_SIMULATED_DIR=f"{directory}/tree")
        if options.hip:
            os.environ.update(SAFE_GPU_DRIVER="kfd", SAFE_GPU_FSROOT=options.root)
        import_everything()  # not by each process
        if options.host_lock == "off":
            host_lock.lock_file = lambda fd, path: True
        told = Race(Path(directory), options).run()
    counted = Counter(one["event"] for one in told)
    print(dict(sorted(counted.items())))
    for one in [one for one in told if one["event"] in (*FOUND, "error")][:10]:
        print(one)
    return int(any(counted[event] for event in FOUND))


if __name__ == "__main__":
    sys.exit(main())
