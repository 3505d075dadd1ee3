"""Claims of simulated GPUs, in one word."""

from typing import Any

import safe_gpu


def claim(nb_gpus: int = 1, **options: Any) -> safe_gpu.GPUOwner:
    """A claim without placeholders that does not wait, unless the options say otherwise."""
    return safe_gpu.GPUOwner(nb_gpus, safe_gpu.NoPlaceholder(), **{"timeout": 0, "affinity": None, **options})


def try_claim(nb_gpus: int, **options: Any) -> tuple[int, ...] | None:
    """The GPUs that a claim gets without waiting and gives back at once; None: it is refused."""
    try:
        with claim(nb_gpus, **options) as claimed:
            return tuple(claimed.devices_taken)
    except safe_gpu.NotEnoughGpusError:
        return None
