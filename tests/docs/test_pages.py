"""The pages as pages: links resolve, README stays short, and nothing installs an older release by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from safe_gpu.settings import VARIABLES

MOST_WORDS = 1800


def prose(text: str) -> str:
    """A page without code blocks, tables, comments and the targets of links."""
    text = re.sub(r"^\s*```.*?^\s*```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", text)


def anchor(heading: str) -> str:
    """The name by which a heading is linked to."""
    words = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
    return words.strip().replace(" ", "-")


def anchors(text: str) -> set[str]:
    without_code = re.sub(r"^\s*```.*?^\s*```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return {anchor(line.lstrip("# ")) for line in without_code.splitlines() if line.startswith("#")}


def test_links_resolve(page: str, pages: dict[str, Path]) -> None:
    text = pages[page].read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_with_links(text)):
        if "://" in target:
            continue
        path, _, fragment = target.partition("#")
        file = (pages[page].parent / path).resolve() if path else pages[page]
        assert file.exists(), f"{page}: {target}"
        if fragment:
            assert fragment in anchors(file.read_text()), f"{page}: {target}"


def prose_with_links(text: str) -> str:
    return re.sub(r"^\s*```.*?^\s*```$", "", text, flags=re.MULTILINE | re.DOTALL)


def test_every_page_is_linked_from_the_first(pages: dict[str, Path]) -> None:
    text = pages["README.md"].read_text()
    for page in pages:
        if page != "README.md":
            assert f"({page}" in text, f"README.md does not link {page}"


def test_the_first_page_is_short(pages: dict[str, Path]) -> None:
    words = prose(pages["README.md"].read_text()).split()
    assert len(words) <= MOST_WORDS


def test_words_are_those_of_the_field(page: str, pages: dict[str, Path]) -> None:
    words = re.findall(r"\b(?:whoever|likewise|awake|wakes|so many)\b", pages[page].read_text(), re.IGNORECASE)
    assert not words


def test_files_that_pages_name_exist(page: str, pages: dict[str, Path], root: Path) -> None:
    for name in re.findall(r"`((?:tools|tests|safe_gpu)/[\w./-]+)`", pages[page].read_text()):
        assert (root / name).exists(), f"{page}: {name}"


def test_nothing_is_installed_by_the_name_of_the_older_release(pages: dict[str, Path], root: Path) -> None:
    sources = [path for folder in ("safe_gpu", "tools", "tests") for path in (root / folder).rglob("*.py")]
    for path in [*pages.values(), *sources]:
        for line in path.read_text().splitlines():
            if path != Path(__file__):
                assert not re.search(r"pip install.* '?safe-gpu", line), f"{path}: {line}"


@pytest.mark.parametrize("name", ["main", "test"])
def test_the_two_commands_are_one_line_each(pages: dict[str, Path], blocks: Any, name: str) -> None:
    (block,) = [block for block in blocks if (block.kind, block.about) == ("run", name)]
    assert block.page == "README.md"
    assert block.text.count("\n") == 1


def test_the_variables_in_the_table_exist(pages: dict[str, Path]) -> None:
    for path in pages.values():
        for name in re.findall(r"\bSAFE_GPU_[A-Z_]+\b", path.read_text()):
            assert name in VARIABLES, f"{path}: {name}"


def test_the_table_of_status_has_every_key(pages: dict[str, Path], desk: Any, scenes: Any) -> None:
    scenes["busy"](desk)
    desk.background("safe-gpu run -n 8 -- ./train", until="waiting for 8 GPUs")
    status = json.loads(desk.shell("safe-gpu status --json"))
    table = pages["safe_gpu/status/README.md"].read_text()
    parts = [status, *status["gpus"], *status["queue"]]
    for gpu in status["gpus"]:
        parts += [gpu["claim"] or {}, *gpu["processes"]]
    for key in {key for part in parts for key in part}:
        assert re.search(rf"`(?:\w+\[\]\.)?{key}(?:\[\][^`]*)?`", table), key
    assert f"`schema` | {status['schema']};" in table


def test_the_table_of_exit_codes_is_that_of_the_command(pages: dict[str, Path]) -> None:
    from safe_gpu.cli import commands, parser

    constants = {**vars(commands), **vars(parser)}
    numbers = {value for name, value in constants.items() if name.startswith("EX_")}
    assert len(numbers) > 8
    section = pages["README.md"].read_text().partition("## Exit codes")[2]
    told = {int(number) for row in re.findall(r"^\| ([\d, ]+) \|", section, re.MULTILINE) for number in row.split(",")}
    assert numbers <= told
