"""``safe-gpu status`` of other hosts, once or again and again."""

import argparse
import json
import sys
import time
from collections.abc import Collection
from contextlib import nullcontext

from ...wording.text import cut
from ..commands import EX_NO_HOST, EX_SOME_HOSTS
from ..output import columns, in_color, is_terminal, print_json
from ..page import write_page
from ..screen import alternate_screen
from .answer import Answer, read_answer
from .asking import answers
from .chosen import chosen_hosts
from .remote_shell import remote_command
from .table import Answers, arranged, document, render_hosts

_INTERVAL = 5.0


def answers_of(hosts: Collection[str], script: str) -> Answers:
    """Return what each host answers, in their order."""
    found = {host: read_answer(said) for host, said in answers(hosts, script)}
    return {host: found[host] for host in hosts}


def script_of_status(vendor: str | None, verbose: bool = False) -> str:
    """Return what asks a host for its status; ``verbose`` for the table after the document too."""
    status = f"{remote_command()} status" + (f" --vendor {vendor}" if vendor else "")
    return f"{status} --json" + f" && COLUMNS={columns()} {status} -v" * verbose


def status_of_hosts(options: argparse.Namespace) -> int:
    """Print the status of the hosts that the options choose."""
    hosts = chosen_hosts(options)
    for option in ("prometheus", "free", "mine", "user", *(() if options.html else ("output",))):
        if getattr(options, option):
            options.usage_error(f"--{option} is about one host: it does not go with --host and --all-hosts")
    script = script_of_status(options.vendor, options.verbose and not (options.json or options.html))
    if options.watch:
        _watch(options, hosts, script)
    found = arranged(answers_of(hosts, script), options.sort)
    if options.json:
        print_json(document(found))
    elif options.html:
        write_page({name: one.error or one.status or "" for name, one in found.items()}, options)
    else:
        print(_picture(found, options))
    known = [one for one in found.values() if one.status is not None]
    return 0 if len(known) == len(found) else EX_SOME_HOSTS if known else EX_NO_HOST


def _picture(answers: Answers, options: argparse.Namespace) -> str:
    return render_hosts(answers, width=columns(), color=in_color(sys.stdout), verbose=options.verbose)


def _watch(options: argparse.Namespace, hosts: Collection[str], script: str) -> None:
    """Show them until a signal ends it: each host is asked again an interval after its answer, whatever the others do.

    As JSON, each answer is a line of its own.
    """
    interval = _INTERVAL if options.interval is None else options.interval
    in_place = is_terminal(sys.stdout) and not options.json
    known = dict.fromkeys(hosts, Answer(error="..."))
    with alternate_screen() if in_place else nullcontext(lambda *text: print(*text, sep="", flush=True)) as show:
        for host, said in answers(hosts, script, interval):
            known[host] = read_answer(said)
            if options.json:
                print(json.dumps(document({host: known[host]})), flush=True)
            else:
                head = cut(f"{time.strftime('%H:%M:%S')}, every {interval:g} s (Ctrl-C ends)", columns())
                show(f"{head}\n", f"{_picture(arranged(known, options.sort), options)}\n")
