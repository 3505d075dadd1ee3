"""Claims of a real GPU: the driver shows them, CUDA opens what was claimed; placeholders, commands and shares."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import api

import safe_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

IN_MAIN = "owner = claim(uuid)"
IN_THREAD = """
owners = []
thread = threading.Thread(target=lambda: owners.append(claim(uuid)))
thread.start()
thread.join()
owner, = owners
"""


@pytest.mark.parametrize("code", [IN_MAIN, IN_THREAD], ids=["main thread", "another thread"])
def test_a_claim_opens_its_gpu_and_no_other(gpu: Any, claimer: Any, code: str) -> None:
    process = claimer(f"{code}\nsay(owner.gpus[0].uuid, *map(repr, opened()))\nlisten()")
    claimed, first, second = process.hear().split()
    assert claimed == gpu.uuid
    assert api.same_device(first.strip("'"), gpu.uuid)
    assert second == "''", "CUDA sees more than the claimed GPU"
    gpu.expect(process.pid)


def test_a_released_gpu_is_free_while_its_process_lives(gpu: Any, claimer: Any) -> None:
    released = "safe_gpu.release_gpus(); say('released'); listen()"
    first = claimer(f"claim(uuid); say('holds'); listen(); {released}", says="holds")
    first.tell()
    assert first.hear() == "released"
    second = claimer("say(claim(uuid).gpus[0].uuid); listen()")
    assert second.hear() == gpu.uuid
    assert first.process.poll() is None


@pytest.mark.usefixtures("exclusive")
def test_a_claim_is_refused_what_another_holds(gpu: Any, claimer: Any) -> None:
    first = claimer("claim(uuid); say('holds'); listen()", says="holds")
    refused = """
try:
    claim(uuid, timeout=0)
except safe_gpu.NotEnoughGpusError as err:
    say([verdict.pid for verdict in err.verdicts if verdict.gpu.uuid == uuid])
"""
    assert claimer(refused).hear() == f"[{first.pid}]"


def test_a_killed_claim_ends(gpu: Any, claimer: Any) -> None:
    first = claimer("claim(uuid); say('holds'); listen()", says="holds")
    first.kill()
    assert claimer("say(claim(uuid).gpus[0].uuid)").hear() == gpu.uuid


@pytest.mark.usefixtures("exclusive")
def test_several_race_for_one_gpu_and_each_has_it_alone(claimer: Any, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    code = f"""
owner = claim(uuid, timeout=200)
os.mkdir({str(inside)!r})      # fails where another process is inside
opened_now = opened()
os.rmdir({str(inside)!r})
safe_gpu.release_gpus()
say(opened_now[0])
"""
    racers = [claimer(code) for _ in range(5)]
    assert len({racer.hear() for racer in racers}) == 1
    assert [racer.process.wait(60) for racer in racers] == [0] * 5


# Every placeholder, as far as its framework is installed

PLACEHOLDERS = [name for name in safe_gpu.__all__ if name.endswith("Placeholder") and name != "NoPlaceholder"]

CODE = """
try:
    owner = claim(uuid, safe_gpu.{placeholder}())
except safe_gpu.SafeGpuError as err:
    say("failed", str(err).splitlines()[0])
    sys.exit()
say("holds", opened()[0])
listen()
safe_gpu.release_gpus()
say("released")
listen()
"""


@pytest.mark.parametrize("placeholder", PLACEHOLDERS)
def test_a_placeholder_holds_the_gpu_and_lets_it_go(gpu: Any, claimer: Any, placeholder: str) -> None:
    process = claimer(CODE.format(placeholder=placeholder))
    word, _, rest = process.hear().partition(" ")
    is_missing = rest.startswith(f"{placeholder} needs ") or "for CPUs only" in rest
    if word == "failed" and is_missing:
        pytest.skip(f"needs a framework for GPUs: {rest}")
    assert word == "holds", rest
    assert api.same_device(rest, gpu.uuid)
    process.tell()
    assert process.hear() == "released"
    process.kill()
    assert claimer("say(claim(uuid).gpus[0].uuid)").hear() == gpu.uuid


def test_no_placeholder_leaves_cuda_alone(gpu: Any, claimer: Any) -> None:
    claimer("claim(uuid, safe_gpu.NoPlaceholder()); say(CUDA.visible_if_initialized())", says="None")


# In compute mode EXCLUSIVE_PROCESS

CHILD = """
import subprocess
USE = "from safe_gpu.runtimes.cuda import CUDA; print(CUDA.hold(0).uuid)"
def child():
    done = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True)
    return (done.stdout or done.stderr).strip().splitlines()[-1]
"""


def test_a_child_of_a_claim_uses_a_gpu_that_admits_one_process(gpu_for_one_process: Any, claimer: Any) -> None:
    uuid = gpu_for_one_process.uuid
    used = claimer(f"{CHILD}\nclaim({uuid!r})\nsay(child())").hear()
    assert api.same_device(used, uuid)
    refused = claimer(f"{CHILD}\nclaim({uuid!r}, safe_gpu.CudaPlaceholder())\nsay(child())").hear()
    assert "DEVICE_UNAVAILABLE" in refused


# Signs of illness


def test_a_healthy_gpu_shows_no_sign_of_illness(gpu: Any) -> None:
    with api.opened_driver() as driver:
        snapshot = driver.snapshot()
        examined = driver.examined(snapshot, {gpu.uuid}).by_uuid(gpu.uuid)
    assert examined is not None
    print(driver.name, snapshot.driver_version, examined)
    assert examined.illness == ""
    assert examined.is_mig_instance or examined.utilization is not None


def test_what_nvml_answers_where_it_knows_the_recovery_action(gpu: Any) -> None:
    pynvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    field = getattr(pynvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    device = gpu.now()
    if field is None or device.is_mig_instance:
        pytest.skip("needs nvidia-ml-py 12.570 or newer, and a whole GPU")
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        (value,) = pynvml.nvmlDeviceGetFieldValues(handle, [field])
        version = pynvml.nvmlSystemGetDriverVersion()
        try:
            rows = pynvml.nvmlDeviceGetRemappedRows(handle)
        except pynvml.NVMLError_NotSupported:
            rows = None
    finally:
        pynvml.nvmlShutdown()
    print(version, value.nvmlReturn, value.value.uiVal, rows)
    if value.nvmlReturn == 0:
        assert value.value.uiVal == pynvml.NVML_GPU_RECOVERY_ACTION_NONE
    else:
        assert value.nvmlReturn == pynvml.NVML_ERROR_NOT_SUPPORTED or int(version.partition(".")[0]) < 570
    assert rows is None or rows[2:] == (0, 0)


ASKS = """
from safe_gpu.drivers import opened_driver
with opened_driver() as driver:
    kind = type(driver)
asked, genuine = [], kind.examined
def examined(self, snapshot, among=None):
    asked.append(among)
    return genuine(self, snapshot, among)
kind.examined = examined
claim(uuid)
say(*asked[0])
"""


def test_a_claim_asks_for_signs_of_illness_of_its_gpu_alone(gpu: Any, claimer: Any) -> None:
    assert claimer(ASKS).hear() == gpu.uuid


# The commands

SEEN = "from safe_gpu.runtimes.cuda import CUDA; print(*CUDA.visible_in_child())"


@pytest.mark.parametrize("visible_as", ["index", "uuid"])
def test_the_command_of_run_sees_the_claimed_gpu_alone(gpu: Any, command: Any, visible_as: str) -> None:
    done = command.start("run", "--only", gpu.uuid, "--visible-as", visible_as, "--", sys.executable, "-c", SEEN)
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0, err
    (seen,) = out.split()
    assert api.same_device(seen, gpu.uuid)


def test_status_shows_the_claim_and_its_end(gpu: Any, command: Any, claimer: Any, eventually: Any) -> None:
    def shown() -> Any:
        status = command.run("status", "--json")
        assert status.returncode == 0, status.stderr
        return next(one for one in json.loads(status.stdout)["gpus"] if one["uuid"] == gpu.uuid)

    assert shown()["state"] in ("free", "display")
    process = claimer("claim(uuid); say('holds'); listen()", says="holds")
    during = shown()
    assert during["state"] in ("claimed", "display")
    assert during["claim"]["pid"] == process.pid
    process.kill()
    eventually(lambda: shown()["claim"] is None)


def test_a_race_on_this_machine(gpu: Any, command: Any) -> None:
    process = command.start("demo")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    assert "Verdict:" in out
    assert "A race on a simulated host" not in out.partition("Verdict:")[0]


# Two shares on one real card: side by side, with and without the limit of MPS

HOLD = "owner = claim(uuid, share='2GiB'); say(owner.share); listen()"
# Two blocks of 1.5 GiB are more than a share of 2 GiB.
ALLOCATE = """
import ctypes
owner = claim(uuid, share='2GiB')
library = ctypes.CDLL("libcuda.so.1")
held = [ctypes.c_uint64(), ctypes.c_uint64()]
def error(call, *arguments):
    return getattr(library, call)(*arguments)
context = ctypes.c_void_p()
assert error("cuInit", 0) == 0
assert error("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0) == 0
assert error("cuCtxSetCurrent", context) == 0
say(*(error("cuMemAlloc_v2", ctypes.byref(one), ctypes.c_size_t(3 << 29)) for one in held))
listen()
"""
OUT_OF_MEMORY = "2"


@pytest.fixture
def mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """MPS for this test alone."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None or os.geteuid() != 0:
        pytest.skip("needs nvidia-cuda-mps-control and root")
    for name in ("PIPE", "LOG"):
        monkeypatch.setenv(f"CUDA_MPS_{name}_DIRECTORY", str(tmp_path / name.lower()))
        (tmp_path / name.lower()).mkdir()
    subprocess.run([control, "-d"], check=True, timeout=60)
    yield
    subprocess.run([control], input="quit\n", text=True, check=True, timeout=60)


@pytest.mark.usefixtures("exclusive")
def test_two_shares_stand_side_by_side(gpu: Any, claimer: Any) -> None:
    first, second = claimer(HOLD), claimer(HOLD)
    assert [first.hear(), second.hear()] == [str(2 << 30)] * 2
    gpu.expect(first.pid)
    gpu.expect(second.pid)
    whole = "try: claim(uuid, timeout=0)\nexcept safe_gpu.NotEnoughGpusError as err: say(err.verdicts[0].reason)"
    assert "shared by 2 claims" in claimer(whole).hear()


@pytest.mark.usefixtures("exclusive")
def test_without_mps_the_driver_allows_more(gpu: Any, claimer: Any) -> None:
    assert claimer(ALLOCATE).hear() == "0 0"


@pytest.mark.usefixtures("exclusive")
def test_with_mps_the_driver_refuses_more(gpu: Any, mps: None, claimer: Any) -> None:
    assert claimer(ALLOCATE).hear() == f"0 {OUT_OF_MEMORY}"
