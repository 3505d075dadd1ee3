"""The command ``setup``: a state directory of root's, to which the host's settings lead all sessions."""

import argparse
import os
import re
import time
from collections.abc import Collection
from contextlib import suppress

from ..coordination.closed import closed_file, read_closed
from ..coordination.directory import ADMIN_DIR, DEFAULT_DIR, HOST_LOCK, PARTS, setup_command, state_dir_path
from ..coordination.setup import examine, in_use, make, make_anew, remove, remove_hidden, slow_directories
from ..drivers.patience import Patience
from ..errors import PolicyError, SafeGpuError, StateDirError
from ..host.foreign_files import printable, read_start
from ..host.programs import is_root, others_can_change
from ..settings import variables as settings
from ..status.gather import gather
from ..wording.text import gpu_ranges, plural
from .commands import EX_TRY_AGAIN
from .output import CommandError, print_lines, write_whole

# Any user can claim GPUs of any names, and make files of any names.
_MOST_NAMED = 8
_MOST_LEFT = 100

SIGNS_OF_SYSTEMD = ("/run/systemd/system", "/usr/bin/systemd-tmpfiles", "/bin/systemd-tmpfiles")
"""If one of these exists, a rule of tmpfiles.d is useful."""


def configure_setup(parser: argparse.ArgumentParser) -> None:
    """Set its options."""
    parser.description = """Make a state directory that belongs to root, so that no user can remove or close
what others rely on, and name it in the host's settings for all sessions. What
is already right, and what other users made, is not changed."""
    parser.epilog = "examples:\n  safe-gpu setup --dry-run\n  safe-gpu setup && safe-gpu doctor"
    add = parser.add_argument
    add("--state-dir", metavar="DIR", default=ADMIN_DIR, help=f"an absolute path on a local disk (default {ADMIN_DIR})")
    add("--dry-run", action="store_true", help="print what would be done, and change nothing")
    add("--remove", action="store_true", help="remove what setup made, while nobody claims or waits")


def do_setup(options: argparse.Namespace) -> int:
    """Carry out the command; return its exit code."""
    path = _checked(options.state_dir)
    if not options.dry_run and not is_root():
        raise PolicyError("only root can set up a host: run it as root, or with --dry-run")
    settings.read_anew()
    os.umask(0o022)  # all users are to read the settings
    if options.remove:
        _take_away(path, options.dry_run)
        code = 0
    else:
        code = _set_up(path, options.dry_run)
    if options.dry_run:
        print("nothing was changed (--dry-run)")
    return code


def _set_up(path: str, dry_run: bool) -> int:
    """Make everything, or print what would be made; return the exit code, 1 where something is left to do."""
    others = {state_dir_path(), settings.host_setting("state_dir", "", os.environ) or DEFAULT_DIR} - {path}
    for other in others:
        with suppress(StateDirError):  # where nobody can claim
            _refuse_if_used(other)
    _make_state_dir(path, dry_run)
    to_do = _make_anew(path, dry_run) + _lead_there(path, dry_run) + _closed_elsewhere(path, others)
    for task in to_do:
        print(f"to do: {task}")
    if to_do:
        return 1
    if not dry_run:
        print(f"nothing is left to do: the state directory {path} is root's")
    return 0


def _take_away(path: str, dry_run: bool) -> None:
    """Remove everything, or print what would be removed."""
    _refuse_if_used(path)
    config = settings.policy_file(os.environ)
    stays = _remove_files(path, (config, RULE, closed_file(by_root=True)), dry_run) + _remove_state_dir(path, dry_run)
    if not dry_run:
        with suppress(OSError):  # something is left in it
            os.rmdir(os.path.dirname(config))
    for name in stays[:_MOST_LEFT]:
        print_lines(printable(f"left, since setup did not write it: {name}"))
    if len(stays) > _MOST_LEFT:
        print(f"left, since setup did not write them: {len(stays) - _MOST_LEFT} more")


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
    part = others_can_change(above)
    if part is not None:
        raise StateDirError(f"{path} is not safe: users other than root can change {part}; name another", path=path)
    return path


def _refuse_if_used(path: str) -> None:
    """Refuse to go on while somebody relies on a state directory.

    Raises:
        CommandError: GPUs are claimed or waited for there.
        StateDirError: it cannot be read.
    """
    claimed, waiters = in_use(path)
    found = _as_shown(claimed)
    if waiters:
        found.append(plural(waiters, "waiter"))
    if found:
        used = f"GPUs are claimed or waited for in {path}: {', '.join(found)}"
        way_out = "keep new claims off with safe-gpu drain, and try again later"
        raise CommandError(f"{used}: {way_out}", code=EX_TRY_AGAIN)


def _as_shown(uuids: Collection[str]) -> list[str]:
    """Return GPUs as people name them, ``GPU 0-2``, and the UUIDs of those that the driver does not show."""
    labels = {}
    if uuids:
        with suppress(SafeGpuError):  # a host is set up before its driver works, too
            labels = {one.gpu.uuid: one.label for one in gather(Patience(deadline=time.monotonic())).gpus}
    found = []
    shown = [label for uuid, label in labels.items() if uuid in uuids]
    if shown:
        found.append(f"GPU {gpu_ranges(shown)}")
    unknown = [uuid for uuid in uuids if uuid not in labels]
    found += unknown[:_MOST_NAMED]
    if len(unknown) > _MOST_NAMED:
        found.append(f"{len(unknown) - _MOST_NAMED} more")
    return found


def _make_state_dir(path: str, dry_run: bool) -> None:
    """Make what a state directory of root's lacks, or print that.

    Raises:
        StateDirError: as of :func:`examine` and :func:`make`.
    """
    missing = examine(path)
    for name in missing:
        print(f"make {os.path.normpath(os.path.join(path, name))}")
    if missing and not dry_run:
        make(path)
        examine(path)


def _make_anew(path: str, dry_run: bool) -> list[str]:
    """Replace directories of entries that have become slow, or print that; return what is left to do."""
    try:
        slow = slow_directories(path)
    except FileNotFoundError:  # it is not made yet (--dry-run)
        return []
    _, waiters = in_use(path)
    if slow and waiters:
        names = " and ".join(f"{path}/{part}" for part in slow)
        return [f"{names} with very many names, or room for them: run setup again when nobody waits"]
    for part in slow:
        print(f"make anew {path}/{part}")
        if not dry_run:
            make_anew(path, part)
    if dry_run:
        return []
    return [f"remove {path}/{name}" for name in remove_hidden(path)]


def _lead_there(path: str, dry_run: bool) -> list[str]:
    """Write the rule and the settings where there are none, or print that; return what is left to do."""
    to_do = []
    wanted = {}
    if any(os.path.exists(sign) for sign in SIGNS_OF_SYSTEMD):
        rule = read_start(RULE)
        if rule is None:
            wanted[RULE] = rule_text(path)
        elif rule != rule_text(path).encode():
            to_do.append(f"{RULE} has other lines: remove it, and run {setup_command(path)} again")
    config = settings.policy_file(os.environ)
    if not os.path.lexists(config):
        wanted[config] = config_text(path)
    elif settings.host_setting("state_dir", "", os.environ) != path:
        to_do.append(f"write state_dir = {path} below [host] in {config}, so that all sessions use it")
    for file, text in wanted.items():
        print(f"write {file}")
        if not dry_run:
            _write_setting(file, text)
    return to_do


def _write_setting(path: str, text: str) -> None:
    """Write a file by which sessions find the state directory.

    Raises:
        PolicyError: not only root could change it.
    """
    directory = os.path.dirname(path)
    os.makedirs(directory, exist_ok=True)
    part = others_can_change(directory)
    if part is not None:
        raise PolicyError(f"{path} is not written: users other than root can change {part}", path=path)
    write_whole(path, text)


def _closed_elsewhere(path: str, others: Collection[str]) -> list[str]:
    """Return what is left to do for the GPUs that are closed in other state directories."""
    to_do = []
    for other in sorted(others):
        closed = read_closed(by_root=False, state_dir=other)
        uuids = set(closed.reasons)
        for window in closed.windows:
            if window.end > time.time():
                uuids.update(window.gpus)
        if uuids:
            gpus = ", ".join(_as_shown(sorted(uuids)))
            to_do.append(f"drain or reserve {gpus} again: {other}/closed, which closes them, does not count in {path}")
    return to_do


def _remove_files(state_dir: str, files: Collection[str], dry_run: bool) -> list[str]:
    """Remove the files that setup wrote for a state directory, and empty ones, or print them; return those that
    stay."""
    stays = []
    for file in files:
        content = read_start(file)
        if content is None:
            continue
        if content.decode("utf-8", "replace") not in ("", config_text(state_dir), rule_text(state_dir)):
            stays.append(file)
            continue
        print(f"remove {file}")
        if not dry_run:
            os.unlink(file)
    return stays


def _remove_state_dir(path: str, dry_run: bool) -> list[str]:
    """Remove a state directory of root's with what is of no use without it, or print that; return what stays."""
    try:
        if os.stat(path, follow_symlinks=False).st_uid != 0:
            return [path]
        names = remove(path, carry_out=not dry_run)
    except FileNotFoundError:
        return []
    if not names:
        print(f"remove {path}")
    return [f"{path}/{name}" for name in names]


RULE = "/etc/tmpfiles.d/safe-gpu.conf"
"""Makes the state directory again at boot, and keeps systemd-tmpfiles from cleaning it."""


def rule_text(state_dir: str) -> str:
    """Return the rule of tmpfiles.d(5)."""
    directories = [state_dir, *(f"{state_dir}/{part}" for part in PARTS)]
    lines = [f"d {directory} 1777 root root -\n" for directory in directories]
    lines.append(f"f {state_dir}/{HOST_LOCK} 0666 root root -\n")
    return "".join(lines).replace("%", "%%")


def config_text(state_dir: str) -> str:
    """Return the settings of a host that has no others."""
    return f"[host]\nstate_dir = {state_dir}\n"
