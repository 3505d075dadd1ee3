#!/usr/bin/env python3
"""Prints what one hostile user makes a command of another user cost, by one checkout or several.

    sudo python3 tools/costs.py [CHECKOUT ...] [--case WORD ...] [--repeat N]

A row for each case of ``tests/support/costs.py``: milliseconds of processor time beyond the same command in a quiet
state directory, milliseconds under host.lock, and MiB of memory beyond it. Each is the least of several times, which
the checkouts take in turns. It needs root, to act as other users, and takes minutes.
"""

import argparse
import os
import sys
from pathlib import Path

from common import ROOT
from support.costs import CASES, Case, Cost, costs_of


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="CHECKOUT", help="default: the one of this tool")
    parser.add_argument(
        "--case", action="append", default=[], metavar="WORD", help="only cases with this in their name"
    )
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="times (default 3)")
    options = parser.parse_args(arguments)
    if os.geteuid() != 0:
        parser.error("needs root, to act as other users")
    checkouts = [checkout.resolve() for checkout in options.checkouts or [ROOT]]
    print(f"{'':44}" + "".join(f"{checkout.name:>28}" for checkout in checkouts))
    print(f"{'case':44}" + f"{'ms':>11}{'locked':>9}{'MiB':>8}" * len(checkouts))
    for case in CASES:
        if not options.case or any(word in case.name for word in options.case):
            print_row(case, checkouts, costs_of(case, checkouts, options.repeat))
    return 0


def print_row(case: Case, checkouts: list[Path], costs: list[Cost]) -> None:
    """Print what a case costs by each checkout, and how its command ended if not well."""
    cells = [f"{cost.milliseconds:11.0f}{cost.locked:9.1f}{cost.mebibytes:8.1f}" for cost in costs]
    print(f"{case.name:44}" + "".join(cells), flush=True)
    for checkout, cost in zip(checkouts, costs, strict=True):
        if cost.end != "done":
            print(f"    {checkout.name}: {cost.end}")


if __name__ == "__main__":
    sys.exit(main())
