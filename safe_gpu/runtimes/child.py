"""What a child process does that is asked which GPUs a vendor's library shows."""

import sys
from importlib import import_module

from ..errors import SafeGpuError
from .causes import likely_cause

MARK = "cuda-sees "
"""Starts the lines of the answer. Libraries may print other lines."""


def tell(title: str) -> int:
    """Print what names the GPUs that the library with this title shows, or an error to stderr; return an exit
    status."""
    library = getattr(import_module(f".{title.lower()}", __package__), title)
    try:
        shown = library.load().listed()
    except SafeGpuError as err:
        print(f"{err}{likely_cause(err)}", file=sys.stderr)
        return 1
    print(*(MARK + one for one in shown), sep="\n")
    return 0
