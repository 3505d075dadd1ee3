"""Claims that share GPUs: who fits beside whom, what they hold and give back, and what their programs are told."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.claims import claim, try_claim
from support.forks import forked

import safe_gpu
from safe_gpu import NotEnoughGpusError, UnsatisfiableRequestError
from safe_gpu.claim import variables as shares
from safe_gpu.coordination.queue import waiting_tickets
from safe_gpu.engines.holder import ClaimArguments
from safe_gpu.gpus.devices import Gpu

GIB = 1 << 30
HOLD = """
import safe_gpu
def claim(nb_gpus=1, **options):
    options = {"timeout": 0, "affinity": None, **options}
    return safe_gpu.GPUOwner(nb_gpus, safe_gpu.NoPlaceholder(), **options)
owner = claim(**OPTIONS)
say(*owner.devices_taken)
listen()
owner.release_gpus()
say("gone")
listen()
"""


@pytest.fixture
def sharing(child: Any) -> Any:
    """``sharing(1, share="20GiB")``: a process that holds these until it is told, and which GPUs it got."""

    def start(nb_gpus: int = 1, *, env: dict[str, str] | None = None, **options: Any) -> Any:
        options = {"nb_gpus": nb_gpus, **options}
        started = child(f"OPTIONS = {options}\n{HOLD}", env=env or {})
        started.devices = tuple(map(int, started.hear().split()))
        return started

    return start


def test_sharers_fill_a_gpu_and_no_more(sharing: Any, ground: Any) -> None:
    assert sharing(share="30GiB").devices == (0,)
    assert sharing(share="30GiB").devices == (0,)
    assert sharing(share="30GiB").devices == (1,)  # 20 GiB are left of GPU 0
    assert sharing(share="20GiB").devices == (0,)  # the one with the least room that is enough
    assert sharing(2, share="25%").devices == (1, 2)


def test_a_whole_claim_and_a_share_exclude_each_other(sharing: Any, ground: Any) -> None:
    sharer, whole = sharing(share="20GiB"), sharing(7)
    assert whole.devices == (1, 2, 3, 4, 5, 6, 7)
    with pytest.raises(NotEnoughGpusError, match="shared by 1 claim") as caught:
        claim(1)
    assert caught.value.verdicts[0].state == "claimed"
    with pytest.raises(NotEnoughGpusError, match=r"promised to 1 claim .*60 left, 70 asked for"):
        claim(1, share="70GiB")
    with pytest.raises(NotEnoughGpusError, match=f"claimed by process {whole.process.pid} "):
        claim(2, share="20GiB")
    assert safe_gpu.get_free_gpus() == []
    sharer.kill()
    assert safe_gpu.get_free_gpus() == ["0"]
    assert try_claim(1) == (0,)


def test_sixteen_and_no_more(sharing: Any, ground: Any) -> None:
    holders = [sharing(share="1GiB", only="0") for _ in range(16)]
    with pytest.raises(NotEnoughGpusError, match="16 claims share it already"):
        claim(1, share="1GiB", only="0")
    holders[3].kill()
    with claim(1, share="1GiB", only="0"):
        assert [one.parts for one in ground.claims() if one.pid == os.getpid()] == [{ground.uuids[0]: 3}]


def test_killed_sharers_leave_their_room(sharing: Any, ground: Any) -> None:
    """To one claim that needs the room of several dead ones, on several GPUs."""
    holders = [sharing(8, share="40GiB") for _ in range(2)]
    for one in holders:
        one.kill()
    assert try_claim(8, share="80GiB") == try_claim(8) == tuple(range(8))


def test_a_share_is_what_its_entry_and_its_variables_say(ground: Any) -> None:
    before = dict(os.environ)
    with claim(1, share="20GiB", affinity="exclusive") as owner:
        assert os.environ["GPU_MEMORY_LIMIT"] == str(20 * GIB)
        assert "every claim that shares these GPUs gets the same CPUs" in str(owner.binding)
        assert (owner.share, owner.share_fraction) == (20 * GIB, 19.5 / 80)
        (entry,) = ground.claims()
        assert (entry.gpus, entry.parts) == ({ground.uuids[0]: 20 * GIB}, {ground.uuids[0]: 0})
    assert (owner.share, owner.share_fraction, ground.claims()) == (None, None, [])
    assert dict(os.environ) == before


def test_the_command_of_run_holds_the_share(command: Any, ground: Any) -> None:
    tell = "import os; print(os.environ['SAFE_GPU_SHARE'], 'SAFE_GPU_SCOPE' in os.environ, flush=True); input()"
    started = command.start("run", "--share", "60GiB", "--", sys.executable, "-c", tell, stdin=-1)
    assert started.stdout.readline() == f"{60 * GIB} False\n"
    assert try_claim(8, share="30GiB") is None
    assert try_claim(1, share="20GiB") == (0,)
    assert started.communicate("\n")[1] == ""
    assert try_claim(8) == tuple(range(8))


def test_two_state_directories_never_share_a_gpu(sharing: Any, tmp_path: Path, monkeypatch: Any, ground: Any) -> None:
    monkeypatch.setenv("SAFE_GPU_SIMULATED_DIR", str(tmp_path / "host"))
    other = sharing(2, share="1GiB", env={"SAFE_GPU_DIR": str(tmp_path / "other")})
    assert other.devices == (0, 1)
    assert sharing(1, share="1GiB").devices == (2,)
    assert (try_claim(7), try_claim(5)) == (None, (3, 4, 5, 6, 7))
    with pytest.raises(NotEnoughGpusError, match=r"GPU 0,1 .*claimed in another state directory"):
        claim(7, share="1GiB")
    other.tell()
    assert other.hear() == "gone"
    assert try_claim(7) is not None


FORKED = """
import os, safe_gpu
if os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
safe_gpu.claim_gpus()
"""


def test_no_claim_is_made_inside_a_share(command: Any, ground: Any) -> None:
    why = r"process \d+ holds a share of GPU 3, and no claim can be made inside a share: leave this claim out and use"
    for script, code in (
        ("exec safe-gpu run -- true", 78),
        ("exec safe-gpu wait", 78),
        ("safe-gpu run -- true; exit $?", 78),
        ("SAFE_GPU_SCOPE=0123456789abcdef exec safe-gpu run -- true", 78),
        ('exec "$0" -c "$1"', 1),
    ):
        ran = command.run("run", "--share", "20GiB", "--only", 3, "--", "sh", "-c", script, sys.executable, FORKED)
        assert (ran.returncode, len(re.findall(why, ran.stderr))) == (code, 1)


def test_a_share_that_has_ended_hinders_no_claim_and_inside_a_whole_claim_a_share_gets_the_gpu(command, ground) -> None:
    tell = [command.path, "run", "--share", "20GiB", "-t", "0", "--", "sh", "-c", "echo got $SAFE_GPU_SHARE"]
    assert command.run("run", "--", *tell).stdout == "got\n"
    assert command.run("run", "--", "true", env={"SAFE_GPU_SHARE": str(20 * GIB)}).returncode == 0


def test_a_share_cannot_delegate_nor_reach_across_hosts(ground: Any) -> None:
    with pytest.raises(UnsatisfiableRequestError, match=r"delegate=True with share='20GiB': .* leave one of them out"):
        claim(1, share="20GiB", delegate=True)
    with pytest.raises(UnsatisfiableRequestError, match="share='20GiB' is not possible across hosts"):
        ClaimArguments(selection={"share": "20GiB"}).read(1, 0, None)
    assert ground.claims() == []


def test_a_sharer_behind_a_whole_claim_waits_its_turn(sharing: Any, child: Any, ground: Any, eventually: Any) -> None:
    """There is room for it, but it would delay the whole claim; if it ends in time it does not."""
    holder = sharing(8, share="20GiB", hold_for=3600)
    whole = child('OPTIONS = {"nb_gpus": 8, "timeout": 60}\n' + HOLD)
    eventually(lambda: len(waiting_tickets()) == 1)
    assert try_claim(1, share="20GiB") is None
    assert try_claim(1, share="20GiB", hold_for=7200) is None
    assert try_claim(1, share="20GiB", hold_for=1800) == (0,)
    holder.tell()
    assert whole.hear() == "0 1 2 3 4 5 6 7"


def test_what_frameworks_and_mps_are_told(tmp_path: Path) -> None:
    def told(**environ: str) -> dict[str, str]:
        return shares.share_variables(20 * GIB, [Gpu(0, "GPU-0", memory_total=80 * GIB)], environ)

    limits = {"SAFE_GPU_SHARE": str(20 * GIB), "GPU_MEMORY_LIMIT": str(20 * GIB), "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    fractions = dict.fromkeys(["SAFE_GPU_SHARE_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"], "0.24375")
    assert told() == {**limits, **fractions}
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in told(XLA_CLIENT_MEM_FRACTION=".5")
    assert told(TF_FORCE_GPU_ALLOW_GROWTH="false", GPU_MEMORY_LIMIT="1").keys().isdisjoint([*limits][1:])
    torch = told(SAFE_GPU_SHARE_TORCH="1")
    assert torch["PYTORCH_CUDA_ALLOC_CONF"] == "per_process_memory_fraction:0.24375"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in told(SAFE_GPU_SHARE_TORCH="1", PYTORCH_CUDA_ALLOC_CONF="x:y")
    (tmp_path / "control").touch()
    assert told(CUDA_MPS_PIPE_DIRECTORY=str(tmp_path))["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "GPU-0=20480M"


def test_compute_instances_have_one_memory(fake_gpus: Any, sharing: Any) -> None:
    """Two compute instances have 40 GiB together, and a third has 40 GiB of its own."""
    uuids = [fake_gpus.uuid("MIG", number) for number in range(3)]
    fake_gpus.write({"mig": 1, "instances": ",".join(uuids), "gi": "1,1,2", "ci": "0,1,0", "imem": 40 * GIB})
    holder = sharing(only="0:0", env=fake_gpus.env)

    def sibling(**options: str) -> Any:
        assert forked(fake_gpus, f"out = claim(1, NoPlaceholder(), only='0:2', **{options})") == [0]
        return forked(fake_gpus, f"out = claim(1, NoPlaceholder(), only='0:1', **{options})")

    assert "have one memory, so it cannot be shared" in sibling(share="1GiB")[1]
    assert sibling() == [0]
    fake_gpus.process(uuids[0], holder.pid, 30 * GIB)
    assert "asked for" in sibling(min_memory="20GiB")[1]
