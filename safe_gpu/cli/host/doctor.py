"""``safe-gpu doctor``: checks of this host, each finding with its fix."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..output import columns, in_color, print_json

if TYPE_CHECKING:
    import argparse


def configure_doctor(parser: argparse.ArgumentParser) -> None:
    """Set its options and its handler."""
    parser.description = "Check this host and this environment; print what is wrong, each with its fix."
    parser.add_argument("-v", "--verbose", action="store_true", help="list the checks that passed or were skipped too")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(handler=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from ... import doctor

    checks = doctor.run_checks()
    if options.json:
        print_json(doctor.to_dict(checks))
    else:
        print(doctor.render_checks(checks, color=in_color(sys.stdout), width=columns(), verbose=options.verbose))
    return doctor.exit_code(checks)
