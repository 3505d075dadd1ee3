"""Lists of CPUs as the kernel writes them.

Text from sysfs is not trusted. Files of saved trees are padded with NUL bytes, containers may replace files, and a
range like ``0-4294967295`` must not exhaust memory. Malformed text gives None, which callers treat as a missing file.
"""

import re
from collections.abc import Iterable

LIMIT = 1 << 16
"""CPU and node numbers must be below this (Linux supports at most 8,192 CPUs and 1,024 nodes)."""


def parse_cpulist(text: str | None) -> frozenset[int] | None:
    """Return the numbers in a kernel list; None if ``text`` is None or malformed, an empty set if it is blank.

    >>> sorted(parse_cpulist("0-2,8"))
    [0, 1, 2, 8]
    """
    if text is None:
        return None
    numbers: set[int] = set()
    size = 0
    for part in text.replace("\0", "").split(","):
        item = part.strip()
        if not item:
            continue
        ends = re.fullmatch("([0-9]{1,9})(?:-([0-9]{1,9}))?", item)
        if not ends:
            return None
        first = int(ends[1])
        last = int(ends[2] or ends[1])
        size += last - first + 1
        if last < first or last >= LIMIT or size > LIMIT:  # the kernel names no number twice
            return None
        numbers.update(range(first, last + 1))
    return frozenset(numbers)


def parse_cpumask(text: str | None) -> frozenset[int] | None:
    """Return the numbers in a kernel bit mask: 32-bit groups, the highest first. None if ``text`` is None or malformed.

    >>> sorted(parse_cpumask("1,80000003"))
    [0, 1, 31, 32]
    """
    if text is None:
        return None
    groups = [group.strip() for group in text.replace("\0", "").split(",")]
    if groups == [""]:
        return frozenset()
    if len(groups) > 1 and not all(1 <= len(group) <= 8 for group in groups):
        return None
    digits = "".join(group.rjust(8, "0") for group in groups)
    if len(digits) > LIMIT // 4 or not re.fullmatch("[0-9a-fA-F]+", digits):
        return None
    value = int(digits, 16)
    return frozenset(number for number in range(value.bit_length()) if value >> number & 1)


def format_cpulist(numbers: Iterable[int]) -> str:
    """Return the numbers as ranges, in the format of the kernel and numactl; "" for an empty set.

    >>> format_cpulist({0, 1, 2, 8})
    '0-2,8'
    """
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(_range(first, last) for first, last in ranges)


def _range(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first}-{last}"
