"""Runs of the demo, each checked for what holds on every host: it ends, cleans up, and is readable."""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from safe_gpu import demo


class Run(NamedTuple):
    """The exit code and the text of one demo, and who got and was refused in its first round."""

    code: int
    text: str

    @property
    def verdict(self) -> str:
        """From the verdict on, in one line."""
        return " ".join(self.text[self.text.index("Verdict:") :].split())

    @property
    def got(self) -> list[list[str]]:
        """What each winner of the rounds that are told one by one got, as labels."""
        return [line.rpartition("got GPU ")[2].split(",") for line in self.text.splitlines() if "got GPU " in line]


def checked(code: int, text: str) -> Run:
    """What no demo may print, whatever the host."""
    for line in text.splitlines():
        assert len(line) <= 80, line
    times = [float(found) for found in re.findall(r"(-?[0-9.]+) ms", text)]
    assert all(0 <= time < 60_000 for time in times), text
    assert "Traceback" not in text
    assert len(text.splitlines()) < 90
    return Run(code, text)


@pytest.fixture
def watch_a_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Run a demo in this process; it must leave no file, process or variable behind."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def watch(preset: str = "dgx-a100", processes: int | None = None, rounds: int = 1) -> Run:
        monkeypatch.setenv("SAFE_GPU_DRIVER", f"simulated:{preset}")
        before = dict(os.environ)
        output = io.StringIO()
        code = demo.run(processes, rounds, output)
        assert dict(os.environ) == before
        assert os.listdir(temporary) == []
        assert multiprocessing.active_children() == []
        assert not Path(os.environ["SAFE_GPU_DIR"]).exists(), "the users' state directory is none of its business"
        return checked(code, output.getvalue())

    return watch
