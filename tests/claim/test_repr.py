"""What a notebook shows of an owner."""

from __future__ import annotations

import os

from safe_gpu import GPUOwner, NoPlaceholder

from .conftest import in_fork


def test_gpus_with_their_model_and_who_holds_them(ground) -> None:
    with GPUOwner(3, NoPlaceholder(), affinity=None) as owner:
        gpus = "<GPUOwner: GPU 0-2 (NVIDIA A100-SXM4-80GB)"
        assert repr(owner) == f"{gpus}>"
        assert in_fork(lambda: repr(owner)) == f"{gpus}, held by process {os.getpid()}>"
        owner.cpus = {0, 1, 2, 3, 8}
        assert repr(owner) == f"{gpus}, CPUs 0-3,8>"
        owner.cpus = {7}
        assert repr(owner) == f"{gpus}, CPU 7>"
    assert repr(owner) == "<GPUOwner: released>"
