"""Durations as people write them, and the default that fits where a process runs."""

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

import safe_gpu
from safe_gpu.claim import owner
from safe_gpu.claim.arguments import DEFAULT, ClaimOptions, DefaultTimeout, default_timeout, parse_timeout
from safe_gpu.errors import UnsatisfiableRequestError
from safe_gpu.settings.durations import parse_duration

DURATIONS = {
    0.0: "0 0s",
    1.5: "1.5",
    5.0: "0:00:05",
    90.0: "90 90s",
    900.0: "15m 15min",
    1000.0: "1e3",
    5400.0: "1.5h 1h30m 01:30:00",
    7200.0: "2h",
    86400.0: "1d",
    86401.0: "1d1s",
    129600.0: "36:00:00",
    216000.0: "2d12h 2-12:00:00 2-12",
    217800.0: "2-12:30",
    None: "inf INF infinity forever none",
}
SPACED = [(" 10 M ", 600.0), ("90 sec", 90.0), ("1H 30M", 5400.0)]


@pytest.mark.parametrize(
    ("text", "seconds"), [*((word, seconds) for seconds, words in DURATIONS.items() for word in words.split()), *SPACED]
)
def test_durations(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds
    assert parse_timeout(text, {}, in_batch_job=False) == seconds
    assert default_timeout({"SAFE_GPU_TIMEOUT": text}, in_batch_job=True) == seconds


NO_DURATIONS = """
soon -1 -1h nan 1w s 1_000 1h30 30m1h 1h1h 1.5h30m infs -inf 1,5 1:2:3:4 1:30: -1:00:00 1--2 1:30 \u0663m
"""


@pytest.mark.parametrize("text", ["", " ", *NO_DURATIONS.split()])
def test_what_is_no_duration_names_itself_and_what_would_be(text: str) -> None:
    with pytest.raises(UnsatisfiableRequestError) as caught:
        parse_duration(text, "SAFE_GPU_TIMEOUT")
    assert caught.value.value == text
    message = str(caught.value)
    assert message.startswith(f"SAFE_GPU_TIMEOUT={text!r} ")
    assert "15m" in message or (text == "1:30" and "write 1h30m or 1m30s" in message)


@pytest.mark.parametrize(
    ("timeout", "seconds"),
    [(0, 0.0), (0.0, 0.0), (12, 12.0), (0.25, 0.25), (None, None), (float("inf"), None), (1e300, 1e300)],
)
def test_numbers_are_seconds(timeout: object, seconds: float | None) -> None:
    for environ in ({}, {"SAFE_GPU_TIMEOUT": "77"}):
        assert parse_timeout(timeout, environ, in_batch_job=True) == seconds


@pytest.mark.parametrize(
    "timeout", [-1, -0.5, float("nan"), float("-inf"), True, False, [], {}, b"5", 10**400, object()]
)
def test_what_is_no_number_of_seconds_is_refused(timeout: object) -> None:
    with pytest.raises(UnsatisfiableRequestError, match="timeout=") as caught:
        parse_timeout(timeout, {}, in_batch_job=False)
    assert caught.value.value is timeout


@pytest.mark.parametrize(("text", "seconds"), [("2m", 120.0), ("inf", None), ("0", 0.0), ("", 300.0)])
def test_the_default_fits_where_the_process_runs(text: str, seconds: float | None) -> None:
    assert parse_timeout(DEFAULT, {"SAFE_GPU_TIMEOUT": text}, in_batch_job=True) == seconds
    assert parse_timeout(DEFAULT, {"SAFE_GPU_TIMEOUT": text}, in_batch_job=False) == (seconds if text else 10.0)


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, 10.0),
        ({"JOB_ID": "7", "SGE_ROOT": "/opt/sge", "SGE_TASK_ID": "undefined"}, 300.0),
        ({"SLURM_JOB_ID": "7"}, 300.0),
        ({"SLURM_JOB_ID": "7", "SAFE_GPU_TIMEOUT": "1h"}, 3600.0),
    ],
)
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
    for claim in (safe_gpu.claim_gpus, safe_gpu.GPUOwner):
        with pytest.raises(Stop):
            claim()
    assert waits == [seconds, seconds]


def test_the_default_is_recognisable_in_help() -> None:
    for signature in (inspect.signature(safe_gpu.claim_gpus), inspect.signature(safe_gpu.GPUOwner)):
        assert isinstance(signature.parameters["timeout"].default, DefaultTimeout)
        assert "timeout: 'float | str | DefaultTimeout | None' = DEFAULT" in str(signature)


@given(st.floats(min_value=0, max_value=1e6, allow_nan=False), st.sampled_from(["", "s", "m", "h", "d"]))
def test_a_number_with_any_unit_is_what_it_says(number: float, unit: str) -> None:
    factor = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[unit]
    assert parse_duration(f"{number!r}{unit}") == number * factor
