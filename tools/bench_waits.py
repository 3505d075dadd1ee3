"""Programs on a host of fake NVIDIA GPUs whose driver takes its time: for bench.py.

The driver is the fake NVML of the tests. Processes of this package, or of another checkout of it, claim there.
"""

from __future__ import annotations

import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

FAKES = Path(__file__).resolve().parents[1] / "tests/fakes"
_LIBRARIES = {"nvml.c": "libnvidia-ml.so.1", "cuda.c": "libcuda.so.1"}

# So long nothing happens before GPUs are freed, in seconds: the polls of those who wait are old by then.
_QUIET = 7.0

# So long the head of a queue has waited before it is shown something, in seconds, and so long it is waited for.
_WAITED, _PATIENCE = 30.0, 90.0

_MINUTE = 60.0

# Claims GPUs, says when it had them, and gives them back when it is told to.
HOLD = """
import sys, time, safe_gpu
owner = safe_gpu.claim_gpus(int(sys.argv[1]), timeout=0, affinity=None)
print(time.monotonic(), flush=True)
sys.stdin.readline()
owner.release_gpus()
print(time.monotonic(), flush=True)
sys.stdin.readline()
"""

# Starts many who wait for one GPU each; each says when it had it.
_WAIT = """
import os, pynvml, signal, sys, time, safe_gpu
safe_gpu.claim_gpus, safe_gpu.get_free_gpus()
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        safe_gpu.claim_gpus(1, timeout=None, affinity=None)
        os.write(1, f"{time.monotonic()}\\n".encode())
        signal.pause()
sys.stdin.readline()
"""


def find_compiler() -> str | None:
    """The path of the C compiler, if there is one."""
    return shutil.which("gcc") or shutil.which("cc")


def wait_for_tickets(state: Path, number: int) -> None:
    """Return when so many stand in the queue of a state directory."""
    while len(list(state.glob("queue/[0-9]*"))) < number:
        time.sleep(0.01)


class SlowHost:
    """A host of fake GPUs in a directory of its own.

    Args:
        directory: is empty, and exists until the last process has ended.
        gpus: how many.
    """

    def __init__(self, directory: Path, gpus: int = 8) -> None:
        self.directory = directory
        # Doors are named by the UUIDs, and belong to all that runs on this machine.
        self.uuids = [f"GPU-{number:08x}-{os.urandom(2).hex()}-4000-8000-{number:012x}" for number in range(gpus)]
        (directory / "procs").mkdir()
        self._compile()
        self.show({})
        self.slow_down(0)

    def _compile(self) -> None:
        compiler = find_compiler() or "cc"
        for source, library in _LIBRARIES.items():
            options = ["-shared", "-fPIC", "-O1", "-pthread", f"-Wl,-soname,{library}"]
            subprocess.run([compiler, *options, "-o", self.directory / library, FAKES / source], check=True)

    def environment(self, checkout: Path, driver: Path) -> dict[str, str]:
        """Return the variables of a process that has these GPUs, and the package of that checkout.

        Args:
            driver: the directory of the driver, see :meth:`another_driver`.
        """
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SAFE_GPU_", "CUDA_"))}
        return {
            **kept,
            "PYTHONPATH": str(checkout),
            "LD_LIBRARY_PATH": str(self.directory),
            "FAKE_GPU_DIR": str(driver),
            "SAFE_GPU_DRIVER": "nvml",
            "SAFE_GPU_DIR": str(self.directory / "state"),
            "SAFE_GPU_LEGACY_LOCK": "never",
        }

    def another_driver(self, name: str) -> Path:
        """Return another directory of a driver of the same GPUs: the calls of who uses it are noted there."""
        path = self.directory / name
        path.mkdir()
        for shared in ("gpus", "procs"):
            (path / shared).symlink_to(self.directory / shared)
        (path / "options").write_text("log=1\n")
        return path

    def show(self, facts: dict[int, str]) -> None:
        """Let the driver show these facts of GPUs too, as ``tests/fakes/nvml.c`` describes them."""
        lines = []
        for number, uuid in enumerate(self.uuids):
            bus = f"{number // 16:08X}:{7 + 8 * (number % 16):02X}:00.0"
            lines.append(f"uuid={uuid} mem={80 << 30} bus={bus} {facts.get(number, '')}\n")
        self._replace("gpus", "".join(lines))

    def slow_down(self, milliseconds: int) -> None:
        """Let each call of the driver take so long."""
        self._replace("options", f"call_ms={milliseconds}\n")

    def occupy(self, number: int, pid: int, *, is_seen_here: bool = True) -> Path:
        """Have the driver list this process on a GPU until it ends, or until the file is removed that is returned.

        Args:
            is_seen_here: False is a pid that means nothing here, as one of the host in a container.
        """
        name = str(pid) if is_seen_here else f"{pid}.static"
        path = self.directory / "procs" / self.uuids[number] / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(1 << 30))
        return path

    def wait_for_tickets(self, number: int) -> None:
        """Return when so many stand in the queue."""
        wait_for_tickets(self.directory / "state", number)

    def _replace(self, name: str, text: str) -> None:
        new = self.directory / f".{name}"
        new.write_text(text)
        new.rename(self.directory / name)


@contextmanager
def slow_host(gpus: int = 8) -> Iterator[SlowHost]:
    """A host of fake GPUs in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="safe-gpu-bench-") as directory:
        yield SlowHost(Path(directory), gpus)


class Program:
    """A Python program on such a host, which is killed with its children at the end of ``with``."""

    def __init__(
        self, host: SlowHost, checkout: Path, code: str, *arguments: object, driver: Path | None = None
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *(str(argument) for argument in arguments)],
            cwd=host.directory,  # where no package is
            env=host.environment(checkout, driver or host.directory),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def hear(self) -> float:
        """Return the time that it says next, as of ``time.monotonic()``."""
        return float(_end(self._process.stdout).readline())

    def hear_within(self, seconds: float) -> float:
        """Return the same; infinity if it says nothing within this time."""
        ready, _, _ = select.select([_end(self._process.stdout)], [], [], seconds)
        if not ready:
            return math.inf
        return self.hear()

    def tell(self) -> None:
        """Let it go on."""
        _end(self._process.stdin).write("\n")
        _end(self._process.stdin).flush()

    def kill(self) -> None:
        """SIGKILL to it and to all that it has started."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.returncode is None:
            self.kill()
        with self._process:
            pass


def _end(pipe: IO[Any] | None) -> IO[Any]:
    """An end of a pipe that there is."""
    assert pipe is not None
    return pipe


# GPUs that are freed together


def freed_together(checkout: Path, waiters: int, call_ms: int, *, by_release: bool = False) -> tuple[float, float]:
    """Free all GPUs of a host at once, for which others wait. Returns the seconds until the first and the last are in
    other hands.

    Args:
        waiters: for one GPU each, at least as many as there are GPUs.
        call_ms: what each call of the driver takes, in milliseconds.
        by_release: the holder gives the GPUs back and lives on. Else it ends.
    """
    with slow_host() as host, Program(host, checkout, HOLD, len(host.uuids)) as holder:
        holder.hear()
        with Program(host, checkout, _WAIT, waiters) as crowd:
            host.wait_for_tickets(waiters)
            host.slow_down(call_ms)
            time.sleep(_QUIET)
            began = time.monotonic()
            if by_release:
                holder.tell()
                began = holder.hear()
            else:
                holder.kill()
            times = sorted(crowd.hear() - began for _ in host.uuids)
    return times[0], times[-1]


# What the head of a queue asks, and what it sees


@contextmanager
def _stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that knows nothing of safe_gpu."""
    with subprocess.Popen(["sleep", "infinity"]) as process:
        try:
            yield process
        finally:
            process.kill()


def calls_in_minutes(checkout: Path, behind: str) -> tuple[int, int]:
    """Return how many calls of NVML a waiter makes in its first minute and in the next.

    Args:
        behind: "claims", "strangers" or "a ticket", behind claims.
    """
    with ExitStack() as stack:
        host = stack.enter_context(slow_host())
        if behind == "strangers":
            stranger = stack.enter_context(_stranger())
            for number in range(len(host.uuids)):
                host.occupy(number, stranger.pid)
        else:
            stack.enter_context(Program(host, checkout, HOLD, len(host.uuids))).hear()
        tickets = 1
        if behind == "a ticket":
            stack.enter_context(Program(host, checkout, _WAIT, 1))
            host.wait_for_tickets(1)
            tickets = 2
        driver = host.another_driver("noted")
        stack.enter_context(Program(host, checkout, _WAIT, 1, driver=driver))
        host.wait_for_tickets(tickets)
        counts = [_count(driver)]
        for _ in range(2):
            time.sleep(_MINUTE)
            counts.append(_count(driver))
    return counts[1] - counts[0], counts[2] - counts[1]


def _count(driver: Path) -> int:
    """How many calls of a driver were noted."""
    return len((driver / "calls").read_text().split())


def seconds_until_seen(checkout: Path, what: str) -> float:
    """Return how long the head of a queue, which has waited for a while, takes to have a GPU that comes back.

    Args:
        what: "lost GPU" (it is back), "MIG instance" (a new one), "end of a stranger" or "end of a hidden stranger",
            whose pid means nothing here.
    """
    with ExitStack() as stack:
        host = stack.enter_context(slow_host())
        last = len(host.uuids) - 1
        happens = _COMEBACKS[what](host, last, stack)
        stack.enter_context(Program(host, checkout, HOLD, last)).hear()
        head = stack.enter_context(Program(host, checkout, _WAIT, 1))
        host.wait_for_tickets(1)
        time.sleep(_WAITED)
        began = time.monotonic()
        happens()
        return head.hear_within(_PATIENCE) - began


def _lost_gpu(host: SlowHost, number: int, stack: ExitStack) -> Callable[[], None]:
    """Lose a GPU; what is returned brings it back."""
    host.show({number: "lost=1"})
    return lambda: host.show({})


def _mig_instance(host: SlowHost, number: int, stack: ExitStack) -> Callable[[], None]:
    """Have a GPU in MIG mode without instances; what is returned makes one."""
    host.show({number: "mig=1"})
    return lambda: host.show({number: f"mig=1 instances=MIG-{host.uuids[number][4:]}"})


def _end_of_stranger(host: SlowHost, number: int, stack: ExitStack) -> Callable[[], None]:
    """Have a stranger on a GPU; what is returned ends it."""
    stranger = stack.enter_context(_stranger())
    host.occupy(number, stranger.pid)

    def end() -> None:
        stranger.kill()
        stranger.wait()

    return end


def _end_of_hidden_stranger(host: SlowHost, number: int, stack: ExitStack) -> Callable[[], None]:
    """The same with one that cannot be seen here."""
    return host.occupy(number, 999_999_999, is_seen_here=False).unlink


_COMEBACKS: dict[str, Callable[[SlowHost, int, ExitStack], Callable[[], None]]] = {
    "lost GPU": _lost_gpu,
    "MIG instance": _mig_instance,
    "end of a stranger": _end_of_stranger,
    "end of a hidden stranger": _end_of_hidden_stranger,
}
