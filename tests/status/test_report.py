"""``history --report``: sums by user, week and host, by tables, by counting seconds, and as a picture."""

import json
import time
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.forks import in_child
from support.real import REQUIRED

from safe_gpu.status.history import PastClaim
from safe_gpu.status.report import ReportRow, free_hours, percentile_95, report, report_by_day, table_of_report
from safe_gpu.wording.text import display_width

HOUR, DAY, WEEK = 3600.0, 86400.0, 604800.0
MONDAY = time.mktime((2026, 11, 16, 0, 0, 0, 0, 0, -1))
GPUS = ("a", "b")


def past(user: str, begin: float, hours: float, gpus: str = "a", **options: Any) -> PastClaim:
    """A claim that began so many hours after that Monday, and was released."""
    since = MONDAY + begin * HOUR
    end = since + hours * HOUR
    return PastClaim(7, since, user=user, host="gpu1", gpus=tuple(gpus), seen=end, ended=end, **options)


CLAIMS = [
    past("anna", 0, 2, "ab", waited=60),
    past("anna", 24, 1, waited=0),
    past("ben", 7 * 24 - 1, 2, "b", waited=600),
    past("ben", 7 * 24 + 2, 4, "a"),  # of an older release, or of another client
    past("carla", 7 * 24 + 10, 1, "x", waited=5),  # a GPU that is gone
]
ROWS = [
    ReportRow("user", "ben", 2, 6.0, 6.0, None, 1, 600.0, 600),
    ReportRow("user", "anna", 2, 5.0, 5.0, None, 2, 30.0, 60),
    ReportRow("user", "carla", 1, 1.0, 1.0, None, 1, 5.0, 5),
    ReportRow("week", "2026-11-16", 3, 6.0, 6.0, 330.0, 3, 220.0, 600),
    ReportRow("week", "2026-11-23", 3, 6.0, 6.0, 331.0, 1, 5.0, 5),
    ReportRow("host", "gpu1", 5, 12.0, 12.0, 661.0, 4, 166.25, 600),
]


def test_sums_by_user_week_and_host() -> None:
    assert [*report(CLAIMS, GPUS, "gpu1", MONDAY, MONDAY + 2 * WEEK)] == ROWS


def test_free_hours_begin_with_the_history_and_need_the_gpus() -> None:
    rows = report(CLAIMS[1:2], GPUS, "gpu1", MONDAY - WEEK, MONDAY + 2 * DAY)
    assert [row.free_gpu_hours for row in rows] == [None, 47.0, 47.0]
    assert {row.free_gpu_hours for row in report(CLAIMS, (), "gpu1", MONDAY, MONDAY + WEEK)} == {None}
    by_host = [row for row in report(CLAIMS, GPUS, "gpu2", MONDAY, MONDAY + WEEK) if row.by == "host"]
    assert [row.free_gpu_hours for row in by_host] == [None], "a container's name is not the host's"


def test_the_table_has_one_unit_in_a_column() -> None:
    assert [*table_of_report(ROWS, 80)] == [
        "USER   CLAIMS  GPU-HOURS  MEAN WAIT (MIN)  95% WAIT (MIN)",
        "ben         2       6.00             10.0            10.0",
        "anna        2       5.00              0.5             1.0",
        "carla       1       1.00              0.1             0.1",
        "",
        "WEEK        CLAIMS  GPU-HOURS  FREE GPU-HOURS  MEAN WAIT (MIN)  95% WAIT (MIN)",
        "2026-11-16       3       6.00          330.00              3.7            10.0",
        "2026-11-23       3       6.00          331.00              0.1             0.1",
        "",
        "HOST  CLAIMS  GPU-HOURS  FREE GPU-HOURS  MEAN WAIT (MIN)  95% WAIT (MIN)",
        "gpu1       5      12.00          661.00              2.8            10.0",
    ]


TEXTS = st.text(max_size=5) | st.sampled_from(["=1+1", "_a", "$\\frac{$", "<!-- -->"])
MANY = st.lists(
    st.builds(
        lambda begin, length, **facts: PastClaim(
            7, MONDAY + begin, seen=MONDAY + begin + length, ended=MONDAY + begin + length, **facts
        ),
        st.integers(-90, 120),
        st.integers(0, 90),
        user=TEXTS,
        host=TEXTS,
        gpus=st.sampled_from([("a",), ("b",), ("a", "b"), ("a", "a"), ("x",)]),
        waited=st.none() | st.floats(0, 1e11),
    ),
    max_size=12,
)


@given(MANY)
def test_all_of_it_is_in_each_sum_and_free_seconds_are_those_that_nobody_holds(claims: list[PastClaim]) -> None:
    since, until = MONDAY, MONDAY + 100
    claims = [one for one in claims if one.overlaps(since, until)]
    rows = [*report(claims, GPUS, "gpu1", since, until)]
    hours = sum(len(one.gpus) * (min(one.ended or 0, until) - max(one.since, since)) for one in claims)
    for by in ("user", "week", "host"):
        assert sum(row.gpu_hours_most for row in rows if row.by == by) == pytest.approx(hours / HOUR, abs=0.002)
        assert sum(row.waits for row in rows if row.by == by) == sum(
            one.waited is not None and one.since >= since for one in claims
        )
    taken = {
        (uuid, second)
        for one in claims
        for uuid in one.gpus
        for second in range(int(one.since - since), int((one.ended or 0) - since))
    }
    free = sum((uuid, second) not in taken for uuid in GPUS for second in range(100))
    assert free_hours(claims, GPUS, since, until) == pytest.approx(free / HOUR)
    assert all(display_width(line) <= 60 for line in table_of_report(rows, 60))


@given(st.lists(st.floats(0, 1e11), min_size=1))
def test_95_of_100_waited_no_longer(waits: list[float]) -> None:
    found = percentile_95(waits)
    assert found in waits
    assert sum(one < found for one in waits) < 0.95 * len(waits) <= sum(one <= found for one in waits)


def test_by_day_the_largest_users_have_a_colour() -> None:
    crowd = [past(f"u{number}", 1, number, waited=number) for number in range(1, 21)]
    days = report_by_day([*CLAIMS, *crowd], MONDAY, MONDAY + 2 * DAY)
    assert days.names == ["2026-11-16", "2026-11-17"]
    assert [*days.used] == [f"u{number}" for number in range(20, 11, -1)] + ["others"]
    assert days.used["u20"] == [20.0, 0.0]
    assert days.used["others"] == [4.0 + sum(range(1, 12)), 1.0]
    assert len(days.waits["2026-11-16"]) == 21


@pytest.mark.skipif(find_spec("matplotlib") is None and not REQUIRED, reason="needs matplotlib")
def test_the_picture(tmp_path: Path) -> None:
    names = ["anna", "_ben", "$\\frac{$", "<!-- --> &", "\u4eba\U0001f600"]
    claims = [past(name, 0, number, waited=60 * number) for number, name in enumerate(names, 1)]
    days = report_by_day([*claims, past("anna", 24, 1)], MONDAY, MONDAY + 2 * DAY)
    (tmp_path / "days").write_text(json.dumps(days))

    def work() -> Any:  # in a child, since matplotlib keeps its fonts open
        from matplotlib.figure import Figure

        from safe_gpu.status.report import draw

        figures, save = [], Figure.savefig
        Figure.savefig = lambda self, *args, **how: (figures.append(self), save(self, *args, **how))
        for form in ("svg", "png"):
            draw(str(tmp_path), form)
        use, wait = figures[0].axes
        bars = [[(float(bar.get_y()), float(bar.get_height())) for bar in users] for users in use.containers]
        labels = [label.get_text() for label in use.get_legend().get_texts()]
        return bars, labels, [float(line.get_ydata()[0]) for line in wait.get_lines()]

    bars, labels, waits = in_child(work)
    assert ElementTree.parse(tmp_path / "svg").getroot().tag.endswith("svg")
    assert (tmp_path / "png").read_bytes().startswith(b"\x89PNG")
    assert bars == [
        [(0, 5), (0, 0)], [(5, 4), (0, 0)], [(9, 3), (0, 0)], [(12, 2), (0, 0)], [(14, 1), (0, 1)],
    ]  # fmt: skip
    assert {label.strip() for label in labels} == set(names)
    assert waits == [3.0, 5.0]
