"""``safe-gpu doctor``: checks of this host and this environment, each finding with its fix."""

from __future__ import annotations

import argparse
import sys

from .streams import columns, in_color


def configure(parser: argparse.ArgumentParser) -> None:
    """Its options and its handler."""
    parser.description = "Check this host and this environment, each finding with its fix."
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(handler=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from .. import doctor

    checks = doctor.run_checks()
    if options.json:
        import json

        print(json.dumps(doctor.to_dict(checks), indent=2))
    else:
        print(doctor.render_checks(checks, color=in_color(sys.stdout), width=columns()))
    return doctor.exit_code(checks)
