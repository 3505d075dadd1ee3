"""``safe-gpu status`` of other hosts, and ``safe-gpu run --host``, by the ssh of the system.

Each try of ``run`` is ``safe-gpu run --timeout 0 --pending DIR``, where the other host has made DIR. The claim there
removes DIR and gives up where it is gone; this host removes DIR when ssh has failed, and tries the next host only if it
was there. The first to remove it decides, so no two hosts run the command.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import repeat
from queue import SimpleQueue
from shlex import join, quote
from threading import Semaphore, Thread
from typing import Any, NamedTuple

from ..errors import SafeGpuError
from ..host.foreign_files import printable, printable_lines
from ..host.programs import TooLate, TooMuch, environment, find_program, output_of
from ..settings.variables import known_hosts, setting_of_hosts
from ..status.facts import SCHEMA
from ..status.page import NO_DOCUMENT, TITLES, Figures, figures_of, render_page
from ..status.render import table
from ..wording.text import GAP, Column, paint, plural, wrapped
from .commands import EX_CANNOT_RUN, EX_NO_HOST, EX_SOME_HOSTS, EX_TRY_AGAIN
from .output import columns, in_color, print_json, print_lines, say, write_output


def ssh_to(host: str, script: str, *options: str) -> list[str]:
    """Return the command that has ``sh`` on a host run a script of one line, without any question to the user.

    Raises:
        SafeGpuError: there is no ssh here.
    """
    ssh = find_program("ssh", os.environ)
    if ssh is None:
        raise SafeGpuError("there is no ssh on PATH: install OpenSSH's client to look at other hosts")
    return [ssh, *(options or ("-T",)), "-oBatchMode=yes", "-oConnectTimeout=5", "--", host, for_any_shell(script)]


def remote_command() -> str:
    """Return what starts safe-gpu on other hosts, as ``sh`` there reads it after ``exec``."""
    return setting_of_hosts("remote_command", os.environ) or "safe-gpu"


def for_any_shell(script: str) -> str:
    r"""Return ``sh -c SCRIPT`` as sh, csh and fish read it alike, with the script as one argument.

    Within quotes csh replaces ``!`` and fish reads ``\``; before a backslash, all of them take both as they are.

    >>> print(for_any_shell("echo 'hi!'"))
    sh -c 'echo '\''hi'\!\'
    """
    parts = re.findall(r"['\\!]|[^'\\!]+", script)
    return "sh -c " + "".join(f"\\{part}" if part in ("'", "\\", "!") else f"'{part}'" for part in parts)


AT_ONCE = 16

SECONDS = 10.0
"""That a host has for its answer, once it is asked."""

TOO_LATE = 124  # what timeout(1) ends with

_LONGEST_ANSWER = 1 << 22  # bytes


class Said(NamedTuple):
    """What a host has answered. ``code`` is ssh's exit code: 255 of its own, else the other side's."""

    code: int
    out: str
    err: str


def ask(ssh: Sequence[str]) -> Said:
    """Return what a host says to this command of ssh.

    ssh has a session of its own, so that no helper of it can ask on this terminal; timeout(1) ends it also where this
    process has ended.
    """
    try:
        limit = find_program("timeout", os.environ)
        command = [limit, str(SECONDS), *ssh] if limit else ssh
        return Said(
            *output_of(command, env=os.environ, timeout=SECONDS + 1, most=_LONGEST_ANSWER, separate_stderr=True)
        )
    except TooLate:
        return Said(TOO_LATE, "", "")
    except (OSError, TooMuch) as error:
        return Said(255, "", str(error))


def answers(hosts: Collection[str], script: str, interval: float | None = None) -> Iterator[tuple[str, Answer]]:
    """Yield what each host answers, as it comes; with an interval again and again, that long after its last answer."""
    slots, news = Semaphore(AT_ONCE), SimpleQueue[tuple[str, Answer]]()

    def follow(host: str, ssh: Sequence[str]) -> None:
        while True:
            with slots:
                news.put((host, read_answer(ask(ssh))))
            if interval is None:
                return
            time.sleep(interval)

    for host in hosts:
        Thread(target=follow, args=(host, ssh_to(host, script)), daemon=True).start()
    for _ in hosts if interval is None else repeat(None):
        yield news.get()


_LONGEST_REASON = 300

_ADVICE = {
    "Permission denied": "a password is asked for, or your key is refused",
    "Host key verification failed": "its key is not known here; run ssh to it once by hand",
}

_NOT_FOUND = (126, 127)  # what sh ends with


class Answer(NamedTuple):
    """One host's answer.

    Attributes:
        status: the document of ``status --json``; None if there is none.
        figures: None if its line has ``error`` in their place, printable.
        text: what follows the document: with ``-v`` the host's own table.
        same_as: the name before it that stands for the same host.
    """

    status: dict[str, Any] | None = None
    figures: Figures | None = None
    error: str = ""
    text: str = ""
    same_as: str = ""


def read_answer(said: Said) -> Answer:
    """Return what a host has said, as far as it can be believed to be a status of this schema."""
    out, last = said.out, said.err.rstrip().rpartition("\n")[2]
    why = shown(last.removeprefix("safe-gpu: ").removeprefix("warning: "))
    if said.code == TOO_LATE:
        return Answer(error=why or f"did not answer within {SECONDS:g} s")
    if said.code == 255:
        advice = next((advice for sign, advice in _ADVICE.items() if sign in why), "")
        return Answer(error=f"{advice} ({why})" if advice else why or "ssh cannot reach it")
    if said.code in _NOT_FOUND:
        where = "set remote_command in [host] of ~/.config/safe-gpu/config.ini"
        return Answer(error=f"has no safe-gpu on its PATH: {where} ({why})")
    if said.code:
        return Answer(error=why or f"its safe-gpu status ends with exit code {said.code}")
    if not out.startswith("{"):
        banner = shown(out.split("\n", 1)[0])
        return Answer(error=f"its login files write before the JSON: {banner!r}; let them write on a terminal only")
    try:
        status, end = json.JSONDecoder().raw_decode(out)
        if status["schema"] != SCHEMA:
            schema = shown(str(status["schema"]))
            return Answer(error=f"answers in schema {schema}, and this safe-gpu reads {SCHEMA}: update the older one")
        return Answer(status, figures_of(status, time.time()), text=out[end:])
    except NO_DOCUMENT as err:
        return Answer(error=f"its answer cannot be read: {shown(f'{type(err).__name__}: {err}')}")


def shown(text: str) -> str:
    """Return the beginning of a text as printable words."""
    return " ".join(printable(text[:_LONGEST_REASON]).split())


_RIGHT = ("Free", "Waiting", "Longest")

_MOST = {"Held by": 80}  # columns of a terminal

Answers = Mapping[str, Answer]
"""Name of a host -> its answer, in the order of the lines."""


def arranged(answers: Answers, most_free_first: bool) -> Answers:
    """Return them in the order of the lines, where a host under a second name has that in place of its figures."""
    found: dict[str, Answer] = {}
    names: dict[str, str] = {}
    for name, one in answers.items():
        if one.figures and (first := names.setdefault(one.figures.identity, name)) != name:
            one = one._replace(figures=None, error=f"the same host as {first}", same_as=first)
        found[name] = one
    if not most_free_first:
        return found
    return dict(sorted(found.items(), key=lambda item: -item[1].figures.free if item[1].figures else 1))


def render_hosts(answers: Answers, *, width: int, color: bool, verbose: bool = False) -> str:
    """Return a line for each host, or why it has no figures; ``verbose`` adds each host's own table."""
    known = {name: one.figures for name, one in answers.items() if one.figures}
    free, total = sum(one.free for one in known.values()), sum(one.total for one in known.values())
    waiting = sum(one.waiting for one in known.values())
    hosts = plural(sum(not one.same_as for one in answers.values()), "host")
    summary = f"{free} of {plural(total)} free on {len(known)} of {hosts}" + (f", {waiting} waiting" if waiting else "")

    columns = [names := Column("HOST", answers)]
    for title in TITLES:
        cells = (known[name].cells[title] if name in known else "" for name in answers)
        columns.append(Column(title.upper(), cells, right=title in _RIGHT, most=_MOST.get(title, 40)))
    head, *rows = table(columns, width, optional=("GPU", "LONGEST"))
    lines = [paint(summary, "bold", color), "", paint(head, "bold", color)]
    for (name, one), begin, row in zip(answers.items(), names.cells, rows, strict=True):
        indent = " " * (names.width + len(GAP))
        if name in known:
            lines.append(row)
            told = [line for text in known[name].broken for line in wrapped(text, width, indent)]
        else:
            told = wrapped(one.error, width, names.padded(begin) + GAP[1:], indent)
        lines += (paint(line, "yellow", color) for line in told)
    for name in known if verbose else ():
        lines += ["", paint(f"{name}:", "bold", color), printable_lines(answers[name].text.strip("\n"), 1 << 17)]
    return "\n".join(lines)


def document(answers: Answers) -> dict[str, Any]:
    """Return the document of ``status --json`` with hosts: ``status`` or ``error`` of each.

    Where an earlier name stands for the same host, ``same_as`` is that name.
    """
    hosts: dict[str, Any] = {}
    for name, one in answers.items():
        hosts[name] = {"error": one.error} if one.status is None else {"status": one.status}
        hosts[name] |= {"same_as": one.same_as} if one.same_as else {}
    return {"schema": SCHEMA, "hosts": hosts}


_INTERVAL = 5.0


def answers_of(hosts: Collection[str], script: str) -> Answers:
    """Return what each host answers, in their order."""
    found = dict(answers(hosts, script))
    return {host: found[host] for host in hosts}


def script_of_status(vendor: str | None, verbose: bool = False) -> str:
    """Return what asks a host for its status; ``verbose`` for the table after the document too."""
    status = f"{remote_command()} status" + (f" --vendor {vendor}" if vendor else "")
    return f"{status} --json" + f" && COLUMNS={columns()} {status} -v" * verbose


def _chosen(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the hosts that the command is about; where none are known, a usage error."""
    try:
        if hosts := options.host or known_hosts(os.environ):
            return tuple(hosts)
    except ValueError as err:
        options.usage_error(f"SAFE_GPU_HOSTS: {err}")
    options.usage_error("which hosts? set SAFE_GPU_HOSTS=gpu1,gpu2, or hosts in ~/.config/safe-gpu/config.ini")
    return ()


def status_of_hosts(options: argparse.Namespace) -> int:
    """Print the status of the hosts that the options choose."""
    hosts = _chosen(options)
    for option in ("prometheus", "free", "mine", "user", *(() if options.html else ("output",))):
        if getattr(options, option):
            options.usage_error(f"--{option} is about one host: it does not go with --host and --all-hosts")
    script = script_of_status(options.vendor, options.verbose and not (options.json or options.html))
    if options.watch:
        _watch(options, hosts, script)
    found = arranged(answers_of(hosts, script), options.sort)
    if options.json:
        print_json(document(found))
    elif options.html:
        write_page({name: one.error or one.status or "" for name, one in found.items()}, options)
    else:
        print_lines(_picture(found, options))
    known = [one for one in found.values() if one.status is not None]
    return 0 if len(known) == len(found) else EX_SOME_HOSTS if known else EX_NO_HOST


def _picture(answers: Answers, options: argparse.Namespace) -> str:
    return render_hosts(answers, width=columns(), color=in_color(sys.stdout), verbose=options.verbose)


def _watch(options: argparse.Namespace, hosts: Collection[str], script: str) -> None:
    """Show them until Ctrl-C or a signal: each host is asked again an interval after its answer, whatever others do.

    As JSON, each answer is a line of its own.
    """
    from .watching import watching

    interval = _INTERVAL if options.interval is None else options.interval
    known = dict.fromkeys(hosts, Answer(error="..."))
    with watching(interval, as_lines=options.json) as show:
        for host, answer in answers(hosts, script, interval):
            known[host] = answer
            found = document({host: known[host]})
            show(json.dumps(found) if options.json else _picture(arranged(known, options.sort), options))


_DAY = 86400.0  # seconds

_EVERY = 300.0  # seconds between two makings


def write_page(hosts: Mapping[str, Mapping[str, Any] | str], options: argparse.Namespace) -> None:
    """Write the page, with the use of this host in the last day if it is among them.

    Args:
        hosts: name -> the document of ``status --json``, or why there is none.
    """
    from ..coordination.directory import state_dir_path
    from ..status.history import claims_between
    from ..status.report import report

    now, here = time.time(), (os.uname().nodename, state_dir_path())
    claims, warnings = claims_between(now - _DAY, now)
    for warning in warnings:
        say(f"warning: {warning}")
    users = [row for row in report(claims, (), "", now - _DAY, now) if row.by == "user"]
    own = [name for name, one in hosts.items() if not isinstance(one, str) and (one["host"], one["state_dir"]) == here]
    every = _EVERY if options.interval is None else options.interval
    write_output(render_page(hosts, now=now, every=every, use=dict.fromkeys(own, users)), options.output)


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
