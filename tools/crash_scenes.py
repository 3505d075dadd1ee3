"""The host on which processes are made to crash, and what they are doing then."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import ROOT, simulate
from crash_trace import Stop
from support.actor import Racer

import safe_gpu
from safe_gpu.cli.commands import main as safe_gpu_main
from safe_gpu.coordination import older_package as legacy
from safe_gpu.drivers.simulated import SimulatedDriver
from safe_gpu.host import file_systems

GPUS = 8
_PRESET = "dgx-a100"


class Failure(Exception):
    """What a claim must never do."""


class Actor(Racer):
    """A forked process that does one thing.

    Args:
        uid: the user that it becomes; None stays.
        patience: seconds that it may take to say anything.
    """

    def __init__(
        self, name: str, work: Callable[[Connection], None], uid: int | None = None, patience: float = 15.0
    ) -> None:
        super().__init__(work, uid=uid)
        self.name, self.patience = name, patience

    def expect(self, *expected: str) -> tuple[Any, ...]:
        """What it says next.

        Raises:
            Failure: it says something else, nothing, or has gone.
        """
        if not self.line.poll(self.patience):
            raise Failure(f"{self.name} says nothing for {self.patience:.0f} s instead of {' or '.join(expected)}")
        try:
            said: tuple[Any, ...] = self.line.recv()
        except (EOFError, ConnectionResetError):
            said = ("gone",)
        if said[0] not in expected:
            raise Failure(f"{self.name} says {': '.join(map(str, said))}")
        return said

    def tell(self, word: str) -> None:
        with suppress(OSError):
            super().tell(word)

    def let_go(self) -> None:
        """Have it release its GPUs."""
        self.tell("let go")
        self.expect("done")

    def wait_for_ticket(self, stage: Stage) -> None:
        """Return when it stands in the queue, or has something to say."""
        while not self.line.poll(0.0005):
            for path in Path(stage.state, "queue").glob("[0-9]*"):
                with suppress(OSError, ValueError):
                    if json.loads(path.read_bytes())["pid"] == self.pid:
                        return


def claims(nb_gpus: int, timeout: float = 0.0, **options: Any) -> Callable[[Connection], None]:
    """What an actor does that claims, says ``holds`` or ``refused``, and releases when it is told to."""

    def work(line: Connection) -> None:
        try:
            owner = safe_gpu.GPUOwner(nb_gpus, safe_gpu.NoPlaceholder(), timeout=timeout, affinity=None, **options)
        except safe_gpu.SafeGpuError as err:
            line.send(("refused", str(err)))
            return
        line.send(("holds", [gpu.uuid for gpu in owner.gpus], os.environ.get("SAFE_GPU_SCOPE", "")))
        line.recv()
        owner.release_gpus()
        line.send(("done",))

    return work


class Stage:
    """A simulated host with eight GPUs in a directory of its own, and two users where root runs this."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.base = tempfile.mkdtemp(prefix="safe-gpu-crash-")
        os.chmod(self.base, 0o755)
        self.number = 0
        self.state = ""
        self.users: tuple[int | None, int | None] = (54321, 54322) if os.geteuid() == 0 else (None, None)
        self.renew(first_use=False)

    def renew(self, *, first_use: bool) -> None:
        """Go on in another directory, in which nobody has claimed anything yet if ``first_use``."""
        shutil.rmtree(os.path.join(self.base, str(self.number)), ignore_errors=True)
        self.number += 1
        place = os.path.join(self.base, str(self.number))
        os.mkdir(place)
        os.chmod(place, 0o1777)
        self.state = os.path.join(place, "state")
        simulate(_PRESET, self.state)
        if not first_use:
            # By root: its files are nobody's whom a sticky directory would let remove them.
            one = Actor("the first", claims(GPUS))
            one.expect("holds")
            one.let_go()
            one.kill()
            driver = SimulatedDriver(_PRESET)
            with driver.occupy(driver.idle.gpus[0].uuid, memory=1):  # the driver's own directories
                pass

    def start(self, name: str, work: Callable[[Connection], None], *, other: bool = False) -> Actor:
        """Start a process of the first user, or of the other one."""
        return Actor(name, work, self.users[other], self.patience)

    def leftovers(self) -> list[str]:
        """What lies about that no claim uses: entries, unfinished files and directories, contexts of the dead. An
        unfinished entry is removed when it is a minute old."""
        place = Path(self.state).parent
        found = [path for path in place.rglob(".*") if not re.fullmatch(r"\.[0-9a-f]{16}", path.name)]
        found += [path for part in ("claims", "queue") for path in place.glob(f"state/{part}/[0-9]*")]
        found += [path for path in place.glob("state/simulated/*/*") if path.suffix != ".bad"]
        return [str(path.relative_to(place)) for path in found]

    def narrow(self) -> list[str]:
        """Files and directories whose mode keeps other users out."""
        state = Path(self.state)
        wrong = []
        for path in (state, *state.rglob("*")):
            mode, wanted = path.stat().st_mode & 0o7777, 0o1777 if path.is_dir() else 0o666
            if mode != wanted and not path.name.startswith(".") and "simulated/" not in str(path):
                wrong.append(f"{path.relative_to(state.parent)} has mode {mode:o}")
        return wrong

    def torn_lines(self) -> list[str]:
        """Lines of the history that make no sense."""
        torn = []
        for path in Path(self.state).glob("history/*.jsonl"):
            for line in path.read_bytes().splitlines():
                try:
                    json.loads(line)
                except ValueError:
                    torn.append(f"{path.name}: {line!r}")
        return torn

    def close(self) -> None:
        shutil.rmtree(self.base, ignore_errors=True)


def load_everything() -> None:
    """Import what claims import, so that only their own system calls are counted. Other users may not even read it."""
    names = set()
    for path in (ROOT / "safe_gpu").rglob("*.py"):
        if path.parent.name != "engines" and path.stem != "__main__":
            names.add(".".join(path.relative_to(ROOT).with_suffix("").parts))
            for node in ast.walk(ast.parse(path.read_text())):  # in its functions too
                if isinstance(node, ast.Import):
                    names |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                    names.add(node.module)
    for name in sorted(names):
        if name.partition(".")[0] in {"safe_gpu", "filelock", *sys.stdlib_module_names}:
            with suppress(ImportError):  # of another version of Python
                import_module(name)


_SLEEPS = ("clock_nanosleep", "nanosleep", "pselect6", "select")


class Scene:
    """A claim of two GPUs with contexts, that allows claims inside it. The other scenes are variations of it.

    Attributes:
        helpers: processes that hold or wait meanwhile, in the order in which they are to be served and to let go.
        child: a forked child of the victim, which outlives it, or 0.
    """

    first_use = False
    becomes_command = False
    needs_stops = False  # after the crash too
    ends_claim = False
    inside = 0  # GPUs of the claim inside which it is
    shared = False  # with the helper, which has half of each GPU

    def __init__(self) -> None:
        self.helpers: list[Actor] = []
        self.child = 0
        self.sleeps = 0

    def arrange(self, stage: Stage) -> None:
        """Before the victim starts, in the controller."""

    def prepare(self, line: Connection) -> None:
        """Before the operation, in the victim; not traced."""

    def operate(self) -> None:
        """The operation, in the victim."""
        safe_gpu.claim_gpus(2, timeout=0, affinity=None, delegate=True)

    def at(self, stop: Stop) -> None:
        """While the victim stands at this stop, in the controller."""

    def close(self) -> None:
        """At the end, in the controller."""


class First(Scene):
    """The first claim ever on a host: it makes the state directory."""

    first_use = True

    def prepare(self, line: Connection) -> None:
        file_systems.file_system_at.cache_clear()


class Wait(Scene):
    """A wait as the head of the queue, until the holder lets go: ticket, sleep, turn."""

    needs_stops = True

    def arrange(self, stage: Stage) -> None:
        self.helpers = [stage.start("the holder", claims(GPUS), other=True)]
        self.helpers[0].expect("holds")

    def operate(self) -> None:
        safe_gpu.claim_gpus(2, timeout=30, affinity=None, hold_for=60)

    def at(self, stop: Stop) -> None:
        if stop.thread == 0 and stop.before and stop.call in _SLEEPS and self.helpers:
            self.sleeps += 1
            if self.sleeps == 2:
                self.helpers.pop().let_go()


class Turns(Wait):
    """Such a wait on a host with limits, where users who wait are served by turns."""

    def arrange(self, stage: Stage) -> None:
        path = Path(stage.state).with_name("policy.ini")
        path.write_text(f"[host]\norder = fair\n[default]\nmax_gpus = {GPUS}\n")
        os.environ["SAFE_GPU_POLICY"] = str(path)
        super().arrange(stage)

    def close(self) -> None:
        del os.environ["SAFE_GPU_POLICY"]


class Queue(Wait):
    """A wait behind another waiter, which dies: ticket, sleep in a thread, head of the queue, turn."""

    def arrange(self, stage: Stage) -> None:
        super().arrange(stage)
        self.helpers.append(stage.start("the waiter ahead", claims(GPUS, 30.0), other=True))
        self.helpers[1].wait_for_ticket(stage)

    def at(self, stop: Stop) -> None:
        if len(self.helpers) == 2 and stop.thread == 1 and stop.before and stop.call == "fcntl":
            self.helpers.pop().kill()
        elif len(self.helpers) == 1:
            super().at(stop)


class Refused(Scene):
    """A claim that gets nothing: all GPUs are held, and it does not wait."""

    def arrange(self, stage: Stage) -> None:
        self.helpers = [stage.start("the holder", claims(GPUS - 1), other=True)]
        self.helpers[0].expect("holds")

    def operate(self) -> None:
        with suppress(safe_gpu.NotEnoughGpusError):
            super().operate()


class Release(Scene):
    """The release of two GPUs."""

    ends_claim = True

    def prepare(self, line: Connection) -> None:
        self.owner = safe_gpu.claim_gpus(2, timeout=0, affinity=None, delegate=True)

    def operate(self) -> None:
        self.owner.release_gpus()


class Share(Scene):
    """A claim of a share of two GPUs, beside a claim that shares all."""

    shared = True

    def arrange(self, stage: Stage) -> None:
        self.helpers = [stage.start("the other sharer", claims(GPUS, share="50%"), other=True)]
        self.helpers[0].expect("holds")

    def operate(self) -> None:
        self.owner = safe_gpu.claim_gpus(2, timeout=0, affinity=None, share="50%", only=(0, 1))


class ReleaseShare(Share):
    """The release of such a share."""

    ends_claim = True

    def prepare(self, line: Connection) -> None:
        Share.operate(self)

    def operate(self) -> None:
        self.owner.release_gpus()


class ReleaseForked(Release):
    """The release of two GPUs while a forked child lives, which has a copy of the entry."""

    def prepare(self, line: Connection) -> None:
        super().prepare(line)
        theirs, ours = os.pipe()
        self.child = os.fork()
        if self.child == 0:
            line.close()
            os.close(theirs)
            os.close(ours)
            time.sleep(120)
            os._exit(0)
        os.close(ours)
        os.read(theirs, 1)  # its end: the child has closed what no child keeps
        os.close(theirs)


class Nested(Scene):
    """A claim inside a claim."""

    inside = 4

    def arrange(self, stage: Stage) -> None:
        self.helpers = [stage.start("the outer claim", claims(self.inside, delegate=True))]
        self.token = self.helpers[0].expect("holds")[2]

    def prepare(self, line: Connection) -> None:
        os.environ["SAFE_GPU_SCOPE"] = self.token

    def operate(self) -> None:
        safe_gpu.claim_gpus(2, timeout=0, affinity=None)


class Run(Scene):
    """``safe-gpu run``, until it has become the command."""

    becomes_command = True
    needs_stops = True

    def arrange(self, stage: Stage) -> None:
        self.theirs, self.ours = os.pipe()

    def prepare(self, line: Connection) -> None:
        os.dup2(self.theirs, 0)
        os.close(self.ours)

    def operate(self) -> None:
        code = safe_gpu_main(["run", "-q", "-n", "2", "-t", "0", "--affinity", "none", "--", "/bin/cat"])
        raise AssertionError(f"safe-gpu run returned {code}")

    def close(self) -> None:
        os.close(self.theirs)
        os.close(self.ours)


class Older(Scene):
    """A claim on a host with the lock of the older package."""

    def arrange(self, stage: Stage) -> None:
        self.path = os.path.join(os.path.dirname(stage.state), "older")
        os.makedirs(self.path, exist_ok=True)
        os.chmod(self.path, 0o1777)

    def prepare(self, line: Connection) -> None:
        legacy.LOCK_FILE = os.path.join(self.path, "lock")
        os.environ["SAFE_GPU_LEGACY_LOCK"] = "always"


SCENES: dict[str, type[Scene]] = {
    "claim": Scene,
    "first": First,
    "older": Older,
    "refused": Refused,
    "wait": Wait,
    "turns": Turns,
    "queue": Queue,
    "release": Release,
    "release-forked": ReleaseForked,
    "share": Share,
    "release-share": ReleaseShare,
    "nested": Nested,
    "run": Run,
}
