"""``safe-gpu drain`` and ``resume``: no new claims on GPUs, until they are resumed or for a time."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ...coordination.files.location import drain_file
from ...coordination.leases.drained import drained_gpus, read_drained
from ...errors import GPUAffinityError, PolicyError
from ...gpus.windows import MOST_WINDOWS, Window
from ...host import procfs
from ...host.programs import is_root
from ...selection.gpu_names import names_device
from ...selection.occupancy import computes
from ...settings.policy import gid_of, uid_of
from ...status.gather import gather
from ...wording.text import clock, gpu_ranges
from ..moments import moment
from ..option_values import duration, gpu_list
from ..output import say
from ..replaced_file import write_whole

if TYPE_CHECKING:
    from ...status.facts import GpuStatus

_TRY_AGAIN = 75

_PAUSE = 1.0  # seconds between two looks of --wait

_FARTHEST = 366 * 86400.0  # seconds

_KEPT = 7 * 86400.0  # seconds for which a window that is over is kept: the clock may have jumped


def configure_drain(parser: argparse.ArgumentParser) -> None:
    """Set its options and its handler."""
    parser.description = """Allow no new claims on these GPUs, or on any GPU of this host. Claims that hold
them go on, and waiters keep waiting. For root and the owner of the state
directory only. With --until it is for a time: before that begins, only claims
enter that say with --for that they end by then. It binds neither root nor those
for whom the GPUs are reserved."""
    parser.epilog = """examples:
  safe-gpu drain 3 --reason 'a fan is broken'
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
    add("--timeout", type=duration, metavar="D", help="with --wait: end with 75 after this time (default inf)")
    _add_gpus(parser)
    parser.set_defaults(handler=_drain, usage_error=parser.error)


def configure_resume(parser: argparse.ArgumentParser) -> None:
    """Set its options and its handler."""
    parser.description = """Allow new claims on these GPUs again, or on all GPUs of this host: they are
neither drained nor reserved any more."""
    _add_gpus(parser)
    parser.set_defaults(handler=_drain, **dict.fromkeys("reason begin until for_group for_user wait timeout".split()))


def _add_gpus(parser: argparse.ArgumentParser) -> None:
    names = "as nvidia-smi shows them: 3, 0,3 or 4-7; all if none is named"
    parser.add_argument("gpus", nargs="*", type=gpu_list, metavar="GPU", help=names)


def _drain(options: argparse.Namespace) -> int:
    """Write root's files, or those of the owner of the state directory."""
    for_time = options.begin or options.for_group or options.for_user
    if (options.wait if options.until else for_time) or (options.timeout is not None and not options.wait):
        options.usage_error("--from, --for-group and --for-user go with --until, --timeout with --wait, and only those")
    names = [name for names in options.gpus for name in names]
    gpus = gather().gpus
    unknown = [name for name in names if not any(names_device(name, one.gpu) for one in gpus)]
    if unknown:
        raise GPUAffinityError(f"this host has no GPU {', '.join(unknown)}: see safe-gpu status")
    meant = [one for one in gpus if not names or any(names_device(name, one.gpu) for name in names)]
    root, reason, uuids = is_root(), " ".join((options.reason or "").split()), [one.gpu.uuid for one in meant]
    if not root and not _is_own(os.path.dirname(drain_file(by_root=False))):
        raise PolicyError("only root and the owner of the state directory may drain GPUs: ask them")
    reasons, windows = dict(read_drained(by_root=root).reasons), [*read_drained(by_root=root, name="windows").windows]
    window = _window(options, tuple(uuids), reason) if options.until is not None else None
    if window is not None:
        windows.append(window)
    elif options.reason is not None:
        reasons |= dict.fromkeys(uuids, reason)
    else:
        reasons = {uuid: reason for uuid, reason in reasons.items() if uuid not in uuids}
        windows = [one._replace(gpus=tuple(uuid for uuid in one.gpus if uuid not in uuids)) for one in windows]
    windows = [one for one in windows if one.gpus and time.time() < one.end + _KEPT]
    if len(windows) > MOST_WINDOWS:
        raise GPUAffinityError(f"GPUs are reserved at {MOST_WINDOWS} times already: cancel some with safe-gpu resume")
    _write(root, "drained", [f"{uuid} {reason}" for uuid, reason in reasons.items()])
    _write(root, "windows", [one.line for one in windows])
    if window is not None:
        _say_overlaps(meant, window)
        return 0
    now = drained_gpus()
    for one in meant:
        claimed = f"; claimed by {one.claim.user} until that claim ends" if one.claim and one.gpu.uuid in now else ""
        say(f"GPU {one.label}: {now.get(one.gpu.uuid, 'can be claimed')}{claimed}")
    return _wait(uuids, options.timeout) if options.wait else 0


def _window(options: argparse.Namespace, uuids: tuple[str, ...], reason: str) -> Window:
    kind, name = ("group", options.for_group) if options.for_group else ("user", options.for_user)
    number, now = (gid_of if kind == "group" else uid_of)(name or "0"), time.time()
    if number is None:
        options.usage_error(f"there is no {kind} {name} here")
    try:
        begin = int(moment(options.begin, now) if options.begin else now)
        until = int(moment(options.until, begin))
    except argparse.ArgumentTypeError as err:
        options.usage_error(str(err))
    if not max(begin, now) < until < now + _FARTHEST:
        options.usage_error(f"--until {options.until} is not after --from, is past, or is over a year away")
    whom = f"{kind}:{number if ' ' in name else name}" if name else ""
    return Window(begin, until, uuids, whom, reason, procfs.user_name(os.geteuid()))


def _write(root: bool, name: str, lines: Sequence[str]) -> None:
    path = drain_file(by_root=root, name=name)
    if lines or os.path.lexists(path):
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        write_whole(path, "".join(f"{line}\n" for line in lines))


def _is_own(path: str) -> bool:
    try:
        return os.stat(path).st_uid == os.geteuid()
    except OSError:
        return False


def _say_overlaps(gpus: Sequence[GpuStatus], window: Window) -> None:
    """Say which claims are expected to hold the GPUs when the window has begun."""
    say(f"GPU {gpu_ranges(one.label for one in gpus)}: {window}")
    for one in gpus:
        for claim in one.claims:
            if (claim.until or math.inf) > window.begin:
                end = f"is to end at {clock(claim.until, time.time())}" if claim.until else "has not said when it ends"
                say(f"GPU {one.label}: claimed by {claim.user} (pid {claim.pid or '?'}), whose claim {end}")


def _wait(uuids: Collection[str], timeout: float | None) -> int:
    """Return once nobody holds or uses the GPUs; 75 if that takes longer."""
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    is_used = partial(computes, describe=procfs.describe_process)
    while True:
        status = gather()
        meant = (one for one in status.gpus if one.gpu.uuid in uuids)
        used = [one.label for one in meant if one.claim or any(map(is_used, one.gpu.processes or ()))]
        if not used and not status.warnings:
            return 0
        if time.monotonic() >= deadline:
            say("; ".join([f"GPU {gpu_ranges(used)} still in use", *status.warnings]))
            return _TRY_AGAIN
        time.sleep(_PAUSE)
