"""How long a claim will probably hold its GPUs: what may be said, what is said by default, and where it is written."""

import json
import math
import time
from typing import Any

import pytest

from safe_gpu import NoPlaceholder, UnsatisfiableRequestError, claim_gpus
from safe_gpu.claim.arguments import DEFAULT, UNKNOWN, HoldTime, parse_hold_for
from safe_gpu.schedulers.job import JobContext, current

NO_JOB = JobContext()


@pytest.mark.parametrize(
    ("said", "seconds"), [(1, 1.0), (90.5, 90.5), ("2h", 7200.0), (None, None), ("unknown", None), (math.inf, None)]
)
def test_what_is_said_counts(said: Any, seconds: float | None) -> None:
    environ = {"SAFE_GPU_FOR": "5h"}
    assert parse_hold_for(said, environ, JobContext("slurm", ends=int(time.time()) + 60)) == HoldTime(
        seconds, said=True
    )


@pytest.mark.parametrize("said", [0, 0.9, -5, math.nan, True, b"90", [90], "0", "0.5s", "soon", "-90", ""])
def test_what_cannot_be(said: Any) -> None:
    with pytest.raises(UnsatisfiableRequestError, match=r"hold_for=") as caught:
        parse_hold_for(said, {}, NO_JOB)
    assert caught.value.value is said


def test_the_variable_stands_in_for_it() -> None:
    job = JobContext("slurm", ends=int(time.time()) + 60)
    assert parse_hold_for(DEFAULT, {"SAFE_GPU_FOR": "20m"}, job) == HoldTime(1200.0)
    assert parse_hold_for(DEFAULT, {"SAFE_GPU_FOR": "unknown"}, job) == HoldTime(None)
    assert parse_hold_for(DEFAULT, {"SAFE_GPU_FOR": ""}, NO_JOB) == UNKNOWN
    with pytest.raises(UnsatisfiableRequestError, match=r"SAFE_GPU_FOR='0\.2'"):
        parse_hold_for(DEFAULT, {"SAFE_GPU_FOR": "0.2"}, job)


@pytest.mark.parametrize(
    ("ends_in", "known"),
    [(3600, True), (86000, True), (87000, False), (-5, False)],
    ids=["soon", "day", "late", "past"],
)
def test_a_batch_job_ends_where_its_scheduler_says(ends_in: int, known: bool) -> None:
    ends = int(time.time()) + ends_in
    hold = parse_hold_for(DEFAULT, {}, current({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(ends)}))
    assert hold == HoldTime(end=ends if known else None)


def test_a_pbs_job_ends_a_walltime_after_its_session_began(child: Any) -> None:
    code = (
        "import os, time\n"
        "from safe_gpu.claim.arguments import DEFAULT, parse_hold_for\n"
        "from safe_gpu.schedulers.job import current\n"
        "say(parse_hold_for(DEFAULT, {}, current()).end)\n"
    )
    began = time.time()
    job = child(code, env={"PBS_JOBID": "12.server", "PBS_WALLTIME": "3600"}, start_new_session=True)
    end = float(job.hear())
    assert began + 3600 - 1 <= end <= time.time() + 3600


@pytest.mark.parametrize(
    ("hold", "outer_end", "seconds"),
    [
        pytest.param(HoldTime(60.0, said=True), None, 60.0, id="said"),
        pytest.param(HoldTime(60.0, said=True), 1500.0, 60.0, id="said inside a claim"),
        pytest.param(HoldTime(None, said=True), 1500.0, None, id="said that nobody knows"),
        pytest.param(HoldTime(60.0), None, 60.0, id="by the variable"),
        pytest.param(HoldTime(60.0), 1500.0, 500.0, id="inside a claim it ends with that one"),
        pytest.param(HoldTime(end=1300.0), None, 300.0, id="a job"),
        pytest.param(HoldTime(end=1300.0), 1100.0, 100.0, id="a claim in a job"),
        pytest.param(HoldTime(end=1000.5), None, 1.0, id="a second is the least"),
        pytest.param(HoldTime(end=999.0), None, None, id="overdue"),
        pytest.param(UNKNOWN, None, None, id="nothing"),
    ],
)
def test_seconds_from_now(hold: HoldTime, outer_end: float | None, seconds: float | None) -> None:
    assert hold.at(1000.0, outer_end) == seconds


# Where it is written


def entry(ground: Any) -> Any:
    """The claim that was made last."""
    return ground.claims()[-1]


def test_the_entry_says_until_when(ground: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with claim_gpus(2, NoPlaceholder(), affinity=None, hold_for="1h"):
        assert entry(ground).until == pytest.approx(entry(ground).since + 3600)
    with claim_gpus(1, NoPlaceholder(), affinity=None):
        assert entry(ground).until is None
    monkeypatch.setenv("SAFE_GPU_FOR", "90")
    with claim_gpus(1, NoPlaceholder(), affinity=None):
        assert entry(ground).until == pytest.approx(entry(ground).since + 90)
    with claim_gpus(1, NoPlaceholder(), affinity=None, hold_for=None):
        assert entry(ground).until is None


def test_run_says_it_for_its_command(ground: Any, command: Any) -> None:
    done = command.run("run", "--for", "1h30m", "--", "sh", "-c", 'cat "$SAFE_GPU_DIR"/claims/*')
    written = json.loads(done.stdout)
    assert written["until"] - written["since"] == pytest.approx(5400)
