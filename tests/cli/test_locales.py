"""Arguments in locales that decode bytes into what they cannot encode."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# In EUC-JP; the C library and Python decode the second and the last differently.
ARGUMENTS = (b"\xa4\xa2", b"\xa1\xc1", b"\xff", b"caf\xc3\xa9", b"\x8f\xa2\xb7")


@pytest.fixture
def japanese(tmp_path: Path) -> dict[str, str]:
    """The variables of a locale with EUC-JP."""
    if shutil.which("localedef") is None:
        pytest.skip("needs localedef")
    made = tmp_path / "ja_JP.EUC-JP"
    done = subprocess.run(["localedef", "-i", "ja_JP", "-f", "EUC-JP", made], capture_output=True, timeout=60)
    if not made.is_dir():
        pytest.skip(f"no such locale here: {done.stderr!r}")
    return {"LOCPATH": str(tmp_path), "LC_ALL": made.name}


def test_arguments_reach_the_command_as_bytes(japanese: dict[str, str]) -> None:
    words = [sys.executable, "-m", "safe_gpu", "run", "-q", "--", "printf", "%s|", *ARGUMENTS]
    done = subprocess.run(words, env={**os.environ, **japanese}, capture_output=True, timeout=60)
    assert (done.stdout, done.stderr) == (b"|".join(ARGUMENTS) + b"|", b"")
