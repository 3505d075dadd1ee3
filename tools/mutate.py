#!/usr/bin/env python3
"""Small mistakes put into the package, one at a time: does a test of that line fail?

The first run lists which tests run which lines, in all their processes; that takes some minutes and is kept in --map.
It needs coverage: pip install 'coverage>=7.10'.
"""

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_OUTCOMES = "MUTATE_OUTCOMES"  # the file for them, told to the plugin
_COVERAGE = """[run]
source = safe_gpu
parallel = true
patch = subprocess, _exit
context = ${PYTEST_CURRENT_TEST}
"""
_PHASE = re.compile(r" \((setup|call|teardown)\)$")

_PAIRS: list[tuple[type[ast.AST], type[ast.AST]]] = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot)),
    *((ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.BitAnd, ast.BitOr)),
]
_OTHER = dict(_PAIRS) | {second: first for first, second in _PAIRS}
_OTHER_NAME = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Mutant(NamedTuple):
    """A text in place of that between two (line, column) pairs; columns count bytes, as in ``ast``."""

    start: tuple[int, int]
    end: tuple[int, int]
    new: str

    def apply(self, source: str) -> str:
        """Return the source with the mistake."""
        lines = source.encode().splitlines(keepends=True)
        first, last = self.start[0] - 1, self.end[0] - 1
        lines[first : last + 1] = [lines[first][: self.start[1]] + self.new.encode() + lines[last][self.end[1] :]]
        return b"".join(lines).decode()

    def describe(self, source: str) -> str:
        """Return the line, before and after."""
        before, after = (text.splitlines()[self.start[0] - 1].strip() for text in (source, self.apply(source)))
        return f"{self.start[0]}: {before}  ->  {after}"


def mutants(source: str) -> list[Mutant]:
    """Return every mutant of a module, in the order of its lines."""
    found = []
    for node in _code(ast.parse(source)):
        for new in _mistakes(node):
            end = node.items[-1].context_expr if isinstance(node, ast.With) else node
            found.append(Mutant((node.lineno, node.col_offset), (end.end_lineno, end.end_col_offset), new))
    return sorted(set(found))


def _code(node: ast.AST) -> Iterator[Any]:
    """Yield what is run; annotations, assertions and what is for type checkers are not."""
    if isinstance(node, ast.Assert) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _code(child)


def _mistakes(node: Any) -> Iterator[str]:
    def changed(**fields: Any) -> str:
        other = copy.copy(node)
        for name, value in fields.items():
            setattr(other, name, value)
        return ast.unparse(other) if isinstance(node, ast.stmt) else f"({ast.unparse(other)})"

    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OTHER:
        yield changed(ops=[_OTHER[type(node.ops[0])]()])
    elif isinstance(node, ast.BoolOp | ast.BinOp | ast.AugAssign) and type(node.op) in _OTHER:
        yield changed(op=_OTHER[type(node.op)]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield repr(node.value + (100 if isinstance(node.value, float) else 1))
    elif isinstance(node, ast.Name) and node.id in _OTHER_NAME:
        yield _OTHER_NAME[node.id]
    elif isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield "pass"
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield "return None"
    elif isinstance(node, ast.With) and not any(item.optional_vars for item in node.items):
        yield "if True"


class LineMap(NamedTuple):
    """Which tests run which line of a file, the seconds that each passing test takes, and each file's CRC then."""

    lines: dict[str, dict[str, list[str]]]
    seconds: dict[str, float]
    checksums: dict[str, int]

    def tests(self, file: str, source: str, mutant: Mutant, budget: float) -> list[str]:
        """Return the tests of a mutant, the quick ones first, of so many seconds in all; at least one."""
        lines = set(range(mutant.start[0], mutant.end[0] + 1)) | _lines_that_use(source, mutant.start[0])
        tests = {test for line in lines for test in self.lines.get(file, {}).get(str(line), ())} & self.seconds.keys()
        chosen: list[str] = []
        for test in sorted(tests, key=self.seconds.__getitem__):
            budget -= self.seconds[test]
            if chosen and budget < 0:
                break
            chosen.append(test)
        return chosen


def _lines_that_use(source: str, line: int) -> set[int]:
    """Return the lines with the names that a line of a module or class assigns: it runs before any test."""
    tree = ast.parse(source)
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    for node in (node for body in bodies for node in body):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.lineno <= line <= (node.end_lineno or 0):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {getattr(one, "id", "") for target in targets for one in ast.walk(target)}
            used = (one for one in ast.walk(tree) if getattr(one, "id", getattr(one, "attr", None)) in names)
            return {one.lineno for one in used if hasattr(one, "lineno")}
    return set()


def make_map(tests: list[str], processes: int) -> LineMap:
    """Run these tests once under coverage."""
    import coverage

    with tempfile.TemporaryDirectory(prefix="safe-gpu-mutants-") as directory:
        tree = copy_tree(Path(directory) / "tree")
        (tree / ".coveragerc").write_text(_COVERAGE)
        outcomes = Path(directory) / "outcomes"
        pytest = ["-m", "pytest", "-q", "-n", str(processes), "-p", "mutate", "-p", "no:cacheprovider", *tests]
        environment = {_OUTCOMES: str(outcomes), "COVERAGE_FILE": f"{directory}/data/x"}
        os.mkdir(f"{directory}/data")
        os.chmod(f"{directory}/data", 0o1777)
        _python(tree, "-m", "coverage", "run", *pytest, PYTHONPATH=f"{tree}:{tree}/tools", **environment)
        data = coverage.CoverageData(f"{directory}/data/x")
        for part in Path(directory, "data").iterdir():
            other = coverage.CoverageData(str(part))
            with suppress(coverage.CoverageException):  # of a process that was killed while it wrote
                other.read()
                data.update(other)
        lines = {
            str(Path(file).relative_to(tree)): {
                str(line): sorted({_PHASE.sub("", context) for context in contexts} - {""})
                for line, contexts in data.contexts_by_lineno(file).items()
            }
            for file in data.measured_files()
        }
        checksums = {file: zlib.crc32((tree / file).read_bytes()) for file in lines}
        return LineMap(lines, json.loads(outcomes.read_text()), checksums)


def copy_tree(to: Path) -> Path:
    """Copy the files that git knows, or would."""
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listing.stdout.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def _python(tree: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        start_new_session=True,  # so that a mistake in whom to signal ends no more than its tests
    )


def survives(tree: Path, file: str, source: str, mutant: Mutant, tests: Iterable[str]) -> bool:
    """Return whether all these tests pass in a tree with the mutant."""
    (tree / file).write_text(mutant.apply(source))
    (tree / "chosen").write_text("\n".join(tests))
    try:
        done = _python(tree, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "60", "@chosen")
    finally:
        (tree / file).write_text(source)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", metavar="FILE", help="of the package")
    parser.add_argument("-n", "--number", type=int, default=20, help="mutants to draw of each file (default 20)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default 1)")
    parser.add_argument("--map", type=Path, default=Path(".mutants.json"), help="made where it is missing")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="those that the map is made of (default all)")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tests for a mutant (default 60)")
    parser.add_argument("-j", "--processes", type=int, default=2, help="side by side (default 2)")
    options = parser.parse_args()
    if not options.map.exists():
        options.map.write_text(json.dumps(make_map(options.tests, options.processes)))
    tests = LineMap(*json.loads(options.map.read_text()))
    words: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="safe-gpu-mutants-") as directory:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.processes):
            trees.put(copy_tree(Path(directory) / str(number)))

        def judge(drawn: tuple[str, str, Mutant]) -> tuple[str, str]:
            file, source, mutant = drawn
            chosen = tests.tests(file, source, mutant, options.budget)
            tree = trees.get()
            try:
                word = "NO TEST"
                if chosen:
                    word = "SURVIVED" if survives(tree, file, source, mutant, chosen) else "killed"
            finally:
                trees.put(tree)
            return word, f"{word:8} {len(chosen):4} tests  {file}:{mutant.describe(source)}"

        drawn = []
        for file in options.files:
            source = (ROOT / file).read_text()
            if zlib.crc32(source.encode()) != tests.checksums.get(file):
                parser.error(f"{file} is not as it was when {options.map} was made: remove that, or name other --tests")
            every = mutants(source)
            sample = random.Random(options.seed).sample(every, min(options.number, len(every)))
            drawn += [(file, source, mutant) for mutant in sorted(sample)]
        with ThreadPoolExecutor(options.processes) as pool:
            for word, line in pool.map(judge, drawn):
                print(line, flush=True)
                words[word] += 1
    print(f"{len(drawn)} mutants: " + ", ".join(f"{count} {word}" for word, count in words.most_common()))
    return 0 if words["killed"] == len(drawn) else 1


# As a plugin of pytest (-p mutate), where the map is made.

_seconds: dict[str, float] = {}
_failed: set[str] = set()


def pytest_runtest_setup(item: Any) -> None:
    import coverage

    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(item.nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration
    if not report.passed:
        _failed.add(report.nodeid)


def pytest_sessionfinish(session: Any) -> None:
    if not hasattr(session.config, "workerinput"):
        passed = {test: seconds for test, seconds in _seconds.items() if test not in _failed}
        Path(os.environ[_OUTCOMES]).write_text(json.dumps(passed))


if __name__ == "__main__":
    raise SystemExit(main())
