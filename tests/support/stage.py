"""A simulated host in a directory of its own, and who claims there."""

import ast
import json
import os
import re
import shutil
import sys
import tempfile
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.actor import Actor, Work

import safe_gpu
from safe_gpu.drivers.simulated import SimulatedDriver

USERS = (54321, 54322)


def simulate(preset: str, state: str, **variables: str) -> None:
    """Make this process one on a simulated host, whatever it has inherited and whoever claims here by safe-gpu 2.0."""
    for name in list(os.environ):
        if name.startswith(("SAFE_GPU_", "CUDA_", "HIP_", "ROCR_", "GPU_DEVICE_")) and name != "SAFE_GPU_TEST_ETC":
            del os.environ[name]
    os.environ.update(SAFE_GPU_DRIVER=f"simulated:{preset}", SAFE_GPU_DIR=state, SAFE_GPU_LEGACY_LOCK="never")
    os.environ.update(variables)


def import_everything() -> None:
    """Import what claims may import, in functions too. Other users may not be able to read this package or Python."""
    names = {"_strptime", "encodings.idna", "grp", "pwd", "resource", "unicodedata"}
    root = Path(safe_gpu.__file__).parent
    for path in root.rglob("*.py"):
        if path.parent.name != "engines" and path.stem != "__main__":
            names.add(".".join(path.relative_to(root.parent).with_suffix("").parts))
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    names |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                    names.add(node.module)
    for name in sorted(names):
        if name.partition(".")[0] in {"safe_gpu", "filelock", *sys.stdlib_module_names}:
            with suppress(ImportError):  # of another version of Python
                import_module(name)


def claims(nb_gpus: int, timeout: float = 0.0, **options: Any) -> Work:
    """What an actor does that claims, says ``holds`` or ``refused``, and releases when it is told to."""

    def work(line: Connection) -> None:
        options.setdefault("placeholder_fn", safe_gpu.NoPlaceholder())
        try:
            owner = safe_gpu.GPUOwner(nb_gpus, timeout=timeout, affinity=None, **options)
        except safe_gpu.SafeGpuError as err:
            line.send(("refused", str(err), [verdict.pid for verdict in getattr(err, "verdicts", ())]))
            return
        line.send(("holds", [gpu.uuid for gpu in owner.gpus], os.environ.get("SAFE_GPU_SCOPE", "")))
        line.recv()
        owner.release_gpus()
        line.send(("done",))

    return work


def let_go(actor: Actor) -> None:
    """Have it release its GPUs."""
    actor.tell()
    actor.expect("done")


def place_for_all(name: str, *, in_memory: bool = False) -> str:
    """Make a directory that all users may enter, and return its path; who called this removes it."""
    parent = None
    if in_memory and os.path.isdir("/dev/shm"):
        parent = "/dev/shm"
    path = tempfile.mkdtemp(prefix=f"safe-gpu-{name}-", dir=parent)
    os.chmod(path, 0o755)
    return path


def left_behind(state: str) -> list[str]:
    """The entries in a state directory in which nobody claims or waits any more: there should be none."""
    return [str(path) for part in ("claims", "queue") for path in Path(state, part).glob("[0-9]*")]


class Stage:
    """A simulated host in a directory that is open to all users; where root runs this, two users claim there.

    Attributes:
        patience: seconds that an actor may take to say anything.
        state: the state directory.
    """

    def __init__(self, preset: str = "dgx-a100", patience: float = 15.0) -> None:
        self.preset, self.patience = preset, patience
        self.base = place_for_all("stage")
        self.users: tuple[int | None, int | None] = USERS if os.geteuid() == 0 else (None, None)
        self.number = 0
        self.renew(first_use=False)

    def renew(self, *, first_use: bool) -> None:
        """Go on in another directory, in which nobody has claimed anything yet if ``first_use``."""
        shutil.rmtree(os.path.join(self.base, str(self.number)), ignore_errors=True)
        self.number += 1
        place = os.path.join(self.base, str(self.number))
        os.mkdir(place)
        os.chmod(place, 0o1777)
        self.state = os.path.join(place, "state")
        simulate(self.preset, self.state)
        if not first_use:
            # By root: its files are nobody's whom a sticky directory would let remove them.
            one = Actor(claims(len(SimulatedDriver(self.preset).idle.gpus)), name="the first", patience=self.patience)
            one.expect("holds")
            let_go(one)
            one.end()
            driver = SimulatedDriver(self.preset)
            with driver.occupy(driver.idle.gpus[0].uuid, memory=1):  # the driver's own directories
                pass

    def start(self, name: str, work: Work, *, other: bool = False, umask: int | None = None) -> Actor:
        """Start a process of the first user, or of the other one."""
        return Actor(work, name=name, uid=self.users[other], umask=umask, patience=self.patience)

    def until_queued(self, actor: Actor) -> None:
        """Return when it stands in the queue, or has something to say."""
        while not actor.line.poll(0.0005):
            for path in Path(self.state, "queue").glob("[0-9]*"):
                with suppress(OSError, ValueError):
                    if json.loads(path.read_bytes())["pid"] == actor.pid:
                        return

    def flaws(self) -> list[str]:
        """What is wrong with the files when nobody claims: entries, unfinished files and directories, contexts of the
        dead; modes that keep other users out; lines of the history that make no sense.

        An unfinished entry is removed when it is a minute old.
        """
        state, place = Path(self.state), Path(self.state).parent
        left = [path for path in place.rglob(".*") if not re.fullmatch(r"\.[0-9a-f]{16}", path.name)]
        left += map(Path, left_behind(self.state))
        left += [path for path in state.glob("simulated/*/*") if path.suffix != ".bad"]
        found = [f"left: {path.relative_to(place)}" for path in left]
        for path in (state, *state.rglob("*")):
            mode, wanted = path.stat().st_mode & 0o7777, 0o1777 if path.is_dir() else 0o666
            if mode != wanted and not path.name.startswith(".") and "simulated/" not in str(path):
                found.append(f"{path.relative_to(place)} has mode {mode:o}")
        for path in state.glob("history/*.jsonl"):
            for line in path.read_bytes().splitlines():
                try:
                    json.loads(line)
                except ValueError:
                    found.append(f"torn line in {path.name}: {line!r}")
        return found

    def close(self) -> None:
        shutil.rmtree(self.base, ignore_errors=True)
