"""``safe-gpu status`` of other hosts, once or again and again."""

import argparse
import json
import sys
import time
from contextlib import nullcontext
from typing import NoReturn

from ...wording.text import cut
from ..commands import EX_NO_HOST, EX_SOME_HOSTS
from ..output import columns, in_color, is_terminal, print_json
from ..page import write_page
from ..screen import alternate_screen
from .answer import Answer, read_answer
from .asking import Asking
from .chosen import chosen_hosts
from .remote_shell import remote_command
from .table import Answers, document, most_free_first, render_hosts, same_hosts

_INTERVAL = 5.0

_PICTURE = 0.2  # seconds between pictures at least, however many hosts answer


def asking_for_status(vendor: str | None = None, verbose: bool = False) -> Asking:
    """Return what asks hosts for their status; ``verbose`` for the table after the document too."""
    status = f"{remote_command()} status" + (f" --vendor {vendor}" if vendor else "")
    script = f"exec {status} --json"
    if verbose:
        script = f"{status} --json && COLUMNS={columns()} && export COLUMNS && exec {status} -v"
    return Asking(script)


def answers_of(hosts: tuple[str, ...], vendor: str | None = None, verbose: bool = False) -> dict[str, Answer]:
    """Return what each host answers, in their order."""
    with asking_for_status(vendor, verbose) as asking:
        asking.ask(hosts)
        found = {host: read_answer(said) for host, said in asking.all_answers()}
    return {host: found[host] for host in hosts}


def exit_code(answers: dict[str, Answer]) -> int:
    """Return 0 where all hosts have answered, or what tells that some or none have."""
    known = [one for one in answers.values() if one.status is not None]
    return 0 if len(known) == len(answers) else EX_SOME_HOSTS if known else EX_NO_HOST


def status_of_hosts(options: argparse.Namespace) -> int:
    """Print the status of the hosts that the options choose."""
    hosts = chosen_hosts(options)
    for option in ("prometheus", "free", "mine", "user", *(() if options.html else ("output",))):
        if getattr(options, option):
            options.usage_error(f"--{option} is about one host: it does not go with --host and --all-hosts")
    if options.watch:
        _watch(options, hosts)
    answers = answers_of(hosts, options.vendor, options.verbose and not (options.json or options.html))
    if options.json:
        print_json(document(answers))
    elif options.html:
        shown, others = most_free_first(answers) if options.sort else answers, same_hosts(answers)
        reasons = {name: f"the same host as {other}" for name, other in others.items()}
        write_page({name: reasons.get(name) or one.status or one.error for name, one in shown.items()}, options)
    else:
        print(_picture(answers, options))
    return exit_code(answers)


def _picture(answers: Answers, options: argparse.Namespace) -> str:
    shown = most_free_first(answers) if options.sort else answers
    return render_hosts(shown, width=columns(), color=in_color(sys.stdout), verbose=options.verbose)


def _watch(options: argparse.Namespace, hosts: tuple[str, ...]) -> NoReturn:
    """Show them until a signal ends it: each host is asked again an interval after its answer, whatever the others do.

    As JSON, each answer is a line of its own.
    """
    interval = _INTERVAL if options.interval is None else options.interval
    answers = dict.fromkeys(hosts, Answer(error="..."))
    due: dict[str, float] = dict.fromkeys(hosts, 0.0)
    in_place = is_terminal(sys.stdout) and not options.json
    show = alternate_screen() if in_place else nullcontext(lambda head, text: print(head + text, flush=True))
    with asking_for_status(options.vendor, options.verbose and not options.json) as asking, show as picture:
        while True:
            now = time.monotonic()
            ready = [host for host, moment in due.items() if moment <= now]
            asking.ask(ready)
            for host in ready:
                del due[host]
            found = asking.answers(max(0.0, min([*due.values(), now + interval]) - now))
            for host, said in found.items():
                answers[host] = one = read_answer(said)
                due[host] = time.monotonic() + interval
                if options.json:
                    print(json.dumps(document({host: one})), flush=True)
            if not options.json and (found or in_place):
                head = cut(f"{time.strftime('%H:%M:%S')}, every {interval:g} s (Ctrl-C ends)", columns())
                picture(f"{head}\n", f"{_picture(answers, options)}\n")
                time.sleep(_PICTURE)
