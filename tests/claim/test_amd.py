"""Claims of AMD GPUs: on a fake libamdhip64 over a saved sysfs tree, and on simulated hosts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.hip_host import HipHost, without_hip

import safe_gpu

VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
PRELUDE = """
import ctypes, json, os, sys
import safe_gpu
out = {}
def initialize():
    lib = ctypes.CDLL("libamdhip64.so")
    lib.hipGetDeviceCount(ctypes.byref(ctypes.c_int()))
def claim(*arguments, **options):
    try:
        owner = safe_gpu.claim_gpus(*arguments, **{"timeout": 0, "affinity": None, **options})
    except safe_gpu.SafeGpuError as err:
        return [type(err).__name__, str(err)]
    return owner.devices_taken
def variables():
    return [os.environ.get(n) for n in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")]
"""


@pytest.fixture
def host(tmp_path: Path, build_library: Callable[..., Path]) -> HipHost:
    return HipHost(tmp_path, build_library("hip.c", "libamdhip64.so"))


def run(host: HipHost, code: str, **environment: str) -> Any:
    """What `code` leaves in `out`."""
    return json.loads(host.python(f"{PRELUDE}\n{code}\nprint(json.dumps(out))", **environment).splitlines()[-1])


def test_a_claim_holds_its_gpus_and_lets_them_go(host: HipHost) -> None:
    code = """
owner = safe_gpu.claim_gpus(2, timeout=0, affinity=None)
out["taken"], out["set"] = owner.devices_taken, variables()
out["free"] = safe_gpu.get_free_gpus()
proc = os.environ["SAFE_GPU_FSROOT"] + f"/sys/class/kfd/kfd/proc/{os.getpid()}/vram_"
out["held"] = [n for n in range(8) if os.path.exists(proc + str(100 + n))]
safe_gpu.release_gpus()
out["after"] = variables()
"""
    found = run(host, code)
    assert found["taken"] == found["held"] == [0, 1]
    assert found["set"] == [f"{host.uuids[0]},{host.uuids[1]}", "0,1", "0,1"]
    assert found["free"] == ["2", "3", "4", "5", "6", "7"]
    assert found["after"] == [None, None, None]
    assert host.users() == {}


@pytest.mark.parametrize(
    ("environment", "taken"),
    [
        ({"ROCR_VISIBLE_DEVICES": "5,3"}, [3]),
        ({"HIP_VISIBLE_DEVICES": "6"}, [6]),
        ({"CUDA_VISIBLE_DEVICES": "7"}, [7]),
        ({"ROCR_VISIBLE_DEVICES": "5,3", "HIP_VISIBLE_DEVICES": "0"}, [5]),
        ({"ROCR_VISIBLE_DEVICES": "5,3", "HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "1"}, [3]),
    ],
)
def test_inherited_variables_are_a_fence(host: HipHost, environment: dict[str, str], taken: list[int]) -> None:
    code = 'out["taken"] = claim(1); out["set"] = variables(); safe_gpu.release_gpus(); out["after"] = variables()'
    found = run(host, code, **environment)
    assert found["taken"] == taken
    assert found["set"] == [host.uuids[taken[0]], "0", "0"]
    assert found["after"] == [environment.get(name) for name in VARIABLES]


def test_a_fence_that_is_too_narrow_is_named(host: HipHost) -> None:
    error, message = run(host, 'out["error"] = claim(3)', ROCR_VISIBLE_DEVICES="5,3")["error"]
    assert error == "UnsatisfiableRequestError"
    assert "ROCR_VISIBLE_DEVICES=5,3 limits this process to 2 of 8 GPUs" in message


def test_hip_initialised_too_early(host: HipHost) -> None:
    error, message = run(host, 'initialize(); out["error"] = claim(1); out["set"] = variables()')["error"]
    assert error == "CudaInitializedError"
    assert "HIP is already initialised in this process and sees 8 GPU(s)" in message


def test_hip_initialised_with_the_right_gpus(host: HipHost) -> None:
    found = run(host, 'initialize(); out["taken"] = claim(2)', ROCR_VISIBLE_DEVICES="5,3")
    assert found["taken"] == [5, 3]


def test_a_second_claim_is_of_the_same_gpus(host: HipHost) -> None:
    code = """
out["first"] = claim(2); safe_gpu.release_gpus()
out["more"] = claim(3)
out["second"] = claim(2)
"""
    found = run(host, code)
    assert found["first"] == found["second"] == [0, 1]
    assert found["more"][0] == "CudaInitializedError"
    assert "(HipPlaceholder)" in found["more"][1]


def test_another_device_than_the_claimed_one_is_caught(host: HipHost) -> None:
    """GPUs without a UUID are named by index, and HIP has another order than the kernel."""
    for file in host.kfd.glob("topology/nodes/*/properties"):
        file.write_text(re.sub("unique_id .*", "unique_id 0", file.read_text()))
    assert run(host, 'out["taken"] = claim(1); out["set"] = variables(); safe_gpu.release_gpus()') == {
        "taken": [0],
        "set": ["0", "0", "0"],
    }
    host.uuids = ["GPU-XX"] * 8
    host.describe(order=[7, 6, 5, 4, 3, 2, 1, 0])
    error, message = run(host, 'out["error"] = claim(1)')["error"]
    assert error == "WrongDeviceError"
    assert "HIP device 0 is /0000:c8:00.0, but GPU 0 (AMD-0000:c1:00.0-0) was claimed" in message


def test_hip_refuses(host: HipHost) -> None:
    host.fail("hipMalloc", 2)
    error, message = run(host, 'out["error"] = claim(1)')["error"]
    assert error == "PlaceholderError"
    assert "hipMalloc failed with hipErrorOutOfMemory (2)" in message
    assert "HipPlaceholder" in message


def test_a_host_without_hip(host: HipHost, tmp_path: Path) -> None:
    found = run(
        host,
        'out["error"] = claim(1); out["leased"] = claim(1, safe_gpu.NoPlaceholder())',
        LD_LIBRARY_PATH=str(without_hip(tmp_path)),
    )
    assert found["error"][0] == "NoDriverError"
    assert "HIP" in found["error"][1]
    assert found["leased"] == [0]


def test_a_stranger_keeps_a_gpu(host: HipHost) -> None:
    host.process(4_000_000, queues=(100,))
    host.process(4_000_001, vram_102=1 << 20)
    assert run(host, 'out["taken"] = claim(3)')["taken"] == [1, 3, 4]


def test_eight_processes_get_eight_gpus(host: HipHost) -> None:
    code = f"""{PRELUDE}
taken = claim(1, timeout=60)
lib = ctypes.CDLL("libamdhip64.so")
bus = ctypes.create_string_buffer(32)
lib.hipDeviceGetPCIBusId(bus, 32, 0)
print(taken[0], bus.value.decode(), flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", code]
    racers = [
        subprocess.Popen(command, env=host.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    try:
        got = [racer.stdout.readline().split() for racer in racers if racer.stdout]
        assert sorted(number for number, _ in got) == [str(number) for number in range(8)], "the leases"
        assert all(bus == f"0000:{0xC1 + int(number):02x}:00.0" for number, bus in got), "what HIP has opened"
        assert sorted(host.users()) == sorted(host.uuids), "what the kernel shows"
    finally:
        for racer in racers:
            racer.communicate()


# Simulated hosts


def test_a_claim_on_a_simulated_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:mi250x")
    with safe_gpu.GPUOwner(2, timeout=0, affinity=None) as owner:
        assert os.environ["ROCR_VISIBLE_DEVICES"] == ",".join(gpu.uuid for gpu in owner.gpus)
        assert os.environ["HIP_VISIBLE_DEVICES"] == os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert not set(owner.devices_taken) & set(map(int, safe_gpu.get_free_gpus()))
    assert not any(name in os.environ for name in VARIABLES)


def test_partitions_of_one_gpu_are_claimed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:mi300x-cpx")
    with safe_gpu.GPUOwner(3, timeout=0, affinity=None) as owner:
        assert len({gpu.uuid for gpu in owner.gpus}) == 3
        assert len(safe_gpu.get_free_gpus()) == 61


def test_a_nested_claim_on_a_simulated_host() -> None:
    """`run` claims two GPUs, and a program inside it one of them."""
    inner = f"{PRELUDE}\nout['outer'] = variables(); out['taken'] = claim(1); out['inner'] = variables()"
    command = [sys.executable, "-m", "safe_gpu", "run", "-q", "-n", "2", "--affinity", "none", "--", sys.executable]
    environment = {**os.environ, "SAFE_GPU_DRIVER": "simulated:mi250x"}
    code = f"{inner}\nprint(json.dumps(out))"
    child = subprocess.run([*command, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    assert found["outer"][1:] == ["0,1", "0,1"]
    assert found["inner"][0] in found["outer"][0].split(",")
    assert found["inner"][1:] == ["0", "0"]


def command(*arguments: str) -> Any:
    """What `safe-gpu` prints as JSON."""
    call = [sys.executable, "-m", "safe_gpu", *arguments, "--json"]
    return json.loads(subprocess.run(call, check=True, capture_output=True, text=True, timeout=60).stdout)


def test_status_and_affinity_on_a_simulated_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:mi250x")
    with safe_gpu.GPUOwner(1, timeout=0, affinity=None, only=3):
        states = [gpu["state"] for gpu in command("status")["gpus"]]
    assert states == ["free", "free", "free", "claimed", "free", "free", "free", "free"]
    shares = {gpu["index"]: (gpu["numa_node"], gpu["cpus"]) for gpu in command("affinity")["gpus"]}
    assert shares[0] == (3, "48-63,112-127")
    assert shares[4] == (0, "0-15,64-79")


def test_status_of_the_fake_host(host: HipHost) -> None:
    host.process(4_000_000, queues=(101,))
    call = [sys.executable, "-m", "safe_gpu", "status", "--json"]
    child = subprocess.run(call, check=True, env=host.env, capture_output=True, text=True, timeout=60)
    shown = json.loads(child.stdout)
    assert shown["driver"] == "kfd"
    assert [gpu["state"] for gpu in shown["gpus"]][:3] == ["free", "busy", "free"]
    assert [gpu["uuid"] for gpu in shown["gpus"]] == host.uuids


def test_a_waiter_gets_the_gpu_of_a_claim_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:mi250x")
    code = """if True:
        import sys, safe_gpu
        print(safe_gpu.claim_gpus(int(sys.argv[1]), timeout=60, affinity=None).devices_taken, flush=True)
        sys.stdin.read()
    """

    def start(nb_gpus: int) -> subprocess.Popen[str]:
        call = [sys.executable, "-c", code, str(nb_gpus)]
        return subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    holder = start(1)
    assert holder.stdout is not None
    assert holder.stdout.readline().startswith("[")
    waiter = start(8)
    while not command("status")["queue"]:
        assert waiter.poll() is None
    holder.communicate(timeout=60)
    assert waiter.communicate(timeout=60)[0] == "[0, 1, 2, 3, 4, 5, 6, 7]\n"
