"""A client written from PROTOCOL.md alone, with system calls and no code of the package, shares GPUs with claims."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu.errors import NotEnoughGpusError

OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
ELSEWHERE = 999_999_999  # the number of a process that cannot be seen from here


class OtherClient:
    """What the page says, step by step; nothing here is imported from the package."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for path in (directory, directory / "leases", directory / "queue"):
            try:
                path.mkdir()
                path.chmod(0o1777)
            except FileExistsError:
                pass
        self._held: list[int] = []

    def host_lock(self) -> int:
        while True:
            fd = self._open("host.lock")
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(fd), os.stat(self.directory / "host.lock", follow_symlinks=False)):
                return fd
            self.unlock(fd)

    def lease(self, uuid: str, record: bytes, *, inner: bool = False, how: int = fcntl.LOCK_EX) -> int | None:
        """Take one lease; None where it is held."""
        host = self.host_lock()
        try:
            fd = self._open(f"leases/{uuid.replace('/', '_')}{'.inner' if inner else ''}.lock")
            try:
                fcntl.flock(fd, how | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return None
            self._write(fd, record)
            self._held.append(fd)
            return fd
        finally:
            self.unlock(host)

    def ticket(self, line: bytes, *, seq: str | None = None) -> tuple[str, int]:
        """Join the queue: the ticket's name and descriptor."""
        host = self.host_lock()
        try:
            taken = [name[:-7] for name in os.listdir(self.directory / "queue") if name.endswith(".ticket")]
            numbers = [int(stem) for stem in taken if stem.isdigit() and str(int(stem)) == stem and len(stem) <= 18]
            name = f"queue/{seq or max(numbers, default=0) + 1}.ticket"
            fd = self._open(name, 0o644)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write(fd, line)
            self._held.append(fd)
            return name, fd
        finally:
            self.unlock(host)

    def leave(self, ticket: tuple[str, int]) -> None:
        name, fd = ticket
        host = self.host_lock()
        os.unlink(self.directory / name)
        self._held.remove(fd)
        self.unlock(fd)
        self.unlock(host)

    def unlock(self, fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    def end(self) -> None:
        for fd in self._held:
            os.close(fd)

    def _open(self, name: str, mode: int = 0o666) -> int:
        path = self.directory / name
        try:
            return os.open(path, OPEN)
        except FileNotFoundError:
            directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            unnamed = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, mode, dir_fd=directory)
            os.fchmod(unnamed, mode)
            os.link(f"/proc/self/fd/{unnamed}", path.name, dst_dir_fd=directory, follow_symlinks=True)  # linkat(2)
            os.close(unnamed)
            os.close(directory)
            return os.open(path, OPEN)

    @staticmethod
    def _write(fd: int, data: bytes) -> None:
        os.ftruncate(fd, os.pwrite(fd, data, 0))


@pytest.fixture
def other(ground: Any) -> Iterator[OtherClient]:
    client = OtherClient(ground.directory)
    yield client
    client.end()


@pytest.fixture(autouse=True)
def _release() -> Iterator[None]:
    yield
    safe_gpu.release_gpus()


def record(uuid: str, **changes: Any) -> bytes:
    keys = {"v": 1, "pid": ELSEWHERE, "start": None, "uid": 0, "user": "anna", "host": "gpu1", "job": "sge:12.3"}
    rest = {"command": "./simulate", "gpus": [uuid], "since": 1795184513.204, "token": ""}
    return json.dumps({**keys, **rest, **changes}).encode() + b"\n"


def request(*uuids: str, nb_gpus: int = 1) -> bytes:
    wish = {"nb_gpus": nb_gpus, "gpus": list(uuids), "min_memory": None}
    return json.dumps({"pid": ELSEWHERE, "user": "anna", "request": wish, "since": time.time()}).encode() + b"\n"


def try_claim(**options: Any) -> list[int] | NotEnoughGpusError:
    """The GPUs of a claim that does not wait, given back at once; or its error."""
    try:
        with safe_gpu.GPUOwner(placeholder_fn=safe_gpu.NoPlaceholder(), timeout=0, **options) as owner:
            return owner.devices_taken
    except NotEnoughGpusError as err:
        return err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (record("x"), "anna, job sge:12.3, ./simulate"),
        (record("x", v=2, colour="red"), "anna, job sge:12.3, ./simulate"),
        (record("x").replace(b"simulate", b"caf\xe9"), "./caf\ufffd"),
        (b"{ torn", "claimed"),
        (record("x", pid=1 << 31), "claimed"),
        (b"", "claimed"),
    ],
)
def test_a_lease_of_another_client_is_a_claim_whatever_its_record_says(
    ground: Any, other: OtherClient, line: bytes, said: str
) -> None:
    assert other.lease(ground.uuids[0], line) is not None
    refused = try_claim(only=0)
    assert isinstance(refused, NotEnoughGpusError)
    assert said in str(refused)
    assert try_claim() == [1]


def test_a_claim_keeps_another_client_out_and_leaves_its_end_in_place_of_its_record(
    ground: Any, other: OtherClient
) -> None:
    path = ground.directory / "leases" / f"{ground.uuids[3]}.lock"
    with safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), timeout=0, only=3):
        assert other.lease(ground.uuids[3], b"") is None
        assert other.lease(ground.uuids[4], b"") is not None
        told = json.loads(path.read_text())
        assert (told["v"], told["pid"], told["gpus"], told["token"]) == (1, os.getpid(), [ground.uuids[3]], "")
    left = json.loads(path.read_text())
    assert left.keys() == {"v", "claim", "ended"}
    assert left["claim"] == [told["pid"], told["since"]]
    assert other.lease(ground.uuids[3], b"") is not None


def test_a_slash_in_a_name_is_an_underscore(other: OtherClient) -> None:
    from safe_gpu.coordination.leases import inner_name, lease_name

    assert lease_name("MIG-GPU-12/1/0") == "MIG-GPU-12_1_0.lock"
    assert inner_name("MIG-GPU-12/1/0") == "MIG-GPU-12_1_0.inner.lock"
    assert other.lease("MIG-GPU-12/1/0", b"") is not None


@pytest.mark.parametrize(
    ("seq", "line", "waits"),
    [
        (None, request("UUID0"), True),
        (None, request("UUID1"), False),
        (None, b"{ torn", True),  # it cannot be read, so it competes with everybody
        ("007", request("UUID0"), False),
        ("1" * 19, request("UUID0"), False),
        ("1" * 18, request("UUID0"), False),
        (str(10**12), request("UUID0"), True),
    ],
)
def test_a_live_ticket_of_another_client_is_not_passed(
    ground: Any, other: OtherClient, seq: str | None, line: bytes, waits: bool
) -> None:
    for number in (0, 1):
        line = line.replace(f"UUID{number}".encode(), ground.uuids[number].encode())
    ticket = other.ticket(line, seq=seq)
    assert isinstance(try_claim(only=0), NotEnoughGpusError) is waits
    other.leave(ticket)
    assert try_claim(only=0) == [0]


@pytest.mark.parametrize("leaving", [True, False])
def test_a_last_holder_that_is_still_there_is_no_stranger(
    ground: Any, other: OtherClient, zombie: int, leaving: bool
) -> None:
    pid = zombie if leaving else os.getpid()  # this process lives on after its claim
    (context,) = ground.occupy(0, pid=pid)
    last = other.lease(ground.uuids[0], record(ground.uuids[0], pid=pid))
    assert last is not None
    fcntl.flock(last, fcntl.LOCK_UN)
    other.ticket(request(*ground.uuids[:2], nb_gpus=2))
    code = "import safe_gpu; print(safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), timeout=0, only='0,1').devices_taken)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    if leaving:
        assert "NotEnoughGpusError" in done.stderr  # the ticket gets both when that process is gone
    else:
        assert done.stdout == "[1]\n", done.stderr  # a stranger sits on what the ticket needs
    context.close()


def test_another_clients_waiter_sleeps_until_ours_leaves(
    ground: Any, other: OtherClient, child: Callable[..., Any]
) -> None:
    lease = other.lease(ground.uuids[0], record(ground.uuids[0]))
    assert lease is not None
    waiter = child(
        "import logging, safe_gpu\n"
        "def tell(line): line.getMessage().startswith('waiting') and say('waits')\n"
        "handler = logging.Handler(); handler.emit = tell\n"
        "logger = logging.getLogger('safe_gpu'); logger.addHandler(handler); logger.setLevel(20)\n"
        "safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), only=0, timeout=60)\n"
        "say('claimed'); listen()\n"
    )
    assert waiter.hear() == "waits"
    (name,) = os.listdir(ground.directory / "queue")
    line = json.loads((ground.directory / "queue" / name).read_text())
    assert name == "1.ticket"
    assert set(line) == {"pid", "pidns", "user", "request", "since", "hold_for"}
    assert line["request"] == {"nb_gpus": 1, "gpus": [ground.uuids[0]], "min_memory": None}
    fd = os.open(ground.directory / "queue" / name, OPEN)
    other._held.remove(lease)
    other.unlock(lease)
    fcntl.flock(fd, fcntl.LOCK_SH)  # sleeps until the ticket goes
    assert waiter.hear() == "claimed"
    assert os.listdir(ground.directory / "queue") == []
    other.unlock(fd)
    waiter.tell()


def test_leases_on_a_shared_display_are_shared(
    ground: Any, other: OtherClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safe_gpu.drivers.presets import preset

    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:laptop")
    (gpu,) = preset("laptop").gpus()
    assert other.lease(gpu.uuid, record(gpu.uuid), how=fcntl.LOCK_SH) is not None
    with safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), timeout=0):
        assert other.lease(gpu.uuid, b"", how=fcntl.LOCK_EX) is None
        assert other.lease(gpu.uuid, b"", how=fcntl.LOCK_SH) is not None


@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o700])
def test_directories_of_ours_are_accepted_with_any_mode_and_opened_up_where_empty(ground: Any, mode: int) -> None:
    ground.directory.mkdir()
    (ground.directory / "host.lock").touch()
    (ground.directory / "host.lock").chmod(0o666)
    (ground.directory / "leases").mkdir()
    for path in (ground.directory, ground.directory / "leases"):
        path.chmod(mode)
    assert try_claim() == [0]
    assert ground.directory.stat().st_mode & 0o7777 == mode
    for path in (ground.directory / "leases", ground.directory / "queue"):
        assert path.stat().st_mode & 0o7777 == 0o1777
