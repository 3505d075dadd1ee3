"""``safe-gpu bind``: CPUs next to the visible GPUs, then the command."""

from __future__ import annotations

import argparse
import sys

from ..errors import SafeGpuError
from .become import become, find_command
from .options import add_command, add_which_gpus, all_modes
from .streams import is_terminal, say


def configure(parser: argparse.ArgumentParser) -> None:
    """Its options and its handler."""
    parser.usage = "safe-gpu bind [options] -- CMD ..."
    parser.description = (
        "Bind CPUs (and memory) next to the visible GPUs, then become the command: for\n"
        "one rank under a launcher. Of several visible GPUs, a rank binds next to the one\n"
        "with its local rank, as CUDA numbers them. Nothing is claimed."
    )
    parser.epilog = """examples:
  torchrun --no-python --nproc-per-node 8 safe-gpu bind -- python train.py
  mpirun -np 8 safe-gpu bind --memory preferred -- ./simulate"""
    parser.add_argument("--mode", choices=all_modes(), default="node", metavar="M", help="affinity mode (default node)")
    parser.add_argument("--memory", choices=("preferred", "bind"), help="NUMA memory policy next to the GPUs")
    add_which_gpus(
        parser,
        gpu="these GPUs instead, as nvidia-smi shows them: 0,3",
        ordinal="this GPU instead, as CUDA numbers it after CUDA_VISIBLE_DEVICES",
    )
    parser.add_argument(
        "--if-possible", action="store_true", help="run the command unbound, and say why, where binding fails"
    )
    add_command(parser)
    parser.set_defaults(handler=_bind)


def _bind(options: argparse.Namespace) -> int:
    path = find_command(options.command, "bind")
    from ..claim.worker import bind_rank, check_expected_gpu

    check_expected_gpu()
    try:
        report = bind_rank(options.gpu, options.ordinal, mode=options.mode, memory=options.memory)
    except SafeGpuError as err:
        if not options.if_possible:
            raise
        say(f"not bound: {err}")
    else:
        if report.notes or not report.ok or is_terminal(sys.stderr):
            say(str(report))
    become(path, options.command)
