"""A state directory for each test, and processes that do one thing in it and say when they have."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import safe_gpu
from safe_gpu import coordination

ROOT = str(Path(safe_gpu.__file__).parent.parent)


@pytest.fixture()
def open_tmp() -> Iterator[Path]:
    """A directory that other users can enter; pytest's own temporary directories are closed to them."""
    with tempfile.TemporaryDirectory(prefix="safe-gpu-test-") as path:
        os.chmod(path, 0o1777)
        yield Path(path)


@pytest.fixture()
def state_dir(open_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory that does not exist yet, where every user may go."""
    monkeypatch.setenv("SAFE_GPU_DIR", str(open_tmp / "state"))
    return open_tmp / "state"


class Child:
    """A Python process that runs some code; ``say("x")`` in it is waited for by :meth:`hear`."""

    def __init__(self, code: str, **options: object) -> None:
        prelude = "import sys\ndef say(*words): print(*words, flush=True)\ndef listen(): return sys.stdin.readline()\n"
        environment = {**os.environ, "PYTHONPATH": ROOT, **options.pop("env", {})}  # type: ignore[dict-item]
        self.process = subprocess.Popen(
            [sys.executable, "-c", prelude + code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            **options,  # type: ignore[call-overload]
        )

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

    def finish(self) -> str:
        """Its remaining output, once it has ended well."""
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, err
        return out


@pytest.fixture()
def child() -> Iterator[Callable[..., Child]]:
    """Start children that do not outlive the test."""
    children: list[Child] = []

    def start(code: str, **options: object) -> Child:
        children.append(Child(code, **options))
        return children[-1]

    yield start
    for one in children:
        if one.process.poll() is None:
            one.kill()
        for stream in (one.process.stdin, one.process.stdout, one.process.stderr):
            stream.close()


class UserProcess:
    """A forked process of another user. It is forked, not started anew, since that user may not even be able to read
    this interpreter; everything is imported before it changes its user."""

    def __init__(self, uid: int, umask: int, work: Callable[[Callable[[str], None], Callable[[], str]], None]) -> None:
        for module in ("filelock", "json", "pwd", "fcntl", "resource", "threading", "signal", "encodings.idna"):
            importlib.import_module(module)
        for module in pkgutil.iter_modules(coordination.__path__, "safe_gpu.coordination."):
            importlib.import_module(module.name)
        from_child, to_parent = os.pipe()
        from_parent, to_child = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.umask(umask)
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)

                def say(text: object) -> None:
                    os.write(to_parent, f"{text}\n".encode())

                work(say, lambda: os.read(from_parent, 99).decode())
                code = 0
            except BaseException as err:
                os.write(to_parent, f"{type(err).__name__}: {err}\n".encode())
            finally:
                os._exit(code)
        os.close(to_parent)
        os.close(from_parent)
        self._in, self._out = os.fdopen(from_child), to_child

    def hear(self) -> str:
        return self._in.readline().strip()

    def tell(self, text: str = "go") -> None:
        os.write(self._out, text.encode())

    def end(self) -> int:
        """Its exit status; it is killed where it has not ended yet (9 then)."""
        if self.pid:
            os.close(self._out)
            os.kill(self.pid, 9)
            status = os.waitpid(self.pid, 0)[1]
            self.pid = 0
            self._in.close()
            return status
        return 0


@pytest.fixture()
def as_user() -> Iterator[Callable[..., UserProcess]]:
    """Run ``work(say, listen)`` as another user."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to act as other users")
    children: list[UserProcess] = []

    def start(work: Callable[..., None], *, uid: int, umask: int = 0o022) -> UserProcess:
        children.append(UserProcess(uid, umask, work))
        return children[-1]

    yield start
    for one in children:
        one.end()


@pytest.fixture()
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Wait for a condition, with a deadline that only a hang reaches."""

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, "the condition never came true"
            time.sleep(0.005)

    return wait
