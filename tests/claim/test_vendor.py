"""Claims on a host with GPUs of both vendors: each has GPUs of one."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import safe_gpu
from safe_gpu.claim.functions import wait_for_gpus
from safe_gpu.claim.view import HostView
from safe_gpu.drivers.simulated import SimulatedDriver
from safe_gpu.gpus.devices import HostSnapshot, vendor_of
from safe_gpu.selection.request import Selection

UUIDS = {
    vendor: [gpu.uuid for gpu in SimulatedDriver("two-vendors", "/nowhere", vendor=vendor).idle.gpus]
    for vendor in ("nvidia", "amd")
}
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:two-vendors")


def claim(nb_gpus: int = 1, **options: Any) -> safe_gpu.GPUOwner:
    return safe_gpu.GPUOwner(nb_gpus, timeout=0, affinity=None, **options)


def visible() -> list[str | None]:
    return [os.environ.get(name) for name in VISIBLE]


PRINT = "import json, os; print(json.dumps({n: v for n, v in os.environ.items() if n.endswith('VISIBLE_DEVICES')}))"


def variables(command: Any, *arguments: str) -> dict[str, str]:
    """The variables of a command under `safe-gpu`."""
    child = command.run(*arguments, "--", sys.executable, "-c", PRINT)
    assert child.returncode == 0, child.stderr
    found: dict[str, str] = json.loads(child.stdout)
    return found


def test_nvidia_is_the_first_and_the_variables_are_those_of_the_vendor() -> None:
    with claim(2) as owner:
        assert [gpu.uuid for gpu in owner.gpus] == UUIDS["nvidia"][:2]
        assert visible() == ["0,1", None, None]
    with claim(2, vendor="amd") as owner:
        assert [gpu.uuid for gpu in owner.gpus] == UUIDS["amd"][:2]
        assert visible() == ["0,1", ",".join(UUIDS["amd"][:2]), "0,1"]
    assert visible() == [None, None, None]


def test_both_can_be_held_at_once_and_all_busy_is_all_busy(command: Any) -> None:
    code = "import safe_gpu; print(safe_gpu.claim_gpus(4, vendor='AMD', timeout=0).gpus[0].uuid)"
    with claim(4):
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=_outside())
        assert child.stdout.strip() == UUIDS["amd"][0], child.stderr
        assert safe_gpu.get_free_gpus() == []
        assert safe_gpu.get_free_gpus(vendor="amd") == ["0", "1", "2", "3"]
        assert command.run("run", "--timeout", "0", "--", "true").returncode == 75, "no AMD GPU in place of a busy one"
        assert command.run("wait", "--timeout", "0", "--vendor", "amd").stdout == "0\n"


def _outside() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in VISIBLE}


@pytest.mark.parametrize(
    ("driver", "words"), [("kfd", "--device /dev/kfd .*simulated:mi250x"), ("nvml", "--gpus all.*simulated:dgx-a100")]
)
def test_a_driver_without_gpus_is_told_what_its_vendor_needs(driver: str, words: str) -> None:
    with pytest.raises(safe_gpu.NoDriverError, match=rf"the driver \({driver}\) works, but .*{words}$"):
        HostView(SimpleNamespace(name=driver), HostSnapshot(()), Selection())


@pytest.mark.parametrize("vendor", ["matrox", "", "nvidia,amd", 1, ["amd"]])
def test_a_wrong_vendor(vendor: Any) -> None:
    with pytest.raises(safe_gpu.UnsatisfiableRequestError, match="choose 'nvidia' or 'amd' or 'intel'") as caught:
        claim(vendor=vendor)
    assert f"vendor={vendor!r}" in str(caught.value)
    for ask in (safe_gpu.get_free_gpus, wait_for_gpus):
        with pytest.raises(safe_gpu.UnsatisfiableRequestError, match="choose 'nvidia' or 'amd' or 'intel'"):
            ask(vendor=vendor)


def test_a_driver_that_was_named(monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:dgx-a100")
    child = command.run("run", "--vendor", "amd", "--", "true")
    assert child.returncode == 78
    assert child.stderr == (
        "safe-gpu: --vendor amd asks for AMD GPUs, and SAFE_GPU_DRIVER=simulated:dgx-a100 has none: leave --vendor "
        "out, or unset SAFE_GPU_DRIVER\n"
    )


# Claims inside claims


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_a_claim_inside_a_claim_keeps_the_vendor(vendor: str, command: Any) -> None:
    """Also where the program has cleared the variable that names AMD GPUs, and where it is left from elsewhere."""
    for stale in (None, UUIDS["amd"][3]):
        with claim(2, vendor=vendor, delegate=True) as owner, pytest.MonkeyPatch.context() as monkeypatch:
            if vendor == "nvidia" and stale:
                monkeypatch.setenv("ROCR_VISIBLE_DEVICES", stale)
            if vendor == "amd" and stale is None:
                monkeypatch.delenv("ROCR_VISIBLE_DEVICES")
                monkeypatch.setenv("SAFE_GPU_FENCE", "ignore")
            inner = variables(command, "run", "-q")
            name = "ROCR_VISIBLE_DEVICES" if vendor == "amd" else "CUDA_VISIBLE_DEVICES"
            assert inner[name] in ("0", owner.gpus[0].uuid)
            assert ("HIP_VISIBLE_DEVICES" in inner) == (vendor == "amd")
            if stale is None:
                other = "amd" if vendor == "nvidia" else "nvidia"
                child = command.run("run", "--vendor", other, "--", "true")
                assert child.returncode == 78
                assert f"the claim around this process (SAFE_GPU_SCOPE) holds {vendor.upper()} GPUs" in child.stderr


def test_a_scope_of_nobody_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with claim(1, vendor="amd", delegate=True):
        token = os.environ["SAFE_GPU_SCOPE"]
    monkeypatch.setenv("SAFE_GPU_SCOPE", token)
    with claim() as owner:
        assert vendor_of(owner.gpus[0].uuid) == "nvidia"


# The queue


def test_waiters_of_two_vendors_do_not_wait_for_each_other(command, child, ground, eventually) -> None:
    """A waiter for all NVIDIA GPUs keeps nobody from AMD's, and its place among NVIDIA's."""
    holder = child("import safe_gpu; say(safe_gpu.claim_gpus().devices_taken); listen()")
    assert holder.hear() == "[0]"
    waiter = command.start("run", "-q", "-n", "4", "--", "true")
    eventually(ground.tickets)
    assert command.run("run", "--timeout", "0", "--", "true").returncode == 75, "strict order among NVIDIA GPUs"
    assert variables(command, "run", "-q", "--timeout", "0", "--vendor", "amd", "-n", "4")["HIP_VISIBLE_DEVICES"]
    assert waiter.poll() is None
    holder.tell()
    assert waiter.wait(60) == 0
