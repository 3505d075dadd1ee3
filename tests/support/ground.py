"""The state directory of a test: where it lies, who holds and who waits there, and others who are played."""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


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


@pytest.fixture
def rules(open_tmp: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Write the policy of this test's host."""

    def write(text: str) -> Path:
        path = open_tmp / "policy.ini"
        path.write_text(text)
        path.chmod(0o644)
        monkeypatch.setenv("SAFE_GPU_POLICY", str(path))
        return path

    return write


def write_for_all(path: Path, content: str | bytes) -> None:
    """Write a file of a state directory, with the mode that such files must have."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(0o666)


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
        from safe_gpu.coordination.leases.file_names import inner_name, lease_name
        from safe_gpu.coordination.leases.lease import probe
        from safe_gpu.coordination.locks.host_lock import HostLock

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

    def hold(self, *indices: int, until: float | None = None) -> None:
        """Play somebody else's claim of these GPUs, one that left no record, or one that is to end then."""
        from safe_gpu.coordination.leases.file_names import lease_name
        from safe_gpu.coordination.leases.lease import try_lease
        from safe_gpu.coordination.locks.host_lock import HostLock

        with HostLock(time.monotonic() + 30) as host:
            for index in indices:
                lease = try_lease(host, lease_name(self.uuids[index]))
                assert lease is not None
                facts = {"v": 1, "pid": 1, "user": "ben", "host": "gpu1", "gpus": [self.uuids[index]], "token": ""}
                record = {**facts, "since": 1.0, "until": until}
                lease.write(b"" if until is None else json.dumps(record).encode())
                self._held[self.uuids[index]] = lease

    def let_go(self, *indices: int) -> None:
        """End that claim, on these GPUs or on all."""
        for uuid in [self.uuids[index] for index in indices] or list(self._held):
            self._held.pop(uuid).release()

    def occupy(self, *indices: int, kind: str = "compute", pid: int | None = None) -> list[Any]:
        """Put a stranger's process on GPUs, this one by default; close() on what is returned ends it."""
        from safe_gpu.drivers.simulated import SimulatedDriver

        driver = SimulatedDriver("dgx-a100")
        contexts = [driver.occupy(self.uuids[index], kind=kind, pid=pid) for index in indices]
        self._contexts += contexts
        return contexts

    def clear(self) -> None:
        self.let_go()
        for context in self._contexts:
            context.close()


@pytest.fixture
def ground(driver_libraries: object) -> Iterator[Ground]:
    """The state directory of this test, and others who hold or use GPUs there; see :class:`Ground`."""
    ground = Ground()
    yield ground
    ground.clear()
