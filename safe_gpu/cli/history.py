"""``safe-gpu history``: the claims of this host, as last(1) shows logins, and GPU-hours."""

import argparse
import csv
import os
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import NamedTuple

from ..host.procfs import user_name
from ..settings.values import parse_moment
from ..status.gather import gather
from ..status.history import PastClaim, claims_between, gpu_hours_by, hours_held, table_of_claims, table_of_use
from ..status.usage import UseFacts
from .output import columns, is_piped, print_json, say, write_whole

_DAY = 86400.0  # seconds

_DAYS = 30

_REPORTS = {"week": 7, "month": 30, "year": 365}

_LONGEST_REPORT = 731  # days; no file is kept longer

_SINCE = f"""claims that held GPUs after this: 2026-11-01, '2026-11-01 12:00', 12:00, 'Thu 9:00', today, yesterday, or
7d for seven days ago (default {_DAYS} days ago)"""

_REPORT = """claims, GPU-hours, waits and free GPU-hours by user, week and host, of the last 7, 30 or 365 days unless
--since says otherwise"""

_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what spreadsheets would run


def configure_history(parser: argparse.ArgumentParser) -> None:
    """Set its options."""
    parser.description = "Claims on this host, the latest first, or GPU-hours by user, GPU, job or day."
    parser.epilog = """examples:
  safe-gpu history --user anna --since yesterday
  safe-gpu history --by user --since 2026-11-01 --until 2026-12-01
  safe-gpu history --by user --sort idle
  safe-gpu history --csv > claims.csv
  safe-gpu history --report month --plot month.svg

Of a claim that died, the end is only known to lie between two times, so its
GPU-hours have a lower and an upper bound."""
    add = parser.add_argument
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--mine", action="store_true", help="your claims only")
    whose.add_argument("--user", metavar="U", help="claims of this user only")
    add("--since", type=parse_moment, metavar="D", help=_SINCE)
    add("--until", type=parse_moment, metavar="D", help="and before this (default now)")
    add("--by", choices=("user", "gpu", "job", "host", "day", "week"), help="GPU-hours in place of claims")
    add("--report", choices=tuple(_REPORTS), help=_REPORT)
    add("--plot", metavar="FILE", help="with --report: also draw it by day, as .svg or .png (needs matplotlib)")
    idle = "only claims that hold a GPU now that has shown no work, for idle_report_after where the policy sets that"
    add("--idle", action="store_true", help=idle)
    add("--sort", choices=("idle",), help="those with the most GPU-hours without work first")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for programs; times in Unix seconds")
    form.add_argument("--csv", action="store_true", help="for spreadsheets; times in UTC")


def do_history(options: argparse.Namespace) -> int:
    """Carry out the command; return its exit code."""
    _check(options)
    since, until = _times(options)
    if since > until:
        options.usage_error("--since is not before --until")
    claims, warnings = claims_between(since, until)
    for warning in warnings:
        say(f"warning: {warning}")
    user = options.user
    if options.mine:
        user = user_name(os.geteuid())
    if user is not None:
        claims = [claim for claim in claims if claim.user == user]
    if options.idle:
        claims = _without_work(claims)
    if options.report:
        view = _report(claims, options, since, until)
    elif options.by:
        view = _sums(claims, options, since, until)
    else:
        view = _claims(claims, options, since, until)
    if options.json:
        document: dict[str, object] = {"schema": 1, "since": since, "until": until}
        if options.by:
            document["by"] = options.by
        document[view.kind] = list(view.rows)
        print_json(document)
    elif options.csv:
        _print_csv(view)
    elif claims:
        sys.stdout.writelines(f"{line}\n" for line in view.table)
    else:
        print("no claims in this time")
    return 0


def _check(options: argparse.Namespace) -> None:
    """End with a usage error where options do not go together."""
    if options.report:
        for other in ("by", "user", "mine", "idle", "sort"):
            if getattr(options, other):
                options.usage_error(f"--report and --{other} do not go together")
    if options.plot is None:
        return
    if not options.report:
        options.usage_error("--plot goes with --report")
    if not options.plot.endswith((".svg", ".png")):
        options.usage_error(f"--plot {options.plot}: name a file that ends with .svg or .png")
    if find_spec("matplotlib") is None:
        options.usage_error("--plot needs matplotlib, which is not installed: pip install matplotlib")


def _times(options: argparse.Namespace) -> tuple[float, float]:
    """Return from when to when claims are meant, in Unix seconds; until now at most."""
    until = time.time()
    if options.until is not None:
        until = min(until, options.until)
    days = _DAYS
    if options.report:
        days = _REPORTS[options.report]
    since = options.since
    if since is None:
        since = max(0.0, until - days * _DAY)
        if options.report:
            since = _midnight_before(since)
    if options.report:
        since = max(since, until - _LONGEST_REPORT * _DAY)
    return since, until


def _midnight_before(moment: float) -> float:
    """Return when the day of that moment began, in local time."""
    return parse_moment(time.strftime("%Y-%m-%d", time.localtime(moment)))


class _View(NamedTuple):
    """What is printed.

    Attributes:
        kind: the key of the rows in a document.
        names: the keys of each row.
        rows: for programs.
        table: lines for people.
    """

    kind: str
    names: Sequence[str]
    rows: Iterable[dict[str, object]]
    table: Iterable[str]


def _report(claims: list[PastClaim], options: argparse.Namespace, since: float, until: float) -> _View:
    """Return the report, and draw it where that is asked for."""
    from ..status.report import MEANING_OF_95, ReportRow, drawn, report, report_by_day, table_of_report, title_of_report

    uuids = [one.gpu.uuid for one in gather().gpus]
    host = os.uname().nodename
    rows = list(report(claims, uuids, host, since, until))
    title = title_of_report(host, since, until)
    if options.plot is not None:
        form = options.plot[-3:]
        write_whole(options.plot, drawn(report_by_day(claims, since, until), form, title))
    table = [title, "", *table_of_report(rows, columns(), whole_names=is_piped())]
    if any("95% WAIT" in line for line in table):  # which is left out where there is no room
        table += ["", MEANING_OF_95]
    return _View(kind="report", names=ReportRow._fields, rows=(row._asdict() for row in rows), table=table)


def _without_work(claims: list[PastClaim]) -> list[PastClaim]:
    """Return the running claims with a GPU that has shown no work since an earlier look, or as long as the policy says.

    Claims whose user the kernel does not know are left out.
    """
    uuids: set[str] = set()
    for one in gather().gpus:
        has_shown_no_work = one.idle_for and one.idle_report is not False
        if has_shown_no_work and one.claim is not None and one.claim.uid >= 0:
            uuids.update((one.gpu.uuid, *one.gone))
    return [claim for claim in claims if claim.running and not uuids.isdisjoint(claim.gpus)]


_FACTS = "user uid pid job command host gpus labels since until running seen ended share of waited".split()


_HOURS = ("gpu_hours_least", "gpu_hours_most")


def _sums(claims: list[PastClaim], options: argparse.Namespace, since: float, until: float) -> _View:
    """Return the GPU-hours by user, GPU, job, host, day or week."""
    uses = gpu_hours_by(claims, options.by, since, until)
    if options.sort:
        uses.sort(key=lambda use: -use.use.idle)
    rows = (
        {
            options.by: use.key,
            "claims": use.claims,
            "gpu_hours_least": round(use.least, 4),
            "gpu_hours_most": round(use.most, 4),
            **UseFacts.of(use.use)._asdict(),
        }
        for use in uses
    )
    names = (options.by, "claims", *_HOURS, *UseFacts._fields)
    return _View("use", names, rows, table_of_use(uses, options.by, columns(), whole_names=is_piped()))


def _claims(claims: list[PastClaim], options: argparse.Namespace, since: float, until: float) -> _View:
    """Return the claims, the latest first, or those with the most GPU-hours without work."""
    shown = claims[::-1]
    if options.sort:
        shown.sort(key=lambda claim: -claim.use(since, until).idle)
    rows = (_row_of_claim(claim, since, until) for claim in shown)
    names = (*_FACTS, *_HOURS, *UseFacts._fields, "utilization_of")
    table = table_of_claims(shown, since, until, columns(), whole_names=is_piped())
    return _View("claims", names, rows, table)


def _row_of_claim(claim: PastClaim, since: float, until: float) -> dict[str, object]:
    least, most = hours_held(claim, since, until)
    row = {name: getattr(claim, name) for name in _FACTS}
    row["gpu_hours_least"] = round(least * len(claim.gpus) / 3600, 4)
    row["gpu_hours_most"] = round(most * len(claim.gpus) / 3600, 4)
    use = UseFacts.of(claim.use(since, until))
    row.update(use._asdict())
    row["utilization_of"] = _utilization_of(claim, use)
    return row


def _utilization_of(claim: PastClaim, use: UseFacts) -> str | None:
    """Return of what the utilisation of a claim is: of the claim alone, or of a GPU that others share; None without
    any."""
    if use.utilization is None:
        return None
    if claim.share is None:
        return "claim"
    return "gpu"


def _print_csv(view: _View) -> None:
    """Print the rows for spreadsheets."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(view.names)
    for row in view.rows:
        writer.writerow(_cell(name, value) for name, value in row.items())


def _cell(name: str, value: object) -> object:
    """Return a value as a spreadsheet reads it; None is an empty cell."""
    if isinstance(value, tuple):
        value = " ".join(str(one) for one in value)
    if isinstance(value, str):
        if value.startswith(_FORMULA):
            return f"'{value}"
        return value
    if value is not None and name in ("since", "until", "seen", "ended"):
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(float(str(value))))
    return value
