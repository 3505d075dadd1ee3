"""The command ``drain``: no new claims on GPUs, from now on or for a time."""

import argparse
import math
import os
import time
from collections.abc import Collection, Sequence

from ..gpus.windows import Window
from ..host.procfs import describe_process, user_name
from ..selection.verdicts import users_of
from ..settings import config as policy
from ..settings.values import parse_duration, parse_moment
from ..status.facts import GpuStatus
from ..status.gather import gather
from ..wording.text import clock, gpu_ranges
from .arguments import gpu_list
from .closing import ALL, ClosedGpusFile, leave_out, named_gpus, say_who_may_claim
from .commands import EX_TRY_AGAIN
from .output import say

_PAUSE = 1.0  # seconds between two polls of --wait

_OPTIONS = ("reason", "from", "until", "for-group", "for-user", "wait", "timeout")
"""Words that are probably options without their dashes."""

_FARTHEST = 366 * 86400.0  # seconds


def configure_drain(parser: argparse.ArgumentParser) -> None:
    """Set its options."""
    parser.description = """Allow no new claims on these GPUs, or on any GPU of this host. Claims that hold
them go on, and waiters keep waiting. For root and the owner of the state
directory only. With --until it is a reservation for a time: before it begins,
GPUs go only to claims whose --for ends by then. It does not apply to root, nor
to those for whom the GPUs are reserved."""
    parser.epilog = """examples:
  safe-gpu drain 3 --reason 'a fan is broken'
  safe-gpu drain 3 a fan is broken
  safe-gpu drain 0-3 --from 'Thu 9:00' --until 12:00 --for-group course
  safe-gpu drain --wait --timeout 2h && reboot"""
    add = parser.add_argument
    add("--reason", metavar="R", default="", help="shown to everybody")
    add("--from", dest="begin", metavar="T", help="from this time on (default now): 18:00, 'Thu 9:00', +2h, a date")
    add("--until", metavar="T", help="until this time: the first 12:00 after it begins, or +3h after it begins")
    whom = parser.add_mutually_exclusive_group()
    whom.add_argument("--for-group", metavar="G", help="for the users in this group")
    whom.add_argument("--for-user", metavar="U", help="for this user")
    add("--wait", action="store_true", help="then wait until nobody holds or uses them")
    add("--timeout", type=parse_duration, metavar="D", help="with --wait: end with 75 after this time (default inf)")
    names = "as nvidia-smi shows them: 3, 0,3 or 4-7; all if none is named. Words after them are the reason"
    add("gpus", nargs="*", metavar="GPU", help=names)


def do_drain(options: argparse.Namespace) -> int:
    """Carry out the command; return its exit code."""
    if not _options_fit(options):
        options.usage_error("--from, --for-group and --for-user need --until; --timeout needs --wait, and no --until")
    names, words = _names_and_words(options)
    gpus = named_gpus(names)
    closed = ClosedGpusFile()
    reason = " ".join(f"{options.reason} {words}".split())
    if options.until is not None:
        _reserve(gpus, closed, reason, options)
        return 0
    _drain(gpus, closed, reason)
    if options.wait:
        return _wait_until_unused([one.gpu.uuid for one in gpus], options.timeout)
    return 0


def _names_and_words(options: argparse.Namespace) -> tuple[list[Sequence[str]], str]:
    """Return the names of GPUs that were typed, and the words after them, which are the reason."""
    names: list[Sequence[str]] = []
    for number, word in enumerate(options.gpus):
        try:
            names.append(gpu_list(word))
        except ValueError as err:
            words = options.gpus[number:]
            problem = _why_no_reason(words, names, err, options)
            if problem:
                options.usage_error(problem)
            return names, " ".join(words)
    return names, ""


def _why_no_reason(words: Sequence[str], names: Sequence[object], err: ValueError, options: argparse.Namespace) -> str:
    """Return the usage error for words that name no GPU and are not the reason; "" if they are.

    Args:
        names: the GPUs that are named before them.
        err: why the first of them names no GPU.
    """
    from shlex import join, quote

    first = words[0]
    if first in _OPTIONS:
        return f"did you mean --{join(words)}?"
    if not names and first.lower() in ALL:
        return leave_out(first)
    if not names and first.isalpha():
        reason = quote(" ".join(words))
        return f"{first!r} names no GPU: for this reason on all GPUs, write safe-gpu drain --reason {reason}"
    if not names or not first[:1].isalpha():
        return str(err)
    if options.reason:
        return f"--reason {quote(options.reason)} and {join(words)!r} are two reasons: write one"
    return ""


def _options_fit(options: argparse.Namespace) -> bool:
    """Return whether the options go together."""
    if options.timeout is not None and not options.wait:
        return False
    if options.until:
        return not options.wait
    return not (options.begin or options.for_group or options.for_user)


def _drain(gpus: Sequence[GpuStatus], closed: ClosedGpusFile, reason: str) -> None:
    """Close GPUs until they are resumed."""
    closed.drain([one.gpu.uuid for one in gpus], reason)
    closed.write()
    say_who_may_claim(gpus)


def _reserve(gpus: Sequence[GpuStatus], closed: ClosedGpusFile, reason: str, options: argparse.Namespace) -> None:
    """Close GPUs for the time that the options say."""
    whom = _for_whom(options)
    begin, end = _times(options)
    window = Window(
        begin=begin,
        end=end,
        gpus=tuple(one.gpu.uuid for one in gpus),
        whom=whom,
        reason=reason,
        by=user_name(os.geteuid()),
    )
    closed.reserve(window)
    closed.write()
    say(f"GPU {gpu_ranges(one.label for one in gpus)}: {window}")
    _say_overlaps(gpus, window)


def _for_whom(options: argparse.Namespace) -> str:
    """Return the group or the user for whom the GPUs are reserved, as a window has it; "" for root alone."""
    if options.for_group:
        kind = "group"
        name = options.for_group
        number = policy.gid_of(name)
    elif options.for_user:
        kind = "user"
        name = options.for_user
        number = policy.uid_of(name)
    else:
        return ""
    if number is None:
        options.usage_error(f"there is no {kind} {name} here")
    if " " in name:  # which would end a field of the file
        return f"{kind}:{number}"
    return f"{kind}:{name}"


def _times(options: argparse.Namespace) -> tuple[int, int]:
    """Return from when on the GPUs are reserved, and until when, in Unix seconds."""
    now = time.time()
    begin = int(now)
    try:
        if options.begin:
            begin = int(parse_moment(options.begin, now))
        end = int(parse_moment(options.until, begin))
    except ValueError as err:
        options.usage_error(str(err))
    if not max(begin, now) < end < now + _FARTHEST:
        options.usage_error(f"--until {options.until} is not after --from, is past, or is over a year away")
    return begin, end


def _say_overlaps(gpus: Sequence[GpuStatus], window: Window) -> None:
    """Say which claims are expected to hold the GPUs when the window has begun."""
    for one in gpus:
        for claim in one.claims:
            if claim.until and claim.until <= window.begin:
                continue
            end = "has not said when it ends"
            if claim.until:
                end = f"is to end at {clock(claim.until, time.time())}"
            say(f"GPU {one.label}: claimed by {claim.name} (pid {claim.pid or '?'}), whose claim {end}")


def _wait_until_unused(uuids: Collection[str], timeout: float | None) -> int:
    """Return 0 once nobody holds or uses the GPUs; 75 if that takes longer than ``timeout`` seconds."""
    deadline = math.inf
    if timeout is not None:
        deadline = time.monotonic() + timeout
    while True:
        status = gather()
        used = [one.label for one in status.gpus if one.gpu.uuid in uuids and _is_used(one)]
        if not used and not status.warnings:
            return 0
        if time.monotonic() >= deadline:
            say("; ".join([f"GPU {gpu_ranges(used)} still in use", *status.warnings]))
            return EX_TRY_AGAIN
        time.sleep(_PAUSE)


def _is_used(one: GpuStatus) -> bool:
    """Return whether somebody holds a GPU, or has a process on it."""
    if one.claim is not None:
        return True
    return bool(users_of(one.gpu, one.gpu.processes or (), describe_process))
