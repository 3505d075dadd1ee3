"""The host of a soak test, what the referee knows of it, and what the processes on it do: claim in every way, and end.

As a script, `soak_host.py HOST hold|nest SECONDS END`, it is the command of a ``safe-gpu run``.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import random
import shlex  # noqa: F401 - other users cannot read the library
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT
from support.actor import become
from support.broken import break_build
from support.kernel import NEW_PIDS, bind_mount, leave_mounts, mount_proc
from support.referee import DYING, Mark, Referee
from support.stage import HostDirectory, replace_file

import safe_gpu
from safe_gpu.cli.commands import main as safe_gpu_main
from safe_gpu.drivers.simulated import SimulatedDriver
from safe_gpu.drivers.simulated import contexts as simulated_contexts
from safe_gpu.gpus.devices import Gpu, HostSnapshot


class SoakHost(HostDirectory):
    """The directory of a soak, with its state directories, and the referee's.

    It is given to other processes by its path.

    Args:
        path: of the directory; it is made, with everything in it, if it does not exist.
        preset: the simulated host; "" is the one for which the directory was made.

    Attributes:
        other: another state directory.
        private: is in the place of the state directory for those on that island.
        has_islands: whether some processes are on islands.
    """

    def __init__(self, path: str, preset: str = "") -> None:
        exists = os.path.isdir(path)
        super().__init__(path, preset or Path(path, "preset").read_text())
        self.other = f"{path}/other"
        self.private = f"{path}/private"
        self.has_islands = os.path.exists(f"{path}/islands")
        if not exists:
            for name in ("strangers", "tree", "private", "proc"):
                self.make_place(name)
            replace_file(f"{path}/preset", preset)
        gpus = SimulatedDriver(self.preset, path).idle.gpus
        self.gpus = [gpu.uuid for gpu in gpus]
        proc = "/proc"
        if os.path.exists(f"{path}/proc/self"):
            proc = f"{path}/proc"
        self.referee = Referee(f"{path}/referee", max(gpu.memory_total or 0 for gpu in gpus), proc)
        self.tell = self.referee.tell

    def has_cleaner(self) -> bool:
        """Whether a cleaner is at work: then users and sharers do not see a claim whose entry is gone."""
        return os.path.exists(f"{self.path}/cleaner")

    def mark(self, uuid: str, share: int | None = None, *, inside: bool = False) -> Mark:
        """Note that this process has a GPU, or a share of it in bytes. Tell of shares in two state directories."""
        mark = self.referee.begin(uuid, share, inside=inside, uid=os.getuid(), home=_home())
        homes = {one["home"] for one in self._held_by_living(uuid)}
        if share is not None and len(homes) > 1 and not self.has_cleaner():
            self.tell("violation", what="shared by two state directories", uuid=uuid, homes=homes)
        return mark

    def count_own(self, number: int) -> None:
        """Tell if this user holds more whole GPUs by this state directory than it may."""
        own = set()
        for one in self._held_by_living():
            is_limited = one["share"] is None and not one["inside"]  # inside claims there is no limit
            if is_limited and one["uid"] == os.getuid() and one["home"] == _home():
                own.add(one["uuid"])
        if len(own) > allowed(self.path, os.getuid()) and not self.has_cleaner():
            self.tell("violation", what="a user over the limit", number=number, uuids=sorted(own))

    def _held_by_living(self, uuid: str = "") -> list[dict[str, Any]]:
        """The marks on a GPU, or on all, whose processes live."""
        return [one for one in self.referee.held(uuid) if self.referee.lives(one["pid"], one["start"])]

    # ---- The driver's list ----

    def look_for_company(self, uuids: list[str]) -> None:
        """Tell of processes of other claims on these GPUs, which this process holds."""
        tree = f"{self.tree}/{self.preset}"
        if not os.path.isdir(tree):
            return
        mine = {os.getpid(), self.referee.pid()}
        for name in os.listdir(tree):
            uuid = name.partition(".")[0]
            if uuid not in uuids or _process_of(name) in mine or not self.is_open(name):
                continue
            pid = _process_of(name)
            if not os.path.exists(f"{self.path}/strangers/{pid}"):  # last, since strangers register before they come
                self.tell("violation", what="company on the driver's list", uuid=uuid, rival=str(pid))

    def register_stranger(self) -> None:
        """Remember this process as one that the driver may list beside a claim."""
        with suppress(FileExistsError, PermissionError):  # the same pid in another PID namespace
            os.close(os.open(f"{self.path}/strangers/{os.getpid()}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))

    def is_open(self, name: str) -> bool:
        """Whether a process that is not about to be gone has this context."""
        pid = _process_of(name)
        deadline = time.monotonic() + DYING
        while time.monotonic() < deadline:
            try:
                with open(f"{self.tree}/{self.preset}/{name}", "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False
            except OSError as err:
                if err.errno != errno.EWOULDBLOCK:
                    return False
            if pid > 1 and self.referee.start_time(pid):
                return True
            time.sleep(0.001)
        return True


def _process_of(name: str) -> int:
    """The number of the process that has a context, by the name of its file."""
    return int(name.partition(".")[2].partition("-")[0])


def _home() -> str:
    """The state directory of this process, by its inode: limits count claims of one directory."""
    with suppress(OSError):
        return str(os.stat(os.environ["SAFE_GPU_DIR"]).st_ino)
    return "-"


class Ambush:
    """Between the first poll of a claim and its entry, a stranger takes all GPUs that were free, for two seconds.

    A claim that gets one of these GPUs while the stranger is there has not looked a second time.
    """

    def __init__(self, host: SoakHost) -> None:
        self._host = host
        self._pid = 0
        self._contexts: list[str] = []  # their names: in another PID namespace a stranger may have the same pid
        snapshot = SimulatedDriver.snapshot

        def then_a_stranger(driver: SimulatedDriver) -> HostSnapshot:
            seen = snapshot(driver)
            SimulatedDriver.snapshot = snapshot
            self._send_stranger(driver, seen)
            return seen

        SimulatedDriver.snapshot = then_a_stranger

    def _send_stranger(self, driver: SimulatedDriver, seen: HostSnapshot) -> None:
        """Start a process on all GPUs that were seen free."""
        ready, told = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            self._host.register_stranger()
            contexts = [driver.occupy(gpu.uuid) for gpu in seen.gpus if not gpu.processes]
            os.write(told, " ".join(["x", *(context._name for context in contexts)]).encode())
            time.sleep(2.0)
            os._exit(0)
        os.close(told)
        self._contexts = os.read(ready, 65536).decode().split()
        os.close(ready)

    def judge(self, uuids: list[str]) -> None:
        """Tell of the stranger on these GPUs, which were claimed just now."""
        for name in self._contexts:
            uuid = name.partition(".")[0]
            if uuid in uuids and self._host.is_open(name):
                self._host.tell("violation", what="a stranger was there before the claim", uuid=uuid, rival=self._pid)


class Weather:
    """How the driver of this process fails: as the file ``weather`` of the host says at each poll.

    It says ``stall`` (seconds of a poll), ``lag`` (seconds before a process is shown), ``fails`` (true), and by their
    UUIDs the GPUs that are lost (``lost``) or whose processes are not shown (``hides``).
    """

    def __init__(self, host: SoakHost) -> None:
        self._file = Path(host.path, "weather")

    def begin(self) -> None:
        """Let the driver be so from now on."""
        snapshot = SimulatedDriver.snapshot
        usage = SimulatedDriver.usage
        is_alive = simulated_contexts.is_alive

        def bad_snapshot(driver: SimulatedDriver) -> HostSnapshot:
            whole = snapshot(driver)
            return whole._replace(gpus=self._changed(whole.gpus))

        def late(name: str, directory: int) -> bool:
            with suppress(OSError):
                age = time.time() - os.stat(name, dir_fd=directory).st_ctime
                if age < self._now().get("lag", 0):
                    return False
            return is_alive(name, directory)

        simulated_contexts.is_alive = late
        SimulatedDriver.snapshot = bad_snapshot
        SimulatedDriver.usage = lambda driver, gpus: self._changed(usage(driver, gpus))

    def _now(self) -> dict[str, Any]:
        """What the file says."""
        with suppress(OSError, ValueError):
            return json.loads(self._file.read_text())
        return {}

    def _changed(self, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
        """What the driver shows of these GPUs in this weather.

        Raises:
            NoDriverError: it fails.
        """
        now = self._now()
        time.sleep(now.get("stall", 0))
        if now.get("fails"):
            raise safe_gpu.NoDriverError("the simulated driver fails for the soak test")
        shown = []
        for gpu in gpus:
            if gpu.uuid in now.get("lost", ()):
                gpu = gpu._replace(processes=None, process_error="GPU is lost", unusable="GPU is lost", lost=True)
            elif gpu.uuid in now.get("hides", ()):
                gpu = gpu._replace(processes=None, process_error="hidden for the soak test")
            shown.append(gpu)
        return tuple(shown)


_OTHERS = {"default_hold": "2s", "max_hold": "1s", "max_wait": "2s"}


class Policy:
    """The policy file, which changes only while nobody claims, and what the referee has to know of it.

    Args:
        path: the directory of the host. The file counts only if root writes it.
        order: in which users are served.
    """

    def __init__(self, path: str, order: str = "fifo") -> None:
        self._path = path
        self._order = order
        self.set({})

    def set(self, most: Mapping[int, int | None], others: Mapping[str, str] | None = None) -> None:
        """Write the policy.

        Args:
            most: uid -> how many GPUs the user may hold at once; None is no limit. Others have no limit.
            others: further keys of ``[default]``, as text.
        """
        keys = others or {}
        lines = ["[host]", f"order = {self._order}", "[default]"]
        lines += [f"{key} = {value}" for key, value in keys.items()]
        for uid, number in most.items():
            limit = "unlimited" if number is None else str(number)
            lines += [f"[user {uid}]", f"max_gpus = {limit}"]
        replace_file(f"{self._path}/policy.ini", "\n".join(lines) + "\n")
        limits = {str(uid): number for uid, number in most.items() if number is not None}
        replace_file(f"{self._path}/limits", json.dumps({"most": limits, "max_hold": "max_hold" in keys}))

    def change(self, rng: random.Random, uids: tuple[int, ...]) -> None:
        """Write a random policy for these users."""
        most = {uid: rng.choice((None, 1, 2, 3, 4, 6)) for uid in uids}
        self.set(most, {key: text for key, text in _OTHERS.items() if rng.random() < 0.15})


def allowed(path: str, uid: int) -> float:
    """The most GPUs that a user may hold; ``math.inf`` is no limit."""
    return float(_limits(path)["most"].get(str(uid), math.inf))


def may_refuse(path: str, uid: int, nb_gpus: int, hold_for: float | None) -> bool:
    """Whether the policy allows the user no such claim."""
    too_long = hold_for is not None and hold_for > 1.0 and _limits(path)["max_hold"]
    return too_long or nb_gpus > allowed(path, uid)


def _limits(path: str) -> dict[str, Any]:
    """What the referee has to know of the policy."""
    with suppress(FileNotFoundError):
        return json.loads(Path(path, "limits").read_text())
    return {"most": {}, "max_hold": False}


# What the processes do

ISLANDS = ("home", "other directory", "private directory", "pid namespace")
_ENDS = ("release", "release", "release", "exit", "die", "fork", "exec", "nothing")
_WAYS = ("claim",) * 24 + ("ambush",) * 4 + ("stranger",) * 3 + ("run", "run", "nest", "status", "wait")
_SHARING_WAYS = ("claim",) * 8 + ("run", "run", "wait")
_SHARES = (None, None, "1GiB", "3GiB", "10%", "25%", "25%", "50%", "60%")


class Life(NamedTuple):
    """What one process will do.

    Attributes:
        nb_gpus: how many GPUs it claims.
        way: how it meets GPUs: ``claim``, ``ambush`` (a stranger comes between look and claim), ``run``, ``nest``
            (claims inside a ``run``), ``wait``, ``status``, ``stranger``.
        context: whether it puts a context on them.
        timeout: of the claim, seconds.
        hold: how long it holds them, seconds.
        hold_for: how long it says that it will hold them; None says nothing.
        end: how it ends: ``release``, ``exit``, ``die`` by SIGKILL, ``fork`` (a child outlives it), ``exec``,
            ``nothing``, ``linger`` (lives on for 15 s after the release).
        island: where it lives; one of :data:`ISLANDS`.
        uid: its user; None is the user of the soak.
        seed: of its own random choices.
        share: how much of each GPU; None is all.
        only: UUIDs of the GPUs that it may have; empty: of all.
    """

    nb_gpus: int
    way: str = "claim"
    context: bool = False
    timeout: float = 10.0
    hold: float = 0.01
    hold_for: float | None = None
    end: str = "release"
    island: str = "home"
    uid: int | None = None
    seed: int = 0
    share: str | None = None
    only: tuple[str, ...] = ()


def draw(rng: random.Random, islands: tuple[str, ...], users: tuple[int, ...], shared: tuple[str, ...] = ()) -> Life:
    """A random life; if there are ``shared`` GPUs, most lives are on these, and most of those share them."""
    hold = min(rng.expovariate(1 / 0.08), 2.0)
    end = rng.choice(_ENDS)
    life = Life(
        way=rng.choice(_WAYS),
        nb_gpus=rng.choice((1, 1, 1, 1, 2, 2, 3, 4)),
        context=rng.random() < 0.4,
        timeout=rng.choice((0.0, 0.05, 0.5, 3.0, 10.0)),
        hold=hold,
        hold_for=rng.choice((None, None, 1.0, max(1.0, hold * 2))),
        end=end,
        island=rng.choice(islands),
        uid=rng.choice(users) if users else None,
        seed=rng.getrandbits(32),
    )
    if end == "fork":
        life = life._replace(hold=hold + 0.3)
    if shared and rng.random() < 0.7:
        share = rng.choice(_SHARES)
        way = rng.choice(_WAYS if share is None else _SHARING_WAYS)
        return life._replace(way=way, nb_gpus=min(life.nb_gpus, 3), hold=3 * life.hold, share=share, only=shared)
    return life


def live(host: SoakHost, number: int, life: Life, broken: str = "") -> None:
    """Live this life in a forked process; does not return.

    Args:
        broken: a build of ``support.broken``.
    """
    code = 1
    try:
        code = Living(host, number, life).live(broken)
    except safe_gpu.SafeGpuError as err:
        host.tell("refused", number=number, error=type(err).__name__, text=str(err)[:300])
        if isinstance(err, safe_gpu.UnsatisfiableRequestError) and not _may_refuse(host, life):
            host.tell("violation", what="refused for ever without a cause", number=number)
        code = 0
    except (KeyboardInterrupt, SystemExit):  # SIGINT, and SIGTERM during a claim
        code = 130
    except BaseException as err:  # whatever it is, the users of a claim were not told of it
        host.tell("trace", number=number, text=traceback.format_exc()[-2500:])
        host.tell("violation", what="undocumented exception", number=number, error=repr(err)[:300])
    finally:
        os._exit(code)


def _may_refuse(host: SoakHost, life: Life) -> bool:
    """Whether the policy does not allow the claim of this life."""
    hold_for = None
    if life.way in ("claim", "ambush"):
        hold_for = life.hold_for
    return may_refuse(host.path, os.getuid(), life.nb_gpus, hold_for)


class Living:
    """A process of the soak, which lives a life."""

    def __init__(self, host: SoakHost, number: int, life: Life) -> None:
        self._host = host
        self._number = number
        self._life = life

    def live(self, broken: str) -> int:
        """Become what this life asks for, and live it; the exit status."""
        life = self._life
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _move_to(self._host, life.island)
        os.umask(random.Random(life.seed).choice((0o022, 0o077, 0o002)))
        if life.uid is not None:
            become(life.uid)
        state = self._host.state
        if life.island == "other directory":
            state = self._host.other
        self._host.enter(state)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        if life.way != "ambush":  # a driver that shows strangers late hides them from the second poll
            Weather(self._host).begin()
        break_build(broken)
        self._host.tell("begins", number=self._number, way=life.way, island=life.island, uid=life.uid)
        if life.way == "claim":
            self._claim(None)
        elif life.way == "ambush":
            self._claim(Ambush(self._host))
        elif life.way == "stranger":
            self._be_stranger()
        elif life.way in ("run", "nest"):
            return self._run()
        elif life.way == "wait":
            self._wait()
        else:
            safe_gpu_main(["status", "--json"])
        return 0

    def _claim(self, ambush: Ambush | None) -> None:
        """Claim, hold and end."""
        life = self._life
        placeholder = None if life.context else safe_gpu.NoPlaceholder()
        options = {"timeout": life.timeout, "hold_for": life.hold_for, "share": life.share, "only": life.only or None}
        started = time.monotonic()
        try:
            owner = safe_gpu.GPUOwner(life.nb_gpus, placeholder, affinity=None, **options)
        finally:
            self._tell_waited(started)
        uuids = [gpu.uuid for gpu in owner.gpus]
        if ambush is not None:
            ambush.judge(uuids)
        holding = Holding(self._number, uuids, life.hold, life.end, share=owner.share)
        holding.hold(self._host, owner.release_gpus)

    def _tell_waited(self, started: float, **more: object) -> None:
        """Tell how long this process has waited since then."""
        seconds = time.monotonic() - started
        self._host.tell("waited", number=self._number, seconds=seconds, timeout=self._life.timeout, **more)

    def _be_stranger(self) -> None:
        """Be on a GPU without a claim."""
        rng = random.Random(self._life.seed)
        driver = SimulatedDriver(self._host.preset)
        self._host.register_stranger()
        with driver.occupy(rng.choice(driver.idle.gpus).uuid, memory=rng.choice((300, 3000)) << 20):
            time.sleep(rng.uniform(0.02, 0.5))

    def _run(self) -> int:
        """Be a command of ``safe-gpu run``, this script."""
        what = {"run": "hold", "nest": "nest"}[self._life.way]
        command = [sys.executable, os.path.abspath(__file__), self._host.path, what]
        command += [str(self._life.hold), self._life.end]
        return int(safe_gpu_main(["run", "-q", *self._options(), "--", *command]) or 0)

    def _wait(self) -> None:
        """Wait by ``safe-gpu wait``, and claim nothing."""
        started = time.monotonic()
        code = safe_gpu_main(["wait", "-q", *self._options()])
        self._tell_waited(started, code=code)
        # 143: the first process of a PID namespace does not die of the SIGTERM that ended the wait.
        if code not in (0, 69, 73, 75, 130, 143) and not (code == 78 and _may_refuse(self._host, self._life)):
            self._host.tell("violation", what=f"safe-gpu wait ended with {code}", number=self._number)

    def _options(self) -> list[str]:
        """The options of ``run`` and ``wait``."""
        life = self._life
        options = ["-n", str(life.nb_gpus), "-t", str(life.timeout)]
        if life.share is not None:
            options += ["--share", life.share]
        if life.only:
            options += ["--only", ",".join(life.only)]
        return options


class Holding(NamedTuple):
    """What a process holds under the eyes of the referee, and how it ends.

    Attributes:
        number: of the process; -1 is a command of one.
        uuids: of the GPUs.
        seconds: for so long.
        end: as of :class:`Life`.
        share: bytes of each; None is all.
        inside: whether that is inside another claim.
    """

    number: int
    uuids: list[str]
    seconds: float
    end: str
    share: int | None = None
    inside: bool = False

    def hold(self, host: SoakHost, release: Callable[[], None] | None = None) -> None:
        """Hold it, and end."""
        marks = [host.mark(uuid, self.share, inside=self.inside) for uuid in self.uuids]
        host.tell("holds", number=self.number, uuids=self.uuids, end=self.end, share=self.share)
        self._look_for_company(host)
        host.count_own(self.number)
        if self.end == "fork" and os.fork() == 0:
            self._outlive(host, marks)
        time.sleep(self.seconds)
        self._look_for_company(host)
        if self.end == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.end in ("exec", "release", "linger"):  # exec closes one file after the other, and lives meanwhile
            for mark in marks:
                mark.end()
        if self.end == "exec":
            os.execv("/bin/true", ["true"])
        if self.end in ("release", "linger") and release is not None:
            release()
            host.tell("released", number=self.number, uuids=self.uuids)
        if self.end == "linger":
            time.sleep(15)

    def _look_for_company(self, host: SoakHost) -> None:
        """See whether somebody else is on GPUs that are held whole."""
        if not self.share and not self.inside:
            host.look_for_company(self.uuids)

    def _outlive(self, host: SoakHost, marks: list[Mark]) -> None:
        """In a forked child: keep it for longer than the parent, and exit."""
        for mark in marks:
            if host.has_islands or host.has_cleaner():  # the name speaks for the GPU then, and that is the parent's
                mark.close()
            else:
                host.referee.sign(mark)
        time.sleep(self.seconds + 0.2)
        os._exit(0)


def _move_to(host: SoakHost, island: str) -> None:
    """Enter new namespaces, where the island has some."""
    if island == "private directory":
        leave_mounts()
        while True:  # a cleaner may remove it at any moment, also while makedirs looks whether it is there
            with suppress(FileNotFoundError, FileExistsError):
                os.makedirs(host.state, exist_ok=True)
                os.chmod(host.state, 0o1777)
                bind_mount(host.private, host.state)
                return
    if island == "pid namespace":
        leave_mounts(NEW_PIDS)
        child = os.fork()
        if child:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
        mount_proc()


def _claim_inside(host: SoakHost, seconds: float) -> None:
    """Claim inside the claim of the process that started this one, and hold that."""
    with suppress(safe_gpu.NotEnoughGpusError):
        owner = safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), timeout=3.0, affinity=None)
        holding = Holding(-1, [gpu.uuid for gpu in owner.gpus], seconds, "release", inside=True)
        holding.hold(host, owner.release_gpus)


def _main(path: str, what: str, seconds: str, end: str) -> int:
    """Be the command of a ``safe-gpu run``: hold its GPUs, or start processes that claim inside; the exit status."""
    host = SoakHost(path)
    if what == "inside":
        _claim_inside(host, float(seconds))
        return 0
    uuids = list(SimulatedDriver(host.preset).visible())
    if what == "nest":
        for uuid in uuids:
            host.mark(uuid)
        host.count_own(-1)
        inner = [sys.executable, __file__, path, "inside", seconds, end]
        inside = [subprocess.Popen(inner, cwd=ROOT) for _ in uuids]
        return max(process.wait() for process in inside)
    share = None
    if os.environ.get("SAFE_GPU_SHARE"):
        share = int(os.environ["SAFE_GPU_SHARE"])
    if end == "release":  # safe-gpu releases when this has ended
        end = "exit"
    Holding(-1, uuids, float(seconds), end, share=share).hold(host)
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
