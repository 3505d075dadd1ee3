"""``safe-gpu history``: the claims of this host, as last(1) shows logins, and GPU-hours."""

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..settings.values import parse_moment
from ..status.gather import gather
from ..status.history import PastClaim, claims_between, gpu_hours_by, hours_held, table_of_claims, table_of_use
from .output import columns, print_json, say, write_whole

_DAYS = 30

_REPORTS = {"week": 7, "month": 30, "year": 365}

_LONGEST_REPORT = 731  # days; no file is kept longer

_SINCE = f"""claims that held GPUs after this: 2026-11-01, '2026-11-01 12:00', 12:00, 'Thu 9:00', today, yesterday, or
7d for seven days ago (default {_DAYS} days ago)"""

_REPORT = """claims, GPU-hours, waits and free GPU-hours by user, week and host, of the last 7, 30 or 365 days unless
--since says otherwise"""

_NONE = ("no claims in this time",)

_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what spreadsheets would run


def configure_history(parser: argparse.ArgumentParser) -> None:
    """Set its options."""
    parser.description = "Claims on this host, the latest first, or GPU-hours by user, GPU, job or day."
    parser.epilog = """examples:
  safe-gpu history --user anna --since yesterday
  safe-gpu history --by user --since 2026-11-01 --until 2026-12-01
  safe-gpu history --csv > claims.csv
  safe-gpu history --report month --plot month.svg

A claim that was not released but died ended at some time between two others;
GPU-hours have a least and a most for that."""
    add = parser.add_argument
    add("--user", metavar="U", help="claims of this user only")
    add("--since", type=parse_moment, metavar="D", help=_SINCE)
    add("--until", type=parse_moment, metavar="D", help="and before this (default now)")
    add("--by", choices=("user", "gpu", "job", "host", "day", "week"), help="GPU-hours in place of claims")
    add("--report", choices=tuple(_REPORTS), help=_REPORT)
    add("--plot", metavar="FILE", help="with --report: also draw it by day, as .svg or .png (needs matplotlib)")
    idle = "only claims that hold a GPU now that has shown no work, for idle_report_after where the policy sets that"
    add("--idle", action="store_true", help=idle)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for programs; times in Unix seconds")
    form.add_argument("--csv", action="store_true", help="for spreadsheets; times in UTC")


def do_history(options: argparse.Namespace) -> int:
    """Carry out the command; return its exit code."""
    _check(options)
    now = time.time()
    until = now if options.until is None else min(now, options.until)
    days = _REPORTS[options.report] if options.report else _DAYS
    since = max(0.0, until - days * 86400) if options.since is None else options.since
    if options.report:
        whole = parse_moment(time.strftime("%Y-%m-%d", time.localtime(since))) if options.since is None else since
        since = max(whole, until - _LONGEST_REPORT * 86400)
    if since > until:
        options.usage_error("--since is not before --until")
    claims, warnings = claims_between(since, until)
    for warning in warnings:
        say(f"warning: {warning}")
    if options.user is not None:
        claims = [claim for claim in claims if claim.user == options.user]
    if options.idle:
        claims = _without_work(claims)
    shown = (_report if options.report else _sums if options.by else _claims)(claims, options, since, until)
    head = {"schema": 1, "since": since, "until": until} | ({"by": options.by} if options.by else {})
    if options.json:
        print_json({**head, shown.kind: [dict(zip(shown.names, row, strict=True)) for row in shown.rows]})
    elif options.csv:
        import csv

        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(shown.names)
        writer.writerows(map(_cell, shown.names, row) for row in shown.rows)
    else:
        sys.stdout.writelines(f"{line}\n" for line in (shown.table if claims else _NONE))
    return 0


def _check(options: argparse.Namespace) -> None:
    """End with a usage error where options do not go together."""
    from importlib.util import find_spec

    others = [name for name in ("by", "user", "idle") if getattr(options, name)]
    if options.report and others:
        options.usage_error(f"--report and --{others[0]} do not go together")
    if options.plot is None:
        return
    if not options.report:
        options.usage_error("--plot goes with --report")
    if not options.plot.endswith((".svg", ".png")):
        options.usage_error(f"--plot {options.plot}: name a file that ends with .svg or .png")
    if find_spec("matplotlib") is None:
        options.usage_error("--plot needs matplotlib, which is not installed: pip install matplotlib")


class _Shown(NamedTuple):
    """What is printed: ``rows`` for programs, below ``kind`` and with ``names``; the lines of ``table`` for people."""

    kind: str
    names: Sequence[str]
    rows: Iterable[Sequence[object]]
    table: Iterable[str]


def _report(claims: list[PastClaim], options: argparse.Namespace, since: float, until: float) -> _Shown:
    from ..status.report import ReportRow, drawn, report, report_by_day, table_of_report

    rows = [*report(claims, [one.gpu.uuid for one in gather().gpus], os.uname().nodename, since, until)]
    if options.plot is not None:
        write_whole(options.plot, drawn(report_by_day(claims, since, until), options.plot[-3:]))
    return _Shown("report", ReportRow._fields, rows, table_of_report(rows, columns()))


def _without_work(claims: list[PastClaim]) -> list[PastClaim]:
    """Return the running claims with a GPU that has shown no work since an earlier look, or as long as the policy says.

    Claims whose user the kernel does not know are left out.
    """
    idle = [one for one in gather().gpus if one.idle_for and one.idle_report is not False]
    uuids = {uuid for one in idle if one.claim and one.claim.uid >= 0 for uuid in (one.gpu.uuid, *one.gone)}
    return [claim for claim in claims if claim.running and not uuids.isdisjoint(claim.gpus)]


_FACTS = "user uid pid job command host gpus labels since until running seen ended share of waited".split()


_HOURS = ("gpu_hours_least", "gpu_hours_most")


def _sums(claims: list[PastClaim], options: argparse.Namespace, since: float, until: float) -> _Shown:
    uses = gpu_hours_by(claims, options.by, since, until)
    rows = ((one.key, one.claims, round(one.least, 4), round(one.most, 4)) for one in uses)
    return _Shown("use", (options.by, "claims", *_HOURS), rows, table_of_use(uses, options.by, columns()))


def _claims(claims: list[PastClaim], options: argparse.Namespace, since: float, until: float) -> _Shown:
    claims.reverse()
    hours = ([round(seconds * len(one.gpus) / 3600, 4) for seconds in hours_held(one, since, until)] for one in claims)
    rows = ([*(getattr(one, name) for name in _FACTS), *used] for one, used in zip(claims, hours, strict=True))
    return _Shown("claims", (*_FACTS, *_HOURS), rows, table_of_claims(claims, since, until, columns()))


def _cell(name: str, value: object) -> object:
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    if isinstance(value, str):
        return f"'{value}" if value.startswith(_FORMULA) else value
    if value is not None and name in ("since", "until", "seen", "ended"):
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(float(str(value))))
    return value  # None is an empty cell
