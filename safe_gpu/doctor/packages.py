"""Checks of the Python packages of this process."""

import os
import sys

from .check import CheckedHost, Finding, failed, passed, skipped, warning


def platform(host: CheckedHost) -> Finding:
    """Check that this is Linux, and name the versions of the kernel and of Python."""
    name = os.uname()
    detail = f"{name.sysname} {name.release} on {name.machine}, Python {'.'.join(map(str, sys.version_info[:3]))}"
    if name.sysname != "Linux":
        return failed(detail, "use Linux: claims need its file locks and its /proc")
    return passed(detail)


def packages(host: CheckedHost) -> Finding:
    """Check that the required Python packages are installed, and none that replaces their modules."""
    import re
    from importlib import metadata

    found: dict[str, list[str]] = {}
    for distribution in metadata.distributions():
        versions = found.setdefault(re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower(), [])
        if distribution.version not in versions:
            versions.append(distribution.version)
    try:
        from filelock import lock_descriptor  # noqa: F401
    except ImportError as err:
        return failed(f"filelock is missing or too old ({err})", "pip install -U filelock")
    # The project pynvml installs no module of this name since version 12.
    colliding = [name for name in ("nvidia-ml-py3", "pynvml") for one in found.get(name, ()) if _major(one) < 12]
    if colliding:
        return warning(
            f"{' and '.join(colliding)} installs its own pynvml module in place of that of nvidia-ml-py",
            f"pip uninstall {' '.join(colliding)} && pip install --force-reinstall nvidia-ml-py",
        )
    own = found.get("safe-gpu", [])
    if len(own) > 1:
        return warning(
            f"safe-gpu is installed {len(own)} times ({', '.join(own)})", "pip uninstall safe-gpu, then install"
        )
    if own and _major(own[0]) < 3:
        return warning(
            f"the older safe-gpu {own[0]} is installed beside this one", "pip uninstall safe-gpu, then install this one"
        )
    known = [f"{name} {found[name][0]}" for name in ("safe-gpu", "filelock", "nvidia-ml-py") if name in found]
    return passed(", ".join(known) or "run from a source tree")


def _major(version: str) -> int:
    major = version.split(".")[0]
    return int(major) if major.isdecimal() else 0


def for_all_users(host: CheckedHost) -> Finding:
    """Check that other users can run this interpreter and read this package, where root has installed it."""
    import stat

    import filelock

    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if os.stat(package).st_uid:
        return skipped(f"{package} does not belong to root, so other users need no access")
    files = [(os.path.realpath(sys.executable), stat.S_IXOTH)]
    files += [(os.path.join(package, "__init__.py"), stat.S_IROTH), (filelock.__file__, stat.S_IROTH)]
    for path, bit in files:
        above, needed = path, bit
        while above != "/":
            mode = os.stat(above).st_mode
            if not mode & needed:
                return warning(
                    f"other users cannot use {path}: {above} has mode {stat.S_IMODE(mode):04o}",
                    "install with /usr/bin/python3 and umask 022, outside of home directories",
                )
            above, needed = os.path.dirname(above), stat.S_IXOTH
    return passed(f"{files[0][0]} and {package} can be used by all users")
