"""``history --plot``: no file and no variable of a neighbour decides what runs, or what the picture looks like."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.claims import claim
from support.real import REQUIRED

from safe_gpu.errors import SafeGpuError
from safe_gpu.host import programs
from safe_gpu.status import report

NEIGHBOUR = 4711
RC = "text.usetex: True\ntext.latex.preamble: \\input{/etc/passwd}\nsavefig.facecolor: 123456\nbackend: module://evil\n"

pytestmark = [
    pytest.mark.skipif(find_spec("matplotlib") is None and not REQUIRED, reason="needs matplotlib"),
    pytest.mark.skipif(not programs.is_root(), reason="needs root, to be the victim"),
]

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


@pytest.mark.parametrize("where", PLACES)
def test_a_neighbour_chooses_nothing(his: Path, open_tmp: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root stands in the neighbour's directory, with that user's variables."""
    before = sorted(his.rglob("*"))
    for name, value in PLACES[where].items():
        monkeypatch.setenv(name, value.format(his=his))
    monkeypatch.chdir(his)
    monkeypatch.syspath_prepend(str(his))
    picture = report.drawn(report.Days(["2026-11-16"], {"$\\input{x}$": [1.0], "anna": [2.0]}, {}), "svg").decode()
    assert picture.startswith("<?xml")
    assert "#123456" not in picture
    assert "input{x}" in picture
    assert not (open_tmp / "mark").exists()
    assert sorted(his.rglob("*")) == before


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


def test_what_fails_there_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(SafeGpuError, match="cannot be drawn: ModuleNotFoundError: No module named 'matplotlib'"):
        report.drawn(report.Days([], {}, {}), "svg")
