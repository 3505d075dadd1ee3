"""Whatever NVML answers, of the types that its functions have: our errors, in bounded time and memory."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hostile import TEXTS, TRICK, assert_gpus_shown_safely, bounded, examples, refusing, with_examples

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
