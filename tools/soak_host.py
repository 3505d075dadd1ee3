"""The host of a soak test, what the referee knows of it, and what the processes on it do: claim in every way, and end.

As a script, `soak_host.py STAGE hold|nest SECONDS END`, it is the command of a ``safe-gpu run``.
"""

from __future__ import annotations

import ctypes
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT
from support.actor import become
from support.broken import break_build
from support.referee import Mark, Referee
from support.stage import simulate

import safe_gpu
from safe_gpu.cli.commands import main as safe_gpu_main
from safe_gpu.drivers.simulated import SimulatedDriver
from safe_gpu.drivers.simulated import contexts as simulated_contexts
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
        mine = {"uid": os.getuid(), "home": _home(), "share": None, "inside": False}  # inside claims there is no limit
        own = {one["uuid"] for one in self.referee.held() if self.referee.lives(one) and one | mine == one}
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
    with suppress(OSError):
        return str(os.stat(os.environ["SAFE_GPU_DIR"]).st_ino)
    return "-"


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
                ground.register_stranger()
                contexts = [driver.occupy(gpu.uuid) for gpu in seen.gpus if not gpu.processes]
                os.write(told, " ".join(["x", *(context._name for context in contexts)]).encode())
                time.sleep(2.0)
                os._exit(0)
            os.close(told)
            self._contexts = os.read(ready, 65536).decode().split()
            os.close(ready)
            return seen

        SimulatedDriver.snapshot = then_a_stranger

    def judge(self, uuids: list[str]) -> None:
        """Tell of the stranger on these GPUs, which were claimed just now."""
        for name in self._contexts:
            uuid = name.partition(".")[0]
            if uuid in uuids and self._ground.is_open(name):
                self._ground.tell("violation", what="a stranger was there before the claim", uuid=uuid, rival=self._pid)


def bad_weather(ground: Ground) -> None:
    """Make the driver of this process fail as the ground's file ``weather`` says at each poll."""
    snapshot, usage, is_alive = SimulatedDriver.snapshot, SimulatedDriver.usage, simulated_contexts.is_alive

    def weather() -> dict[str, Any]:
        with suppress(OSError, ValueError):
            return json.loads(Path(ground.root, "weather").read_text())
        return {}

    def under(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
        sky = weather()
        time.sleep(sky.get("stall", 0))
        if sky.get("fails"):
            raise safe_gpu.NoDriverError("the simulated driver fails for the soak test")
        hidden = {"process_error": "hidden for the soak test"}
        lost = {"process_error": "GPU is lost", "unusable": "GPU is lost", "lost": True}
        changes = {uuid: what for name, what in (("hides", hidden), ("lost", lost)) for uuid in sky.get(name, ())}
        return tuple(gpu._replace(processes=None, **changes[gpu.uuid]) if gpu.uuid in changes else gpu for gpu in gpus)

    def late(name: str, directory: int) -> bool:
        with suppress(OSError):
            age = time.time() - os.stat(name, dir_fd=directory).st_ctime
            if age < weather().get("lag", 0):
                return False
        return is_alive(name, directory)

    def bad_snapshot(driver: SimulatedDriver) -> HostSnapshot:
        whole = snapshot(driver)
        return whole._replace(gpus=under(whole.gpus))

    simulated_contexts.is_alive = late
    SimulatedDriver.snapshot = bad_snapshot
    SimulatedDriver.usage = lambda driver, gpus: under(usage(driver, gpus))


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
    with suppress(FileNotFoundError):
        return json.loads(Path(root, "limits").read_text())
    return {"most": {}, "max_hold": False}


def replace_file(path: str, text: str) -> None:
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(f"{path}.new", 0o644)
    os.rename(f"{path}.new", path)


# What the processes do

ISLANDS = ("home", "other directory", "private directory", "pid namespace")
_ENDS = ("release", "release", "release", "exit", "die", "fork", "exec", "nothing")
_WAYS = ("claim",) * 24 + ("ambush",) * 4 + ("stranger",) * 3 + ("run", "run", "nest", "status", "wait")
_SHARING_WAYS = ("claim",) * 8 + ("run", "run", "wait")
_SHARES = (None, None, "1GiB", "3GiB", "10%", "25%", "25%", "50%", "60%")
_NEWNS, _NEWPID = 0x00020000, 0x20000000
_BIND, _PRIVATE = 4096, (1 << 18) | 16384  # MS_PRIVATE | MS_REC


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
        hold=hold + 0.3 * (end == "fork"),
        hold_for=rng.choice((None, None, 1.0, max(1.0, hold * 2))),
        end=end,
        island=rng.choice(islands),
        uid=rng.choice(users) if users else None,
        seed=rng.getrandbits(32),
    )
    if shared and rng.random() < 0.7:
        share = rng.choice(_SHARES)
        way = rng.choice(_WAYS if share is None else _SHARING_WAYS)
        return life._replace(way=way, nb_gpus=min(life.nb_gpus, 3), hold=3 * life.hold, share=share, only=shared)
    return life


def live(ground: Ground, number: int, life: Life, broken: str = "") -> None:
    """Live this life in a forked process; does not return.

    Args:
        broken: a build of ``support.broken``.
    """
    code = 1
    try:
        code = _live(ground, number, life, broken)
    except safe_gpu.SafeGpuError as err:
        ground.tell("refused", number=number, error=type(err).__name__, text=str(err)[:300])
        if isinstance(err, safe_gpu.UnsatisfiableRequestError) and not _may_refuse(ground, life):
            ground.tell("violation", what="refused for ever without a cause", number=number)
        code = 0
    except (KeyboardInterrupt, SystemExit):  # SIGINT, and SIGTERM during a claim
        code = 130
    except BaseException as err:  # whatever it is, the users of a claim were not told of it
        import traceback

        ground.tell("trace", number=number, text=traceback.format_exc()[-2500:])
        ground.tell("violation", what="undocumented exception", number=number, error=repr(err)[:300])
    finally:
        os._exit(code)


def _live(ground: Ground, number: int, life: Life, broken: str) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _move_to(ground, life.island)
    os.umask(random.Random(life.seed).choice((0o022, 0o077, 0o002)))
    if life.uid is not None:
        become(life.uid)
    ground.enter(ground.other if life.island == "other directory" else None)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    if life.way != "ambush":  # a driver that shows strangers late hides them from the second poll
        bad_weather(ground)
    break_build(broken)
    ground.tell("begins", number=number, way=life.way, island=life.island, uid=life.uid)
    started = time.monotonic()
    if life.way in ("claim", "ambush"):
        _claim(ground, number, life, Ambush(ground) if life.way == "ambush" else None)
    elif life.way == "stranger":
        rng, driver = random.Random(life.seed), SimulatedDriver(ground.preset)
        ground.register_stranger()
        with driver.occupy(rng.choice(driver.idle.gpus).uuid, memory=rng.choice((300, 3000)) << 20):
            time.sleep(rng.uniform(0.02, 0.5))
    elif life.way in ("run", "nest"):
        command = [sys.executable, os.path.abspath(__file__), ground.root]
        command += ["nest" if life.way == "nest" else "hold", str(life.hold), life.end]
        return int(safe_gpu_main(["run", "-q", *_options(life), "--", *command]) or 0)
    elif life.way == "wait":
        code = safe_gpu_main(["wait", "-q", *_options(life)])
        ground.tell("waited", number=number, seconds=time.monotonic() - started, timeout=life.timeout, code=code)
        # 143: the first process of a PID namespace does not die of the SIGTERM that ended the wait.
        if code not in (0, 69, 73, 75, 130, 143) and not (code == 78 and _may_refuse(ground, life)):
            ground.tell("violation", what=f"safe-gpu wait ended with {code}", number=number)
    else:
        safe_gpu_main(["status", "--json"])
    return 0


def _options(life: Life) -> list[str]:
    words = {"-n": life.nb_gpus, "-t": life.timeout, "--share": life.share, "--only": ",".join(life.only)}
    return [text for name, value in words.items() if value not in (None, "") for text in (name, str(value))]


def _may_refuse(ground: Ground, life: Life) -> bool:
    """Whether the policy does not allow the claim of this life."""
    hold_for = life.hold_for if life.way in ("claim", "ambush") else None
    return may_refuse(ground.root, os.getuid(), life.nb_gpus, hold_for)


def _claim(ground: Ground, number: int, life: Life, ambush: Ambush | None) -> None:
    started = time.monotonic()
    placeholder = None if life.context else safe_gpu.NoPlaceholder()
    options = {"timeout": life.timeout, "hold_for": life.hold_for, "share": life.share, "only": life.only or None}
    try:
        owner = safe_gpu.GPUOwner(life.nb_gpus, placeholder, affinity=None, **options)
    finally:
        ground.tell("waited", number=number, seconds=time.monotonic() - started, timeout=life.timeout)
    uuids = [gpu.uuid for gpu in owner.gpus]
    if ambush:
        ambush.judge(uuids)
    _hold(ground, number, uuids, life.hold, life.end, owner.release_gpus, share=owner.share)


def _hold(
    ground: Ground,
    number: int,
    uuids: list[str],
    seconds: float,
    end: str,
    release: Callable[[], None] | None = None,
    *,
    share: int | None = None,
    inside: bool = False,
) -> None:
    """Hold GPUs, or shares of them, under the eyes of the referee, and end."""
    marks = [ground.mark(uuid, share, inside=inside) for uuid in uuids]
    ground.tell("holds", number=number, uuids=uuids, end=end, share=share)
    if not share and not inside:
        ground.look_for_company(uuids)
    ground.count_own(number)
    if end == "fork" and os.fork() == 0:
        for mark in marks:
            if ground.islands or ground.has_cleaner():  # the name speaks for the GPU then, and that is the parent's
                mark.close()
            else:
                ground.referee.sign(mark)
        time.sleep(seconds + 0.2)
        os._exit(0)
    time.sleep(seconds)
    if not share and not inside:
        ground.look_for_company(uuids)
    if end == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if end in ("exec", "release", "linger"):  # exec closes one file after the other, and the process lives meanwhile
        for mark in marks:
            mark.end()
    if end == "exec":
        os.execv("/bin/true", ["true"])
    if end in ("release", "linger"):
        release()
        ground.tell("released", number=number, uuids=uuids)
    if end == "linger":
        time.sleep(15)


def _move_to(ground: Ground, island: str) -> None:
    """Enter new namespaces, where the island has some."""
    if island == "private directory":
        _unshare(_NEWNS)
        while True:  # a cleaner may remove it at any moment, also while makedirs looks whether it is there
            with suppress(FileNotFoundError, FileExistsError):
                os.makedirs(ground.state, exist_ok=True)
                os.chmod(ground.state, 0o1777)
                _mount(ground.private, ground.state, None, _BIND)
                break
    elif island == "pid namespace":
        _unshare(_NEWNS | _NEWPID)
        child = os.fork()
        if child:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
        _mount("proc", "/proc", "proc", 0)


def _unshare(flags: int) -> None:
    _call("unshare", flags)
    _mount("none", "/", None, _PRIVATE)


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    words = [word.encode() if word else None for word in (source, target, kind)]
    _call("mount", *words, flags, None)


def _call(name: str, *arguments: Any) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), name)


def _main(root: str, what: str, seconds: str, end: str) -> int:
    ground = Ground(root)
    if what == "inside":  # a claim made inside the claim of the process that started this one
        with suppress(safe_gpu.NotEnoughGpusError):
            owner = safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), timeout=3.0, affinity=None)
            uuids = [gpu.uuid for gpu in owner.gpus]
            _hold(ground, -1, uuids, float(seconds), "release", owner.release_gpus, inside=True)
        return 0
    uuids = list(SimulatedDriver(os.environ["SAFE_GPU_DRIVER"].partition(":")[2]).visible())
    if what == "nest":
        for uuid in uuids:
            ground.mark(uuid)
        ground.count_own(-1)
        inner = [sys.executable, __file__, root, "inside", seconds, end]
        inside = [subprocess.Popen(inner, cwd=ROOT) for _ in uuids]
        return max(process.wait() for process in inside)
    size = os.environ.get("SAFE_GPU_SHARE")
    _hold(ground, -1, uuids, float(seconds), "exit" if end == "release" else end, share=int(size) if size else None)
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
