"""A race of claims, with kill -9, children left behind, and directories that are removed.

A referee (see :mod:`support.referee`) looks for GPUs that are booked twice, and with --work the driver's list of
processes is a second one. A watcher looks for entries of dead processes that still count.
"""

import argparse
import ctypes
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from support import racing
from support.actor import become
from support.referee import Mark
from support.stage import HostDirectory

import safe_gpu
from safe_gpu.coordination.directory import Directory
from safe_gpu.coordination.entry import is_alive
from safe_gpu.drivers import opened_driver
from safe_gpu.errors import SafeGpuError
from safe_gpu.gpus.devices import Gpu
from safe_gpu.host import procfs
from safe_gpu.runtimes.hip import HIP
from safe_gpu.selection.sharing import share_capacity

NEIGHBOUR = 4711
USERS = (4712, 4713)
DYING = 1.0  # seconds that an entry may count after the end of its process


class PackageClaim:
    """A claim of this package.

    Attributes:
        inside: whether it is inside another one.
    """

    def __init__(self, number: int, *, work: bool, **options: Any) -> None:
        placeholder = None if work else safe_gpu.NoPlaceholder()
        self.owner = safe_gpu.GPUOwner(number, placeholder, affinity=None, **options)
        self.gpus = tuple(gpu.uuid for gpu in self.owner.gpus)
        self.release = self.owner.release_gpus
        assert self.owner._claim is not None
        self.inside = bool(self.owner._claim.inside)


class ClientClaim:
    """A claim of the client in C, which is told to end, or killed."""

    def __init__(self, process: "subprocess.Popen[str]", said: str) -> None:
        uuids, _, scope = said.strip().partition(" ")
        self.process = process
        self.gpus = tuple(uuid for uuid in uuids.split(",") if uuid)
        self.inside = bool(scope)

    def release(self) -> None:
        racing.end_client(self.process)


class Race(racing.Race):
    """A race for some GPUs of a host.

    Args:
        usable: the GPUs of the host, of which some are raced for.

    Attributes:
        found: two on one GPU, a dead entry that counts, an error that nobody expects.
        gpus: UUIDs of those that are raced for.
    """

    found = ("violation", "ghost", "died")

    def __init__(self, host: HostDirectory, usable: list[Gpu], options: argparse.Namespace) -> None:
        self.gpus = [gpu.uuid for gpu in usable][: options.gpus]
        self.capacity = share_capacity(usable[0]) or 0
        super().__init__(host, self.capacity, options)

    def works(self) -> dict[str, Callable[[], None]]:
        found = super().works()
        if os.geteuid() == 0:
            found["neighbour"] = self.lock_and_read
        if not self.options.orphans:
            found["watcher"] = self.watch
        return found

    def prepare(self, name: str) -> None:
        super().prepare(name)
        if self.options.users and name.startswith(racing.WORKER):
            become(USERS[int(name[-1]) % 2])
        if self.options.hip:
            ctypes.CDLL(self.options.hip)

    def disturb(self) -> None:
        """Remove what claims need."""
        if self.options.host_lock == "unlinked":
            with suppress(OSError):
                os.unlink(f"{self.host.state}/host.lock")
        if self.options.directories and random.random() < 0.05:
            shutil.rmtree(self.host.state, ignore_errors=True)

    def clear_away(self, pid: int) -> None:
        if self.options.hip:
            shutil.rmtree(Path(self.options.root, "sys/class/kfd/kfd/proc", str(pid)), ignore_errors=True)

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
        words = ["-n", number, "-g", ",".join(self.gpus), "-m", self.capacity, "-s", share or 0, "-t", patience]
        command = "echo $CUDA_VISIBLE_DEVICES $SAFE_GPU_SCOPE; read line"
        process, said = racing.start_client(client, words, command)
        if said.strip():
            return ClientClaim(process, said)
        _, errors = process.communicate()
        if "the first claim of the package makes it" in errors:
            self.tell("no directory")  # the example makes none
        elif process.returncode != 75:
            raise AssertionError(f"the client in C ended with {process.returncode}: {errors}")
        return None

    def compete(self, number: int) -> None:
        """Claim again and again: whole GPUs, shares, and for claims inside."""
        options = self.options
        if options.directories and number % 4 == 3:
            os.environ["SAFE_GPU_DIR"] = f"{self.host.path}/private{number}"
            if options.client:
                self.claim_once()  # makes the directory, which the example in C does not
        client = ""
        if number % 2 == 1:
            client = options.client
        while True:
            share = None
            if options.shares and number % 3 == 0:
                share = self.draw_share()
            delegate = options.inside and share is None and not client and random.random() < 0.3
            wanted = random.choice([1, 1, 2])
            if share is not None:
                wanted = 1
            try:
                mine = self.claim(client, wanted, random.choice([0, 0.3, 2]), share, delegate=delegate)
            except SafeGpuError as err:
                self.tell("error", error=repr(err))
                continue
            if mine is None:
                self.tell("refused")
                continue
            self.hold(mine, share, delegate=delegate)
            if options.hip:  # HIP chooses its GPUs once in a process
                return

    def claim_once(self) -> None:
        """Claim one GPU by the package, and give it back at once."""
        with suppress(SafeGpuError):
            mine = self.claim("", 1, 0)
            if mine is not None:
                mine.release()

    def draw_share(self) -> int | None:
        """Bytes of a share, whole MiB; or None, a whole GPU."""
        eighths = random.choice([None, 2, 3, 4])
        if eighths is None:
            return None
        return (self.capacity * eighths // 8 >> 20) << 20

    def hold(self, mine: PackageClaim | ClientClaim, share: int | None, *, delegate: bool) -> None:
        """Hold what was claimed for a moment, and release it; this process or its children may die meanwhile."""
        marks = [self.referee.begin(uuid, share) for uuid in mine.gpus]
        if self.options.work and share is None and isinstance(mine, PackageClaim):
            self.look_for_company(mine)
        if delegate:
            self.work_inside(mine, marks)
        if self.options.orphans and random.random() < 0.1 and not os.fork():
            time.sleep(random.uniform(0, 0.05))
            os._exit(0)
        time.sleep(random.uniform(0, 0.02))
        if random.random() < 0.15:
            os.kill(os.getpid(), signal.SIGKILL)
        for mark in marks:
            mark.end()
        self.tell("claimed", share=share, delegate=delegate)
        mine.release()

    def look_for_company(self, mine: PackageClaim) -> None:
        """Tell of other processes that the driver, or HIP of other GPUs that it shows, on the GPUs of this claim."""
        with opened_driver() as driver:
            snapshot = driver.snapshot()
        for gpu in mine.owner.gpus:
            now = snapshot.by_uuid(gpu.uuid)
            pids: set[int] = set()
            if now is not None and now.processes:
                pids = {process.pid for process in now.processes} - {os.getpid()}
            rivals = {pid for pid in pids if self.referee.start_time(pid)}
            if rivals:
                self.tell("violation", what="company on the driver's list", uuid=gpu.uuid, rivals=sorted(rivals))
        if self.options.hip:
            shown = HIP.load().all_shown()
            if not all(HIP.is_same(*pair) for pair in zip(shown, mine.owner.gpus, strict=True)):
                self.tell("violation", what="HIP shows others", shown=shown, claimed=mine.gpus)

    def work_inside(self, outer: PackageClaim | ClientClaim, marks: list[Mark]) -> None:
        """Let two children claim inside a claim. They may outlive it, and keep its entry."""
        children = []
        for _ in range(2):
            pid = os.fork()
            if not pid:
                self.be_child(outer, marks)
            children.append(pid)
        if random.random() < 0.3:
            time.sleep(random.uniform(0, 0.02))
            os.kill(os.getpid(), signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)

    def be_child(self, outer: PackageClaim | ClientClaim, marks: list[Mark]) -> None:
        """In a child of the process that has the outer claim: claim inside it; does not return."""
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

    def claim_inside(self) -> None:
        """Claim one GPU of the claim around, or any where that has ended."""
        client = ""
        if random.random() < 0.5:
            client = self.options.client
        mine = self.claim(client, 1, 0.3)
        if mine is None:
            self.tell("nothing")
            return
        self.tell("inside" if mine.inside else "outside")
        marks = [self.referee.begin(uuid, inside=mine.inside) for uuid in mine.gpus]
        time.sleep(random.uniform(0, 0.03))
        if random.random() < 0.2:
            os.kill(os.getpid(), signal.SIGKILL)
        for mark in marks:
            mark.end()
        mine.release()

    def lock_and_read(self) -> None:
        """Lock and read what others made, as another user."""
        become(NEIGHBOUR)
        kept: list[int] = []
        claims = Path(self.host.state, "claims")
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
            with suppress(OSError, SafeGpuError), Directory(self.host.state, "claims", make=False) as claims:
                for name in os.listdir(claims.fd):
                    if self.seems_dead(claims, name):
                        began = suspects.setdefault(name, time.monotonic())
                        if time.monotonic() - began > 3 * DYING:
                            self.tell("ghost", name=name)
            time.sleep(0.1)

    def seems_dead(self, claims: Directory, name: str) -> bool:
        """Whether an entry counts although its process has ended."""
        with suppress(OSError, ValueError):
            pid = json.loads(Path(claims.path, name).read_bytes())["pid"]
            return is_alive(claims, name) and procfs.has_ended(pid)
        return False


def main() -> int:
    parser = racing.race_parser(__doc__)
    parser.add_argument("--gpus", type=int, default=3)
    parser.add_argument("--preset", default="dgx-a100", help="the simulated host")
    parser.add_argument("--work", action="store_true", help="claims have something on their GPUs")
    parser.add_argument("--hip", default="", metavar="LIBRARY", help="a fake HIP, whose host is the directory --root")
    parser.add_argument("--root", default="")
    parser.add_argument("--host-lock", choices=("on", "off", "unlinked"), default="on")
    parser.add_argument("--inside", action="store_true", help="claims inside claims")
    parser.add_argument("--orphans", action="store_true", help="children outlive their parents")
    parser.add_argument("--directories", action="store_true", help="several state directories, and rm -rf")
    parser.add_argument("--users", action="store_true", help="of two users; needs root")
    options = parser.parse_args()
    with racing.host_of_race(options.preset, has_host_lock=options.host_lock != "off") as host:
        if options.hip:
            os.environ.update(SAFE_GPU_DRIVER="kfd", SAFE_GPU_FSROOT=options.root)
        with opened_driver() as driver:
            usable = [gpu for gpu in driver.snapshot().gpus if not gpu.unusable]
        race = Race(host, usable, options)
        told = race.run()
    return race.report(told)


if __name__ == "__main__":
    sys.exit(main())
