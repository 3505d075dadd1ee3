"""The replay of workloads in simulated time, ``tools/replay.py``."""

import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safe_gpu.selection.backfill import BackfillRequest

TOOLS = Path(__file__).parents[1] / "tools"
if not TOOLS.exists():
    pytest.skip("this is not a checkout: there is no tools/ here", allow_module_level=True)
sys.path.insert(0, str(TOOLS))

import replay as tool  # noqa: E402

GPUS = ["GPU-0", "GPU-1"]


def waits(jobs: list[Any], policy: Any, gpus: list[str] = GPUS) -> dict[Any, float]:
    outcome = tool.replay(jobs, gpus, policy, random.Random(1))
    assert len(outcome.waits) == len(jobs)
    return dict(outcome.waits)


def job(arrival: float, size: int, duration: float, hold_for: float = math.inf) -> Any:
    return tool.Job(arrival, BackfillRequest(size, frozenset(GPUS), hold_for), duration)


def test_a_short_job_passes_a_large_one_by_its_word_only() -> None:
    first, large = job(0, 1, 100, 100), job(1, 2, 10)
    for says, policy, expected in (
        (50, tool.ours, 0),
        (math.inf, tool.ours, 100 + 10 - 2),
        (99, tool.ours, 100 + 10 - 2),  # one second too long
        (50, tool.strict, 100 + 10 - 2),
        (math.inf, tool.polling, 0),
    ):
        short = job(2, 1, 50, says)
        found = waits([first, large, short], policy)
        assert found[short] == expected
        assert found[large] == 99


def test_a_holder_that_overruns_stops_the_passing() -> None:
    first, large = job(0, 1, 100, 60), job(1, 2, 10)
    early, late = job(2, 1, 50, 50), job(60, 1, 5, 5)
    found = waits([first, large, early, late], tool.ours)
    assert found[early] == 0
    assert found[late] == 50  # the first job is overdue from 60 on, the large one runs from 100 to 110
    assert found[large] == 99


def test_generated_jobs_need_the_load_that_was_asked_for() -> None:
    gpus = [f"GPU-{number}" for number in range(8)]
    jobs = tool.generated(2000, gpus, 0.06, 0.65, random.Random(1))
    work = sum(one.want.nb * one.duration for one in jobs)
    assert work / (8 * jobs[-1].arrival) == pytest.approx(0.65, rel=0.1)
    assert 0.04 < sum(one.large for one in jobs) / len(jobs) < 0.08


def test_who_says_how_long_waits_less_and_large_jobs_do_not_pay_for_it() -> None:
    gpus = [f"GPU-{number}" for number in range(8)]
    jobs = tool.generated(400, gpus, 0.06, 0.65, random.Random(1))

    def means(jobs: list[Any], policy: Any) -> list[float]:
        found = waits(jobs, policy, gpus)
        groups = [[wait for one, wait in found.items() if one.large is large] for large in (False, True)]
        return [sum(group) / len(group) for group in groups]

    plain, told = tool.saying(jobs, 0.0, random.Random(1)), tool.saying(jobs, 1.0, random.Random(1))
    strict, silent, all_say = means(plain, tool.strict), means(plain, tool.ours), means(told, tool.ours)
    assert silent == strict
    assert all_say[0] < 0.5 * strict[0]
    assert all_say[1] < strict[1]


def test_requests_for_different_gpus_pass_without_saying_anything() -> None:
    gpus = [f"GPU-{number}" for number in range(8)]
    jobs = tool.generated(400, gpus, 0.06, 0.5, random.Random(1), picky=0.5)
    strict, silent = (sum(waits(jobs, policy, gpus).values()) for policy in (tool.strict, tool.ours))
    assert silent < 0.9 * strict


def test_shares_run_side_by_side_and_may_slow_each_other() -> None:
    def share(arrival: float, duration: float) -> Any:
        return tool.Job(arrival, BackfillRequest(1, frozenset(GPUS[:1]), share=40.0), duration)

    jobs = [share(0, 100), share(1, 100), share(2, 10)]
    for slowdown, expected in ((0.0, 100 - 2), (0.3, 1 + 99 * 1.3 - 2)):
        outcome = tool.replay(jobs, GPUS, tool.ours, random.Random(1), slowdown)
        assert [wait for _, wait in outcome.waits] == [0, 0, pytest.approx(expected)]


def test_a_table_of_shares(run: Any) -> None:
    rows = run("--jobs", "60", "--sharing", "70", "--large", "20").splitlines()
    assert [row[:34].strip() for row in rows if "shared" in row] == ["all say --for: shared", "nobody says: shared"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    def output(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["replay.py", *arguments])
        tool.main()
        return capsys.readouterr().out

    return output


def test_a_table_of_a_csv(run: Any, tmp_path: Path) -> None:
    trace = tmp_path / "jobs.csv"
    trace.write_text("arrival,size,duration,hold_for,gpus\n0,1,7200,7200,0\n0,2,3600,,\n1,1,3600,3600,0-1\n")
    rows = {line[:34].strip(): line[34:].split() for line in run(str(trace), "--gpus", "2").splitlines() if line}
    assert rows["safe_gpu, --for as in the file"][:2] == ["0.0", "0.0"]
    assert rows["strict order"][:2] == ["1.5", "3.0"]
    assert rows["strict order"][3] == rows["safe_gpu, --for as in the file"][3] == "2.0"


def test_a_job_that_fits_no_host_is_named(run: Any, tmp_path: Path) -> None:
    trace = tmp_path / "jobs.csv"
    trace.write_text("arrival,size,duration\n0,3,5\n")
    with pytest.raises(SystemExit, match="wants 3 of 2 GPUs"):
        run(str(trace), "--gpus", "2")


def test_a_generated_workload(run: Any) -> None:
    assert run("--jobs", "30", "--large", "10").count("safe_gpu, ") == 3


def test_turns_serve_a_user_between_the_jobs_of_a_sweep() -> None:
    sweep = [job(0, 1, 100)._replace(user=1, duration=100 + number) for number in range(6)]
    other = job(1, 1, 10)._replace(user=2)
    for queue, waited in ((tool.Queue(), 305), (tool.Queue(fair=True), 100), (tool.Queue(most=1), 0)):
        outcome = tool.replay([*sweep, other], GPUS, tool.ours, random.Random(1), queue=queue)
        assert round(dict(outcome.waits)[other]) == waited


def test_the_table_of_a_group(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "GROUP", {"interactive": 12, "small": 12, "8 GPUs": 2, "sweep": 64})
    monkeypatch.setattr(sys, "argv", ["replay.py", "--group"])
    tool.main()
    assert [line[:24] for line in capsys.readouterr().out.splitlines()[-3:]] == [
        "first come, first served",
        "the same with max_gpus =",
        "order = fair            ",
    ]
