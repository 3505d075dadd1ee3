"""The command ``safe-gpu``: arguments in, one thin handler a command, an exit code out."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from . import __version__
from .arguments import (
    Parser,
    add_command,
    add_request,
    columns,
    cores,
    cpu_list,
    gpu_list,
    process_id,
    timeout_of,
)
from .errors import (
    GPUAffinityError,
    LockTimeout,
    NoDriverError,
    NotEnoughGpusError,
    SafeGpuError,
    StateDirError,
    UnsatisfiableRequestError,
)
from .launch import CommandError, become, find_command
from .streams import drop_output, open_standard_streams, say

__all__ = ["main"]

# sysexits.h, where it has a fitting one.
EX_NO_DRIVER = 69
EX_SOFTWARE = 70
EX_STATE_DIR = 73
EX_OUTPUT = 74
EX_TRY_AGAIN = 75
EX_NEVER = 78
EX_INTERRUPTED = 130
EX_BROKEN_PIPE = 141

_EXIT_CODES: tuple[tuple[type[SafeGpuError], int], ...] = (
    (NoDriverError, EX_NO_DRIVER),
    (StateDirError, EX_STATE_DIR),
    (NotEnoughGpusError, EX_TRY_AGAIN),
    (LockTimeout, EX_TRY_AGAIN),
    (UnsatisfiableRequestError, EX_NEVER),
    (GPUAffinityError, EX_NEVER),
    (SafeGpuError, EX_SOFTWARE),
)

_CLAIM_MODES = ("none", "node", "socket", "exclusive", "core-complex")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; ``run`` and ``bind`` do not return but become their command."""
    gc.set_threshold(50_000)  # imports make no garbage, and looking for it among them takes 2 ms
    open_standard_streams()
    try:
        try:
            options = _parse(list(sys.argv[1:] if argv is None else argv))
            code = options.handler(options)
        except SystemExit as leaving:  # --help, --version, and usage errors
            code = leaving.code
        sys.stdout.flush()
        return int(code)
    except CommandError as err:
        say(str(err))
        return err.code
    except SafeGpuError as err:
        say(str(err))
        return next(code for kind, code in _EXIT_CODES if isinstance(err, kind))
    except KeyboardInterrupt:
        return EX_INTERRUPTED
    except BrokenPipeError:  # whoever read our output has seen enough
        drop_output()
        return EX_BROKEN_PIPE
    except OSError as err:
        drop_output()
        say(str(err))
        return EX_OUTPUT


def _parse(arguments: list[str]) -> argparse.Namespace:
    if arguments and arguments[0] in _COMMANDS:
        return _parse_command(
            *arguments
        )  # with its own parser alone: one of all commands costs time that `run` has not
    parser = Parser(
        prog="safe-gpu",
        description="Claim GPUs on a shared host without collisions.",
        epilog="""examples:
  safe-gpu status                                which GPUs are free, who waits
  safe-gpu run -- python train.py                wait for a GPU, and run there
  safe-gpu run -n 2 --timeout 2h -- ./simulate  two GPUs, within two hours

environment: SAFE_GPU_DIR, SAFE_GPU_DRIVER, SAFE_GPU_TIMEOUT, SAFE_GPU_NB_GPUS,
SAFE_GPU_FENCE; CUDA_VISIBLE_DEVICES limits which GPUs are chosen from""",
    )
    parser.add_argument("--version", action="version", version=f"safe-gpu {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, prog=parser.prog)
    for name, (summary, _) in _COMMANDS.items():
        commands.add_parser(name, help=summary)
    if unknown := [word for word in arguments if word.startswith("-") and word not in ("-h", "--help", "--version")]:
        parser.error(f"unrecognized argument: {unknown[0]}")
    return parser.parse_args(arguments)


def _parse_command(name: str, *arguments: str) -> argparse.Namespace:
    parser = Parser(prog=f"safe-gpu {name}")
    _COMMANDS[name][1](parser)
    if name not in ("run", "bind"):
        return parser.parse_args(arguments)
    before, command = _split(list(arguments))
    options = parser.parse_args(before)
    options.command += command
    if options.command[:1] == ["--"]:
        del options.command[0]
    if not options.command:
        parser.error("a command is missing: put it after --")
    return options


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Options before the first ``--``, and the command after it."""
    if "--" not in arguments:
        return arguments, []
    cut = arguments.index("--")
    return arguments[:cut], arguments[cut:]


# run


def _configure_run(parser: argparse.ArgumentParser) -> None:
    parser.description = "Wait for GPUs, claim them, and become the command, which holds them to its end."
    parser.epilog = """examples:
  safe-gpu run -- python train.py
  safe-gpu run -n 2 --min-memory 20GiB --timeout 2h -- ./simulate --steps 9
  safe-gpu run -n 8 -- mpirun -np 8 python train.py     each rank may claim one

The GPUs are held until the command and whatever inherited its descriptors have
ended. In Python, claim_gpus() does more: it shows others a context at once.

exit codes: the command's; 2 usage, 69 no driver, 73 state directory unusable,
75 not free in time, 78 never on this host, 126 the command cannot be run,
127 it is not found, 130 interrupted"""
    add_request(parser)
    parser.add_argument("--affinity", choices=_CLAIM_MODES, help="CPUs to bind to (default node)")
    parser.add_argument("--memory", choices=("preferred", "bind"), help="NUMA memory policy next to the GPUs")
    parser.add_argument(
        "--visible-as", choices=("index", "uuid"), default="index", help="how CUDA_VISIBLE_DEVICES names them"
    )
    add_command(parser)
    parser.set_defaults(handler=_run)


def _run(options: argparse.Namespace) -> int:
    path = find_command(options.command[0])
    from .coordination.signals import tidy_on_signals
    from .owner import GPUOwner
    from .placeholders import NoPlaceholder
    from .waitline import WaitLine

    choice: dict[str, Any] = {}
    if options.affinity is not None:
        choice["affinity"] = None if options.affinity == "none" else options.affinity
    try:
        with tidy_on_signals(), WaitLine(sys.stderr) as line:
            owner = GPUOwner(
                options.nb_gpus,
                NoPlaceholder(),
                timeout=timeout_of(options),
                memory=options.memory,
                min_memory=options.min_memory,
                model=options.model,
                exclude=options.exclude,
                only=options.only,
                visible_as=options.visible_as,
                delegate=True,
                _on_wait=line.show,
                _command=" ".join(options.command)[:200],
                **choice,
            )
    except UnsatisfiableRequestError as err:
        if options.nb_gpus != "job" or err.value != 0:
            raise
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the job asked for no GPU, so it shall see none
        become(path, options.command)
    try:
        owner.keep_across_exec()
        become(path, options.command)
    finally:
        owner.release_gpus()


# bind


def _configure_bind(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Bind CPUs (and memory) next to the visible GPUs, then become the command: for\n"
        "one rank under a launcher. Of several visible GPUs, a rank binds next to the one\n"
        "with its local rank. Nothing is claimed."
    )
    parser.epilog = """examples:
  torchrun --no-python --nproc-per-node 8 safe-gpu bind -- python train.py
  mpirun -np 8 safe-gpu bind --memory preferred -- ./simulate"""
    parser.add_argument(
        "--mode", choices=_all_modes(), default="node", metavar="M", help="affinity mode (default node)"
    )
    parser.add_argument("--memory", choices=("preferred", "bind"), help="NUMA memory policy next to the GPUs")
    parser.add_argument("--gpu", type=gpu_list, default=None, metavar="L", help="these GPUs instead: 0,3")
    add_command(parser)
    parser.set_defaults(handler=_bind)


def _all_modes() -> tuple[str, ...]:
    from .affinity.options import MODES

    return MODES


def _bind(options: argparse.Namespace) -> int:
    path = find_command(options.command[0])
    from .locality import bind_rank

    report = bind_rank(options.gpu, mode=options.mode, memory=options.memory)
    if report.notes:
        say(str(report))
    become(path, options.command)


# status, wait, doctor


def _configure_status(parser: argparse.ArgumentParser) -> None:
    parser.description = "Which GPUs are free, who has the others, and who waits."
    parser.add_argument("--json", action="store_true", help="for programs; sizes in bytes, times in Unix seconds")
    parser.add_argument("--watch", action="store_true", help="redraw every two seconds until interrupted")
    parser.set_defaults(handler=_status)


def _status(options: argparse.Namespace) -> int:
    from .status import gather
    from .status_view import render

    while True:
        status = gather()
        if options.json:
            import json

            text = json.dumps(status.to_dict(), indent=None if options.watch else 2)
        else:
            text = render(status, width=columns(), color=_color(sys.stdout))
        if options.watch and not options.json and sys.stdout.isatty():
            text = f"\x1b[H\x1b[2J{text}"
        print(text, flush=True)
        if not options.watch:
            return EX_STATE_DIR if status.warnings else 0
        import time

        time.sleep(2.0)


def _color(stream: object) -> bool:
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"  # type: ignore[attr-defined]


def _configure_wait(parser: argparse.ArgumentParser) -> None:
    parser.description = "Wait until so many GPUs could be claimed, and claim nothing; exit code 0 then."
    parser.epilog = "example:\n  safe-gpu wait -n 2 --timeout 1h && notify-send 'two GPUs are free'"
    add_request(parser)
    parser.set_defaults(handler=_wait)


def _wait(options: argparse.Namespace) -> int:
    from .coordination.signals import tidy_on_signals
    from .inquiry import wait_for_gpus
    from .waitline import WaitLine

    with tidy_on_signals(), WaitLine(sys.stderr) as line:
        wait_for_gpus(
            options.nb_gpus,
            timeout=timeout_of(options),
            min_memory=options.min_memory,
            model=options.model,
            exclude=options.exclude,
            only=options.only,
            on_wait=line.show,
        )
    return 0


def _configure_doctor(parser: argparse.ArgumentParser) -> None:
    parser.description = "Check this host and this environment, each finding with its fix."
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(handler=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from . import doctor

    checks = doctor.run_checks()
    if options.json:
        import json

        print(json.dumps(doctor.to_dict(checks), indent=2))
    else:
        print(doctor.render(checks, color=_color(sys.stdout), width=columns()))
    return doctor.exit_code(checks)


# affinity


def _configure_affinity(parser: argparse.ArgumentParser) -> None:
    parser.description = "The CPUs that a claim of each GPU is bound to; or where a process really runs."
    parser.epilog = "examples:\n  safe-gpu affinity --mode exclusive\n  safe-gpu affinity --of $(pgrep -n python)"
    add = parser.add_argument
    add("--mode", choices=_all_modes(), default="node", metavar="M", help=f"one of {', '.join(_all_modes())}")
    add("--scope", choices=("node", "socket"), default="node", help="for the modes of gpu_affinity")
    add("--multithreading", choices=("all_logical", "single_logical"), default="all_logical", help="likewise")
    add("--no-balanced", action="store_true", help="let the GPUs' shares differ in size")
    add("--min-cores", type=cores, default=1, metavar="N", help="at least so many physical cores for each GPU")
    add("--max-cores", type=cores, default=None, metavar="N", help="at most so many")
    add(
        "--allowed",
        type=cpu_list,
        default=None,
        metavar="CPULIST",
        help="plan for these CPUs only, such as 0-15,128-143",
    )
    add("--of", type=process_id, default=None, metavar="PID", help="report where this process runs instead")
    add("--json", action="store_true", help="for programs")
    parser.set_defaults(handler=_affinity)


def _affinity(options: argparse.Namespace) -> int:
    from .locality import affinity_text, placement_text

    if options.of is not None:
        print(placement_text(options.of, as_json=options.json))
        return 0
    text = affinity_text(
        mode=options.mode,
        scope=options.scope,
        multithreading=options.multithreading,
        balanced=not options.no_balanced,
        min_physical_cores=options.min_cores,
        max_physical_cores=options.max_cores,
        allowed=options.allowed,
        as_json=options.json,
    )
    print(text)
    return 0


# demo


def _configure_demo(parser: argparse.ArgumentParser) -> None:
    parser.description = "A race for GPUs that anyone can watch: on real GPUs, or simulated where none is."
    parser.set_defaults(handler=_demo)


def _demo(options: argparse.Namespace) -> int:
    from .demo import run

    return run(stream=sys.stdout)


_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "run": ("wait for GPUs, claim them, become a command", _configure_run),
    "bind": ("bind CPUs next to the visible GPUs, become a command", _configure_bind),
    "status": ("which GPUs are free, who has the others, who waits", _configure_status),
    "wait": ("wait until GPUs could be claimed", _configure_wait),
    "doctor": ("check this host, with fixes", _configure_doctor),
    "affinity": ("which CPUs go with which GPU", _configure_affinity),
    "demo": ("watch a race for GPUs", _configure_demo),
}
