"""The commands on AMD GPUs: simulated hosts, and a fake HIP behind the kernel's files."""

import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.vendor_hosts import HipHost

from safe_gpu.drivers.presets import preset

ROCR, HIP, CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
HOLD = ("sh", "-c", "echo held; cat")


class Host(NamedTuple):
    """A host, by name, with the UUIDs of its GPUs; ``hip`` where a fake HIP is behind it."""

    name: str
    uuids: list[str]
    hip: HipHost | None = None

    def variables(self, *indices: int) -> dict[str, str]:
        """What a command must see that has these GPUs."""
        numbers = ",".join(map(str, range(len(indices))))
        return {ROCR: ",".join(self.uuids[index] for index in indices), HIP: numbers, CUDA: numbers}


@pytest.fixture
def host(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    if request.param != "hip":
        monkeypatch.setenv("SAFE_GPU_DRIVER", f"simulated:{request.param}")
        return Host(request.param, [gpu.uuid for gpu in preset(request.param).gpus])
    fake = HipHost(tmp_path, request.getfixturevalue("build_library")("hip.c", "libamdhip64.so"))
    (tmp_path / "sys/devices").mkdir()
    (tmp_path / "sys/devices/system").symlink_to("/sys/devices/system")
    for name in ("LD_LIBRARY_PATH", "SAFE_GPU_FSROOT", "SAFE_GPU_DRIVER"):
        monkeypatch.setenv(name, fake.env[name])
    return Host("hip", fake.uuids, fake)


of_partitions = pytest.mark.parametrize("host", ["mi300x-cpx", "hip"], indirect=True)


@of_partitions
def test_one_holds_and_others_look(command: Any, ask: Any, host: Host) -> None:
    holder = command.start("run", "-n", 2, "--only", "2,3", "--", *HOLD, stdin=subprocess.PIPE)
    assert holder.stdout.readline() == "held\n"
    shown = json.loads(ask("status", "--json").stdout)
    assert [gpu["uuid"] for gpu in shown["gpus"]] == host.uuids
    states = {gpu["index"]: gpu["state"] for gpu in shown["gpus"]}
    assert [index for index, state in states.items() if state == "claimed"] == [2, 3]
    assert [gpu["claim"]["pid"] for gpu in shown["gpus"] if gpu["claim"]] == [holder.pid] * 2
    free = [str(index) for index in states if index not in (2, 3)]
    assert ask("status", "--free").stdout.split() == free
    assert len(command.run("wait", "-n", 3).stdout.split()) == 3
    refused = command.run("run", "--timeout", 0, "--only", "2,3", "--", "true")
    assert refused.returncode == 75
    assert f"process {holder.pid}" in refused.stderr
    holder.communicate(timeout=60)
    assert ask("status", "--free").stdout.split() == [str(index) for index in range(len(host.uuids))]
