"""``safe-gpu status`` of other hosts, once or again and again."""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from ...wording.text import cut
from ..commands import EX_NO_HOST, EX_SOME_HOSTS
from ..output import columns, in_color, is_terminal, print_json
from ..page import write_page
from ..screen import alternate_screen
from .answer import Answer, read_answer
from .asking import AT_ONCE, ask, ask_all
from .chosen import chosen_hosts
from .remote_shell import remote_command
from .table import Answers, arranged, document, render_hosts

_INTERVAL = 5.0

_PICTURE = 0.2  # seconds between pictures at least, however many hosts answer


def answers_of(hosts: Sequence[str], script: str) -> dict[str, Answer]:
    """Return what each host answers, in their order."""
    return {host: read_answer(said) for host, said in ask_all(hosts, script).items()}


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
        in_place = is_terminal(sys.stdout) and not options.json
        show = alternate_screen() if in_place else nullcontext(lambda head, text: print(head + text, flush=True))
        with show as picture:
            asyncio.run(_watch(options, hosts, script, picture))
    answers = arranged(answers_of(hosts, script), options.sort)
    if options.json:
        print_json(document(answers))
    elif options.html:
        write_page({name: one.error or one.status or "" for name, one in answers.items()}, options)
    else:
        print(_picture(answers, options))
    known = [one for one in answers.values() if one.status is not None]
    return 0 if len(known) == len(answers) else EX_SOME_HOSTS if known else EX_NO_HOST


def _picture(answers: Answers, options: argparse.Namespace) -> str:
    return render_hosts(answers, width=columns(), color=in_color(sys.stdout), verbose=options.verbose)


async def _watch(
    options: argparse.Namespace, hosts: Sequence[str], script: str, picture: Callable[[str, str], object]
) -> None:
    """Show them until a signal ends it: each host is asked again an interval after its answer, whatever the others do.

    As JSON, each answer is a line of its own.
    """
    interval = _INTERVAL if options.interval is None else options.interval
    answers = dict.fromkeys(hosts, Answer(error="..."))
    slots, news = asyncio.Semaphore(AT_ONCE), asyncio.Event()

    async def follow(host: str) -> None:
        while True:
            async with slots:
                answers[host] = one = read_answer(await ask(host, script))
            if options.json:
                print(json.dumps(document({host: one})), flush=True)
            news.set()
            await asyncio.sleep(interval)

    async def draw() -> None:
        while not options.json:
            head = cut(f"{time.strftime('%H:%M:%S')}, every {interval:g} s (Ctrl-C ends)", columns())
            picture(f"{head}\n", f"{_picture(arranged(answers, options.sort), options)}\n")
            await asyncio.sleep(_PICTURE)
            await news.wait()
            news.clear()

    await asyncio.gather(draw(), *map(follow, hosts))
