#!/usr/bin/env python3
"""Kills or interrupts a process before and after each system call of a claim, and checks what is left.

    tools/crash_points.py                       every point, in an hour; each minute it says how many
    tools/crash_points.py --sample 100          some of them, by a seed that is printed

An interrupt is a Python exception from a signal handler. After each crash no GPU is booked twice, none is lost, the
next claimers in the queue are served, another user among them (as root), and nothing is left in the state directory.
After an exception its caller gets it as it was, and the process can claim again and has no more descriptors than
before. The exit status is 1 if that was not so at some point, 77 where processes cannot be traced.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress

from crash_checks import HOW, Outcome, Point, crash
from crash_scenes import SCENES
from crash_stage import Failure, Stage, load_everything
from crash_trace import refusal
from crash_wounds import WOUNDS

_SKIPPED = 77
_REPORT_INTERVAL = 60.0  # seconds
_PATIENCE, _SHORT_PATIENCE = 15.0, 2.0  # how long anything may take before it counts as hung, seconds


def points_of(stage: Stage, operation: str, args: argparse.Namespace) -> list[Point]:
    """The points of an operation that were asked for, by one run without a crash.

    Raises:
        Failure: that run does not end well.
    """
    whole = crash(stage, Point(operation, "kill", 0, True), WOUNDS.get(args.wound))
    if whole.violations and not args.wound:
        raise Failure(f"{operation} without any crash: {'; '.join(whole.violations)}")
    stops = [stop for stop in whole.calls if not args.call or stop.call in args.call]
    if args.at:
        stops = [stop for stop in stops if (stop.number, stop.thread) == (args.at, args.thread)]
    if args.when:
        stops = [stop for stop in stops if stop.before == (args.when == "before")]
    how = (args.how,) if args.how else HOW
    return [Point(operation, one, stop.number, stop.before, stop.thread) for one in how for stop in stops]


def table(outcomes: Iterable[Outcome]) -> str:
    """System calls of each operation, before and after, by what the process held there and what became of it."""
    text = []
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.point.operation, outcome.point.how].append(outcome)
    for (operation, how), found in groups.items():
        columns = sorted({_end_of(outcome) for outcome in found})
        rows: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for outcome in found:
            rows[outcome.call or "(over before)", "before" if outcome.point.before else "after"][_end_of(outcome)] += 1
        bad = sum(bool(outcome.violations) for outcome in found)
        text.append(f"\n{operation}, {how}: {len(found)} points, {bad} violations")
        text.append(f"  {'':24}" + "  ".join(columns))
        for (call, when), counts in sorted(rows.items(), key=lambda row: (row[0][0], row[0][1] == "after")):
            cells = "  ".join(f"{counts[column] or '.':>{len(column)}}" for column in columns)
            text.append(f"  {call:16} {when:6} {cells}")
    return "\n".join(text)


def _end_of(outcome: Outcome) -> str:
    if outcome.violations:
        return "VIOLATION"
    if not outcome.call:
        return "over before"
    if outcome.point.how == "kill" or outcome.end == "ended by the signal":
        return f"held {outcome.held}"
    return f"{outcome.end}, held {outcome.held}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--operation", choices=SCENES, action="append", help="only this one; may be repeated")
    parser.add_argument("--how", choices=HOW, help="only this way to crash")
    parser.add_argument("--sample", type=int, metavar="N", help="only N points")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of the sample")
    parser.add_argument("--call", action="append", metavar="NAME", help="only this system call; may be repeated")
    parser.add_argument("--at", type=int, metavar="CALL", help="only this call, counted from 1; with one operation")
    parser.add_argument("--when", choices=("before", "after"), help="only before, or only after")
    parser.add_argument("--thread", type=int, default=0, help="of --at: 0 is the main thread")
    parser.add_argument("--break", dest="wound", choices=sorted(WOUNDS), help="break the claim code: must end with 1")
    args = parser.parse_args()
    reason = refusal()
    if reason:
        print(f"skipped: {reason}")
        return _SKIPPED
    logging.getLogger("safe_gpu").addHandler(logging.NullHandler())
    load_everything()
    gc.freeze()  # forked processes share what is there
    stage = Stage(_SHORT_PATIENCE if args.wound else _PATIENCE)
    try:
        return _crash_all(stage, args)
    finally:
        stage.close()


def _crash_all(stage: Stage, args: argparse.Namespace) -> int:
    began = time.monotonic()
    points = [point for name in args.operation or SCENES for point in points_of(stage, name, args)]
    if args.sample is not None and args.sample < len(points):
        print(f"{args.sample} of {len(points)} points, seed {args.seed}", flush=True)
        points = random.Random(args.seed).sample(points, args.sample)
    outcomes: list[Outcome] = []
    with suppress(KeyboardInterrupt):  # with a table of those that were visited
        _visit(stage, points, args, outcomes)
    print(table(outcomes))
    bad = sum(bool(outcome.violations) for outcome in outcomes)
    print(f"\n{len(outcomes)} points, {bad} with violations, {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


def _visit(stage: Stage, points: Sequence[Point], args: argparse.Namespace, outcomes: list[Outcome]) -> None:
    due = time.monotonic() + _REPORT_INTERVAL
    for point in points:
        if time.monotonic() >= due:
            due += _REPORT_INTERVAL
            print(f"{len(outcomes)} of {len(points)} points", file=sys.stderr, flush=True)
        outcome = crash(stage, point, WOUNDS.get(args.wound))
        outcomes.append(outcome)
        for violation in outcome.violations:
            print(f"VIOLATION: {outcome.call} held {outcome.held}: {violation}\n    {point.command()}", flush=True)
        if args.wound and outcome.violations:
            return


if __name__ == "__main__":
    sys.exit(main())
