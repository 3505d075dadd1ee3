"""A simulated host in a directory of its own, who claims there, and a referee who knows nothing of claims."""

import ast
import fcntl
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.actor import Actor, Work

import safe_gpu
from safe_gpu.drivers.simulated import SimulatedDriver

USERS = (54321, 54322)
_DYING = 5.0  # seconds that a process takes to close its descriptors at most
_EXITING = 0x4  # PF_EXITING in the flags of /proc/PID/stat


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


class Stage:
    """A simulated host in a directory that is open to all users; where root runs this, two users claim there.

    Attributes:
        patience: seconds that an actor may take to say anything.
        state: the state directory.
    """

    def __init__(self, preset: str = "dgx-a100", patience: float = 15.0) -> None:
        self.preset, self.patience = preset, patience
        self.base = tempfile.mkdtemp(prefix="safe-gpu-stage-")
        os.chmod(self.base, 0o755)
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
        left += [path for part in ("claims", "queue") for path in state.glob(f"{part}/[0-9]*")]
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


def booked_twice(parts: Iterable[tuple[int | None, bool]], capacity: int) -> str:
    """What is wrong with those that have a GPU at one moment; "" if nothing is.

    Args:
        parts: the share of each, None for all of it, and whether it is inside the claim of another one of them.
        capacity: of the GPU, in the unit of shares.
    """
    parts = list(parts)
    counted = [share for share, inside in parts if not inside]
    if len(parts) - len(counted) > 1:
        return "booked twice inside one claim"
    sizes = [share for share in counted if share is not None]
    if len(counted) > 1 and not sizes:
        return "booked twice"
    if len(counted) > 1 and len(sizes) < len(counted):
        return "a share beside a whole claim"
    return "more promised than there is" if sum(sizes) > capacity else ""


class Mark:
    """What a claim has of a GPU, as the referee knows it: a file that its processes keep locked.

    Attributes:
        facts: ``uuid``, ``share``, ``inside``, ``pid`` and ``start`` of the process that signed it last, and more.
    """

    def __init__(self, fd: int, path: str, facts: dict[str, Any]) -> None:
        self.fd, self.path, self.facts = fd, path, facts

    def close(self) -> None:
        """In a child: it has nothing of that GPU."""
        os.close(self.fd)

    def end(self) -> None:
        """The GPU is given back next. Children that still have the mark have nothing of the GPU either."""
        with suppress(OSError):
            os.unlink(self.path)
            fcntl.flock(self.fd, fcntl.LOCK_UN)
            os.close(self.fd)


class Referee:
    """Notes who has which GPU, in files of its own.

    Who gets a GPU makes a mark, a file that is locked before it has its name, and looks at the other marks of that GPU
    then. So of two that come at once one sees the other.

    Args:
        directory: where its files are; it is made, open to all users.
        capacity: of each GPU, in the unit of shares.
        proc: where processes are seen as on the host.
    """

    def __init__(self, directory: str, capacity: int, proc: str = "/proc") -> None:
        self.capacity, self.proc = capacity, proc
        self.log, self._marks = f"{directory}/log", f"{directory}/marks"
        with suppress(FileExistsError):
            os.makedirs(self._marks)
            os.chmod(self._marks, 0o777)
            Path(self.log).touch()
            os.chmod(self.log, 0o666)

    def tell(self, event: str, **facts: Any) -> None:
        """Append an event to the log; one write, so that lines of several processes do not mix."""
        line = {"at": round(time.monotonic(), 4), "event": event, "pid": self.pid(), **facts}
        with open(self.log, "ab", buffering=0) as file:
            file.write(json.dumps(line, default=str).encode()[:4000] + b"\n")

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in Path(self.log).read_text().splitlines()]

    def begin(self, uuid: str, share: int | None = None, *, inside: bool = False, **facts: Any) -> Mark:
        """Mark what this process has of a GPU, and tell if then the GPU is booked twice.

        Whoever else has it may be dying just now.
        """
        fd, path = tempfile.mkstemp(prefix=".", dir=self._marks)
        fcntl.flock(fd, fcntl.LOCK_EX)
        mark = Mark(fd, f"{self._marks}/{uuid}{os.path.basename(path)}", facts)
        facts.update(uuid=uuid, share=share, inside=inside)
        self.sign(mark)
        os.fchmod(fd, 0o666)
        os.rename(path, mark.path)
        until = time.monotonic() + _DYING
        while True:
            # One that is inside of what has ended counts for whoever comes next.
            others = [(one["share"], one["inside"] and inside, one) for one in self.held(uuid)]
            living = [part for *part, one in others if self.lives(one)]
            what = booked_twice([part for *part, _ in others], self.capacity)
            if not what:
                return mark
            if booked_twice(living, self.capacity) or time.monotonic() > until:
                rivals = [one for *_, one in others if one["pid"] != facts["pid"]]
                self.tell("violation", what=what, uuid=uuid, rivals=rivals)
                return mark
            time.sleep(0.001)

    def sign(self, mark: Mark) -> None:
        """From now on this process is the one that has to live as long as the mark counts."""
        pid = self.pid()
        mark.facts.update(pid=pid, start=self.start_time(pid))
        os.pwrite(mark.fd, json.dumps(mark.facts).encode().ljust(400), 0)  # in whole: others read it

    def held(self, uuid: str = "") -> list[dict[str, Any]]:
        """The facts of all marks that were held when this was called, and still are: of a GPU, or of all."""
        found = []
        for name in os.listdir(self._marks):
            if name.startswith(".") or not name.startswith(uuid):
                continue
            with suppress(FileNotFoundError), open(f"{self._marks}/{name}", "rb", buffering=0) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    os.unlink(file.name)
                except BlockingIOError:
                    found.append(json.loads(file.read()))
        return found

    def pid(self) -> int:
        """This process's number on the host, which is another one inside a PID namespace."""
        return int(os.readlink(f"{self.proc}/self"))

    def start_time(self, pid: int) -> str:
        """When a process started, in clock ticks since boot; "" if it is gone or exits."""
        try:
            words = Path(f"{self.proc}/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return ""
        return "" if words[0] in "ZX" or int(words[6]) & _EXITING else words[19]

    def lives(self, facts: dict[str, Any]) -> bool:
        """Whether the process that has signed a mark lives."""
        return self.start_time(facts["pid"]) == facts["start"]
