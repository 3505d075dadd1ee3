"""Claims in real containers and around them: what holds, what status says, what is warned of."""

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.claims import claim
from support.real import long

pytestmark = pytest.mark.container


@long
def test_a_claim_inside_holds_outside(podman, dgx, eventually) -> None:
    """By its entry alone: the container has a network of its own."""
    assert podman.claim(3) == "0,1,2"
    assert dgx.claimed() == [0, 1, 2]
    with pytest.raises(api.NotEnoughGpusError) as refused:
        claim(6)
    (entry,) = dgx.claims()
    assert entry.pidns != api.procfs.pid_namespace()
    assert f"claimed by process {entry.pid} in a container" in str(refused.value)

    holder = api.gather().gpus[0]
    assert holder.claim is not None
    assert holder.claim.pid is not None
    assert f"\nNSpid:\t{holder.claim.pid}\t{entry.pid}\n" in Path(f"/proc/{holder.claim.pid}/status").read_text()
    assert f"in a container, as process {entry.pid} there" in holder.reason
    assert holder.claim.user == api.procfs.user_name(os.geteuid())

    with claim(5) as owner:
        assert owner.devices_taken == [3, 4, 5, 6, 7]
    podman.kill()
    eventually(lambda: dgx.claimed() == [])


def test_a_claim_outside_holds_inside(podman, dgx) -> None:
    with claim(5):
        refused = podman.safe_gpu("run", "-n", "4", "--timeout", "0", "--", "true")
        assert refused.returncode == 75
        assert f"GPU 0-4 (NVIDIA A100-SXM4-80GB): claimed by process {os.getpid()} outside" in refused.stderr
        assert "warning" not in refused.stderr
        seen = json.loads(podman.safe_gpu("status", "--json").stdout)["gpus"]
        assert [gpu["state"] for gpu in seen] == ["claimed"] * 5 + ["free"] * 3
        assert seen[0]["claim"]["pid"] is None, "this number is another process's in there, or nobody's"
        assert f"outside this container, as process {os.getpid()} there" in seen[0]["reason"]
        inside = podman.safe_gpu("run", "-n", "3", "--", "printenv", "CUDA_VISIBLE_DEVICES")
        assert inside.stdout.strip() == "5,6,7"
        assert inside.stderr == ""


@long
def test_two_containers(podman, dgx) -> None:
    assert podman.claim(5) == "0,1,2,3,4"
    refused = podman.safe_gpu("run", "-n", "4", "--timeout", "0", "--", "true")
    assert (refused.returncode, "in another container" in refused.stderr) == (75, True)


@long
def test_waiting_inside_for_a_claim_outside(podman, dgx, eventually) -> None:
    with claim(8):
        waiting = podman.start(sys.executable, "-m", "safe_gpu", "run", "--", "printenv", "CUDA_VISIBLE_DEVICES")
        eventually(lambda: dgx.tickets() != [])
        (waiter,) = api.gather().queue
        (entry,) = api.waiting_tickets()
        assert f"\nNSpid:\t{waiter.pid}\t{entry.pid}\n" in Path(f"/proc/{waiter.pid}/status").read_text()
        assert f"in a container, as process {entry.pid} there" in waiter.note
    assert waiting.communicate(timeout=60)[0] == "0\n"


def test_a_detached_container_keeps_the_claim_of_run(command, podman, dgx, eventually) -> None:
    """podman's monitor has inherited the descriptors."""
    options = ("-d", "--env=CUDA_VISIBLE_DEVICES", "--env=CUDA_DEVICE_ORDER")
    started = command.run("run", "-n", 2, "--", *podman.words("sleep", "600", options=options))
    assert (started.returncode, started.stderr) == (0, "")
    assert dgx.claimed() == [0, 1]
    with claim(6) as owner:
        assert owner.devices_taken == [2, 3, 4, 5, 6, 7]
    podman.kill()
    eventually(lambda: dgx.claimed() == [])


def test_the_claim_of_run_reaches_into_the_container(command, podman) -> None:
    options = ("--env=CUDA_VISIBLE_DEVICES", "--env=CUDA_DEVICE_ORDER")
    words = podman.words("printenv", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", options=options)
    done = command.run("run", "-n", 2, "--only", "4,6", "--", *words)
    assert done.stdout.split() == ["4,6", "PCI_BUS_ID"]


@long
def test_a_container_without_the_state_directory(podman, dgx) -> None:
    with claim(1):
        alone = podman.safe_gpu("run", "--", "printenv", "CUDA_VISIBLE_DEVICES", mount=False)
        assert alone.stdout.strip() == "0", "twice: what the warning is about"
        assert "the state directory /srv/safe-gpu-state belongs to this container" in alone.stderr
        assert "-v /srv/safe-gpu-state:/srv/safe-gpu-state" in alone.stderr
        named = podman.safe_gpu("run", "--", "printenv", "CUDA_VISIBLE_DEVICES", mount=False, network="host")
        assert named.stdout.strip() == "1", "doors are those of the host's network"


@pytest.mark.parametrize("mount", [True, False])
def test_doctor(podman, mount: bool) -> None:
    checks = json.loads(podman.safe_gpu("doctor", "--json", mount=mount).stdout)["checks"]
    (found,) = [check for check in checks if check["name"] == "state directory"]
    assert ("belongs to this container" in found["detail"]) == (not mount), found


@long
def test_gpus_by_their_cdi_names(command, podman, dgx) -> None:
    spec = Path("/var/run/cdi/safe-gpu-test.json")
    devices = [
        {"name": uuid, "containerEdits": {"env": [f"GPU_{index}={uuid}"]}} for index, uuid in enumerate(dgx.uuids)
    ]
    spec.parent.mkdir(exist_ok=True)
    spec.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": "safe-gpu.test/gpu", "devices": devices}))
    try:
        words = podman.words("env", options=("DEVICES",))
        devices = '$(printf " --device safe-gpu.test/gpu=%s" ${CUDA_VISIBLE_DEVICES//,/ })'
        shell = f"exec {' '.join(words).replace('DEVICES', devices)}"
        done = command.run("run", "-n", 2, "--only", "3,5", "--visible-as", "uuid", "--", "bash", "-c", shell)
        passed = sorted(line for line in done.stdout.splitlines() if line.startswith("GPU_"))
        assert passed == [f"GPU_{index}={dgx.uuids[index]}" for index in (3, 5)], done.stderr
    finally:
        spec.unlink()


# Fixes of ``doctor``, followed: then the check passes


@long
def test_a_container_of_podman_with_the_processes_of_the_host(podman: Any) -> None:
    def checked(*options: str) -> Any:
        found = json.loads(podman.safe_gpu("doctor", "--json", options=options).stdout)
        return next(one for one in found["checks"] if one["name"] == "visible processes")

    inside = checked()
    assert inside["status"] == "warning"
    option = inside["fix"].split()[-1]
    if api.procfs.pid_namespace() == api.procfs.FIRST_PID_NAMESPACE:
        assert checked(option)["status"] == "passed"
    else:
        assert "--pid=host" in option


@long
def test_a_container_with_the_state_directory_of_the_host(podman: Any, state_dir: Path) -> None:
    """It is made of an overlay, which the host's is not seen through."""
    api.setup.make(str(state_dir))

    def checked(*options: str) -> Any:
        done = podman.safe_gpu("doctor", "--json", options=options, mount=False)
        return next(one for one in json.loads(done.stdout)["checks"] if one["name"] == "state directory")

    inside = checked(f"--env=SAFE_GPU_DIR={state_dir}")
    assert inside["status"] == "warning"
    way_out = re.fullmatch("start the container with (.*)", inside["fix"])
    assert way_out is not None
    assert checked(f"--env=SAFE_GPU_DIR={state_dir}", *shlex.split(way_out[1]))["status"] == "passed"
