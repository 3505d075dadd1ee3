"""What ``status`` says of a GPU on which a claim has failed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu.drivers.presets import preset
from safe_gpu.status.gather import gather
from safe_gpu.status.render import render

UUIDS = [gpu.uuid for gpu in preset("dgx-a100").gpus()]
ERROR = "CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered"


@pytest.fixture
def noted(state_dir: Path) -> None:
    """GPU 0 with a note of now, GPU 1 with one of yesterday."""
    (state_dir / "leases").mkdir(parents=True)
    for uuid, age in ((UUIDS[0], 0), (UUIDS[1], 86400)):
        line = json.dumps({"when": time.time() - age, "error": ERROR})
        (state_dir / "leases" / f"{uuid}.fault").write_text(line)


def test_a_free_gpu_that_is_taken_last_says_why(noted: Any) -> None:
    status = gather()
    first, second = status.gpus[:2]
    assert (first.state, second.state, second.reason) == ("free", "free", "")
    assert first.reason.startswith("taken last until ")
    assert first.reason.endswith(f"since a claim failed on it: {ERROR}")
    assert status.to_dict()["gpus"][0]["reason"] == first.reason
    table = render(status, width=200, color=False)
    assert table.count(f"since a claim failed on it: {ERROR}") == 1
    assert "8 of 8 GPUs free" in table


def test_a_claimed_one_too(noted: Any) -> None:
    with safe_gpu.GPUOwner(8, affinity=None, timeout=0):
        # what works is forgiven, so it is noted anew
        path = Path(gather().state_dir) / "leases" / f"{UUIDS[3]}.fault"
        path.write_text(json.dumps({"when": time.time(), "error": ERROR}))
        status = gather()
        assert status.gpus[3].state == "claimed"
        assert status.gpus[3].reason.endswith(ERROR)
        assert status.gpus[0].fault == ""
        assert f"since a claim failed on it: {ERROR}" in render(status, width=200, color=False)
