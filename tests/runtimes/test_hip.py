"""HIP asked through a fake libamdhip64, in processes of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import cuda_host
from support.hip_host import HipHost, without_hip


@pytest.fixture
def host(tmp_path: Path, build_library: Callable[..., Path]) -> HipHost:
    return HipHost(tmp_path, build_library("hip.c", "libamdhip64.so"), count=2)


def run(host: HipHost, code: str, **environment: str) -> Any:
    return cuda_host.run(f"import ctypes\n{code}", {**host.env, **environment})


def shown(host: HipHost, number: int) -> str:
    return f"{host.uuids[number]}/0000:{0xC1 + number:02x}:00.0"


def test_loading_does_not_initialise(host: HipHost) -> None:
    assert run(host, "HIP.load(); result = [HIP.visible_if_initialized(), HIP.shown_at(0)]") == [None, None]


def test_variables_count_at_first_use_only(host: HipHost) -> None:
    code = """
library = HIP.load()
os.environ["ROCR_VISIBLE_DEVICES"] = "1,0"
library.initialize()
os.environ["ROCR_VISIBLE_DEVICES"] = "0"
result = [HIP.visible_if_initialized(), HIP.shown_at(1), HIP.shown_at(2)]
"""
    assert run(host, code) == [[shown(host, 1), shown(host, 0)], shown(host, 0), ""]


def test_memory_shows_on_the_gpu_until_it_is_freed(host: HipHost) -> None:
    code = """
memory = HIP.hold(1)
file = os.environ["SAFE_GPU_FSROOT"] + f"/sys/class/kfd/kfd/proc/{os.getpid()}/vram_101"
held = int(open(file).read())
current = ctypes.c_int(-1)
HIP.load().call("hipGetDevice", ctypes.byref(current))
memory.release(); memory.release()
result = [memory.uuid, held > 0, int(open(file).read()), current.value]
"""
    assert run(host, code) == [shown(host, 1), True, 0, 0]


def test_a_forked_child_is_told(host: HipHost) -> None:
    error, message = run(host, "HIP.hold(0)" + cuda_host.in_child("HIP.visible_if_initialized()"))
    assert error == "CudaInitializedError"
    assert "spawn" in message


def test_an_open_device_without_hip(host: HipHost) -> None:
    code = 'os.open(os.environ["SAFE_GPU_FSROOT"] + "/dev/kfd", os.O_RDWR); result = HIP.visible_if_initialized()'
    error, message = run(host, code)
    assert error == "CudaInitializedError"
    assert "/dev/kfd" in message


@pytest.mark.parametrize(("variable", "value"), [("ROCR_VISIBLE_DEVICES", ""), ("HIP_VISIBLE_DEVICES", "1")])
def test_a_child_is_asked(host: HipHost, variable: str, value: str) -> None:
    code = f"result = [HIP.visible_in_child({{**os.environ, '{variable}': '{value}'}}), HIP.visible_if_initialized()]"
    assert run(host, code) == [[shown(host, int(value))] if value else [], None]


def test_a_gpu_is_tried_in_a_child(host: HipHost) -> None:
    code = """
from safe_gpu.drivers.kfd import KfdDriver
HIP.try_gpu(KfdDriver().snapshot().gpus[1], 0, None)
result = HIP.visible_if_initialized()
"""
    assert run(host, code, ROCR_VISIBLE_DEVICES="0") is None
    host.fail("hipMalloc", 999)
    error, message = run(host, code)
    assert error == "NoDriverError"
    assert "hipMalloc" in message


def test_a_library_without_uuids(host: HipHost, build_library: Callable[..., Path]) -> None:
    host.library = build_library("hip.c", "libamdhip64.so", "-DOLD")
    code = """
from safe_gpu.drivers.kfd import KfdDriver
gpus = KfdDriver().snapshot().gpus
HIP.is_same("", gpus[0])
result = [[HIP.is_same(one, gpu) for gpu in gpus] for one in HIP.visible_in_child()]
"""
    assert run(host, code) == [[True, False], [False, True]]


def test_no_library(host: HipHost, tmp_path: Path) -> None:
    error, message = run(host, "HIP.load()", LD_LIBRARY_PATH=str(without_hip(tmp_path)))
    assert error == "NoDriverError"
    assert "libamdhip64.so" in message


def first_run(host: HipHost) -> list[str]:
    """What the script says on the fake host."""
    script = Path(__file__).parents[2] / "tools/first_run_amd.py"
    if not script.exists():
        pytest.skip("this is not a checkout")
    text = script.read_text().replace("PATIENCE = 10.0", "PATIENCE = 0.1")
    code = """
import sys
try:
    exec(sys.argv[1], {"__name__": "__main__"})
except SystemExit as end:
    print("exit", end.code)
"""
    return host.python(code, text).splitlines()


def test_the_first_run_script(host: HipHost) -> None:
    """All is as expected, but that killed processes stay in the fake tree, and HIP works in forked children."""
    lines = first_run(host)
    different = [line.removeprefix("DIFFERS").strip() for line in lines if line.startswith("DIFFERS")]
    assert different == [
        "a child that is forked after HIP has started cannot use it",
        *(f"GPU {number}: the process is gone None s after its SIGKILL" for number in range(2)),
    ]
    assert lines[-1] == "exit 3"
    assert len([line for line in lines if line.startswith("as expected")]) == 2 + 1 + 2 * 2 + 2 + 3 + 3 * 2
    copies = [line.partition("]: ")[2] for line in lines if "copy of HIP" in line]
    assert copies == ["[True, 2, 2]"] * 2


def test_the_first_run_script_sees_what_differs(host: HipHost) -> None:
    """HIP in another order, a UUID of another kind, a GPU that HIP calls integrated, and memory of nobody."""
    host.describe(order=[1, 0])
    host.fail("hipDeviceGetUuid", 1)
    (host.root / "hip_integrated").write_text("101\n")
    (host.pci / "0000:c2:00.0/mem_info_vram_used").write_text(f"{5 << 30}\n")
    text = "\n".join(line for line in first_run(host) if line.startswith("DIFFERS"))
    for words in ("GPU 1: 5368709120 bytes in use", "HIP shows", "hipDeviceGetUuid writes", "integrated graphics"):
        assert words in text
