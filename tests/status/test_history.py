"""What is made of the lines of a history: claims, GPU-hours, and reports of them by user, week and host."""

import json
import os
import time
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import api
from support.forks import in_child
from support.real import REQUIRED
from support.state import write_for_all

HOUR, DAY, WEEK = 3600.0, 86400.0, 604800.0
KEYS = ("user", "gpu", "job", "host", "day", "week")
MONDAY = time.mktime((2026, 11, 16, 0, 0, 0, 0, 0, -1))


def past(
    pid: int = 1,
    since: float = MONDAY,
    ended: float | None = None,
    seen: float | None = None,
    gpus: tuple[str, ...] = ("GPU-a",),
    **options: Any,
) -> api.PastClaim:
    seen = (ended or since) if seen is None else seen
    return api.PastClaim(pid, since, gpus=gpus, seen=seen, ended=ended, **options)


def test_ends_go_to_their_claims_and_the_narrowest_counts() -> None:
    told = [
        past(1, 10.0),
        api.ClaimEnd(1, 10.0, 20.0, 90.0),
        api.ClaimEnd(1, 10.0, 30.0, 99.0),
        past(2, 10.0, gpus=("GPU-b",)),
        api.ClaimEnd(2, 10.0, 10.0, 99.0),
        api.ClaimEnd(2, 10.0, 50.0, 50.0),
        api.ClaimEnd(3, 10.0, 20.0, 20.0),  # of nobody
        past(1, 10.0, user="forged"),
    ]
    found = {one.pid: one for one in api.merged(told)}
    assert found.keys() == {1, 2}
    assert (found[1].seen, found[1].ended, found[1].user) == (30.0, 99.0, "")
    assert (found[2].seen, found[2].ended) == (50.0, 50.0)


def test_a_claim_without_an_end_ended_before_the_next_on_one_of_its_gpus() -> None:
    found = api.merged([past(1, 10.0, gpus=("a", "b")), past(2, 40.0, gpus=("b",)), past(3, 60.0, gpus=("a",))])
    assert [(one.pid, one.ended) for one in found] == [(1, 40.0), (2, None), (3, None)]


def test_of_a_claim_that_died_what_others_did_on_its_gpus_since_counts_for_nothing() -> None:
    """It was found late. Its GPU was seen held, but by the next claim."""
    late = api.ClaimEnd(1, 10.0, 70.0, 90.0)
    found = api.merged([past(1, 10.0), late, past(2, 40.0), past(3, 60.0, share=1, of=2)])
    assert (found[0].seen, found[0].ended) == (10.0, 40.0)
    found = api.merged([past(1, 10.0, share=1, of=2), late, past(2, 40.0, share=1, of=2), past(3, 60.0)])
    assert (found[0].seen, found[0].ended) == (10.0, 60.0)
    exact = api.merged([past(1, 10.0), api.ClaimEnd(1, 10.0, 70.0, 70.0), past(2, 40.0)])
    assert exact[0].ended == 70.0


def test_a_claim_that_runs_has_no_end_whatever_a_line_says() -> None:
    (one,) = api.merged([past(1, 10.0), api.ClaimEnd(1, 10.0, 20.0, 20.0), past(1, 10.0, seen=99.0, running=True)])
    assert (one.running, one.ended, one.seen) == (True, None, 99.0)


def test_of_too_many_claims_the_last_ones_told_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.status_history, "MOST", 100)
    told = [past(pid, 10.0 + pid, user=f"user {pid}") for pid in range(1, 1001)]
    warnings: list[str] = []
    found = api.merged([*told, past(1, 11.0, running=True)], warnings=warnings)
    assert [one.pid for one in found] == [1, *range(1001 - len(found) + 1, 1001)]
    assert 50 <= len(found) <= 100
    assert found[0].running
    (warning,) = warnings
    assert "the first are left out" in warning


def test_claims_after_the_time_push_out_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """But they tell when one that did not say had ended."""
    monkeypatch.setattr(api.status_history, "MOST", 100)
    warnings: list[str] = []
    later = [past(pid, 20.0 + pid) for pid in range(2, 1000)]
    (one,) = api.merged([past(1, 10.0), *later, api.ClaimEnd(5, 25.0, 26.0, 26.0)], 20.0, warnings)
    assert (one.pid, one.ended, warnings) == (1, 22.0, [])


@pytest.mark.parametrize(
    ("claim", "expected"),
    [
        (past(since=MONDAY - 3600, ended=MONDAY + 3600), (3600, 3600)),
        (past(seen=MONDAY + 60, ended=MONDAY + 3600), (60, 3600)),
        (past(), (0, 2 * DAY)),
        (past(since=1.0, running=True, not_before=MONDAY + 60), (2 * DAY - 60, 2 * DAY - 60)),  # the clock jumped
    ],
)
def test_only_the_time_that_was_asked_for_counts(claim: api.PastClaim, expected: tuple[float, float]) -> None:
    assert api.hours_held(claim, MONDAY, MONDAY + 2 * DAY) == expected


def test_gpu_hours_by_user_gpu_job_and_day() -> None:
    claims = [
        past(1, MONDAY + 23 * 3600, MONDAY + 25 * 3600, gpus=("a", "b"), labels=("0", "1"), user="anna", job="sge:1"),
        past(2, MONDAY + 3600, MONDAY + 7200, MONDAY + 3600, gpus=("b",), user="bert"),
    ]
    rows = {by: [row[:4] for row in api.gpu_hours_by(claims, by, MONDAY, MONDAY + 7 * DAY)] for by in KEYS}
    assert rows == {
        "user": [("anna", 1, 4.0, 4.0), ("bert", 1, 0.0, 1.0)],
        "gpu": [("1 b", 2, 2.0, 3.0), ("0 a", 1, 2.0, 2.0)],
        "job": [("sge:1", 1, 4.0, 4.0), ("(no job)", 1, 0.0, 1.0)],
        "host": [("?", 2, 4.0, 5.0)],
        "day": [("2026-11-16", 2, 2.0, 3.0), ("2026-11-17", 1, 2.0, 2.0)],
        "week": [("2026-11-16", 2, 4.0, 5.0)],
    }


# What is not read


@pytest.fixture
def directory(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(time, "time", lambda: MONDAY + DAY)  # the files are of this month
    (state_dir / api.NAME).mkdir(parents=True)
    for path in (state_dir, state_dir / api.NAME):
        path.chmod(0o1777)
    return state_dir / api.NAME


def entry(pid: int, since: float, gpu: str = "GPU-a") -> bytes:
    """The line of a claim, as a claim writes it."""
    told = {"v": 1, "claim": [pid, since], "uid": 7, "user": "anna", "gpus": [gpu], "labels": ["0"]}
    return json.dumps(told).encode() + b"\n"


TIMES = st.integers(-20, 20).map(lambda hours: MONDAY + hours * 3600 + 0.25 * (hours % 3))
ENDS = st.lists(st.tuples(TIMES, TIMES).map(lambda two: [min(two), max(two) + 0.5]), max_size=2) | TIMES.map(
    lambda end: [[end, end]] * 2
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(TIMES, st.sampled_from("ab"), ENDS), max_size=9), TIMES, st.randoms(use_true_random=False))
def test_a_shorter_time_shows_a_part_of_the_same_claims(
    directory: Path, told: list[tuple[float, str, list[list[float]]]], since: float, random: Random
) -> None:
    """Whatever the order of the lines, and with claims whose end no line tells."""
    lines = []
    for pid, (began, gpu, ends) in enumerate(told, 1):
        lines += [entry(pid, began, gpu), *(api.end_line(pid, began, seen, ended) for seen, ended in ends)]
    if random.random() < 0.5:
        random.shuffle(lines)
    lines = [line[: random.choice([30, 70, 999, 999, 999])] for line in lines]  # for some there was no room
    for name, some in (("2026-10.jsonl", lines[:9]), ("2026-11.jsonl", lines[9:])):
        write_for_all(directory / name, b"".join(some))
    read = b"".join(lines[:9]).splitlines(True) + b"".join(lines[9:]).splitlines(True)
    expected = api.merged(filter(None, map(api.status_history.parse_line, read)), MONDAY + DAY)
    claims, _ = api.claims_between(since, MONDAY + DAY)
    assert claims == [one for one in expected if one.overlaps(since, MONDAY + DAY)]


# Hostile files


GOOD = {"v": 1, "claim": [7, MONDAY], "uid": 7, "user": "anna", "gpus": ["GPU-a"], "labels": ["0"]}


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe",
        b'{"v": 1, "claim": [7, ' + b"9" * 60_000,
        b'{"v": 1, "claim": [true, {}], "gpus": ["a"]}',
        b'{"v": 1, "claim": [7, 5], "ended": [9, [1]]}',
        b"x" * 1_000_000,
        b'{"v": 1, "claim": [7, 1795',  # no room
    ],
)
def test_a_line_of_nonsense_costs_no_other(directory: Path, line: bytes) -> None:
    """One without its end, too, unless it is long."""
    good = json.dumps(GOOD).encode() + b"\n"
    for end in (b"\n", b"")[: 1 + (len(line) < 60_000)]:
        write_for_all(directory / "2026-11.jsonl", good.replace(b"[7,", b"[6,") + line + end + good)
        claims, warnings = api.claims_between(MONDAY, MONDAY + DAY)
        assert ([one.pid for one in claims], warnings) == ([6, 7], [])


def test_a_huge_file_is_read_to_a_bound(directory: Path) -> None:
    good = json.dumps(GOOD).encode() + b"\n"
    write_for_all(directory / "2026-11.jsonl", good)
    os.truncate(directory / "2026-11.jsonl", 1 << 40)
    write_for_all(directory / "2026-11.1.jsonl", good.replace(b"[7,", b"[8,"))
    assert api.LARGEST < 1 << 30
    claims, _ = api.claims_between(MONDAY, MONDAY + DAY)
    assert [one.pid for one in claims] == [7, 8]


@pytest.mark.parametrize("make", [os.mkfifo, lambda file: os.symlink("/etc/passwd", file), None])
def test_a_file_that_cannot_be_read_is_warned_of(directory: Path, make: Any) -> None:
    """Nor a directory that is a link."""
    if make is not None:
        make(directory / "2026-11.jsonl")
    else:
        directory.rmdir()
        directory.symlink_to("/etc")
    claims, (warning,) = api.claims_between(MONDAY, MONDAY + DAY)
    assert (claims, "cannot be read" in warning) == ([], True)


# Reports

GPUS = ("a", "b")


def used(user: str, begin: float, hours: float, gpus: str = "a", **options: Any) -> api.PastClaim:
    """A claim that began so many hours after that Monday, and was released."""
    since = MONDAY + begin * HOUR
    end = since + hours * HOUR
    return past(7, since, end, gpus=tuple(gpus), user=user, host="gpu1", **options)


CLAIMS = [
    used("anna", 0, 2, "ab", waited=60),
    used("anna", 24, 1, waited=0),
    used("ben", 7 * 24 - 1, 2, "b", waited=600),
    used("ben", 7 * 24 + 2, 4, "a"),  # of an older release, or of another client
    used("carla", 7 * 24 + 10, 1, "x", waited=5),  # a GPU that is gone
]
ROWS = [
    api.ReportRow("user", "ben", 2, 6.0, 6.0, None, 1, 600.0, 600),
    api.ReportRow("user", "anna", 2, 5.0, 5.0, None, 2, 30.0, 60),
    api.ReportRow("user", "carla", 1, 1.0, 1.0, None, 1, 5.0, 5),
    api.ReportRow("week", "2026-11-16", 3, 6.0, 6.0, 330.0, 3, 220.0, 600),
    api.ReportRow("week", "2026-11-23", 3, 6.0, 6.0, 331.0, 1, 5.0, 5),
    api.ReportRow("host", "gpu1", 5, 12.0, 12.0, 661.0, 4, 166.25, 600),
]


def test_sums_by_user_week_and_host() -> None:
    assert [*api.report(CLAIMS, GPUS, "gpu1", MONDAY, MONDAY + 2 * WEEK)] == ROWS


def test_free_hours_begin_with_the_history_and_need_the_gpus() -> None:
    rows = api.report(CLAIMS[1:2], GPUS, "gpu1", MONDAY - WEEK, MONDAY + 2 * DAY)
    assert [row.free_gpu_hours for row in rows] == [None, 47.0, 47.0]
    assert {row.free_gpu_hours for row in api.report(CLAIMS, (), "gpu1", MONDAY, MONDAY + WEEK)} == {None}
    by_host = [row for row in api.report(CLAIMS, GPUS, "gpu2", MONDAY, MONDAY + WEEK) if row.by == "host"]
    assert [row.free_gpu_hours for row in by_host] == [None], "a container's name is not the host's"


TEXTS = st.text(max_size=5) | st.sampled_from(["=1+1", "_a", "$\\frac{$", "<!-- -->"])
MANY = st.lists(
    st.builds(
        lambda begin, length, **facts: past(7, MONDAY + begin, MONDAY + begin + length, **facts),
        st.integers(-90, 120),
        st.integers(0, 90),
        user=TEXTS,
        host=TEXTS,
        gpus=st.sampled_from([("a",), ("b",), ("a", "b"), ("a", "a"), ("x",)]),
        waited=st.none() | st.floats(0, 1e11),
    ),
    max_size=12,
)


@given(MANY, st.integers(20, 200))
def test_every_way_to_sum_up_gives_the_same_sum_and_tables_keep_to_the_width(claims: Any, width: int) -> None:
    """Free seconds are those that nobody holds."""
    since, until = MONDAY, MONDAY + 100
    claims = [one for one in claims if one.overlaps(since, until)]
    rows = [*api.report(claims, GPUS, "gpu1", since, until)]
    hours = sum(len(one.gpus) * (min(one.ended, until) - max(one.since, since)) for one in claims) / HOUR
    use = {by: api.gpu_hours_by(claims, by, since, until) for by in KEYS}
    for by in KEYS:
        assert sum(row.most for row in use[by]) == pytest.approx(hours)
        assert all(0 <= row.least <= row.most + 1e-9 for row in use[by])
    for by in ("user", "week", "host"):
        assert sum(row.gpu_hours_most for row in rows if row.by == by) == pytest.approx(hours, abs=0.002)
        waits = [one for one in claims if one.waited is not None and one.since >= since]
        assert sum(row.waits for row in rows if row.by == by) == len(waits)
    taken = {
        (uuid, second)
        for one in claims
        for uuid in one.gpus
        for second in range(int(one.since - since), int(one.ended - since))
    }
    free = sum((uuid, second) not in taken for uuid in GPUS for second in range(100))
    assert api.free_hours(claims, GPUS, since, until) == pytest.approx(free / HOUR)
    tables = [api.status_history.table_of_claims(claims, since, until, width)]
    tables += [api.status_history.table_of_use(use[by], by, width) for by in KEYS]
    assert all(api.display_width(line) <= width for table in tables for line in table)
    assert all(api.display_width(line) <= 60 for line in api.table_of_report(rows, 60))


@given(st.lists(st.floats(0, 1e11), min_size=1))
def test_95_of_100_waited_no_longer(waits: list[float]) -> None:
    found = api.percentile_95(waits)
    assert found in waits
    assert sum(one < found for one in waits) < 0.95 * len(waits) <= sum(one <= found for one in waits)


def test_by_day_the_largest_users_have_a_colour() -> None:
    crowd = [used(f"u{number}", 1, number, waited=number) for number in range(1, 21)]
    days = api.report_by_day([*CLAIMS, *crowd], MONDAY, MONDAY + 2 * DAY)
    assert days.names == ["2026-11-16", "2026-11-17"]
    assert [*days.used] == [f"u{number}" for number in range(20, 11, -1)] + ["others"]
    assert days.used["u20"] == [20.0, 0.0]
    assert days.used["others"] == [4.0 + sum(range(1, 12)), 1.0]
    assert len(days.waits["2026-11-16"]) == 21


@pytest.mark.skipif(find_spec("matplotlib") is None and not REQUIRED, reason="needs matplotlib")
def test_the_picture(tmp_path: Path) -> None:
    names = ["anna", "_ben", "$\\frac{$", "<!-- --> &", "\u4eba\U0001f600"]
    claims = [used(name, 0, number, waited=60 * number) for number, name in enumerate(names, 1)]
    days = api.report_by_day([*claims, used("anna", 24, 1)], MONDAY, MONDAY + 2 * DAY)
    assert days.idle == {}
    (tmp_path / "days").write_text(json.dumps(days))

    def work() -> Any:  # in a child, since matplotlib keeps its fonts open
        from matplotlib.figure import Figure

        figures, save = [], Figure.savefig
        Figure.savefig = lambda self, *args, **how: (figures.append(self), save(self, *args, **how))
        for form in ("svg", "png"):
            api.status_report.draw(str(tmp_path), form, title)
        legends = [axes.get_legend().get_texts() for axes in (figures[0].axes[0], figures[0].axes[-1])]
        texts = [[label.get_text().strip() for label in legend] for legend in legends]
        return [figures[0].get_suptitle(), *texts]

    title = api.status_report.title_of_report("gpu1", MONDAY, MONDAY + 2 * DAY)
    assert title == "GPUs of gpu1, 2026-11-16 to 2026-11-18"
    drawn, labels, of_waits = in_child(work)
    assert (drawn, of_waits) == (title, ["mean", "95 of 100 at most"])
    assert ElementTree.parse(tmp_path / "svg").getroot().tag.endswith("svg")
    assert (tmp_path / "png").read_bytes().startswith(b"\x89PNG")
    assert set(labels) == set(names)
    looked_at = days._replace(idle={days.names[0]: 2.5}, utilization={days.names[0]: 40.0})
    (tmp_path / "days").write_text(json.dumps(looked_at))
    assert set(in_child(work)[1]) == {*names, "without work"}
