"""The host on which processes are made to crash: its directory, its users, and processes that do as they are told."""

from __future__ import annotations

import ast
import ctypes
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the package beside these scripts, installed or not

import safe_gpu  # noqa: E402
from safe_gpu.drivers.simulated import SimulatedDriver  # noqa: E402

__all__ = ["GPUS", "Actor", "Failure", "Stage", "claims", "load_everything"]

GPUS = 8
_PRESET = "dgx-a100"
_ROOMS = ("safe_gpu", "coordination", "claim", "drivers", "affinity", "runtimes", "selection", "schedulers")
_COMMAND = ("__init__", "become", "commands", "options", "parser", "run", "streams", "wait_line")
_SET_DUMPABLE = 4  # prctl(2): else /proc hides what a process does that has just changed its user


class Failure(Exception):
    """What a claim must never do."""


class Actor:
    """A forked process that does one thing and talks to this one over ``line``.

    Args:
        work: gets the process's end of the line.
        uid: the user that it becomes; None stays.
        patience: seconds that it may take to say anything.
    """

    def __init__(
        self, name: str, work: Callable[[Connection], None], uid: int | None = None, patience: float = 15.0
    ) -> None:
        self.name = name
        self.patience = patience
        self.line, theirs = Pipe()
        self.gone = False
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.line.close()
                _become(uid)
                work(theirs)
            except (EOFError, BrokenPipeError):
                pass  # the controller is gone
            except BaseException:
                with suppress(OSError):
                    theirs.send(("failed", traceback.format_exc()))
            finally:
                os._exit(0)
        theirs.close()

    def hear(self, *expected: str) -> tuple[Any, ...]:
        """What it says next.

        Raises:
            Failure: it says something else, nothing, or has gone.
        """
        if not self.line.poll(self.patience):
            raise Failure(f"{self.name} says nothing for {self.patience:.0f} s instead of {' or '.join(expected)}")
        try:
            said = self.line.recv()
        except (EOFError, ConnectionResetError):
            said = ("gone",)
        if said[0] not in expected:
            raise Failure(f"{self.name} says {': '.join(map(str, said))}")
        return said  # type: ignore[no-any-return]

    def tell(self, word: str) -> None:
        with suppress(OSError):
            self.line.send(word)

    def reap(self) -> None:
        """Wait for its end."""
        if not self.gone:
            os.waitpid(self.pid, 0)
            self.gone = True
        self.line.close()

    def kill(self) -> None:
        """End it, at whatever it is."""
        if not self.gone:
            os.kill(self.pid, signal.SIGKILL)
        self.reap()

    def wait_for_ticket(self, stage: Stage) -> None:
        """Return when it stands in the queue, or has something to say."""
        while not self.line.poll(0.0005):
            for path in Path(stage.state, "queue").glob("*.ticket"):
                with suppress(OSError, ValueError):
                    if json.loads(path.read_bytes())["pid"] == self.pid:
                        return


def _become(uid: int | None) -> None:
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        ctypes.CDLL(None).prctl(_SET_DUMPABLE, 1, 0, 0, 0)


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
        for name in [name for name in os.environ if name.startswith(("SAFE_GPU_", "CUDA_"))]:
            del os.environ[name]
        os.environ["SAFE_GPU_DRIVER"] = f"simulated:{_PRESET}"
        self.renew(first_use=False)

    def renew(self, *, first_use: bool) -> None:
        """Go on in another directory, in which nobody has claimed anything yet if ``first_use``."""
        shutil.rmtree(os.path.join(self.base, str(self.number)), ignore_errors=True)
        self.number += 1
        place = os.path.join(self.base, str(self.number))
        os.mkdir(place)
        os.chmod(place, 0o1777)
        self.state = os.environ["SAFE_GPU_DIR"] = os.path.join(place, "state")
        if not first_use:
            # By root: its files are nobody's whom a sticky directory would let remove them.
            one = Actor("the first", claims(GPUS))
            one.hear("holds")
            one.tell("let go")
            one.hear("done")
            one.reap()
            driver = SimulatedDriver(_PRESET)
            with driver.occupy(driver.idle.gpus[0].uuid, memory=1):  # the driver's own directories
                pass

    def start(self, name: str, work: Callable[[Connection], None], *, other: bool = False) -> Actor:
        """Start a process of the first user, or of the other one."""
        return Actor(name, work, self.users[other], self.patience)

    def leftovers(self) -> list[str]:
        """What lies about that no claim uses: tickets, unfinished files and directories, contexts of the dead."""
        place = Path(self.state).parent
        found = [path for path in place.rglob("*") if path.name.startswith(".") or path.suffix == ".ticket"]
        found += [path for path in place.glob("state/simulated/*/*") if path.suffix != ".bad"]
        return [str(path.relative_to(place)) for path in found]

    def narrow(self) -> list[str]:
        """Files and directories whose mode keeps other users out."""
        state = Path(self.state)
        wrong = []
        for path in (state, *state.rglob("*")):
            wanted = 0o1777 if path.is_dir() else 0o666
            if (
                not path.name.startswith(".")
                and "simulated/" not in str(path)
                and path.stat().st_mode & 0o7777 != wanted
            ):
                wrong.append(f"{path.relative_to(state.parent)} has mode {path.stat().st_mode & 0o7777:o}")
        return wrong

    def torn_history(self) -> list[str]:
        """Lines of the history that make no sense."""
        lines = [line for path in Path(self.state).glob("history/*") for line in path.read_bytes().splitlines()]
        return [repr(line) for line in lines if not _is_json(line)]

    def close(self) -> None:
        shutil.rmtree(self.base, ignore_errors=True)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def load_everything() -> None:
    """Import what claims import, so that only their own system calls are counted. Other users may not even read it."""
    names = set()
    for path in (ROOT / "safe_gpu").rglob("*.py"):
        room, name = path.parent.name, path.stem
        if name != "__main__" and (room in _ROOMS or (room == "cli" and name in _COMMAND)):
            names.add(f"safe_gpu.{room}.{name}" if room != "safe_gpu" else f"safe_gpu.{name}")
            names |= _imported(path)
    for name in sorted(names):
        if name.partition(".")[0] in {"safe_gpu", "filelock", *sys.stdlib_module_names}:
            with suppress(ImportError):  # of another version of Python
                import_module(name)


def _imported(path: Path) -> set[str]:
    """The modules that a file of the package imports by their full names, in its functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module)
    return found
