"""What all tests share: no test touches a real GPU unless it says so; there is a host of fake GPUs to test on, and
there are processes, also of other users, that do one thing and say when they have."""

from __future__ import annotations

import ctypes
import importlib
import itertools
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu import coordination

_state_dirs = itertools.count()
FAKES = Path(__file__).parent / "fakes"
PACKAGE_ROOT = Path(safe_gpu.__file__).parents[1]
DRIVER_LIBRARIES = ("libnvidia-ml.so.1", "libcuda.so.1")

# What a scheduler, a launcher or the person who runs the tests has set must not decide their outcome.
OUTER_PREFIXES = ("SAFE_GPU_", "CUDA_", "SLURM_", "SGE_", "OMPI_", "PMI_", "PMIX_", "MPI_", "HOROVOD_", "TORCHELASTIC_")
OUTER_NAMES = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "JOB_ID", "NSLOTS", "FAKE_GPU_DIR")


# A job that a shell put in the background ignores SIGINT, one under nohup SIGHUP, and so would all that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not real_gpu():
        pytest.skip("no NVIDIA GPU on this machine")


def real_gpu() -> bool:
    """Whether this machine has a GPU that the kernel driver shows."""
    return any(name[6:].isdigit() for name in os.listdir("/dev") if name.startswith("nvidia"))


class DriverLibraries:
    """Which files stand for the NVIDIA driver's libraries in this process: none, unless a test names one."""

    def __init__(self) -> None:
        self.stand_ins: dict[str, str] = {}

    def path(self, name: str) -> str:
        """The file to load for a library's name."""
        if name in DRIVER_LIBRARIES and name not in self.stand_ins:
            # Not an exception that code under test might swallow.
            pytest.fail(f"this test reaches for the real {name}: use the fake_gpus fixture, or mark the test `gpu`")
        return self.stand_ins.get(name, name)


@pytest.fixture(autouse=True)
def driver_libraries(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DriverLibraries]:
    """Keep tests off real GPUs, off the shared state directory and out of the outer job's environment.

    In this process loading a driver library fails the test; child processes find unusable files in their place.
    """
    libraries = DriverLibraries()
    for name in list(os.environ):
        if name.startswith(OUTER_PREFIXES) or name in OUTER_NAMES:
            monkeypatch.delenv(name)
    monkeypatch.setenv("SAFE_GPU_DIR", str(_fresh_state_dir(tmp_path_factory)))
    if request.node.get_closest_marker("gpu"):
        yield libraries
        return

    class GuardedCDLL(ctypes.CDLL):
        def __init__(self, name: str | None, mode: int = ctypes.DEFAULT_MODE, *args: Any, **kwargs: Any) -> None:
            asks_only = mode & os.RTLD_NOLOAD
            super().__init__(name if name is None or asks_only else libraries.path(name), mode, *args, **kwargs)

    monkeypatch.setattr(ctypes, "CDLL", GuardedCDLL)
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:dgx-a100")
    monkeypatch.setenv(
        "LD_LIBRARY_PATH", f"{_unusable_libraries(tmp_path_factory)}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    )
    yield libraries


def _fresh_state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A path where there is nothing yet; far cheaper per test than a temporary directory of pytest's."""
    parent = tmp_path_factory.getbasetemp() / "state"
    parent.mkdir(exist_ok=True)
    return parent / str(next(_state_dirs))


def _unusable_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.getbasetemp() / "no-gpu"
    if not directory.exists():
        directory.mkdir()
        for name in DRIVER_LIBRARIES:
            (directory / name).touch()  # the loader stops at "file too short" and looks no further
    return directory


@pytest.fixture(scope="session")
def build_library(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``build_library("nvml.c", "libnvidia-ml.so.1", "-DNO_V3")`` compiles a fake, once; skips without a compiler."""
    built: dict[tuple[str, ...], Path] = {}

    def build(source: str, name: str, *flags: str) -> Path:
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler for the fake driver libraries")
        key = (source, name, *flags)
        if key not in built:
            path = tmp_path_factory.mktemp("library") / name
            command = [compiler, "-shared", "-fPIC", "-O1", "-pthread", "-fvisibility=default", f"-Wl,-soname,{name}"]
            subprocess.run([*command, *flags, "-o", str(path), str(FAKES / source)], check=True, timeout=120)
            path.chmod(0o755)
            built[key] = path
        return built[key]

    return build


class FakeGpus:
    """A host of fake GPUs behind real shared libraries; ``tests/fakes/nvml.c`` documents the files and keys.

    ``env`` is the environment for child processes that are to see these GPUs. ``variant("-DNO_V3")`` before use
    chooses another build of the fake NVML. Files are replaced whole, so that running children never read half of one.
    """

    def __init__(
        self,
        directory: Path,
        build: Callable[..., Path],
        libraries: DriverLibraries,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.directory = directory
        self.gpus: list[dict[str, str]] = []
        self._build = build
        self._libraries = libraries
        self._monkeypatch = monkeypatch
        self._flags: tuple[str, ...] = ()
        (directory / "procs").mkdir()
        self.set(8)

    @property
    def env(self) -> dict[str, str]:
        """os.environ with these GPUs in place of any others."""
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(self._libraries_dir()),
            "FAKE_GPU_DIR": str(self.directory),
            "SAFE_GPU_DRIVER": "nvml",
            "PYTHONPATH": str(PACKAGE_ROOT),
        }

    @property
    def uuids(self) -> list[str]:
        """UUIDs of the GPUs, in NVML's order."""
        return [gpu["uuid"] for gpu in self.gpus]

    def set(self, count: int, **values: object) -> None:
        """Have ``count`` equal GPUs, idle, with these values of keys."""
        self.write(*({**_default_gpu(i), **_strings(values)} for i in range(count)))

    def write(self, *gpus: Mapping[str, object]) -> None:
        """Have these GPUs, each given by key and value; what is not given is as in :meth:`set`."""
        self.gpus = [{**_default_gpu(i), **_strings(gpu)} for i, gpu in enumerate(gpus)]
        self._replace("gpus", "".join(" ".join(f"{k}={v}" for k, v in gpu.items()) + "\n" for gpu in self.gpus))

    def change(self, number: int, **values: object) -> None:
        """Change keys of one GPU."""
        gpus = list(self.gpus)
        gpus[number] = {**gpus[number], **_strings(values)}
        self.write(*gpus)

    def options(self, **values: object) -> None:
        """Set the options of the fake libraries, all of them anew."""
        self._replace("options", "".join(f"{key}={value}\n" for key, value in values.items()))

    def process(
        self, uuid: str, pid: int, memory: int | None = 1 << 30, *, kind: str = "", static: bool = False
    ) -> Path:
        """Put a process on a GPU or MIG instance; ``static`` for a pid that does not run here. Unlink to end it."""
        name = f"{pid}{'.static' if static else ''}{f'.{kind}' if kind else ''}"
        (self.directory / "procs" / uuid).mkdir(exist_ok=True)
        return self._replace(f"procs/{uuid}/{name}", "" if memory is None else str(memory))

    def calls(self) -> list[str]:
        """Names of the NVML functions called since the last time this was asked; needs the option ``log=1``."""
        path = self.directory / "calls"
        names = path.read_text().split() if path.exists() else []
        path.unlink(missing_ok=True)
        return names

    def variant(self, *flags: str) -> None:
        """Use a fake NVML compiled with these flags from now on."""
        self._flags = flags

    def _libraries_dir(self) -> Path:
        directory = self.directory / "lib"
        directory.mkdir(exist_ok=True)
        for source, name, flags in (("nvml.c", DRIVER_LIBRARIES[0], self._flags), ("cuda.c", DRIVER_LIBRARIES[1], ())):
            library, link = self._build(source, name, *flags), directory / name
            if not link.is_symlink() or link.readlink() != library:
                link.unlink(missing_ok=True)
                link.symlink_to(library)
        return directory

    def here(self) -> None:
        """Show these GPUs to NVML in this very process (CUDA keeps state for good: use a child for it)."""
        import pynvml

        self._libraries.stand_ins[DRIVER_LIBRARIES[0]] = str(self._build("nvml.c", DRIVER_LIBRARIES[0], *self._flags))
        self._monkeypatch.setenv("FAKE_GPU_DIR", str(self.directory))
        self._monkeypatch.setenv("SAFE_GPU_DRIVER", "nvml")
        self._monkeypatch.setattr(pynvml, "CDLL", ctypes.CDLL)
        self._monkeypatch.setattr(pynvml, "nvmlLib", None)
        self._monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})

    def python(self, code: str, *arguments: str, timeout: float = 60.0, **environment: str) -> str:
        """Output of Python code that runs in a child which sees these GPUs."""
        child = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env={**self.env, **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert child.returncode == 0, child.stderr
        return child.stdout

    def _replace(self, name: str, text: str) -> Path:
        path = self.directory / name
        fresh = path.with_name("new-" + path.name)
        fresh.write_text(text)
        fresh.replace(path)
        return path


def _strings(values: Mapping[str, object]) -> dict[str, str]:
    return {key: str(value).replace(" ", "_") for key, value in values.items()}


def _default_gpu(number: int) -> dict[str, str]:
    return {
        "uuid": f"GPU-{number:08x}-aaaa-bbbb-cccc-{number:012x}",
        "name": "NVIDIA_A100-SXM4-80GB",
        "bus": f"00000000:{7 + 8 * number:02X}:00.0",
        "mem": str(80 << 30),
        "speed": "1",
    }


@pytest.fixture
def fake_gpus(
    tmp_path: Path,
    build_library: Callable[..., Path],
    driver_libraries: DriverLibraries,
    monkeypatch: pytest.MonkeyPatch,
) -> FakeGpus:
    """Eight idle fake GPUs behind real libnvidia-ml.so.1 and libcuda.so.1 files; see :class:`FakeGpus`."""
    directory = tmp_path / "gpus"
    directory.mkdir()
    return FakeGpus(directory, build_library, driver_libraries, monkeypatch)


@pytest.fixture
def fake_nvidia_smi(fake_gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, object]], None]:
    """An nvidia-smi on PATH that shows ``fake_gpus``; call it with its quirks (``tests/fakes/nvidia_smi.py``)."""
    program = fake_gpus.directory / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{FAKES / "nvidia_smi.py"}" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_GPU_DIR", str(fake_gpus.directory))

    def set_quirks(quirks: Mapping[str, object]) -> None:
        (fake_gpus.directory / "smi").write_text("".join(f"{key}={value}\n" for key, value in quirks.items()))

    return set_quirks


@pytest.fixture
def open_tmp() -> Iterator[Path]:
    """A directory that other users can enter; pytest's own temporary directories are closed to them."""
    with tempfile.TemporaryDirectory(prefix="safe-gpu-test-") as path:
        os.chmod(path, 0o1777)
        yield Path(path)


@pytest.fixture
def state_dir(open_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory that does not exist yet, where every user may go."""
    monkeypatch.setenv("SAFE_GPU_DIR", str(open_tmp / "state"))
    return open_tmp / "state"


class Child:
    """A Python process that runs some code; ``say("x")`` in it is waited for by :meth:`hear`."""

    def __init__(self, code: str, **options: object) -> None:
        prelude = "import sys\ndef say(*words): print(*words, flush=True)\ndef listen(): return sys.stdin.readline()\n"
        environment = {**os.environ, "PYTHONPATH": str(PACKAGE_ROOT), **options.pop("env", {})}  # type: ignore[dict-item]
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


@pytest.fixture
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


@pytest.fixture
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


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Wait for a condition, with a deadline that only a hang reaches."""

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, "the condition never came true"
            time.sleep(0.005)

    return wait


class Command:
    """The command ``safe-gpu`` as users start it, on the simulated host of this test; ``path`` is on PATH as well."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "safe-gpu"
        self.path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m safe_gpu "$@"\n')
        self.path.chmod(0o755)
        self._started: list[subprocess.Popen[str]] = []

    def run(self, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def start(self, *arguments: object, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        """Start it; its output is captured as text."""
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-m", "safe_gpu", *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(PACKAGE_ROOT), **(env or {})},
            text=True,
            **{**streams, **options},
        )
        self._started.append(process)
        return process

    def end(self) -> None:
        """Let nothing that was started outlive the test."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait(30)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@pytest.fixture
def command(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, driver_libraries: DriverLibraries
) -> Iterator[Command]:
    """Start ``safe-gpu`` as users do; see :class:`Command`."""
    command = Command(tmp_path_factory.mktemp("bin"))
    monkeypatch.setenv("PATH", f"{command.path.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE_ROOT))
    yield command
    command.end()


class Ground:
    """What lies in this test's state directory: who holds which GPU, who waits. Others can be played here."""

    def __init__(self) -> None:
        from safe_gpu.drivers.presets import preset

        self.uuids = [gpu.uuid for gpu in preset("dgx-a100").gpus()]
        self._held: dict[str, Any] = {}
        self._contexts: list[Any] = []

    @property
    def directory(self) -> Path:
        return Path(os.environ["SAFE_GPU_DIR"])

    def leased(self, *, inner: bool = False) -> list[int]:
        """Indices of the GPUs whose lease is held, by a played holder too."""
        from safe_gpu.coordination.host_lock import HostLock
        from safe_gpu.coordination.leases import inner_name, lease_name, probe

        name = inner_name if inner else lease_name
        with HostLock(time.monotonic() + 30) as host:
            return [index for index, uuid in enumerate(self.uuids) if probe(host, name(uuid))]

    def tickets(self) -> list[str]:
        """Names in the queue's directory, in order."""
        try:
            names = os.listdir(self.directory / "queue")
        except FileNotFoundError:
            return []
        return sorted(names, key=lambda name: (len(name), name))

    def hold(self, *indices: int) -> None:
        """Play somebody else's claim of these GPUs, one that left no record."""
        from safe_gpu.coordination.host_lock import HostLock
        from safe_gpu.coordination.leases import lease_name, try_lease

        with HostLock(time.monotonic() + 30) as host:
            for index in indices:
                lease = try_lease(host, lease_name(self.uuids[index]))
                assert lease is not None
                lease.write(b"")
                self._held[self.uuids[index]] = lease

    def let_go(self, *indices: int) -> None:
        """End that claim, on these GPUs or on all."""
        for uuid in [self.uuids[index] for index in indices] or list(self._held):
            self._held.pop(uuid).release()

    def occupy(self, *indices: int, kind: str = "compute") -> list[Any]:
        """Put a stranger's process on GPUs; close() on what is returned ends it."""
        from safe_gpu.drivers.simulated import SimulatedDriver

        driver = SimulatedDriver("dgx-a100")
        contexts = [driver.occupy(self.uuids[index], kind=kind) for index in indices]
        self._contexts += contexts
        return contexts

    def clear(self) -> None:
        self.let_go()
        for context in self._contexts:
            context.close()


@pytest.fixture
def ground(driver_libraries: DriverLibraries) -> Iterator[Ground]:
    """The state directory of this test, and others who hold or use GPUs there; see :class:`Ground`."""
    ground = Ground()
    yield ground
    ground.clear()
