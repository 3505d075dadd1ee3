"""What is published: every build of one tree has the same bytes, by way of the sdist too, and an index accepts it."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.real import REQUIRED

ROOT = Path(__file__).parents[1]
PARTS = "safe_gpu tests tools .github .gitignore pyproject.toml README.md CHANGELOG.md LICENSE".split()


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
    run(python, "-m", "pip", "install", "-q", "build", "twine")
    hashes = []
    # The first wheel is built from the sdist, the second from the tree.
    for name, umask, kinds in (("one", 0o022, []), ("other", 0o077, ["--sdist", "--wheel"])):
        tree, built = tmp_path / name, tmp_path / f"{name}-built"
        tree.mkdir()
        run("cp", "-r", *PARTS, tree, umask=umask)
        run(python, "-m", "build", *kinds, "--outdir", built, tree, umask=umask)
        hashes.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in built.iterdir()})
    assert sorted(Path(name).suffix for name in hashes[0]) == [".gz", ".whl"]
    assert hashes[0] == hashes[1]
    run(python, "-m", "twine", "check", "--strict", *sorted(built.iterdir()))
