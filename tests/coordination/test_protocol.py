"""Files of another client, made with system calls alone: claims respect them, and leave such that others can read.

A whole client that follows PROTOCOL.md step by step is in tests/protocol.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import safe_gpu
from safe_gpu.coordination.leases import inner_name, lease_name
from safe_gpu.drivers.presets import preset
from safe_gpu.errors import NotEnoughGpusError

ELSEWHERE = 999_999_999  # the number of a process that cannot be seen from here


@pytest.fixture
def lock(ground: Any) -> Iterator[Callable[..., bool]]:
    """``lock("leases/x.lock", b"...")`` locks that file of the state directory, and writes it; False: it is held."""
    with safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), timeout=0):
        pass  # makes the directories
    held: list[int] = []

    def lock(name: str, line: bytes = b"", *, mode: int = 0o666, how: int = fcntl.LOCK_EX) -> bool:
        fd = os.open(ground.directory / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT)
        held.append(fd)
        os.fchmod(fd, mode)
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        os.ftruncate(fd, os.pwrite(fd, line, 0))
        return True

    yield lock
    for fd in held:
        os.close(fd)


def record(**changes: Any) -> bytes:
    keys = {"v": 1, "pid": ELSEWHERE, "start": None, "uid": 0, "user": "anna", "host": "gpu1", "job": "sge:12.3"}
    rest = {"command": "./simulate", "gpus": ["x"], "since": 1795184513.204, "token": ""}
    return json.dumps({**keys, **rest, **changes}).encode() + b"\n"


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
        (record(), "anna, job sge:12.3, ./simulate"),
        (record(v=2, colour="red"), "anna, job sge:12.3, ./simulate"),
        (record().replace(b"simulate", b"caf\xe9"), "./caf\ufffd"),
        (b"{ torn", "claimed"),
        (record(pid=1 << 31), "claimed"),
        (b"", "claimed"),
    ],
)
def test_a_lease_of_another_client_is_a_claim_whatever_its_record_says(
    ground: Any, lock: Callable[..., bool], line: bytes, said: str
) -> None:
    assert lock(f"leases/{ground.uuids[0]}.lock", line)
    refused = try_claim(only=0)
    assert isinstance(refused, NotEnoughGpusError)
    assert said in str(refused)
    assert try_claim() == [1]


def test_names_are_those_of_the_protocol() -> None:
    assert lease_name("GPU-12") == "GPU-12.lock"
    assert lease_name("MIG-GPU-12/1/0") == "MIG-GPU-12_1_0.lock"
    assert inner_name("MIG-GPU-12/1/0") == "MIG-GPU-12_1_0.inner.lock"


def test_a_live_ticket_that_cannot_be_read_competes_with_everybody(ground: Any, lock: Callable[..., bool]) -> None:
    assert lock("queue/1.ticket", b"{ torn", mode=0o644)
    assert isinstance(try_claim(only=0), NotEnoughGpusError)
    os.unlink(ground.directory / "queue" / "1.ticket")
    assert try_claim(only=0) == [0]


def test_leases_on_a_shared_display_are_shared(
    ground: Any, lock: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:laptop")
    name = f"leases/{preset('laptop').gpus()[0].uuid}.lock"
    assert lock(name, record(), how=fcntl.LOCK_SH)
    with safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), timeout=0):
        assert not lock(name, how=fcntl.LOCK_EX)
        assert lock(name, how=fcntl.LOCK_SH)
