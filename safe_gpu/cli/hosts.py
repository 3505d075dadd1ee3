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
from collections.abc import Collection, Mapping, Sequence
from queue import Empty, SimpleQueue
from shlex import join, quote
from threading import Semaphore, Thread
from typing import Any, NamedTuple

from ..errors import SafeGpuError
from ..host.awaiting import Awaited, Tell
from ..host.foreign_files import printable, printable_lines
from ..host.programs import TooLate, TooMuch, environment, find_program, output_of
from ..settings.variables import known_hosts, setting_of_hosts
from ..status.document import NO_DOCUMENT, TITLES, Figures, figures_of
from ..status.facts import SCHEMA
from ..status.page import render_page
from ..status.table import table
from ..wording.text import GAP, Column, cut, paint, plural, wrapped
from .commands import EX_CANNOT_RUN, EX_NO_HOST, EX_SOME_HOSTS, EX_TRY_AGAIN
from .output import columns, in_color, is_piped, print_json, print_lines, say, write_output


def ssh_to(host: str, script: str, *options: str) -> list[str]:
    """Return the command that has ``sh`` on a host run a script of one line, without any question to the user.

    Raises:
        SafeGpuError: there is no ssh here.
    """
    ssh = find_program("ssh", os.environ)
    if ssh is None:
        raise SafeGpuError("there is no ssh on PATH: install OpenSSH's client to look at other hosts")
    if not options:
        options = ("-T",)
    return [ssh, *options, "-oBatchMode=yes", "-oConnectTimeout=5", "--", host, for_any_shell(script)]


def remote_command() -> str:
    """Return what starts safe-gpu on other hosts, as ``sh`` there reads it after ``exec``."""
    return setting_of_hosts("remote_command", os.environ) or "safe-gpu"


def for_any_shell(script: str) -> str:
    r"""Return ``sh -c SCRIPT`` as sh, csh and fish read it alike, with the script as one argument.

    Within quotes csh replaces ``!`` and fish reads ``\``; before a backslash, all of them take both as they are.

    >>> print(for_any_shell("echo 'hi!'"))
    sh -c 'echo '\''hi'\!\'
    """
    quoted = ""
    for part in re.findall(r"['\\!]|[^'\\!]+", script):
        if part in ("'", "\\", "!"):
            quoted += f"\\{part}"
        else:
            quoted += f"'{part}'"
    return f"sh -c {quoted}"


AT_ONCE = 16

SECONDS = 10.0
"""That a host has for its answer, once it is asked."""

TOO_LATE = 124  # what timeout(1) ends with

_LONGEST_ANSWER = 1 << 22  # bytes

_LONGEST_TABLE = 1 << 17  # characters of a host's own table


class SshResult(NamedTuple):
    """What a host has answered. ``code`` is ssh's exit code: 255 of its own, else the other side's."""

    code: int
    out: str
    err: str


def run_ssh(command: Sequence[str]) -> SshResult:
    """Run a command of ssh without a terminal, and return what the host says.

    ssh has a session of its own, so that no helper of it can ask on this terminal; timeout(1) ends it also where this
    process has ended.
    """
    try:
        limit = find_program("timeout", os.environ)
        if limit is not None:
            command = [limit, str(SECONDS), *command]
        output = output_of(command, env=os.environ, timeout=SECONDS + 1, most=_LONGEST_ANSWER, separate_stderr=True)
    except TooLate:
        return SshResult(TOO_LATE, "", "")
    except (OSError, TooMuch) as error:
        return SshResult(255, "", str(error))
    return SshResult(output.status, output.text, output.errors)


def stream_statuses(
    hosts: Collection[str], script: str, interval: float | None = None
) -> SimpleQueue[tuple[str, Answer]]:
    """Return a queue to which comes what each host answers; with an interval again and again, that long after its last
    answer."""
    slots = Semaphore(AT_ONCE)
    news = SimpleQueue[tuple[str, Answer]]()

    def follow(host: str, ssh: Sequence[str]) -> None:
        while True:
            with slots:
                news.put((host, read_answer(run_ssh(ssh))))
            if interval is None:
                return
            time.sleep(interval)

    for host in hosts:
        Thread(target=follow, args=(host, ssh_to(host, script)), daemon=True).start()
    return news


_LONGEST_REASON = 300

_ADVICE = {
    "Permission denied": "a password is asked for, or your key is refused",
    "Host key verification failed": "its key is not known here; run ssh to it once by hand",
}

_NOT_FOUND = (126, 127)  # what sh ends with

_MARK = "=== safe-gpu status ==="
"""A line before the answer of a host, since its login files may print something."""


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


def read_answer(result: SshResult) -> Answer:
    """Return what a host has said, as far as it can be believed to be a status of this schema."""
    text = _behind_mark(result.out)
    reason = _why_no_document(result, text)
    if reason:
        return Answer(error=reason)
    try:
        status, end = json.JSONDecoder().raw_decode(text)
        if status["schema"] != SCHEMA:
            schema = one_line(str(status["schema"]))
            return Answer(error=f"answers in schema {schema}, and this safe-gpu reads {SCHEMA}: update the older one")
        return Answer(status, figures_of(status, time.time()), text=text[end:])
    except NO_DOCUMENT as err:
        return Answer(error=f"its answer cannot be read: {one_line(f'{type(err).__name__}: {err}')}")


def _behind_mark(text: str) -> str:
    """Return what a host has printed without what its login files have; all of it where there is no mark, since another
    command than ours has answered."""
    _, mark, answer = text.partition(f"{_MARK}\n")
    if not mark:
        return text
    return answer


def _why_no_document(result: SshResult, text: str) -> str:
    """Return why a host has answered without a document; "" if there is one, or the beginning of one.

    Args:
        text: what it has printed, without what its login files have.
    """
    last_line = result.err.rstrip().rpartition("\n")[2]
    said = one_line(last_line.removeprefix("safe-gpu: ").removeprefix("warning: "))
    if result.code == TOO_LATE:
        return said or f"did not answer within {SECONDS:g} s"
    if result.code == 255:
        for sign, advice in _ADVICE.items():
            if sign in said:
                return f"{advice} ({said})"
        return said or "ssh cannot reach it"
    if result.code in _NOT_FOUND:
        where = "set remote_command in [host] of ~/.config/safe-gpu/config.ini"
        return f"has no safe-gpu on its PATH: {where} ({said})"
    if result.code != 0:
        return said or f"its safe-gpu status ends with exit code {result.code}"
    if not text.startswith("{"):
        banner = one_line(text.split("\n", 1)[0])
        where = "look at remote_command, and at command= in ~/.ssh/authorized_keys there"
        return f"something else answers than safe-gpu status: {banner!r}; {where}"
    return ""


def one_line(text: str) -> str:
    """Return the beginning of a text as printable words."""
    return " ".join(printable(text[:_LONGEST_REASON]).split())


_RIGHT = ("Free", "Waiting", "Longest")

_NAMES = "Held by"
"""The title of the column with names of users."""

_MOST = {"Held by": 80}  # columns of a terminal

Statuses = Mapping[str, Answer]
"""Name of a host -> its answer, in the order of the lines."""


def in_display_order(statuses: Statuses, most_free_first: bool) -> Statuses:
    """Return them in the order of the lines, where a host under a second name has that in place of its figures."""
    found: dict[str, Answer] = {}
    first_names: dict[str, str] = {}
    for name, answer in statuses.items():
        found[name] = answer
        if answer.figures is None:
            continue
        first = first_names.setdefault(answer.figures.identity, name)
        if first != name:
            found[name] = answer._replace(figures=None, error=f"the same host as {first}", same_as=first)
    if not most_free_first:
        return found
    return dict(sorted(found.items(), key=lambda item: _rank(item[1])))


def _rank(answer: Answer) -> int:
    """Return less for more free GPUs, and most for a host without figures."""
    if answer.figures is None:
        return 1
    return -answer.figures.free


def render_hosts(statuses: Statuses, *, width: int, color: bool, verbose: bool = False, piped: bool = False) -> str:
    """Return a line for each host, or why it has no figures.

    Args:
        verbose: whether each host's own table follows.
        piped: whether another program reads it, so that names are whole, and lines as much wider as they need.
    """
    names = Column("HOST", statuses, whole=piped)
    shown = [names]
    for title in TITLES:
        cells = [_cell(answer, title) for answer in statuses.values()]
        most = _MOST.get(title, 40)
        whole = piped and title == _NAMES
        if whole:
            most = 0  # it takes no room from the others
        shown.append(Column(title.upper(), cells, right=title in _RIGHT, most=most, whole=whole))
    head, *rows = table(shown, width, optional=("GPU", "LONGEST"))
    lines = [paint(_summary(statuses), "bold", color), "", paint(head, "bold", color)]
    indent = " " * (names.width + len(GAP))
    for answer, name, row in zip(statuses.values(), names.cells, rows, strict=True):
        if answer.figures is None:
            told = wrapped(answer.error, width, names.padded(name) + GAP[1:], indent)
        else:
            lines.append(row)
            told = []
            for sentence in answer.figures.broken:
                told += wrapped(sentence, width, indent)
        for line in told:
            lines.append(paint(line, "yellow", color))
    if verbose:
        for host, answer in statuses.items():
            if answer.figures is not None:
                own_table = printable_lines(answer.text.strip("\n"), _LONGEST_TABLE)
                lines += ["", paint(f"{host}:", "bold", color)]
                lines += [line if piped else cut(line, width) for line in own_table.split("\n")]
    return "\n".join(lines)


def _summary(statuses: Statuses) -> str:
    """Return ``3 of 5 GPUs free on 2 of 3 hosts, 1 waiting``."""
    known = [answer.figures for answer in statuses.values() if answer.figures is not None]
    hosts = [answer for answer in statuses.values() if not answer.same_as]
    free = sum(figures.free for figures in known)
    total = sum(figures.total for figures in known)
    waiting = sum(figures.waiting for figures in known)
    summary = f"{free} of {plural(total)} free on {len(known)} of {plural(len(hosts), 'host')}"
    if waiting:
        summary += f", {waiting} waiting"
    return summary


def _cell(answer: Answer, title: str) -> str:
    if answer.figures is None:
        return ""
    return answer.figures.cells[title]


def document(statuses: Statuses) -> dict[str, Any]:
    """Return the document of ``status --json`` with hosts: ``status`` or ``error`` of each.

    Where an earlier name stands for the same host, ``same_as`` is that name.
    """
    hosts: dict[str, Any] = {}
    for name, answer in statuses.items():
        if answer.status is None:
            hosts[name] = {"error": answer.error}
        else:
            hosts[name] = {"status": answer.status}
        if answer.same_as:
            hosts[name]["same_as"] = answer.same_as
    return {"schema": SCHEMA, "hosts": hosts}


_INTERVAL = 5.0


_NAMED = 3  # hosts in a line about those that are awaited


def statuses_of(hosts: Collection[str], script: str, tell: Tell = say) -> Statuses:
    """Return what each host answers, in their order.

    Args:
        tell: takes a line where that takes long.
    """
    news = stream_statuses(hosts, script)
    awaited = Awaited("", tell, lambda: f"each has {SECONDS:g} s for its answer")
    missing = list(hosts)
    found: dict[str, Answer] = {}
    while missing:
        awaited.what = f"ssh to {', '.join(missing[:_NAMED])}"
        if len(missing) > _NAMED:
            awaited.what += f" and {len(missing) - _NAMED} more"
        try:
            host, answer = news.get(timeout=min(awaited.pause(), SECONDS))
        except Empty:
            awaited.tell_if_due()
        else:
            missing.remove(host)
            found[host] = answer
    return {host: found[host] for host in hosts}


def script_of_status(vendor: str | None, verbose: bool = False) -> str:
    """Return what asks a host for its status; ``verbose`` for the table after the document too."""
    status = f"{remote_command()} status"
    if vendor:
        status += f" --vendor {vendor}"
    script = f"echo '{_MARK}'; {status} --json"
    if verbose:
        script += f" && COLUMNS={columns()} {status} -v"
    return script


def _chosen(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the hosts that the command is about; where none are known, a usage error."""
    try:
        hosts = options.host or known_hosts(os.environ)
    except ValueError as err:
        options.usage_error(f"SAFE_GPU_HOSTS: {err}")
    if not hosts:
        options.usage_error("which hosts? set SAFE_GPU_HOSTS=gpu1,gpu2, or hosts in ~/.config/safe-gpu/config.ini")
    return tuple(hosts)


def status_of_hosts(options: argparse.Namespace) -> int:
    """Print the status of the hosts that the options choose."""
    hosts = _chosen(options)
    of_one_host = ["prometheus", "free", "mine", "user"]
    if not options.html:
        of_one_host.append("output")
    for option in of_one_host:
        if getattr(options, option):
            options.usage_error(f"--{option} is about one host: it does not go with --host and --all-hosts")
    script = script_of_status(options.vendor, options.verbose and not (options.json or options.html))
    if options.watch:
        _watch(options, hosts, script)
    statuses = in_display_order(statuses_of(hosts, script), options.sort)
    if options.json:
        print_json(document(statuses))
    elif options.html:
        write_page({name: one.error or one.status or "" for name, one in statuses.items()}, options)
    else:
        print_lines(_picture(statuses, options))
    known = [one for one in statuses.values() if one.status is not None]
    if len(known) == len(statuses):
        return 0
    if known:
        return EX_SOME_HOSTS
    return EX_NO_HOST


def _picture(statuses: Statuses, options: argparse.Namespace) -> str:
    color = in_color(sys.stdout)
    return render_hosts(statuses, width=columns(), color=color, verbose=options.verbose, piped=is_piped())


def _watch(options: argparse.Namespace, hosts: Collection[str], script: str) -> None:
    """Show them until Ctrl-C or a signal: each host is asked again an interval after its answer, whatever others do.

    As JSON, each answer is a line of its own.
    """
    from .watching import watching

    interval = options.interval
    if interval is None:
        interval = _INTERVAL
    known = dict.fromkeys(hosts, Answer(error="..."))
    with watching(interval, as_lines=options.json) as show:
        news = stream_statuses(hosts, script, interval)
        while True:
            host, answer = news.get()
            known[host] = answer
            if options.json:
                show(json.dumps(document({host: answer})))
            else:
                show(_picture(in_display_order(known, options.sort), options))


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

    now = time.time()
    here = (os.uname().nodename, state_dir_path())
    claims, warnings = claims_between(now - _DAY, now)
    for warning in warnings:
        say(f"warning: {warning}")
    users = [row for row in report(claims, (), "", now - _DAY, now) if row.by == "user"]
    use = {}
    for name, one in hosts.items():
        if not isinstance(one, str) and (one["host"], one["state_dir"]) == here:
            use[name] = users
    every = options.interval
    if every is None:
        every = _EVERY
    write_output(render_page(hosts, now=now, every=every, use=use), options.output)


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run_on_hosts(options: argparse.Namespace) -> int:
    """Try one host after the other, the one with the most free GPUs first, until one has claimed; return the exit code
    of ssh, which is the command's, or why there is none."""
    if getattr(options, "timeout", 0) != 0:
        options.usage_error("--host takes GPUs that are free now: only --timeout 0 goes with it")
    if options.nb_gpus == "job":
        options.usage_error("-n job does not go with --host: the batch job is on this host")
    tell = _say_nothing if options.quiet else say
    found = statuses_of(options.host, script_of_status(options.vendor), tell)
    statuses = in_display_order(found, most_free_first=True)
    reasons = {name: answer.error for name, answer in statuses.items()}
    codes = {EX_NO_HOST for answer in statuses.values() if answer.status is None}
    for host, answer in statuses.items():
        if answer.figures is None:
            continue
        if sys.stderr.isatty() and not options.quiet:
            say(f"on {host}")
        pending = f"/tmp/safe-gpu-run-{os.urandom(8).hex()}"
        end = _run(host, _script(pending, options))
        has_claimed = end.code == 0 or not _withdraw(host, pending)
        if end.signal:
            return 128 + end.signal
        if has_claimed:
            return end.code
        codes.add(end.code)
        reasons[host] = f"exit code {end.code}"
        if end.code == EX_TRY_AGAIN:
            reasons[host] = _why_not_free(answer.figures)
    lines = [f"  {host}: {reason}" for host, reason in reasons.items()]
    say("\n".join(["no host has enough free GPUs now, and run --host does not wait:", *lines]))
    if len(codes) == 1:
        return codes.pop()
    return EX_TRY_AGAIN


def _say_nothing(line: str) -> None:
    return


def _withdraw(host: str, pending: str) -> bool:
    """Remove the directory of a try there; return whether it was there: then the try has not claimed, and will not."""
    return run_ssh(ssh_to(host, f"rmdir {pending}")).code == 0


def _why_not_free(figures: Figures) -> str:
    """Return ``1 of 8 GPUs free, 1 waiting: anna``."""
    reason = f"{figures.free} of {plural(figures.total)} free"
    if figures.waiting:
        reason += f", {figures.waiting} waiting: {figures.waiters}"
    return reason


class _SshEnd(NamedTuple):
    """How ssh has ended: its exit code, and the signal with which this process was to end it, or 0."""

    code: int
    signal: int


def _run(host: str, script: str) -> _SshEnd:
    """Run a script there, with this terminal where it is the command's."""
    options: tuple[str, ...] = ("-T",)
    if os.isatty(0) and os.isatty(1) and os.tcgetpgrp(0) == os.getpgrp():
        options = ("-t", "-oLogLevel=ERROR")
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
    if code < 0:
        code = 128 - code
    return _SshEnd(code, stopped)


def _script(pending: str, options: argparse.Namespace) -> str:
    """Return what ``sh`` is to run on the other host, in the directory of this process there."""
    directory = quote(_working_directory())
    words = join([*options.words, "--pending", pending, "--timeout", "0", "--", *options.command])
    no_directory = f"{{ echo there is no directory {directory} >&2; exit {EX_CANNOT_RUN}; }}"
    steps = [
        f"mkdir -m 700 {pending} || exit {EX_CANNOT_RUN}",
        f"cd {directory} 2>/dev/null || {no_directory}",
        f"exec {remote_command()} run {words}",
    ]
    return "; ".join(steps)


def _working_directory() -> str:
    """Return the directory of this process, by the name that it has on all hosts rather than where its links lead
    here."""
    by_name = os.environ.get("PWD", "")
    if os.path.isabs(by_name) and os.path.isdir(by_name) and os.path.samefile(by_name, "."):
        return by_name
    return os.getcwd()
