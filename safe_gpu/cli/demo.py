"""``safe-gpu demo``: a race for GPUs that anyone can watch."""

from __future__ import annotations

import argparse
import sys


def configure(parser: argparse.ArgumentParser) -> None:
    """Its handler; it takes no options."""
    parser.description = "A race for GPUs that anyone can watch: on real GPUs, or simulated where none is."
    parser.set_defaults(handler=_demo)


def _demo(options: argparse.Namespace) -> int:
    from ..demo.race import run

    return run(stream=sys.stdout)
