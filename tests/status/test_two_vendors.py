"""The state of a host with GPUs of both vendors: one view, and what of it is left if a driver does not work."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from support.kfd_host import KfdHost

import safe_gpu
from safe_gpu.status.facts import of_vendor
from safe_gpu.status.gather import gather
from safe_gpu.status.metrics import render_metrics
from safe_gpu.status.render import render


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:two-vendors")


def test_one_view_of_both(both: None, ask: Any) -> None:
    with safe_gpu.GPUOwner(2, vendor="amd", timeout=0, affinity=None) as owner:
        claimed = [gpu.uuid for gpu in owner.gpus]
        status = gather()
        assert ask("status", "--free").stdout.split() == [*(f"nvidia:{n}" for n in range(4)), "amd:2", "amd:3"]
        assert ask("status", "--free", "--vendor", "AMD").stdout.split() == ["2", "3"]
        assert "2 of 4 GPUs free" in ask("status", "--vendor", "amd").stdout
    assert [one.label for one in status.gpus] == [f"{vendor}:{n}" for vendor in ("nvidia", "amd") for n in range(4)]
    assert [one.state for one in status.gpus] == ["free"] * 4 + ["claimed"] * 2 + ["free"] * 2
    held = [(one.gpu.uuid, one.claim.pid) for one in status.gpus if one.claim]
    assert held == [(uuid, os.getpid()) for uuid in claimed]
    document = status.to_dict()
    named = [(gpu["vendor"], gpu["index"]) for gpu in document["gpus"]]
    assert named == [(vendor, index) for vendor in ("nvidia", "amd") for index in range(4)]
    assert document["driver"] == "simulated:two-vendors"
    lines = render(status, width=100, color=False).splitlines()
    assert "6 of 8 GPUs free" in lines[0]
    assert "GPU nvidia:0-3: NVIDIA A100-PCIE-40GB" in lines
    assert "GPU amd:0-3: AMD Instinct MI210" in lines
    assert [line.split()[:2] for line in lines if "claimed  " in line] == [["amd:0", "claimed"], ["amd:1", "claimed"]]

    metrics = render_metrics(status)
    assert re.findall('safe_gpu_claimed{gpu="(.)",UUID="[^"]*",vendor="amd"', metrics) == ["0", "1"]
    assert metrics.count("safe_gpu_memory_used_bytes{") == 8


def test_waiters_say_for_whose_gpus_they_wait(both: None, child: Any, command: Any) -> None:
    child("import safe_gpu\nsay(safe_gpu.claim_gpus(vendor='amd').devices_taken)\nlisten()", says="[0]")
    waiter = command.start("run", "-q", "--vendor", "amd", "-n", "4", "--", "true")
    while not (status := gather()).queue:
        assert waiter.poll() is None
    assert status.to_dict()["queue"][0]["vendor"] == "amd"
    assert "4 AMD GPUs" in render(status, width=100, color=False)
    assert of_vendor(status, "nvidia").queue == ()
    assert len(of_vendor(status, "amd").queue) == 1


# Real drivers: a fake NVML and a saved tree


@pytest.fixture
def amd(fake_gpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KfdHost:
    """GPUs of AMD beside the fake ones of NVIDIA."""
    (tmp_path / "root/dev").mkdir(parents=True)
    (tmp_path / "root/dev/nvidiactl").touch()
    host = KfdHost(tmp_path / "root")
    host.gpu(0x03, 1, 0xABC)
    host.gpu(0x23, 2, 0xABD)
    fake_gpus.use_nvml_here()
    monkeypatch.setenv("SAFE_GPU_DRIVER", "auto")
    monkeypatch.setenv("SAFE_GPU_FSROOT", str(host.root))
    return host


def test_two_drivers_and_one_that_is_broken(fake_gpus: Any, amd: KfdHost, ask: Any) -> None:
    """It is named, and the other GPUs are shown."""
    amd.process(4_000_000, queues=(2,))
    document = json.loads(ask("status", "--json").stdout)
    assert document["driver"] == "nvml, kfd"
    found = [(gpu["vendor"], gpu["state"]) for gpu in document["gpus"]]
    assert found == [("nvidia", "free")] * 8 + [("amd", "free"), ("amd", "busy")]
    fake_gpus.options(init_error=9)

    def shown(*form: str) -> str:
        done = ask("status", *form)
        assert (done.returncode, "not loaded" in " ".join((done.stderr if form else done.stdout).split())) == (69, True)
        return done.stdout

    assert "1 of 2 GPUs free" in shown()
    assert [gpu["vendor"] for gpu in json.loads(shown("--json"))["gpus"]] == ["amd", "amd"]
    assert shown("--free").split() == ["0"]
    metrics = shown("--prometheus")
    assert (metrics.count("safe_gpu_memory_used_bytes{"), "safe_gpu_waiting" in metrics) == (2, True)


def test_a_driver_that_breaks_between_opening_and_the_poll(both: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from safe_gpu.drivers.simulated import SimulatedDriver

    poll = SimulatedDriver.snapshot

    def breaks(self: SimulatedDriver) -> Any:
        if self.idle.vendor == "nvidia":
            raise safe_gpu.NoDriverError("the NVIDIA driver is gone")
        return poll(self)

    monkeypatch.setattr(SimulatedDriver, "snapshot", breaks)
    found = gather()
    assert [one.label for one in found.gpus] == ["0", "1", "2", "3"]
    assert found.broken == ("the NVIDIA driver is gone",)
    monkeypatch.setattr(SimulatedDriver, "snapshot", lambda self: breaks(SimulatedDriver("dgx-a100")))
    with pytest.raises(safe_gpu.NoDriverError, match="gone; the NVIDIA driver is gone"):
        gather()
