"""Words that pages, messages, docstrings and comments avoid, since a plainer one says the same."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

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


@pytest.mark.parametrize(
    "text", ["waits for ever", "Whoever comes", "it says nothing", "at most 10 % asked for", "f'{x} %, or'", "so many"]
)
def test_such_words_are_found(text: str) -> None:
    assert BANNED.search(text)


@pytest.mark.parametrize("text", ["10% of", "number % 100 + 1", "say % args", "without it", "forever", "(%s % (a, b))"])
def test_others_are_not(text: str) -> None:
    assert not BANNED.search(text)


_NO_VERB = frozenset("A An How The Those What When Where Whether Which Who Why Returns Yields".split())


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {text.splitlines()[0]}"
        for path in sorted(ROOT.glob("safe_gpu/**/*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and not any("property" in ast.unparse(one) for one in node.decorator_list)  # it is documented as an attribute
        and (text := ast.get_docstring(node) or "")
        and text.split()[0] in _NO_VERB
    ]
    assert found == []
