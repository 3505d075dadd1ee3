"""A simulated host in a directory of its own, and who claims there."""

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.actor import Actor, Work
from support.referee import Referee

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


_AN_IMPORT = re.compile(r"^ *(?:from|import) (\w[\w.]*)", re.MULTILINE)


def import_everything() -> None:
    """Import what claims may import, in functions too. Other users may not be able to read this package or Python.

    The lines are found in the text: every race and explorer does this first, and to parse the package takes longer than
    to import it.
    """
    names = {"_strptime", "encodings.idna", "grp", "pwd", "resource", "unicodedata"}
    root = Path(safe_gpu.__file__).parent
    for path in root.rglob("*.py"):
        if path.parent.name != "engines" and path.stem != "__main__":
            names.add(".".join(path.relative_to(root.parent).with_suffix("").parts))
            names.update(_AN_IMPORT.findall(path.read_text()))
    for name in sorted(names):
        if name.partition(".")[0] in {"safe_gpu", "filelock", *sys.stdlib_module_names}:
            with suppress(ImportError):  # of another version of Python
                import_module(name)


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


def replace_file(path: str, text: str) -> None:
    """Write a file that all users may read, in the place of the one that is there: they see one of the two."""
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(f"{path}.new", 0o644)
    os.rename(f"{path}.new", path)


class HostDirectory:
    """A directory with a simulated host, where all users may claim. Other processes know it by its path.

    Args:
        path: of the directory, which is made if it does not exist.
        preset: of the simulated host.
        has_tree: whether the driver's files are beside the state directories, for all of them; else they are in each.

    Attributes:
        state: a state directory, which does not exist at first; processes may have others.
        tree: where the driver's files are; "" is in the state directory.
        policy: of the host, if that exists.
    """

    def __init__(self, path: str, preset: str, *, has_tree: bool = True) -> None:
        self.path = path
        self.preset = preset
        self.state = f"{path}/state"
        self.tree = ""
        if has_tree:
            self.tree = f"{path}/tree"
        self.policy = f"{path}/policy.ini"
        if not os.path.isdir(path):
            self.make_place("")

    def make_place(self, name: str) -> str:
        """Make a directory in it where all users may make files; its path."""
        path = os.path.join(self.path, name)
        os.mkdir(path)
        os.chmod(path, 0o1777)
        return path

    def enter(self, state: str = "", **variables: str) -> None:
        """Make this process one on this host.

        Args:
            state: its state directory, if it is another one than :attr:`state`.
            variables: more of its environment.
        """
        if self.tree:
            variables["SAFE_GPU_SIMULATED_DIR"] = self.tree
        if os.path.exists(self.policy):
            variables["SAFE_GPU_POLICY"] = self.policy
        simulate(self.preset, state or self.state, **variables)

    def make_files_of_driver(self) -> None:
        """Make what the first process on a GPU makes; in a process that has entered this host."""
        driver = SimulatedDriver(self.preset)
        driver.occupy(driver.idle.gpus[0].uuid, memory=1).close()

    def remove(self) -> None:
        """Remove the directory and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)


@contextmanager
def temporary_host(name: str, preset: str) -> Iterator[HostDirectory]:
    """A simulated host in a directory of its own, which this process enters; it is removed at the end."""
    place = place_for_all(name)
    try:
        host = HostDirectory(f"{place}/host", preset)
        host.enter()
        yield host
    finally:
        shutil.rmtree(place, ignore_errors=True)


def left_behind(state: str) -> list[str]:
    """The entries in a state directory in which nobody claims or waits any more: there should be none."""
    return [str(path) for part in ("claims", "queue") for path in Path(state, part).glob("[0-9]*")]


class Stage:
    """A simulated host and a referee; where root runs this, two users claim there.

    Attributes:
        patience: seconds that an actor may take to say anything.
        host: is another one after each :meth:`renew`.
        referee: who is told what all actors have that claim by :meth:`claims`.
    """

    def __init__(self, preset: str = "dgx-a100", patience: float = 15.0) -> None:
        self.preset = preset
        self.patience = patience
        self._place = place_for_all("stage")
        self._users: tuple[int | None, int | None] = (None, None)
        if os.geteuid() == 0:
            self._users = USERS
        self._number = 0
        self.renew(first_use=False)

    @property
    def state(self) -> str:
        """The state directory."""
        return self.host.state

    def renew(self, *, first_use: bool) -> None:
        """Go on with another host, on which nobody has claimed anything yet if ``first_use``."""
        if self._number:
            self.host.remove()
        self._number += 1
        self.host = HostDirectory(f"{self._place}/{self._number}", self.preset, has_tree=False)
        self.host.enter()
        gpus = SimulatedDriver(self.preset).idle.gpus
        self.referee = Referee(f"{self.host.path}/referee", max(gpu.memory_total or 0 for gpu in gpus))
        if not first_use:
            # By root: its files are nobody's whom a sticky directory would let remove them.
            one = Actor(self.claims(len(gpus)), name="the first", patience=self.patience)
            one.expect("holds")
            let_go(one)
            one.end()
            self.host.make_files_of_driver()

    def start(self, name: str, work: Work, *, other: bool = False, umask: int | None = None) -> Actor:
        """Start a process of the first user, or of the other one."""
        return Actor(work, name=name, uid=self._users[other], umask=umask, patience=self.patience)

    def claims(self, nb_gpus: int, timeout: float = 0.0, *, inside: bool = False, **options: Any) -> Work:
        """What an actor does that claims, says ``holds`` or ``refused``, and releases when it is told to.

        The referee is told of what it has.

        Args:
            inside: whether it claims inside another claim.
        """
        options.setdefault("placeholder_fn", safe_gpu.NoPlaceholder())

        def work(line: Connection) -> None:
            try:
                owner = safe_gpu.GPUOwner(nb_gpus, timeout=timeout, affinity=None, **options)
            except safe_gpu.SafeGpuError as err:
                line.send(("refused", str(err), [verdict.pid for verdict in getattr(err, "verdicts", ())]))
                return
            marks = [self.referee.begin(gpu.uuid, owner.share, inside=inside) for gpu in owner.gpus]
            line.send(("holds", [gpu.uuid for gpu in owner.gpus], os.environ.get("SAFE_GPU_SCOPE", "")))
            line.recv()
            for mark in marks:
                mark.end()
            owner.release_gpus()
            line.send(("done",))

        return work

    def until_queued(self, actor: Actor) -> None:
        """Wait until it stands in the queue, or has something to say."""
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
        state = Path(self.state)
        return [*self._left(state), *_wrong_modes(state), *_torn_lines(state)]

    def _left(self, state: Path) -> list[str]:
        """What is there that nobody needs."""
        unfinished = [path for path in state.parent.rglob(".*") if not re.fullmatch(r"\.[0-9a-f]{16}", path.name)]
        entries = [Path(path) for path in left_behind(self.state)]
        contexts = [path for path in state.glob("simulated/*/*") if path.suffix != ".bad"]
        return [f"left: {path.relative_to(state.parent)}" for path in (*unfinished, *entries, *contexts)]

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self._place, ignore_errors=True)


def _wrong_modes(state: Path) -> list[str]:
    """Files and directories of a state directory that not all users may read and write."""
    found = []
    for path in (state, *state.rglob("*")):
        if path.name.startswith(".") or "simulated/" in str(path):
            continue
        mode = path.stat().st_mode & 0o7777
        wanted = 0o666
        if path.is_dir():
            wanted = 0o1777
        if mode != wanted:
            found.append(f"{path.relative_to(state.parent)} has mode {mode:o}")
    return found


def _torn_lines(state: Path) -> list[str]:
    """Lines of the history that are not JSON."""
    found = []
    for path in state.glob("history/*.jsonl"):
        for line in path.read_bytes().splitlines():
            try:
                json.loads(line)
            except ValueError:
                found.append(f"torn line in {path.name}: {line!r}")
    return found
