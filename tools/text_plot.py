"""A plot of growth in characters, on logarithmic scales."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

__all__ = ["plot"]

_MARKS = "*o+x#@"


def plot(
    series: Mapping[str, Sequence[tuple[float, float]]], *, across: str, up: str, width: int = 56, height: int = 12
) -> str:
    """The lines of a plot of points (x, y) with x > 0 and y > 0; others are left out.

    Both axes are logarithmic: what grows with x to the power of k is a straight line, and where it starts and ends says
    by how much it grew.

    Args:
        series: name -> points; each name gets a mark, those drawn later cover earlier ones.
        across, up: what the axes are.

    >>> print(plot({"square": [(1, 1), (10, 100)]}, across="n", up="s", width=8, height=3))
        100 |       *
         10 |
          1 |*
            +--------
             1     10
    s over n, both logarithmic: * square
    """
    points = {name: [(x, y) for x, y in given if x > 0 and y > 0] for name, given in series.items()}
    everything = [point for given in points.values() for point in given]
    if not everything:
        return f"{up} over {across}: nothing to plot"
    left, right = min(x for x, _ in everything), max(x for x, _ in everything)
    low, high = min(y for _, y in everything), max(y for _, y in everything)
    rows = [[" "] * width for _ in range(height)]
    for mark, given in zip(_MARKS, points.values(), strict=False):
        for x, y in given:
            rows[height - 1 - _place(y, low, high, height)][_place(x, left, right, width)] = mark
    lines = []
    for number, row in enumerate(rows):
        shown = number in (0, height - 1) or (height < 5 and number == height // 2)
        value = high * (low / high) ** (number / (height - 1))
        label = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
        lines.append(f"{label if shown else '':>7} |{''.join(row)}".rstrip())
    lines.append(f"{'':7} +{'-' * width}")
    ends = f"{left:.4g}", f"{right:.4g}"
    lines.append(f"{'':9}{ends[0]}{ends[1]:>{width - len(ends[0])}}")
    marks = ", ".join(f"{mark} {name}" for mark, name in zip(_MARKS, points, strict=False))
    return "\n".join([*lines, f"{up} over {across}, both logarithmic: {marks}"])


def _place(value: float, low: float, high: float, size: int) -> int:
    if high <= low:
        return 0
    return round(math.log(value / low) / math.log(high / low) * (size - 1))
