"""What scripts share that start processes on a simulated host: the package, the environment, the user, the options."""

import argparse
import os
import random
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(os.environ.get("SAFE_GPU_CHECKOUT") or Path(__file__).parents[1]).resolve()
# The package beside these scripts, installed or not, and what its tests have of actors and broken builds.
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parents[1] / "tests")]


def simulate(preset: str, state: str, **variables: str) -> None:
    """Make this process one on a simulated host, whatever it has inherited and whoever claims here by safe-gpu 2.0."""
    for name in list(os.environ):
        if name.startswith(("SAFE_GPU_", "CUDA_", "HIP_", "ROCR_", "GPU_DEVICE_")):
            del os.environ[name]
    os.environ.update(SAFE_GPU_DRIVER=f"simulated:{preset}", SAFE_GPU_DIR=state, SAFE_GPU_LEGACY_LOCK="never")
    os.environ.update(variables)


def parser_with_seed(text: str | None, builds: Iterable[str]) -> argparse.ArgumentParser:
    """A parser with --seed, and with --break, which is ``broken``."""
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of what is random")
    parser.add_argument(
        "--break", dest="broken", choices=builds, default="", help="break the claim code: must end with 1"
    )
    return parser
