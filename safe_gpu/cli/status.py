"""``safe-gpu status`` and ``history``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, NoReturn

from ..errors import SafeGpuError
from .commands import EX_NO_DRIVER, EX_STATE_DIR
from .output import columns, in_color, is_terminal, print_json, say, write_whole
from .parser import CommandLine, add_vendor

if TYPE_CHECKING:
    from ..status.facts import HostStatus
    from ..status.history import PastClaim


# ``safe-gpu status``: which GPUs are free, who has the others, who waits; once, or again and again.


_INTERVAL = 2.0


def configure_status(parser: argparse.ArgumentParser) -> None:
    """Set its options and its handler."""
    parser.description = "Which GPUs are free, who has the others, and who waits."
    parser.epilog = "examples:\n  safe-gpu status --watch --interval 10s\n  safe-gpu status --json | jq '.gpus[].state'"
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for programs; sizes in bytes, times in Unix seconds")
    form.add_argument("--prometheus", action="store_true", help="metrics in the text format of Prometheus")
    form.add_argument("--free", action="store_true", help="only the indices of the free GPUs, one on a line")
    parser.add_argument(
        "--output", metavar="FILE", help="with --prometheus: write this file, whole, for node_exporter's textfiles"
    )
    parser.add_argument("--mine", action="store_true", help="only GPUs that you use, and your places in the queue")
    parser.add_argument("--user", metavar="U", help="the same of this user")
    parser.add_argument("-v", "--verbose", action="store_true", help="a line for each waiter, also of one user")
    add_vendor(parser, "only GPUs of this vendor (default: of all)")
    parser.add_argument("--watch", action="store_true", help="show it again every two seconds until interrupted")
    parser.add_argument(
        "--interval", type=seconds, default=None, metavar="D", help="with --watch: time between looks, such as 10s, 1m"
    )
    parser.set_defaults(handler=_status, usage_error=parser.error)


def seconds(text: str) -> float:
    """Parse the value of ``--interval``."""
    from ..settings import parse_duration

    found = parse_duration(text, "interval", spelling=CommandLine)
    if not found or found < 0.1:
        raise ValueError(f"--interval {text} is not possible: a tenth of a second is the least")
    return found


def _status(options: argparse.Namespace) -> int:
    user: str | None = options.user
    if options.mine:
        if user is not None:
            options.usage_error("--mine and --user do not go together")
        from ..procfs import user_name

        user = user_name(os.geteuid())
    for option, other in (("interval", "watch"), ("output", "prometheus")):
        if getattr(options, option) is not None and not getattr(options, other):
            options.usage_error(f"--{option} goes with --{other}")
    for form in ("prometheus", "free"):
        if getattr(options, form) and (user is not None or options.watch):
            options.usage_error(f"--{form} goes with none of --mine, --user and --watch")
    if options.watch:
        _watch(options, user)
    try:
        status = _gathered(options.vendor)
    except SafeGpuError:
        if options.prometheus:
            _write_metrics("safe_gpu_up 0\n", options.output)
        raise
    warnings: Sequence[str] = ()
    if options.prometheus or options.free:
        warnings = (*status.broken, *status.warnings)
    elif options.json:
        warnings = (*status.broken, *filter(None, [status.shift]))
    for warning in warnings:
        say(f"warning: {warning}")
    if options.prometheus:
        from ..status.render import render_metrics

        _write_metrics(render_metrics(status), options.output)
    elif options.free:
        from ..status.gather import free_labels

        sys.stdout.writelines(f"{label}\n" for label in free_labels(status))
    elif options.json:
        print_json(_of(status, user).to_dict())
    else:
        print(_table(status, user, options.verbose))
    return EX_STATE_DIR if status.warnings else EX_NO_DRIVER if status.broken else 0


def _write_metrics(text: str, path: str | None) -> None:
    if path in (None, "-"):
        sys.stdout.write(text)
        return
    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise OSError(f"--output {path}: there is no such directory: make it, for the textfile collector to read")
    write_whole(path, text)


def _gathered(vendor: str | None) -> HostStatus:
    from ..status.gather import gather, of_vendor

    return gather() if vendor is None else of_vendor(gather(), vendor)


def _of(status: HostStatus, user: str | None) -> HostStatus:
    from ..status.gather import of_user

    return status if user is None else of_user(status, user)


def _table(status: HostStatus, user: str | None, verbose: bool) -> str:
    from ..status.render import render

    shown = None if user is None else _of(status, user)
    bar = "━╾─" if sys.stdout.encoding.lower().startswith("utf") else "##-"
    return render(status, width=columns(), color=in_color(sys.stdout), shown=shown, verbose=verbose, bar=bar)


def _watch(options: argparse.Namespace, user: str | None) -> NoReturn:
    """Show it until a signal ends it; on a terminal in place, elsewhere one after the other."""
    import json

    from ..text import cut

    interval = _INTERVAL if options.interval is None else options.interval
    in_place = is_terminal(sys.stdout) and not options.json
    with _alternate_screen() if in_place else nullcontext(_print) as show:
        while True:
            status = _gathered(options.vendor)
            if options.json:
                _print("", json.dumps(_of(status, user).to_dict()))
            else:
                now = time.strftime("%H:%M:%S", time.localtime(status.taken_at))
                head = cut(f"{now}, every {interval:g} s (Ctrl-C ends)", columns())
                show(f"{head}\n", f"{_table(status, user, options.verbose)}\n")
            time.sleep(interval)


def _print(head: str, text: str) -> None:
    print(f"{head}{text}", flush=True)


_ENTER = "\x1b[?1049h\x1b[?25l\x1b[H\x1b[2J"  # the second screen, without a cursor
_LEAVE = "\x1b[?25h\x1b[?1049l"


@contextmanager
def _alternate_screen() -> Iterator[Callable[[str, str], None]]:
    """Give a function that shows a head and a text on the terminal's second screen.

    However that ends, and while it is suspended, the first screen is back, and the last text stays there.
    """
    import signal

    from ..coordination.signals import unwind_on_signals

    picture = last = ""

    def write(text: str) -> None:  # past the buffer of stdout, in which an exception would leave a part
        data = text.encode(sys.stdout.encoding, "replace")
        while data:
            data = data[os.write(1, data) :]

    def show(head: str, text: str) -> None:
        nonlocal picture, last
        picture, last = redrawn(head + text, os.get_terminal_size(1).lines or 24), text
        write(picture)

    def suspend(number: int, frame: object) -> None:
        write(_LEAVE + last)
        signal.signal(number, before)
        os.kill(os.getpid(), number)
        signal.signal(number, suspend)
        write(_ENTER + picture)

    before = signal.getsignal(signal.SIGTSTP)
    with unwind_on_signals():
        try:
            signal.signal(signal.SIGTSTP, suspend)
            write(_ENTER)
            yield show
        finally:
            write(_LEAVE + last)


def redrawn(text: str, rows: int) -> str:
    """Return what puts this text over the one before it on a terminal with that many rows, without clearing it first:
    an empty screen between two pictures flickers.
    """
    lines = text.splitlines()
    if len(lines) >= rows:
        kept = max(0, rows - 2)
        lines = [*lines[:kept], f"... {len(lines) - kept} more lines"][: rows - 1]
    return "\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J"


# ``safe-gpu history``: the claims of this host, as last(1) shows logins, and GPU-hours.


_DAYS = 30
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what spreadsheets would run
_FORMS = ("%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y-%m")


def configure_history(parser: argparse.ArgumentParser) -> None:
    """Set its options and its handler."""
    parser.description = "Claims on this host, the latest first, or GPU-hours by user, GPU, job or day."
    parser.epilog = """examples:
  safe-gpu history --user anna --since yesterday
  safe-gpu history --by user --since 2026-11-01 --until 2026-12-01
  safe-gpu history --csv > claims.csv

A claim that was not released but died ended at some time between two others;
GPU-hours have a least and a most for that."""
    parser.add_argument("--user", metavar="U", help="claims of this user only")
    parser.add_argument(
        "--since",
        type=moment,
        metavar="D",
        help="claims that held GPUs after this: 2026-11-01, '2026-11-01 12:00', today, yesterday, or 7d for seven days "
        f"ago (default {_DAYS} days ago)",
    )
    parser.add_argument("--until", type=moment, metavar="D", help="and before this (default now)")
    parser.add_argument("--by", choices=("user", "gpu", "job", "day"), help="GPU-hours in place of claims")
    parser.add_argument(
        "--idle",
        action="store_true",
        help="only claims that hold a GPU now that has shown no work, for idle_report_after where the policy sets that",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for programs; times in Unix seconds")
    form.add_argument("--csv", action="store_true", help="for spreadsheets; times in UTC")
    parser.set_defaults(handler=_history, usage_error=parser.error)


def moment(text: str) -> float:
    """Parse a date, a time, a word or an age, in local time, to Unix seconds."""
    from ..settings import parse_duration

    word, now = text.strip().lower(), time.time()
    today = time.localtime(now)
    if word == "now":
        return now
    if word in ("today", "yesterday"):
        day = today.tm_mday - (word == "yesterday")
        return time.mktime((today.tm_year, today.tm_mon, day, 0, 0, 0, 0, 0, -1))
    for form in _FORMS:
        try:
            parsed = time.strptime(word.upper(), form)
            return max(0.0, time.mktime((*parsed[:8], -1)))
        except (ValueError, OverflowError):
            continue
    try:
        age = parse_duration(word)
    except SafeGpuError:
        age = None
    if age is None or word[-1:].isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time: write 2026-11-01, '2026-11-01 12:00', today, yesterday, or 7d for seven days ago"
        )
    return max(0.0, now - age)


def _history(options: argparse.Namespace) -> int:
    from ..status.history import claims_between

    now = time.time()
    until = now if options.until is None else min(now, options.until)
    since = max(0.0, until - _DAYS * 86400) if options.since is None else options.since
    if since > until:
        options.usage_error("--since is not before --until")
    claims, warnings = claims_between(since, until)
    for warning in warnings:
        say(f"warning: {warning}")
    if options.user is not None:
        claims = [claim for claim in claims if claim.user == options.user]
    if options.idle:
        claims = _without_work(claims)
    _show(claims, options, since, until)
    return 0


def _without_work(claims: list[PastClaim]) -> list[PastClaim]:
    """Return the running claims with a GPU that has shown no work since an earlier look, or as long as the policy says.

    Their user is the one that the kernel knows. Claims whose user it does not know are left out.
    """
    from dataclasses import replace

    from ..procfs import user_name
    from ..status.gather import gather

    idle = [one for one in gather().gpus if one.claim and one.idle_for and one.idle_report is not False]
    uids = {one.gpu.uuid: one.claim.uid for one in idle if one.claim and one.claim.uid is not None}
    found = []
    for claim in claims:
        uid = next((uids[uuid] for uuid in claim.gpus if uuid in uids), None)
        if claim.running and uid is not None:
            found.append(replace(claim, user=user_name(uid), uid=uid))
    return found


_FACTS = "user uid pid job command host gpus labels since until running seen ended share of".split()


def _show(claims: list[PastClaim], options: argparse.Namespace, since: float, until: float) -> None:
    """Claims, or their sums, in the form that was asked for."""
    from ..status.history import gpu_hours_by, hours_held, table_of_claims, table_of_use

    head: dict[str, object] = {"schema": 1, "since": since, "until": until}
    rows: Iterable[Sequence[object]]
    if options.by:
        uses = gpu_hours_by(claims, options.by, since, until)
        head["by"], kind, names = options.by, "use", [options.by, "claims"]
        rows = ((one.key, one.claims, round(one.least, 4), round(one.most, 4)) for one in uses)
    else:
        claims.reverse()
        kind, names = "claims", _FACTS
        rows = (
            [getattr(one, name) for name in _FACTS]
            + [round(seconds * len(one.gpus) / 3600, 4) for seconds in hours_held(one, since, until)]
            for one in claims
        )
    names = [*names, "gpu_hours_least", "gpu_hours_most"]
    if options.json:
        _print_json(head, kind, (dict(zip(names, row, strict=True)) for row in rows))
    elif options.csv:
        import csv

        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(map(_cell, names, row) for row in rows)
    elif not claims:
        print("no claims in this time")
    else:
        width = columns()
        table = table_of_use(uses, options.by, width) if options.by else table_of_claims(claims, since, until, width)
        for line in table:
            print(line)


# A history may be long, so it is never put together as one text.


def _print_json(head: dict[str, object], name: str, entries: Iterable[dict[str, object]]) -> None:
    import json

    print(json.dumps({**head, name: []}, indent=2).removesuffix("]\n}"), end="")
    before = "\n    "
    for entry in entries:
        print(before + json.dumps(entry, indent=2).replace("\n", "\n    "), end="")
        before = ",\n    "
    print("]\n}" if before == "\n    " else "\n  ]\n}")


def _cell(name: str, value: object) -> object:
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    if isinstance(value, str):
        return f"'{value}" if value.startswith(_FORMULA) else value
    if value is not None and name in ("since", "until", "seen", "ended"):
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(float(str(value))))
    return value  # None is an empty cell
