"""Nothing is loaded that a neighbour could have put there: libraries, modules, settings and programs of matplotlib."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.claims import claim
from support.real import REQUIRED, long

import safe_gpu

NEIGHBOUR = 4711

needs_root = pytest.mark.skipif(not api.is_root(), reason="needs root, to be the victim")
needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None and not REQUIRED, reason="needs matplotlib")

NVML = "from safe_gpu.drivers.nvml_calls import why_missing; print(why_missing())"
CUDA = """
from safe_gpu.errors import NoDriverError
from safe_gpu.runtimes.cuda import CUDA
try:
    CUDA.visible_in_child()
except NoDriverError as err:
    print(err)
"""


@pytest.fixture
def planted(open_tmp: Path, build_library: Callable[..., Path]) -> Path:
    """A directory of another user with a library that leaves a file where it is loaded."""
    directory = open_tmp / "lib"
    directory.mkdir()
    source = '#include <stdlib.h>\n__attribute__((constructor)) void run(void) { system("touch $PWNED"); }\n'
    (directory / "evil.c").write_text(source)
    for name in (api.LIBRARY, "libcuda.so.1"):
        built = build_library(str(directory / "evil.c"), name)
        (directory / name).write_bytes(built.read_bytes())
    os.chown(directory, NEIGHBOUR, NEIGHBOUR)
    return directory


@needs_root
@pytest.mark.parametrize("code", [NVML, CUDA], ids=["NVML", "CUDA"])
@pytest.mark.parametrize(
    ("owner", "place"),
    [
        (0, "{planted}"),
        (NEIGHBOUR, "{planted}"),
        (NEIGHBOUR, "{planted.parent}"),  # root's and sticky, where everybody may put a library
        pytest.param(NEIGHBOUR, "{planted.parent}/down/..", marks=long),
        (NEIGHBOUR, "$ORIGIN" + "/.." * 8 + "{planted}"),  # the loader puts the program's directory there
        pytest.param(NEIGHBOUR, "/$ORIGIN" + "/.." * 8 + "{planted}", marks=long),
    ],
)
def test_libraries_are_loaded_from_places_of_root_only(
    planted: Path, open_tmp: Path, child: Callable, code: str, owner: int, place: str
) -> None:
    mark = open_tmp / "pwned"
    (planted / "below").mkdir()
    (open_tmp / "down").symlink_to(planted / "below")
    os.chown(planted, owner, owner)
    for file in planted.glob("*.so*"):
        shutil.copy(file, open_tmp)
        os.chown(open_tmp / file.name, NEIGHBOUR, NEIGHBOUR)
    deep = open_tmp / "/".join("d" * 9)
    deep.mkdir(parents=True)
    environment = {"LD_LIBRARY_PATH": place.format(planted=planted), "PWNED": str(mark)}
    said = child(code, env=environment, cwd=deep).finish()
    assert mark.exists() is (owner == 0)
    assert ("not found where root may load it from" in said) is (owner != 0)


def test_the_cache_of_the_loader_is_read() -> None:
    assert any(os.path.isfile(path) for path in api.loading.files_named("libc.so.6"))
    assert not any(os.path.isfile(path) for path in api.loading.files_named("libnothing.so.1"))


@needs_root
@pytest.mark.parametrize("name", ["SAFE_GPU_DIR", "SAFE_GPU_FSROOT", "SAFE_GPU_SIMULATED_DIR"])
def test_paths_of_a_user_are_warned_of(open_tmp: Path, name: str) -> None:
    (open_tmp / "mine").mkdir()
    os.chown(open_tmp / "mine", NEIGHBOUR, NEIGHBOUR)
    for path in (open_tmp / "mine", open_tmp / "mine" / "new"):
        (doubt,) = api.variables.doubts({name: str(path)})
        assert doubt.startswith(f"{name}={path}: other users can change")
    assert api.variables.doubts({name: str(open_tmp / "new")}) == []
    assert api.variables.doubts({name: "/"}) == []
    (open_tmp / "new").mkdir()  # by another user, after it was found to be missing
    os.chown(open_tmp / "new", NEIGHBOUR, NEIGHBOUR)
    assert api.variables.doubts({name: str(open_tmp / "new")}) != []


# Modules in the working directory, or on PYTHONPATH under python3 -I, in child processes too


MAIN = "from safe_gpu.cli import main; sys.exit(main())"


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
    assert done.returncode in (0, 1), done.stderr
    assert code == MAIN or "cannot be loaded" in done.stdout
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


# history --plot


RC = "text.usetex: True\ntext.latex.preamble: \\input{/etc/passwd}\nsavefig.facecolor: 123456\nbackend: module://evil\n"

PLACES = {
    "the current directory": {},
    "MATPLOTLIBRC": {"MATPLOTLIBRC": "{his}/matplotlibrc"},
    "MATPLOTLIBRC, a directory": {"MATPLOTLIBRC": "{his}"},
    "MPLCONFIGDIR": {"MPLCONFIGDIR": "{his}"},
    "HOME": {"HOME": "{his}", "XDG_CONFIG_HOME": "{his}/.config", "XDG_CACHE_HOME": "{his}"},
    "a backend": {"MPLBACKEND": "module://evil", "PYTHONPATH": "{his}"},
    "modules": {"PYTHONPATH": "{his}", "PYTHONSTARTUP": "{his}/evil.py", "PYTHONUSERBASE": "{his}"},
    "programs": {"PATH": "{his}:/usr/bin:/bin"},
    "temporary files": {"TMPDIR": "{his}"},
}


@pytest.fixture
def his(open_tmp: Path) -> Path:
    """A directory of a neighbour's, with settings and modules of matplotlib, and programs that it starts."""
    place = open_tmp / "his"
    (place / ".config" / "matplotlib").mkdir(parents=True)
    for file in (place / "matplotlibrc", place / ".config" / "matplotlib" / "matplotlibrc"):
        file.write_text(RC)
    for name in ("evil", "matplotlib", "sitecustomize", "usercustomize", "numpy", "json"):
        (place / f"{name}.py").write_text(f"open({str(open_tmp / 'mark')!r}, 'a').write({name!r})\n")
    for name in ("latex", "fc-list", "dvipng", "ldconfig", "uname"):
        (place / name).write_text(f"#!/bin/sh\necho {name} >> {open_tmp}/mark\n")
        (place / name).chmod(0o755)
    for path in (place, *place.rglob("*")):
        os.chown(path, NEIGHBOUR, NEIGHBOUR)
    return place


@needs_root
@needs_matplotlib
@pytest.mark.parametrize("where", PLACES)
def test_root_loads_nothing_from_the_directory_of_a_neighbour(
    his: Path, open_tmp: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root stands in the neighbour's directory, with that user's variables."""
    before = sorted(his.rglob("*"))
    for name, value in PLACES[where].items():
        monkeypatch.setenv(name, value.format(his=his))
    monkeypatch.chdir(his)
    monkeypatch.syspath_prepend(str(his))
    picture = api.status_report.drawn(
        api.status_report.Days(["2026-11-16"], {"$\\input{x}$": [1.0], "anna": [2.0]}, {}, {}, {}), "svg", "a day"
    ).decode()
    assert picture.startswith("<?xml")
    assert "#123456" not in picture
    assert "input{x}" in picture
    assert not (open_tmp / "mark").exists()
    assert sorted(his.rglob("*")) == before


@needs_root
@needs_matplotlib
def test_the_command_in_such_a_directory(his: Path, open_tmp: Path, command: Any, monkeypatch: Any) -> None:
    with claim(1):
        pass
    monkeypatch.chdir(his)
    (his / "matplotlib.py").unlink()  # python -m begins there
    (his / "json.py").unlink()
    done = command.run("history", "--report", "week", "--plot", open_tmp / "week.svg")
    assert (done.returncode, done.stderr) == (0, "")
    assert "#123456" not in (open_tmp / "week.svg").read_text()
    assert not (open_tmp / "mark").exists()


@needs_matplotlib
def test_what_fails_there_is_told() -> None:
    with pytest.raises(api.SafeGpuError, match=r"cannot be drawn: ValueError: .*nonsense"):
        api.status_report.drawn(api.status_report.Days([], {}, {}, {}, {}), "nonsense", "a day")
