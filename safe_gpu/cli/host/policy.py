"""``safe-gpu policy``: which limits of this host apply to whom."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..output import print_json, say

if TYPE_CHECKING:
    import argparse

    from ...settings.policy import Limits


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
    from ...host.procfs import printable_lines, user_name
    from ...settings import variables as settings
    from ...settings.policy import KEYS, Limits, limits_of_this_user, limits_of_user, read, uid_of, unknown_names

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
    print(printable_lines(text))
    return 0


def _held() -> dict[str, dict[int, float]] | None:
    """Return, for each vendor, how many of its GPUs each user (uid) holds here, counting shares as parts; None if the
    GPUs or the state directory cannot be read."""
    from ...claim.limits.quota import parts_by_lease
    from ...coordination.files.location import state_dir_path
    from ...coordination.files.state_dir import StateDir
    from ...coordination.holders.by_kernel import lease_owners
    from ...drivers import open_drivers
    from ...errors import SafeGpuError

    held = {}
    try:
        for driver in open_drivers()[0]:
            try:
                snapshot = driver.snapshot()
            finally:
                driver.close()
            with StateDir(state_dir_path(), make=False) as root, StateDir("leases", root, make=False) as leases:
                uuids = [gpu.uuid for gpu in snapshot.gpus]
                found = lease_owners(leases, uuids, snapshot.name_prefix)
                parts, owners = parts_by_lease(leases, snapshot, found), found.users
            held[snapshot.vendor] = {
                uid: _rounded(sum(parts.get(name, 0.0) for name, owner in owners.items() if owner == uid))
                for uid in set(owners.values())
            }
    except FileNotFoundError:
        return {}
    except SafeGpuError as err:
        say(f"warning: {err}")
        return None
    return held


def _rounded(number: float) -> float:
    """Return a number of GPUs as an integer where it is whole: 2 or 0.25."""
    return int(number) if number == int(number) else round(number, 2)


def _shown_held(limits: Limits, held: dict[str, float] | None, other: str | None) -> list[str]:
    from ...gpus.vendors import VENDORS
    from ...wording.text import plural

    most = limits.max_gpus
    if most is None or held is None:
        return []
    kinds = {f"{VENDORS[vendor].title} GPU": number for vendor, number in held.items()} if len(held) > 1 else {}
    each = kinds or {"GPU": sum(held.values())}
    texts = [f"{number} of {'' if other else 'your '}{plural(most, kind)}" for kind, number in each.items()]
    above = " The limit has been lowered: no claim ends, and new ones wait." if max(each.values()) > most else ""
    return ["", f"{f'{other} holds' if other else 'You hold'} {' and '.join(texts)}.{above}"]


def _shown_limit(key: str, value: float | None) -> str:
    from ...wording.text import format_age

    if value is None:
        return "unlimited" if key.startswith("max") else "unset"
    if key == "max_gpus":
        return str(value)
    return f"{value:g} s" if value % 60 else format_age(value)
