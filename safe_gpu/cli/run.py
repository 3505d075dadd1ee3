"""``safe-gpu run``: wait for GPUs, claim them, become the command."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import UnsatisfiableRequestError
from .become import become, find_command
from .options import CommandLine, add_command, add_quiet, add_request, hold_for_of, timeout_of
from .streams import Log, say

if TYPE_CHECKING:
    from ..claim.messages import WaitStatus
    from ..claim.owner import GPUOwner
    from .wait_line import WaitLine


_CLIENTS = {"docker", "nerdctl", "docker-compose", "podman", "podman-remote"}
_CLAIM_MODES = ("none", "node", "socket", "exclusive", "core-complex")


def configure(parser: argparse.ArgumentParser) -> None:
    """Its options and its handler."""
    parser.usage = "safe-gpu run [options] -- CMD ..."
    parser.description = "Wait for GPUs, claim them, and become the command, which holds them to its end."
    parser.epilog = """examples:
  safe-gpu run -- python train.py
  safe-gpu run -n 2 --min-memory 20GiB --timeout 2h -- ./simulate --steps 9
  safe-gpu run -n 8 -- mpirun -np 8 python train.py     each rank may claim one

The GPUs are held until the command and whatever inherited its descriptors have
ended. In Python, claim_gpus() does more: it shows others a context at once.

exit codes: the command's; 2 usage, 69 no driver, 70 a package is missing,
73 state directory unusable, 75 not free in time, 78 never on this host,
126 the command cannot be run, 127 it is not found, 130 interrupted"""
    add_request(parser)
    add_quiet(parser, "say nothing about waiting, nor which GPUs were claimed")
    parser.add_argument("--affinity", choices=_CLAIM_MODES, help="CPUs to bind to (default node)")
    parser.add_argument("--memory", choices=("preferred", "bind"), help="NUMA memory policy next to the GPUs")
    parser.add_argument(
        "--visible-as",
        choices=("index", "uuid"),
        default="index",
        help="how CUDA_VISIBLE_DEVICES names them; uuid for shells and long sessions",
    )
    add_command(parser)
    parser.set_defaults(handler=_run)


def _run(options: argparse.Namespace) -> int:
    path = find_command(options.command)
    _warn_of_daemons(options.command, path)
    if os.environ.get("SAFE_GPU_EXPECT"):
        from ..claim.worker import check_expected_gpu

        check_expected_gpu()
    from ..claim.owner import release_gpus

    try:
        return _claim_and_become(path, options)
    finally:
        release_gpus()  # also where an exception came before the claim had a name here


def _claim_and_become(path: str, options: argparse.Namespace) -> NoReturn:
    from ..claim.owner import GPUOwner
    from ..coordination.records import command_for_record
    from ..coordination.signals import unwind_on_signals
    from ..runtimes.placeholders import NoPlaceholder
    from ..runtimes.visible_devices import hide_all
    from .wait_line import WaitLine

    choice: dict[str, Any] = {**hold_for_of(options)}
    if options.affinity is not None:
        choice["affinity"] = None if options.affinity == "none" else options.affinity
    try:
        with unwind_on_signals(), WaitLine(sys.stderr) as line:
            news = WaitDisplay(line, quiet=options.quiet, hint=not hasattr(options, "hold_for"))
            owner = GPUOwner(
                options.nb_gpus,
                NoPlaceholder(),
                Log(),
                timeout=timeout_of(options),
                memory=options.memory,
                min_memory=options.min_memory,
                model=options.model,
                exclude=options.exclude,
                only=options.only,
                vendor=options.vendor,
                visible_as=options.visible_as,
                delegate=True,
                _on_wait=news.tell,
                _command=command_for_record(options.command),
                _spelling=CommandLine,
                **choice,
            )
    except UnsatisfiableRequestError as err:
        if options.nb_gpus != "job" or err.value != 0:
            raise
        os.environ.update(hide_all("nvidia"), **hide_all("amd"))  # the job asked for no GPU, so it shall see none
        become(path, options.command)
    if not options.quiet and (news.waited or sys.stderr.isatty()):
        say(_got(owner, time.monotonic() - news.began if news.waited else None))
    owner.keep_across_exec()
    become(path, options.command)


def _warn_of_daemons(command: list[str], path: str) -> None:
    """Say so where the command is the client of a daemon that starts containers."""
    if not {os.path.basename(word) for word in command} & _CLIENTS:
        return
    from ..coordination.files import state_dir_path
    from .container_client import warning_about

    text = warning_about(command, path, state_dir_path())
    if text:
        say(text)


class WaitDisplay:
    """Hands the news of a wait on to the line that shows it, unless the user wants none.

    Args:
        hint: mention --for once.

    Attributes:
        waited: whether there was any. began: ``time.monotonic()`` value of its making.
    """

    def __init__(self, line: WaitLine, *, quiet: bool, hint: bool = False) -> None:
        self.waited = False
        self.began = time.monotonic()
        self._line = line
        self._quiet = quiet
        self._hint = hint
        self._told = False

    def tell(self, news: WaitStatus) -> None:
        """Where the wait stands."""
        self.waited = True
        if not self._quiet:
            self._line.show(news)
            # Not at once, as most waits are short; but behind another waiter it may help at once.
            if self._hint and (self._told or news.ahead is not None):
                self._hint = False
                if _says_nothing():
                    self._line.note("short jobs get in earlier if they say for how long: --for 30m")
            self._told = True


def _says_nothing() -> bool:
    """Whether nothing says for how long the GPUs will be held: no variable, no batch job."""
    from ..claim.times import DEFAULT, parse_hold_for
    from ..schedulers import current

    return parse_hold_for(DEFAULT, os.environ, current(os.environ)).at(time.time()) is None


def _got(owner: GPUOwner, waited: float | None) -> str:
    """``got GPU 0-2,5 (4 x NVIDIA A100-SXM4-80GB) after 3 min``."""
    from ..text import format_age, gpu_ranges

    models: dict[str, int] = {}
    for gpu in owner.gpus:
        models[gpu.name] = models.get(gpu.name, 0) + 1
    names = ", ".join(f"{number} x {name}" if number > 1 else name for name, number in models.items() if name)
    text = f"got GPU {gpu_ranges(gpu.label for gpu in owner.gpus)}{names and f' ({names})'}"
    return text if waited is None else f"{text} after {format_age(waited)}"
