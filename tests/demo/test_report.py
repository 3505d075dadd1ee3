"""What a spectator reads: times that were measured, in order, in lines that fit."""

from __future__ import annotations

import io

from safe_gpu.demo import race as report
from safe_gpu.demo.race import Collision, Intruder, RefereeReport
from safe_gpu.demo.racers import Outcome, RaceResult, RacerRequest


def won(pid: int, label: str, began: float, ended: float | None = None) -> Outcome:
    return Outcome(
        pid, RacerRequest(), labels=(label,), uuids=(f"GPU-{label}",), rivals=(-1,), began=began, ended=ended
    )


def refused(pid: int, began: float, words: str = "none is free") -> Outcome:
    return Outcome(pid, RacerRequest(), refused=words, began=began)


def test_what_happened_stands_in_the_order_in_which_it_happened() -> None:
    heat = RaceResult([won(1, "0", 0.3), refused(2, 0.2), refused(3, 0.4), won(4, "1", 0.1)])
    times = [line.split()[0] for line in report.rush_lines(heat)[:3]]
    assert times == ["100.0", "200.0", "300.0"]
    assert "2 processes were refused, the last at 400.0 ms" in report.rush_lines(heat)[1]


def test_no_time_is_told_of_what_was_not_measured() -> None:
    heat = RaceResult([Outcome(1, RacerRequest(), failed="it exited without a report"), won(2, "0", 0.1)])
    assert report.rush_lines(heat) == ["   100.0 ms  process 2       asked for 1 GPU   got GPU 0"]


def test_a_refusal_fits_a_terminal_and_cannot_move_its_cursor() -> None:
    words = "none\n  GPU 0: claimed by process 7 (root, /" + "x" * 200 + "\x1b[2J)\n" + "  GPU 1: free\n" * 20
    lines = report.rush_lines(RaceResult([refused(1, 0.1, words)]))
    assert all(len(line) <= 80 for line in lines)
    assert "\x1b" not in "".join(lines)
    assert len(lines) <= 12
    assert "more lines" in lines[-1]


def test_a_gap_is_from_the_last_of_its_gpus_and_none_where_claims_overlap() -> None:
    first, second = won(1, "0", 0.1, 0.2), won(2, "1", 0.1, 0.4)
    both = Outcome(
        3, RacerRequest(2), labels=("0", "1"), uuids=("GPU-0", "GPU-1"), rivals=(-1, -1), began=0.41, ended=0.5
    )
    assert "median 10 ms, worst 10 ms" in report.turns_lines(RaceResult([first, second, both]))[1]
    assert report.turns_lines(RaceResult([first, won(2, "0", 0.15, 0.3)])) == ["   2 of 2 served."]


def test_collisions_with_one_process_are_one_line() -> None:
    ruling = RefereeReport(
        collisions=2, clashes=(Collision("GPU-0", (2, 1), "marker"), Collision("GPU-0", (3, 1), "marker"))
    )
    lines = report.verdict_lines(ruling, None, None, {"GPU-0": "0"})
    assert lines[0] == "Collision: process 2, 3 got GPU 0 (GPU-0), which process 1 had."
    assert lines[1].startswith("Verdict: 2 collisions in ")


def test_a_visitor_is_named_once() -> None:
    visit = Intruder("GPU-0", (999_999_999,), (1,))
    text = " ".join(report.verdict_lines(RefereeReport(visits=(visit, visit)), None, None, {}))
    assert text.count("process 999999999 came onto GPU-0") == 1


def test_sections_are_numbered() -> None:
    stream = io.StringIO()
    printer = report.Printer(stream)
    printer.section("One:")
    printer.section("Two:")
    assert stream.getvalue() == "\n1. One:\n\n\n2. Two:\n\n"
