"""The host of a soak test, its policy file, its strangers and its weather, and what the referee knows besides."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import ROOT  # noqa: F401 - the package beside this script
from support.stage import Mark, Referee, simulate

from safe_gpu import NoDriverError
from safe_gpu.drivers import simulated
from safe_gpu.drivers.simulated import SimulatedDriver
from safe_gpu.gpus.devices import Gpu, HostSnapshot

_LAST_MOMENTS = 5.0  # how long a dying process may keep its locks, seconds


class Ground:
    """A directory with the state directories of a soak, and the referee's.

    It is given to other processes by its path. Everything in it is open to all users.

    Args:
        root: the directory; it is made, with everything in it, if it does not exist.
        preset: the simulated host; "" is the one for which the directory was made.
    """

    def __init__(self, root: str, preset: str = "") -> None:
        self.root = root
        self.state, self.other, self.private = f"{root}/state", f"{root}/other", f"{root}/private"
        proc = f"{root}/proc" if os.path.exists(f"{root}/proc/self") else "/proc"
        self.islands = os.path.exists(f"{root}/islands")
        if not os.path.isdir(root):
            before = os.umask(0)
            for name in ("", "strangers", "tree", "private", "proc"):
                os.mkdir(f"{root}/{name}", 0o1777)
            os.umask(before)
            replace_file(f"{root}/preset", preset)
        self.preset = preset or Path(f"{root}/preset").read_text()
        self.gpus = [gpu.uuid for gpu in SimulatedDriver(self.preset, root).idle.gpus]
        memory = max(gpu.memory_total or 0 for gpu in SimulatedDriver(self.preset, root).idle.gpus)
        self.referee = Referee(f"{root}/referee", memory, proc)
        self.tell = self.referee.tell

    @classmethod
    def new(cls, preset: str) -> Ground:
        above = tempfile.mkdtemp(prefix="safe-gpu-soak-")
        os.chmod(above, 0o755)
        return cls(f"{above}/ground", preset)

    def enter(self, state: str | None = None) -> None:
        """Make this process one on the simulated host."""
        simulate(self.preset, state or self.state, SAFE_GPU_SIMULATED_DIR=f"{self.root}/tree")
        if os.path.exists(f"{self.root}/policy.ini"):
            os.environ["SAFE_GPU_POLICY"] = f"{self.root}/policy.ini"

    def has_cleaner(self) -> bool:
        """Whether a cleaner is at work: then users and sharers do not see a claim whose entry is gone."""
        return os.path.exists(f"{self.root}/cleaner")

    def mark(self, uuid: str, share: int | None = None, *, inside: bool = False) -> Mark:
        """Note that this process has a GPU, or a share of it in bytes. Tell of shares in two state directories."""
        mark = self.referee.begin(uuid, share, inside=inside, uid=os.getuid(), home=_home())
        homes = {one["home"] for one in self.referee.held(uuid) if self.referee.lives(one)}
        if share is not None and len(homes) > 1 and not self.has_cleaner():
            self.tell("violation", what="shared by two state directories", uuid=uuid, homes=homes)
        return mark

    def count_own(self, number: int) -> None:
        """Tell if this user holds more whole GPUs by this state directory than it may."""
        mine = os.getuid(), _home(), None, False  # claims inside claims have no limit
        held = [one for one in self.referee.held() if self.referee.lives(one)]
        own = {one["uuid"] for one in held if (one["uid"], one["home"], one["share"], one["inside"]) == mine}
        if len(own) > allowed(self.root, os.getuid()) and not self.has_cleaner():
            self.tell("violation", what="a user over the limit", number=number, uuids=sorted(own))

    # ---- The driver's list ----

    def look_for_company(self, uuids: list[str]) -> None:
        """Tell of processes of other claims on these GPUs, which this process holds."""
        mine = {os.getpid(), self.referee.pid()}
        for name in os.listdir(tree) if os.path.isdir(tree := f"{self.root}/tree/{self.preset}") else ():
            uuid, _, process = name.partition(".")
            pid = process.partition("-")[0]
            if uuid not in uuids or int(pid) in mine or not self.is_open(name):
                continue
            if not os.path.exists(f"{self.root}/strangers/{pid}"):  # last, since strangers register before they come
                self.tell("violation", what="company on the driver's list", uuid=uuid, rival=pid)

    def register_stranger(self) -> None:
        """Remember this process as one that the driver may list beside a claim."""
        with suppress(FileExistsError, PermissionError):  # the same pid in another PID namespace
            os.close(os.open(f"{self.root}/strangers/{os.getpid()}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))

    def is_open(self, name: str) -> bool:
        """Whether a process that is not about to be gone has this context."""
        path = f"{self.root}/tree/{self.preset}/{name}"
        deadline = time.monotonic() + _LAST_MOMENTS
        while time.monotonic() < deadline:
            try:
                with open(path, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False
            except OSError as err:
                if err.errno != errno.EWOULDBLOCK:
                    return False
            pid = int(name.partition(".")[2].partition("-")[0])
            if pid > 1 and self.referee.start_time(pid):
                return True
            time.sleep(0.001)
        return True


def _home() -> str:
    """The state directory of this process, by its inode: limits count claims of one directory."""
    try:
        return str(os.stat(os.environ["SAFE_GPU_DIR"]).st_ino)
    except OSError:
        return "-"


def be_a_stranger(ground: Ground, rng: random.Random) -> None:
    """Take a GPU without asking, known to the referee by the pid."""
    ground.register_stranger()
    driver = SimulatedDriver(ground.preset)
    with driver.occupy(rng.choice(driver.idle.gpus).uuid, memory=rng.choice((300, 3000)) << 20):
        time.sleep(rng.uniform(0.02, 0.5))


class Ambush:
    """Between the first poll of a claim and its entry, a stranger takes all GPUs that were free, for two seconds.

    A claim that gets one of these GPUs while the stranger is there has not looked a second time.
    """

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._pid = 0
        self._contexts: list[str] = []  # their names: in another PID namespace a stranger may have the same pid
        snapshot = SimulatedDriver.snapshot

        def then_a_stranger(driver: SimulatedDriver) -> HostSnapshot:
            seen = snapshot(driver)
            SimulatedDriver.snapshot = snapshot
            ready, told = os.pipe()
            self._pid = os.fork()
            if self._pid == 0:
                self._wait_in(driver, seen.gpus, told)
            os.close(told)
            self._contexts = os.read(ready, 65536).decode().split()
            os.close(ready)
            return seen

        SimulatedDriver.snapshot = then_a_stranger

    def _wait_in(self, driver: SimulatedDriver, gpus: tuple[Gpu, ...], told: int) -> None:
        self._ground.register_stranger()
        contexts = [driver.occupy(gpu.uuid) for gpu in gpus if not gpu.processes]
        os.write(told, " ".join(["x", *(context._name for context in contexts)]).encode())
        time.sleep(2.0)
        os._exit(len(contexts) & 0)

    def judge(self, uuids: list[str]) -> None:
        """Tell of the stranger on these GPUs, which were claimed just now."""
        for name in self._contexts:
            uuid = name.partition(".")[0]
            if uuid in uuids and self._ground.is_open(name):
                self._ground.tell("violation", what="a stranger was there before the claim", uuid=uuid, rival=self._pid)


def bad_weather(ground: Ground) -> None:
    """Make the driver of this process fail as the ground's file ``weather`` says at each poll."""
    snapshot, usage, is_alive = SimulatedDriver.snapshot, SimulatedDriver.usage, simulated.is_alive

    def weather() -> dict[str, Any]:
        try:
            return json.loads(Path(f"{ground.root}/weather").read_text())
        except (OSError, ValueError):
            return {}

    def under(sky: dict[str, Any], gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
        if sky.get("stall"):
            time.sleep(sky["stall"])
        if sky.get("fails"):
            raise NoDriverError("the simulated driver fails for the soak test")
        changed = []
        for gpu in gpus:
            if gpu.uuid in sky.get("lost", ()):
                gpu = gpu._replace(processes=None, process_error="GPU is lost", unusable="GPU is lost", lost=True)
            elif gpu.uuid in sky.get("hides", ()):
                gpu = gpu._replace(processes=None, process_error="hidden for the soak test")
            changed.append(gpu)
        return tuple(changed)

    def late(name: str, directory: int) -> bool:
        with suppress(OSError):
            age = time.time() - os.stat(name, dir_fd=directory).st_ctime
            if age < weather().get("lag", 0):
                return False
        return is_alive(name, directory)

    def bad_snapshot(self: SimulatedDriver) -> HostSnapshot:
        whole = snapshot(self)
        return HostSnapshot(under(weather(), whole.gpus), whole.driver, whole.driver_version, whole.name_prefix)

    def bad_usage(self: SimulatedDriver, gpus: Any) -> tuple[Gpu, ...]:
        return under(weather(), usage(self, gpus))

    simulated.is_alive = late
    SimulatedDriver.snapshot = bad_snapshot
    SimulatedDriver.usage = bad_usage


_OTHERS = {"default_hold": "2s", "max_hold": "1s", "max_wait": "2s"}


class Policy:
    """The policy file, which changes only while nobody claims, and what the referee has to know of it.

    Args:
        root: the directory of the ground. The file counts only if root writes it.
        order: in which users are served.
    """

    def __init__(self, root: str, order: str = "fifo") -> None:
        self._root, self._order = root, order
        self.set({})

    def set(self, most: Mapping[int, int | None], others: Mapping[str, str] | None = None) -> None:
        """Write the policy.

        Args:
            most: uid -> how many GPUs the user may hold at once; None is no limit. Others have no limit.
            others: further keys of ``[default]``, as text.
        """
        lines = ["[host]", f"order = {self._order}", "[default]"]
        lines += [f"{key} = {value}" for key, value in (others or {}).items()]
        for uid, number in most.items():
            lines += [f"[user {uid}]", f"max_gpus = {'unlimited' if number is None else number}"]
        replace_file(f"{self._root}/policy.ini", "\n".join(lines) + "\n")
        limits = {str(uid): number for uid, number in most.items() if number is not None}
        replace_file(f"{self._root}/limits", json.dumps({"most": limits, "max_hold": "max_hold" in (others or {})}))

    def change(self, rng: random.Random, uids: tuple[int, ...]) -> None:
        """Write a random policy for these users."""
        most = {uid: rng.choice((None, 1, 2, 3, 4, 6)) for uid in uids}
        self.set(most, {key: text for key, text in _OTHERS.items() if rng.random() < 0.15})


def allowed(root: str, uid: int) -> float:
    """The most GPUs that a user may hold; ``math.inf`` is no limit."""
    return float(_limits(root)["most"].get(str(uid), math.inf))


def may_refuse(root: str, uid: int, nb_gpus: int, hold_for: float | None) -> bool:
    """Whether the policy allows the user no such claim."""
    too_long = hold_for is not None and hold_for > 1.0 and _limits(root)["max_hold"]
    return too_long or nb_gpus > allowed(root, uid)


def _limits(root: str) -> dict[str, Any]:
    try:
        return json.loads(Path(f"{root}/limits").read_text())
    except FileNotFoundError:
        return {"most": {}, "max_hold": False}


def replace_file(path: str, text: str) -> None:
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(f"{path}.new", 0o644)
    os.rename(f"{path}.new", path)
