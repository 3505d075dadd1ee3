"""``safe-gpu demo``: a race for GPUs that anyone can watch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..output import in_color

if TYPE_CHECKING:
    import argparse


def configure_demo(parser: argparse.ArgumentParser) -> None:
    """Set its handler; it takes no options."""
    parser.description = "Race processes for GPUs: real ones that are free, or simulated ones."
    parser.set_defaults(handler=_demo)


def _demo(options: argparse.Namespace) -> int:
    from ...demo.race import run

    return run(stream=sys.stdout, color=in_color(sys.stdout))
