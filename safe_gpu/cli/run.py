"""``safe-gpu run``, ``bind`` and ``wait``, and the line that shows a wait."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn, TextIO

from ..errors import SafeGpuError, UnsatisfiableRequestError
from .become import CommandError, become, find_command
from .output import Log, is_terminal, say, width_of
from .parser import EX_USAGE, CommandLine, add_request, add_which_gpus, claim_arguments, is_number

if TYPE_CHECKING:
    from threading import Event, Thread

    from ..claim.messages import WaitStatus
    from ..claim.owner import GPUOwner


# What ``run`` and ``wait`` say while they wait: a line a minute, or one live line on a terminal.


_PROGRAM = "safe-gpu: "
_ERASE = "\r\x1b[K"
_MOST_IDLE = 3  # claims without work of which one piece of news tells


class WaitLine:
    """Shows the news of a wait on a stream; on a terminal as one line with a running clock, wiped at the end.

    A stream that fails (a terminal that was closed, a pipe that nobody reads) costs the news, not the place in the
    queue.

    Args:
        quiet: show nothing.
        hint: mention --for once.

    Attributes:
        waited: whether there was any news.
    """

    def __init__(self, stream: TextIO, *, quiet: bool = False, hint: bool = False) -> None:
        self.waited = False
        self._stream = stream
        self._quiet = quiet
        self._hint = hint
        self._live = is_terminal(stream)
        self._began = time.monotonic()
        self._status: WaitStatus | None = None
        self._thread: Thread | None = None
        self._ended: Event | None = None
        self._told: set[tuple[int | None, float | None]] = set()  # claims without work

    def __enter__(self) -> WaitLine:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._ended is not None and self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._write(_ERASE)

    @property
    def seconds(self) -> float:
        """Since the wait began."""
        return time.monotonic() - self._began

    def show(self, status: WaitStatus) -> None:
        """Tell the user where the wait stands."""
        first, self.waited = not self.waited, True
        if self._quiet:
            return
        from ..claim.messages import waiting_message

        self._status = status
        if not self._live:
            self._write(f"{_PROGRAM}{waiting_message(status, waited=self.seconds)}\n")
        elif self._thread is None:
            import threading

            self._ended = threading.Event()
            self._thread = threading.Thread(target=self._tick, name="safe_gpu-waitline", daemon=True)
            self._thread.start()
        if self._live:
            self._tell_of_idle_claims(status)
        # Not at once, as most waits are short; but behind another waiter it may help at once.
        if self._hint and (not first or status.ahead is not None):
            self._hint = False
            if _hold_is_unknown():
                self._note("short jobs get in earlier if they say for how long: --for 30m")

    def _tell_of_idle_claims(self, status: WaitStatus) -> None:
        """Tell once whom to ask for GPUs that are held without use, if the policy of this host asks for that."""
        from .. import settings

        path = settings.existing_policy(os.environ)
        if path is None:
            return
        from ..status.idle import sets_a_limit, whom_to_ask
        from ..text import cut

        if not sets_a_limit(path):
            return
        from ..status.gather import gather

        try:
            gpus = gather().gpus  # takes host.lock
        except (SafeGpuError, OSError):
            return
        if status.verdicts:
            wanted = {verdict.gpu.uuid for verdict in status.verdicts if verdict.state == "claimed"}
            gpus = tuple(one for one in gpus if one.gpu.uuid in wanted)
        lines = {key: line for key, line in whom_to_ask(gpus, os.geteuid()).items() if key not in self._told}
        for key in list(lines)[:_MOST_IDLE]:
            self._told.add(key)
            self._note(cut(lines[key], width_of(self._stream) - 1 - len(_PROGRAM)))

    def _note(self, text: str) -> None:
        """Write a line of its own, above the live one."""
        self._write(f"{_ERASE if self._live else ''}{_PROGRAM}{text}\n")

    def _tick(self) -> None:
        assert self._ended is not None
        while True:
            self._write(_ERASE + self._line(width_of(self._stream) - 1))
            if self._ended.wait(1.0):
                return

    def _line(self, width: int) -> str:
        """Return what a terminal of this width shows without breaking the line."""
        from ..claim.messages import waiting_message

        assert self._status is not None
        text = waiting_message(self._status, waited=self.seconds, width=width - len(_PROGRAM))
        return (_PROGRAM + text)[: max(0, width)]

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


def _hold_is_unknown() -> bool:
    """Return whether neither a variable nor a batch job tells for how long the GPUs will be held."""
    from ..claim.times import DEFAULT, parse_hold_for
    from ..schedulers import current

    return parse_hold_for(DEFAULT, os.environ, current(os.environ)).at(time.time()) is None


# ``safe-gpu run``: wait for GPUs, claim them, become the command.


_CONTAINERS = ("docker", "nerdctl", "podman", "apptainer", "singularity")
_CLAIM_MODES = ("none", "node", "socket", "exclusive", "core-complex")


def configure_run(parser: argparse.ArgumentParser) -> None:
    """Set its options and its handler."""
    parser.usage = "safe-gpu run [options] -- CMD ..."
    parser.description = "Wait for GPUs, claim them, and become the command, which holds them to its end."
    parser.epilog = """examples:
  safe-gpu run -- python train.py
  safe-gpu run -n 2 --min-memory 20GiB --timeout 2h -- ./simulate --steps 9
  safe-gpu run -n 8 -- mpirun -np 8 python train.py     each rank may claim one

The GPUs are held until the command and whatever inherited its descriptors have
ended. In Python, claim_gpus() also shows others a context at once.

Claim inside containers of docker and nerdctl, with the state directory mounted.
A claim around podman run or apptainer exec holds: let podman pass on what the
claim sets (-e CUDA_VISIBLE_DEVICES -e CUDA_DEVICE_ORDER), and start apptainer
without --cleanenv.

exit codes: the command's; 2 usage, 69 no driver, 70 a package is missing,
73 state directory unusable, 75 not free in time, 78 impossible on this host,
126 the command cannot be run, 127 it is not found, 130 interrupted"""
    add_request(parser)
    add = parser.add_argument_group("CPUs, memory and environment").add_argument
    add("--affinity", choices=_CLAIM_MODES, default=argparse.SUPPRESS, help="CPUs to bind to (default node)")
    add("--memory", choices=("preferred", "bind"), help="NUMA memory policy next to the GPUs")
    visible_as = "how CUDA_VISIBLE_DEVICES names the GPUs; uuid for shells and long sessions (default index)"
    add("--visible-as", choices=("index", "uuid"), default="index", help=visible_as)
    add = parser.add_argument_group("output and exit code").add_argument
    add("-q", "--quiet", action="store_true", help="print nothing about waiting, nor which GPUs were claimed")
    refused = "exit code in place of 69, 70 and 73: for Grid Engine 99 (queue the job again) or 100 (hold it)"
    add("--refused-exit", type=_exit_code, metavar="N", help=refused)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(handler=_run)


def _exit_code(text: str) -> int:
    if not is_number(text) or not 0 < int(text) < 256:
        raise ValueError(f"--refused-exit {text} is not an exit code: a whole number from 1 to 255")
    return int(text)


def _run(options: argparse.Namespace) -> NoReturn:
    path = find_command(options.command)
    if any(os.path.basename(word).startswith(_CONTAINERS) for word in options.command):
        from ..coordination.files import state_dir_path
        from .command_hints import warning_about

        if warning := warning_about(options.command, path, state_dir_path()):
            say(warning)
    if os.environ.get("SAFE_GPU_EXPECT"):
        from ..claim.worker import check_expected_gpu

        check_expected_gpu()
    from ..claim.owner import owner_type, release_gpus
    from ..coordination.records import command_for_record
    from ..coordination.signals import unwind_on_signals
    from ..runtimes.placeholders import NoPlaceholder
    from ..runtimes.visible_devices import hide_all

    arguments = claim_arguments(options)
    if arguments.get("affinity") == "none":
        arguments["affinity"] = None
    hint = "hold_for" not in arguments
    try:
        with unwind_on_signals(), WaitLine(sys.stderr, quiet=options.quiet, hint=hint) as line:
            record = command_for_record(options.command)
            owner_of = owner_type(on_wait=line.show, command=record, spelling=CommandLine)
            owner = owner_of(placeholder_fn=NoPlaceholder(), logger=Log(), delegate=True, **arguments)
        if not options.quiet and (line.waited or sys.stderr.isatty()):
            say(_got(owner, line.seconds if line.waited else None))
        owner.keep_across_exec()
        become(path, options.command)
    except UnsatisfiableRequestError as err:
        if options.nb_gpus != "job" or err.value != 0:
            raise
        os.environ.update(hide_all())  # the job asked for no GPU, so it shall see none
        become(path, options.command)
    finally:
        release_gpus()  # also where an exception came before the claim had a name here


def _got(owner: GPUOwner, waited: float | None) -> str:
    """Return a sentence on the claim: ``got GPU 0-2,5 (4 x NVIDIA A100-SXM4-80GB) after 3 min``."""
    from ..text import format_age, gpu_ranges

    models = Counter(gpu.name for gpu in owner.gpus)
    names = ", ".join(f"{number} x {name}" if number > 1 else name for name, number in models.items() if name)
    text = f"got GPU {gpu_ranges(gpu.label for gpu in owner.gpus)}{names and f' ({names})'}"
    return text if waited is None else f"{text} after {format_age(waited)}"


# ``safe-gpu bind``: CPUs next to the visible GPUs, then the command.


def configure_bind(parser: argparse.ArgumentParser) -> None:
    """Set its options and its handler."""
    from ..affinity.options import MODES

    parser.usage = "safe-gpu bind [options] -- CMD ..."
    parser.description = (
        "Bind CPUs (and memory) next to the visible GPUs, then become the command: for\n"
        "one rank under a launcher. Of several visible GPUs, a rank binds next to the one\n"
        "with its local rank, as CUDA numbers them. Nothing is claimed."
    )
    parser.epilog = """examples:
  torchrun --no-python --nproc-per-node 8 safe-gpu bind -- python train.py
  mpirun -np 8 safe-gpu bind --memory preferred -- ./simulate"""
    parser.add_argument("--mode", choices=MODES, default="node", metavar="M", help="affinity mode (default node)")
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
    if options.node is not None and options.mode != "node":
        raise CommandError(f"--node {options.node} binds to the whole node: leave out --mode", code=EX_USAGE)
    path = find_command(options.command, "bind")
    from ..claim.worker import bind_rank, check_expected_gpu

    check_expected_gpu()
    try:
        report = bind_rank(options.gpu, options.ordinal, options.node, mode=options.mode, memory=options.memory)
    except SafeGpuError as err:
        if not options.if_possible:
            raise
        say(f"not bound: {err}")
    else:
        if report.notes or not report.ok or is_terminal(sys.stderr):
            say(str(report))
    become(path, options.command)


# ``safe-gpu wait``: wait until GPUs could be claimed, and claim none.


def configure_wait(parser: argparse.ArgumentParser) -> None:
    """Set its options and its handler."""
    parser.description = """Wait until that many GPUs could be claimed, print their indices, one on a line,
and claim nothing; exit code 0 then."""
    parser.epilog = "example:\n  safe-gpu wait -n 2 --timeout 1h && notify-send 'two GPUs are free'"
    add_request(parser)
    quiet = "print nothing about waiting"
    parser.add_argument_group("output").add_argument("-q", "--quiet", action="store_true", help=quiet)
    parser.set_defaults(handler=_wait)


def _wait(options: argparse.Namespace) -> int:
    from ..claim.free import wait_for_gpus
    from ..coordination.signals import unwind_on_signals

    with unwind_on_signals(), WaitLine(sys.stderr, quiet=options.quiet) as line:
        gpus = wait_for_gpus(logger=Log(), on_wait=line.show, spelling=CommandLine, **claim_arguments(options))
    sys.stdout.writelines(f"{gpu.label}\n" for gpu in gpus)
    return 0
