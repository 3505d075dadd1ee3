"""``safe-gpu bind``: CPUs next to the visible GPUs, then the command."""

import argparse
import sys

from ...errors import SafeGpuError
from ..option_values import add_affinity, add_which_gpus
from ..output import is_terminal, say
from ..parser import EX_USAGE
from .become import CommandError, become, find_command


def configure_bind(parser: argparse.ArgumentParser) -> None:
    """Set its options and its handler."""
    parser.usage = "safe-gpu bind [options] -- CMD ..."
    parser.description = (
        "Bind CPUs (and memory) next to the visible GPUs, then become the command: for\n"
        "one rank under a launcher. Of several visible GPUs, a rank binds next to the one\n"
        "with its local rank, as CUDA numbers them. Nothing is claimed."
    )
    parser.epilog = """examples:
  torchrun --no-python --nproc-per-node 8 safe-gpu bind -- python train.py
  mpirun -np 8 safe-gpu bind --memory preferred -- ./simulate
  for i in 0 1 2 3; do LOCAL_RANK=$i safe-gpu bind -- ./train & done"""
    add_affinity(parser)
    parser.add_argument("--memory", choices=("preferred", "bind"), help="NUMA memory policy next to the GPUs")
    add_which_gpus(
        parser,
        gpu="these GPUs instead, as nvidia-smi shows them: 0,3",
        ordinal="this GPU instead, as CUDA numbers it after CUDA_VISIBLE_DEVICES",
        node="the NUMA node of this number instead, whatever GPU the command uses",
    )
    parser.add_argument(
        "--if-possible", action="store_true", help="where binding fails, say why and run the command unbound"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(handler=_bind)


def _bind(options: argparse.Namespace) -> int:
    given = getattr(options, "affinity", "node")
    if options.node is not None and given not in ("node", "none"):
        raise CommandError(f"--node {options.node} binds to the whole node: leave out --affinity", code=EX_USAGE)
    path = find_command(options.command, "bind")
    from ...claim.expected_gpu import check_expected_gpu
    from ...claim.rank_binding import bind_rank

    check_expected_gpu()
    try:
        mode = None if given == "none" else given
        report = bind_rank(options.gpu, options.ordinal, options.node, mode=mode, memory=options.memory)
    except SafeGpuError as err:
        if not options.if_possible:
            raise
        say(f"not bound: {err}")
    else:
        if report.notes or not report.ok or is_terminal(sys.stderr):
            say(str(report))
    become(path, options.command)
