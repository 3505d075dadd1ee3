"""Checks of programs that remove or protect files of the state directory."""

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from glob import glob
from pathlib import PurePath

from ...coordination.state_dir import setup_command
from ...host import procfs
from ..check import CheckedHost, Finding, passed, skipped, warning

_RULES = ("etc/tmpfiles.d", "run/tmpfiles.d", "usr/local/lib/tmpfiles.d", "usr/lib/tmpfiles.d")

_AGED_TYPES = frozenset("dDevqQC")

_CLEANERS = ("etc/cron.daily/tmpwatch", "etc/cron.daily/tmpreaper")


def cleaning(host: CheckedHost) -> Finding:
    """Check that nothing removes old files there. It would also remove lease files that are held."""
    fix = f"as root: {setup_command(host.path)}"
    for cleaner in _CLEANERS:
        if os.path.exists(os.path.join(host.root, cleaner)) and host.path.startswith(("/tmp/", "/var/tmp/")):
            return warning(f"/{cleaner} removes old files below /tmp", f"exempt {host.path} in its configuration")
    if not os.path.isdir(os.path.join(host.root, "run/systemd/system")):
        return passed("systemd, which removes old files, does not run here")
    above = (host.path, *PurePath(host.path).parents)
    aged, longest = "", -1
    for kind, path, age, source in _rules(host):
        covers = any(fnmatchcase(str(one), path.rstrip("/")) for one in above)
        if kind[0] in "xX" and covers:
            return passed(f"{source} exempts {host.path}")
        if kind[0] in _AGED_TYPES and covers and len(path) > longest:
            longest = len(path)
            aged = f"{path} after {age} ({source})" if age not in ("", "-") else ""
    if aged:
        return warning(f"systemd-tmpfiles removes files below {aged}, also lease files that are held", fix)
    return passed(f"no rule of systemd-tmpfiles removes old files from {host.path}")


def _rules(host: CheckedHost) -> Iterator[tuple[str, str, str, str]]:
    """Yield (type, path, age, file) of every line of tmpfiles.d(5); a file in /etc replaces its namesake in
    /usr/lib."""
    files: dict[str, str] = {}
    for directory in _RULES:
        for name in glob("*.conf", root_dir=os.path.join(host.root, directory)):
            files.setdefault(name, f"{directory}/{name}")
    for _, file in sorted(files.items()):
        for line in (host.read(file) or "").split("\n"):
            fields = line.split()
            if len(fields) >= 2 and not fields[0].startswith("#"):
                yield fields[0], fields[1], fields[5] if len(fields) > 5 else "-", f"/{file}"


def removed_leases(host: CheckedHost) -> Finding:
    """Check that no claim has lost its lease file. Other processes would see its GPUs as unclaimed."""
    leases = os.path.join(os.path.realpath(host.path), "leases") + "/"
    for pid in procfs.pids():
        for number, target in (procfs.open_files(pid) or {}).items():
            if target.startswith(leases) and target.endswith(".lock (deleted)"):
                try:
                    inode = os.stat(f"/proc/{pid}/fd/{number}").st_ino
                except OSError:
                    continue
                if inode not in procfs.flock_holders({inode}):
                    continue
                name = target[len(leases) :].removesuffix(".lock (deleted)")
                return warning(
                    f"the lease of {name} that process {pid} ({procfs.user_of(pid)}) holds was removed from {leases}: "
                    "its name and the driver's process list protect that GPU now, but not from older versions",
                    "stop what removes files from that directory; then release and claim again in that process",
                )
    return passed("no process that can be examined holds a lease that was removed")


def protected_regular(host: CheckedHost) -> Finding:
    """Report the value of fs.protected_regular, which restricts opening files of other users in sticky directories."""
    value = host.read("proc/sys/fs/protected_regular")
    if value is None:
        return skipped("this kernel has no fs.protected_regular")
    meaning = {
        "0": "O_CREAT may open files of other users in sticky directories",
        "1": "O_CREAT may not open files of other users in world-writable sticky directories",
        "2": "O_CREAT may not open files of other users in group- or world-writable sticky directories",
    }.get(value, "an unknown value")
    return passed(f"{value}: {meaning}; safe_gpu does not depend on it")
