"""How long a claim waits and how long it will hold its GPUs: what may be said, and what counts where nothing is."""

import inspect
import json
import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.claims import claim

import safe_gpu
from safe_gpu.claim import owner
from safe_gpu.claim.arguments import DEFAULT, UNKNOWN, ClaimOptions, HoldTime, parse_hold_for, parse_timeout
from safe_gpu.errors import UnsatisfiableRequestError
from safe_gpu.schedulers.job import JobContext, current
from safe_gpu.settings.durations import parse_duration

DURATIONS = {
    0.0: "0 0s",
    5.0: "0:00:05",
    900.0: "15m 15min",
    1000.0: "1e3",
    5400.0: "1.5h 1h30m 01:30:00",
    86401.0: "1d1s",
    216000.0: "2d12h 2-12:00:00 2-12",
    217800.0: "2-12:30",
    None: "inf INF infinity forever none",
}


def test_durations() -> None:
    words = [(word, seconds) for seconds, line in DURATIONS.items() for word in line.split()]
    for text, seconds in [*words, (" 10 M ", 600.0), ("90 sec", 90.0), ("1H 30M", 5400.0)]:
        assert parse_duration(text) == seconds
        assert parse_timeout(text, {}, in_batch_job=False) == seconds
        assert parse_timeout(DEFAULT, {"SAFE_GPU_TIMEOUT": text}, in_batch_job=True) == seconds


@pytest.mark.parametrize(
    "text",
    ["", " ", *"soon -1h nan 1w s 1_000 1h30 30m1h 1h1h 1.5h30m -inf 1,5 1:2:3:4 -1:00:00 1--2 1:30 \u0663m".split()],
)
def test_what_is_no_duration_names_itself_and_what_would_be(text: str) -> None:
    with pytest.raises(UnsatisfiableRequestError) as caught:
        parse_duration(text, "SAFE_GPU_TIMEOUT")
    assert caught.value.value == text
    message = str(caught.value)
    assert message.startswith(f"SAFE_GPU_TIMEOUT={text!r} ")
    assert "15m" in message or (text == "1:30" and "write 1h30m or 1m30s" in message)


def test_numbers_are_seconds_and_the_default_fits_where_the_process_runs() -> None:
    for timeout, seconds in ((0, 0.0), (0.25, 0.25), (None, None), (float("inf"), None), (1e300, 1e300)):
        assert parse_timeout(timeout, {"SAFE_GPU_TIMEOUT": "77"}, in_batch_job=True) == seconds
    for text, seconds in (("2m", 120.0), ("inf", None), ("0", 0.0), ("", 300.0)):
        assert parse_timeout(DEFAULT, {"SAFE_GPU_TIMEOUT": text}, in_batch_job=True) == seconds
        assert parse_timeout(DEFAULT, {"SAFE_GPU_TIMEOUT": text}, in_batch_job=False) == (seconds if text else 10.0)
    assert "timeout: 'float | str | DefaultTimeout | None' = DEFAULT" in str(inspect.signature(safe_gpu.claim_gpus))


@pytest.mark.parametrize("timeout", [-0.5, float("nan"), float("-inf"), True, [], b"5", 10**400])
def test_what_is_no_number_of_seconds_is_refused(timeout: object) -> None:
    with pytest.raises(UnsatisfiableRequestError, match="timeout=") as caught:
        parse_timeout(timeout, {}, in_batch_job=False)
    assert caught.value.value is timeout


@pytest.mark.parametrize(("environ", "seconds"), [({}, 10.0), ({"SLURM_JOB_ID": "7"}, 300.0)])
def test_a_claim_waits_so_long_when_nothing_is_said(environ: dict[str, str], seconds: float, monkeypatch) -> None:
    waits: list[float | None] = []

    class Stop(Exception):
        pass

    def acquire(view: object, options: ClaimOptions, claim: object) -> None:
        waits.append(options.timeout)
        raise Stop

    monkeypatch.setattr(owner, "acquire", acquire)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for begin in (safe_gpu.claim_gpus, safe_gpu.GPUOwner):
        with pytest.raises(Stop):
            begin()
    assert waits == [seconds, seconds]


@given(st.floats(min_value=0, max_value=1e6, allow_nan=False), st.sampled_from(["", "s", "m", "h", "d"]))
def test_a_number_with_any_unit_is_what_it_says(number: float, unit: str) -> None:
    factor = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[unit]
    assert parse_duration(f"{number!r}{unit}") == number * factor


# How long it will hold its GPUs


def test_what_is_said_counts_and_the_variable_stands_in_for_it() -> None:
    job = JobContext("slurm", ends=int(time.time()) + 60)
    for said, seconds in ((1, 1.0), (90.5, 90.5), ("2h", 7200.0), (None, None), ("unknown", None), (math.inf, None)):
        assert parse_hold_for(said, {"SAFE_GPU_FOR": "5h"}, job) == HoldTime(seconds, said=True)
    for text, hold in (("20m", HoldTime(1200.0)), ("unknown", HoldTime(None)), ("", HoldTime(end=float(job.ends)))):
        assert parse_hold_for(DEFAULT, {"SAFE_GPU_FOR": text}, job) == hold
    assert parse_hold_for(DEFAULT, {"SAFE_GPU_FOR": ""}, JobContext()) == UNKNOWN
    with pytest.raises(UnsatisfiableRequestError, match=r"SAFE_GPU_FOR='0\.2'"):
        parse_hold_for(DEFAULT, {"SAFE_GPU_FOR": "0.2"}, job)


@pytest.mark.parametrize("said", [0, 0.9, math.nan, True, b"90", [90], "0.5s", "soon", ""])
def test_what_cannot_be(said: Any) -> None:
    with pytest.raises(UnsatisfiableRequestError, match=r"hold_for=") as caught:
        parse_hold_for(said, {}, JobContext())
    assert caught.value.value is said


@pytest.mark.parametrize(("ends_in", "known"), [(86000, True), (87000, False), (-5, False)])
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
        pytest.param(HoldTime(60.0, said=True), 1500.0, 60.0, id="said inside a claim"),
        pytest.param(HoldTime(None, said=True), 1500.0, None, id="said that nobody knows"),
        pytest.param(HoldTime(60.0), 1500.0, 500.0, id="inside a claim it ends with that one"),
        pytest.param(HoldTime(end=1300.0), 1100.0, 100.0, id="a claim in a job"),
        pytest.param(HoldTime(end=1000.5), None, 1.0, id="a second is the least"),
        pytest.param(HoldTime(end=999.0), None, None, id="overdue"),
        pytest.param(UNKNOWN, None, None, id="nothing"),
    ],
)
def test_seconds_from_now(hold: HoldTime, outer_end: float | None, seconds: float | None) -> None:
    assert hold.at(1000.0, outer_end) == seconds


def test_the_entry_says_until_when(ground: Any, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def lasts(**options: Any) -> float | None:
        with claim(**options):
            (entry,) = ground.claims()
            return entry.until and round(entry.until - entry.since)

    assert (lasts(hold_for="1h"), lasts()) == (3600, None)
    monkeypatch.setenv("SAFE_GPU_FOR", "90")
    assert (lasts(), lasts(hold_for=None)) == (90, None)
    done = command.run("run", "--for", "1h30m", "--", "sh", "-c", 'cat "$SAFE_GPU_DIR"/claims/*')
    written = json.loads(done.stdout)
    assert written["until"] - written["since"] == pytest.approx(5400)
