"""The demo on hosts with a driver, played by the fake one: only free GPUs are touched, and the verdict is true."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import Run, checked

# What happens meanwhile is put between the look at the host and the race.
PROGRAM = """
import os, sys
import safe_gpu
from safe_gpu import demo
from safe_gpu.demo import race_host as racers

finally_do = []
gpus = os.environ["FAKE_GPU_DIR"]
real = lambda: os.environ["SAFE_GPU_DRIVER"] == "nvml"

def after_the_look(happen):
    look = racers.look
    def look_then_happen():
        host = look()
        if real():
            happen(host)
        return host
    racers.look = look_then_happen

{meanwhile}
code = demo.run({processes}, rounds=1)
for work in finally_do:
    work()
sys.exit(code)
"""


@pytest.fixture
def race_on(fake_gpus: Any, tmp_path: Path) -> Any:
    """Run the demo in a process that sees the fake GPUs; it must leave nothing on them and no file."""

    def run(meanwhile: str = "", processes: int | None = 4, code: int = 0, **environment: str) -> Run:
        temporary = tmp_path / "tmp"
        temporary.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(meanwhile=meanwhile, processes=processes)],
            env={**fake_gpus.env, "TMPDIR": str(temporary), **environment},
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert done.stderr == ""
        assert os.listdir(temporary) == []
        assert not list((fake_gpus.directory / "procs").glob("*/[0-9]*[0-9]")), "a context was left on a GPU"
        assert done.returncode == code
        assert "Failure" not in done.stdout
        return checked(code, done.stdout)

    return run


@pytest.mark.parametrize(("count", "processes"), [(1, 4), (8, None)])
def test_free_gpus_are_raced_for(fake_gpus: Any, race_on: Any, count: int, processes: int | None) -> None:
    fake_gpus.set(count)
    run = race_on(processes=processes)
    assert f"This host has {count} x NVIDIA A100-SXM4-80GB." in run.text
    assert run.got
    assert run.got <= set(map(str, range(count)))
    assert run.verdict.startswith(f"Verdict: 0 collisions in {run.number[0]} claim")
    assert "served" not in run.text, "nobody waits on a shared host"
    assert "Without safe_gpu, on a simulated host, dgx-a100, " in run.text


def test_only_free_ones_are_touched(fake_gpus: Any, race_on: Any) -> None:
    fake_gpus.write({"name": "NVIDIA A100"}, *[{"name": "NVIDIA L4", "speed": 9}] * 4)
    for uuid in fake_gpus.uuids[:2]:
        fake_gpus.process(uuid, 999_999, static=True)
    fake_gpus.change(4, lost=1)
    run = race_on()
    assert "This host has 1 x NVIDIA A100, 3 x NVIDIA L4, 1 x unknown GPU." in run.text
    assert "GPU 0,1: in use" in run.text
    assert "GPU 2,3: free" in run.text
    assert re.search(r"GPU 4: .*fell off the bus", run.text)
    assert run.got
    assert run.got <= {"2", "3"}
    assert run.verdict.startswith("Verdict: 0 collisions in ")


def test_a_batch_jobs_gpu_is_all_that_is_raced_for(fake_gpus: Any, race_on: Any) -> None:
    run = race_on(CUDA_VISIBLE_DEVICES="1", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert "left out by CUDA_VISIBLE_DEVICES=1" in run.text
    assert run.got == {"1"}


def test_mig_instances_are_raced_for(fake_gpus: Any, race_on: Any) -> None:
    uuids = [fake_gpus.uuid("MIG", i) for i in range(2)]
    fake_gpus.write({"mig": 1, "instances": ",".join(uuids), "imem": 10 << 30}, {})
    run = race_on()
    assert "GPU 0 is split into 2 MIG instances" in run.text
    assert run.got <= {"0:0", "0:1", "1"}
    assert run.verdict.startswith("Verdict: 0 collisions in ")
    assert run.number[0] == run.number[1], "CUDA shows a process one instance"


def test_a_gpu_lost_meanwhile_is_left_alone(fake_gpus: Any, race_on: Any) -> None:
    fake_gpus.set(2)
    run = race_on("""
def lose(host):
    lines = open(gpus + "/gpus").read().splitlines()
    open(gpus + "/new", "w").write(lines[0] + "\\n" + lines[1] + " lost=1\\n")
    os.rename(gpus + "/new", gpus + "/gpus")
after_the_look(lose)
""")
    assert run.got <= {"0"}
    assert run.verdict.startswith("Verdict: 0 collisions in ")


def test_all_busy_moves_the_race(fake_gpus: Any, race_on: Any) -> None:
    fake_gpus.set(2)
    for uuid in fake_gpus.uuids:
        fake_gpus.process(uuid, 999_999, static=True)
    run = race_on()
    assert "GPU 0,1: in use (`safe-gpu status` shows by whom)" in run.text
    assert "A race on a simulated host, dgx-a100" in run.text
    assert "4 of 4 served" in run.text


def test_others_who_claim_meanwhile_are_obeyed(fake_gpus: Any, race_on: Any) -> None:
    fake_gpus.set(2)
    run = race_on("""
def claim_all(host):
    said, say = os.pipe()
    heard, until = os.pipe()
    other = os.fork()
    if other == 0:
        os.close(until)
        try:
            safe_gpu.claim_gpus(2, affinity=None)
            os.write(say, b"claimed")
            os.read(heard, 1)
            safe_gpu.release_gpus()
        finally:
            os._exit(0)
    assert os.read(said, 7) == b"claimed"
    finally_do.append(lambda: (os.close(until), os.waitpid(other, 0)))
after_the_look(claim_all)
""")
    assert "No process got a GPU" in run.text
    assert "A race on a simulated host, dgx-a100" in run.text


def test_gpus_that_cuda_cannot_use_are_told_of(fake_gpus: Any, race_on: Any) -> None:
    fake_gpus.set(1)
    fake_gpus.options(ctx_error=999)
    run = race_on(code=1)  # no claim on this host has worked
    assert "Error of a GPU or its driver" in run.text
    assert "A race on a simulated host, dgx-a100" in run.text


@pytest.mark.parametrize("driver", ["without GPUs", "none"])
def test_a_host_without_gpus_or_driver(race_on: Any, fake_gpus: Any, driver: str) -> None:
    fake_gpus.set(0)
    nowhere = {"LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"].partition(":")[0], "PATH": "/nonexistent"}
    run = race_on(SAFE_GPU_DRIVER="auto", **(nowhere if driver == "none" else {}))
    assert "No GPU can be used on this host; `safe-gpu doctor` says why." in run.text
    assert "A race on a simulated host, dgx-a100" in run.text
    assert not Path(os.environ["SAFE_GPU_DIR"]).exists()


def test_a_driver_asked_for_by_name_has_to_be_there(command: Any) -> None:
    done = command.run("demo", env={"SAFE_GPU_DRIVER": "nvml"})
    assert done.returncode == 69
    assert done.stdout == ""


def test_a_fence_that_cannot_be_read_moves_the_race(fake_gpus: Any, race_on: Any) -> None:
    fake_gpus.write({"name": "NVIDIA A100"}, {"name": "NVIDIA L4", "speed": 9})
    fake_gpus.options(cuda_init_error=999)
    run = race_on(CUDA_VISIBLE_DEVICES="0")
    assert "No GPU can be claimed: " in run.text
    assert "A race on a simulated host, dgx-a100" in run.text
