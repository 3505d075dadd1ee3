"""The commands of administrators: drain, resume and policy."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from ..coordination.closed import closed_file, drained_gpus, read_closed
from ..errors import GPUAffinityError, PolicyError
from ..gpus.windows import Window, drain_line
from ..host import procfs
from ..host.foreign_files import LIMIT
from ..host.programs import is_root
from ..selection.values import is_index, names_device
from ..selection.verdicts import users_of
from ..settings.config import gid_of, uid_of
from ..settings.durations import parse_moment
from ..status.gather import gather
from ..wording.text import clock, gpu_ranges
from .arguments import duration, gpu_list
from .output import print_json, print_lines, say, write_whole

if TYPE_CHECKING:
    from ..settings.config import Limits
    from ..status.facts import GpuStatus

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
    status = gather()
    gpus = status.gpus
    if status.doubt and any(map(is_index, names)):
        raise GPUAffinityError(status.doubt)
    unknown = [name for name in names if not any(names_device(name, one.gpu) for one in gpus)]
    if unknown:
        raise GPUAffinityError(f"this host has no GPU {', '.join(unknown)}: see safe-gpu status")
    meant = [one for one in gpus if not names or any(names_device(name, one.gpu) for name in names)]
    root, reason, uuids = is_root(), " ".join((options.reason or "").split()), [one.gpu.uuid for one in meant]
    if not root and not _is_own(os.path.dirname(closed_file(by_root=False))):
        raise PolicyError("only root and the owner of the state directory may drain GPUs: ask them")
    closed = read_closed(by_root=root)
    reasons, windows = dict(closed.reasons), [*closed.windows]
    window = _window(options, tuple(uuids), reason) if options.until is not None else None
    if window is not None:
        windows.append(window)
    elif options.reason is not None:
        reasons |= dict.fromkeys(uuids, reason)
    else:
        reasons = {uuid: reason for uuid, reason in reasons.items() if uuid not in uuids}
        windows = [one._replace(gpus=tuple(uuid for uuid in one.gpus if uuid not in uuids)) for one in windows]
    windows = [one for one in windows if one.gpus and time.time() < one.end + _KEPT]
    lines = [drain_line(uuid, reason) for uuid, reason in reasons.items()]
    _write(closed_file(by_root=root), [*lines, *(line for one in windows for line in one.lines)])
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
        begin = int(parse_moment(options.begin, now) if options.begin else now)
        until = int(parse_moment(options.until, begin))
    except ValueError as err:
        options.usage_error(str(err))
    if not max(begin, now) < until < now + _FARTHEST:
        options.usage_error(f"--until {options.until} is not after --from, is past, or is over a year away")
    whom = f"{kind}:{number if ' ' in name else name}" if name else ""
    return Window(begin, until, uuids, whom, reason, procfs.user_name(os.geteuid()))


def _write(path: str, lines: Sequence[str]) -> None:
    """Replace a file of closed GPUs.

    Raises:
        GPUAffinityError: nobody would read so much.
    """
    text = "".join(f"{line}\n" for line in lines).encode()
    if len(text) > LIMIT:
        raise GPUAffinityError(f"{path} would be larger than {LIMIT} bytes: cancel reservations with safe-gpu resume")
    if text or os.path.lexists(path):
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        write_whole(path, text)


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
    while True:
        status = gather()
        meant = (one for one in status.gpus if one.gpu.uuid in uuids)
        used = [
            one.label
            for one in meant
            if one.claim or users_of(one.gpu, one.gpu.processes or (), procfs.describe_process)
        ]
        if not used and not status.warnings:
            return 0
        if time.monotonic() >= deadline:
            say("; ".join([f"GPU {gpu_ranges(used)} still in use", *status.warnings]))
            return _TRY_AGAIN
        time.sleep(_PAUSE)


def configure_policy(parser: argparse.ArgumentParser) -> None:
    """Set its options and its handler."""
    parser.description = "Show the limits that the administrator has set for you, or for others."
    parser.epilog = "examples:\n  safe-gpu policy\n  safe-gpu policy --json | jq .max_gpus\n  safe-gpu policy --all"
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--user", metavar="U", help="show the limits of this user, by name or number")
    whose.add_argument("--all", action="store_true", help="show how many GPUs each user holds and may hold")
    whose.add_argument("--check", metavar="FILE", help="check whether this file is valid as the host's")
    parser.add_argument("--json", action="store_true", help="for programs; times in seconds, null for no limit")
    parser.set_defaults(handler=_policy, usage_error=parser.error)


def _policy(options: argparse.Namespace) -> int:
    from ..host.procfs import printable_lines, user_name
    from ..settings import variables as settings
    from ..settings.config import KEYS, Limits, limits_of_this_user, limits_of_user, read, uid_of, unknown_names

    path = options.check or settings.policy_file(os.environ)
    rules, ignored = read(path)
    if ignored:
        say(f"warning: {ignored}")
    if rules is not None and (options.check or options.all):
        for doubt in unknown_names(rules):
            say(f"warning: {doubt}")
    if options.check:
        if rules is None and not ignored:
            options.usage_error(f"--check: there is no {path}")
        print(f"{path} is right" if rules else f"{path} would be ignored")
        return 0 if rules else 1
    uid = os.geteuid() if options.user is None else uid_of(options.user)
    if uid is None:
        options.usage_error(f"--user {options.user}: there is no such user here")
    assert uid is not None
    user = user_name(uid)
    if rules is None:
        limits = Limits()
    else:
        limits = limits_of_this_user(rules) if uid == os.geteuid() else limits_of_user(rules, uid)
    all_held = None if rules is None else _held()
    if rules is not None and options.all:
        held_by: dict[int, float] = {}
        for users in (all_held or {}).values():
            held_by.update((uid, held_by.get(uid, 0) + number) for uid, number in users.items())
        sections = (uid_of(one.name) for one in rules.sections if one.kind == "user")
        named = {one for one in sections if one is not None}
        rows = [
            (user_name(one), held_by.get(one, 0), limits_of_user(rules, one).max_gpus) for one in named | held_by.keys()
        ]
        if options.json:
            facts = [{"user": name, "held": held, "max_gpus": most} for name, held, most in sorted(rows)]
            print_json({"schema": 1, "file": path, "users": facts})
            return 0
        for name, number, most in sorted(rows):
            above = "  above the limit" if most is not None and number > most else ""
            print(printable_lines(f"{name:<18}{number} of {'unlimited' if most is None else most}{above}"))
        return 0
    held = None if all_held is None else {vendor: users.get(uid, 0) for vendor, users in all_held.items()}
    if options.json:
        own: dict[str, Any] = {"schema": 1, "file": limits.path or None, "user": user, "uid": uid}
        own.update(exempt=limits.exempt, held=None if held is None else sum(held.values()))
        own.update((key, getattr(limits, key)) for key in KEYS)
        print_json({**own, "sections": dict(limits.sections)})
        return 0
    if rules is None:
        text = f"{path} is ignored: nothing is limited" if ignored else f"There is no {path}: nothing is limited"
    elif limits.exempt:
        text = f"{user} is exempt: {path} limits root only in a section [user root]"
    else:
        keys = ((key, _shown_limit(key, getattr(limits, key)), limits.sections.get(key, "")) for key in KEYS)
        lines = [f"{key:<18}{value:<13}{section}".rstrip() for key, value, section in keys]
        text = "\n".join([f"{path}, for {user}", "", *lines, *_shown_held(limits, held, options.user and user)])
    print_lines(printable_lines(text))
    return 0


def _held() -> dict[str, dict[int, float]] | None:
    """Return, for each vendor, how many of its GPUs each user (uid) holds here, counting shares as parts; None if the
    GPUs or the state directory cannot be read."""
    from ..claim.limits import held_of
    from ..coordination.holders import Claims, living_claims
    from ..drivers import open_drivers
    from ..errors import SafeGpuError

    held = {}
    try:
        claims = Claims(living_claims())
        for driver in open_drivers()[0]:
            try:
                snapshot = driver.snapshot()
            finally:
                driver.close()
            users: dict[int, float] = {}
            for claim, number in held_of(snapshot, claims):
                users[claim.uid] = users.get(claim.uid, 0.0) + number
            held[snapshot.vendor] = {uid: _rounded(number) for uid, number in users.items() if number}
    except SafeGpuError as err:
        say(f"warning: {err}")
        return None
    return held


def _rounded(number: float) -> float:
    """Return a number of GPUs as an integer where it is whole: 2 or 0.25."""
    return int(number) if number == int(number) else round(number, 2)


def _shown_held(limits: Limits, held: dict[str, float] | None, other: str | None) -> list[str]:
    from ..gpus.vendors import VENDORS
    from ..wording.text import plural

    most = limits.max_gpus
    if most is None or held is None:
        return []
    kinds = {f"{VENDORS[vendor].title} GPU": number for vendor, number in held.items()} if len(held) > 1 else {}
    each = kinds or {"GPU": sum(held.values())}
    texts = [f"{number} of {'' if other else 'your '}{plural(most, kind)}" for kind, number in each.items()]
    above = " The limit has been lowered: no claim ends, and new ones wait." if max(each.values()) > most else ""
    return ["", f"{f'{other} holds' if other else 'You hold'} {' and '.join(texts)}.{above}"]


def _shown_limit(key: str, value: float | None) -> str:
    from ..wording.text import format_age

    if value is None:
        return "unlimited" if key.startswith("max") else "unset"
    if key == "max_gpus":
        return str(value)
    return f"{value:g} s" if value % 60 else format_age(value)
