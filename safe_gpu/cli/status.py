"""``safe-gpu status`` and ``history``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..errors import SafeGpuError
from .commands import EX_NO_DRIVER, EX_STATE_DIR
from .output import columns, in_color, is_terminal, say
from .parser import CommandLine, add_vendor

if TYPE_CHECKING:
    from ..status.facts import HostStatus
    from ..status.history import GpuHours, PastClaim


# ``safe-gpu status``: which GPUs are free, who has the others, who waits; once, or again and again.


_INTERVAL = 2.0


def configure_status(parser: argparse.ArgumentParser) -> None:
    """Its options and its handler."""
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
    add_vendor(parser, "only GPUs of this vendor (default: of all)")
    parser.add_argument("--watch", action="store_true", help="show it again every two seconds until interrupted")
    parser.add_argument(
        "--interval", type=seconds, default=None, metavar="D", help="with --watch: time between looks, such as 10s, 1m"
    )
    parser.set_defaults(handler=_status, usage_error=parser.error)


def seconds(text: str) -> float:
    """The value of --interval."""
    from ..settings import parse_duration

    found = parse_duration(text, "interval", spelling=CommandLine)
    if not found or found < 0.1:
        raise ValueError(f"--interval {text} is not possible: a tenth of a second is the least")
    return found


def _status(options: argparse.Namespace) -> int:
    if options.interval is not None and not options.watch:
        options.usage_error("--interval goes with --watch")
    if options.output is not None and not options.prometheus:
        options.usage_error("--output goes with --prometheus")
    user = _user(options)
    for form in ("prometheus", "free"):
        if getattr(options, form) and (user is not None or options.watch):
            options.usage_error(f"--{form} goes with none of --mine, --user and --watch")
    if options.watch:
        interval = _INTERVAL if options.interval is None else options.interval
        _watch(interval, as_json=options.json, user=user, vendor=options.vendor)
    status = _gathered(options.vendor)
    if options.prometheus or options.free or options.json:
        for warning in status.broken:
            say(f"warning: {warning}")
    if options.prometheus or options.free:
        for warning in status.warnings:
            say(f"warning: {warning}")
    elif options.json and status.shift:
        say(f"warning: {status.shift}")
    if options.prometheus:
        _metrics(status, options.output)
    elif options.free:
        from ..status.gather import free_labels

        sys.stdout.writelines(f"{label}\n" for label in free_labels(status))
    else:
        print(_json(_of(status, user), indent=2) if options.json else _table(status, user))
    return EX_STATE_DIR if status.warnings else EX_NO_DRIVER if status.broken else 0


def _gathered(vendor: str | None) -> HostStatus:
    from ..status.gather import gather

    if vendor is None:
        return gather()
    from ..status.gather import of_vendor

    return of_vendor(gather(), vendor)


def _user(options: argparse.Namespace) -> str | None:
    """Whose GPUs are to be shown; None for everybody's."""
    if options.mine:
        if options.user is not None:
            options.usage_error("--mine and --user do not go together")
        from ..procfs import user_name

        return user_name(os.geteuid())
    user: str | None = options.user
    return user


def _of(status: HostStatus, user: str | None) -> HostStatus:
    if user is None:
        return status
    from ..status.gather import of_user

    return of_user(status, user)


def _metrics(status: HostStatus, output: str | None) -> None:
    from ..status.render import render_metrics

    text = render_metrics(status)
    if output is None or output == "-":
        sys.stdout.write(text)
    else:
        from .output import write_whole

        write_whole(output, text)


def _table(status: HostStatus, user: str | None = None) -> str:
    from ..status.render import render

    shown = None if user is None else _of(status, user)
    return render(status, width=columns(), color=in_color(sys.stdout), shown=shown)


def _json(status: HostStatus, indent: int | None = None) -> str:
    import json

    return json.dumps(status.to_dict(), indent=indent)


def _watch(interval: float, *, as_json: bool, user: str | None, vendor: str | None) -> None:
    """Show it until somebody interrupts; on a terminal in place, elsewhere one after the other."""
    import time

    from ..text import cut

    in_place = is_terminal(sys.stdout) and not as_json
    if in_place:
        sys.stdout.write("\x1b[H\x1b[2J")
    while True:
        status = _gathered(vendor)
        if as_json:
            text = f"{_json(_of(status, user))}\n"
        else:
            now = time.strftime("%H:%M:%S", time.localtime(status.taken_at))
            text = f"{cut(f'{now}, every {interval:g} s (Ctrl-C ends)', columns())}\n{_table(status, user)}\n"
            text = redrawn(text, _rows()) if in_place else f"{text}\n"
        sys.stdout.write(text)
        sys.stdout.flush()
        time.sleep(interval)


def _rows() -> int:
    try:
        return os.get_terminal_size(1).lines or 24
    except OSError:
        return 24


def redrawn(text: str, rows: int) -> str:
    """What puts this text over the one before it on a terminal with that many rows, without clearing it first: an
    empty screen between two pictures is what flickers.
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
    """Its options and its handler."""
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
    """A date, a time, a word or an age, in local time, as Unix seconds."""
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
    if options.by:
        from ..status.history import gpu_hours_by

        _show_use(gpu_hours_by(claims, options.by, since, until), options, since, until)
    else:
        _show_claims(claims[::-1], options, since, until)
    return 0


def _without_work(claims: list[PastClaim]) -> list[PastClaim]:
    """Those that run and of which a look at the host finds a GPU that has shown no work since an earlier look, or for
    as long as the policy says. Their user is the kernel's word, and where that is not to be had they are left out."""
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


def _show_claims(claims: list[PastClaim], options: argparse.Namespace, since: float, until: float) -> None:
    documents = (_fields(one, since, until) for one in claims)
    if options.json:
        _print_json({"since": since, "until": until}, "claims", documents)
    elif options.csv:
        names = [*_FACTS, "gpu_hours_least", "gpu_hours_most"]
        _print_csv(names, ([_cell(name, fields[name]) for name in names] for fields in documents))
    elif claims:
        from ..status.history import table_of_claims

        _print_lines(table_of_claims(claims, since, until, columns()))
    else:
        print("no claims in this time")


_FACTS = "user uid pid job command host gpus labels since until running seen ended".split()


def _fields(claim: PastClaim, since: float, until: float) -> dict[str, object]:
    from ..status.history import hours_held

    least, most = (round(seconds * len(claim.gpus) / 3600, 4) for seconds in hours_held(claim, since, until))
    facts = {name: getattr(claim, name) for name in _FACTS}
    return {**facts, "gpu_hours_least": least, "gpu_hours_most": most}


def _show_use(found: list[GpuHours], options: argparse.Namespace, since: float, until: float) -> None:
    names = [options.by, "claims", "gpu_hours_least", "gpu_hours_most"]
    rows = [[one.key, one.claims, round(one.least, 4), round(one.most, 4)] for one in found]
    if options.json:
        uses = (dict(zip(names, row, strict=True)) for row in rows)
        _print_json({"since": since, "until": until, "by": options.by}, "use", uses)
    elif options.csv:
        _print_csv(names, rows)
    elif found:
        from ..status.history import table_of_use

        _print_lines(table_of_use(found, options.by, columns()))
    else:
        print("no claims in this time")


# A history may be long, so it is never put together as one text.


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def _print_json(document: dict[str, object], name: str, entries: Iterable[dict[str, object]]) -> None:
    import json

    print(json.dumps({"schema": 1, **document, name: []}, indent=2).removesuffix("]\n}"), end="")
    before = "\n    "
    for entry in entries:
        print(before + json.dumps(entry, indent=2).replace("\n", "\n    "), end="")
        before = ",\n    "
    print("]\n}" if before == "\n    " else "\n  ]\n}")


def _print_csv(names: list[str], rows: Iterable[Sequence[object]]) -> None:
    import csv

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        writer.writerow([f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell for cell in row])


def _cell(name: str, value: object) -> object:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if name in ("since", "until", "seen", "ended"):
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(float(str(value))))
    return value
