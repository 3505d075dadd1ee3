"""The tests that need a real GPU, on machines without one: they are collected with little, and pass on fake GPUs."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.real import long
from support.vendor_hosts import HipHost

NEEDS_MORE = "tests/runtimes/test_cuda.py"  # than the fakes have: it is collected, and not run
AMD = "tests/gpu/test_amd.py"

ROOT = Path(__file__).parents[2]

# What the extra `test` has besides pytest and its timeouts: a host with a GPU may lack it.
BLOCK = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("hypothesis", "jsonschema"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Finder())
"""


@long
@pytest.mark.timeout(600)
def test_they_need_little_and_pass_on_fake_gpus(fake_gpus: Any, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(BLOCK)
    fake_gpus.set(3)
    fake_gpus.change(2, mode=3)  # which no test changes
    environment = {name: value for name, value in fake_gpus.env.items() if name != "SAFE_GPU_DRIVER"}
    environment["PYTHONPATH"] += f":{tmp_path}"
    options = ("-p", "block", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-v", "-rs", "-m", "gpu")
    command = [sys.executable, "-m", "pytest", *options, "--deselect", NEEDS_MORE]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    # One that prints figures has them between its name and that word.
    passed = re.findall(r"^(tests/[\w/]+\.py)::[^\n]*(?:\n\d[^\n]*\n)? ?PASSED", done.stdout, re.MULTILINE)
    marked = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if re.search(r"^(pytestmark = .*|@)pytest\.mark\.gpu\b", path.read_text(), re.MULTILINE)
    ]
    assert len(marked) >= 3
    assert sorted({*passed, NEEDS_MORE, AMD}) == marked
    assert len(passed) >= 19, done.stdout
    assert "no GPU" not in done.stdout
    assert "EXCLUSIVE_PROCESS" not in done.stdout, "nor is that of a GPU in this mode skipped"


def amd_gpus(host: HipHost) -> str:
    """What the tests of AMD GPUs say of this host."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-m", "gpu", AMD]
    return subprocess.run(command, cwd=ROOT, env=host.env, capture_output=True, text=True, timeout=110).stdout


@long
def test_those_of_amd_gpus_pass_on_fakes_and_see_what_differs(tmp_path: Path, build_library: Any) -> None:
    """HIP in another order, a UUID of another kind, a GPU that HIP calls integrated, and memory of nobody."""
    host = HipHost(tmp_path, build_library("hip.c", "libamdhip64.so"), count=2)
    assert "5 passed, 2 xfailed" in amd_gpus(host)
    host.describe(order=[1, 0])
    host.fail("hipDeviceGetUuid", 1)
    (host.root / "hip_integrated").write_text("101\n")
    (host.pci / "0000:c2:00.0/mem_info_vram_used").write_text(f"{5 << 30}\n")
    said = amd_gpus(host)
    for name in ("an_idle_gpu_shows", "hip_numbers_and_names", "hip_tells_uuids"):
        assert f"FAILED {AMD}::test_{name}" in said, said
