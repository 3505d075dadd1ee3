"""``safe-gpu run --host``: the command on the first of several hosts that can give it GPUs now."""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence

from ...host.procfs import printable
from ...wording.text import plural, short_age
from ..commands import EX_CANNOT_RUN, EX_CONNECTION, EX_NO_HOST, EX_TRY_AGAIN
from ..output import say
from .answer import Answer, last_line, read_answer
from .asking import Said
from .remote_shell import NEWLINE_FOR_SH, remote_command, words_of_sh
from .session import Session
from .status import answers_of
from .supervisor import mark
from .table import most_free_first, same_hosts

_MOST_WAITERS = 3  # of a host, that are named


def run_on_hosts(options: argparse.Namespace) -> int:
    """Try one host after the other, the one with the most free GPUs first, until one has claimed; return the command's
    exit code, or why there is none."""
    if getattr(options, "timeout", 0) != 0:
        options.usage_error("--host takes GPUs that are free now: only --timeout 0 goes with it")
    if options.nb_gpus == "job":
        options.usage_error("-n job does not go with --host: the batch job is on this host")
    answers = answers_of(options.host, options.vendor)
    others = same_hosts(answers)
    told = {name: f"the same host as {other}" for name, other in others.items()}
    told |= {name: one.error for name, one in answers.items() if one.status is None}
    codes, tried = set(), 0
    for host in most_free_first(answers):
        if host in told:
            continue
        tried += 1
        session = Session(host, _on_terminal())
        if sys.stderr.isatty() and not options.quiet:
            say(f"on {host}")
        session.run(_script(session.secret, options))
        if session.ended is not None:
            return session.ended
        if session.broken and not session.end_there():
            say(f"the connection to {host} broke, and cannot be made again: the command ends when {host} notices")
            return EX_CONNECTION
        if session.stopped:
            return 128 + session.stopped
        if session.broken:
            say(f"the connection to {host} broke, and the command was ended there")
            return EX_CONNECTION
        if "here" in session.words:
            codes.add(session.code)
        told[host] = _why_not(session, answers[host])
    lines = [f"  {host}: {told[host]}" for host in answers]
    say("\n".join(["no host gives the GPUs now, and run --host does not wait:", *lines]))
    if not codes:
        return EX_NO_HOST
    return codes.pop() if len(codes) == 1 and len(told) == len(others) + tried else EX_TRY_AGAIN


def _on_terminal() -> bool:
    """Return whether the command is to have the terminal of this process, which is in its foreground."""
    return os.isatty(0) and os.isatty(1) and os.tcgetpgrp(0) == os.getpgrp()


def _script(secret: str, options: argparse.Namespace) -> str:
    """Return what ``sh`` is to run on the other host, in the directory of this process there."""
    here = os.environ.get("PWD", "")  # by the name that it has on all hosts, rather than where its links lead here
    directory = here if os.path.isabs(here) and os.path.isdir(here) and os.path.samefile(here, ".") else os.getcwd()
    say_word = "printf '" + mark(secret).replace("\x1e", "\\036")
    words = words_of_sh([*without_hosts(options.words), "--timeout", "0", "--", *options.command])
    steps = [
        f"{say_word}here\\n'",
        NEWLINE_FOR_SH,
        f"cd {words_of_sh([directory])} 2>/dev/null || {{ {say_word}missing\\n'; exit {EX_CANNOT_RUN}; }}",
        f"SAFE_GPU_SESSION={secret}",
        "export SAFE_GPU_SESSION",
        f"exec {remote_command()} run --supervised {words}",  # a version that tells nothing of a claim refuses it
    ]
    return "; ".join(steps)


def without_hosts(words: Sequence[str]) -> list[str]:
    """Return the words of a command line without ``--host H``."""
    found = list(words)
    while "--host" in found:
        place = found.index("--host")
        del found[place : place + 2]
    return [word for word in found if not word.startswith("--host=")]


def _why_not(session: Session, answer: Answer) -> str:
    """Return why a host has not claimed, from what was written there."""
    if "missing" in session.words:
        return f"there is no directory {os.getcwd()}"
    if session.code == EX_TRY_AGAIN:
        return ", ".join([f"{answer.free} of {plural(answer.total)} free", *_waiters(answer)])
    if "here" in session.words:
        return last_line(bytes(session.held)) or f"exit code {session.code}"
    return read_answer(Said(session.code, b"", bytes(session.held))).error


def _waiters(answer: Answer) -> Iterator[str]:
    assert answer.status is not None
    for one in answer.status["queue"][:_MOST_WAITERS]:
        since = f" for {short_age(time.time() - one['since'])}" if one["since"] is not None else ""
        yield printable(f"{one.get('user') or '?'} waits{since} for {one.get('nb_gpus')} GPUs")
    if len(answer.status["queue"]) > _MOST_WAITERS:
        yield f"{len(answer.status['queue']) - _MOST_WAITERS} more"
