"""Files of another client: claims respect them. A whole client that follows PROTOCOL.md is in tests/protocol."""

import json
from typing import Any

import pytest

import safe_gpu
from safe_gpu.coordination.leases.file_names import inner_name, lease_name

ELSEWHERE = 999_999_999  # the number of a process that cannot be seen from here


def record(**changes: Any) -> bytes:
    keys = {"v": 1, "pid": ELSEWHERE, "start": None, "uid": 0, "user": "anna", "host": "gpu1", "job": "sge:12.3"}
    rest = {"command": "./simulate", "gpus": ["x"], "since": 1795184513.204, "token": ""}
    return json.dumps({**keys, **rest, **changes}).encode() + b"\n"


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
def test_a_lease_of_another_client_is_a_claim_whatever_its_record_says(ground: Any, line: bytes, said: str) -> None:
    ground.hold(0)
    (ground.directory / "leases" / f"{ground.uuids[0]}.lock").write_bytes(line)
    with pytest.raises(safe_gpu.NotEnoughGpusError) as refused:
        safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), timeout=0, only=0)
    assert said in str(refused.value)
    with safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), timeout=0) as owner:
        assert owner.devices_taken == [1]


def test_names_are_those_of_the_protocol() -> None:
    assert lease_name("GPU-12") == "GPU-12.lock"
    assert lease_name("MIG-GPU-12/1/0") == "MIG-GPU-12_1_0.lock"
    assert inner_name("MIG-GPU-12/1/0") == "MIG-GPU-12_1_0.inner.lock"
