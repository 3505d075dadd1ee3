"""``safe-gpu affinity``: the CPUs that go with each GPU, or where a process really runs."""

from __future__ import annotations

import argparse

from .options import add_which_gpus, all_modes, cores, cpu_list, process_id


def configure(parser: argparse.ArgumentParser) -> None:
    """Its options and its handler."""
    parser.description = "The CPUs that a claim of each GPU is bound to; or where a process really runs."
    parser.epilog = (
        "examples:\n  safe-gpu affinity --mode exclusive\n  safe-gpu affinity --of $(pgrep -n python) --gpu 3"
    )
    add = parser.add_argument
    add("--mode", choices=all_modes(), default="node", metavar="M", help=f"one of {', '.join(all_modes())}")
    add("--scope", choices=("node", "socket"), default="node", help="for the modes of gpu_affinity")
    add(
        "--multithreading",
        choices=("all_logical", "single_logical"),
        default="all_logical",
        help="for the modes of gpu_affinity",
    )
    add("--no-balanced", action="store_true", help="let the GPUs' shares differ in size")
    add("--min-cores", type=cores, default=1, metavar="N", help="at least N physical cores for each GPU")
    add("--max-cores", type=cores, default=None, metavar="N", help="at most N physical cores for each GPU")
    add(
        "--allowed",
        type=cpu_list,
        default=None,
        metavar="CPULIST",
        help="plan for these CPUs only, such as 0-15,128-143",
    )
    add("--of", type=process_id, default=None, metavar="PID", help="report where this process runs instead")
    add_which_gpus(
        parser,
        gpu="these GPUs only, as nvidia-smi shows them: 0,3; with --of: the process's GPUs",
        ordinal="the same for one GPU as CUDA numbers it after CUDA_VISIBLE_DEVICES (with --of: that of the process)",
    )
    add("--json", action="store_true", help="for programs")
    parser.set_defaults(handler=_affinity)


def _affinity(options: argparse.Namespace) -> int:
    from .affinity_text import affinity_text, placement_text

    if options.of is not None:
        print(placement_text(options.of, gpus=options.gpu, ordinal=options.ordinal, as_json=options.json))
        return 0
    text = affinity_text(
        mode=options.mode,
        scope=options.scope,
        multithreading=options.multithreading,
        balanced=not options.no_balanced,
        min_physical_cores=options.min_cores,
        max_physical_cores=options.max_cores,
        allowed=options.allowed,
        gpus=options.gpu,
        ordinal=options.ordinal,
        as_json=options.json,
    )
    print(text)
    return 0
