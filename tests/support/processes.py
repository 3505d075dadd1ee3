"""Processes that do one thing and say when they have, also of other users, and the command as users start it."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.actor import Actor, Listen, Say, in_words
from support.gpus import PACKAGE_ROOT, program
from support.kernel import come_back, leave_network
from support.real import wait_for
from support.stage import import_everything

from safe_gpu.host import procfs

ALL_ARE_SEEN = procfs.pid_namespace() == procfs.FIRST_PID_NAMESPACE
"""Whether a number without a process here is that of one that has ended."""


class Child:
    """A Python process that runs some code; ``say("x")`` in it is waited for by :meth:`hear`."""

    def __init__(self, code: str, **options: Any) -> None:
        prelude = "import sys\ndef say(*words): print(*words, flush=True)\ndef listen(): return sys.stdin.readline()\n"
        options["env"] = {**os.environ, "PYTHONPATH": str(PACKAGE_ROOT), **options.get("env", {})}
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process = subprocess.Popen([sys.executable, "-c", prelude + code], text=True, **streams, **options)

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self) -> str:
        """The next line that it says; fails with its error output where it ended without saying anything."""
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(30)
            raise AssertionError(f"the child ended with {self.process.returncode}: {self.process.stderr.read()}")
        return line.strip()

    def tell(self, text: str = "") -> None:
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def finish(self, patience: float = 100) -> str:
        """Its remaining output, once it has ended well."""
        out, err = self.process.communicate(timeout=patience)
        assert self.process.returncode == 0, err
        return out


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """Start children that do not outlive the test; with ``says``, come back when that has been said."""
    children: list[Child] = []

    def start(code: str, says: str = "", **options: object) -> Child:
        children.append(Child(code, **options))
        assert not says or children[-1].hear() == says
        return children[-1]

    yield start
    for one in children:
        with one.process:
            one.process.kill()


class ForkedChild(Actor):
    """The same in a fork of this process, which is far cheaper: where nothing depends on a fresh interpreter, and this
    process holds no claim.

    Args:
        env: what it sets in its environment.
    """

    def __init__(self, code: str, env: Mapping[str, str]) -> None:
        def work(say: Say, listen: Listen) -> None:
            os.environ.update(env)
            exec(code, {"say": lambda *words: say(" ".join(map(str, words))), "listen": listen})

        super().__init__(in_words(work))

    def kill(self) -> None:
        self.end()


@pytest.fixture
def forked(everything_imported: None) -> Iterator[Callable[..., ForkedChild]]:
    """``child`` for :class:`ForkedChild`."""
    children: list[ForkedChild] = []

    def start(code: str, says: str = "", *, env: Mapping[str, str] | None = None) -> ForkedChild:
        children.append(ForkedChild(code, env or {}))
        assert not says or children[-1].hear() == says
        return children[-1]

    yield start
    for one in children:
        one.end()


@pytest.fixture(scope="session")
def stranger_pid() -> Iterator[int]:
    """The pid of another process: this one's parent, or a child where the parent is of another PID namespace."""
    if os.getppid():
        yield os.getppid()
        return
    with subprocess.Popen(["sleep", "infinity"]) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def zombie() -> Iterator[int]:
    """The pid of a zombie, which nobody waits for until the test ends."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    yield pid
    os.waitpid(pid, 0)


@pytest.fixture(scope="session")
def everything_imported() -> None:
    """Import all that a forked process of another user may use, as that user may not be able to read this package."""
    import_everything()


@pytest.fixture
def as_user(everything_imported: None) -> Iterator[Callable[..., Actor]]:
    """``as_user(work, uid=4711)``: a forked process of that user, which runs ``work(say, listen)``."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to act as other users")
    children: list[Actor] = []

    def start(work: Callable[..., None], *, uid: int, umask: int = 0o022) -> Actor:
        children.append(Actor(in_words(work), uid=uid, umask=umask))
        return children[-1]

    yield start
    for one in children:
        one.end()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def own_network() -> Iterator[None]:
    """Put this process, and what it starts, into a network namespace of its own."""
    with open("/proc/self/ns/net", "rb") as before:
        try:
            leave_network()
        except OSError:
            pytest.skip("cannot make a network namespace here")
        try:
            yield
        finally:
            come_back(before.fileno())


@contextmanager
def mounted(place: Path, kind: str = "tmpfs", options: str = "rw", source: str | Path = "none") -> Iterator[Path]:
    """A file system of this kind is there meanwhile."""
    place.mkdir()
    if subprocess.run(["mount", "-t", kind, "-o", options, source, place], capture_output=True).returncode:
        pytest.skip(f"cannot mount a {kind} here")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.fixture
def file_lease(as_user: Callable[..., Actor]) -> Callable[[Path, int], None]:
    """Give a file to a user who takes a file lease on it (fcntl(2)): every other open of it then blocks, for 45 s."""

    def take(path: Path, uid: int) -> None:
        os.chown(path, uid, uid)
        fd = os.open(path, os.O_RDONLY)  # that user may not be able to go there

        def work(say: Say, listen: Listen) -> None:
            signal.signal(signal.SIGIO, signal.SIG_IGN)  # the kernel asks to give it back
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            say("leased")
            listen()

        assert as_user(work, uid=uid).hear() == "leased"
        os.close(fd)

    return take


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Wait for a condition, with a deadline that only a hang reaches."""

    return lambda condition: wait_for(condition, "such condition", pause=0.005, seconds=60.0)


@pytest.fixture
def stop(eventually: Callable[[Callable[[], bool]], None]) -> Callable[..., None]:
    """Stop a process, as Ctrl-Z and schedulers do, at a moment when it does not hold host.lock, or all wait for it."""

    def stop(pid: int, state_dir: Path | None = None) -> None:
        def stopped_without_the_lock() -> bool:
            os.kill(pid, signal.SIGSTOP)
            eventually(lambda: procfs.is_stopped(pid))
            with ((state_dir or Path(os.environ["SAFE_GPU_DIR"])) / "host.lock").open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.kill(pid, signal.SIGCONT)
                    return False
                return True

        eventually(stopped_without_the_lock)

    return stop


class Command:
    """The command ``safe-gpu`` as users start it, on the simulated host of this test; ``path`` is on PATH as well."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "safe-gpu"
        program(self.path, f'exec "{sys.executable}" -m safe_gpu "$@"')
        self._started: list[subprocess.Popen[str]] = []

    def run(self, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def start(self, *arguments: object, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        """Start it; its output is captured as text."""
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        words = [sys.executable, "-m", "safe_gpu", *map(str, arguments)]
        whole = {**os.environ, "PYTHONPATH": str(PACKAGE_ROOT), **(env or {})}
        self._started.append(subprocess.Popen(words, env=whole, text=True, **{**streams, **options}))
        return self._started[-1]

    def end(self) -> None:
        """Let nothing that was started outlive the test."""
        for process in self._started:
            with process:
                process.kill()


@pytest.fixture
def command(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, driver_libraries: object
) -> Iterator[Command]:
    """Start ``safe-gpu`` as users do; see :class:`Command`."""
    command = Command(tmp_path_factory.mktemp("bin"))
    monkeypatch.setenv("PATH", f"{command.path.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE_ROOT))
    yield command
    command.end()


@pytest.fixture
def run_here(capsys: pytest.CaptureFixture[str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``safe-gpu`` in this process, which saves an interpreter: for commands that do not become another one."""

    from safe_gpu.cli.commands import main

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        code = main(list(map(str, words)))
        return subprocess.CompletedProcess(words, code, *capsys.readouterr())

    return run
