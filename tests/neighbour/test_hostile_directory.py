"""Modules in the working directory, or on PYTHONPATH under ``python3 -I``, are not imported, in child processes too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import safe_gpu

MAIN = "from safe_gpu.cli import main; sys.exit(main())"
CUDA = """
from safe_gpu.errors import NoDriverError
from safe_gpu.runtimes.cuda import CUDA
try:
    CUDA.visible_in_child()
except NoDriverError as err:
    assert "cannot be loaded" in str(err), err
"""


@pytest.fixture
def hostile(open_tmp: Path) -> Path:
    """A directory with modules that leave a file where they are imported."""
    directory = open_tmp / "work"
    directory.mkdir()
    for name in ("json", "filelock", "pynvml", "ctypes", "struct", "shlex", "logging", "safe_gpu", "sitecustomize"):
        (directory / f"{name}.py").write_text(f"open({str(open_tmp / 'pwned')!r}, 'w')\n")
    return directory


@pytest.mark.parametrize(
    ("code", "arguments"),
    [(MAIN, ("status",)), (MAIN, ("run", "--", "true")), (MAIN, ("doctor", "--json")), (CUDA, ())],
    ids=["status", "run", "doctor", "CUDA in a child"],
)
def test_modules_of_a_hostile_directory_are_not_imported(
    open_tmp: Path, state_dir: Path, hostile: Path, code: str, arguments: tuple[str, ...]
) -> None:
    root = str(Path(safe_gpu.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, sys.argv.pop(1)); {code}", root, *arguments],
        cwd=hostile,
        env={**os.environ, "PYTHONPATH": str(hostile)},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1) if code == MAIN else done.returncode == 0, done.stderr
    assert not (open_tmp / "pwned").exists()


def test_the_installed_command_does_not_look_there(open_tmp: Path, state_dir: Path, hostile: Path) -> None:
    """Without -I, as users start it: the directory of the script comes first, not the current one."""
    script = Path(sys.executable).parent / "safe-gpu"
    if not script.exists():
        pytest.skip("the package is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for arguments in (["status"], ["run", "--", "true"]):
        done = subprocess.run([script, *arguments], cwd=hostile, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert not (open_tmp / "pwned").exists()
