"""``safe-gpu policy``: which limits of this host apply to the user who asks."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from .streams import say

if TYPE_CHECKING:
    from ..policy import Limits


_SCHEMA = 1


def configure(parser: argparse.ArgumentParser) -> None:
    """Its options and its handler."""
    parser.description = "Show the limits that the administrator of this host has set for you."
    parser.epilog = "examples:\n  safe-gpu policy\n  safe-gpu policy --json | jq .max_gpus"
    parser.add_argument("--json", action="store_true", help="for programs; times in seconds, null for no limit")
    parser.set_defaults(handler=_policy)


def _policy(options: argparse.Namespace) -> int:
    from .. import settings
    from ..policy import Limits, limits_of_this_user, read
    from ..procfs import printable_lines

    path = settings.policy_file(os.environ)
    rules, ignored = read(path)
    if ignored:
        say(f"warning: {ignored}")
    limits = Limits() if rules is None else limits_of_this_user(rules)
    held = None if rules is None else _held()
    if options.json:
        import json

        print(json.dumps(_facts(limits, held), indent=2))
    elif rules is None:
        path = printable_lines(path)
        print(f"{path} is ignored: nothing is limited" if ignored else f"There is no {path}: nothing is limited")
    else:
        print(printable_lines("\n".join(_lines(limits, held))))
    return 0


def _held() -> dict[str, int] | None:
    """Vendor -> how many of its GPUs this user holds here; None if the GPUs or the state directory cannot be read."""
    from ..coordination.files import StateDir, state_dir_path
    from ..coordination.holders import lease_owners
    from ..coordination.leases import lease_name
    from ..drivers import open_drivers
    from ..errors import SafeGpuError

    held = {}
    try:
        for driver in open_drivers()[0]:
            try:
                snapshot = driver.snapshot()
            finally:
                driver.close()
            with StateDir(state_dir_path(), make=False) as root, StateDir("leases", root, make=False) as leases:
                owners = lease_owners(leases, [lease_name(gpu.uuid) for gpu in snapshot.gpus])
            held[snapshot.vendor] = list(owners.values()).count(os.geteuid())
    except FileNotFoundError:
        return {}
    except SafeGpuError as err:
        say(f"warning: {err}")
        return None
    return held


def _facts(limits: Limits, held: dict[str, int] | None) -> dict[str, Any]:
    from ..policy import KEYS
    from ..procfs import user_name

    uid = os.geteuid()
    facts: dict[str, Any] = {"schema": _SCHEMA, "file": limits.path or None, "user": user_name(uid), "uid": uid}
    facts.update(exempt=limits.exempt, held=None if held is None else sum(held.values()))
    facts.update((key, getattr(limits, key)) for key in KEYS)
    return {**facts, "sections": dict(limits.sections)}


def _lines(limits: Limits, held: dict[str, int] | None) -> list[str]:
    from ..policy import KEYS
    from ..procfs import user_name
    from ..text import plural

    user = user_name(os.geteuid())
    if limits.exempt:
        return [f"{user} is exempt: {limits.path} limits root only in a section [user root]"]
    lines = [f"{limits.path}, for {user}", ""]
    for key in KEYS:
        section = limits.sections.get(key)
        lines.append(f"{key:<18}{_shown(key, getattr(limits, key)):<13}{section or ''}".rstrip())
    if limits.max_gpus is not None and held is not None:
        kinds = {f"{vendor.upper()} GPU": number for vendor, number in held.items()} if len(held) > 1 else {}
        each = kinds or {"GPU": sum(held.values())}
        texts = [f"{number} of your {plural(limits.max_gpus, kind)}" for kind, number in each.items()]
        lines += ["", f"You hold {' and '.join(texts)}."]
    return lines


def _shown(key: str, value: float | None) -> str:
    from ..text import format_age

    if value is None:
        return "unlimited" if key.startswith("max") else "unset"
    if key == "max_gpus":
        return str(value)
    return f"{value:g} s" if value % 60 else format_age(value)
