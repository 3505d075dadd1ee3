"""A host of fake GPUs behind real shared libraries and a fake nvidia-smi, as fixtures."""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import safe_gpu

FAKES = Path(__file__).parents[1] / "fakes"
PACKAGE_ROOT = Path(safe_gpu.__file__).parents[1]
DRIVER_LIBRARIES = ("libnvidia-ml.so.1", "libcuda.so.1")


def run_python(*arguments: str, env: Mapping[str, str], timeout: float = 60.0) -> str:
    """Output of a Python program with these arguments of the interpreter, which must end well."""
    command = [sys.executable, *arguments]
    child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    assert child.returncode == 0, child.stderr
    return child.stdout


def program(path: Path, text: str) -> None:
    """Write a program of the shell."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


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


@pytest.fixture(scope="session")
def build_library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``build_library("nvml.c", "libnvidia-ml.so.1", "-DNO_V3")`` compiles a fake, once for all workers of a run.

    Skips where there is no compiler that makes shared libraries."""
    base = tmp_path_factory.getbasetemp()
    libraries = (base.parent if hasattr(request.config, "workerinput") else base) / "libraries"
    libraries.mkdir(exist_ok=True)
    compiler = shutil.which("gcc") or shutil.which("cc")
    options = ("-shared", "-fPIC", "-pthread")

    def build(source: str, name: str, *flags: str) -> Path:
        if compiler is None:
            pytest.skip("needs a C compiler, for the fake driver libraries: neither gcc nor cc is installed")
        path = libraries / "".join((Path(source).name, *flags)) / name
        path.parent.mkdir(exist_ok=True)
        with open(path.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                unfinished = path.with_name("unfinished")
                command = [compiler, *options, f"-Wl,-soname,{name}", *flags, "-o", unfinished, FAKES / source]
                if subprocess.run(command, timeout=120).returncode:
                    probe = [compiler, *options, "-x", "c", "-o", os.devnull, "-"]
                    done = subprocess.run(probe, input=b"#include <pthread.h>\n", capture_output=True, timeout=120)
                    assert done.returncode, f"{source} cannot be compiled"
                    pytest.skip(f"needs a C compiler, for the fake driver libraries: {done.stderr.decode()}")
                unfinished.chmod(0o755)
                unfinished.rename(path)
        return path

    return build


class FakeGpus:
    """A host of fake GPUs behind real shared libraries; ``tests/fakes/nvml.c`` documents the files and keys.

    ``env`` is the environment for child processes that are to see these GPUs. ``variant("-DNO_V3")`` before use
    chooses another build of the fake NVML. Files are replaced whole, so that running children never read half of one.
    """

    def __init__(
        self, directory: Path, build: Callable[..., Path], libraries: DriverLibraries, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.directory = directory
        self.gpus: list[dict[str, str]] = []
        self._build = build
        self._libraries = libraries
        self._monkeypatch = monkeypatch
        self._flags: tuple[str, ...] = ()
        self._root: Path | None = None
        if os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg"):
            self.devices()  # this machine's own are not those of the fakes
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
            **({"SAFE_GPU_FSROOT": str(self._root)} if self._root is not None else {}),
        }

    @property
    def uuids(self) -> list[str]:
        """UUIDs of the GPUs, in NVML's order."""
        return [gpu["uuid"] for gpu in self.gpus]

    def uuid(self, kind: str, number: int) -> str:
        """A UUID of this test's own: names of claimed GPUs are one for all that runs on this machine.

        Args:
            kind: ``GPU`` or ``MIG``.
        """
        own = hashlib.sha256(str(self.directory).encode()).hexdigest()
        return f"{kind}-{number:08x}-{own[:4]}-{own[4:8]}-{own[8:12]}-{number:012x}"

    def _default_gpu(self, number: int) -> dict[str, str]:
        return {
            "uuid": self.uuid("GPU", number),
            "name": "NVIDIA_A100-SXM4-80GB",
            "bus": f"00000000:{7 + 8 * number:02X}:00.0",
            "mem": str(80 << 30),
            "speed": "1",
        }

    def set(self, count: int, **values: object) -> None:
        """Have ``count`` equal GPUs, idle, with these values of keys."""
        self.write(*[values] * count)

    def write(self, *gpus: Mapping[str, object]) -> None:
        """Have these GPUs, each given by key and value; what is not given is as in :meth:`set`."""
        given = ({key: str(value).replace(" ", "_") for key, value in gpu.items()} for gpu in gpus)
        self.gpus = [{**self._default_gpu(number), **gpu} for number, gpu in enumerate(given)]
        self._replace("gpus", "".join(" ".join(f"{k}={v}" for k, v in gpu.items()) + "\n" for gpu in self.gpus))

    def change(self, number: int, **values: object) -> None:
        """Change keys of one GPU."""
        self.write(*self.gpus[:number], {**self.gpus[number], **values}, *self.gpus[number + 1 :])

    def options(self, **values: object) -> None:
        """Set the options of the fake libraries, all of them anew."""
        self._replace("options", "".join(f"{key}={value}\n" for key, value in values.items()))

    def devices(self, *names: str) -> Path:
        """Have these files in the /dev that SAFE_GPU_FSROOT shows, such as ``nvidiactl``; returns that directory."""
        self._root = root = self.directory / "root"
        if not root.exists():
            (root / "dev").mkdir(parents=True)
            for name in ("sys", "proc"):
                (root / name).symlink_to(f"/{name}")
        self._monkeypatch.setenv("SAFE_GPU_FSROOT", str(root))
        for name in names:
            (root / "dev" / name).touch()
        return root / "dev"

    def process(
        self, uuid: str, pid: int, memory: int | None = 1 << 30, *, kind: str = "", static: bool = False
    ) -> Path:
        """Put a process on a GPU or MIG instance; ``static`` for a pid that does not run here. Unlink to end it."""
        name = ".".join(filter(None, (str(pid), "static" if static else "", kind)))
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

    def use_nvml_here(self) -> None:
        """Show these GPUs to NVML in this very process, and make it the driver.

        CUDA keeps state for good: use a child for it."""
        import pynvml

        from safe_gpu.drivers import nvml

        self._libraries.stand_ins[DRIVER_LIBRARIES[0]] = str(self._build("nvml.c", DRIVER_LIBRARIES[0], *self._flags))
        self._monkeypatch.setenv("FAKE_GPU_DIR", str(self.directory))
        self._monkeypatch.setenv("SAFE_GPU_DRIVER", "nvml")
        self._monkeypatch.setattr(pynvml, "CDLL", ctypes.CDLL)
        self._monkeypatch.setattr(pynvml, "nvmlLib", None)
        self._monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        self._monkeypatch.setattr(nvml, "KNOWN", [])  # of the hosts of other tests
        self._monkeypatch.setattr(nvml, "LINKS", defaultdict(dict))

    def python(self, code: str, *arguments: str, timeout: float = 60.0, **environment: str) -> str:
        """Output of Python code that runs in a child which sees these GPUs."""
        return run_python("-c", code, *arguments, env={**self.env, **environment}, timeout=timeout)

    def _replace(self, name: str, text: str) -> Path:
        path = self.directory / name
        fresh = path.with_name("new-" + path.name)
        fresh.write_text(text)
        fresh.replace(path)
        return path


@pytest.fixture
def fake_gpus(tmp_path: Path, build_library: Any, driver_libraries: Any, monkeypatch: Any) -> FakeGpus:
    """Eight idle fake GPUs behind real libnvidia-ml.so.1 and libcuda.so.1 files; see :class:`FakeGpus`."""
    directory = tmp_path / "gpus"
    directory.mkdir()
    return FakeGpus(directory, build_library, driver_libraries, monkeypatch)


@pytest.fixture
def fake_nvidia_smi(fake_gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, object]], None]:
    """An nvidia-smi on PATH that shows ``fake_gpus``; call it with its quirks (``tests/fakes/nvidia_smi.py``)."""
    start = f'exec "{sys.executable}" -I -S "{FAKES / "nvidia_smi.py"}" "$@"'
    place = fake_gpus.directory / "bin"
    program(place / "nvidia-smi", f'FAKE_GPU_DIR="{fake_gpus.directory}" {start}')  # root passes few variables on
    monkeypatch.setenv("PATH", str(place), prepend=":")

    def set_quirks(quirks: Mapping[str, object]) -> None:
        (fake_gpus.directory / "smi").write_text("".join(f"{key}={value}\n" for key, value in quirks.items()))

    return set_quirks
