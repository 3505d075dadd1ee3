"""The command ``resume``: GPUs can be claimed again."""

import argparse
import time
from collections.abc import Sequence

from ..coordination.closed import all_windows
from ..gpus.windows import Window
from ..status.facts import GpuStatus
from ..wording.text import gpu_ranges, plural
from .closing import ClosedGpusFile, add_gpus, named_gpus, say_who_may_claim
from .output import say


def configure_resume(parser: argparse.ArgumentParser) -> None:
    """Set its options."""
    parser.description = """Allow new claims on these GPUs again, or on all GPUs of this host: they are not
drained any more. Reservations stay, and are named; --reservation cancels one."""
    parser.epilog = """examples:
  safe-gpu resume 3
  safe-gpu resume --reservation 'practical course'
  safe-gpu resume 0,1 --reservation '2026-11-26 09:00'"""
    which = "cancel this reservation, on these GPUs or on all: its reason, its group or user, or when it begins"
    parser.add_argument("--reservation", metavar="R", help=which)
    add_gpus(parser)


def do_resume(options: argparse.Namespace) -> int:
    """Carry out the command; return its exit code."""
    gpus = named_gpus(options.gpus)
    closed = ClosedGpusFile()
    if options.reservation is None:
        closed.resume(one.gpu.uuid for one in gpus)
        closed.write()
        say_who_may_claim(gpus)
        _say_what_stays(gpus, closed, options)
    else:
        _cancel(gpus, closed, options)
    return 0


def _say_what_stays(gpus: Sequence[GpuStatus], closed: ClosedGpusFile, options: argparse.Namespace) -> None:
    """Say for which times these GPUs are still reserved, and how that is cancelled."""
    own = closed.windows()
    for window in all_windows():
        covered = [one for one in gpus if window.covers(one.gpu)]
        if not covered or window.end <= time.time():
            continue
        labels = gpu_ranges(one.label for one in covered)
        way_out = f"only {window.by} can cancel that"
        if window in own:
            command = ["safe-gpu", "resume", "--reservation", _name(window, own)]
            if options.gpus:
                command.insert(2, labels)
            way_out = f"to cancel that: {_as_typed(command)}"
        say(f"GPU {labels}: still {window} ({way_out})")


def _cancel(gpus: Sequence[GpuStatus], closed: ClosedGpusFile, options: argparse.Namespace) -> None:
    """Take GPUs that the user named out of the reservation that the user named; all of its GPUs if none is named."""
    named = []
    for window in closed.windows():
        is_there = not options.gpus or any(window.covers(one.gpu) for one in gpus)
        if is_there and options.reservation in _names(window):
            named.append(window)
    if len(named) != 1:
        options.usage_error(_why_not_one(named, closed, options))
    (window,) = named
    covered = [one for one in gpus if window.covers(one.gpu)]
    uuids = set(window.gpus)
    if options.gpus:
        uuids = {one.gpu.uuid for one in covered} | {one.gpu.mig_parent or "" for one in covered}
    closed.cancel(window, uuids)
    closed.write()
    if covered:
        say(f"GPU {gpu_ranges(one.label for one in covered)}: no longer {window}")
    else:
        say(f"GPUs that are not there now: no longer {window}")


def _why_not_one(named: Sequence[Window], closed: ClosedGpusFile, options: argparse.Namespace) -> str:
    """Return the usage error for a name that no reservation has, or several."""
    own = closed.windows()
    if named:
        few = f"{plural(len(named), 'reservation')} are called {options.reservation!r}"
        return f"{few}: name one by its beginning, or name its GPUs: {'; '.join(str(window) for window in named)}"
    problem = f"there is no reservation {options.reservation!r}"
    if options.gpus:
        problem += " of these GPUs"
    if not own:
        return f"{problem}: nothing is reserved"
    names = ", ".join(repr(_name(window, own)) for window in own)
    return f"{problem}: there is {names}"


def _begin(window: Window) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(window.begin))


def _names(window: Window) -> tuple[str, ...]:
    """Return what a reservation may be called, of which several may be called the same."""
    _, _, user_or_group = window.whom.partition(":")
    names = (window.reason, user_or_group, _begin(window), str(window))
    return tuple(name for name in names if name)


def _name(window: Window, windows: Sequence[Window]) -> str:
    """Return what one of these reservations is called: by its reason, or by its beginning if that is not unique."""
    alike = [one for one in windows if one.reason == window.reason]
    if window.reason and len(alike) == 1:
        return window.reason
    return _begin(window)


def _as_typed(command: Sequence[str]) -> str:
    from shlex import join

    return join(command)
