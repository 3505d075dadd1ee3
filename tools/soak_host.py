"""The host of a soak test, its policy file, and its referee: what is seen of claims without asking the claim code."""

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

from common import simulate

from safe_gpu import NoDriverError
from safe_gpu.drivers import simulated
from safe_gpu.drivers.simulated import SimulatedDriver
from safe_gpu.gpus.devices import Gpu, HostSnapshot

_BEGAN = "SOAK_BEGAN"
_LAST_MOMENTS = 5.0  # how long a dying process may keep its locks, seconds
_PF_EXITING = 0x4  # in the flags of /proc/PID/stat


class Stage:
    """A directory with the state directories of a soak, the referee's markers and the log of events.

    It is given to other processes by its path. Everything in it is open to all users.

    Args:
        root: the directory; it is made, with everything in it, if it does not exist.
        preset: the simulated host; "" is the one for which the directory was made.

    Attributes:
        began: when the claim of this process began, ``time.monotonic()``.
    """

    def __init__(self, root: str, preset: str = "") -> None:
        self.root = root
        self.began = float(os.environ.get(_BEGAN, "0"))
        self.state, self.other, self.private = f"{root}/state", f"{root}/other", f"{root}/private"
        self.proc = f"{root}/proc" if os.path.exists(f"{root}/proc/self") else "/proc"
        self.islands = os.path.exists(f"{root}/islands")
        self._events = -1
        if not os.path.isdir(root):
            before = os.umask(0)
            for name in ("", "markers", "shares", "strangers", "tree", "private", "proc"):
                os.mkdir(f"{root}/{name}", 0o1777)
            Path(f"{root}/events").touch(0o666)
            os.umask(before)
            replace_file(f"{root}/preset", preset)
        self.preset = preset or Path(f"{root}/preset").read_text()

    @classmethod
    def new(cls, preset: str) -> Stage:
        above = tempfile.mkdtemp(prefix="safe-gpu-soak-")
        os.chmod(above, 0o755)
        return cls(f"{above}/stage", preset)

    def enter(self, state: str | None = None) -> None:
        """Make this process one on the simulated host."""
        tree = f"{self.root}/tree"
        simulate(self.preset, state or self.state, SAFE_GPU_SIMULATED_DIR=tree)
        if os.path.exists(f"{self.root}/policy.ini"):
            os.environ["SAFE_GPU_POLICY"] = f"{self.root}/policy.ini"

    def begin(self) -> None:
        """A claim of this process, or of the program that it becomes, begins now."""
        self.began = time.monotonic()
        os.environ[_BEGAN] = str(self.began)

    def tell(self, event: str, **facts: Any) -> None:
        """Append an event to the log; one write, so that lines of several processes do not mix."""
        if self._events < 0:
            self._events = os.open(f"{self.root}/events", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        line = {"at": round(time.monotonic(), 4), "event": event, "pid": self.pid(), **facts}
        os.write(self._events, json.dumps(line).encode()[:4000] + b"\n")

    def close(self) -> None:
        """Close the log."""
        if self._events >= 0:
            os.close(self._events)

    def pid(self) -> int:
        """This process's number on the host, which is another one inside a PID namespace."""
        return int(os.readlink(f"{self.proc}/self"))

    def start_time(self, pid: int) -> str:
        """When a process started, in clock ticks since boot; "" if it is gone or exits."""
        try:
            words = Path(f"{self.proc}/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return ""
        return "" if words[0] in "ZX" or int(words[6]) & _PF_EXITING else words[19]

    def _lives(self, marker: str) -> bool:
        """Whether the owner that a marker names can still have its GPU. An empty marker is one in the making."""
        words = marker.split()
        return len(words) >= 2 and self.start_time(int(words[0])) == words[1]

    # ---- Detector 1: a lock for each GPU that one process can hold ----

    def mark(self, uuid: str) -> int:
        """Take the referee's lock of a GPU; tell of a double booking if a living process has it.

        Returns:
            The descriptor that holds it. Forked children hold it too, as they hold the entry.
        """
        fd = os.open(f"{self.root}/markers/{uuid}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        with suppress(PermissionError):
            os.fchmod(fd, 0o666)
        deadline = time.monotonic() + _LAST_MOMENTS
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                rival = os.pread(fd, 100, 0).decode()
                if self._lives(rival) or time.monotonic() > deadline:
                    self.tell("violation", what="double booking", uuid=uuid, rival=rival)
                    return fd
                time.sleep(0.001)
        self.sign(fd)
        if shares := self._shares(uuid):
            self.tell("violation", what="a whole claim beside a share", uuid=uuid, rival=sorted(shares.values()))
        return fd

    def sign(self, fd: int, *share: object) -> None:
        """Write into a marker whose it is: pid and start of the process, uid, state directory, limit of the user; and
        of a share what :meth:`mark_share` adds."""
        pid, uid = self.pid(), os.getuid()
        words = pid, self.start_time(pid), uid, self._home(), allowed(self.root, uid, self.began), *share
        line = (" ".join(map(str, words)) + "\n").encode()
        os.pwrite(fd, line, 0)
        os.ftruncate(fd, len(line))

    @staticmethod
    def _home() -> str:
        """The state directory of this process, by its inode: limits count claims of one directory."""
        try:
            return str(os.stat(os.environ["SAFE_GPU_DIR"]).st_ino)
        except OSError:
            return "-"

    @staticmethod
    def unmark(fd: int) -> None:
        """Give a lock back, before the GPU."""
        with suppress(OSError):
            os.ftruncate(fd, 0)
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def has_cleaner(self) -> bool:
        """Whether a cleaner is at work."""
        return os.path.exists(f"{self.root}/cleaner")

    # ---- Detector 2: a marker for each share of a GPU ----

    def mark_share(self, uuid: str, size: int, claim: str) -> int:
        """Mark a share of a GPU. Tell if then more is promised than there is, or somebody has the GPU who may not.

        Args:
            size: in bytes.
            claim: what the processes have in common that hold the share together.
        """
        fd, path = tempfile.mkstemp(prefix=".", dir=f"{self.root}/shares")
        os.fchmod(fd, 0o666)
        self.sign(fd, size, claim)
        os.rename(path, f"{self.root}/shares/{uuid}.{os.path.basename(path)[1:]}")
        # A whole claim marks the GPU before it looks for shares: of two that come at once one sees the other.
        with suppress(FileNotFoundError):
            rival = Path(f"{self.root}/markers/{uuid}").read_text()
            if self._lives(rival):
                self.tell("violation", what="a share beside a whole claim", uuid=uuid, rival=rival)
        first = self._shares(uuid)
        both = [words for name, words in self._shares(uuid).items() if name in first]  # those were there all at once
        sizes = {words[6]: int(words[5]) for words in both}
        if sum(sizes.values()) > self._memory(uuid):
            self.tell("violation", what="more promised than there is", uuid=uuid, shares=sizes)
        homes = {words[3] for words in both}
        if len(homes) > 1 and not os.path.exists(f"{self.root}/cleaner"):
            self.tell("violation", what="shared by two state directories", uuid=uuid, shares=both)
        return fd

    def _shares(self, uuid: str) -> dict[str, list[str]]:
        """File -> words, for the marked shares of a GPU that living processes hold."""
        found = {}
        for name in os.listdir(f"{self.root}/shares"):
            if name.startswith(f"{uuid}."):
                path = Path(f"{self.root}/shares/{name}")
                with suppress(FileNotFoundError, PermissionError):
                    marker = path.read_text()
                    if self._lives(marker):
                        found[name] = marker.split()
                    else:
                        path.unlink()
        return found

    def _memory(self, uuid: str) -> int:
        return next(gpu.memory_total or 0 for gpu in SimulatedDriver(self.preset).idle.gpus if gpu.uuid == uuid)

    # ---- Detector 3: the users in the markers ----

    def count_own(self, number: int) -> None:
        """Tell if this user holds more GPUs at once than any of its claims was allowed.

        Not while a cleaner is at work: a claim whose entry is gone is not counted.
        """
        if self.has_cleaner():
            return
        seen = dict(self._own_claims().items() & self._own_claims().items())  # those were there all at once
        if len(seen) > max((float(marker.split()[4]) for marker in seen.values()), default=math.inf):
            uuids, claims = sorted(seen), sorted({marker.strip() for marker in seen.values()})
            self.tell("violation", what="a user over the limit", number=number, uuids=uuids, claims=claims)

    def _own_claims(self) -> dict[str, str]:
        """UUID -> marker, for the GPUs that living processes of this user hold by this state directory."""
        mine = str(os.getuid()), self._home()
        locked = self._locked()
        found = {}
        for entry in os.scandir(f"{self.root}/markers"):
            if entry.name.endswith(".inner") or entry.inode() not in locked:
                continue  # claims inside claims have no limit
            try:
                marker = Path(entry.path).read_text()
            except PermissionError:  # in the making
                continue
            words = marker.split()
            if len(words) == 5 and (words[2], words[3]) == mine and self._lives(marker):
                found[entry.name] = marker
        return found

    def _locked(self) -> set[int]:
        """Inodes of all files of the host that are flocked exclusively. To try a lock would disturb :meth:`mark`."""
        lines = map(str.split, Path(f"{self.proc}/locks").read_text().splitlines())
        return {int(words[5].rpartition(":")[2]) for words in lines if words[1] == "FLOCK" and words[3] == "WRITE"}

    # ---- Detector 4: the driver's list ----

    def look_for_company(self, uuids: list[str]) -> None:
        """Tell of processes of other claims on these GPUs, which this process holds."""
        mine = {os.getpid(), self.pid()}
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
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return False
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False
            except OSError as err:
                if err.errno != errno.EWOULDBLOCK:
                    raise
            finally:
                os.close(fd)
            pid = int(name.partition(".")[2].partition("-")[0])
            if pid > 1 and self.start_time(pid):
                return True
            time.sleep(0.001)
        return True


def be_a_stranger(stage: Stage, rng: random.Random) -> None:
    """Take a GPU without asking, known to the referee by the pid."""
    stage.register_stranger()
    driver = SimulatedDriver(stage.preset)
    with driver.occupy(rng.choice(driver.idle.gpus).uuid, memory=rng.choice((300, 3000)) << 20):
        time.sleep(rng.uniform(0.02, 0.5))


class Ambush:
    """Between the first poll of a claim and its entry, a stranger takes all GPUs that were free, for two seconds.

    A claim that gets one of these GPUs while the stranger is there has not looked a second time.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._pid = 0
        self._contexts: list[str] = []  # their names: in another PID namespace a stranger may have the same pid
        snapshot = SimulatedDriver.snapshot

        def then_a_stranger(driver: SimulatedDriver) -> HostSnapshot:
            seen = snapshot(driver)
            SimulatedDriver.snapshot = snapshot  # type: ignore[method-assign]
            ready, told = os.pipe()
            self._pid = os.fork()
            if self._pid == 0:
                self._wait_in(driver, seen.gpus, told)
            os.close(told)
            self._contexts = os.read(ready, 65536).decode().split()
            os.close(ready)
            return seen

        SimulatedDriver.snapshot = then_a_stranger  # type: ignore[method-assign]

    def _wait_in(self, driver: SimulatedDriver, gpus: tuple[Gpu, ...], told: int) -> None:
        self._stage.register_stranger()
        contexts = [driver.occupy(gpu.uuid) for gpu in gpus if not gpu.processes]
        os.write(told, " ".join(["x", *(context._name for context in contexts)]).encode())
        time.sleep(2.0)
        os._exit(len(contexts) & 0)

    def judge(self, uuids: list[str]) -> None:
        """Tell of the stranger on these GPUs, which were claimed just now."""
        for name in self._contexts:
            uuid = name.partition(".")[0]
            if uuid in uuids and self._stage.is_open(name):
                self._stage.tell("violation", what="a stranger was there before the claim", uuid=uuid, rival=self._pid)


def bad_weather(stage: Stage) -> None:
    """Make the driver of this process fail as the stage's file ``weather`` says at each poll."""
    snapshot, usage, is_alive = SimulatedDriver.snapshot, SimulatedDriver.usage, simulated.is_alive

    def weather() -> dict[str, Any]:
        try:
            return json.loads(Path(f"{stage.root}/weather").read_text())  # type: ignore[no-any-return]
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
    SimulatedDriver.snapshot = bad_snapshot  # type: ignore[method-assign]
    SimulatedDriver.usage = bad_usage  # type: ignore[method-assign]


_KEPT = 100  # so many policies of the past are in the log
_OTHERS = {"default_hold": "2s", "max_hold": "1s", "max_wait": "2s"}


class Policy:
    """The policy file, and a log that says when which limits may have been in force.

    Args:
        root: the directory of the stage. The file counts only if root writes it.
        order: in which users are served.
    """

    def __init__(self, root: str, order: str = "fifo") -> None:
        self._order = order
        self._path, self._log = f"{root}/policy.ini", f"{root}/policies"
        self._past: list[dict[str, Any]] = []
        self.set({})

    def set(self, most: Mapping[int, int | None], others: Mapping[str, str] | None = None) -> None:
        """Write the policy.

        Args:
            most: uid -> how many GPUs the user may hold at once; None is no limit. Others have no limit.
            others: further keys of ``[default]``, as text.
        """
        lines = [
            "[host]",
            f"order = {self._order}",
            "[default]",
            *(f"{key} = {value}" for key, value in (others or {}).items()),
        ]
        for uid, number in most.items():
            lines += [f"[user {uid}]", f"max_gpus = {'unlimited' if number is None else number}"]
        limits = {str(uid): number for uid, number in most.items() if number is not None}
        entry = {"from": time.monotonic(), "to": math.inf, "most": limits, "max_hold": "max_hold" in (others or {})}
        self._past = [*self._past[1 - _KEPT :], entry]
        replace_file(self._log, json.dumps(self._past))
        replace_file(self._path, "\n".join(lines) + "\n")
        for past in self._past[:-1]:  # it counted until the rename, at the latest
            past["to"] = min(past["to"], time.monotonic())
        replace_file(self._log, json.dumps(self._past))

    def change(self, rng: random.Random, uids: tuple[int, ...]) -> None:
        """Write a random policy for these users."""
        most = {uid: rng.choice((None, 1, 2, 3, 4, 6)) for uid in uids}
        self.set(most, {key: text for key, text in _OTHERS.items() if rng.random() < 0.15})


def allowed(root: str, uid: int, since: float) -> float:
    """The most GPUs that a user was ever allowed from a moment (``time.monotonic()``) on; ``math.inf`` is no limit.

    A claim reads the policy once, at a moment that the referee does not know.
    """
    past = _since(root, since)
    return math.inf if past is None else max(_most(one, uid) for one in past)


def may_refuse(root: str, uid: int, since: float, nb_gpus: int, hold_for: float | None) -> bool:
    """Whether a policy since that moment allowed the user no such claim."""
    past = _since(root, since)
    return past is None or any(
        nb_gpus > _most(one, uid) or (one["max_hold"] and hold_for is not None and hold_for > 1.0) for one in past
    )


def _since(root: str, since: float) -> list[dict[str, Any]] | None:
    """The policies that were ever in force from then on; None if that is too long ago."""
    try:
        past: list[dict[str, Any]] = json.loads(Path(f"{root}/policies").read_text())
    except FileNotFoundError:
        return [{"most": {}, "max_hold": False}]
    return None if past[0]["from"] > since else [one for one in past if one["to"] >= since]


def _most(entry: Mapping[str, Any], uid: int) -> float:
    return float(entry["most"].get(str(uid), math.inf))


def replace_file(path: str, text: str) -> None:
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(f"{path}.new", 0o644)
    os.rename(f"{path}.new", path)
