"""What is published: every build of one tree has the same bytes, by way of the sdist too, and an index accepts it."""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.real import REQUIRED

ROOT = Path(__file__).parents[1]
PARTS = "safe_gpu tests tools .github .gitignore pyproject.toml README.md CHANGELOG.md LICENSE".split()
TOOLS = ROOT / ".github" / "build-tools.txt"


@pytest.mark.timeout(300)
@pytest.mark.skipif(not REQUIRED, reason="needs SAFE_GPU_REQUIRE_REAL=1: pip downloads the builder")
def test_two_builds_have_one_hash(tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}

    def run(*command: str | Path, umask: int = 0o022) -> None:
        done = subprocess.run(
            command, cwd=ROOT, env=variables, umask=umask, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stdout + done.stderr

    python = tmp_path / "builder" / "bin" / "python"
    run(sys.executable, "-m", "venv", tmp_path / "builder")
    run(python, "-m", "pip", "install", "-q", "--require-hashes", "-r", TOOLS)
    run(python, "-m", "pip", "install", "-q", "twine")
    hashes = []
    # The first wheel is built from the sdist, the second from the tree.
    for name, umask, kinds in (("one", 0o022, []), ("other", 0o077, ["--sdist", "--wheel"])):
        tree, built = tmp_path / name, tmp_path / f"{name}-built"
        tree.mkdir()
        run("cp", "-r", *PARTS, tree, umask=umask)
        run(python, "-m", "build", "-n", *kinds, "--outdir", built, tree, umask=umask)
        hashes.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in built.iterdir()})
    assert sorted(Path(name).suffix for name in hashes[0]) == [".gz", ".whl"]
    assert hashes[0] == hashes[1]
    run(python, "-m", "twine", "check", "--strict", *sorted(built.iterdir()))


def test_whatever_runs_in_a_release_is_pinned() -> None:
    """An action by its commit, for a tag can be moved; packages by their hashes."""
    workflows = {path.name: path.read_text() for path in (ROOT / ".github" / "workflows").iterdir()}
    used = re.findall(r"uses: (.*)", "".join(workflows.values()))
    assert len(used) > 5
    assert [one for one in used if not re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one)] == []
    release = workflows["release.yml"]
    installed = re.findall(r"pip install (.*)", release)
    pinned = [one for one in installed if "--require-hashes" in one or "--no-deps --no-build-isolation" in one]
    assert len(installed) == len(pinned) == 3
    assert not re.search(r"\b(curl|wget|npx|pipx|uv)\b", release)
    assert re.findall(r"-m build (\S+)", release) == ["-n", "-n"], "the build downloads nothing either"
    for name in re.findall(r"-r (\S+\.txt)", release):
        lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
        assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", line)] == []
