"""The environment variables that safe_gpu reads."""

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..errors import UnsatisfiableRequestError
from ..gpus.vendors import VENDORS
from ..host.foreign_files import printable_lines
from ..host.programs import is_root, others_can_change
from ..wording.text import most_similar

PREFIX = "SAFE_GPU_"

_FOR_TESTS = f"{PREFIX}TEST_"


class Variable(NamedTuple):
    """One variable. ``words`` are its values, where it takes one of a few."""

    name: str
    meaning: str
    words: tuple[str, ...] = ()


_DRIVERS = ", ".join(f"{', '.join(vendor.drivers)} ({vendor.title})" for vendor in VENDORS.values())

_ROWS = (
    Variable("SAFE_GPU_DIR", "the state directory, an absolute path (default /tmp/safe-gpu)"),
    Variable("SAFE_GPU_DRIVER", f"auto, {_DRIVERS}, or simulated:PRESET (default auto)"),
    Variable("SAFE_GPU_TIMEOUT", "the default timeout of claims: 90, 15m, 1h30m, inf"),
    Variable("SAFE_GPU_FOR", "how long claims will probably hold their GPUs: 600, 30m, 2h"),
    Variable("SAFE_GPU_NB_GPUS", 'the number of GPUs that "job" stands for'),
    Variable("SAFE_GPU_FENCE", "ignore: disregard an inherited CUDA_VISIBLE_DEVICES", words=("ignore",)),
    Variable("SAFE_GPU_FSROOT", "where /sys and /proc topology files are read (default /)"),
    Variable(
        "SAFE_GPU_LEGACY_LOCK",
        "the older package's lock: auto, always or never (default auto)",
        words=("auto", "always", "never"),
    ),
    Variable(
        "SAFE_GPU_UNEXPLAINED_MEMORY",
        "bytes in use by no visible process that make a GPU busy: 300MiB (at least 16MiB)",
    ),
    Variable(
        "SAFE_GPU_PROCESS_LIST",
        "optional: claim by entry and memory where the driver can list no processes",
        words=("optional",),
    ),
    Variable("SAFE_GPU_POLICY", "the policy file where the host has none (default /etc/safe-gpu/config.ini)"),
    Variable("SAFE_GPU_SIMULATED_DIR", "the tree of a simulated host"),
    Variable("SAFE_GPU_SGE_RESOURCE", "the name of the GPU resource in Grid Engine"),
    Variable("SAFE_GPU_HOSTS", "the hosts of status --all-hosts: gpu1,gpu2"),
    Variable(
        "SAFE_GPU_RECORD_COMMAND",
        "what others can read of a command: names (program and script; default) or full",
        words=("names", "full"),
    ),
    Variable("SAFE_GPU_SCOPE", "set by a claim, for claims made inside it"),
    Variable("SAFE_GPU_EXPECT", "set for a worker of a claim across hosts: the GPU that run and bind must find"),
    Variable("SAFE_GPU_SHARE", "set by a claim that shares GPUs: bytes of each"),
    Variable(
        "SAFE_GPU_SHARE_FRACTION", "set by a claim that shares GPUs: what a framework may allocate of each, from 0 to 1"
    ),
    Variable("SAFE_GPU_SHARE_TORCH", "1 sets PYTORCH_CUDA_ALLOC_CONF in claims that share GPUs; PyTorch 2.10 or later"),
    Variable("SAFE_GPU_BOUND", "set by bind: the GPUs next to which this process was bound by number"),
    Variable("SAFE_GPU_RAY_WORKER", "set for the workers of a claim on Ray"),
)

VARIABLES = {row.name: row for row in _ROWS}
"""Name -> row of every variable. Variables that begin with SAFE_GPU_TEST_ are for tests and not listed."""


def directory_of_root() -> str:
    """Return root's directory. Tests have one of their own, which no other user's claim of real GPUs goes by."""
    of_tests = os.environ.get(f"{_FOR_TESTS}ETC")
    driver = os.environ.get("SAFE_GPU_DRIVER", "")
    if of_tests and (driver.startswith("simulated:") or is_root()):
        return of_tests
    return "/etc/safe-gpu"


HOST_FILES = tuple(f"{directory_of_root()}/{name}" for name in ("config.ini", "policy.ini"))
"""The file with root's settings and limits for this host: its name, and its older name."""


def is_simulated(environ: Mapping[str, str]) -> bool:
    """Return whether claims get simulated GPUs."""
    return environ.get("SAFE_GPU_DRIVER", "").startswith("simulated")


REAL_DRIVERS = {f"/{vendor.loaded[0]}": vendor.title for vendor in VENDORS.values() if vendor.control}
REAL_DRIVERS |= {"/dev/nvidia0": "NVIDIA", "/dev/dxg": "NVIDIA"}
"""File of a driver -> the maker of the GPUs that are there with it. Laptops without a card have Intel's drivers too."""


def real_driver() -> str:
    """Return the maker of the real GPUs of a host, as far as files of their driver show; else ""."""
    for path, maker in REAL_DRIVERS.items():
        if os.path.exists(path):
            return maker
    return ""


def unknown(names: Iterable[str]) -> dict[str, str]:
    """Return the names that look like variables of this package but are not -> the variable that was probably meant, or
    ""."""
    found = {}
    for name in sorted(names):
        is_ours = name[: len(PREFIX)].upper() == PREFIX
        if is_ours and name not in VARIABLES and not name.startswith(_FOR_TESTS):
            found[name] = most_similar(name.upper(), VARIABLES, least=0.8)
    return found


def check(environ: Mapping[str, str]) -> None:
    """Refuse an unknown word in a variable that takes one of a few. Otherwise the default would be used without notice.

    Raises:
        UnsatisfiableRequestError: names the variable, its value, and the allowed values.
    """
    for name, variable in VARIABLES.items():
        value = environ.get(name)
        if not value or not variable.words or value in variable.words:
            continue
        takes = variable.words[-1]
        if len(variable.words) > 1:
            takes = f"{', '.join(variable.words[:-1])} or {takes}"
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


def policy_directory(environ: Mapping[str, str]) -> str:
    """Return the directory of root's files, which most hosts do not have."""
    return os.path.dirname(policy_files(environ)[0]) or "."


def existing_policy(environ: Mapping[str, str]) -> str | None:
    """Return where the policy of this host is; None if there is none."""
    for path in policy_files(environ):
        if os.path.lexists(path):
            return path
    return None


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
    if key in values:
        return values[key]
    return _values_for_host(environ).get(key)


# By the files that may have them.
_values_read: dict[tuple[str, ...], Mapping[str, str]] = {}


def _values_for_host(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return root's settings for this host, read once in a process, which thus stays with one state directory."""
    files = policy_files(environ)
    if files not in _values_read:
        path = existing_policy(environ)
        _values_read[files] = {} if path is None else _values_in(path)
    return _values_read[files]


def _values_in(path: str) -> Mapping[str, str]:
    from .config import host_values

    return host_values(path)


def read_anew() -> None:
    """Let root's settings be read once more, by who changes them."""
    _values_read.clear()


def ignores_fence(environ: Mapping[str, str]) -> bool:
    """Return whether an inherited CUDA_VISIBLE_DEVICES is to be disregarded."""
    return environ.get("SAFE_GPU_FENCE") == "ignore"


def doubts(environ: Mapping[str, str]) -> list[str]:
    """Return the warnings about settings that are probably mistakes, one sentence each, printable. Every claim logs
    them."""
    found = []
    for name, meant in unknown(environ).items():
        text = f"{name} is not a variable of safe_gpu and has no effect"
        if meant:
            text += f": did you mean {meant}?"
        found.append(text)
    found += _risks_for_root(environ)
    values = _values_for_host(environ)
    if values:
        found += _differences(values, environ)
    policy = environ.get("SAFE_GPU_POLICY")
    if policy and policy != policy_file(environ):
        found.append(f"SAFE_GPU_POLICY={policy} has no effect: {policy_file(environ)} applies on this host")
    on_purpose = environ.get(f"{_FOR_TESTS}SIMULATED")  # set by programs that use simulated GPUs on purpose
    if is_simulated(environ) and not on_purpose:
        maker = real_driver()
        if maker:
            found.append(
                f"SAFE_GPU_DRIVER={environ['SAFE_GPU_DRIVER']}: these GPUs are simulated, and this host has a real "
                f"{maker} driver whose GPUs are not claimed this way; unset SAFE_GPU_DRIVER to claim them"
            )
    return [printable_lines(text) for text in found]


def _differences(values: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """Return where the environment differs from root's file: jobs, cron and sudo do not inherit it."""
    from .config import HOST_KEYS

    found = []
    for key, value in values.items():
        name = HOST_KEYS[key].variable
        given = environ.get(name, "")
        if given in ("", value):
            continue
        text = f"{name}={given} is used, although {policy_file(environ)} says {key} = {value}"
        if name == "SAFE_GPU_DIR":
            text += ": two state directories are two queues"
        found.append(text)
    return found


_PATHS = ("SAFE_GPU_DIR", "SAFE_GPU_FSROOT", "SAFE_GPU_SIMULATED_DIR", f"{_FOR_TESTS}ETC")


def _risks_for_root(environ: Mapping[str, str]) -> list[str]:
    if not is_root():
        return []
    found = []
    for name in _PATHS:
        path = environ.get(name, "")
        if path.startswith("/") and _is_risk(path):
            what = f"{name}={path}: other users can change what root reads there"
            found.append(f"{what}; unset {name}, and start this with a clean environment")
    return found


def _is_risk(path: str) -> bool:
    """Return whether others can change what a path means, or, where it does not exist yet, make it."""
    if others_can_change(path) is None:
        return False
    return os.path.lexists(path) or others_can_change(os.path.dirname(path.rstrip("/"))) is not None
