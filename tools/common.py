"""Where the package is, and what its tests have for processes on simulated hosts: imported first by tools."""

import os
import sys
from pathlib import Path

ROOT = Path(os.environ.get("SAFE_GPU_CHECKOUT") or Path(__file__).parents[1]).resolve()
# The package beside these scripts, installed or not, and what its tests have of actors and broken builds.
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parents[1] / "tests")]
