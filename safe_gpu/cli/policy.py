"""The command ``policy``: which limits the administrator has set, and who holds how much of them."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from typing import Any, NamedTuple

from ..claim.limits import held_of
from ..coordination.holders import Claims, living_claims
from ..drivers import open_drivers
from ..errors import SafeGpuError
from ..gpus.vendors import VENDORS
from ..host.foreign_files import printable_lines
from ..host.procfs import user_name
from ..settings import config as policy
from ..settings import variables as settings
from ..wording.text import format_age, plural
from .output import print_json, print_lines, say


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
    if options.check:
        return _check(options.check, options)
    path = settings.policy_file(os.environ)
    rules, doubt = policy.read(path)
    if doubt:
        say(f"warning: {doubt}")
    if options.all and rules is not None:
        _warn_of_unknown_names(rules)
        _show_all(rules, as_json=options.json)
        return 0
    uid = _meant_user(options)
    user = _User(uid, user_name(uid))
    if rules is not None:
        user = _User(uid, user_name(uid), policy.limits_of_user(rules, uid), _held_by(uid))
    if options.json:
        print_json(user.document())
        return 0
    if rules is None and doubt:
        text = f"{path} is ignored: nothing is limited"
    elif rules is None:
        text = f"there is no {path}: nothing is limited"
    elif user.limits.exempt:
        text = f"{user.name} is exempt: {path} limits root only in a section [user root]"
    elif options.user:
        text = user.table(path) + user.shown_held(f"{user.name} holds", "")
    else:
        text = user.table(path) + user.shown_held("You hold", "your ")
    print_lines(printable_lines(text))
    return 0


def _check(path: str, options: argparse.Namespace) -> int:
    """Say whether a file is valid as the host's; return the exit code."""
    rules, doubt = policy.read(path)
    if doubt:
        say(f"warning: {doubt}")
    if rules is None and not doubt:
        options.usage_error(f"--check: there is no {path}")
    if rules is None:
        print(f"{path} would be ignored")
        return 1
    _warn_of_unknown_names(rules)
    print(f"{path} is valid")
    return 0


def _warn_of_unknown_names(rules: policy.Policy) -> None:
    for warning in policy.unknown_names(rules):
        say(f"warning: {warning}")


def _meant_user(options: argparse.Namespace) -> int:
    """Return the uid of the user whose limits are shown."""
    if options.user is None:
        return os.geteuid()
    uid = policy.uid_of(options.user)
    if uid is None:
        options.usage_error(f"--user {options.user}: there is no such user here")
    assert uid is not None
    return uid


class _User(NamedTuple):
    """One user, the limits, and how many GPUs of each vendor the user holds: None if that is not known."""

    uid: int
    name: str
    limits: policy.Limits = policy.Limits()
    held: Mapping[str, float] | None = None

    def document(self) -> dict[str, Any]:
        """Return what ``--json`` prints; None is no limit, or not known."""
        total = None
        if self.held is not None:
            total = _rounded(sum(self.held.values()))
        return {
            "schema": 1,
            "file": self.limits.path or None,
            "user": self.name,
            "uid": self.uid,
            "held": total,
            "exempt": self.limits.exempt,
            **{key: getattr(self.limits, key) for key in policy.KEYS},
            "sections": dict(self.limits.sections),
        }

    def table(self, path: str) -> str:
        """Return a line for each key of this file, with its value and its section."""
        lines = [f"{path}, for {self.name}", ""]
        for key in policy.KEYS:
            value = _shown_limit(key, getattr(self.limits, key))
            section = self.limits.sections.get(key, "")
            lines.append(f"{key:<18}{value:<13}{section}".rstrip())
        return "\n".join(lines)

    def shown_held(self, subject: str, whose: str) -> str:
        """Return what the user holds, as what follows the table: ``You hold 1 of your 2 GPUs.``; "" where that is not
        known or not limited.

        Args:
            subject: "You hold", or the same of another user.
            whose: "your ", or nothing.
        """
        most = self.limits.max_gpus
        if most is None or not self.held:
            return ""
        number_of = {"GPU": sum(self.held.values())}
        if len(self.held) > 1:
            number_of = {f"{VENDORS[vendor].title} GPU": number for vendor, number in self.held.items()}
        texts = [f"{number} of {whose}{plural(most, thing)}" for thing, number in number_of.items()]
        sentence = f"{subject} {' and '.join(texts)}."
        if max(number_of.values()) > most:
            sentence += " The limit has been lowered: no claim ends, and new ones wait."
        return f"\n\n{sentence}"


def _show_all(rules: policy.Policy, *, as_json: bool) -> None:
    """Print how many GPUs each user holds and may hold, who has a section or holds any."""
    held = Counter[int]()
    for of_vendor in (_held() or {}).values():
        held += of_vendor
    uids = held.keys() | _uids_with_section(rules)
    holdings = sorted(_Holding.of(rules, uid, held[uid]) for uid in uids)
    if as_json:
        print_json({"schema": 1, "file": rules.path, "users": [one._asdict() for one in holdings]})
        return
    for one in holdings:
        print(printable_lines(one.line()))


class _Holding(NamedTuple):
    """How many GPUs a user holds and may hold, as ``--all --json`` prints it."""

    user: str
    held: float
    max_gpus: int | None

    @classmethod
    def of(cls, rules: policy.Policy, uid: int, held: float) -> _Holding:
        limits = policy.limits_of_user(rules, uid)
        return cls(user_name(uid), _rounded(held), limits.max_gpus)

    def line(self) -> str:
        """Return ``anna              2 of 4``."""
        if self.max_gpus is None:
            return f"{self.user:<18}{self.held} of unlimited"
        line = f"{self.user:<18}{self.held} of {self.max_gpus}"
        if self.held > self.max_gpus:
            line += "  above the limit"
        return line


def _uids_with_section(rules: policy.Policy) -> set[int]:
    """Return the users that have a section of their own, without those that this host does not know."""
    uids = {policy.uid_of(section.name) for section in rules.sections if section.kind == "user"}
    return {uid for uid in uids if uid is not None}


def _held_by(uid: int) -> dict[str, float] | None:
    """Return how many GPUs of each vendor a user holds; None if that cannot be known."""
    held = _held()
    if held is None:
        return None
    return {vendor: _rounded(users[uid]) for vendor, users in held.items()}


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
    if number == int(number):
        return int(number)
    return round(number, 2)


def _shown_limit(key: str, value: float | None) -> str:
    """Return the value of a key as people read it."""
    if value is None and key.startswith("max"):
        return "unlimited"
    if value is None:
        return "unset"
    if key == "max_gpus":
        return str(value)
    if value % 60:
        return f"{value:g} s"
    return format_age(value)
