"""The commands of administrators: drain, resume, policy, and setup, which makes a state directory of root's."""

import argparse
import math
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

from ..claim.limits import held_of
from ..coordination.directory import ADMIN_DIR, DEFAULT_DIR, HOST_LOCK, PARTS, setup_command, state_dir_path
from ..coordination.holders import Claims, living_claims
from ..coordination.notes import closed_file, drained_gpus, read_closed
from ..coordination.setup import examine, in_use, make, remove
from ..drivers import open_drivers
from ..errors import GPUAffinityError, PolicyError, SafeGpuError, StateDirError
from ..gpus.vendors import VENDORS
from ..gpus.windows import Window, drain_line
from ..host.foreign_files import LIMIT, printable_lines, read_start
from ..host.procfs import describe_process, user_name
from ..host.programs import is_root, others_can_change
from ..selection.verdicts import users_of
from ..settings import config as policy
from ..settings import variables as settings
from ..settings.values import is_index, names_device, parse_duration, parse_moment
from ..status.facts import GpuStatus
from ..status.gather import gather
from ..wording.text import clock, format_age, gpu_ranges, plural
from .arguments import gpu_list
from .commands import EX_TRY_AGAIN
from .output import CommandError, print_json, print_lines, say, write_whole

_PAUSE = 1.0  # seconds between two looks of --wait

_FARTHEST = 366 * 86400.0  # seconds

_KEPT = 7 * 86400.0  # seconds for which a window that is over is kept: the clock may have jumped


def configure_drain(parser: argparse.ArgumentParser) -> None:
    """Set its options."""
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
    add("--timeout", type=parse_duration, metavar="D", help="with --wait: end with 75 after this time (default inf)")
    _add_gpus(parser)


def configure_resume(parser: argparse.ArgumentParser) -> None:
    """Set its options."""
    parser.description = """Allow new claims on these GPUs again, or on all GPUs of this host: they are
neither drained nor reserved any more."""
    _add_gpus(parser)
    parser.set_defaults(**dict.fromkeys("reason begin until for_group for_user wait timeout".split()))


def _add_gpus(parser: argparse.ArgumentParser) -> None:
    names = "as nvidia-smi shows them: 3, 0,3 or 4-7; all if none is named"
    parser.add_argument("gpus", nargs="*", type=gpu_list, metavar="GPU", help=names)


def do_drain(options: argparse.Namespace) -> int:
    """Write root's files, or those of the owner of the state directory."""
    for_time = options.begin or options.for_group or options.for_user
    if (options.wait if options.until else for_time) or (options.timeout is not None and not options.wait):
        options.usage_error("--from, --for-group and --for-user go with --until, --timeout with --wait, and only those")
    names = [name for names in options.gpus for name in names]
    status = gather()
    if status.doubt and any(map(is_index, names)):
        raise GPUAffinityError(status.doubt)
    unknown = [name for name in names if not any(names_device(name, one.gpu) for one in status.gpus)]
    if unknown:
        raise GPUAffinityError(f"this host has no GPU {', '.join(unknown)}: see safe-gpu status")
    meant = [one for one in status.gpus if not names or any(names_device(name, one.gpu) for name in names)]
    root, reason, uuids = is_root(), " ".join((options.reason or "").split()), [one.gpu.uuid for one in meant]
    own = os.path.dirname(closed_file(by_root=False))
    if not root and not (os.path.isdir(own) and os.stat(own).st_uid == os.geteuid()):
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


do_resume = do_drain  # its options say which


def _window(options: argparse.Namespace, uuids: tuple[str, ...], reason: str) -> Window:
    kind, name = ("group", options.for_group) if options.for_group else ("user", options.for_user)
    number, now = (policy.gid_of if kind == "group" else policy.uid_of)(name or "0"), time.time()
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
    return Window(begin, until, uuids, whom, reason, user_name(os.geteuid()))


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
        used = [one.label for one in meant if one.claim or users_of(one.gpu, one.gpu.processes or (), describe_process)]
        if not used and not status.warnings:
            return 0
        if time.monotonic() >= deadline:
            say("; ".join([f"GPU {gpu_ranges(used)} still in use", *status.warnings]))
            return EX_TRY_AGAIN
        time.sleep(_PAUSE)


def configure_policy(parser: argparse.ArgumentParser) -> None:
    """Set its options."""
    parser.description = "Show the limits that the administrator has set for you, or for others."
    parser.epilog = "examples:\n  safe-gpu policy\n  safe-gpu policy --json | jq .max_gpus\n  safe-gpu policy --all"
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--user", metavar="U", help="show the limits of this user, by name or number")
    whose.add_argument("--all", action="store_true", help="show how many GPUs each user holds and may hold")
    whose.add_argument("--check", metavar="FILE", help="check whether this file is valid as the host's")
    parser.add_argument("--json", action="store_true", help="for programs; times in seconds, null for no limit")


def do_policy(options: argparse.Namespace) -> int:
    """Carry out the command; return its exit code."""
    path = options.check or settings.policy_file(os.environ)
    rules, ignored = policy.read(path)
    doubts = policy.unknown_names(rules) if rules is not None and (options.check or options.all) else ()
    for warning in filter(None, [ignored, *doubts]):
        say(f"warning: {warning}")
    if options.check:
        if rules is None and not ignored:
            options.usage_error(f"--check: there is no {path}")
        print(f"{path} is right" if rules else f"{path} would be ignored")
        return 0 if rules else 1
    uid = os.geteuid() if options.user is None else policy.uid_of(options.user)
    if uid is None:
        options.usage_error(f"--user {options.user}: there is no such user here")
    assert uid is not None
    user, limits, held = user_name(uid), policy.Limits(), None
    if rules is not None:
        held = _held()
        if options.all:
            return _show_all(rules, held or {}, as_json=options.json)
        limits = policy.limits_of_user(rules, uid)
    own = {vendor: _rounded(users[uid]) for vendor, users in (held or {}).items()}
    if options.json:
        total = None if held is None else _rounded(sum(own.values()))
        facts: dict[str, Any] = {"schema": 1, "file": limits.path or None, "user": user, "uid": uid, "held": total}
        facts |= {key: getattr(limits, key) for key in ("exempt", *policy.KEYS)}
        print_json({**facts, "sections": dict(limits.sections)})
        return 0
    if rules is None:
        text = f"{path} is ignored: nothing is limited" if ignored else f"There is no {path}: nothing is limited"
    elif limits.exempt:
        text = f"{user} is exempt: {path} limits root only in a section [user root]"
    else:
        keys = ((key, _shown_limit(key, getattr(limits, key)), limits.sections.get(key, "")) for key in policy.KEYS)
        lines = [f"{key:<18}{value:<13}{section}".rstrip() for key, value, section in keys]
        text = "\n".join([f"{path}, for {user}", "", *lines, *_shown_held(limits, own, options.user and user)])
    print_lines(printable_lines(text))
    return 0


def _show_all(rules: policy.Policy, held: Mapping[str, Counter[int]], *, as_json: bool) -> int:
    """Print how many GPUs each user holds and may hold, who has a section or holds any."""
    total = sum(held.values(), Counter[int]())
    named = (policy.uid_of(one.name) for one in rules.sections if one.kind == "user")
    uids = {*total, *(uid for uid in named if uid is not None)}
    rows = sorted((user_name(uid), _rounded(total[uid]), policy.limits_of_user(rules, uid).max_gpus) for uid in uids)
    if as_json:
        facts = [{"user": name, "held": number, "max_gpus": most} for name, number, most in rows]
        print_json({"schema": 1, "file": rules.path, "users": facts})
    for name, number, most in () if as_json else rows:
        above = "  above the limit" if most is not None and number > most else ""
        print(printable_lines(f"{name:<18}{number} of {'unlimited' if most is None else most}{above}"))
    return 0


def _shown_held(limits: policy.Limits, held: Mapping[str, float], other: str | None) -> list[str]:
    """Return what this user, or another one, holds of each vendor's GPUs, where that is known and limited."""
    most = limits.max_gpus
    if most is None or not held:
        return []
    kinds = {f"{VENDORS[vendor].title} GPU": number for vendor, number in held.items()}
    each = kinds if len(kinds) > 1 else {"GPU": sum(held.values())}
    texts = [f"{number} of {'' if other else 'your '}{plural(most, kind)}" for kind, number in each.items()]
    above = " The limit has been lowered: no claim ends, and new ones wait." * (max(each.values()) > most)
    return ["", f"{f'{other} holds' if other else 'You hold'} {' and '.join(texts)}.{above}"]


def _held() -> dict[str, Counter[int]] | None:
    """Return, for each vendor, how many of its GPUs each user (uid) holds here, counting shares as parts; None if the
    GPUs or the state directory cannot be read."""
    held: dict[str, Counter[int]] = {}
    try:
        claims = Claims(living_claims())
        for driver in open_drivers()[0]:
            with closing(driver):
                snapshot = driver.snapshot()
            users = held.setdefault(snapshot.vendor, Counter())
            for claim, number in held_of(snapshot, claims):
                users[claim.uid] += number  # type: ignore[assignment]  # a share is a part
    except SafeGpuError as err:
        say(f"warning: {err}")
        return None
    return held


def _rounded(number: float) -> float:
    """Return a number of GPUs as an integer where it is whole: 2 or 0.25."""
    return int(number) if number == int(number) else round(number, 2)


def _shown_limit(key: str, value: float | None) -> str:
    if value is None:
        return "unlimited" if key.startswith("max") else "unset"
    if key == "max_gpus":
        return str(value)
    return f"{value:g} s" if value % 60 else format_age(value)


_SYSTEMD = ("/run/systemd/system", "/usr/bin/systemd-tmpfiles", "/bin/systemd-tmpfiles")


def configure_setup(parser: argparse.ArgumentParser) -> None:
    """Set its options."""
    parser.description = """Make a state directory of root's, so that no user can remove or close what
others rely on; lead all sessions to it by the host's settings. What is right
already, and what others made, is not changed."""
    parser.epilog = "examples:\n  safe-gpu setup --dry-run\n  safe-gpu setup && safe-gpu doctor"
    add = parser.add_argument
    add("--state-dir", metavar="DIR", default=ADMIN_DIR, help=f"an absolute path on a local disk (default {ADMIN_DIR})")
    add("--dry-run", action="store_true", help="print what would be done, and change nothing")
    add("--remove", action="store_true", help="remove what setup made, while nobody claims or waits")


def do_setup(options: argparse.Namespace) -> int:
    """Carry out the command; return its exit code."""
    path, act = _checked(options.state_dir), not options.dry_run
    if act and not is_root():
        raise PolicyError("only root can set up a host: run it as root, or with --dry-run")
    settings.read_anew()
    os.umask(0o022)  # all users are to read the settings
    if options.remove:
        _refuse_if_used(path)
        left = [f"left, since setup did not write it: {name}" for name in _remove(path, act)]
    else:
        others = {state_dir_path(), settings.host_setting("state_dir", "", os.environ) or DEFAULT_DIR} - {path}
        for other in others:
            with suppress(StateDirError):  # where nobody can claim
                _refuse_if_used(other)
        left = [f"to do: {text}" for text in _make(path, others, act)]
        if act and not left:
            print(f"nothing is left to do: the state directory {path} is root's")
    for line in left:
        print(line)
    if not act:
        print("nothing was changed (--dry-run)")
    return int(bool(left) and not options.remove)


def _checked(text: str) -> str:
    """Return the path of the state directory.

    Raises:
        StateDirError: root cannot rely on it, or no settings could name it.
    """
    path = os.path.abspath(text)
    if not os.path.isabs(text) or not re.fullmatch(r"[\w./%+:@-]+", path, re.ASCII) or path == "/":
        raise StateDirError(f"--state-dir {text} is not possible: write an absolute path without blanks", path=path)
    above = os.path.dirname(path)
    if not os.path.isdir(above):
        raise StateDirError(f"there is no directory {above}: create it", path=path)
    if part := others_can_change(above):
        raise StateDirError(f"{path} is not safe: users other than root can change {part}; name another", path=path)
    return path


def _refuse_if_used(path: str) -> None:
    claimed, waiters = in_use(path)
    if claimed or waiters:
        found = claimed + [plural(waiters, "waiter")] * bool(waiters)
        used = f"GPUs are claimed or waited for in {path}: {', '.join(found)}"
        way_out = "keep new claims off with safe-gpu drain, and try again later"
        raise CommandError(f"{used}: {way_out}", code=EX_TRY_AGAIN)


def _make(path: str, others: set[str], act: bool) -> Iterator[str]:
    """Make everything, or print what would be made. Yields what is left to do."""
    for name in (missing := examine(path)):
        print(f"make {os.path.normpath(os.path.join(path, name))}")
    if act and missing:
        make(path)
        examine(path)
    yield from _lead_there(path, act)
    for other in sorted(others):
        here = read_closed(by_root=False, state_dir=other)
        if here.reasons or here.windows:
            yield f"{other}/closed closes GPUs, and does not count in {path}: close them again with safe-gpu drain"


def _lead_there(path: str, act: bool) -> Iterator[str]:
    """Write the rule and the settings, or print that. Yields what is left to do."""
    config, wanted = settings.policy_file(os.environ), {}
    if any(map(os.path.exists, _SYSTEMD)):
        now = read_start(RULE)
        if now is None:
            wanted[RULE] = rule_text(path)
        elif now != rule_text(path).encode():
            yield f"{RULE} has other lines: remove it, and run {setup_command(path)} again"
    if not os.path.lexists(config):
        wanted[config] = config_text(path)
    elif settings.host_setting("state_dir", "", os.environ) != path:
        yield f"write state_dir = {path} below [host] in {config}, so that all sessions use it"
    for file, text in wanted.items():
        print(f"write {file}")
        if act:
            directory = os.path.dirname(file)
            os.makedirs(directory, exist_ok=True)
            if part := others_can_change(directory):
                raise PolicyError(f"{file} is not written: users other than root can change {part}", path=file)
            write_whole(file, text)


def _remove(path: str, act: bool) -> Iterator[str]:
    """Remove what setup made, or print what would be removed. Yields what stays."""
    config = settings.policy_file(os.environ)
    texts = {file: text for file in (config, RULE, closed_file(by_root=True)) if (text := read_start(file)) is not None}
    for file, text in texts.items():
        if text.decode("utf-8", "replace") in ("", config_text(path), rule_text(path)):
            print(f"remove {file}")
            if act:
                os.unlink(file)
        else:
            yield file
    with suppress(FileNotFoundError):
        stays = [""] if os.stat(path, follow_symlinks=False).st_uid else remove(path, carry_out=act)
        yield from (f"{path}/{name}".rstrip("/") for name in stays)
        if not stays:
            print(f"remove {path}")
    if act:
        with suppress(OSError):  # something is left in it
            os.rmdir(os.path.dirname(config))


RULE = "/etc/tmpfiles.d/safe-gpu.conf"
"""Makes the state directory again at boot, and keeps systemd-tmpfiles from cleaning it."""


def rule_text(state_dir: str) -> str:
    """Return the rule of tmpfiles.d(5)."""
    lines = [f"d {one} 1777 root root -\n" for one in (state_dir, *(f"{state_dir}/{part}" for part in PARTS))]
    return "".join([*lines, f"f {state_dir}/{HOST_LOCK} 0666 root root -\n"]).replace("%", "%%")


def config_text(state_dir: str) -> str:
    """Return the settings of a host that has no others."""
    return f"[host]\nstate_dir = {state_dir}\n"
