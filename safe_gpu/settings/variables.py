"""The environment variables that safe_gpu reads."""

import os
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import Any

from ..errors import UnsatisfiableRequestError
from ..gpus.vendors import VENDORS
from ..host.foreign_files import printable_lines
from ..host.programs import is_root, others_can_change

PREFIX = "SAFE_GPU_"

VARIABLES = {
    "SAFE_GPU_DIR": "the state directory, an absolute path (default /tmp/safe-gpu)",
    "SAFE_GPU_DRIVER": "auto, "
    + "".join(f"{', '.join(one.drivers)} ({one.title}), " for one in VENDORS.values())
    + "or simulated:PRESET (default auto)",
    "SAFE_GPU_TIMEOUT": "the default timeout of claims: 90, 15m, 1h30m, inf",
    "SAFE_GPU_FOR": "how long claims will probably hold their GPUs: 600, 30m, 2h",
    "SAFE_GPU_NB_GPUS": 'the number of GPUs that "job" stands for',
    "SAFE_GPU_FENCE": "ignore: disregard an inherited CUDA_VISIBLE_DEVICES",
    "SAFE_GPU_FSROOT": "where /sys and /proc topology files are read (default /)",
    "SAFE_GPU_LEGACY_LOCK": "the older package's lock: auto, always or never (default auto)",
    "SAFE_GPU_UNEXPLAINED_MEMORY": "bytes in use by no visible process that make a GPU busy: 300MiB (at least 16MiB)",
    "SAFE_GPU_PROCESS_LIST": "optional: claim by entry and memory where the driver can list no processes",
    "SAFE_GPU_POLICY": "the policy file where the host has none (default /etc/safe-gpu/config.ini)",
    "SAFE_GPU_SIMULATED_DIR": "the tree of a simulated host",
    "SAFE_GPU_SGE_RESOURCE": "the name of the GPU resource in Grid Engine",
    "SAFE_GPU_HOSTS": "the hosts of status --all-hosts: gpu1,gpu2",
    "SAFE_GPU_RECORD_COMMAND": "what others can read of a command: names (program and script; default) or full",
    "SAFE_GPU_SCOPE": "set by a claim, for claims made inside it",
    "SAFE_GPU_EXPECT": "set for a worker of a claim across hosts: the GPU that run and bind must find",
    "SAFE_GPU_SHARE": "set by a claim that shares GPUs: bytes of each",
    "SAFE_GPU_SHARE_FRACTION": "set by a claim that shares GPUs: what a framework may allocate of each, from 0 to 1",
    "SAFE_GPU_SHARE_TORCH": "1 sets PYTORCH_CUDA_ALLOC_CONF in claims that share GPUs; PyTorch 2.10 or later",
    "SAFE_GPU_BOUND": "set by bind: the GPUs next to which this process was bound by number",
    "SAFE_GPU_RAY_WORKER": "set for the workers of a claim on Ray",
}
"""Name -> meaning of every variable. Variables that begin with SAFE_GPU_TEST_ are for tests and not listed."""

CHOICES = {
    "SAFE_GPU_FENCE": ("ignore",),
    "SAFE_GPU_LEGACY_LOCK": ("auto", "always", "never"),
    "SAFE_GPU_RECORD_COMMAND": ("names", "full"),
    "SAFE_GPU_PROCESS_LIST": ("optional",),
}
"""Name -> allowed values, for the variables that take one of a few words."""

_FOR_TESTS = f"{PREFIX}TEST_"


def _directory_of_root() -> str:
    """Return root's directory. Tests have one of their own, which no other user's claim of real GPUs goes by."""
    own, driver = os.environ.get(f"{_FOR_TESTS}ETC"), os.environ.get("SAFE_GPU_DRIVER", "")
    return own if own and (driver.startswith("simulated:") or is_root()) else "/etc/safe-gpu"


HOST_FILES = tuple(f"{_directory_of_root()}/{name}" for name in ("config.ini", "policy.ini"))
"""The file with root's settings and limits for this host: its name, and its older name."""


class Environment(Mapping[str, str]):
    """A view of os.environ for many look-ups of variables, most of which are not set.

    os.environ encodes the name at each look-up, and a copy of it decodes every value. The names are those at the time
    of the call, the values those of now.
    """

    def __init__(self) -> None:
        self._names = frozenset(os.environ)

    def __getitem__(self, name: str) -> str:
        return os.environ[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def get(self, name: str, default: Any = None) -> Any:
        return os.environ.get(name, default) if name in self._names else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def is_simulated(environ: Mapping[str, str]) -> bool:
    """Return whether claims get simulated GPUs."""
    return environ.get("SAFE_GPU_DRIVER", "").startswith("simulated")


# Laptops without a card have Intel's drivers too.
_REAL_DRIVERS = {f"/{one.loaded[0]}": one.title for one in VENDORS.values() if one.control}
_REAL_DRIVERS |= dict.fromkeys(("/dev/nvidia0", "/dev/dxg"), "NVIDIA")


@cache  # every claim on simulated GPUs asks
def real_driver() -> str:
    """Return the maker of the real GPUs of a host, as far as files of their driver show; else ""."""
    return next((maker for path, maker in _REAL_DRIVERS.items() if os.path.exists(path)), "")


@lru_cache(maxsize=8)  # every claim asks
def unknown(names: frozenset[str]) -> dict[str, str]:
    """Return the names that look like variables of this package but are not -> the variable that was probably meant, or
    ""."""
    found = {}
    for name in names:
        if name[:9].upper() == PREFIX and name not in VARIABLES and not name.startswith(_FOR_TESTS):
            from difflib import get_close_matches

            found[name] = next(iter(get_close_matches(name.upper(), VARIABLES, 1, 0.8)), "")
    return dict(sorted(found.items()))


def check(environ: Mapping[str, str]) -> None:
    """Refuse an unknown word in a variable of :data:`CHOICES`. Otherwise the default would be used without notice.

    Raises:
        UnsatisfiableRequestError: names the variable, its value, and the allowed values.
    """
    for name, words in CHOICES.items():
        value = environ.get(name)
        if value and value not in words:
            *others, last = words
            takes = f"{', '.join(others)} or {last}" if others else last
            raise UnsatisfiableRequestError(f"{name}={value} is unknown: set it to {takes}, or unset it", value=value)


def policy_files(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return where the policy of this host may be; the first one that exists counts.

    Where root has made its directory, a user cannot choose another by ``SAFE_GPU_POLICY``, unless the GPUs are
    simulated.
    """
    given = environ.get("SAFE_GPU_POLICY")
    if given and (is_simulated(environ) or is_root() or not os.path.lexists(os.path.dirname(HOST_FILES[0]))):
        return (given,)
    return HOST_FILES


_directory_of = cache(os.path.dirname)


def policy_directory(environ: Mapping[str, str]) -> str:
    """Return the directory of root's files, which most hosts do not have."""
    return _directory_of(policy_files(environ)[0]) or "."


def existing_policy(environ: Mapping[str, str]) -> str | None:
    """Return where the policy of this host is; None if there is none."""
    if not os.access(policy_directory(environ), os.F_OK):  # one system call tells, and every claim asks
        return None
    return next(filter(os.path.lexists, policy_files(environ)), None)


def policy_file(environ: Mapping[str, str]) -> str:
    """Return where the policy of this host is, or would be."""
    return existing_policy(environ) or policy_files(environ)[0]


def host_setting(key: str, variable: str, environ: Mapping[str, str]) -> str | None:
    """Return what the environment says; else what root's file says for this host under ``key``; None where neither
    does.

    Raises:
        PolicyError: the file cannot be read, or a line of its section [host] is wrong.
    """
    return environ.get(variable) or _values_for_host(environ).get(key)


def known_hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the other hosts that SAFE_GPU_HOSTS, the user's file or root's names, the first that does.

    Raises:
        ValueError: SAFE_GPU_HOSTS names none that can be. PolicyError: as :func:`setting_of_hosts`.
    """
    from .config import host_names

    return host_names(environ.get("SAFE_GPU_HOSTS") or setting_of_hosts("hosts", environ) or "")


def setting_of_hosts(key: str, environ: Mapping[str, str]) -> str | None:
    """Return ``hosts`` or ``remote_command`` as the user's own file has it in ``[host]``, else as root's does.

    Raises:
        PolicyError: a file cannot be read, or is wrong.
    """
    from .config import values_of_user

    values = values_of_user(environ)
    return values[key] if key in values else _values_for_host(environ).get(key)


_read: dict[tuple[str, ...], Mapping[str, str]] = {}


def _values_for_host(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return root's settings for this host, read once in a process, which thus stays with one state directory."""
    files = policy_files(environ)
    if files not in _read:
        path = existing_policy(environ)
        if path is None:
            return _read.setdefault(files, {})
        from .config import host_values

        _read[files] = host_values(path)
    return _read[files]


def read_anew() -> None:
    """Let root's settings be read once more, by who changes them."""
    _read.clear()


def _differences(environ: Mapping[str, str]) -> list[str]:
    """Return where the environment differs from root's file: jobs, cron and sudo do not inherit it."""
    values = _values_for_host(environ)
    if not values:
        return []
    from .config import HOST_KEYS

    pairs = ((HOST_KEYS[key], f"{key} = {value}", value) for key, value in values.items())
    return [
        f"{name}={environ[name]} counts, and {policy_file(environ)} says {said}"
        + ": two state directories are two queues" * (name == "SAFE_GPU_DIR")
        for name, said, value in pairs
        if environ.get(name, value) not in ("", value)
    ]


def ignores_fence(environ: Mapping[str, str]) -> bool:
    """Return whether an inherited CUDA_VISIBLE_DEVICES is to be disregarded."""
    return environ.get("SAFE_GPU_FENCE") == "ignore"


def doubts(environ: Mapping[str, str]) -> list[str]:
    """Return the warnings about settings that are probably mistakes, one sentence each, printable. Every claim logs
    them."""
    found = []
    for name, meant in unknown(frozenset(environ)).items():
        hint = f": did you mean {meant}?" if meant else ""
        found.append(f"{name} is not a variable of safe_gpu and has no effect{hint}")
    found += [*_risks_for_root(environ), *_differences(environ)]
    policy = environ.get("SAFE_GPU_POLICY")
    if policy and policy != policy_file(environ):
        found.append(f"SAFE_GPU_POLICY={policy} has no effect: {policy_file(environ)} holds on this host")
    on_purpose = environ.get(f"{_FOR_TESTS}SIMULATED")  # set by programs that use simulated GPUs on purpose
    if is_simulated(environ) and not on_purpose and (maker := real_driver()):
        real = f"this host has a real {maker} driver whose GPUs are not claimed this way"
        simulated = f"SAFE_GPU_DRIVER={environ['SAFE_GPU_DRIVER']}: these GPUs are simulated"
        found.append(f"{simulated}, and {real}; unset SAFE_GPU_DRIVER to claim them")
    return [printable_lines(one) for one in found]


_PATHS = ("SAFE_GPU_DIR", "SAFE_GPU_FSROOT", "SAFE_GPU_SIMULATED_DIR", f"{_FOR_TESTS}ETC")


def _risks_for_root(environ: Mapping[str, str]) -> list[str]:
    given = [name for name in _PATHS if environ.get(name, "").startswith("/")]
    if not given or not is_root():
        return []
    what = "other users can change what root reads there"
    risky = (name for name in given if _is_risk(environ[name]))
    return [f"{name}={environ[name]}: {what}; unset {name}, and start this with a clean environment" for name in risky]


_trusted: set[str] = set()  # every claim asks


def _is_risk(path: str) -> bool:
    """Return whether others can change what a path means, or, where it does not exist yet, make it."""
    if path in _trusted:
        return False
    if not others_can_change(path):
        _trusted.add(path)
        return False
    return os.path.lexists(path) or bool(others_can_change(os.path.dirname(path.rstrip("/"))))
