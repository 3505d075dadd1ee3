"""The policy file, and command lines of other processes: any text, and none of it on a screen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support import hostile
from support.hostile import TRICK, assert_plain, assert_shown_safely, bounded, examples, refusing, with_examples

import safe_gpu
from safe_gpu.errors import PolicyError
from safe_gpu.host import procfs
from safe_gpu.settings import config as policy

POLICY = """# limits of this host
[default]
max_gpus = 4
max_hold = 2d
default_hold = 8h

[user anna]
max_gpus = unlimited

[group 100]
max_wait = 1h30m
idle_report_after = 30m
"""
DIGITS = "9" * 5000


@with_examples(
    POLICY, "[default]\n" * 6000, "[user " + "x" * 60_000 + "]\nmax_gpus = 1",
    *(POLICY.replace(old, new) for old, new in (
        ("4", DIGITS), ("2d", DIGITS), ("2d", "9" * 400 + "d"), ("2d", "1d" * 9000), ("anna", TRICK), ("100", DIGITS),
        ("max_gpus", TRICK),
    )),
)  # fmt: skip
@examples(30)
@given(hostile.broken_text(POLICY, ("[", "[user ", "]", "=", "[default]", "max_gpus", "\ufeff")))
def test_a_policy(text: str) -> None:
    with bounded(), refusing() as refused:
        parsed = policy.parse(text, "/etc/safe-gpu/policy.ini")
        for uid in (0, 1000):
            limits = policy.limits_of_user(parsed, uid)
            assert limits.max_gpus is None or 0 <= limits.max_gpus < 10**5
        policy.limits_of_this_user(parsed)
    if refused.error is not None:
        assert isinstance(refused.error, PolicyError)
        assert refused.error.line in range(1, len(text.splitlines()) + 1)


@pytest.mark.parametrize("argument", [TRICK, "\udcff" * 9, "x" * 100_000, "\u0301" * 30_000, ""])
def test_command_lines_of_others(argument: str, tmp_path: Path) -> None:
    program = tmp_path / TRICK.replace("/", "")[:30]
    os.symlink(sys.executable, program)
    process = subprocess.Popen([program, "-c", "input()", argument], stdin=subprocess.PIPE)
    with process, bounded():
        command = procfs.command_of(process.pid) or ""
        process.communicate(b"\n", timeout=60)
    assert_plain(command)
    assert len(command) <= 200
    assert_shown_safely(command)


VARIABLES = (b"CUDA_VISIBLE_DEVICES", b"SAFE_GPU_BOUND", b"SAFE_GPU_EXPECT", b"CUDA_DEVICE_ORDER", b"\xff")
VALUES = st.binary(max_size=80).map(lambda value: value.replace(b"\0", b",")) | st.sampled_from(
    [b"", b"0", b"-1", DIGITS.encode(), TRICK.encode(), b"0," * 20_000, b"GPU-\xff", b"[[[[", b"x" * 100_000]
)


@examples(8)
@given(st.dictionaries(st.sampled_from(VARIABLES), VALUES, max_size=3))
@example({b"CUDA_VISIBLE_DEVICES": TRICK.encode()})
@example({b"CUDA_VISIBLE_DEVICES": b"0," * 60_000, b"SAFE_GPU_BOUND": DIGITS.encode()})
@example({b"SAFE_GPU_BOUND": b"[" * 100_000})
def test_environments_of_others(ground: object, environment: dict[bytes, bytes]) -> None:
    with subprocess.Popen(["/bin/cat"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        for gpu in (None, 0):
            with bounded(), refusing():
                report = safe_gpu.placement(process.pid, ordinal=gpu)
                assert_shown_safely(str(report), own=True)
                assert_plain(report.as_dict())
