"""What one hostile user puts into a state directory, and what that costs a command of somebody else.

Nothing here uses this package, so that it also measures others: what is measured is the checkout at a path, in a
process of its own, which becomes another user once it has imported everything.
"""

import fcntl
import json
import os
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import Pipe, Process
from pathlib import Path
from typing import Any, NamedTuple

NEIGHBOUR, VICTIM, ROOT = 4711, 4712, 0

_LINKS = 30_000  # names of one file, of which file systems allow some ten thousand
_WHOLE_FILE = struct.pack("@hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


class Cost(NamedTuple):
    """What a command took beyond the same one in a directory where nobody has been.

    Attributes:
        milliseconds: of processor time.
        locked: the same under host.lock.
        mebibytes: of memory at most.
        end: how it ended: "done", or the name of an exception and its text.
        slowness: of this machine at that moment, by a loop of lstat(2): 1 on an idle one that takes 2 microseconds for
            each. Beside other processes on the same cores the same work takes more processor time.
    """

    milliseconds: float
    locked: float
    mebibytes: float
    end: str
    slowness: float


class Crowd:
    """A state directory that anybody may write, and who fills it.

    Args:
        path: of the state directory, which is made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held: list[int] = []  # descriptors
        for directory in (path, *(path / part for part in ("claims", "queue", "faults", "history"))):
            directory.mkdir()
            directory.chmod(0o1777)

    def file(self, place: str, content: bytes = b"", *, mode: int = 0o644, lives: bool = False) -> Path:
        """Make a file of the neighbour's; one that lives is locked."""
        path = self.path / place
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(fd, content)
        os.fchown(fd, NEIGHBOUR, NEIGHBOUR)
        os.fchmod(fd, mode)
        if lives:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WHOLE_FILE)
            self.held.append(fd)
        else:
            os.close(fd)
        return path

    def close(self) -> None:
        """Let all that lives end."""
        while self.held:
            os.close(self.held.pop())

    def names(self, place: str, number: int, name: Callable[[int], str], file: Callable[[str], Path]) -> None:
        """Give that many names to a few files, which takes less time than as many files."""
        for first in range(0, number, _LINKS):
            path = file(f"{place}/{name(first)}")
            for one in range(first + 1, min(first + _LINKS, number)):
                os.link(path, path.parent / name(one))


def _name(number: int) -> str:
    """The name of an entry or ticket."""
    return f"{number + 1}.{number:016x}"


def _claim(gpus: dict[str, None], **more: object) -> bytes:
    """The content of a claim of whole GPUs, with more keys."""
    return json.dumps({"v": 1, "pid": 1, "gpus": gpus, **more}, separators=(",", ":")).encode()


def _ticket(gpus: list[str], **more: object) -> bytes:
    """The content of a ticket for one of these GPUs, with more keys."""
    return json.dumps({"v": 1, "pid": 1, "gpus": gpus, "nb_gpus": 1, **more}, separators=(",", ":")).encode()


_FIRST_GPU = "GPU-f93ae246-d2a1-e50c-54df-977b35f132b8"  # of the simulated host

_CLAIM, _TICKET = _claim({"made-up": None}), _ticket(["made-up"])


def made_up_gpus(crowd: Crowd) -> None:
    """1,000 claims, each of 256 GPUs that there are not."""
    for number in range(1000):
        gpus = {f"{number:x}-{gpu:x}": None for gpu in range(256)}
        crowd.file(f"claims/{_name(number)}", _claim(gpus), lives=True)


def small_objects(crowd: Crowd) -> None:
    """1,000 claims of 63 KB of small objects."""
    for number in range(1000):
        crowd.file(f"claims/{_name(number)}", _claim({"made-up": None}, x=[{}] * 21_000), lives=True)


def numbers(crowd: Crowd) -> None:
    """1,000 claims of 32 KB, with as many numbers as an entry may have."""
    for number in range(1000):
        crowd.file(f"claims/{_name(number)}", _claim({"made-up": None}, x=[1.234567890123] * 2000), lives=True)


def small_objects_in_tickets(crowd: Crowd) -> None:
    """1,000 tickets of 63 KB of small objects."""
    for number in range(1000):
        crowd.file(f"queue/{_name(number)}", _ticket(["made-up"], x=[{}] * 21_000), lives=True)


def ranges(crowd: Crowd) -> None:
    """One file of 60,000 names, with 4,000 ranges before the lock that shows that it lives."""
    path = crowd.file(f"claims/{_name(0)}", _CLAIM.ljust(16_000))
    fd = os.open(path, os.O_RDWR)
    crowd.held.append(fd)
    for number in range(4000):
        lock = struct.pack("@hhqqi0q", fcntl.F_RDLCK, os.SEEK_SET, 2 * number, 1, 0)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
    lock = struct.pack("@hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 10_000, 0, 0)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
    for number in range(1, 60_000):
        os.link(path, path.parent / _name(number))


def unfinished(crowd: Crowd) -> None:
    """60,000 entries that seem to be in the making."""
    crowd.names("claims", 60_000, lambda number: f".{number:016x}", crowd.file)


def long_names(crowd: Crowd) -> None:
    """60,000 names of 255 characters."""
    crowd.names("claims", 60_000, lambda number: f"{number}.".ljust(255, "x"), crowd.file)


def dead_names(crowd: Crowd) -> None:
    """60,000 names of files that are dead."""
    crowd.names("claims", 60_000, _name, lambda place: crowd.file(place, _CLAIM))


def dead_files(crowd: Crowd, number: int = 60_000) -> None:
    """60,000 files that are dead."""
    for one in range(number):
        crowd.file(f"claims/{_name(one)}", _CLAIM)


def dead_tickets(crowd: Crowd) -> None:
    """60,000 files in the queue that are dead."""
    for one in range(60_000):
        crowd.file(f"queue/{_name(one)}", _TICKET)


def living_names(crowd: Crowd) -> None:
    """60,000 names of files that live."""
    crowd.names("claims", 60_000, _name, lambda place: crowd.file(place, _CLAIM, lives=True))


def living_files(crowd: Crowd) -> None:
    """4,000 files that live."""
    for one in range(4000):
        crowd.file(f"claims/{_name(one)}", _CLAIM, lives=True)


def writable_names(crowd: Crowd) -> None:
    """60,000 names of a file that others may write."""
    crowd.names("claims", 60_000, _name, lambda place: crowd.file(place, _CLAIM, mode=0o666))


def more_names_than_ever(crowd: Crowd) -> None:
    """100,000 files that are dead."""
    dead_files(crowd, 100_000)


def notes_of_faults(crowd: Crowd) -> None:
    """500,000 names in faults."""
    crowd.names("faults", 500_000, lambda number: f"GPU-{number}.{NEIGHBOUR}", crowd.file)


def files_of_history(crowd: Crowd) -> None:
    """500,000 names in history."""
    crowd.names("history", 500_000, lambda number: f"GPU-{number}.seen", crowd.file)


def grown_directory(crowd: Crowd) -> None:
    """A directory that had 400,000 names, which are gone."""
    crowd.names("claims", 400_000, _name, crowd.file)
    with os.scandir(crowd.path / "claims") as names:
        for one in names:
            os.unlink(one.path)


def descriptors(crowd: Crowd) -> None:
    """A claim whose process is gone, and 60 processes of its user with 4,000 descriptors."""
    crowd.file(f"claims/{_name(0)}", _claim({_FIRST_GPU: None}, pid=(1 << 31) - 1, start=1), lives=True)
    for _ in range(60):
        ours, theirs = Pipe()
        Process(target=_open_many, args=(theirs,), daemon=True).start()
        ours.recv()


def _open_many(line: Any) -> None:
    """Be a process of the neighbour's with 4,000 descriptors, say so, and sleep."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4200, 4200))
    os.setgroups([])
    os.setresgid(NEIGHBOUR, NEIGHBOUR, NEIGHBOUR)
    os.setresuid(NEIGHBOUR, NEIGHBOUR, NEIGHBOUR)
    with suppress(OSError):
        for _ in range(4000):
            os.open("/dev/null", os.O_RDONLY)
    line.send("open")
    time.sleep(3600)


class Case(NamedTuple):
    """What somebody makes, and whom it costs what.

    Attributes:
        command: "claim" or "status", which another user calls.
        names: that there are at most in a directory of entries. What they cost has no bound, since the owner of each
            has to be looked up; this is how it grows.
        takes_long: to make or to measure.
        above: the directory in which it is made; "" is in memory.
    """

    make: Callable[[Crowd], None]
    command: str = "claim"
    uid: int = VICTIM
    names: int = 60_000
    takes_long: bool = False
    above: str = ""

    @property
    def name(self) -> str:
        """What it is called in the table."""
        whose = {ROOT: " of root", VICTIM: ""}[self.uid]
        return f"{self.make.__name__}: {self.command}{whose}"


CASES = (
    Case(made_up_gpus, takes_long=True),
    Case(made_up_gpus, "status", ROOT, takes_long=True),
    Case(small_objects),
    Case(small_objects, "status", ROOT, takes_long=True),
    Case(numbers, takes_long=True),
    Case(small_objects_in_tickets, takes_long=True),
    Case(small_objects_in_tickets, "status", ROOT, takes_long=True),
    Case(ranges, takes_long=True),
    Case(unfinished, takes_long=True),
    Case(long_names, takes_long=True),
    Case(dead_names, takes_long=True),
    Case(dead_files, takes_long=True),
    Case(dead_tickets, takes_long=True),
    Case(living_names, takes_long=True),
    Case(living_files, takes_long=True),
    Case(writable_names, takes_long=True),
    Case(more_names_than_ever, names=100_000, takes_long=True),
    Case(notes_of_faults, takes_long=True),
    Case(files_of_history, takes_long=True),
    Case(files_of_history, "status", takes_long=True),
    Case(grown_directory, takes_long=True, above="/tmp"),
    Case(descriptors, "status", ROOT, takes_long=True),
)


# What is measured: it runs twice in quiet directories, so that everything is imported, and then in the crowded one.
_MEASURED = """
import contextlib, importlib, io, json, os, pkgutil, resource, sys, time
checkout, uid, command, *places = sys.argv[1:]
sys.path.insert(0, checkout)
import safe_gpu
from safe_gpu.coordination.host_lock import Host
for module in pkgutil.walk_packages(safe_gpu.__path__, "safe_gpu."):
    if not module.name.startswith("safe_gpu.engines") and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
locked = Host.locked
under_lock = []

@contextlib.contextmanager
def timed(*arguments, **options):
    with locked(*arguments, **options):
        began = time.thread_time()
        try:
            yield
        finally:
            under_lock.append(time.thread_time() - began)

Host.locked = timed

def run():
    if command == "claim":
        safe_gpu.claim_gpus(1, timeout=0)
        safe_gpu.release_gpus()
    else:
        from safe_gpu.cli.commands import main
        with contextlib.redirect_stdout(io.StringIO()):
            main(["status", "--json"])

def measured(place):
    os.environ["SAFE_GPU_DIR"] = place
    under_lock.clear()
    before, began, end = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time(), "done"
    try:
        run()
    except Exception as err:
        end = f"{type(err).__name__}: {err}"
    seconds = time.process_time() - began
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return [seconds * 1e3, max(under_lock, default=0) * 1e3, grown / 1024, end]

def seconds_of_status():
    began = time.process_time()
    for _ in range(20_000):
        os.stat(places[0], follow_symlinks=False)
    return (time.process_time() - began) / 20_000

measured(places[0])
os.setgroups([])
os.setresgid(int(uid), int(uid), int(uid))
os.setresuid(int(uid), int(uid), int(uid))
before = seconds_of_status()
found = [measured(place) for place in places[1:]]
print(json.dumps([*found, (before + seconds_of_status()) / 2]))
"""

_STATUS = 2e-6  # seconds of a call of os.stat on an idle machine


def costs_of(case: Case, checkouts: Sequence[Path], repeat: int) -> list[Cost]:
    """What a case costs a command of each checkout: the least of several times, which the checkouts take in turns."""
    found: list[list[Cost]] = [[] for _ in checkouts]
    with measuring(case) as cost_to:
        for _ in range(repeat):
            for number, checkout in enumerate(checkouts):
                found[number].append(cost_to(checkout))
    return [min(costs, key=lambda cost: cost.milliseconds / cost.slowness) for costs in found]


@contextmanager
def measuring(case: Case) -> Iterator[Callable[[Path], Cost]]:
    """Yield what measures once what a case costs a command of a checkout, beyond what it takes in a quiet directory."""
    above = case.above or "/dev/shm"
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="safe-gpu-costs-", dir=above)))
        scratch.chmod(0o755)
        crowd = stack.enter_context(_crowded(case, scratch / "crowd"))
        quiet = [scratch / "first", scratch / "quiet"]
        for place in quiet:
            Crowd(place)
        yield lambda checkout: _measured(case, checkout, scratch, [*quiet, crowd])


def _measured(case: Case, checkout: Path, scratch: Path, places: list[Path]) -> Cost:
    """What a command of a checkout costs in the last state directory beyond the second; the first is to warm up."""
    words = [sys.executable, "-c", _MEASURED, checkout, str(case.uid), case.command, *places]
    env = {
        "PATH": os.environ["PATH"],
        "SAFE_GPU_DRIVER": "simulated:dgx-a100",
        "SAFE_GPU_LEGACY_LOCK": "never",
        "SAFE_GPU_SIMULATED_DIR": str(scratch / "simulated"),
    }
    month = time.strftime("%Y-%m", time.gmtime())
    (places[-1] / "history" / f"{month}.jsonl").unlink(missing_ok=True)  # who makes it looks at the other names
    (scratch / "simulated").mkdir(exist_ok=True)
    (scratch / "simulated").chmod(0o1777)
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300, check=True)
    quiet, crowded, seconds = json.loads(done.stdout)
    return Cost(crowded[0] - quiet[0], crowded[1], crowded[2], crowded[3], max(1.0, seconds / _STATUS))


@contextmanager
def _crowded(case: Case, path: Path) -> Iterator[Path]:
    """Yield the state directory of a case while a process holds what is locked there."""
    ours, theirs = Pipe()

    def fill() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        case.make(Crowd(path))
        theirs.send("filled")
        theirs.recv()

    holder = Process(target=fill)
    holder.start()
    theirs.close()
    try:
        if ours.recv() != "filled":
            raise RuntimeError(f"{case.name} cannot be made")
        yield path
    finally:
        with suppress(OSError):
            ours.send("end")
        holder.join()
