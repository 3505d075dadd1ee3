"""The command ``safe-gpu``: arguments in, one thin handler a command, an exit code out."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from . import __version__
from .errors import (
    LockTimeout,
    NoDriverError,
    NotEnoughGpusError,
    SafeGpuError,
    StateDirError,
    UnsatisfiableRequestError,
)

__all__ = ["main"]

# sysexits.h, where it has a fitting one.
EX_USAGE = 2
EX_SOFTWARE = 70
EX_NO_DRIVER = 69
EX_STATE_DIR = 73
EX_TRY_AGAIN = 75
EX_NEVER = 78
EX_CANNOT_RUN = 126
EX_NOT_FOUND = 127
EX_INTERRUPTED = 130

_EXIT_CODES: tuple[tuple[type[SafeGpuError], int], ...] = (
    (NoDriverError, EX_NO_DRIVER),
    (StateDirError, EX_STATE_DIR),
    (NotEnoughGpusError, EX_TRY_AGAIN),
    (LockTimeout, EX_TRY_AGAIN),
    (UnsatisfiableRequestError, EX_NEVER),
    (SafeGpuError, EX_SOFTWARE),
)

_CLAIM_MODES = ("none", "node", "socket", "exclusive", "core-complex")


class _Parser(argparse.ArgumentParser):
    """argparse, with usage errors of one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EX_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; ``run`` and ``bind`` do not return but become their command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parse(arguments)
    try:
        code: int = options.handler(options)
        sys.stdout.flush()
        return code
    except SafeGpuError as err:
        print(f"safe-gpu: {err}", file=sys.stderr)
        return next(code for kind, code in _EXIT_CODES if isinstance(err, kind))
    except KeyboardInterrupt:
        return EX_INTERRUPTED
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + 13


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="safe-gpu",
        description="Claim GPUs on a shared host without collisions.",
        epilog="environment: SAFE_GPU_DIR, SAFE_GPU_DRIVER, SAFE_GPU_TIMEOUT, SAFE_GPU_NB_GPUS, SAFE_GPU_FENCE",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"safe-gpu {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    named = next((word for word in arguments if not word.startswith("-")), None)
    for name, (summary, configure) in _COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        if name == named:  # the options of the others cost time that `run` does not have
            configure(command)
    before, command_line = _split(arguments) if named in ("run", "bind") else (arguments, [])
    options = parser.parse_args(before)
    if named in ("run", "bind"):
        options.command = options.command + command_line
        if options.command[:1] == ["--"]:
            del options.command[0]
        if not options.command:
            options.parser.error("a command is missing: put it after --")
    return options


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Options before the first ``--``, and the command after it."""
    if "--" not in arguments:
        return arguments, []
    cut = arguments.index("--")
    return arguments[:cut], arguments[cut:]


# Values


def _checked_by(parse: Callable[[str], object]) -> Callable[[str], object]:
    """An argparse type whose error is our own sentence; the text itself is kept where the parser returns it."""

    def check(text: str) -> object:
        try:
            return parse(text)
        except SafeGpuError as err:
            raise argparse.ArgumentTypeError(str(err)) from err

    return check


def _duration(text: str) -> float | None:
    from .durations import parse_duration

    return parse_duration(text)


def _count(text: str) -> int | str:
    if text == "job":
        return text
    from .request import parse_request

    try:
        return parse_request(int(text)).nb_gpus
    except ValueError:
        raise UnsatisfiableRequestError(f"{text!r} is not a number of GPUs: a whole number from 1 up, or job") from None


def _memory_size(text: str) -> int:
    from .request import parse_bytes

    return parse_bytes(text, name="--min-memory")


def _gpu_list(text: str) -> tuple[str, ...]:
    from .request import parse_request

    return parse_request(1, only=text).only


def _add_request(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-n", "--nb-gpus", type=_checked_by(_count), default=1, metavar="N", help="how many GPUs, or: job (default 1)")
    add(
        "--timeout",
        type=_checked_by(_duration),
        default=argparse.SUPPRESS,
        metavar="D",
        help="how long to wait: 90, 90s, 15m, 2h, inf; 0 does not wait (default: SAFE_GPU_TIMEOUT, else inf)",
    )
    add("--min-memory", type=_checked_by(_memory_size), metavar="S", help="free memory on each GPU, such as 20GiB")
    add("--model", metavar="P", help="pattern of the GPU's name, such as A100 or '*H100*'")
    add("--exclude", type=_checked_by(_gpu_list), default=(), metavar="L", help="not these: 0,3 or UUIDs")
    add("--only", type=_checked_by(_gpu_list), default=(), metavar="L", help="only these: 0,3 or UUIDs")


def _timeout_of(options: argparse.Namespace) -> float | None:
    if hasattr(options, "timeout"):
        timeout: float | None = options.timeout
        return timeout
    from .durations import parse_duration

    text = os.environ.get("SAFE_GPU_TIMEOUT")
    return parse_duration(text, "SAFE_GPU_TIMEOUT") if text else None


# run


def _configure_run(parser: argparse.ArgumentParser) -> None:
    parser.description = "Wait for GPUs, claim them, and become the command, which holds them until it ends."
    parser.epilog = """examples:
  safe-gpu run -- python train.py
  safe-gpu run -n 2 --min-memory 20GiB --timeout 2h -- torchrun --nproc-per-node 2 train.py
  safe-gpu run -n 8 -- mpirun -np 8 python train.py      each rank may claim one of the eight

exit codes: those of the command; and 2 usage, 69 no driver, 73 state directory, 75 not free in time,
78 never on this host, 126 and 127 the command cannot be run or found, 130 interrupted"""
    _add_request(parser)
    parser.add_argument("--affinity", choices=_CLAIM_MODES, help="CPUs to bind to (default node)")
    parser.add_argument("--memory", choices=("preferred", "bind"), help="NUMA memory policy next to the GPUs")
    parser.add_argument(
        "--visible-as", choices=("index", "uuid"), default="index", help="how CUDA_VISIBLE_DEVICES names them"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD", help="the command and its arguments")
    parser.set_defaults(handler=_run, parser=parser)


def _run(options: argparse.Namespace) -> int:
    path = _find_command(options.command)
    if isinstance(path, int):
        return path
    from .owner import GPUOwner
    from .placeholders import NoPlaceholder
    from .waitline import WaitLine

    choice: dict[str, Any] = {}
    if options.affinity is not None:
        choice["affinity"] = None if options.affinity == "none" else options.affinity
    with WaitLine(sys.stderr) as line:
        owner = GPUOwner(
            options.nb_gpus,
            NoPlaceholder(),
            timeout=_timeout_of(options),
            memory=options.memory,
            min_memory=options.min_memory,
            model=options.model,
            exclude=options.exclude,
            only=options.only,
            visible_as=options.visible_as,
            delegate=True,
            _on_wait=line.show,
            _command=" ".join(options.command),
            **choice,
        )
    try:
        owner.keep_across_exec()
        return _become(path, options.command)
    finally:
        owner.release_gpus()


def _find_command(command: Sequence[str]) -> str | int:
    """The command's file, or the exit code of its absence: 127, or 126 where it is there and cannot be run."""
    name = command[0]
    places = [""] if "/" in name else os.environ.get("PATH", os.defpath).split(os.pathsep)
    closed = False
    for place in places:
        path = os.path.join(place or ".", name) if "/" not in name else name
        if os.path.isfile(path):
            if os.access(path, os.X_OK):
                return path
            closed = True
    if closed or ("/" in name and os.path.isdir(name)):
        print(f"safe-gpu: {name} cannot be run: it is not an executable file", file=sys.stderr)
        return EX_CANNOT_RUN
    print(f"safe-gpu: {name}: command not found", file=sys.stderr)
    return EX_NOT_FOUND


def _become(path: str, command: Sequence[str]) -> int:
    """Turn into the command; returns only where that failed."""
    import errno
    import signal

    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would hand that on
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(path, list(command))
    except OSError as err:
        if err.errno == errno.ENOEXEC:  # a script without #!: what a shell would do
            os.execv("/bin/sh", ["sh", path, *command[1:]])
        print(f"safe-gpu: {command[0]} cannot be run: {err.strerror}", file=sys.stderr)
        return EX_NOT_FOUND if err.errno == errno.ENOENT else EX_CANNOT_RUN


# bind


def _configure_bind(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Bind CPUs (and memory) next to the visible GPUs, then become the command: for one rank under a launcher.\n"
        "Of several visible GPUs, a rank binds next to the one with its local rank. Nothing is claimed."
    )
    parser.epilog = """examples:
  torchrun --no-python --nproc-per-node 8 safe-gpu bind --mode exclusive -- python train.py
  mpirun -np 8 safe-gpu bind --memory preferred -- ./simulate"""
    parser.add_argument(
        "--mode", choices=_all_modes(), default="node", metavar="M", help="affinity mode (default node)"
    )
    parser.add_argument("--memory", choices=("preferred", "bind"), help="NUMA memory policy next to the GPUs")
    parser.add_argument("--gpu", type=_checked_by(_gpu_list), default=None, metavar="L", help="these GPUs instead: 0,3")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD", help="the command and its arguments")
    parser.set_defaults(handler=_bind, parser=parser)


def _all_modes() -> tuple[str, ...]:
    from .affinity.options import MODES

    return MODES


def _bind(options: argparse.Namespace) -> int:
    path = _find_command(options.command)
    if isinstance(path, int):
        return path
    from .locality import bind_rank

    report = bind_rank(options.gpu, mode=options.mode, memory=options.memory)
    if report.notes:
        print(f"safe-gpu: {report}", file=sys.stderr)
    return _become(path, options.command)


# status, wait, doctor


def _configure_status(parser: argparse.ArgumentParser) -> None:
    parser.description = "Which GPUs are free, who has the others, and who waits."
    parser.add_argument("--json", action="store_true", help="for programs; sizes in bytes, times in Unix seconds")
    parser.add_argument("--watch", action="store_true", help="redraw every two seconds until interrupted")
    parser.set_defaults(handler=_status)


def _status(options: argparse.Namespace) -> int:
    from .status import gather, render

    while True:
        status = gather()
        if options.json:
            import json

            text = json.dumps(status.to_dict(), indent=None if options.watch else 2)
        else:
            text = render(status, width=_width(), color=_color(sys.stdout))
        if options.watch and not options.json and sys.stdout.isatty():
            text = f"\x1b[H\x1b[2J{text}"
        print(text, flush=True)
        if not options.watch:
            return 0
        import time

        time.sleep(2.0)


def _width() -> int:
    import shutil

    return shutil.get_terminal_size().columns


def _color(stream: object) -> bool:
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"  # type: ignore[attr-defined]


def _configure_wait(parser: argparse.ArgumentParser) -> None:
    parser.description = "Wait until so many GPUs could be claimed; claims nothing. Exit code 0 when they could."
    parser.epilog = "example:\n  safe-gpu wait -n 2 --timeout 1h && notify-send 'two GPUs are free'"
    _add_request(parser)
    parser.set_defaults(handler=_wait)


def _wait(options: argparse.Namespace) -> int:
    from .owner import wait_for_gpus
    from .waitline import WaitLine

    with WaitLine(sys.stderr) as line:
        wait_for_gpus(
            options.nb_gpus,
            timeout=_timeout_of(options),
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
        print(doctor.render(checks, color=_color(sys.stdout), width=_width()))
    return doctor.exit_code(checks)


# affinity


def _configure_affinity(parser: argparse.ArgumentParser) -> None:
    parser.description = "The CPUs that a claim of each GPU would be bound to; or where a process really runs."
    parser.epilog = "examples:\n  safe-gpu affinity --mode exclusive\n  safe-gpu affinity --of $(pgrep -n python)"
    add = parser.add_argument
    add("--mode", choices=_all_modes(), default="node", metavar="M", help=f"one of {', '.join(_all_modes())}")
    add("--scope", choices=("node", "socket"), default="node", help="for the modes of gpu_affinity")
    add("--multithreading", choices=("all_logical", "single_logical"), default="all_logical", help="likewise")
    add("--no-balanced", action="store_true", help="let the GPUs' shares differ in size")
    add("--min-cores", type=int, default=1, metavar="N", help="at least so many physical cores for each GPU")
    add("--max-cores", type=int, default=None, metavar="N", help="at most so many")
    add("--allowed", default=None, metavar="CPULIST", help="plan for these CPUs only, such as 0-15,128-143")
    add("--of", type=_pid, default=None, metavar="PID", help="report where this process runs instead")
    add("--json", action="store_true", help="for programs")
    parser.set_defaults(handler=_affinity)


def _pid(text: str) -> int:
    if not text.isdecimal() or not os.path.exists(f"/proc/{int(text)}"):
        raise argparse.ArgumentTypeError(f"there is no process {text}")
    return int(text)


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
    parser.description = "A race for GPUs that anyone can watch: on real GPUs where there are some, else simulated."
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
