"""What a notebook shows of an owner."""

from __future__ import annotations

import os

from safe_gpu import GPUOwner, NoPlaceholder

from .conftest import in_fork


def test_gpus_with_their_model(ground) -> None:
    owner = GPUOwner(3, NoPlaceholder(), affinity=None)
    assert repr(owner) == "<GPUOwner: GPU 0-2 (NVIDIA A100-SXM4-80GB)>"
    owner.release_gpus()
    assert repr(owner) == "<GPUOwner: released>"


def test_the_cpus_it_bound(ground) -> None:
    with GPUOwner(1, NoPlaceholder(), affinity=None) as owner:
        owner.cpus = {0, 1, 2, 3, 8}
        assert repr(owner) == "<GPUOwner: GPU 0 (NVIDIA A100-SXM4-80GB), CPUs 0-3,8>"
        owner.cpus = {7}
        assert repr(owner).endswith(", CPU 7>")


def test_in_a_forked_child_it_says_who_holds_them(ground) -> None:
    with GPUOwner(2, NoPlaceholder(), affinity=None) as owner:
        assert in_fork(lambda: repr(owner)) == (
            f"<GPUOwner: GPU 0,1 (NVIDIA A100-SXM4-80GB), held by process {os.getpid()}>"
        )
