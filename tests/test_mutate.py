"""The mistakes that ``tools/mutate.py`` makes, and the tests that it chooses for them."""

import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
if not TOOLS.exists():
    pytest.skip("this is not a checkout: there is no tools/ here", allow_module_level=True)
sys.path.insert(0, str(TOOLS))

from mutate import LineMap, mutants  # noqa: E402

SOURCE = '''"""A "<" in words."""
LIMIT = 3
def f(é: int | None, b: int) -> bool:
    with lock:
        go("é", b)
    return min(é, b) < LIMIT and not b
'''


def test_every_mistake_changes_one_place() -> None:
    found = [sorted(set(mutant.apply(SOURCE).splitlines()) - set(SOURCE.splitlines())) for mutant in mutants(SOURCE)]
    assert [line.strip() for lines in found for line in lines] == [
        "LIMIT = 4",
        "if True:",
        "pass",
        "return None",
        "return max(é, b) < LIMIT and not b",
        "return (min(é, b) <= LIMIT) and not b",
        "return (min(é, b) < LIMIT or not b)",
        "return min(é, b) < LIMIT and (b)",
    ]


def test_the_quick_tests_of_its_line_or_of_the_lines_that_use_it() -> None:
    tests = LineMap({"f.py": {"2": [], "6": ["slow", "quick", "failed"]}}, {"slow": 9.0, "quick": 1.0}, {})
    limit, *_, last = mutants(SOURCE)
    for mutant in (limit, last):
        assert tests.tests("f.py", SOURCE, mutant, 100.0) == ["quick", "slow"]
        assert tests.tests("f.py", SOURCE, mutant, 5.0) == ["quick"]
