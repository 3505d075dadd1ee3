"""Claims that have GPUs in common: those inside another claim, their workers, which find their GPU or have lost it, and
claims that share GPUs: who fits beside whom, what they hold and give back, and what their programs are told."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.actor import Actor
from support.claims import claim, try_claim
from support.forks import json_from_child, out_of_child

import safe_gpu
from safe_gpu import NotEnoughGpusError, UnsatisfiableRequestError, WrongDeviceError


def rank(nb_gpus: int = 1) -> str:
    claim = f"owner = safe_gpu.claim_gpus({nb_gpus}, safe_gpu.NoPlaceholder(), affinity=None, timeout=None)"
    tell = "os.write(1, f\"{' '.join(map(str, owner.devices_taken))}\\n\".encode())"  # beside other ranks, in one write
    return f"import os, sys, safe_gpu\n{claim}\n{tell}\nsys.stdin.readline()"


def ends_well(started: subprocess.Popen[str]) -> None:
    _, err = started.communicate("\n", timeout=60)
    assert started.returncode == 0, err


def inside(token: str, monkeypatch: pytest.MonkeyPatch, devices: str | None = None) -> None:
    """Make this process one that was started inside the claim with that token."""
    monkeypatch.setenv("SAFE_GPU_SCOPE", token)
    if devices is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


@pytest.fixture
def holding(command, dgx):
    """``holding(2)`` runs a command that holds GPUs; returns the process and its token."""

    def start(nb_gpus: int) -> tuple[subprocess.Popen[str], str]:
        words = ("run", "-n", nb_gpus, "--", "sh", "-c", "echo $SAFE_GPU_SCOPE; read x")
        started = command.start(*words, stdin=subprocess.PIPE)
        return started, started.stdout.readline().strip()

    return start


def test_ranks_under_run_get_a_gpu_each(command, dgx) -> None:
    dgx.hold(1, 4, 5, 6, 7)
    launcher = 'exec 3<&0; for rank in 0 1 2; do "$0" -c "$1" <&3 & done; wait'
    words = ("run", "-n", 3, "--", "sh", "-c", launcher, sys.executable, rank())
    started = command.start(*words, stdin=subprocess.PIPE)
    assert sorted(started.stdout.readline() for _ in range(3)) == ["0\n", "2\n", "3\n"]
    assert (dgx.claimed(), dgx.claimed(inside=True)) == (list(range(8)), [0, 2, 3])
    ends_well(started)
    assert (dgx.claimed(), dgx.claimed(inside=True)) == ([1, 4, 5, 6, 7], [])


def test_no_more_than_the_claim_around_has(holding, dgx, monkeypatch: pytest.MonkeyPatch) -> None:
    _, token = holding(2)
    inside(token, monkeypatch)
    monkeypatch.setenv("SAFE_GPU_FENCE", "ignore")
    with pytest.raises(UnsatisfiableRequestError, match=r"claim_gpus\(3\) runs inside the claim of .* holds 2 GPUs"):
        claim(3)
    with pytest.raises(UnsatisfiableRequestError, match="0 of its 2"):
        claim(1, only=7)
    with pytest.raises(UnsatisfiableRequestError, match="delegate=True is not possible inside another claim"):
        claim(1, delegate=True)
    with claim(2) as owner:
        assert owner.devices_taken == [0, 1]
        assert dgx.claimed() == [0, 1]


def test_more_than_the_claim_around_holds(command, dgx) -> None:
    """It names the one that is to be larger, and not its variables: to lift that limit leads nowhere."""
    python = (sys.executable, "-c", "import safe_gpu; safe_gpu.claim_gpus(2)")
    done = command.run("run", "--", "sh", "-c", 'echo $$; "$@"; exit', "sh", *python)
    there = "ask for 2 there (safe-gpu run -n 2, or claim_gpus(2, delegate=True)), or leave claim_gpus out\n"
    assert done.stderr.endswith(f"the claim of process {done.stdout.strip()}, which holds 1 GPU: {there}")


def test_the_claim_around_ends_while_one_inside_waits(holding, dgx, child, command, monkeypatch) -> None:
    """It waits on as anybody else, and its place counts among all from then on."""
    started, token = holding(1)
    inside(token, monkeypatch, "0")
    first = child(rank())
    assert first.hear() == "0"
    waiter = command.start("run", "--", "echo", "mine")
    assert "for 1 GPU" in waiter.stderr.readline()
    ends_well(started)
    assert waiter.poll() is None
    first.tell()
    out, err = waiter.communicate(timeout=60)
    assert (out, waiter.returncode) == ("mine\n", 0)
    assert err.count("names no living claim") == 1


def test_a_third_level_is_told_so_at_once(command, dgx) -> None:
    line = [command.path, "run", "-n", 1, "--", sys.executable, "-c", rank()]
    done = command.run("run", "-n", 2, "--", *line)
    assert done.returncode == 1
    assert "this process itself holds GPU 0: claims inside claims go one level deep" in done.stderr


def test_nobody_takes_a_gpu_that_an_orphaned_claim_inside_holds(holding, dgx, child, command, monkeypatch) -> None:
    started, token = holding(2)
    with monkeypatch.context() as patch:
        inside(token, patch)
        inner = child(rank(), says="0")
    started.kill()
    started.wait(60)
    assert dgx.claimed() == []
    assert safe_gpu.get_free_gpus() == ["1", "2", "3", "4", "5", "6", "7"]
    with claim(7) as owner:
        assert owner.devices_taken == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(NotEnoughGpusError, match=rf"GPU 0 .*claimed by process {inner.pid} "):
        claim(8, timeout=0)
    waiter = command.start("run", "-n", 8, "--", "echo", "all")
    assert "for 8 GPUs (7 free); " in waiter.stderr.readline()
    inner.tell()
    assert waiter.communicate(timeout=60)[0] == "all\n"


def test_those_who_wait_inside_and_outside_do_not_meet(holding, dgx, child, command, monkeypatch) -> None:
    _, token = holding(2)
    everything = command.start("run", "-n", 8, "--", "true")  # waits outside, first of all
    assert "for 8 GPUs (6 free); GPU 0,1: " in everything.stderr.readline()
    with monkeypatch.context() as patch:
        inside(token, patch, "0,1")
        first = child(rank(2))
        assert first.hear() == "0 1"  # and did not queue behind it
        second = command.start("run", "--", "echo", "second")
        assert "for 1 GPU (0 of 2 free); GPU 0,1: " in second.stderr.readline()
        third = command.start("run", "-n", 2, "--", "echo", "third")
        assert f"(pid {second.pid}, wants 1 GPU, " in third.stderr.readline()
    assert len(dgx.tickets()) == 3
    everything.terminate()
    everything.wait(60)
    with claim(6, timeout=0) as owner:  # outside nobody is ahead now
        assert owner.devices_taken == [2, 3, 4, 5, 6, 7]
    first.tell()
    assert second.communicate(timeout=60)[0] == "second\n"
    assert third.communicate(timeout=60)[0] == "third\n"


# Workers that are told their GPU (SAFE_GPU_EXPECT)


@pytest.fixture
def worker() -> Iterator[pytest.MonkeyPatch]:
    """Inside a delegating claim of GPU 0 and 1 it sets variables of a worker for GPU 1; so far they are right."""
    with claim(2, delegate=True) as owner, pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "1")
        patch.setenv("SAFE_GPU_EXPECT", owner.gpus[1].uuid)
        yield patch
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # where a test released the claim, the patch has put that back


@pytest.mark.parametrize("verb", ["run", "bind"])
def test_the_command_runs_on_the_gpu_that_was_meant_or_not_at_all(worker, command, verb: str) -> None:
    done = command.run(verb, "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES ${SAFE_GPU_EXPECT-unset}")
    assert (done.returncode, done.stdout) == (0, "1 unset\n"), done.stderr
    worker.setenv("CUDA_VISIBLE_DEVICES", "0")
    done = command.run(verb, "--", "echo", "started")
    assert (done.returncode, done.stdout, "CUDA_VISIBLE_DEVICES=0 it sees GPU-" in done.stderr) == (70, "", True)


def test_other_gpus_than_the_expected_one(worker: pytest.MonkeyPatch) -> None:
    for visible, seen in (("0,1", "0,1 it sees GPU-"), ("", " it sees 0 GPUs")):
        worker.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(WrongDeviceError, match=f"{os.environ['SAFE_GPU_EXPECT']}.*CUDA_VISIBLE_DEVICES={seen}"):
            api.check_expected_gpu()
    worker.setenv("CUDA_VISIBLE_DEVICES", "1")
    safe_gpu.release_gpus()
    with pytest.raises(api.HolderLostError, match="is no longer held"):
        api.check_expected_gpu()


def test_two_workers_of_one_gpu_share_it_under_bind(worker: pytest.MonkeyPatch, command) -> None:
    """``run`` claims the GPU for its command alone; ``bind`` claims nothing."""
    first = command.start("bind", "--", "sh", "-c", "echo started; cat")
    assert first.stdout.readline() == "started\n"
    assert command.run("bind", "--", "printenv", "CUDA_VISIBLE_DEVICES").stdout == "1\n"
    assert command.run("run", "--timeout", 0, "--", "printenv", "CUDA_VISIBLE_DEVICES").stdout == "1\n"
    first.communicate("", timeout=60)


# A GPU that is lost after a claim shifts CUDA's numbers


SHIFT = "CUDA_VISIBLE_DEVICES=1 now means GPU 2, which this claim does not hold, since GPU 0 is lost"


def test_bind_in_python_notices_it_and_makes_no_state_directory(host: Any) -> None:
    def work() -> list[bool]:
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"
        safe_gpu.bind()
        made = os.path.exists(os.environ["SAFE_GPU_DIR"])
        claim(1)
        before = str(safe_gpu.bind())
        host.edits[host.uuids[0]] = {"lost": True}
        return [made, SHIFT in before, SHIFT in str(safe_gpu.bind())]

    assert json_from_child(work) == [False, False, True]


@pytest.mark.skipif(not os.path.exists("/sys/devices/system/cpu/cpu0/topology"), reason="needs /sys")
def test_status_and_bind_notice_it(fake_gpus: Any, command: Any) -> None:
    fake_gpus.set(4)
    looks = "safe-gpu status --json 2>&1; safe-gpu bind -- echo bound 2>&1; "
    script = f"export COLUMNS=300; safe-gpu status; echo up; read x; safe-gpu status; {looks}"
    started = command.start("run", "--only", "1", "--", "sh", "-c", script, stdin=subprocess.PIPE, env=fake_gpus.env)
    before = list(iter(started.stdout.readline, "up\n"))
    fake_gpus.change(0, lost=1)
    out, _ = started.communicate("\n", timeout=60)
    assert (SHIFT in "".join(before), f"warning: {SHIFT}" in out, out.count(SHIFT)) == (False, True, 3)
    assert out.endswith("bound\n")


# Claims that share GPUs


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
"""


@pytest.fixture
def sharing(forked: Any) -> Any:
    """``sharing(1, share="20GiB")``: a process that holds these until it is told, and which GPUs it got."""

    def start(nb_gpus: int = 1, *, env: dict[str, str] | None = None, **options: Any) -> Any:
        options = {"nb_gpus": nb_gpus, **options}
        started = forked(f"OPTIONS = {options}\n{HOLD}", env=env)
        started.devices = tuple(map(int, started.hear().split()))
        return started

    return start


def test_sharers_fill_a_gpu_and_no_more(sharing: Any, dgx: Any) -> None:
    assert sharing(share="30GiB").devices == (0,)
    assert sharing(share="30GiB").devices == (0,)
    assert sharing(share="30GiB").devices == (1,)  # 20 GiB are left of GPU 0
    assert sharing(share="20GiB").devices == (0,)  # the one with the least room that is enough
    assert sharing(2, share="25%").devices == (1, 2)


def test_a_whole_claim_and_a_share_exclude_each_other(sharing: Any, dgx: Any) -> None:
    sharer, whole = sharing(share="20GiB"), sharing(7)
    assert whole.devices == (1, 2, 3, 4, 5, 6, 7)
    with pytest.raises(NotEnoughGpusError, match="shared by 1 claim") as caught:
        claim(1)
    assert caught.value.verdicts[0].state == "claimed"
    with pytest.raises(NotEnoughGpusError, match=r"promised to 1 claim .*60 left, 70 asked for"):
        claim(1, share="70GiB")
    with pytest.raises(NotEnoughGpusError, match=f"claimed by process {whole.pid} "):
        claim(2, share="20GiB")
    assert safe_gpu.get_free_gpus() == []
    sharer.kill()
    assert safe_gpu.get_free_gpus() == ["0"]
    assert try_claim(1) == (0,)


def hold_a_share_of_the_first_gpu(line: Connection) -> None:
    """Claim 1 GiB of it, say ``holds``, and keep it until the other end is told to go or is gone."""
    with claim(1, share="1GiB", only="0"):
        line.send(("holds",))
        line.recv()


def test_sixteen_and_no_more(cleanup: Any, dgx: Any) -> None:
    holders = []
    for _ in range(16):
        holders.append(Actor(hold_a_share_of_the_first_gpu))
        cleanup.callback(holders[-1].end)
        holders[-1].expect("holds")
    with pytest.raises(NotEnoughGpusError, match="16 claims share it already"):
        claim(1, share="1GiB", only="0")
    holders[3].end()
    with claim(1, share="1GiB", only="0"):
        assert [one.parts for one in dgx.claims() if one.pid == os.getpid()] == [{dgx.uuids[0]: 3}]


def test_killed_sharers_leave_their_room(sharing: Any, dgx: Any) -> None:
    """To one claim that needs the room of several dead ones, on several GPUs."""
    holders = [sharing(8, share="40GiB") for _ in range(2)]
    for one in holders:
        one.kill()
    assert try_claim(8, share="80GiB") == try_claim(8) == tuple(range(8))


@pytest.mark.parametrize("mode", api.MODES)
def test_sharers_get_the_same_cpus_also_in_modes_that_choose_by_gpu(dgx: Any, mode: str) -> None:
    with claim(1, share="20GiB", affinity=mode) as owner:
        is_told = "every claim that shares these GPUs gets the same CPUs" in str(owner.binding)
    assert is_told == (mode in api.PER_GPU_MODES)


def test_a_share_is_what_its_entry_and_its_variables_say(dgx: Any) -> None:
    before = dict(os.environ)
    with claim(1, share="20GiB") as owner:
        assert os.environ["GPU_MEMORY_LIMIT"] == str(20 * GIB)
        assert (owner.share, owner.share_fraction) == (20 * GIB, 19.5 / 80)
        (entry,) = dgx.claims()
        assert (entry.gpus, entry.parts) == ({dgx.uuids[0]: 20 * GIB}, {dgx.uuids[0]: 0})
    assert (owner.share, owner.share_fraction, dgx.claims()) == (None, None, [])
    assert dict(os.environ) == before


def test_the_command_of_run_holds_the_share(command: Any, dgx: Any) -> None:
    tell = "import os; print(os.environ['SAFE_GPU_SHARE'], 'SAFE_GPU_SCOPE' in os.environ, flush=True); input()"
    started = command.start("run", "--share", "60GiB", "--", sys.executable, "-c", tell, stdin=-1)
    assert started.stdout.readline() == f"{60 * GIB} False\n"
    assert try_claim(8, share="30GiB") is None
    assert try_claim(1, share="20GiB") == (0,)
    assert started.communicate("\n")[1] == ""
    assert try_claim(8) == tuple(range(8))


def test_two_state_directories_never_share_a_gpu(sharing: Any, tmp_path: Path, monkeypatch: Any, dgx: Any) -> None:
    monkeypatch.setenv("SAFE_GPU_SIMULATED_DIR", str(tmp_path / "host"))
    assert sharing(2, share="1GiB", env={"SAFE_GPU_DIR": str(tmp_path / "other")}).devices == (0, 1)
    assert sharing(1, share="1GiB").devices == (2,)
    assert (try_claim(7), try_claim(5)) == (None, (3, 4, 5, 6, 7))
    with pytest.raises(NotEnoughGpusError, match=r"GPU 0,1 .*claimed in another state directory"):
        claim(7, share="1GiB")


FORKED = """
import os, safe_gpu
if os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
safe_gpu.claim_gpus()
"""


def test_no_claim_is_made_inside_a_share(command: Any, dgx: Any) -> None:
    why = r"process \d+ holds a share of GPU 3, and no claim can be made inside a share: leave this claim out and use"
    for script, code in (
        ("exec safe-gpu run -- true", 78),
        ("SAFE_GPU_SCOPE=0123456789abcdef exec safe-gpu run -- true", 78),
        ('exec "$0" -c "$1"', 1),
    ):
        ran = command.run("run", "--share", "20GiB", "--only", 3, "--", "sh", "-c", script, sys.executable, FORKED)
        assert (ran.returncode, len(re.findall(why, ran.stderr))) == (code, 1)


def test_a_share_that_has_ended_hinders_no_claim_and_inside_a_whole_claim_a_share_gets_the_gpu(command, dgx) -> None:
    tell = [command.path, "run", "--share", "20GiB", "-t", "0", "--", "sh", "-c", "echo got $SAFE_GPU_SHARE"]
    assert command.run("run", "--", *tell).stdout == "got\n"
    assert command.run("run", "--", "true", env={"SAFE_GPU_SHARE": str(20 * GIB)}).returncode == 0


def test_a_share_cannot_delegate_nor_reach_across_hosts(dgx: Any) -> None:
    with pytest.raises(UnsatisfiableRequestError, match=r"delegate=True with share='20GiB': .* leave one of them out"):
        claim(1, share="20GiB", delegate=True)
    with pytest.raises(UnsatisfiableRequestError, match="share='20GiB' is not possible across hosts"):
        api.ClaimArguments(selection={"share": "20GiB"}).read(1, 0, None)
    assert dgx.claims() == []


def test_a_sharer_behind_a_whole_claim_waits_its_turn(sharing: Any, forked: Any, dgx: Any, eventually: Any) -> None:
    """There is room for it, but it would delay the whole claim; if it ends in time it does not."""
    holder = sharing(8, share="20GiB", hold_for=3600)
    whole = forked('OPTIONS = {"nb_gpus": 8, "timeout": 60}\n' + HOLD)
    eventually(lambda: len(api.waiting_tickets()) == 1)
    assert try_claim(1, share="20GiB") is None
    assert try_claim(1, share="20GiB", hold_for=7200) is None
    assert try_claim(1, share="20GiB", hold_for=1800) == (0,)
    holder.tell()
    assert whole.hear() == "0 1 2 3 4 5 6 7"


def test_what_frameworks_and_mps_are_told(tmp_path: Path) -> None:
    def told(**environ: str) -> dict[str, str]:
        return api.share_variables(20 * GIB, [api.Gpu(0, "GPU-0", memory_total=80 * GIB)], environ)

    in_bytes = dict.fromkeys(["SAFE_GPU_SHARE", "CUDA_DEVICE_MEMORY_LIMIT", "GPU_MEMORY_LIMIT"], str(20 * GIB))
    limits = {**in_bytes, "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    fractions = dict.fromkeys(["SAFE_GPU_SHARE_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"], "0.24375")
    assert told() == {**limits, **fractions}
    own = {"TF_FORCE_GPU_ALLOW_GROWTH": "false", "GPU_MEMORY_LIMIT": "1", "CUDA_DEVICE_MEMORY_LIMIT": "1g"}
    assert told(**own).keys().isdisjoint(own), "what the user has set stays"
    assert told(SAFE_GPU_SHARE_TORCH="1")["PYTORCH_CUDA_ALLOC_CONF"] == "per_process_memory_fraction:0.24375"
    (tmp_path / "control").touch()
    assert told(CUDA_MPS_PIPE_DIRECTORY=str(tmp_path))["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "GPU-0=20480M"


def test_compute_instances_have_one_memory(fake_gpus: Any, child: Any) -> None:
    """Two compute instances have 40 GiB together, and a third has 40 GiB of its own."""
    uuids = [fake_gpus.uuid("MIG", number) for number in range(3)]
    fake_gpus.write({"mig": 1, "instances": ",".join(uuids), "gi": "1,1,2", "ci": "0,1,0", "imem": 40 * GIB})
    holder = child('OPTIONS = {"only": "0:0"}\n' + HOLD, says="0", env=fake_gpus.env)

    def sibling(**options: str) -> Any:
        assert out_of_child(fake_gpus, f"out = claim(1, NoPlaceholder(), only='0:2', **{options})") == [0]
        return out_of_child(fake_gpus, f"out = claim(1, NoPlaceholder(), only='0:1', **{options})")

    assert "have one memory, so it cannot be shared" in sibling(share="1GiB")[1]
    assert sibling() == [0]
    fake_gpus.process(uuids[0], holder.pid, 30 * GIB)
    assert "asked for" in sibling(min_memory="20GiB")[1]
