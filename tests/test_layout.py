"""The rooms of the package: few doors between them, imports point downward and never in a circle, one idea a file.

Every import counts: at the top of a module, inside a function, and those that only type checkers see.
"""

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import safe_gpu

ROOT = Path(safe_gpu.__file__).parent
CHECKOUT = Path(__file__).parents[1]
FILES = sorted(ROOT.rglob("*.py"))

# From the top down. A room imports from itself and from lower floors, not from the others on its own.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"", "__main__", "safe_gpu"}),  # "" is the package itself
    frozenset({"cli"}),
    frozenset({"engines", "doctor", "demo"}),
    frozenset({"claim"}),
    frozenset({"status", "affinity"}),
    frozenset({"selection", "drivers"}),
    frozenset({"coordination", "runtimes", "schedulers", "topology"}),
    frozenset({"settings"}),
    frozenset({"errors", "wording"}),
    frozenset({"host", "gpus"}),
)
FLOOR = {room: len(FLOORS) - number for number, rooms in enumerate(FLOORS) for room in rooms}


def module_of(path: Path) -> str:
    """``claim/owner.py`` is "claim.owner", ``claim/__init__.py`` is "claim", the package itself ""."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = frozenset(map(module_of, FILES))


def room_of(module: str) -> str:
    return module.partition(".")[0]


def imports(source: str, module: str, *, is_package: bool) -> Iterator[str]:
    """The modules of this package that a source names in its import statements."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    here = ["safe_gpu", *filter(None, package)]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (within(alias.name) for alias in node.names if alias.name.split(".")[0] == "safe_gpu")
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            target = ".".join([*base, *filter(None, [node.module])])
            if target.split(".")[0] == "safe_gpu":
                for alias in node.names:
                    # The package is loaded before any module of it, and its version stands there at once.
                    if (target, alias.name) != ("safe_gpu", "__version__"):
                        yield within(f"{target}.{alias.name}")


def within(name: str) -> str:
    """The module that a dotted name leads to: itself, or the one that defines its last part."""
    inside = name.partition(".")[2]
    return inside if inside in MODULES else inside.rpartition(".")[0]


@cache
def graph() -> dict[str, set[str]]:
    return {
        module_of(path): set(imports(path.read_text(), module_of(path), is_package=path.name == "__init__.py"))
        for path in FILES
    }


def trouble_with_text(source: str) -> list[str]:
    """What keeps a module from being one idea, by its text."""
    first = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0].removesuffix(" Pure.")
    found = (
        []
        if re.fullmatch(r"[^.]((?!\. )[\s\S])*\.", first)
        else [f"its docstring does not begin with one sentence: {first}"]
    )
    lines = ["", *source.splitlines(), ""]
    around = zip(lines, lines[1:], lines[2:], strict=False)
    return [
        *found,
        *(f"a section begins: {line}" for above, line, below in around if line[:2] == "# " and not above + below),
    ]


def private_imports(source: str) -> list[str]:
    """The private names that a module imports from others of the package."""
    froms = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    own = [node for node in froms if node.level or (node.module or "").partition(".")[0] == "safe_gpu"]
    return [alias.name for node in own for alias in node.names if re.match("_(?!_)", alias.name)]


def private_patches(source: str) -> list[str]:
    """The private names that a test puts something else in the place of."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not re.search(
            r"\b(setattr|delattr|patch|object)$", ast.unparse(node.func)
        ):
            continue
        for argument in node.args[:2]:
            name = argument.value if isinstance(argument, ast.Constant) else None
            if isinstance(name, str) and re.search(r"(^|\.)_(?!_)\w+$", name):
                found.append(name)
    return found


def test_every_module_is_one_idea() -> None:
    found = {str(path): trouble_with_text(path.read_text()) for path in FILES}
    assert {path: told for path, told in found.items() if told} == {}


@pytest.mark.parametrize(
    "source",
    [
        "x = 1",
        '"""Takes a lock. It then asks the driver."""',
        '"""Takes a lock"""',
        '"""Takes a lock."""\n\n# What a lease says\n\nx = 1',
    ],
)
def test_several_ideas_are_noticed(source: str) -> None:
    assert len(trouble_with_text(source)) == 1
    assert trouble_with_text('"""A lock (v1.2),\nfor a host. Pure.\n\nMore. Of it."""\n\n# Why.\nx = 1') == []


def test_private_names_stay_at_home() -> None:
    assert {module_of(path): names for path in FILES if (names := private_imports(path.read_text()))} == {}
    assert private_imports("from .lease import _INNER, Lease\nfrom safe_gpu import _one, __version__") == [
        "_INNER",
        "_one",
    ]


def test_tests_patch_no_private_name() -> None:
    """What a test sets is public, and says what it is. Builds that are broken on purpose are no tests."""
    tests = [*(CHECKOUT / "tests").rglob("test_*.py"), *(CHECKOUT / "tests").rglob("conftest.py")]
    assert {str(path): names for path in tests if (names := private_patches(path.read_text()))} == {}
    source = 'monkeypatch.setattr("safe_gpu.claim.polls._RECENT", 1)\npatch.object(doors, "_bound")\nsetattr(a, "b", 1)'
    assert private_patches(source) == ["safe_gpu.claim.polls._RECENT", "_bound"]


def test_every_room_has_its_floor() -> None:
    assert {room_of(module) for module in MODULES} == set(FLOOR)


def test_imports_point_downward() -> None:
    upward = [
        f"{module or 'safe_gpu'} imports {target or 'safe_gpu'}"
        for module, targets in graph().items()
        for target in sorted(targets)
        if room_of(module) != room_of(target) and FLOOR[room_of(module)] <= FLOOR[room_of(target)]
    ]
    assert upward == []


def test_the_page_shows_every_floor() -> None:
    page = (CHECKOUT / "tests" / "README.md").read_text().partition("```\n")[2].partition("```")[0]
    shown = [frozenset(re.split(" {3,}", line)[0].split()) for line in page.splitlines()]
    assert shown == [rooms - {""} for rooms in FLOORS]


def test_no_modules_import_each_other() -> None:
    TopologicalSorter(graph()).prepare()  # its CycleError names them


def test_every_import_is_seen() -> None:
    """In each place where one may stand, whatever way it is written."""
    source = """
import safe_gpu.errors
from typing import TYPE_CHECKING
from . import entry
from .entry import Entry
from .. import host, __version__
from ..drivers import open_driver
from safe_gpu.claim import owner
if TYPE_CHECKING:
    from ..gpus.devices import Gpu
def lazily():
    from ..cli.parser import Parser
    from .. import claim_gpus
"""
    assert set(imports(source, "coordination.queue", is_package=False)) == {
        "errors", "coordination.entry", "host", "drivers", "claim.owner", "gpus.devices", "cli.parser", "",
    }  # fmt: skip
    assert set(imports("from . import entry\nfrom ..errors import X", "coordination", is_package=True)) == {
        "coordination.entry",
        "errors",
    }


def test_every_folder_says_what_it_is_for() -> None:
    folders = [path for path in FILES if path.name == "__init__.py"]
    assert [path for path in folders if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_the_top_of_the_repository_is_tidy() -> None:
    """Whatever else somebody leaves there has a better place."""
    if shutil.which("git") is None or not (CHECKOUT / ".git").exists():
        pytest.skip("this is not a git checkout")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=CHECKOUT, capture_output=True, text=True, timeout=60)
    if listing.returncode:
        pytest.skip(f"git does not list its files: {listing.stderr.strip()}")
    top = {name.partition("/")[0] for name in listing.stdout.split("\0")[:-1]}
    assert {name for name in top if not name.startswith(".")} == {
        "safe_gpu", "tests", "tools", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE",
    }  # fmt: skip
