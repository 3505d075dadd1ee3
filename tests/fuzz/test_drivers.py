"""Whatever nvidia-smi prints and NVML answers: our errors, bounded time and memory, plain text on a screen."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hostile import (
    TEXTS,
    TRICK,
    assert_gpus_shown_safely,
    bounded,
    broken_text,
    examples,
    refusing,
    with_examples,
)

from safe_gpu.drivers import nvidia_smi
from safe_gpu.drivers.nvml import NvmlDriver
from safe_gpu.errors import NoDriverError

HUGE = 0xFFFFFFFF
TEXT_ANSWERS = (
    st.sampled_from([text.replace("\0", "")[:96] for text in TEXTS]) | st.text(max_size=20) | st.just(b"\xff\xfe\x00")
)
NUMBERS = st.sampled_from([0, 1, 2, -1, 63, 4096, 2**31 - 1, HUGE, 2**64 - 1, -(2**63)])
ROWS = st.builds(
    SimpleNamespace,
    pid=st.sampled_from([0, 1, 4711, HUGE]),
    usedGpuMemory=st.sampled_from([0, 1 << 30, None]),
    gpuInstanceId=st.sampled_from([HUGE, 1]),
    computeInstanceId=st.just(HUGE),
)
ANSWERS = {
    **dict.fromkeys(("nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlSystemGetDriverVersion",
                     "nvmlSystemGetProcessName"), TEXT_ANSWERS),
    **dict.fromkeys(("nvmlDeviceGetCount", "nvmlDeviceGetComputeMode", "nvmlDeviceGetDisplayActive",
                     "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId",
                     "nvmlDeviceGetP2PStatus", "nvmlDeviceGetTemperature"), NUMBERS),
    "nvmlDeviceGetMigMode": st.lists(st.sampled_from([0, 1, HUGE]), min_size=2, max_size=2),
    "nvmlDeviceGetMemoryInfo": st.builds(SimpleNamespace, total=NUMBERS, used=NUMBERS, free=NUMBERS),
    "nvmlDeviceGetUtilizationRates": st.builds(SimpleNamespace, gpu=NUMBERS, memory=NUMBERS),
    "nvmlDeviceGetCpuAffinityWithinScope": st.lists(st.sampled_from([0, 1, 2**64 - 1]), max_size=70),
    "nvmlDeviceGetPciInfo": st.builds(SimpleNamespace, busId=st.binary(max_size=32) | st.sampled_from(
        [b"00000000:07:00.0", b"../../../../etc", b"\x1b[2J", b":::", b"a:b:c.d"])),
    "nvmlDeviceGetComputeRunningProcesses_v3": st.lists(ROWS, max_size=4),
}  # fmt: skip
ASKED = [*ANSWERS, "nvmlInit", "nvmlShutdown", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByUUID",
         "nvmlDeviceGetMigDeviceHandleByIndex"]  # fmt: skip
CODES = st.sampled_from([1, 2, 3, 4, 6, 7, 9, 12, 13, 15, 16, 18, 25, 28, 999, 77, 2**31 - 1])


class Code(int):
    """A return code of NVML, in place of an answer."""


@st.composite
def answers(draw: Any) -> dict[str, Any]:
    """Some functions with another answer or a return code, and some that are missing (None)."""
    names = draw(st.lists(st.sampled_from(ASKED), max_size=4, unique=True))
    kinds = {name: ANSWERS.get(name, st.nothing()) | CODES.map(Code) | st.none() for name in names}
    return {name: draw(kind) for name, kind in kinds.items()}


def answering(value: Any) -> Callable[..., Any]:
    def function(*arguments: Any) -> Any:
        if isinstance(value, Code):
            raise pynvml.NVMLError(int(value))
        return value

    return function


SLICED = {"nvmlDeviceGetMigMode": [1, 1]}


@with_examples(
    *({name: value} for name, values in {
        "nvmlDeviceGetCount": [HUGE, -1],
        "nvmlDeviceGetUUID": ["", "GPU-00000000-0000-0000-0000-000000000000", "../../" + TRICK],
        "nvmlDeviceGetName": [TRICK * 3, b"\xff\xfe"],
        "nvmlSystemGetDriverVersion": [TRICK * 3],
        "nvmlDeviceGetMemoryInfo": [SimpleNamespace(total=-1, used=2**70, free=-(2**70))],
        "nvmlInit": [Code(77)],
        "nvmlSystemGetProcessName": [TRICK * 300],
    }.items() for value in values),
    {**SLICED, "nvmlDeviceGetMaxMigDeviceCount": HUGE},
    {**SLICED, "nvmlDeviceGetMigDeviceHandleByIndex": Code(6)},
)  # fmt: skip
@examples(20)
@given(answers())
def test_what_it_answers(fake_gpus: Any, monkeypatch: pytest.MonkeyPatch, answered: dict[str, Any]) -> None:
    fake_gpus.use_nvml_here()
    fake_gpus.process(fake_gpus.uuids[0], 99_999_999, static=True)
    with monkeypatch.context() as patch, bounded(), refusing() as refused:
        for name, value in answered.items():
            if value is None:
                patch.delattr(pynvml, name)
            else:
                patch.setattr(pynvml, name, answering(value))
        driver = NvmlDriver()
        snapshot = driver.detailed(driver.linked(driver.snapshot()))
        driver.usage(snapshot.gpus[:4])
        for gpu in snapshot.gpus[:4]:
            assert driver.cpu_affinity(gpu.uuid, "node") is None or gpu
        driver.close()
        assert_gpus_shown_safely(snapshot)
        assert all(gpu.uuid.strip() for gpu in snapshot.gpus)
    assert refused.error is None or isinstance(refused.error, NoDriverError)


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
