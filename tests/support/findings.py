"""What one check of ``doctor`` finds, on real and made-up hosts."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from support.gpus import PACKAGE_ROOT

from safe_gpu import doctor
from safe_gpu.doctor import Check, CheckedHost
from safe_gpu.drivers.simulated import find_preset
from safe_gpu.settings.variables import is_simulated

UUIDS = [gpu.uuid for gpu in find_preset("dgx-a100").gpus]


ASK = """
import sys
from safe_gpu import doctor
found = doctor.check(sys.argv[1], doctor.CheckedHost())
print(found.status, found.detail, found.fix, sep="|")
"""


def finding(name: str, host: CheckedHost | None = None) -> Check:
    """What one check finds. Fail unless it has a fix of one line where something is wrong, and none elsewhere."""
    found = doctor.check(name, host or CheckedHost())
    assert bool(found.fix) == (found.status in ("warning", "failed"))
    assert "\n" not in found.fix
    return found


def expect(name: str, status: str, detail: str = "", host: CheckedHost | None = None, fix: str = "") -> None:
    """Fail unless a check has this status, and these words in its text and in its fix."""
    found = finding(name, host)
    assert (found.status, detail in found.detail, fix in found.fix) == (status, True, True), found


def environment(**variables: str) -> CheckedHost:
    """The host of this process, as it is for one whose environment is these variables."""
    host = CheckedHost(environ=variables)
    if is_simulated(os.environ):  # otherwise a child asks first whether the driver answers
        here = CheckedHost()
        host.snapshot = here.snapshot
        host.driver = here.driver
    return host


def in_namespace(
    setup: str, check: str, *flags: str, user: int = 0, groups: Sequence[int] = (), **variables: str
) -> Check:
    """What a check finds in a mount (or process) namespace of its own, after some shell commands there."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root, and unshare, to make namespaces")
    code = f"""
import json, os
from safe_gpu import doctor
host = doctor.CheckedHost()
host.snapshot  # while this interpreter can still be read
os.setgroups({[*groups]}); os.setresgid({user}, {user}, {user}); os.setresuid({user}, {user}, {user})
found = doctor.check({check!r}, host)
print(json.dumps([found.status, found.detail, found.fix]))
"""
    command = ["unshare", *(flags or ["-m"]), "sh", "-c", f'{setup} && exec "$@"', "sh", sys.executable, "-c", code]
    env = {**os.environ, "PYTHONPATH": str(PACKAGE_ROOT), **variables}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    if run.returncode and ("unshare" in run.stderr or "mount:" in run.stderr):
        pytest.skip(f"no namespaces here: {run.stderr.strip()}")
    assert run.returncode == 0, run.stderr
    return Check(*json.loads(run.stdout))


TESTS = Path(__file__).parents[1]


def missing_tests(names: Iterable[str]) -> list[str]:
    """Those of these names, such as ``doctor/test_fixes.py::test_a_policy``, that no test has."""
    missing = []
    for one in names:
        file, _, function = one.partition("::")
        if f"\ndef {function}(" not in (TESTS / file).read_text():
            missing.append(one)
    return missing
