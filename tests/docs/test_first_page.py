"""What somebody who never saw the project finds on the first page: in which order, and one link away."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import MARK, PAGES, ROOT, blocks_of, first_page_in_order, same

PAGE = PAGES["README.md"].read_text() if "README.md" in PAGES else ""


def test_what_is_asked_first_is_told_first() -> None:
    titles = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert titles == ["Set-up", "One job", "What is promised", "Which are you?", "Why not …?", "Pages"]
    runs = [block for block in blocks_of("README.md", PAGE) if block.kind in ("run", "runs")]
    assert [block.about or block.language for block in runs] == [
        "main",
        "test",
        "in the checkout",
        "python",
        "in a job",
    ]


def test_it_has_the_words_that_people_look_for() -> None:
    words = "Placeholder|PytorchPlaceholder()|TensorflowPlaceholder()|PyTorch|TensorFlow|Grid Engine (SGE)|NVML|NUMA"
    words += "|affinity=None|from safe_gpu import"
    assert [word for word in words.split("|") if word not in PAGE] == []


@pytest.mark.parametrize(
    ("term", "target"),
    [
        ("placeholder", "safe_gpu/runtimes/README.md"),
        ("NUMA", "safe_gpu/affinity/README.md"),
        ("SGE", "safe_gpu/schedulers/README.md"),
        ("gpu-acquisitor", "tools/README.md"),
    ],
)
def test_one_link_leads_to_it(term: str, target: str) -> None:
    """The item, paragraph or row with the link names the term, and so does the page behind it."""
    parts = re.split(r"\n(?=\n|- |\d\. |\|)", PAGE)
    assert any(f"({target}" in part and term.lower() in part.lower() for part in parts)
    assert term.lower() in PAGES[target].read_text().lower()


def test_its_blocks_run_in_order_on_a_machine_with_only_python(tmp_path: Path, command: Any) -> None:
    """In one shell: what a block exports or writes is there for the next. Python is saved as the page says."""
    for name in ("bash", "cat", "env", "printenv", "sh", "uname"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or "")
    environment = tmp_path / ".venv" / "bin"
    environment.mkdir(parents=True)
    (environment / "activate").write_text(f"PATH={environment}:$PATH\n")
    for name, target in {"python": sys.executable, "safe-gpu": command.path}.items():
        (environment / name).write_text(f'#!/bin/sh\nexec {shlex.quote(str(target))} "$@"\n')
        (environment / name).chmod(0o755)
    script, blocks = first_page_in_order()
    inherited = {name: value for name, value in os.environ.items() if name != "SAFE_GPU_DRIVER"}
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=tmp_path,
        env={**inherited, "PATH": str(tmp_path / "bin"), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split(f"{MARK}\n")[:-1]
    assert len(printed) == len(blocks) == 3
    for block, output in zip(blocks, printed, strict=True):
        assert block.output is not None
        assert same(output, block.output), output
