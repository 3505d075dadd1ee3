"""The command ``safe-gpu``: arguments in, the command's own module, an exit code out."""

import argparse
import gc
import os
import sys
from collections.abc import Sequence

from .. import __version__, errors
from ..errors import SafeGpuError
from ..wording.style import on_command_line
from .arguments import Parser
from .mistakes import unknown_command, unknown_option
from .output import CommandError, drop, drop_errors, open_standard_streams, say, why_unwritten

# sysexits.h, where it has a fitting one.
EX_SOME_HOSTS = 1
EX_NO_HOST = 68
EX_NO_DRIVER = 69
EX_SOFTWARE = 70
EX_STATE_DIR = 73
EX_OUTPUT = 74
EX_TRY_AGAIN = 75
EX_NEVER = 78
EX_CANNOT_RUN = 126
EX_INTERRUPTED = 130
EX_BROKEN_PIPE = 141

# The first that fits counts.
_EXIT_CODES: tuple[tuple[type[SafeGpuError], int], ...] = (
    (errors.MissingPackageError, EX_SOFTWARE),  # also where nothing but the package of the driver is missing
    (errors.NoDriverError, EX_NO_DRIVER),
    (errors.StateDirError, EX_STATE_DIR),
    (errors.NotEnoughGpusError, EX_TRY_AGAIN),
    (errors.LockTimeout, EX_TRY_AGAIN),
    (errors.UnsatisfiableRequestError, EX_NEVER),
    (errors.GPUAffinityError, EX_NEVER),
    (errors.PolicyError, EX_NEVER),
)

# The module of each has ``configure_NAME(parser)``, which sets the options, and ``do_NAME(options)``.
COMMANDS = {
    "run": "wait for GPUs, claim them, become a command",
    "bind": "bind CPUs next to the visible GPUs, become a command",
    "status": "which GPUs are free, who has the others, who waits",
    "history": "who used which GPUs, and for how long",
    "wait": "wait until GPUs could be claimed",
    "drain": "allow no new claims on GPUs",
    "resume": "allow new claims on GPUs again",
    "doctor": "check this host: what is wrong, and how to fix it",
    "setup": "for root: make a state directory that users cannot harm",
    "policy": "which limits of this host apply to you, or to others",
    "affinity": "which CPUs go with which GPU",
    "demo": "watch a race for GPUs",
    "completion": "print a completion script for bash, zsh or fish",
}


RUNNERS = ("run", "bind")
"""Those that take a command of the user's own and become it."""

_COMMAND_LIST = "\n".join(["commands:", *(f"  {name:<12} {summary}" for name, summary in COMMANDS.items())])

# The module of each command that is not ``NAME.py``.
_MODULES = {"run": "job", "bind": "job", "wait": "job", "affinity": "inspect", "doctor": "inspect", "demo": "inspect"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; ``run`` and ``bind`` do not return but become their command."""
    gc.set_threshold(50_000)  # imports make no garbage, and looking for it among them takes 2 ms
    open_standard_streams()
    if argv is None:
        argv = _own_arguments()
    options = None
    try:
        try:
            with on_command_line():
                options = parse(list(argv))
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
        return _for_scheduler(_exit_code(err), options)
    except KeyboardInterrupt:
        if getattr(options, "watch", False):
            return 0
        return EX_INTERRUPTED
    except BrokenPipeError:  # the reader of the output has closed it
        drop(sys.stdout)
        return EX_BROKEN_PIPE
    except OSError as err:
        say(why_unwritten(err))
        drop(sys.stdout)
        return EX_OUTPUT
    finally:
        drop_errors()


def _own_arguments() -> list[str]:
    """Return the arguments of this program, as texts that become the same bytes again.

    Python decodes them by the C library. In EUC-JP and some other locales that gives characters which Python's codec
    cannot encode, or encodes otherwise.
    """
    arguments = sys.argv[1:]
    if sys.getfilesystemencoding() == "utf-8":
        return arguments
    try:
        with open("/proc/self/cmdline", "rb") as file:
            given = file.read().split(b"\0")[:-1]
    except OSError:
        return arguments
    return [_decoded(argument) for argument in given[len(given) - len(arguments) :]]


def _decoded(argument: bytes) -> str:
    text = os.fsdecode(argument)
    if os.fsencode(text) == argument:
        return text
    return argument.decode("ascii", "surrogateescape")


def _exit_code(err: SafeGpuError) -> int:
    for kind, code in _EXIT_CODES:
        if isinstance(err, kind):
            return code
    return EX_SOFTWARE


def _for_scheduler(code: int, options: argparse.Namespace | None) -> int:
    """Return the exit code, or the one of ``run --refused-exit`` or root's file in its place where the host is to
    blame."""
    if code not in (EX_NO_DRIVER, EX_SOFTWARE, EX_STATE_DIR):
        return code
    if options is None or not hasattr(options, "refused_exit"):
        return code
    if options.refused_exit:
        return int(options.refused_exit)
    return _refused_exit_of_host() or code


def _refused_exit_of_host() -> int:
    """Return the exit code that root's file asks for; 0 where it asks for none, or cannot be read."""
    from ..settings.variables import host_setting

    try:
        return int(host_setting("refused_exit", "", os.environ) or 0)
    except errors.PolicyError:
        return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse what was typed into options with a ``handler`` that takes them.

    Raises:
        SystemExit: a usage error, or help or the version was printed.
    """
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [arguments[1], "--help"]
    first, *rest = arguments or ["--help"]
    if first in COMMANDS:
        return _parse_command(first, rest)
    if first in ("-V", "--version"):
        print(f"safe-gpu {__version__}")
        raise SystemExit(0)
    parser = top_parser()
    if first not in ("-h", "--help", "help"):
        parser.error(_mistake(first, " ".join(rest)))
    parser.print_help()
    raise SystemExit(0)


def _mistake(word: str, after: str) -> str:
    """Return the usage error for a first word that is no command, and what follows it."""
    if not word.startswith("-"):
        return unknown_command(word, [*COMMANDS, "help"])
    options_of = {name: parser_of(name).names() for name in COMMANDS}
    return unknown_option(word, options_of, after)


def top_parser() -> Parser:
    """Return the parser of what stands before the name of a command."""
    parser = Parser(
        prog="safe-gpu",
        description=f"Claim GPUs on a shared host without collisions.\n\n{_COMMAND_LIST}",
        usage="safe-gpu COMMAND [options]",
        epilog="""examples:
  safe-gpu status                              which GPUs are free, who waits
  safe-gpu run -- python train.py              wait for a GPU, and run there
  safe-gpu run -n 2 --timeout 2h -- ./train    two GPUs, within two hours
  safe-gpu help run                            the options of a command

environment: SAFE_GPU_DIR, SAFE_GPU_DRIVER, SAFE_GPU_TIMEOUT, SAFE_GPU_NB_GPUS,
SAFE_GPU_FENCE; CUDA_VISIBLE_DEVICES limits which GPUs are chosen from""",
    )
    parser.add_argument("-V", "--version", action="store_true", help="show the version and exit")
    return parser


def parser_of(name: str) -> Parser:
    """Return the parser of one command: parsers of all would cost ``run`` time."""
    from importlib import import_module

    parser = Parser(prog=f"safe-gpu {name}")
    module = import_module("." + _MODULES.get(name, name), __package__)
    getattr(module, f"configure_{name}")(parser)
    parser.set_defaults(handler=getattr(module, f"do_{name}"), usage_error=parser.error)
    return parser


def _parse_command(name: str, arguments: list[str]) -> argparse.Namespace:
    """Parse what follows the name of a command.

    Of commands that become another one, ``command`` is that one, and ``words`` is what was typed before it.
    """
    parser = parser_of(name)
    if name not in (*RUNNERS, "completion"):
        return parser.parse_args(arguments)
    end = len(arguments)
    if "--" in arguments:
        end = arguments.index("--")
    options = parser.parse_args(arguments[:end])
    command = [*getattr(options, "command", ()), *arguments[end:]]
    if command[:1] == ["--"]:
        del command[0]
    if not command and name in RUNNERS:
        parser.error("a command is missing: put it after --")
    options.command = command
    options.words = arguments[: min(end, len(arguments) - len(command))]
    return options
