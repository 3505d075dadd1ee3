"""``safe-gpu run --host``: the command on the first of several hosts that can give it GPUs now.

Each try is ``safe-gpu run --timeout 0 --pending DIR`` by ssh, where the other host has made DIR. The claim there
removes DIR and gives up where it is gone; this host removes DIR when ssh has failed, and tries the next host only if it
was there. The first to remove it decides, so no two hosts run the command.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from shlex import join, quote

from ..host.programs import environment
from ..wording.text import plural
from .commands import EX_CANNOT_RUN, EX_NO_HOST, EX_TRY_AGAIN
from .hosts import answers_of, arranged, ask, remote_command, script_of_status, ssh_to
from .output import say

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run_on_hosts(options: argparse.Namespace) -> int:
    """Try one host after the other, the one with the most free GPUs first, until one has claimed; return the exit code
    of ssh, which is the command's, or why there is none."""
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
        if sys.stderr.isatty() and not options.quiet:
            say(f"on {host}")
        pending = f"/tmp/safe-gpu-run-{os.urandom(8).hex()}"
        code, stopped = _run(host, _script(pending, options))
        if code == 0 or ask(ssh_to(host, f"rmdir {pending}")).code != 0 or stopped:
            return 128 + stopped if stopped else code
        codes.add(code)
        told[host] = f"exit code {code}"
        if code == EX_TRY_AGAIN:
            told[host] = f"{answer.figures.free} of {plural(answer.figures.total)} free"
            if answer.figures.waiting:
                told[host] += f", {answer.figures.waiting} waiting: {answer.figures.waiters}"
    lines = [f"  {host}: {why}" for host, why in told.items()]
    say("\n".join(["no host gives the GPUs now, and run --host does not wait:", *lines]))
    return codes.pop() if len(codes) == 1 else EX_TRY_AGAIN


def _run(host: str, script: str) -> tuple[int, int]:
    """Run a script there, with this terminal where it is the command's; return ssh's exit code, and the signal that has
    ended it from here, or 0."""
    terminal = os.isatty(0) and os.isatty(1) and os.tcgetpgrp(0) == os.getpgrp()
    options = ("-t", "-oLogLevel=ERROR") if terminal else ("-T",)
    stopped = 0

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = number
        ssh.terminate()

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    with subprocess.Popen(ssh_to(host, script, *options), env=environment(os.environ)) as ssh:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # under nohup
                signal.signal(number, stop)
        code = ssh.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    return code if code >= 0 else 128 - code, stopped


def _script(pending: str, options: argparse.Namespace) -> str:
    """Return what ``sh`` is to run on the other host, in the directory of this process there."""
    here = os.environ.get("PWD", "")  # by the name that it has on all hosts, rather than where its links lead here
    directory = here if os.path.isabs(here) and os.path.isdir(here) and os.path.samefile(here, ".") else os.getcwd()
    words = join([*options.words, "--pending", pending, "--timeout", "0", "--", *options.command])
    steps = [
        f"mkdir -m 700 {pending} || exit {EX_CANNOT_RUN}",
        f"cd {quote(directory)} 2>/dev/null || {{ echo there is no directory {quote(directory)} >&2; "
        f"exit {EX_CANNOT_RUN}; }}",
        f"exec {remote_command()} run {words}",
    ]
    return "; ".join(steps)
