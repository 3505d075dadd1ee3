"""Whatever NVML answers, of the types that its functions have: our errors, in bounded time and memory."""

import ctypes
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hostile import TEXTS, TRICK, assert_gpus_shown_safely, bounded, examples, refusing, with_examples

from safe_gpu.drivers import nvml
from safe_gpu.errors import NoDriverError

GPUS = 3
UUID = "GPU-0000000{}-0000-0000-0000-000000000000"
HUGE = 0xFFFFFFFF


class NVMLError(Exception):
    """pynvml's: ``value`` is NVML's return code."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


class PciInfo(ctypes.Structure):
    _fields_ = (("busIdLegacy", ctypes.c_char * 16), ("domain", ctypes.c_uint), ("bus", ctypes.c_uint),
                ("device", ctypes.c_uint), ("busId", ctypes.c_char * 32))  # fmt: skip


class Host:
    """pynvml and the library behind it: what a function answers by its name, else what an idle host answers.

    A number under ``code:NAME`` is a return code. ``rows`` are the (pid, memory) of all process lists.
    """

    NVMLError = NVMLError
    c_nvmlDevice_t = ctypes.c_void_p
    nvmlPciInfo_t = PciInfo
    nvmlMemory_v2 = 2

    def __init__(self, answers: Mapping[str, Any], *, rows: Any = ()) -> None:
        self._answers = answers
        self._rows = [
            SimpleNamespace(pid=pid, usedGpuMemory=memory, gpuInstanceId=HUGE, computeInstanceId=HUGE)
            for pid, memory in rows
        ]
        self.asked = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvml") or name in self._answers.get("absent", ()):
            raise AttributeError(name)
        return lambda *arguments: self._answer(name, arguments)

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        self.asked += 1
        if f"code:{name}" in self._answers:
            raise NVMLError(self._answers[f"code:{name}"])
        if name in self._answers:
            return self._answers[name]
        number = arguments[0] if arguments and isinstance(arguments[0], int) else 0
        valid: dict[str, Any] = {
            "nvmlDeviceGetCount": GPUS,
            "nvmlDeviceGetHandleByIndex": number,
            "nvmlDeviceGetHandleByUUID": 0,
            "nvmlDeviceGetUUID": UUID.format(number),
            "nvmlDeviceGetName": "NVIDIA A100-SXM4-80GB",
            "nvmlDeviceGetPciInfo": PciInfo(b"", 0, 7 + number, 0, f"00000000:{7 + number:02X}:00.0".encode()),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 << 30, used=1 << 20, free=79 << 30),
            "nvmlDeviceGetComputeMode": 0,
            "nvmlDeviceGetDisplayActive": 0,
            "nvmlDeviceGetMigMode": [0, 0],
            "nvmlDeviceGetMaxMigDeviceCount": 7,
            "nvmlDeviceGetMigDeviceHandleByIndex": 100 + 10 * number + (arguments[1] if len(arguments) > 1 else 0),
            "nvmlDeviceGetGpuInstanceId": 1,
            "nvmlDeviceGetComputeInstanceId": 0,
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=0, memory=0),
            "nvmlDeviceGetTemperature": 0,
            "nvmlDeviceGetCpuAffinityWithinScope": [1] + [0] * 63,
            "nvmlDeviceGetP2PStatus": 0,
            "nvmlSystemGetDriverVersion": "550.54.15",
            "nvmlSystemGetProcessName": "python",
            "nvmlInit": None,
            "nvmlShutdown": None,
        }
        if name.endswith("RunningProcesses_v3"):
            return self._rows
        if name not in valid:
            raise NVMLError(13)
        return valid[name]


TEXT_ANSWERS = (
    st.sampled_from([text.replace("\0", "")[:96] for text in TEXTS]) | st.text(max_size=20) | st.just(b"\xff\xfe\x00")
)
NUMBERS = st.sampled_from([0, 1, 2, -1, 63, 4096, 2**31 - 1, HUGE, 2**64 - 1, -(2**63)])
ANSWERS = {
    **dict.fromkeys(("nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlSystemGetDriverVersion",
                     "nvmlSystemGetProcessName"), TEXT_ANSWERS),
    **dict.fromkeys(("nvmlDeviceGetCount", "nvmlDeviceGetComputeMode", "nvmlDeviceGetDisplayActive",
                     "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId",
                     "nvmlDeviceGetP2PStatus"), NUMBERS),
    "nvmlDeviceGetMigMode": st.lists(st.sampled_from([0, 1, HUGE]), min_size=2, max_size=2),
    "nvmlDeviceGetMemoryInfo": st.builds(SimpleNamespace, total=NUMBERS, used=NUMBERS, free=NUMBERS),
    "nvmlDeviceGetUtilizationRates": st.builds(SimpleNamespace, gpu=NUMBERS, memory=NUMBERS),
    "nvmlDeviceGetTemperature": NUMBERS,
    "nvmlDeviceGetCpuAffinityWithinScope": st.lists(st.sampled_from([0, 1, 2**64 - 1]), max_size=70),
    "nvmlDeviceGetPciInfo": st.builds(
        PciInfo, st.binary(max_size=16), *[st.integers(0, HUGE)] * 3, st.binary(max_size=32) |
        st.sampled_from([b"00000000:07:00.0", b"../../../../etc", b"\x1b[2J", b":::", b"a:b:c.d"]),
    ),
}  # fmt: skip
ASKED = sorted([*ANSWERS, "nvmlInit", "nvmlShutdown", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByUUID",
                "nvmlDeviceGetMigDeviceHandleByIndex"])  # fmt: skip
CODES = st.sampled_from([1, 2, 3, 4, 6, 7, 9, 12, 13, 15, 16, 18, 25, 28, 999, -1, 2**31])


@st.composite
def answers(draw: Any) -> dict[str, Any]:
    """Some functions with another answer or a return code, and some that are missing."""
    found: dict[str, Any] = {}
    for name in draw(st.lists(st.sampled_from(ASKED), max_size=4, unique=True)):
        if name in ANSWERS and draw(st.integers(0, 2)):
            found[name] = draw(ANSWERS[name])
        elif draw(st.booleans()):
            found[f"code:{name}"] = draw(CODES)
        else:
            found["absent"] = (*found.get("absent", ()), name)
    return found


ROWS = st.lists(st.tuples(st.sampled_from([0, 1, 4711, HUGE]), st.sampled_from([0, 1 << 30, None])), max_size=4)


@pytest.fixture
def nvml_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Host], nvml.NvmlDriver]:
    """The driver on top of such a host."""

    def open_driver(host: Host) -> nvml.NvmlDriver:
        monkeypatch.setitem(sys.modules, "pynvml", host)  # type: ignore[arg-type]
        monkeypatch.setattr(nvml, "load_file", lambda name: None)
        return nvml.NvmlDriver()

    return open_driver


ANSWERED: dict[str, list[Any]] = {
    "nvmlDeviceGetCount": [HUGE, -1],
    "nvmlDeviceGetUUID": ["", UUID.format(0), "../../" + TRICK],
    "nvmlDeviceGetName": [TRICK * 3, b"\xff\xfe"],
    "nvmlSystemGetDriverVersion": [TRICK * 3],
    "nvmlDeviceGetMemoryInfo": [SimpleNamespace(total=-1, used=2**70, free=-(2**70))],
    "nvmlDeviceGetPciInfo": [PciInfo(b"", *[HUGE] * 3, b"\x1b[2J:0:0"), PciInfo(b"", 0, 0, 0, b"../../..:0:0")],
    "code:nvmlInit": [2**31],
}
SLICED = {"nvmlDeviceGetMigMode": [1, 1]}


@with_examples(
    ({}, []),
    *(({name: value}, []) for name, values in ANSWERED.items() for value in values),
    ({**SLICED, "nvmlDeviceGetMaxMigDeviceCount": HUGE}, []),
    ({**SLICED, "code:nvmlDeviceGetMigDeviceHandleByIndex": 6}, [(1, 1)]),
    ({}, [(HUGE, 2**64 - 2)] * 40),
    ({"nvmlSystemGetProcessName": TRICK * 300}, [(99999999, 1 << 30)]),
)
@examples(20)
@given(answers(), ROWS)
def test_what_it_answers(nvml_of: Any, answered: Any, rows: Any) -> None:
    host = Host(answered, rows=rows)
    with bounded(), refusing() as refused:
        driver = nvml_of(host)
        snapshot = driver.detailed(driver.linked(driver.snapshot()))
        driver.usage(snapshot.gpus[:4])
        for gpu in snapshot.gpus[:4]:
            assert driver.cpu_affinity(gpu.uuid, "node") is None or gpu
        driver.close()
        assert_gpus_shown_safely(snapshot)
    assert refused.error is None or isinstance(refused.error, NoDriverError)
    assert host.asked < 200_000
