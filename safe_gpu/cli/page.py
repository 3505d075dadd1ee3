"""The page for browsers that ``safe-gpu status --html`` writes, of one host or of several."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from typing import Any

from .replaced_file import write_output

_EVERY = 300.0  # seconds between two makings


def write_page(hosts: Mapping[str, Mapping[str, Any] | str], options: argparse.Namespace) -> None:
    """Write the page, with the use of this host in the last day if it is among them.

    Args:
        hosts: name -> the document of ``status --json``, or why there is none.
    """
    from ..coordination.files.location import state_dir_path
    from ..gpus.devices import MIG_IS_ON
    from ..status.history.claims import claims_between
    from ..status.page.document import render_page
    from ..status.page.use import DAY, last_day

    now, here = time.time(), os.uname().nodename
    known = {name: one for name, one in hosts.items() if not isinstance(one, str)}
    own = {name: one for name, one in known.items() if (one["host"], one["state_dir"]) == (here, state_dir_path())}
    claims, warnings = claims_between(now - DAY, now) if own else ([], [])
    use = {}
    for name, status in own.items():
        gpus = [one["uuid"] for one in status["gpus"] if not str(one.get("reason")).startswith(MIG_IS_ON)]
        use[name] = last_day(claims, gpus, now, warnings)
    every = _EVERY if options.interval is None else options.interval
    write_output(render_page(hosts, now=now, every=every, use=use), options.output)
