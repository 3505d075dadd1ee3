"""Runs of the demo, each checked for what holds on every host: it ends, cleans up, and is readable."""

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
    """The exit code and the text of one demo."""

    code: int
    text: str

    @property
    def verdict(self) -> str:
        """From the verdict on, in one line."""
        return " ".join(self.text[self.text.index("Verdict:") :].split())

    @property
    def claims(self) -> str:
        """The part on the race of claims that do not wait, in one line; "" if there was none on this host."""
        found = re.findall(r"With safe_gpu, \d+ processes claim.*?(?=\n\n)", self.text, re.DOTALL)
        return " ".join(found[0].split()) if found else ""

    @property
    def number(self) -> tuple[int, int]:
        """How many processes got GPUs in the first round, and how many GPUs."""
        found = re.search(r"(\d+) process(?:es)? got (\d+) GPUs?", self.claims)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    @property
    def got(self) -> set[str]:
        """The labels of the GPUs that one process each got in the first round."""
        found = re.search(r"GPU ([0-9:,-]+): 1 process", self.claims)
        return {label for part in (found[1].split(",") if found else ()) for label in _labels(part)}


def _labels(part: str) -> list[str]:
    """``0:1-3`` as ``0:1``, ``0:2``, ``0:3``."""
    gpu, colon, numbers = part.rpartition(":")
    first, _, last = numbers.partition("-")
    return [f"{gpu}{colon}{number}" for number in range(int(first), int(last or first) + 1)]


def checked(code: int, text: str) -> Run:
    """What no demo may print, whatever the host."""
    for line in text.splitlines():
        assert len(line) <= 80, line
    times = [float(found) for found in re.findall(r"(-?[0-9.]+) ms", text)]
    assert all(0 <= time < 60_000 for time in times), text
    assert "Traceback" not in text
    assert "\x1b" not in text
    raced = text.count("at the same moment")  # twice where the claims of this host got nothing
    assert code or len(text.splitlines()) <= 25 + 10 * (raced > 1), text
    assert text.index("Without safe_gpu, ") < text.index("With safe_gpu, "), "the contrast comes first"
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
