"""The pages of the documentation, cut into code blocks, and a simulated host to run these on.

The line before each code block is a comment that says what the tests do with it; tests/README.md lists the forms.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import api

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path
    for pattern in ("*.md", "safe_gpu/**/*.md", "tests/*.md", "tools/*.md", ".github/*.md")
    for path in sorted(ROOT.glob(pattern))
}

# The names that the pages use for whoever runs the tests, and for the machine.
USERS = ("anna", "ben", "carla")
HOST = "gpu1"


class Block(NamedTuple):
    """A fenced code block.

    Attributes:
        page: its page. line: number of its first line of code.
        language: what stands behind the opening fence. text: the code.
        kind, about: the comment before it, ``<!-- kind: about -->``; "" where there is none.
        output: the text of the block after it that says what it prints, or None.
        loosely: compare that in any order of its lines and with any numbers.
    """

    page: str
    line: int
    language: str
    text: str
    kind: str
    about: str
    output: str | None = None
    loosely: bool = False

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


LOOSELY = "in any order and with any numbers"
# As for the users of the pages, of whom the longest name is carla: a longer one takes room from other columns.
COLUMNS = str(80 + max(0, len(api.user_name(os.geteuid())) - len("carla")))
_COMMENT = re.compile(r"<!-- ([a-z]+)(?:[:,] (.*?))? -->")


def blocks_of(page: str, text: str) -> list[Block]:
    """The code blocks of a page; one that says what the block before it prints is that block's output as well."""
    found: list[Block] = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        fence = re.fullmatch(r"(\s*)```(\w*)", lines[number])
        if fence is None:
            number += 1
            continue
        comment = _COMMENT.fullmatch(lines[number - 1].strip())
        kind, about = (comment[1], comment[2] or "") if comment else ("", "")
        end = next(n for n in range(number + 1, len(lines)) if lines[n].strip() == "```")
        code = "".join(line.removeprefix(fence[1]) + "\n" for line in lines[number + 1 : end])
        if kind == "prints" and found:
            found[-1] = found[-1]._replace(output=code, loosely=about == LOOSELY)
        found.append(Block(page, number + 2, fence[2], code, kind, about))
        number = end + 1
    return found


def all_blocks() -> list[Block]:
    return [block for page, path in PAGES.items() for block in blocks_of(page, path.read_text())]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, kind in (("block", ""), ("run_block", "runs"), ("long_block", "starts"), ("session", "session")):
        if name in metafunc.fixturenames:
            chosen = [block for block in all_blocks() if kind in ("", block.kind)]
            metafunc.parametrize(name, chosen, ids=[block.name for block in chosen])
    if "page" in metafunc.fixturenames:
        metafunc.parametrize("page", PAGES)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not {"README.md", "tests/README.md", "tools/README.md"} <= PAGES.keys() and not (ROOT / ".git").exists():
        for item in items:
            if item.path.parent == Path(__file__).parent:
                item.add_marker(pytest.mark.skip(reason="this is not a checkout: its pages are not here"))


# What the examples call: programs of the reader's.
_PROGRAMS = {
    "train.py": """\
import os, signal, sys
import safe_gpu
owner = safe_gpu.claim_gpus(int(sys.argv[1]) if len(sys.argv) > 1 else "job" if "SAFE_GPU_NB_GPUS" in os.environ else 1)
if "IN_THE_BACKGROUND" in os.environ:
    print("claimed", flush=True)
    signal.pause()
print("training on GPU", ",".join(map(str, owner.devices_taken)))
""",
    "train": """\
#!/bin/bash
if [ -n "$IN_THE_BACKGROUND" ]; then mkfifo "pipe.$$"; echo claimed; exec -a "$0" cat <> "pipe.$$"; fi
echo "training on GPU $CUDA_VISIBLE_DEVICES"
""",
}
_PROGRAMS["simulate"] = _PROGRAMS["train"].replace("training", "simulating")


class Workspace:
    """A directory with the programs that the examples start, a simulated host, and a shell."""

    def __init__(self, directory: Path, safe_gpu: Path) -> None:
        self.directory = directory
        self.environment: dict[str, str] = {}
        self._path = f"{safe_gpu.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._background: list[Any] = []
        for name in ("tools", "tests"):
            (directory / name).symlink_to(ROOT / name)
        if not (Path(sys.executable).parent / "python").exists():  # tests that run outside of an environment
            self._path = f"{directory / 'bin'}:{self._path}"
            _PROGRAMS["bin/python"] = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'
            (directory / "bin").mkdir()
        for name, text in _PROGRAMS.items():
            (directory / name).write_text(text)
            (directory / name).chmod(0o755)

    def shell(self, script: str) -> str:
        """What a script prints on both streams; fails where it does."""
        done = self._start(script)
        try:
            out = str(done.communicate(timeout=100)[0])
        finally:
            _end(done)
        assert done.returncode == 0, f"exit code {done.returncode}:\n{out}"
        return out

    def python(self, code: str) -> str:
        """The same for a Python program."""
        (self.directory / "example.py").write_text(code)
        return self.shell("exec python example.py")

    def background(self, script: str, *, until: str = "claimed", **environment: str) -> None:
        """Start a command and wait for a line of it."""
        process = self._start(script, IN_THE_BACKGROUND="1", **environment)
        self._background.append(process)
        assert any(until in line for line in process.stdout), f"{script} ended without saying {until!r}"

    def end(self) -> None:
        for process in reversed(self._background):
            _end(process)

    def _start(self, script: str, **environment: str) -> Any:
        return subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.directory,
            env={**os.environ, "PATH": self._path, "COLUMNS": COLUMNS, **self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def _end(process: Any) -> None:
    """End a shell and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
    process.stdout.close()


JOB = {"JOB_ID": "4711", "SGE_TASK_ID": "3", "SGE_ROOT": "/opt/sge", "SAFE_GPU_NB_GPUS": "2"}


def _job(workspace: Workspace) -> None:
    """Inside a batch job that asked for two GPUs."""
    workspace.environment.update(JOB)


def _checkout(workspace: Workspace) -> None:
    """Beside an environment that the first command of the first page has made."""
    (workspace.directory / ".venv" / "bin").mkdir(parents=True)
    (workspace.directory / ".venv" / "bin" / "activate").touch()


def _busy(workspace: Workspace) -> None:
    """A host of eight GPUs: seven are claimed, four of them for a program that does not use them yet."""
    job = {name: value for name, value in JOB.items() if name != "SAFE_GPU_NB_GPUS"}
    workspace.background("python train.py 2", **job)
    workspace.background("safe-gpu run -n 4 -- ./simulate")
    workspace.background("python train.py")


def _full(workspace: Workspace) -> None:
    """A host whose eight GPUs are all claimed."""
    workspace.background("safe-gpu run -n 8 -- ./simulate")


def _month(workspace: Workspace) -> None:
    """A host with eight GPUs that two users have used for three weeks."""
    uuids = [gpu.uuid for gpu in api.find_preset("dgx-a100").gpus]
    for number in range(60):
        since = time.time() - 86400 * (20 - number / 3)
        claim = {"v": 1, "claim": [1 + number, since], "gpus": uuids[: 1 + number % 4], "waited": 60 * (number % 7)}
        claim |= {"user": USERS[number % 2], "host": os.uname().nodename}
        held = 3600.0 * (1 + number % 5)
        idle, load = ((0.0, 0.87), (0.75, 0.12))[number % 2]
        use = api.Use(looked=held, idle=idle * held, used=load * held)
        looks = api.ClaimLooks(1 + number, since, held, (use,) * len(claim["gpus"]))
        end = {"v": 1, "claim": claim["claim"], "ended": since + held}
        told = [api.line_of(looks), *(json.dumps(line).encode() + b"\n" for line in (claim, end))]
        assert api.history.append(told, time.time())


SCENES: dict[str, Callable[[Workspace], None]] = {
    "in the checkout": _checkout,
    "in a job": _job,
    "busy": _busy,
    "full": _full,
    "a used host": _month,
    "": lambda workspace: None,
}


@pytest.fixture
def workspace(tmp_path: Path, command: Any) -> Iterator[Workspace]:
    """Where examples run; see :class:`Workspace`."""
    workspace = Workspace(tmp_path, command.path)
    yield workspace
    workspace.end()


# Comparing what is printed with what the pages say


def normal(text: str) -> str:
    """Text without what differs from run to run: who and where, process numbers, times, the width of columns."""
    user, host = api.user_name(os.geteuid()), os.uname().nodename
    text = re.sub(rf"(?<![\w-])({'|'.join(map(re.escape, (*USERS, user)))})(?![\w-])", "USER", text)
    text = re.sub(rf"(?<![\w-])({HOST}|{re.escape(host)})(?![\w-])", "HOST", text)
    text = text.replace(os.environ["SAFE_GPU_DIR"], "/tmp/safe-gpu")
    text = re.sub(r"\d{4}-\d\d-\d\d", "DATE", text)
    text = re.sub(r"\d\d:\d\d:\d\d(,\d{3})?|(?<=waiting )\d+:\d\d", "TIME", text)
    text = re.sub(r"\b(\d+(\.\d+)? ?(ms|s|min|m|h|d)( \d+ (min|h))?)(?!\w)", "AGE", text)
    text = re.sub(r"[█▌░]+", "BAR", text)
    text = re.sub(r"\b(process|pid|USER)(\s+)\d+", r"\1\2PID", text)
    return re.sub(r"\s+", " ", text).strip()


def same(printed: str, expected: str, *, loosely: bool = False) -> bool:
    """Whether a page tells what was printed; a line of three dots stands for any lines."""
    if loosely:
        lines = Counter(map(_numberless, printed.splitlines()))
        told = Counter(map(_numberless, expected.splitlines()))
        incomplete = told.pop("...", 0)
        return told <= lines if incomplete else told == lines
    parts = re.split(r"^\.\.\.$", expected, flags=re.MULTILINE)
    pattern = r"(?: .*)? ?".join(re.escape(normal(part)) for part in parts)
    return re.fullmatch(pattern, normal(printed), re.DOTALL) is not None


def _numberless(line: str) -> str:
    return re.sub(r"[0-9]+", "0", normal(re.sub(r"\b(GPU|MIG)-[0-9a-f-]{36}", r"\1-UUID", line)))  # 580d is no age


def session_script(text: str) -> tuple[str, list[tuple[str, str]]]:
    """A script of a session's commands, which marks where each begins; and (command, output) as the page has them."""
    steps: list[list[str]] = []
    continued = False
    for line in text.splitlines():
        if continued:
            steps[-1][0] += "\n" + line
        elif line.startswith("$ "):
            steps.append([line[2:], ""])
        else:
            assert steps, f"a session begins with a command after `$ `, not with {line!r}"
            steps[-1][1] += line + "\n"
        continued = steps[-1][1] == "" and steps[-1][0].endswith("\\")
    mark = f"code=$?; echo {shlex.quote(MARK)}; (exit $code)"  # `echo $?` is a command that readers understand
    script = "set +e\n" + "".join(f"{mark}\n{command}\n" for command, _ in steps)
    return script + "exit 0\n", [(command, output) for command, output in steps]


MARK = "-- the next command --"


def first_page_in_order() -> tuple[str, list[Block]]:
    """A script of all that the first page runs after its two commands, with a mark behind each block; and the blocks.

    Python is saved as the page says.
    """
    blocks = [block for block in blocks_of("README.md", PAGES["README.md"].read_text()) if block.kind == "runs"]
    script, job = "", "".join(f"export {name}={value}; " for name, value in JOB.items())
    for block in blocks:
        code = block.text
        if block.language == "python":
            code = f"cat > train.py <<'END'\n{code}END\npython train.py\n"
        script += f"({job}\n{code})\n" if block.about == "in a job" else code
        script += f"echo {shlex.quote(MARK)}\n"
    return script, blocks
