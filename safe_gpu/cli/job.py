"""The commands that claim GPUs or wait for them, and the end of this process: it becomes the command of the user.

exec(2) leaves no wrapper behind: pid, signals and exit code are the command's own.
"""

import _signal  # type: ignore[import-not-found,unused-ignore]
import argparse
import errno
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from ..errors import SafeGpuError, UnsatisfiableRequestError
from ..gpus.devices import Gpu
from ..settings.variables import is_simulated
from ..wording.text import format_age, gpu_ranges, in_brackets
from .advice import hint_for, warning_about
from .arguments import add_affinity, add_request, add_which_gpus, claim_arguments, hosts_of_option, whole_number
from .output import EX_USAGE, CommandError, Log, is_terminal, say
from .wait_line import WaitLine


def configure_run(parser: argparse.ArgumentParser) -> None:
    """Set its options."""
    parser.usage = "safe-gpu run [options] -- CMD ..."
    parser.description = "Wait for GPUs, claim them, and become the command, which holds them to its end."
    parser.epilog = """examples:
  safe-gpu run -- python train.py
  safe-gpu run -n 2 --min-memory 20GiB --timeout 2h -- ./simulate --steps 9
  safe-gpu run -n 8 -- mpirun -np 8 python train.py     each rank may claim one
  safe-gpu run --host gpu1,gpu2 -- python train.py      where GPUs are free now

The GPUs are held until the command and all processes that inherited its
descriptors have ended. With docker and nerdctl, claim inside the container.

exit codes: the command's; 2 usage, 68 no host of --host answers,
69 no driver, 70 a package is missing, 73 state directory unusable,
75 not free in time, 78 impossible on this host, 126 the command cannot be run,
127 it is not found, 130 interrupted, 255 the connection to a host broke"""
    add_request(parser)
    group = parser.add_argument_group("CPUs, memory and environment")
    add_affinity(group)
    visible_as = "how CUDA_VISIBLE_DEVICES names the GPUs; uuid for shells and long sessions (default index)"
    group.add_argument("--visible-as", choices=("index", "uuid"), default="index", help=visible_as)
    where = "on the first of these hosts that has them free, by ssh, in this directory; does not wait"
    add = parser.add_argument_group("on which host").add_argument
    add("--host", type=hosts_of_option, default=None, metavar="H", help=where)
    add = parser.add_argument_group("output and exit code").add_argument
    add("-q", "--quiet", action="store_true", help="print nothing about waiting, nor which GPUs were claimed")
    refused = "exit code in place of 69, 70 and 73: for Grid Engine 99 (queue the job again) or 100 (hold it)"
    add("--refused-exit", type=whole_number("an exit code", 1, 255), metavar="N", help=refused)
    parser.add_argument("--pending", help=argparse.SUPPRESS)  # by run --host, see there
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def do_run(options: argparse.Namespace) -> int:
    """Carry out the command; return its exit code."""
    if options.host and not options.pending:
        return _run_on_hosts(options)
    path = find_command(options.command)
    warning = warning_about(options.command, path, words=options.words)
    if warning:
        say(warning)
    if os.environ.get("SAFE_GPU_EXPECT"):
        _check_expected_gpu()
    return _claim_and_become(path, options)


def _run_on_hosts(options: argparse.Namespace) -> int:
    from .hosts import run_on_hosts

    return run_on_hosts(options)


def _check_expected_gpu() -> None:
    from ..claim.worker import check_expected_gpu

    check_expected_gpu()


def _claim_and_become(path: str, options: argparse.Namespace) -> NoReturn:
    """Claim GPUs, and turn into the command, whose file is at ``path``.

    Raises:
        SafeGpuError: there is no claim, or the command cannot be run. Nothing is held then.
    """
    from ..claim.functions import release_gpus
    from ..claim.owner import owner_type
    from ..host.programs import command_for_record
    from ..host.signals import unwind_on_signals
    from ..runtimes.placeholders import NoPlaceholder
    from ..runtimes.visible_devices import hide_all

    arguments = claim_arguments(options)
    if arguments.get("affinity") == "none":
        arguments["affinity"] = None
    arguments["placeholder_fn"] = NoPlaceholder()
    arguments["logger"] = Log()
    arguments["delegate"] = arguments.get("share") is None
    hint = "hold_for" not in arguments
    try:
        with unwind_on_signals(), WaitLine(sys.stderr, quiet=options.quiet, hint=hint) as line:
            command = command_for_record(options.command)
            make_owner = owner_type(on_wait=line.show, on_delay=line.note, command=command)
            owner = make_owner(**arguments)
        if not options.quiet:
            _say_what_is_claimed(owner.gpus, line)
        owner.keep_across_exec()
        if options.pending:
            _win_over_other_hosts(options.pending)
        become(path, options.command)
    except UnsatisfiableRequestError as err:
        if options.nb_gpus != "job" or err.value != 0:
            raise
        if not options.quiet:
            say(f"the command starts without a GPU: {err}")
        os.environ.update(hide_all())
        become(path, options.command)
    finally:
        release_gpus()  # also where an exception came before the claim had a name here


def _win_over_other_hosts(pending: str) -> None:
    """Remove the directory of ``run --host``, which settles that this host runs the command and no other is tried.

    Raises:
        CommandError: the other side has removed it, and the command must not run here.
    """
    try:
        os.rmdir(pending)
    except FileNotFoundError as err:
        raise CommandError("run --host has ended its ssh", code=EX_USAGE) from err


def _say_what_is_claimed(gpus: Sequence[Gpu], line: WaitLine) -> None:
    """Say which GPUs were claimed, where somebody looks on or was told of a wait."""
    if not gpus:
        say("the command starts without a GPU: SAFE_GPU_NB_GPUS=0")
    elif line.waited:
        say(f"{_got(gpus)} after {format_age(line.seconds)}")
    elif sys.stderr.isatty():
        say(_got(gpus))


def _got(gpus: Sequence[Gpu]) -> str:
    """Return ``got GPU 0-2,5 (4 x NVIDIA A100-SXM4-80GB)``."""
    facts = []
    for name, number in Counter(gpu.name for gpu in gpus).items():
        if name and number > 1:
            facts.append(f"{number} x {name}")
        elif name:
            facts.append(name)
    if is_simulated(os.environ):
        facts.append("simulated")
    return f"got GPU {gpu_ranges(gpu.label for gpu in gpus)}{in_brackets(*facts)}"


def configure_wait(parser: argparse.ArgumentParser) -> None:
    """Set its options."""
    parser.description = """Wait until that many GPUs could be claimed, print their indices, one on a line,
and claim nothing; exit code 0 then."""
    parser.epilog = "example:\n  safe-gpu wait -n 2 --timeout 1h && notify-send 'two GPUs are free'"
    add_request(parser)
    quiet = "print nothing about waiting"
    parser.add_argument_group("output").add_argument("-q", "--quiet", action="store_true", help=quiet)


def do_wait(options: argparse.Namespace) -> int:
    """Carry out the command; return its exit code."""
    from ..claim.functions import wait_for_gpus
    from ..host.signals import unwind_on_signals

    with unwind_on_signals(), WaitLine(sys.stderr, quiet=options.quiet) as line:
        gpus = wait_for_gpus(logger=Log(), on_wait=line.show, on_delay=line.note, **claim_arguments(options))
    sys.stdout.writelines(f"{gpu.label}\n" for gpu in gpus)
    return 0


def configure_bind(parser: argparse.ArgumentParser) -> None:
    """Set its options."""
    parser.usage = "safe-gpu bind [options] -- CMD ..."
    parser.description = """Bind CPUs (and memory) next to the visible GPUs, then become the command: for
one rank under a launcher. Of several visible GPUs, a rank binds next to the one
with its local rank, as CUDA numbers them. Nothing is claimed."""
    parser.epilog = """examples:
  torchrun --no-python --nproc-per-node 8 safe-gpu bind -- python train.py
  mpirun -np 8 safe-gpu bind --memory preferred -- ./simulate
  for i in 0 1 2 3; do LOCAL_RANK=$i safe-gpu bind -- ./train & done"""
    add_affinity(parser)
    add = parser.add_argument
    add_which_gpus(
        parser,
        gpu="these GPUs instead, as nvidia-smi shows them: 0,3",
        ordinal="this GPU instead, as CUDA numbers it after CUDA_VISIBLE_DEVICES",
        node="the NUMA node of this number instead, whatever GPU the command uses",
    )
    add("--if-possible", action="store_true", help="where binding fails, say why and run the command unbound")
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def do_bind(options: argparse.Namespace) -> int:
    """Carry out the command; return its exit code."""
    affinity = getattr(options, "affinity", "node")
    if options.node is not None and affinity not in ("node", "none"):
        raise CommandError(f"--node {options.node} binds to the whole node: leave out --affinity", code=EX_USAGE)
    path = find_command(options.command, "bind")
    _check_expected_gpu()
    _bind(affinity, options)
    become(path, options.command)


def _bind(affinity: str, options: argparse.Namespace) -> None:
    """Bind this process, and say so where somebody looks on, or where not all went well.

    Raises:
        SafeGpuError: it cannot be bound, and ``--if-possible`` was not given.
    """
    from ..claim.worker import bind_rank

    mode: str | None = affinity
    if affinity == "none":
        mode = None
    try:
        report = bind_rank(options.gpu, options.ordinal, options.node, mode=mode, memory=options.memory)
    except SafeGpuError as err:
        if not options.if_possible:
            raise
        say(f"not bound: {err}")
    else:
        if report.notes or not report.ok or is_terminal(sys.stderr):
            say(str(report))


def find_command(command: Sequence[str], verb: str = "run") -> str:
    """Return the file that a shell would run for this command; a name with a slash is the file itself.

    Args:
        command: its name and arguments.
        verb: the command of safe-gpu that runs it, for advice.

    Raises:
        CommandError: no such command, or only files that cannot be executed.
    """
    name = command[0]
    if "/" in name:
        paths = [name]
    else:
        places = os.environ.get("PATH", os.defpath).split(os.pathsep)
        paths = [os.path.join(place or ".", name) for place in places]
    is_there = False
    for path in paths:
        if not os.path.isfile(path):
            continue
        if os.access(path, os.X_OK):
            return path
        is_there = True
    if "/" in name and os.path.isdir(name):
        raise CommandError(f"{name} cannot be run: it is a directory", code=126)
    if is_there:
        raise CommandError(f"{name} cannot be run: it is not an executable file (chmod +x makes it one)", code=126)
    problem = f"{name or repr(name)}: command not found"
    hint = hint_for(command, f"safe-gpu {verb}")
    if hint:
        problem += f"; {hint}"
    raise CommandError(problem, code=127)


def become(path: str, command: Sequence[str]) -> NoReturn:
    """Turn into the command; ``path`` is its file, ``command`` its arguments from the name on.

    Raises:
        CommandError: the kernel refused; everything is as before then.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more, and the command may not care
            stream.flush()
    try:
        # After our last write: on a broken pipe it would be the end of this process.
        _set_signals_of_python(_signal.SIG_DFL)
        _exec(path, command)
    except BaseException as err:
        _set_signals_of_python(_signal.SIG_IGN)
        if not isinstance(err, OSError):  # a handler of a signal has raised
            raise
        if not os.path.exists(path):
            raise CommandError(f"{command[0]} cannot be run: {err.strerror}", code=127) from err
        reason = err.strerror
        if err.errno == errno.ENOENT:
            reason = "its interpreter (after #!, or the dynamic loader) does not exist"
        raise CommandError(f"{command[0]} cannot be run: {reason}", code=126) from err


def _exec(path: str, command: Sequence[str]) -> NoReturn:
    """Turn into the command, or raise OSError. A script without ``#!`` is given to sh, as a shell would."""
    try:
        os.execv(path, list(command))
    except OSError as err:
        if err.errno != errno.ENOEXEC or _is_binary(path):
            raise
        os.execv("/bin/sh", ["sh", path, *command[1:]])


def _is_binary(path: str) -> bool:
    """Return whether a file that the kernel knows no way to execute is no script either (a program for another
    machine)."""
    with open(path, "rb", buffering=0) as file:
        return b"\0" in file.read(128)


def _set_signals_of_python(action: int) -> None:
    """Set the action of the two signals that Python ignores, which exec(2) would hand on."""
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
        _signal.signal(number, action)
