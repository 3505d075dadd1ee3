"""A training script with a DataLoader: loader.py METHOD OTHER

It claims a GPU, loads data in two worker processes that live on, and lets OTHER, a command that claims all 8 GPUs at
once, fail while it holds its own and succeed once it has released it: workers hold nothing.
"""

import os
import subprocess
import sys

import torch
from torch.utils.data import DataLoader, Dataset

import safe_gpu


class Squares(Dataset):
    """Each item: its square, the worker's pid, and the GPU that the worker sees."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index * index, os.getpid(), int(os.environ["CUDA_VISIBLE_DEVICES"])])


def init_worker(number: int) -> None:
    safe_gpu.bind(strict=False)


def others_can_claim_all() -> bool:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    return subprocess.run(sys.argv[2:], env=environment, capture_output=True, timeout=60).returncode == 0


if __name__ == "__main__":  # a spawned worker imports this file again, and must not claim
    owner = safe_gpu.claim_gpus(1)
    loader = DataLoader(
        Squares(),
        batch_size=8,
        num_workers=2,
        worker_init_fn=init_worker,
        persistent_workers=True,
        multiprocessing_context=sys.argv[1],
    )
    batches = torch.cat(list(loader))
    assert sorted(batches[:, 0].tolist()) == [n * n for n in range(64)]
    assert os.getpid() not in batches[:, 1].tolist()
    assert len(set(batches[:, 1].tolist())) == 2
    assert set(batches[:, 2].tolist()) == set(owner.devices_taken)
    assert not others_can_claim_all()
    safe_gpu.release_gpus()
    assert others_can_claim_all(), "a worker still holds the GPU"
    assert len(torch.cat(list(loader))) == 64  # the workers are still there
