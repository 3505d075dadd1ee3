from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safe_gpu.topology.cpulist import LIMIT, format_cpulist, parse_cpulist, parse_cpumask

LISTS = {
    "0": {0}, "0-3": {0, 1, 2, 3}, "0-1,8,10-11\n": {0, 1, 8, 10, 11}, "0-1\n\0\0\0": {0, 1}, " 2 , 4 ": {2, 4},
    "": set(), "\n": set(),
}  # fmt: skip
MASKS = {
    "f": {0, 1, 2, 3}, "00000000,00000001": {0}, "1,00000000": {32}, "00000001,00000000,00000002\0\0": {1, 64},
    "0": set(), "ff00000000000000": set(range(56, 64)),
}  # fmt: skip
NO_LISTS = (
    "x", "3-1", "0-", "-1", "0--3", "0-4294967295", str(LIMIT), "9" * 5000, "0-3:2", "٣", "(null)", "1 2", None,
)  # fmt: skip
NO_MASKS = ("g", "0x1", "1,,1", "000000000,1", "-1", "f" * 70_000, "1," * 3000 + "1", None)


@pytest.mark.parametrize(
    ("parse", "texts"),
    [(parse_cpulist, {**LISTS, **dict.fromkeys(NO_LISTS)}), (parse_cpumask, {**MASKS, **dict.fromkeys(NO_MASKS)})],
)
def test_lists_and_masks_and_what_is_none(parse: Any, texts: dict[str | None, set[int] | None]) -> None:
    assert {text: parse(text) for text in texts} == texts


@given(st.frozensets(st.integers(0, 2000)))
def test_written_and_read_back(numbers: frozenset[int]) -> None:
    assert parse_cpulist(format_cpulist(numbers)) == numbers


def test_ranges_are_as_short_as_the_kernels() -> None:
    assert format_cpulist([7, 0, 1, 2, 5]) == "0-2,5,7"
    assert format_cpulist(()) == ""
