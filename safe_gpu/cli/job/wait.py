"""``safe-gpu wait``: wait until GPUs could be claimed, and claim none."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..option_values import CommandLine, add_request, claim_arguments
from ..output import Log
from .wait_line import WaitLine

if TYPE_CHECKING:
    import argparse


def configure_wait(parser: argparse.ArgumentParser) -> None:
    """Set its options and its handler."""
    parser.description = """Wait until that many GPUs could be claimed, print their indices, one on a line,
and claim nothing; exit code 0 then."""
    parser.epilog = "example:\n  safe-gpu wait -n 2 --timeout 1h && notify-send 'two GPUs are free'"
    add_request(parser)
    quiet = "print nothing about waiting"
    parser.add_argument_group("output").add_argument("-q", "--quiet", action="store_true", help=quiet)
    parser.set_defaults(handler=_wait)


def _wait(options: argparse.Namespace) -> int:
    from ...claim.free import wait_for_gpus
    from ...coordination.signals import unwind_on_signals

    with unwind_on_signals(), WaitLine(sys.stderr, quiet=options.quiet) as line:
        gpus = wait_for_gpus(logger=Log(), on_wait=line.show, spelling=CommandLine, **claim_arguments(options))
    sys.stdout.writelines(f"{gpu.label}\n" for gpu in gpus)
    return 0
