"""The page for browsers that ``safe-gpu status --html`` writes, of one host or of several."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from typing import Any

from .output import say
from .replaced_file import write_output

_DAY = 86400.0  # seconds

_EVERY = 300.0  # seconds between two makings


def write_page(hosts: Mapping[str, Mapping[str, Any] | str], options: argparse.Namespace) -> None:
    """Write the page, with the use of this host in the last day if it is among them.

    Args:
        hosts: name -> the document of ``status --json``, or why there is none.
    """
    from ..coordination.files.location import state_dir_path
    from ..status.history.claims import claims_between
    from ..status.history.report import report
    from ..status.page.document import render_page

    now, here = time.time(), (os.uname().nodename, state_dir_path())
    claims, warnings = claims_between(now - _DAY, now)
    for warning in warnings:
        say(f"warning: {warning}")
    users = [row for row in report(claims, (), "", now - _DAY, now) if row.by == "user"]
    own = [name for name, one in hosts.items() if not isinstance(one, str) and (one["host"], one["state_dir"]) == here]
    every = _EVERY if options.interval is None else options.interval
    write_output(render_page(hosts, now=now, every=every, use=dict.fromkeys(own, users)), options.output)
