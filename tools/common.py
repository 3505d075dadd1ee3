"""What scripts share that start processes on a simulated host: the package and the options."""

import argparse
import os
import random
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(os.environ.get("SAFE_GPU_CHECKOUT") or Path(__file__).parents[1]).resolve()
# The package beside these scripts, installed or not, and what its tests have of actors and broken builds.
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parents[1] / "tests")]


def parser_with_seed(text: str | None, builds: Iterable[str]) -> argparse.ArgumentParser:
    """A parser with --seed, and with --break, which is ``broken``."""
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of what is random")
    parser.add_argument(
        "--break", dest="broken", choices=builds, default="", help="break the claim code: must end with 1"
    )
    return parser
