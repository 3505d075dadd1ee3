"""What the pages show is what happens: every code block is run, or at least read, and what it prints is compared."""

import doctest
import importlib
import re
import subprocess
from typing import Any

import pytest

from .conftest import MARK, ROOT, SCENES, same, session_script

KINDS = ("run", "runs", "prints", "session", "starts", "needs", "text")


def test_every_block_says_what_it_is_and_code_can_be_read(block: Any) -> None:
    assert block.kind in KINDS, f"{block.name}: write <!-- runs --> ... before it, see tests/README.md"
    assert block.about or block.kind not in ("run", "starts", "needs")
    assert block.language in ("bash", "python") or block.kind != "runs"
    if block.language in ("bash", "python"):
        assert block.kind in ("run", "runs", "starts", "needs"), f"{block.name}: code is run, or needs something to run"
    if block.kind == "text":
        assert not re.match(r"\s*(\$|safe-gpu|python3?|pip|import|from)\s", block.text), f"{block.name}: is it code?"
    if block.language == "python":
        compile(block.text, block.name, "exec")
    elif block.language == "bash":
        done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_what_runs_prints_what_the_page_says(run_block: Any, workspace: Any) -> None:
    SCENES[run_block.about](workspace)
    printed = workspace.python(run_block.text) if run_block.language == "python" else workspace.shell(run_block.text)
    if run_block.output is not None:
        assert same(printed, run_block.output, loosely=run_block.loosely), printed


def test_what_takes_long_knows_all_its_options(long_block: Any, workspace: Any) -> None:
    said = workspace.shell(f"{long_block.text.strip()} --no-such-option || test $? = 2")
    assert said.endswith(": error: unrecognized arguments: --no-such-option\n")


def test_a_session_goes_as_the_page_says(session: Any, workspace: Any) -> None:
    SCENES[session.about](workspace)
    script, steps = session_script(session.text)
    printed = workspace.shell(script).split(f"{MARK}\n")[1:]
    for (command, expected), actual in zip(steps, printed, strict=True):
        assert same(actual, expected), f"$ {command}\n{actual}"


@pytest.mark.parametrize(
    ("printed", "expected", "loosely", "equal"),
    [
        ("a\nb\n", "a\nc\n", False, False),
        ("process 12 waits 3 s\n", "process 4711 waits 12 min\n", False, True),
        ("a 1\nb 2\n", "b 7\n...\n", True, True),
        ("GPU 1\nGPU 2\n", "GPU 3\n", True, False),
    ],
)
def test_only_what_varies_may_differ(printed: str, expected: str, loosely: bool, equal: bool) -> None:
    """A loose comparison minds lines and how often they come."""
    assert same(printed, expected, loosely=loosely) is equal


MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "safe_gpu").rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert (failed, bool(tried)) == (0, True)
