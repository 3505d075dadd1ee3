"""``safe-gpu wait``: wait until GPUs could be claimed, and claim none."""

from __future__ import annotations

import argparse
import sys

from .options import CommandLine, add_quiet, add_request, hold_for_of, timeout_of
from .streams import Log


def configure(parser: argparse.ArgumentParser) -> None:
    """Its options and its handler."""
    parser.description = """Wait until that many GPUs could be claimed, print their indices, one on a line,
and claim nothing; exit code 0 then."""
    parser.epilog = "example:\n  safe-gpu wait -n 2 --timeout 1h && notify-send 'two GPUs are free'"
    add_request(parser)
    add_quiet(parser, "say nothing about waiting")
    parser.set_defaults(handler=_wait)


def _wait(options: argparse.Namespace) -> int:
    from ..claim.free import wait_for_gpus
    from ..coordination.signals import unwind_on_signals
    from .run import WaitDisplay
    from .wait_line import WaitLine

    with unwind_on_signals(), WaitLine(sys.stderr) as line:
        gpus = wait_for_gpus(
            options.nb_gpus,
            timeout=timeout_of(options),
            min_memory=options.min_memory,
            model=options.model,
            exclude=options.exclude,
            only=options.only,
            vendor=options.vendor,
            logger=Log(),
            on_wait=WaitDisplay(line, quiet=options.quiet).tell,
            spelling=CommandLine,
            **hold_for_of(options),
        )
    sys.stdout.writelines(f"{gpu.label}\n" for gpu in gpus)
    return 0
