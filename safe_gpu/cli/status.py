"""``safe-gpu status``: which GPUs are free, who has the others, who waits; once, or again and again."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from .options import add_vendor, seconds
from .streams import columns, in_color, is_terminal, say

if TYPE_CHECKING:
    from ..status.facts import HostStatus


_EX_DRIVER = 69
_EX_STATE_DIR = 73
_INTERVAL = 2.0


def configure(parser: argparse.ArgumentParser) -> None:
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
    return _EX_STATE_DIR if status.warnings else _EX_DRIVER if status.broken else 0


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
        from .whole_file import write_whole

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
