"""``safe-gpu status``: which GPUs are free, who has the others, and who waits."""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from ..drivers.patience import Patience
from ..errors import SafeGpuError
from ..host.awaiting import Tell
from ..host.procfs import user_name
from ..settings.values import parse_duration
from ..status.facts import HostStatus, free_labels, of_user, of_vendor
from ..status.gather import gather
from ..status.metrics import render_metrics
from ..status.render import render
from .arguments import add_hosts, add_vendor
from .commands import EX_NO_DRIVER, EX_STATE_DIR
from .output import columns, in_color, is_piped, print_json, print_lines, say, write_output

_INTERVAL = 2.0

_BETWEEN = """with --watch: time between looks, such as 10s, 1m (default 2s); with --html: how often cron makes the
page, which says that it is stale after three times as long (default 5m)"""


def configure_status(parser: argparse.ArgumentParser) -> None:
    """Set its options."""
    parser.description = "Which GPUs are free, who has the others, and who waits."
    parser.epilog = """examples:
  safe-gpu status --watch --interval 10s
  safe-gpu status --json | jq '.gpus[].state'
  safe-gpu status --host gpu1,gpu2 --sort free

exit codes with hosts: 0 all have answered, 1 some have, 68 none has"""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for programs; sizes in bytes, times in Unix seconds")
    form.add_argument("--prometheus", action="store_true", help="metrics in the text format of Prometheus")
    form.add_argument("--html", action="store_true", help="a page for browsers, with the use of the last day")
    form.add_argument("--free", action="store_true", help="only the indices of the free GPUs, one on a line")
    add = parser.add_argument
    file = "with --prometheus or --html: write this file, whole, for node_exporter's textfiles or a web server"
    add("--output", metavar="FILE", help=file)
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--mine", action="store_true", help="only GPUs that you use, and your places in the queue")
    whose.add_argument("--user", metavar="U", help="the same of this user")
    add("-v", "--verbose", action="store_true", help="each waiter and process; with hosts each host's own table")
    add_vendor(parser, "only GPUs of this vendor (default: of all)")
    add("--watch", action="store_true", help="show it again every two seconds, hosts every five, until q or Ctrl-C")
    add("--interval", type=seconds, metavar="D", help=_BETWEEN)
    add_hosts(parser)


def seconds(text: str) -> float:
    """Parse the value of ``--interval``."""
    found = parse_duration(text, "interval")
    if not found or found < 0.1:
        raise ValueError(f"--interval {text} is not possible: a tenth of a second is the least")
    return found


def do_status(options: argparse.Namespace) -> int:
    """Carry out the command; return its exit code."""
    user = options.user
    if options.mine:
        user = user_name(os.geteuid())
    _check(options, user)
    if options.host or options.all_hosts:
        return _status_of_hosts(options)
    if options.sort:
        options.usage_error("--sort goes with --host and --all-hosts")
    if options.watch:
        _watch(options, user)
    try:
        status, shown = _looked(options.vendor, user, say)
    except SafeGpuError as err:
        if options.prometheus:
            write_output("safe_gpu_up 0\n", options.output)
        elif options.html:
            _write_page(os.uname().nodename, str(err), options)
        raise
    for warning in _warnings_beside(status, options):
        say(f"warning: {warning}")
    if options.prometheus:
        write_output(render_metrics(status), options.output)
    elif options.html:
        _write_page(status.host, status.to_dict(), options)
    elif options.free:
        sys.stdout.writelines(f"{label}\n" for label in free_labels(status))
    elif options.json:
        print_json(shown.to_dict())
    else:
        print_lines(_table(status, shown, options.verbose))
    if status.warnings:
        return EX_STATE_DIR
    if status.broken:
        return EX_NO_DRIVER
    return 0


def _check(options: argparse.Namespace, user: str | None) -> None:
    """End with a usage error where options do not go together."""
    if options.interval is not None and not (options.watch or options.html):
        options.usage_error("--interval goes with --watch or --html")
    if options.output is not None and not (options.prometheus or options.html):
        options.usage_error("--output goes with --prometheus or --html")
    for form in ("prometheus", "html", "free"):
        if getattr(options, form) and (user is not None or options.watch):
            options.usage_error(f"--{form} goes with none of --mine, --user and --watch")


def _status_of_hosts(options: argparse.Namespace) -> int:
    from .hosts import status_of_hosts  # a table of this host starts sooner without it

    return status_of_hosts(options)


def _write_page(host: str, document: Mapping[str, Any] | str, options: argparse.Namespace) -> None:
    """Write the page of this host, whose document, or why there is none, is given."""
    from .hosts import write_page

    write_page({host: document}, options)


def _warnings_beside(status: HostStatus, options: argparse.Namespace) -> list[str]:
    """Return the warnings that go to stderr, since what is printed for programs has no place for them."""
    if options.json:  # whose document has the others
        warnings = list(status.broken)
        if status.shift:
            warnings.append(status.shift)
        return warnings
    if options.prometheus or options.html or options.free:
        return [*status.broken, *status.warnings]
    return []


def _looked(vendor: str | None, user: str | None, tell: Tell) -> tuple[HostStatus, HostStatus]:
    """Return the state of the host, and the part of it that is listed; tell where the driver takes long."""
    status = gather(Patience(tell))
    if vendor is not None:
        status = of_vendor(status, vendor)
    if user is None:
        return status, status
    return status, of_user(status, user)


def _table(status: HostStatus, shown: HostStatus, verbose: bool) -> str:
    bar = "##-"
    if sys.stdout.encoding.lower().startswith("utf"):
        bar = "█▌░"
    color = in_color(sys.stdout)
    return render(status, width=columns(), color=color, shown=shown, verbose=verbose, bar=bar, piped=is_piped())


def _watch(options: argparse.Namespace, user: str | None) -> NoReturn:
    """Show it until Ctrl-C or a signal."""
    from .watching import watching

    interval = options.interval
    if interval is None:
        interval = _INTERVAL
    picture = ""
    with watching(interval, as_lines=options.json) as show:

        def tell(line: str) -> None:
            """Show it above the picture, where lines on stderr would be drawn over."""
            if options.json:
                say(line)
            else:
                show(f"{line}\n{picture}")

        while True:
            status, shown = _looked(options.vendor, user, tell)
            if options.json:
                picture = json.dumps(shown.to_dict())
            else:
                picture = _table(status, shown, options.verbose)
            show(picture)
            time.sleep(interval)
