"""What the processes of a soak test do: claim GPUs in every way, and end in every way.

As a script, `soak_lives.py STAGE hold|nest SECONDS END`, it is the command of a ``safe-gpu run``.
"""

import ctypes
import os
import random
import shlex  # noqa: F401 - other users cannot read the library
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from common import ROOT
from soak_host import Ambush, Ground, bad_weather, be_a_stranger, may_refuse
from support.actor import become
from support.broken import break_build

import safe_gpu
from safe_gpu.cli.commands import main as safe_gpu_main
from safe_gpu.drivers.simulated import SimulatedDriver

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
        way: how it meets GPUs: ``claim``, ``ambush`` (a stranger comes between look and claim), ``run``, ``nest``
            (claims inside a ``run``), ``wait``, ``status``, ``stranger``.
        nb_gpus: how many GPUs it claims.
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

    way: str
    nb_gpus: int
    context: bool
    timeout: float
    hold: float
    hold_for: float | None
    end: str
    island: str
    uid: int | None
    seed: int
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
        ways = _WAYS if share is None else _SHARING_WAYS
        hold = 3 * life.hold
        life = life._replace(way=rng.choice(ways), nb_gpus=min(life.nb_gpus, 3), hold=hold, share=share, only=shared)
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
    if life.way == "claim":
        _claim(ground, number, life)
    elif life.way == "ambush":
        _claim(ground, number, life, Ambush(ground))
    elif life.way == "stranger":
        be_a_stranger(ground, random.Random(life.seed))
    elif life.way in ("run", "nest"):
        command = [sys.executable, os.path.abspath(__file__), ground.root]
        command += ["nest" if life.way == "nest" else "hold", str(life.hold), life.end]
        return _command("run", "-q", *_options(life), "--", *command)
    elif life.way == "wait":
        code = _command("wait", "-q", *_options(life))
        ground.tell("waited", number=number, seconds=time.monotonic() - started, timeout=life.timeout, code=code)
        # 143: the first process of a PID namespace does not die of the SIGTERM that ended the wait.
        if code not in (0, 69, 73, 75, 130, 143) and not (code == 78 and _may_refuse(ground, life)):
            ground.tell("violation", what=f"safe-gpu wait ended with {code}", number=number)
    else:
        _command("status", "--json")
    return 0


def _options(life: Life) -> list[str]:
    words = ["-n", str(life.nb_gpus), "-t", str(life.timeout)]
    words += ["--share", life.share] if life.share else []
    return words + (["--only", ",".join(life.only)] if life.only else [])


def _may_refuse(ground: Ground, life: Life) -> bool:
    """Whether the policy does not allow the claim of this life."""
    hold_for = life.hold_for if life.way in ("claim", "ambush") else None
    return may_refuse(ground.root, os.getuid(), life.nb_gpus, hold_for)


def _command(*words: str) -> int:
    """What ``safe-gpu`` does in this process."""
    return int(safe_gpu_main(list(words)) or 0)


def _claim(ground: Ground, number: int, life: Life, ambush: Ambush | None = None) -> None:
    started = time.monotonic()
    placeholder = None if life.context else safe_gpu.NoPlaceholder()
    try:
        owner = safe_gpu.GPUOwner(
            life.nb_gpus,
            placeholder,
            timeout=life.timeout,
            affinity=None,
            hold_for=life.hold_for,
            share=life.share,
            only=life.only or None,
        )
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
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), "unshare")
    _mount("none", "/", None, _PRIVATE)


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    words = [word.encode() if word else None for word in (source, target, kind)]
    if libc.mount(*words, flags, None):
        raise OSError(ctypes.get_errno(), f"mount {target}")


def _inside(ground: Ground, seconds: float) -> None:
    """A claim made inside the claim of the process that started this one."""
    try:
        owner = safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), timeout=3.0, affinity=None)
    except safe_gpu.NotEnoughGpusError:
        return
    _hold(ground, -1, [gpu.uuid for gpu in owner.gpus], seconds, "release", owner.release_gpus, inside=True)


def _main(root: str, what: str, seconds: str, end: str) -> int:
    ground = Ground(root)
    if what == "inside":
        _inside(ground, float(seconds))
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
