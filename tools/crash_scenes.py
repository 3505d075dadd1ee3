"""What processes are doing when they are made to crash, and the host on which they do it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from common import ROOT  # noqa: F401 - the package beside this script
from crash_trace import Stop
from support.actor import Actor, Work
from support.stage import Stage, claims, let_go

import safe_gpu
from safe_gpu.cli.commands import main as safe_gpu_main
from safe_gpu.coordination import older_package as legacy
from safe_gpu.host import procfs

GPUS = 8
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

    def hold(self, stage: Stage, work: Work, *, other: bool = True) -> str:
        """Have another process claim first; its token."""
        self.helpers = [stage.start("the holder", work, other=other)]
        return str(self.helpers[0].expect("holds")[2])

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
        procfs.file_system_at.cache_clear()


class Wait(Scene):
    """A wait as the head of the queue, until the holder lets go: ticket, sleep, turn."""

    needs_stops = True

    def arrange(self, stage: Stage) -> None:
        self.hold(stage, claims(GPUS))

    def operate(self) -> None:
        safe_gpu.claim_gpus(2, timeout=30, affinity=None, hold_for=60)

    def at(self, stop: Stop) -> None:
        if stop.thread == 0 and stop.before and stop.call in _SLEEPS and self.helpers:
            self.sleeps += 1
            if self.sleeps == 2:
                let_go(self.helpers.pop())


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
        stage.until_queued(self.helpers[1])

    def at(self, stop: Stop) -> None:
        if len(self.helpers) == 2 and stop.thread == 1 and stop.before and stop.call == "fcntl":
            self.helpers.pop().end()
        elif len(self.helpers) == 1:
            super().at(stop)


class Refused(Scene):
    """A claim that gets nothing: all GPUs are held, and it does not wait."""

    def arrange(self, stage: Stage) -> None:
        self.hold(stage, claims(GPUS - 1))

    def operate(self) -> None:
        with suppress(safe_gpu.NotEnoughGpusError):
            super().operate()


class Release(Scene):
    """The release of two GPUs."""

    ends_claim = True

    def prepare(self, line: Connection) -> None:
        super().operate()

    def operate(self) -> None:
        safe_gpu.release_gpus()


class Share(Scene):
    """A claim of a share of two GPUs, beside a claim that shares all."""

    shared = True

    def arrange(self, stage: Stage) -> None:
        self.hold(stage, claims(GPUS, share="50%"))

    def operate(self) -> None:
        safe_gpu.claim_gpus(2, timeout=0, affinity=None, share="50%", only=(0, 1))


class ReleaseShare(Release, Share):
    """The release of such a share."""


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
        self.token = self.hold(stage, claims(self.inside, delegate=True), other=False)

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
