"""``safe-gpu affinity``, ``policy``, ``doctor`` and ``demo``."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from ..errors import GPUAffinityError
from .output import columns, in_color, print_json, say
from .parser import add_which_gpus, gpu_list, is_number, whole_number

if TYPE_CHECKING:
    from ..drivers.base import Driver
    from ..policy import Limits


# ``safe-gpu affinity``: the CPUs that go with each GPU, or where a process really runs.


def configure_affinity(parser: argparse.ArgumentParser) -> None:
    """Set its options and its handler."""
    from ..affinity.options import MODES

    parser.description = "Show the CPUs that a claim of each GPU is bound to, or where a process runs."
    parser.epilog = (
        "examples:\n  safe-gpu affinity --mode exclusive\n  safe-gpu affinity --of $(pgrep -n python) --gpu 3"
    )
    add = parser.add_argument
    add("--mode", choices=MODES, default="node", metavar="M", help=f"one of {', '.join(MODES)}")
    add("--scope", choices=("node", "socket"), default="node", help="for the modes of gpu_affinity")
    threads = ("all_logical", "single_logical")
    add("--multithreading", choices=threads, default=threads[0], help="for the modes of gpu_affinity")
    add("--no-balanced", dest="balanced", action="store_false", help="let the GPUs' shares differ in size")
    cores, each = whole_number("cores", 1), "N physical cores for each GPU"
    add("--min-cores", dest="min_physical_cores", type=cores, default=1, metavar="N", help=f"at least {each}")
    add("--max-cores", dest="max_physical_cores", type=cores, metavar="N", help=f"at most {each}")
    add("--allowed", type=cpu_list, metavar="CPULIST", help="plan for these CPUs only, such as 0-15,128-143")
    add("--of", type=process_id, metavar="PID", help="report where this process runs instead")
    add_which_gpus(
        parser,
        gpu="these GPUs only, as nvidia-smi shows them: 0,3; with --of: the process's GPUs",
        ordinal="the same for one GPU as CUDA numbers it after CUDA_VISIBLE_DEVICES (with --of: that of the process)",
    )
    add("--json", action="store_true", help="for programs")
    parser.set_defaults(handler=_affinity)


def cpu_list(text: str) -> str:
    """Check that a text is a list of CPUs as the kernel writes it, and return it."""
    from ..cpulist import parse_cpulist

    if not parse_cpulist(text):
        raise ValueError(f"{text!r} names no CPU: write a list such as 0-15,128-143")
    return text


def process_id(text: str) -> int:
    """Return the number of a process that can be seen from here."""
    if not is_number(text) or not os.path.exists(f"/proc/{int(text)}"):
        raise ValueError(f"there is no process {text!r}")
    return int(text)


def _affinity(options: argparse.Namespace) -> int:
    if options.of is not None:
        from ..affinity.placements import placement

        report = placement(options.of, gpus=options.gpu, ordinal=options.ordinal)
        print_json(report.as_dict()) if options.json else print(report)
        return 0
    from ..affinity import AffinityOptions, affinity_json, affinity_table, plan, read_topology
    from ..affinity.cpu_shares import node_memory
    from ..affinity.options import doubt_about
    from ..affinity.planner import node_table
    from ..cpulist import parse_cpulist
    from ..drivers import opened_driver

    modes = AffinityOptions(**{name: getattr(options, name) for name in AffinityOptions._fields})
    with opened_driver() as driver:
        topology = read_topology(None, driver)
        allowed = _usable(driver) if options.allowed is None else parse_cpulist(options.allowed)
        memory = node_memory(topology.nodes, driver)
        shown = _shown(options, driver)
    shares = plan(topology, **modes._asdict(), allowed=allowed)  # among all GPUs of the host, whichever are shown
    if options.json:
        print_json(affinity_json(topology, modes, shares, memory, shown))
        return 0
    print(affinity_table(topology, modes, shares, shown))
    if doubt := doubt_about(modes):
        print(doubt)
    print(f"\n{node_table(topology, memory)}")
    return 0


def _shown(options: argparse.Namespace, driver: Driver) -> list[int] | None:
    """Return the indices of the GPUs to show; None for all."""
    from ..affinity.resolve_gpus import by_name, by_ordinal

    if options.ordinal is not None:
        return [gpu.index for gpu in by_ordinal(options.ordinal, driver.snapshot(), os.environ).gpus]
    return None if options.gpu is None else [gpu.index for gpu in by_name(options.gpu, driver.snapshot()).gpus]


def _usable(driver: Driver) -> frozenset[int] | None:
    """Return this process's mask, where the topology is this host's; None for every CPU."""
    from ..affinity.binding import original_mask
    from ..settings import fsroot_or_default

    foreign = fsroot_or_default(None) != "/" or driver.host_topology() is not None
    return None if foreign else original_mask()


# ``safe-gpu policy``: which limits of this host apply to whom.


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
    from .. import settings
    from ..policy import KEYS, Limits, limits_of_this_user, limits_of_user, read, uid_of, unknown_names
    from ..procfs import printable_lines, user_name

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
    from ..claim.quota import parts_by_lease
    from ..coordination.files import StateDir, state_dir_path
    from ..coordination.holders import lease_owners
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
                parts = parts_by_lease(leases, snapshot.gpus)
                owners = lease_owners(leases, parts)
            held[snapshot.vendor] = {
                uid: _rounded(sum(parts[name] for name, owner in owners.items() if owner == uid))
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
    from ..text import plural
    from ..vendors import VENDORS

    most = limits.max_gpus
    if most is None or held is None:
        return []
    kinds = {f"{VENDORS[vendor].title} GPU": number for vendor, number in held.items()} if len(held) > 1 else {}
    each = kinds or {"GPU": sum(held.values())}
    texts = [f"{number} of {'' if other else 'your '}{plural(most, kind)}" for kind, number in each.items()]
    above = " The limit has been lowered: no claim ends, and new ones wait." if max(each.values()) > most else ""
    return ["", f"{f'{other} holds' if other else 'You hold'} {' and '.join(texts)}.{above}"]


def _shown_limit(key: str, value: float | None) -> str:
    from ..text import format_age

    if value is None:
        return "unlimited" if key.startswith("max") else "unset"
    if key == "max_gpus":
        return str(value)
    return f"{value:g} s" if value % 60 else format_age(value)


# ``safe-gpu drain`` and ``resume``: no new claims on GPUs, until they are resumed.


def configure_drain(parser: argparse.ArgumentParser) -> None:
    """Set its options and its handler."""
    parser.description = """Allow no new claims on these GPUs, or on any GPU of this host. Claims that hold
them go on, and waiters keep waiting. For root and the owner of the state
directory only."""
    parser.epilog = "example:\n  safe-gpu drain 3 --reason 'a fan is broken'"
    parser.add_argument("--reason", metavar="R", default="", help="shown to everybody")
    _add_gpus(parser)
    parser.set_defaults(handler=_drain)


def configure_resume(parser: argparse.ArgumentParser) -> None:
    """Set its options and its handler."""
    parser.description = "Allow new claims on these GPUs again, or on all GPUs of this host."
    _add_gpus(parser)
    parser.set_defaults(handler=_drain, reason=None)


def _add_gpus(parser: argparse.ArgumentParser) -> None:
    names = "as nvidia-smi shows them: 3, 0,3 or 4-7; all if none is named"
    parser.add_argument("gpus", nargs="*", type=gpu_list, metavar="GPU", help=names)


def _drain(options: argparse.Namespace) -> int:
    """Write root's file, or that of the owner of the state directory."""
    from ..coordination.leases import drain_file, drained_gpus, read_drained
    from ..errors import PolicyError
    from ..programs import is_root
    from ..selection.values import names_device
    from ..status.gather import gather
    from .output import write_whole

    names = [name for names in options.gpus for name in names]
    gpus = gather().gpus
    unknown = [name for name in names if not any(names_device(name, one.gpu) for one in gpus)]
    if unknown:
        raise GPUAffinityError(f"this host has no GPU {', '.join(unknown)}: see safe-gpu status")
    meant = [one for one in gpus if not names or any(names_device(name, one.gpu) for name in names)]
    path = drain_file(by_root=is_root())
    if not is_root() and not _is_own(os.path.dirname(path)):
        raise PolicyError("only root and the owner of the state directory may drain GPUs: ask them")
    reasons = read_drained(by_root=is_root())[1]
    for one in meant:
        reasons.pop(one.gpu.uuid, None)
        if options.reason is not None:
            reasons[one.gpu.uuid] = " ".join(options.reason.split())
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    write_whole(path, "".join(f"{uuid} {reason}\n" for uuid, reason in reasons.items()))
    now = drained_gpus()
    for one in meant:
        claimed = f"; claimed by {one.claim.user} until that claim ends" if one.claim and one.gpu.uuid in now else ""
        say(f"GPU {one.label}: {now.get(one.gpu.uuid, 'can be claimed')}{claimed}")
    return 0


def _is_own(path: str) -> bool:
    try:
        return os.stat(path).st_uid == os.geteuid()
    except OSError:
        return False


# ``safe-gpu doctor``: checks of this host and this environment, each finding with its fix.


def configure_doctor(parser: argparse.ArgumentParser) -> None:
    """Set its options and its handler."""
    parser.description = "Check this host and this environment; print what is wrong, each with its fix."
    parser.add_argument("-v", "--verbose", action="store_true", help="list the checks that passed or were skipped too")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(handler=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from .. import doctor

    checks = doctor.run_checks()
    if options.json:
        print_json(doctor.to_dict(checks))
    else:
        print(doctor.render_checks(checks, color=in_color(sys.stdout), width=columns(), verbose=options.verbose))
    return doctor.exit_code(checks)


# ``safe-gpu demo``: a race for GPUs that anyone can watch.


def configure_demo(parser: argparse.ArgumentParser) -> None:
    """Set its handler; it takes no options."""
    parser.description = "Race processes for GPUs: real ones that are free, or simulated ones."
    parser.set_defaults(handler=_demo)


def _demo(options: argparse.Namespace) -> int:
    from ..demo.race import run

    return run(stream=sys.stdout, color=in_color(sys.stdout))
