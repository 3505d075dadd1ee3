"""Whatever nvidia-smi prints, and however much: our errors, in bounded time and memory, and plain text on a screen."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hostile import TRICK, assert_gpus_shown_safely, bounded, broken_text, examples, refusing, with_examples

from safe_gpu.drivers import nvidia_smi
from safe_gpu.errors import NoDriverError

REPORT = Path(__file__).with_name("nvidia_smi.xml").read_text()
WORDS = (
    '<gpu id="00000000:07:00.0">', "<mig_devices>", "<mig_device>", "<processes>", "</processes>", "<process_info>",
    "<fb_memory_usage>", "<uuid>", "<pid>", "<!--", "<![CDATA[", "&amp;", "&#27;", "No devices were found",
    "Unable to determine the device handle for GPU 0000:07:00.0: GPU is lost.  Reboot the system to recover this GPU",
    "Unable to determine the device handle for GPU",
)  # fmt: skip
DIGITS = "9" * 5000


# What is wrong in a report.
REPORTS = {
    "<pid>1</pid>": [f"<pid>{DIGITS}</pid>", "<pid>4294967296</pid>", "<pid>\u0661\u00b2</pid>",
                     "<pid>&#27;[2Jevil</pid>" + "x" * 100_000],
    "3000 MiB": [f"{DIGITS} MiB"],
    "3 %": [f"{DIGITS} %"],
    "550.54.15": [TRICK * 100],
    "NVIDIA A100-SXM4-80GB": [TRICK * 1000],
    "python &amp; co": ["&#27;[2J&#x202e;" * 5000],
    "GPU-00000001": ["GPU-00000000", "GPU-" + "0" * 5000],
    "00000000:0F:00.0": ["00000000:07:00.0", "0:0:" + "f" * 5000, "../..:\x000F:00.0"],
    "</processes>": [""],
    "<processes>": ["<processes>" + "<process_info>" * 100_000],
    "<mig_device>": ["<mig_device>" * 100_000],
    "</nvidia_smi_log>\n": ["</nvidia_smi_log>\n" + "<process_info>" * 100_000],
}  # fmt: skip


@with_examples(
    *((text, 0) for text in (REPORT, "", "<mig_devices>" * 100_000, '<gpu id="00000000:07:00.0">' * 20_000)),
    *((f"No devices were found{more}", 6) for more in ("", TRICK)),
    (f"Failed: {TRICK * 20_000}", 9),
    *((REPORT.replace(old, new, 1), 0) for old, values in REPORTS.items() for new in values),
)
@examples(25)
@given(broken_text(REPORT, WORDS), st.sampled_from([0, 1, 6, 255, -9]))
def test_what_it_prints(monkeypatch: pytest.MonkeyPatch, report: str, code: int) -> None:
    with monkeypatch.context() as patch, bounded(), refusing() as refused:
        patch.setattr(nvidia_smi, "find_program", lambda *names: "nvidia-smi")
        patch.setattr(nvidia_smi, "output_of", lambda *command, **bounds: (code, report, ""))
        driver = nvidia_smi.NvidiaSmiDriver()
        snapshot = driver.detailed(driver.linked(driver.snapshot()))
        driver.usage(snapshot.gpus)
        assert_gpus_shown_safely(snapshot)
    assert refused.error is None or isinstance(refused.error, NoDriverError)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file on PATH that is taken for nvidia-smi."""
    path = tmp_path / "nvidia-smi"
    path.write_text("")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SAFE_GPU_DRIVER", "nvidia-smi")
    return path


@pytest.mark.parametrize(
    "script",
    ["yes", "yes '<gpu id=\"00000000:07:00.0\"><processes>'", "exec cat /dev/zero", "head -c 60000000 /dev/zero",
     "yes >&2", "printf '<gpu id=\"'; exec sleep 600", "exec sleep 600",
     "(sleep 600; yes) & echo '<nvidia_smi_log>'", "trap '' TERM; while :; do sleep 600; done"],
)  # fmt: skip
def test_a_program_that_prints_without_end_or_hangs(script: str, program: Path, eventually: Any) -> None:
    program.write_text(f"#!/bin/sh\n{script}\n")
    driver = nvidia_smi.NvidiaSmiDriver(timeout=1.0)
    with bounded(seconds=20.0, mebibytes=128), refusing() as refused:
        driver.snapshot()
    assert isinstance(refused.error, NoDriverError)
    eventually(lambda: not runs(program))


def runs(program: Path) -> bool:
    """Whether any process runs this script, which is an argument of its shell."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(program).encode() in path.read_bytes():
                return True
    return False


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"#!/nonexistent\n", b"\x00" * 100, b"#!" + b"x" * 5000])
def test_a_file_that_is_no_program(content: bytes, program: Path) -> None:
    program.write_bytes(content)
    with refusing() as refused:
        nvidia_smi.NvidiaSmiDriver(timeout=5.0).snapshot()
    assert isinstance(refused.error, NoDriverError)
    assert "cannot be started" in str(refused.error)
