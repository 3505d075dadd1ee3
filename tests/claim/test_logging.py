"""The logger ``safe_gpu``: silent unless asked, one line a step, and the same facts as data."""

import logging
import os
import re

import pytest

from safe_gpu import NoPlaceholder, NotEnoughGpusError, claim_gpus
from safe_gpu.host import procfs


def test_a_bare_script_hears_nothing(child) -> None:
    one = child("""
import safe_gpu
with safe_gpu.GPUOwner(2) as owner: pass
for arguments in {}, {"timeout": 0}, {"nb_gpus": 8}, {"affinity": "socket"}, {"memory": "preferred"}:
    safe_gpu.claim_gpus(**arguments)
    say(safe_gpu.get_free_gpus())
    safe_gpu.release_gpus()
""")
    out, err = one.process.communicate(timeout=60)
    assert (one.process.returncode, len(out.splitlines()), err) == (0, 5, "")


WAITS = """
import safe_gpu
from safe_gpu.claim import report as news
news._WARNING_DELAY = {seconds}
safe_gpu.claim_gpus(timeout=None)
say('has')
"""


def test_a_bare_script_that_waits_longer_hears_it_once(child, ground, eventually) -> None:
    ground.hold(*range(8))
    head = child(WAITS.format(seconds=0.01))
    user = re.escape(procfs.user_name(os.geteuid()))
    said = rf"safe_gpu: waiting for 1 GPU \(0 free\); GPU 0-7: {user} \(pid \d+\) for \d+ s\n"
    assert re.fullmatch(said, head.process.stderr.readline())
    who = rf"{user} \(pid {head.process.pid}, wants 1 GPU, queued for \d+ s\)"
    behind = child(WAITS.format(seconds=0.01))
    said = rf"safe_gpu: waiting for 1 GPU; behind {who}\n"
    assert re.fullmatch(said, behind.process.stderr.readline())
    ground.let_go()
    for one in (head, behind):
        assert one.process.communicate(timeout=60) == ("has\n", "")


@pytest.mark.parametrize(
    ("call", "environment", "text"),
    [
        ("claim_gpus(2)", {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "1"}, "This claim takes 2 GPUs, but"),
        ("bind(9, strict=False)", {}, "not bound: this host has no GPU 9"),
        ("claim_gpus()", {"SAFE_GPU_TIMOUT": "5"}, "SAFE_GPU_TIMOUT is not a variable of"),
    ],
)
@pytest.mark.parametrize(("configured", "sender"), [("", "safe_gpu: "), ("logging.basicConfig()", "WARNING:safe_gpu:")])
def test_every_warning_names_its_sender_once(
    child, call: str, environment: dict[str, str], text: str, configured: str, sender: str
) -> None:
    one = child(f"import logging; {configured}\nfrom safe_gpu import *\n{call}", env=environment)
    lines = one.process.communicate(timeout=60)[1].splitlines()
    assert lines
    assert all(line.startswith(sender) and line.count("safe_gpu: ") == (not configured) for line in lines)
    assert any(line.startswith(sender + text) for line in lines)


def test_one_line_a_step_and_the_same_facts_as_data(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "safe_gpu")
    before = list(logging.root.handlers)
    with claim_gpus(2, affinity=None, delegate=True) as owner:
        uuids, token = [gpu.uuid for gpu in owner.gpus], os.environ["SAFE_GPU_SCOPE"]
    lines = {record.getMessage(): record for record in caplog.records}
    leased, assigned = f"Leased GPU 0,1 ({', '.join(uuids)}) (simulated)", "Set CUDA_VISIBLE_DEVICES=0,1"
    steps = ["acquiring lock", "lock acquired", "lock released", leased, assigned, "Placeholder holds GPU 0,1"]
    assert list(lines) == [*steps, *(f"Releasing placeholder on CUDA device: {number}" for number in range(2))]
    assert {(record.name, record.levelno) for record in lines.values()} == {("safe_gpu", logging.INFO)}
    assert (lines[leased].safe_gpu_uuids, lines[leased].safe_gpu_devices) == (uuids, [0, 1])
    variables = {"CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "SAFE_GPU_SCOPE": token}
    assert lines[assigned].safe_gpu_environment == variables
    assert (logging.root.handlers, logging.getLogger("safe_gpu").handlers) == (before, [])
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:laptop")
    with claim_gpus(1, affinity=None):
        display = "Running on a machine with single GPU used for actual display"
        assert [record.getMessage() for record in caplog.records].count(display) == 1


@pytest.mark.parametrize("queued", [False, True])
def test_a_wait_is_told_with_its_data(line, ground, caplog: pytest.LogCaptureFixture, queued: bool) -> None:
    if queued:
        line(8)
    ground.hold(*range(1 if queued else 8))
    caplog.set_level(logging.INFO, "safe_gpu")
    with pytest.raises(NotEnoughGpusError):
        claim_gpus(1, NoPlaceholder(), affinity=None, timeout=0.5)
    (waiting,) = [record for record in caplog.records if record.getMessage().startswith("waiting for 1 GPU (")]
    where = r"7 are free for 1 claim ahead\), #2 in the queue; behind .*" if queued else r"0 free\); GPU 0-7: .*"
    assert re.fullmatch(rf"waiting for 1 GPU \({where}", waiting.getMessage())
    assert waiting.levelno == logging.INFO
    told = (waiting.safe_gpu_position, waiting.safe_gpu_free, waiting.safe_gpu_needed)
    assert told == ((2, 7, 1) if queued else (1, 0, 1))
    assert len(waiting.safe_gpu_verdicts) == 8
    ahead = waiting.safe_gpu_ahead
    assert (ahead and (ahead.pid, ahead.nb_gpus, ahead.stopped)) == ((os.getpid(), 8, False) if queued else None)
