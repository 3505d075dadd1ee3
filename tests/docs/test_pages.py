"""The pages as pages: links, the first page, the reference, words that are avoided; no older release is installed."""

import inspect
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.real import tool

import safe_gpu
from safe_gpu import errors

from .conftest import MARK, PAGES, ROOT, all_blocks, blocks_of, first_page_in_order, same

MOST_WORDS = 900
REFERENCE = "safe_gpu/README.md"


def without_code(text: str) -> str:
    return re.sub(r"^\s*```.*?^\s*```$", "", text, flags=re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    """A page without code blocks, tables, comments and the targets of links."""
    text = re.sub(r"<!--.*?-->", "", without_code(text), flags=re.DOTALL)
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", text)


def anchors(text: str) -> set[str]:
    """The names by which the headings of a page are linked to."""
    headings = re.findall(r"^#+ *(.*)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_resolve_and_what_it_names_exists(page: str) -> None:
    text = PAGES[page].read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        if "://" in target:
            continue
        path, _, fragment = target.partition("#")
        file = (PAGES[page].parent / path).resolve() if path else PAGES[page]
        assert file.exists(), f"{page}: {target}"
        assert not fragment or fragment in anchors(file.read_text()), f"{page}: {target}"
    for name in re.findall(r"`((?:tools|tests|safe_gpu)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), f"{page}: {name}"
    for name in re.findall(r"\bSAFE_GPU_[A-Z_]+\b", text):
        is_of_tests = page == "tests/README.md" and name == "SAFE_GPU_REQUIRE_REAL"
        assert is_of_tests or name in api.VARIABLES, f"{page}: {name}"


WORLD_WRITABLE = re.compile(
    r"(?<![\w.])(?:/var)?/tmp/[^\s`'\";:,)\]]*|/dev/shm/[^\s`'\";:,)\]]*|/run/lock/\S*|/var/crash/\S*"
)
OF_NO_COMMAND = {
    "/tmp/safe-gpu",  # the state directory, which is checked
    "/tmp/nvidia-mps",  # where MPS is by default
    "/tmp/safe_gpu/gpu-lock-magic-RaNdOM-This_Name-NEED_BE-THE_SAME-Across_Users",  # the lock of 2.0
}


def test_nobody_else_chooses_what_root_installs_or_reads() -> None:
    """A neighbour makes a name below a directory that all may write before root does, or one more that a glob finds."""
    texts = {name: path.read_text() for name, path in PAGES.items() if name != "tests/README.md"}
    texts["README.Debian"] = (ROOT / "tools" / "debian" / "README.Debian").read_text()
    named = {(name, one.rstrip("/.")) for name, text in texts.items() for one in WORLD_WRITABLE.findall(text)}
    assert {(name, one) for name, one in named if one not in OF_NO_COMMAND} == set()
    installs = [
        line for text in texts.values() for line in text.splitlines() if re.search(r"\b(install|dpkg -i)\b", line)
    ]
    assert [line for line in installs if re.search(r"/\S*[*?]", line)] == []
    assert f"/root/safe-gpu/safe-gpu_{safe_gpu.__version__}-1_all.deb\n" in texts["safe_gpu/ADMIN.md"]


def test_the_first_page_is_short_and_links_all_others() -> None:
    text = PAGES["README.md"].read_text()
    assert [page for page in PAGES if page != "README.md" and f"({page}" not in text] == []
    assert len(prose(text).split()) <= MOST_WORDS
    assert any(line.startswith("safe-gpu run") for line in text.splitlines()[:50])


def test_the_rows_of_a_table_have_the_cells_of_its_head(page: str) -> None:
    before: list[str] = []
    for line in without_code(PAGES[page].read_text()).splitlines():
        row = re.sub(r"`[^`]*`", "", line).replace("\\|", "").split("|") if line.startswith("|") else []
        assert not row or row[-1] == "", line
        assert not row or not before or len(row) == len(before), line
        assert row or not before or not line, f"{line}: an empty line belongs below a table"
        before = row


def test_nothing_is_installed_by_the_name_of_the_older_release() -> None:
    sources = [path for folder in ("safe_gpu", "tools", "tests") for path in (ROOT / folder).rglob("*.py")]
    for path in [*PAGES.values(), *sources]:
        for line in path.read_text().splitlines():
            if path != Path(__file__):
                assert not re.search(r"pip install.* '?safe-gpu", line), f"{path}: {line}"


@pytest.mark.parametrize("name", ["main", "test"])
def test_the_two_commands_are_one_line_each(name: str) -> None:
    (block,) = [block for block in all_blocks() if (block.kind, block.about) == ("run", name)]
    assert block.page == "README.md"
    assert block.text.count("\n") == 1
    assert f"      - run: {block.text}" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_the_table_of_status_has_every_key() -> None:
    picture = tool("picture")
    status = replace(picture.scene(), windows=(picture.COURSE,)).to_dict()
    table = PAGES["safe_gpu/status/README.md"].read_text()
    parts = [status, *status["gpus"], *status["queue"], *status["windows"]]
    for gpu in status["gpus"]:
        parts += [gpu["claim"] or {}, *gpu["shares"], *gpu["processes"]]
    for key in {"turn", *(key for part in parts for key in part)}:
        is_told = re.search(rf"`(?:\w+\[\]\.)?{key}(?:\[\][^`]*)?`", table)
        assert is_told, f"add a row for the key {key} to the page of status"
    assert f"`schema` | {status['schema']};" in table


def test_the_protocol_names_each_condition_of_a_ticket() -> None:
    waiting = section("safe_gpu/coordination/PROTOCOL.md", "Waiting")
    untold = [one.argument for one in api.CONDITIONS if one.ticketed and f"`{one.argument}`" not in waiting]
    assert untold == [], "describe their values in the section 'Waiting' of PROTOCOL.md"


def test_the_page_of_placeholders_has_a_row_for_each() -> None:
    table = section("safe_gpu/runtimes/README.md", "Which one")
    names = [name for name in safe_gpu.__all__ if name.endswith("Placeholder")]
    names.remove("CudaPlaceholder")  # the default: its row says so in other words
    without_a_row = [name for name in names if name not in named_in_rows(table)]
    assert without_a_row == [], "add a row to the section 'Which one' of safe_gpu/runtimes/README.md"
    in_reference = section(REFERENCE, "Python")
    unnamed = [name for name in names if f"`{name}()`" not in in_reference]
    assert unnamed == [], f"name them in the row of placeholder_fn in {REFERENCE}"


def test_the_reference_has_the_option_of_each_condition() -> None:
    options = [api.as_option(condition.argument) for condition in api.CONDITIONS]
    row, *_ = re.findall(r"^\| `safe-gpu run .*$", section(REFERENCE, "Command line"), re.MULTILINE)
    missing = [option for option in options if not re.search(rf"`{option}\b", row)]
    assert missing == [], f"name them in the row of `safe-gpu run` in the section 'Command line' of {REFERENCE}"


def test_the_table_of_status_has_every_column_in_its_order() -> None:
    table = PAGES["safe_gpu/status/README.md"].read_text()
    told = re.findall(r"`([A-Z/]+)`", " ".join(re.findall(r"^\|([^|]*)\|", table, re.MULTILINE)))
    columns = [column.title for column in (*api.COLUMNS_OF_GPU, *api.COLUMNS_OF_USER)]
    in_order = [title for title in told if title in columns]
    assert in_order == columns, "describe each column on the page of status, in the order of the table"


def test_the_page_of_status_says_what_is_left_out_first() -> None:
    """The columns that give way to the command, the first one first."""
    columns = [*api.COLUMNS_OF_GPU, *api.COLUMNS_OF_USER]
    ranks = {column.title: column.left_out for column in columns if column.left_out is not None}
    sooner = [title for title in sorted(ranks, key=ranks.__getitem__) if ranks[title] < ranks["COMMAND"]]
    words = ", ".join(f"`{title}`" for title in sooner)
    page = " ".join(PAGES["safe_gpu/status/README.md"].read_text().split())
    sentence = f"{words} and the bar of memory are left out before the command is cut"
    assert sentence in page, "the page of status names these columns, the first to go first"


def section(page: str, title: str) -> str:
    return re.split(r"^## ", PAGES[page].read_text().partition(f"\n## {title}\n")[2], flags=re.MULTILINE)[0]


def test_the_reference_has_a_row_for_every_command() -> None:
    first_cells = " ".join(re.findall(r"^\|([^|]*)\|", section(REFERENCE, "Command line"), re.MULTILINE))
    missing = [name for name in api.COMMANDS if not re.search(rf"`(safe-gpu )?{name}\b", first_cells)]
    assert missing == [], f"add a row to the section 'Command line' of {REFERENCE}"


def test_the_reference_has_every_argument_error_and_variable() -> None:
    arguments = set(inspect.signature(safe_gpu.claim_gpus).parameters)
    untold = arguments - named_in_rows(section(REFERENCE, "Python"))
    assert untold == set(), f"add a row to the section 'Python' of {REFERENCE}"
    public = {
        name
        for name, one in vars(errors).items()
        if isinstance(one, type) and issubclass(one, errors.SafeGpuError) and name == one.__name__ and name[0] != "_"
    }
    public.remove("SafeGpuError")  # the base of all: it stands above the table
    untold = public - named_in_rows(section(REFERENCE, "Errors"))
    assert untold == set(), f"add a row to the section 'Errors' of {REFERENCE}"
    code = " ".join(path.read_text() for path in (ROOT / "safe_gpu").rglob("*.py"))
    read = {name for name in re.findall(r"\bSAFE_GPU_[A-Z_]*[A-Z]\b", code) if not name.startswith("SAFE_GPU_TEST_")}
    assert read == set(api.VARIABLES), "the table of settings has the variables that the code names"
    untold = read - named_in_rows(section(REFERENCE, "Environment"))
    assert untold == set(), f"add a row to the section 'Environment' of {REFERENCE}"


def test_the_changelog_names_what_is_new() -> None:
    of_the_older_package = {"nb_gpus", "placeholder_fn", "logger", "debug_sleep"}
    names = set(inspect.signature(safe_gpu.claim_gpus).parameters) - of_the_older_package
    names |= {scheduler.name for scheduler in api.SCHEDULERS} - {"sge"}  # Grid Engine
    names |= {name.removesuffix("Placeholder") for name in safe_gpu.__all__ if name.endswith("Placeholder")}
    changes = PAGES["CHANGELOG.md"].read_text().lower()
    missing = [name for name in names - {"Tensorflow"} if not re.search(rf"\b{name.lower()}\b", changes)]
    assert missing == [], "add them to a line of CHANGELOG.md"


def test_the_first_page_names_every_scheduler() -> None:
    [row] = re.findall(r"^\| \[Batch jobs, launchers\].*", PAGES["README.md"].read_text(), re.MULTILINE)
    missing = [scheduler.name for scheduler in api.SCHEDULERS if scheduler.name not in row.lower()]
    assert missing == [], "add them to the row 'Batch jobs, launchers' of README.md"


def named_in_rows(text: str) -> set[str]:
    """The words in code quotes in the first column of tables."""
    return {name for row in re.findall(r"^\|([^|]*)\|", text, re.MULTILINE) for name in re.findall(r"`(\w+)", row)}


def test_the_table_of_exit_codes_is_that_of_the_command() -> None:
    constants = {**vars(api.commands), **vars(api.arguments)}
    numbers = {value for name, value in constants.items() if name.startswith("EX_")}
    assert len(numbers) > 8
    rows = re.findall(r"^\| ([\d, ]+) \|", section(REFERENCE, "Exit codes"), re.MULTILINE)
    told = {int(number) for row in rows for number in row.split(",")}
    assert numbers - told == set(), f"add a row to the section 'Exit codes' of {REFERENCE}"


ADDITIONS = {
    "a condition of claims": r"max_utilization",
    "a scheduler": r"_CONDOR",
    "a column of status": r'"FAN"|\bfan: str\b',
    "a fact of a GPU": r"power_limit",
    "a command": r'configure_setup|"setup": |from \. import .*\bsetup\b',
    "a check of doctor": r"def modes\(|\bstate\.modes\b",
    "a placeholder for a framework": r"JaxPlaceholder",
    "a driver for a vendor": r"(?<!and )\bintel\b(?! MPI)|INTEL-|_intel\b|LevelZero|level_zero",
}


@pytest.mark.parametrize("row", ADDITIONS)
def test_the_page_says_what_to_touch(row: str) -> None:
    """The files of the package that name what was added last, and no others."""
    (line,) = re.findall(rf"^\| {row} \|(.*)$", PAGES[".github/CONTRIBUTING.md"].read_text(), re.MULTILINE)
    files, _, _ = line.partition(" | ")
    listed = set(re.findall(r"`(safe_gpu/[\w./]+)`", files))
    code = ((path.relative_to(ROOT).as_posix(), path.read_text()) for path in (ROOT / "safe_gpu").rglob("*.py"))
    touched = {name for name, text in code if re.search(ADDITIONS[row], name + text)}
    assert touched == listed, "the row of CONTRIBUTING has the files that name what was added last"


@pytest.mark.parametrize(
    "words",
    [
        "in use by no process that is visible here", "has ended and the driver keeps its memory", "at your limit",
        "the GPU driver", "limits this process",
    ],
)  # fmt: skip
def test_what_the_page_of_symptoms_quotes_is_said(words: str) -> None:
    assert words in PAGES["safe_gpu/TROUBLE.md"].read_text()
    assert any(words in path.read_text() for path in (ROOT / "safe_gpu").rglob("*.py"))


def test_the_page_shows_how_a_claim_flows() -> None:
    """Each name stands in the file beside it."""
    flow = section(".github/CONTRIBUTING.md", "How a claim flows")
    named = re.findall(r"`(\w+)`\s+(?:in\s+)?\(?`(safe_gpu/[\w/]+\.py)`", flow)
    assert len(named) >= 14
    for name, file in named:
        assert re.search(rf"^(def|class) {name}\b", (ROOT / file).read_text(), re.MULTILINE), f"{file} has no {name}"
    assert {file for _, file in named} == set(re.findall(r"safe_gpu/[\w/]+\.py", flow))


def test_on_the_package_index_the_first_page_has_no_link_that_leads_nowhere() -> None:
    script = ROOT / "tools" / "man_page.py"
    if not script.exists():
        pytest.skip("this is not a checkout: there is no tools/ here")
    text = runpy.run_path(str(script))["index_page"]((ROOT / "README.md").read_text())
    assert re.findall(r"\]\((?!https:)[^)]*\)|!\[", text) == []
    assert "(`safe_gpu/schedulers/README.md`)" in text


# What somebody who never saw the project finds on the first page

PAGE = PAGES["README.md"].read_text() if "README.md" in PAGES else ""


def test_what_is_asked_first_is_told_first() -> None:
    titles = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert titles == ["Set-up", "One job", "What is promised", "Which are you?", "Why not …?", "Pages"]
    runs = [block for block in blocks_of("README.md", PAGE) if block.kind in ("run", "runs")]
    found = [block.about or block.language for block in runs]
    assert found == ["main", "test", "in the checkout", "python", "in a job"]


def test_its_blocks_run_in_order_on_a_machine_with_only_python(tmp_path: Path, command: Any) -> None:
    """In one shell: what a block exports or writes is there for the next. Python is saved as the page says."""
    (tmp_path / "bin").mkdir()
    for name in ("bash", "cat", "env", "printenv", "sh", "uname"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or "")
    environment = tmp_path / ".venv" / "bin"
    environment.mkdir(parents=True)
    (environment / "activate").write_text(f"PATH={environment}:$PATH\n")
    for name, target in {"python": sys.executable, "safe-gpu": command.path}.items():
        (environment / name).write_text(f'#!/bin/sh\nexec {shlex.quote(str(target))} "$@"\n')
        (environment / name).chmod(0o755)
    script, blocks = first_page_in_order()
    variables = {**os.environ, "PATH": str(tmp_path / "bin"), "PYTHONPATH": str(ROOT)}
    del variables["SAFE_GPU_DRIVER"]
    words = ["bash", "-euc", script]
    done = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split(f"{MARK}\n")[:-1]
    assert len(printed) == len(blocks) == 3
    for block, output in zip(blocks, printed, strict=True):
        assert same(output, block.output or ""), output


# Words that pages, messages, docstrings and comments avoid, since a plainer one says the same

# Folders and files that have been read through, as patterns below the root of the repository.
READ = ("README.md", "CHANGELOG.md", "safe_gpu/**/*.md", "safe_gpu/**/*.py", "tests/README.md", ".github/*.md")

BANNED = re.compile(
    r"\b(?:whoever|likewise|awake|wakes?|so many|for ever|GPUs will do|(?:is|are|was) not to be had|says? nothing"
    r"|do(?:es)? without(?! safe_gpu)|the usual (?:one|case)|nobody ever|for want of|in good time)\b"
    r"|(?<=[0-9}]) %(?= [a-z]|[,.;:)|]|$)",
    re.IGNORECASE,
)


@pytest.mark.parametrize("pattern", READ)
def test_words_that_a_native_would_not_write(pattern: str) -> None:
    paths = sorted(ROOT.glob(pattern))
    assert paths
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r} in {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in BANNED.finditer(line)
    ]
    assert found == []
