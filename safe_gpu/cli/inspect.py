"""The commands that inspect this host: affinity, doctor, demo."""

import argparse
import os
import sys

from .arguments import add_which_gpus, is_number, whole_number
from .output import columns, in_color, print_json, print_lines, say


def configure_affinity(parser: argparse.ArgumentParser) -> None:
    """Set its options."""
    from ..affinity.planner import MODES, MULTITHREADING, SCOPES, parse_cpus

    parser.description = "Show the CPUs that a claim of each GPU is bound to, or where a process runs."
    parser.epilog = """examples:
  safe-gpu affinity --mode exclusive
  safe-gpu affinity --of $(pgrep -n python) --gpu 3"""
    add = parser.add_argument
    add("--mode", choices=MODES, default="node", metavar="M", help=f"one of {', '.join(MODES)}")
    add("--scope", choices=SCOPES, default="node", help="for the modes of gpu_affinity")
    add("--multithreading", choices=MULTITHREADING, default=MULTITHREADING[0], help="for the modes of gpu_affinity")
    add("--no-balanced", dest="balanced", action="store_false", help="let the GPUs' shares differ in size")
    cores = whole_number("cores", 1)
    at_least = "at least N physical cores for each GPU"
    add("--min-cores", dest="min_physical_cores", type=cores, default=1, metavar="N", help=at_least)
    at_most = "at most N physical cores for each GPU"
    add("--max-cores", dest="max_physical_cores", type=cores, metavar="N", help=at_most)
    allowed = "as if this process might use these CPUs only, such as 0-15,128-143"
    add("--allowed", type=parse_cpus, metavar="CPULIST", help=allowed)
    add("--of", type=process_id, metavar="PID", help="report where this process runs instead")
    add_which_gpus(
        parser,
        gpu="these GPUs only, as nvidia-smi shows them: 0,3; with --of: the process's GPUs",
        ordinal="the same for one GPU as CUDA numbers it after CUDA_VISIBLE_DEVICES (with --of: that of the process)",
    )
    add("--json", action="store_true", help="for programs")


def process_id(text: str) -> int:
    """Return the number of a process that can be seen from here."""
    if not is_number(text) or not os.path.exists(f"/proc/{int(text)}"):
        raise ValueError(f"there is no process {text!r}")
    return int(text)


def do_affinity(options: argparse.Namespace) -> int:
    """Carry out the command; return its exit code."""
    if options.of is not None:
        _print_placement(options)
    else:
        _print_shares(options)
    return 0


def _print_placement(options: argparse.Namespace) -> None:
    """Print where a process runs."""
    from ..affinity.placement import placement

    report = placement(options.of, gpus=options.gpu, ordinal=options.ordinal)
    if options.json:
        print_json(report.as_dict())
    else:
        print_lines(str(report))


def _print_shares(options: argparse.Namespace) -> None:
    """Print which CPUs a claim of each GPU alone is bound to."""
    from ..affinity.binding import claim_shares, usable_cpus
    from ..affinity.plan_text import affinity_json, affinity_table, node_table
    from ..affinity.planner import AffinityOptions
    from ..affinity.resolve_gpus import named
    from ..drivers import opened_driver
    from ..topology.host import read_topology

    modes = AffinityOptions(**{name: getattr(options, name) for name in AffinityOptions.__match_args__})
    with opened_driver() as driver:
        topology = read_topology(None, driver)
        if options.allowed is None:
            mask = usable_cpus(topology)
        else:
            mask = options.allowed & topology.cpus
        shown = [gpu.index for gpu in topology.gpus]
        if options.gpu is not None or options.ordinal is not None:
            shown = [gpu.index for gpu in named(options.gpu, options.ordinal, driver.snapshot(), os.environ).gpus]
    shares = {}
    for gpu in topology.gpus:
        if gpu.index in shown:
            alone = claim_shares(topology, modes, [gpu.index], mask)
            shares[gpu] = alone.shares[gpu.index]
    if options.json:
        print_json(affinity_json(topology, modes, shares))
        return
    print_lines(affinity_table(topology, modes, shares, closed=topology.cpus - mask))
    print_lines(f"\n{node_table(topology)}")


def configure_doctor(parser: argparse.ArgumentParser) -> None:
    """Set its options."""
    parser.description = "Check this host and this environment; print what is wrong, each with its fix."
    parser.add_argument("-v", "--verbose", action="store_true", help="list the checks that passed or were skipped too")
    parser.add_argument("--json", action="store_true", help="for programs")


def do_doctor(options: argparse.Namespace) -> int:
    """Carry out the command; return its exit code."""
    from .. import doctor

    checks = doctor.run_checks(say)
    if options.json:
        print_json(doctor.to_dict(checks))
    else:
        color = in_color(sys.stdout)
        print_lines(doctor.render_checks(checks, color=color, width=columns(), verbose=options.verbose))
    return doctor.exit_code(checks)


def configure_demo(parser: argparse.ArgumentParser) -> None:
    """Describe it; it takes no options."""
    parser.description = "Race processes for GPUs: real ones that are free, or simulated ones."


def do_demo(options: argparse.Namespace) -> int:
    """Carry out the command; return its exit code."""
    from ..demo import run

    return run(stream=sys.stdout, color=in_color(sys.stdout))
