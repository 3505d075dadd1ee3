"""Words that pages, messages, docstrings and comments avoid, since a plainer one says the same."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Folders and files that have been read through, as patterns below the root of the repository.
READ = ("README.md", "CHANGELOG.md", "safe_gpu/**/*.md", "safe_gpu/**/*.py", "tests/README.md", ".github/*.md")

BANNED = re.compile(
    r"\bwhoever\b|\blikewise\b|\bawake\b|\bwakes?\b|\bso many\b|\bfor ever\b|\bwhich GPUs will do\b"
    r"|\b(is|are) not to be had\b|\bsays? nothing\b|\bdo(es)? without\b(?! safe_gpu)|\bthe usual one\b|\bnobody ever\b"
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


# Sentences at which readers have stopped: parts of what stood in pages and messages once.
STOPPED = (
    *(
        "would lose their places, and claims",
        "A process without safe_gpu",
        "No cleaner, `rm -rf`",
        "shows by its memory alone",
    ),
    *("means that they do not tell", "where jobs collide", "Dropping the owner", "nothing ends when it is over"),
    *(
        "keeps its meaning when",
        "and once more when the placeholder",
        "A holder who overruns",
        "hold no part of the lock",
    ),
    *(
        "without any check",
        "A Slurm without a gres for GPUs lets",
        "takes the two for one list",
        "HIP counts the second",
    ),
    *(
        "counts promises",
        "fit one sold with",
        "and so promise too",
        "of a user who shares nothing",
        "by its holder's word",
    ),
    "computes on GPUs that may be",
)


@pytest.mark.parametrize("part", STOPPED)
def test_what_readers_stumbled_over_stays_away(part: str) -> None:
    paths = [path for pattern in READ for path in ROOT.glob(pattern)]
    assert [str(path) for path in paths if part in " ".join(path.read_text().split())] == []


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
