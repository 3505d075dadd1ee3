"""The command ``resume``: GPUs can be claimed again."""

import argparse

from .closing import ClosedGpus, add_gpus, named_gpus, say_who_may_claim


def configure_resume(parser: argparse.ArgumentParser) -> None:
    """Set its options."""
    parser.description = """Allow new claims on these GPUs again, or on all GPUs of this host: they are
neither drained nor reserved any more."""
    add_gpus(parser)


def do_resume(options: argparse.Namespace) -> int:
    """Carry out the command; return its exit code."""
    gpus = named_gpus(options.gpus)
    closed = ClosedGpus()
    closed.resume([one.gpu.uuid for one in gpus])
    closed.write()
    say_who_may_claim(gpus)
    return 0
