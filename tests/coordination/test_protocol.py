"""A client made of system calls shares GPUs with claims."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu.errors import NotEnoughGpusError

OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
ELSEWHERE = 999_999_999  # the number of a process that cannot be seen from here


class OtherClient:
    """Nothing here is imported from the package. One that takes every step of the page is in tests/protocol."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for path in (directory, directory / "leases", directory / "queue"):
            path.mkdir(exist_ok=True)
            path.chmod(0o1777)
        self._held: list[int] = []

    @contextmanager
    def host_lock(self) -> Iterator[None]:
        fd = self._open("host.lock")
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
        self.unlock(fd)

    def lease(self, uuid: str, record: bytes, *, how: int = fcntl.LOCK_EX) -> int | None:
        """Take one lease; None where it is held."""
        with self.host_lock():
            fd = self._open(f"leases/{uuid.replace('/', '_')}.lock")
            try:
                fcntl.flock(fd, how | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return None
            os.ftruncate(fd, os.pwrite(fd, record, 0))
            self._held.append(fd)
            return fd

    def ticket(self, line: bytes, seq: str = "1") -> tuple[str, int]:
        """Join the queue: the ticket's name and descriptor."""
        with self.host_lock():
            name = f"queue/{seq}.ticket"
            fd = self._open(name, 0o644)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(fd, line, 0)
            self._held.append(fd)
            return name, fd

    def leave(self, ticket: tuple[str, int]) -> None:
        name, fd = ticket
        with self.host_lock():
            os.unlink(self.directory / name)
            self._held.remove(fd)
            self.unlock(fd)

    def unlock(self, fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    def end(self) -> None:
        for fd in self._held:
            os.close(fd)

    def _open(self, name: str, mode: int = 0o666) -> int:
        fd = os.open(self.directory / name, OPEN | os.O_CREAT)
        os.fchmod(fd, mode)
        return fd


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
        ("1", request("UUID0"), True),
        ("1", request("UUID1"), False),
        ("1", b"{ torn", True),  # it cannot be read, so it competes with everybody
        ("007", request("UUID0"), False),
        ("1" * 19, request("UUID0"), False),
        ("1" * 18, request("UUID0"), False),
        (str(10**12), request("UUID0"), True),
    ],
)
def test_a_live_ticket_of_another_client_is_not_passed(
    ground: Any, other: OtherClient, seq: str, line: bytes, waits: bool
) -> None:
    for number in (0, 1):
        line = line.replace(f"UUID{number}".encode(), ground.uuids[number].encode())
    ticket = other.ticket(line, seq)
    assert isinstance(try_claim(only=0), NotEnoughGpusError) is waits
    other.leave(ticket)
    assert try_claim(only=0) == [0]


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
