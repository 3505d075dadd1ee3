"""What the GPUs of a host were claimed for in the last day, hour by hour and by user."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from ...wording.text import plural, short_age
from ..history.claims import PastClaim, hours
from ..history.report import ReportRow, free_hours, report
from .markup import Markup, bar, element, joined, listed, table, when

DAY, HOUR, HOURS = 86400.0, 3600.0, 24

_MOST_USERS = 12  # that are listed, those with the most GPU-hours

_USER = ("User", "Claims", "GPU-hours", "Mean wait")


class LastDay(NamedTuple):
    """The use of a host in the day before a moment.

    Attributes:
        gpus: how many GPUs it has.
        claimed: how many of them claims held, on average in each hour, the last one last.
        users: the claims and GPU-hours of each user, the most first.
        warnings: sentences on what of the history could not be read.
    """

    gpus: int
    claimed: Sequence[float]
    users: Sequence[ReportRow]
    warnings: Sequence[str] = ()


def last_day(claims: Sequence[PastClaim], gpus: Collection[str], now: float, warnings: Sequence[str] = ()) -> LastDay:
    """Return the use by these claims of the GPUs with these UUIDs."""
    begins = [now - HOUR * number for number in range(HOURS, 0, -1)]
    claimed = [len(gpus) - free_hours(claims, gpus, begin, begin + HOUR) for begin in begins]
    return LastDay(
        len(gpus), claimed, [row for row in report(claims, (), "", begins[0], now) if row.by == "user"], warnings
    )


def use_part(day: LastDay, now: float) -> Markup:
    """Return the bars of the hours, and the table of the users."""
    bars = []
    for number, value in enumerate(day.claimed):
        height = max(0.5, 40 * value / max(1, day.gpus))  # no hour has no line
        bars.append(element("rect", x=f"{10 * number}", y=f"{40 - height:.2f}", width="9", height=f"{height:.2f}"))
    told = f"GPUs claimed in each hour, of {day.gpus}: {', '.join(f'{value:.1f}' for value in day.claimed)}"
    form = {"viewBox": "0 0 239 40", "preserveAspectRatio": "none", "class": "hours"}
    busiest = element("span", f"at most {max(day.claimed):.0f} GPUs in an hour")
    largest = max((row.gpu_hours_most for row in day.users), default=0.0) or 1.0
    rows = [
        {
            "User": row.key,
            "Claims": str(row.claims),
            "GPU-hours": joined(bar(row.gpu_hours_most / largest), hours(row.gpu_hours_least, row.gpu_hours_most)),
            "Mean wait": "" if row.wait_mean is None else short_age(row.wait_mean),
        }
        for row in day.users[:_MOST_USERS]
    ]
    others = len(day.users) - len(rows)
    return joined(
        element("h3", f"The last day: {sum(day.claimed):.0f} of {day.gpus * HOURS} GPU-hours claimed"),
        element("svg", *bars, role="img", aria_label=told, **form),
        element("p", when(now - DAY, now), busiest, when(now, now), class_="axis"),
        table("GPU-hours by user", _USER, rows, "use"),
        listed([*([f"and {plural(others, 'user')} with less"] if others else []), *day.warnings]),
    )
