"""``safe-gpu setup``: makes a state directory of root's."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from contextlib import suppress

from ..coordination.closed import closed_file, read_closed
from ..coordination.directory import HOST_LOCK, PARTS
from ..coordination.setup import examine, in_use, make, remove
from ..coordination.state_dir import ADMIN_DIR, DEFAULT_DIR, setup_command, state_dir_path
from ..errors import PolicyError, StateDirError
from ..host.foreign_files import read_start
from ..host.programs import is_root, others_can_change
from ..settings import variables as settings
from ..wording.text import plural
from .commands import EX_TRY_AGAIN
from .output import CommandError, write_whole

_SYSTEMD = ("/run/systemd/system", "/usr/bin/systemd-tmpfiles", "/bin/systemd-tmpfiles")


def configure_setup(parser: argparse.ArgumentParser) -> None:
    """Set its options and its handler."""
    parser.description = """Make a state directory of root's, so that no user can remove or close what
others rely on; lead all sessions to it by the host's settings. What is right
already, and what others made, is not changed."""
    parser.epilog = "examples:\n  safe-gpu setup --dry-run\n  safe-gpu setup && safe-gpu doctor"
    add = parser.add_argument
    add("--state-dir", metavar="DIR", default=ADMIN_DIR, help=f"an absolute path on a local disk (default {ADMIN_DIR})")
    add("--dry-run", action="store_true", help="print what would be done, and change nothing")
    add("--remove", action="store_true", help="remove what setup made, while nobody claims or waits")
    parser.set_defaults(handler=_setup)


def _setup(options: argparse.Namespace) -> int:
    path, act = _checked(options.state_dir), not options.dry_run
    if act and not is_root():
        raise PolicyError("only root can set up a host: run it as root, or with --dry-run")
    settings.read_anew()
    os.umask(0o022)  # all users are to read the settings
    if options.remove:
        _refuse_if_used(path)
        left = [f"left, since setup did not write it: {name}" for name in _remove(path, act)]
    else:
        others = {state_dir_path(), _state_dir_of_settings() or DEFAULT_DIR} - {path}
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


def _state_dir_of_settings() -> str | None:
    return settings.host_setting("state_dir", "", os.environ)


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
        raise CommandError(
            f"GPUs are claimed or waited for in {path}: {', '.join(found)}: keep new claims off with safe-gpu drain, "
            "and try again later",
            code=EX_TRY_AGAIN,
        )


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
        now = _text_of(RULE)
        if now is None:
            wanted[RULE] = rule_text(path)
        elif now != rule_text(path):
            yield f"{RULE} has other lines: remove it, and run {setup_command(path)} again"
    if not os.path.lexists(config):
        wanted[config] = config_text(path)
    elif _state_dir_of_settings() != path:
        yield f"write state_dir = {path} below [host] in {config}, so that all sessions use it"
    for file, text in wanted.items():
        print(f"write {file}")
        if act:
            directory = os.path.dirname(file)
            os.makedirs(directory, exist_ok=True)
            if part := others_can_change(directory):
                raise PolicyError(f"{file} is not written: users other than root can change {part}", path=file)
            write_whole(file, text)


def _text_of(path: str) -> str | None:
    data = read_start(path)
    return None if data is None else data.decode("utf-8", "replace")


def _remove(path: str, act: bool) -> Iterator[str]:
    """Remove what setup made, or print what would be removed. Yields what stays."""
    config = settings.policy_file(os.environ)
    texts = {file: text for file in (config, RULE, closed_file(by_root=True)) if (text := _text_of(file)) is not None}
    for file, text in texts.items():
        if text in ("", config_text(path), rule_text(path)):
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
    directories = (state_dir, *(f"{state_dir}/{part}" for part in PARTS))
    lines = [f"d {one} 1777 root root -\n" for one in directories]
    return "".join([*lines, f"f {state_dir}/{HOST_LOCK} 0666 root root -\n"]).replace("%", "%%")


def config_text(state_dir: str) -> str:
    """Return the settings of a host that has no others."""
    return f"[host]\nstate_dir = {state_dir}\n"
