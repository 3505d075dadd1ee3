"""``safe-gpu run --host``: the command on the first of several hosts that can give it GPUs now."""

import argparse
import os
import sys

from ...wording.text import plural
from ..commands import EX_CANNOT_RUN, EX_CONNECTION, EX_NO_HOST, EX_TRY_AGAIN
from ..output import say
from .answer import last_line
from .remote_shell import NEWLINE_FOR_SH, remote_command, words_of_sh
from .session import Session
from .status import answers_of, script_of_status
from .table import arranged


def run_on_hosts(options: argparse.Namespace) -> int:
    """Try one host after the other, the one with the most free GPUs first, until one has claimed; return the command's
    exit code, or why there is none."""
    if getattr(options, "timeout", 0) != 0:
        options.usage_error("--host takes GPUs that are free now: only --timeout 0 goes with it")
    if options.nb_gpus == "job":
        options.usage_error("-n job does not go with --host: the batch job is on this host")
    answers = arranged(answers_of(options.host, script_of_status(options.vendor)), most_free_first=True)
    told = {name: one.error for name, one in answers.items()}
    codes = {EX_NO_HOST for one in answers.values() if one.status is None}
    for host, answer in answers.items():
        if answer.figures is None:
            continue
        session = Session(host, _on_terminal())
        if sys.stderr.isatty() and not options.quiet:
            say(f"on {host}")
        session.run(_script(session.secret, options))
        if session.ended is not None:
            return session.ended
        if session.broken:
            is_over = session.end_there()
            if not (is_over and session.stopped):
                what = (
                    "the command was ended there" if is_over else f"is not back: the command ends when {host} notices"
                )
                say(f"the connection to {host} broke, and {what}")
                return EX_CONNECTION
        if session.stopped:
            return 128 + session.stopped
        codes.add(session.code)
        told[host] = last_line(session.said) or f"exit code {session.code}"
        if session.code == EX_TRY_AGAIN:
            told[host] = f"{answer.figures.free} of {plural(answer.figures.total)} free"
            if answer.figures.waiting:
                told[host] += f", {answer.figures.waiting} waiting: {answer.figures.waiters}"
    lines = [f"  {host}: {why}" for host, why in told.items()]
    say("\n".join(["no host gives the GPUs now, and run --host does not wait:", *lines]))
    return codes.pop() if len(codes) == 1 else EX_TRY_AGAIN


def _on_terminal() -> bool:
    """Return whether the command is to have the terminal of this process, which is in its foreground."""
    return os.isatty(0) and os.isatty(1) and os.tcgetpgrp(0) == os.getpgrp()


def _script(secret: str, options: argparse.Namespace) -> str:
    """Return what ``sh`` is to run on the other host, in the directory of this process there."""
    here = os.environ.get("PWD", "")  # by the name that it has on all hosts, rather than where its links lead here
    directory = here if os.path.isabs(here) and os.path.isdir(here) and os.path.samefile(here, ".") else os.getcwd()
    missing = words_of_sh([f"there is no directory {directory}"])
    # A version that tells nothing of a claim refuses --supervised.
    words = words_of_sh([*options.words, "--supervised", "--timeout", "0", "--", *options.command])
    steps = [
        NEWLINE_FOR_SH,
        f"cd {words_of_sh([directory])} 2>/dev/null || {{ echo {missing}; exit {EX_CANNOT_RUN}; }}",
        f"exec env SAFE_GPU_SESSION={secret} {remote_command()} run {words}",
    ]
    return "; ".join(steps)
