"""Checks of the claims and waiters of other users."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...coordination.older_package import LOCK_FILE
from ...host import procfs
from ...wording.text import format_bytes, plural
from ..check import CheckedHost, Finding, gpus_named, passed, skipped, warning
from .directory import CLOCK_SLACK, MOST_NAMED

if TYPE_CHECKING:
    from ...status.facts import ClaimStatus


def _claims(host: CheckedHost) -> Iterator[tuple[str, ClaimStatus]]:
    for one in host.status.gpus:
        for claim in (*one.claims, one.inner):
            if claim is not None:
                yield one.label, claim


def suspended(host: CheckedHost) -> Finding:
    """Check that no process is stopped that holds GPUs or waits for them."""
    stopped: dict[int | None, str] = {}
    holding: dict[tuple[int | None, str], list[str]] = {}
    for label, claim in _claims(host):
        if claim.stopped:
            holding.setdefault((claim.pid, claim.user or "unknown"), []).append(label)
    for (pid, user), labels in holding.items():
        stopped[pid] = f"process {pid} ({user}), which holds {gpus_named(list(dict.fromkeys(labels)))}"
    for waiter in host.status.queue:
        if waiter.stopped:
            text = f"process {waiter.pid} ({waiter.user or 'unknown'}), which waits at place {waiter.position}"
            stopped.setdefault(waiter.pid, text)
    if stopped:
        pids, texts = list(stopped)[:MOST_NAMED], list(stopped.values())[:MOST_NAMED]
        more = f"; and {len(stopped) - MOST_NAMED} more" if len(stopped) > MOST_NAMED else ""
        return warning(
            f"stopped: {'; '.join(texts)}{more}",
            f"resume the job (qmod -usj, scontrol resume), or kill -CONT {' '.join(map(str, pids))}, or end it",
        )
    if host.status.warnings:
        return skipped(host.status.warnings[0])
    return passed("no process that holds GPUs or waits for them is stopped")


def overused(host: CheckedHost) -> Finding:
    """Check that no claim uses more of a GPU than its share."""
    found = [
        f"process {claim.pid} ({claim.user or 'unknown'}) uses {format_bytes(used)} of GPU {one.label}, where it has a "
        f"share of {format_bytes(claim.share)}"
        for one in host.status.gpus
        for claim in one.shares
        if claim.share is not None and (used := claim.memory_used or 0) > claim.share
    ]
    if found:
        fix = "ask its user to end it, or to claim a larger share: until then these GPUs take no new shares"
        return warning("; ".join(found[:MOST_NAMED]), fix)
    shared = sum(bool(one.shares) for one in host.status.gpus)
    return passed(f"{plural(shared)} shared, and no claim uses more than its share" if shared else "no GPU is shared")


def other_directories(host: CheckedHost) -> Finding:
    """Check, by the names that the kernel has, that no GPUs are claimed whose leases are in another state directory."""
    found: dict[str, list[str]] = {}
    for one in host.status.gpus:
        if one.claim is not None and one.claim.elsewhere is not None:
            who = f" (process {one.claim.pid} of {one.claim.user})" if one.claim.pid else ""
            where = one.claim.elsewhere or "a directory that cannot be seen from here (root can see it)"
            found.setdefault(f"{where}{who}", []).append(one.label)
    if not found:
        return passed("no claim has its leases elsewhere")
    texts = "; ".join(f"{gpus_named(labels)} in {where}" for where, labels in found.items())
    return warning(
        f"claimed in other state directories, whose queues do not meet this one: {texts}",
        "set state_dir in /etc/safe-gpu/config.ini, and no other SAFE_GPU_DIR, in all sessions of this host",
    )


def clock(host: CheckedHost) -> Finding:
    """Check that no claim or ticket has a time in the future."""
    now = time.time()
    times = [(claim.since, f"the claim of GPU {label}") for label, claim in _claims(host)]
    times += [(waiter.since, f"the wait at place {waiter.position}") for waiter in host.status.queue]
    for since, what in times:
        if since is not None and since > now + CLOCK_SLACK:
            return warning(
                f"{what} began {round(since - now)} s in the future",
                "set the clock of this host (timedatectl set-ntp true); the shown ages are wrong until then, but "
                "claims work",
            )
    return passed("no claim has a time in the future")


def older_package(host: CheckedHost) -> Finding:
    """Check whether safe-gpu 1.x or 2.0 is in use here, and whether its lock can be taken too."""
    path, directory = LOCK_FILE, os.path.dirname(LOCK_FILE)
    # The file must not be opened: closing any descriptor of it would drop a POSIX lock that this process holds on it.
    try:
        inode = os.stat(path).st_ino
        closed = not os.access(path, os.R_OK | os.W_OK)
    except FileNotFoundError:
        return passed("safe-gpu 1.x or 2.0 has not been used here")
    except OSError:
        inode, closed = 0, True
    if closed:
        return warning(
            f"safe-gpu 1.x or 2.0 is used here, and you may not open its lock {path}: its users may collide with you",
            f"have its users upgrade, and then as root: rm -r {directory}",
        )
    if host.environ.get("SAFE_GPU_LEGACY_LOCK") == "never":
        return warning("safe-gpu 1.x or 2.0 is used here, and its lock is not taken", "unset SAFE_GPU_LEGACY_LOCK")
    holders = procfs.flock_holders({inode}).get(inode, [])
    now = f"; process {holders[0]} ({procfs.user_of(holders[0])}) holds it now" if holders else ""
    return passed(f"safe-gpu 1.x or 2.0 has been used here: claims take its lock too{now}")
