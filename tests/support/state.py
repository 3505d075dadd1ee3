"""The state directory of a test, and the simulated DGX A100 whose GPUs are claimed, used and waited for there."""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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


def entry_name(number: int) -> str:
    """A name that an entry may have."""
    return f"{number}.{number:016x}"


@contextmanager
def living(path: Path, data: bytes) -> Iterator[None]:
    """An entry that its owner keeps locked, whatever it says."""
    from safe_gpu.host.locks import lock, unlock

    path.write_bytes(data)
    path.chmod(0o644)
    with path.open("r+b") as file:
        lock(file.fileno())
        yield
        unlock(file.fileno())


@contextmanager
def locked_host(path: Path | None = None) -> Iterator[Any]:
    """Hold host.lock of the state directory of this test, or of another one, with all claims and tickets seen."""
    from safe_gpu.coordination.host_lock import Host
    from safe_gpu.host.signals import DeferredSignals

    with DeferredSignals() as signals, Host(None if path is None else str(path)) as host:
        host.prepare()
        with host.locked(time.monotonic() + 30, signals):
            yield host


def simulated_doors() -> Any:
    """Doors of the simulated GPUs of this test, none of which is taken yet."""
    from safe_gpu.coordination.doors import Doors, uuid_prefix

    tree = os.environ.get("SAFE_GPU_SIMULATED_DIR") or os.path.join(os.environ["SAFE_GPU_DIR"], "simulated")
    return Doors(uuid_prefix(tree))


class PlayedClaim:
    """The claim of another process: its entry and its doors, which this process holds in its place.

    Args:
        gpus: UUID -> bytes of its share; None is the whole GPU.
        pid, uid: of the process whose claim it seems to be, and of its user.
        content: keys of the entry, in addition or in place of those that a real claim writes.
    """

    def __init__(self, gpus: dict[str, int | None], pid: int, uid: int, **content: Any) -> None:
        from safe_gpu.coordination.entry import make_entry
        from safe_gpu.host import procfs

        self.doors = simulated_doors()
        process = {"pid": pid, "start": procfs.start_time(pid), "pidns": procfs.pid_namespace() or 0}
        defaults = {**process, "host": "gpu1", "command": "sleep", "since": round(time.time(), 3)}
        with locked_host() as host:
            claims = host.claims.look()
            for uuid, share in gpus.items():
                parts_here = {one.parts[uuid] for one in claims if uuid in one.parts}
                take = self.doors.take_whole if share is None else self.doors.take_share
                assert take(uuid, parts_here), f"{uuid} is held"
            content = {**defaults, "gpus": gpus, "parts": self.doors.parts, **content}
            name, self.entry = make_entry(host.claims.directory, host.claims.next_number, content, by_children=False)
        self.path = Path(os.environ["SAFE_GPU_DIR"], "claims", name)
        if uid != os.geteuid():
            os.fchown(self.entry.fd, uid, uid)

    def die(self) -> None:
        """End it as SIGKILL does: the kernel gives back its locks and doors, and its entry stays behind."""
        self.doors.release()
        self.entry.release()

    def release(self) -> None:
        """End it as a release does."""
        with suppress(FileNotFoundError):
            self.path.unlink()
        self.die()


class Dgx:
    """The simulated DGX A100 of a test, whose eight GPUs other processes can seem to claim, or use without a claim.

    Attributes:
        uuids: of its GPUs, by index.
    """

    def __init__(self) -> None:
        from safe_gpu.drivers.simulated import find_preset

        self.uuids = [gpu.uuid for gpu in find_preset("dgx-a100").gpus]
        self._held: dict[str, PlayedClaim] = {}
        self._sleepers: dict[int, subprocess.Popen[bytes]] = {}
        self._contexts: list[Any] = []

    @property
    def state_dir(self) -> Path:
        return Path(os.environ["SAFE_GPU_DIR"])

    def claims(self) -> list[Any]:
        """The living claims."""
        from safe_gpu.coordination.holders import living_claims

        return living_claims()

    def claimed(self, *, inside: bool = False) -> list[int]:
        """Indices of the GPUs that a living claim holds, a played one too.

        Args:
            inside: of the claims inside others, in place of those that are not.
        """
        held = {uuid for one in self.claims() if bool(one.inside) is inside for uuid in one.gpus}
        return [index for index, uuid in enumerate(self.uuids) if uuid in held]

    def tickets(self) -> list[str]:
        """Names of the tickets, in the order of the queue."""
        from safe_gpu.coordination.queue import waiting_tickets

        return [ticket.name for ticket in waiting_tickets()]

    def hold(self, *indices: int, until: float | None = None, uid: int | None = None, **content: Any) -> None:
        """Play a claim of each of these GPUs by a process that sleeps.

        Args:
            until: when the claims are expected to end, in Unix seconds; None: not known.
            uid: of that process; None is this user.
            content: as for :class:`PlayedClaim`; ``pid`` names another process.
        """
        own = os.geteuid()
        uid = own if uid is None else uid
        if own not in (0, uid):
            pytest.skip("needs root, to play another user")
        if uid not in self._sleepers:
            self._sleepers[uid] = subprocess.Popen(["sleep", "infinity"], user=None if uid == own else uid)
        pid = content.pop("pid", self._sleepers[uid].pid)
        for index in indices:
            uuid = self.uuids[index]
            self._held[uuid] = PlayedClaim({uuid: None}, pid, uid, until=until, **content)

    def played(self, index: int) -> PlayedClaim:
        """The played claim of a GPU."""
        return self._held[self.uuids[index]]

    def let_go(self, *indices: int) -> None:
        """Release the played claims of these GPUs, or of all."""
        for uuid in [self.uuids[index] for index in indices] or list(self._held):
            self._held.pop(uuid).release()

    def occupy(self, *indices: int, kind: str = "compute", pid: int | None = None) -> list[Any]:
        """Put a process without a claim on each of these GPUs, this process by default; close() takes it off."""
        from safe_gpu.drivers.simulated import SimulatedDriver

        driver = SimulatedDriver("dgx-a100")
        contexts = [driver.occupy(self.uuids[index], kind=kind, pid=pid) for index in indices]
        self._contexts += contexts
        return contexts

    def clear(self) -> None:
        """End all that was started here."""
        self.let_go()
        for sleeper in self._sleepers.values():
            with sleeper:
                sleeper.kill()
        for context in self._contexts:
            context.close()


@pytest.fixture
def dgx(driver_libraries: object) -> Iterator[Dgx]:
    """The simulated host of this test, and who holds or uses its GPUs; see :class:`Dgx`."""
    dgx = Dgx()
    yield dgx
    dgx.clear()
