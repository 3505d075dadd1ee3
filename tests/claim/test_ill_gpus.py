"""GPUs that are taken last: the driver says something against them, they show work of nobody, or a context of a claim
fails there for no other reason."""

import json
import os
from collections import Counter
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from support import api
from support.claims import Host, Spies, claim
from support.forks import out_of_child
from support.state import write_for_all

import safe_gpu

RESET = "the driver recommends the recovery action Reset"
ILL = {"illness": RESET}
WEDGED = {"utilization": 97}


def taken(number: int = 1, **options: Any) -> list[int]:
    """The indices of the GPUs that a claim takes and gives back."""
    with claim(number, **options) as owner:
        return owner.devices_taken


# What each poll tells


def test_an_ill_gpu_is_taken_last(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.edits[host.uuids[0]] = ILL
    assert taken() == [1]
    assert taken(7) == [1, 2, 3, 4, 5, 6, 7]
    assert caplog.messages == []
    assert taken(8) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert caplog.messages == [f"GPU 0 seems ill, and no healthy one is free: {RESET}; see safe-gpu doctor"]


def test_a_gpu_that_works_for_nobody_is_taken_last(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    """It is not told, since its last process may have ended just now."""
    host.edits[host.uuids[0]] = WEDGED
    host.edits[host.uuids[1]] = {"utilization": 90}
    assert taken() == [1]
    assert taken(only=0) == [0]
    assert caplog.messages == []


def test_who_has_waited_takes_the_gpu_of_a_process_that_has_just_ended(host: Host, dgx: Any) -> None:
    host.edits[host.uuids[0]] = WEDGED
    dgx.hold(*range(8))
    Timer(0.3, dgx.let_go).start()
    assert taken(timeout=60) == [0]
    assert taken() == [1]


# What NVML is asked about the chosen GPUs


CODE = """
import logging
out = {"said": []}
logger = logging.getLogger("safe_gpu")
logger.setLevel(logging.INFO)
logger.addFilter(lambda record: out["said"].append(record.getMessage()))
"""


def claimed(gpus: Any, *requests: str, **environment: str) -> Any:
    """What these claims take, one after the other in one process, and what they say in ``said``."""
    code = CODE
    for request in requests:
        claim = f"claim({request}, placeholder_fn=NoPlaceholder())"
        code += f"out.setdefault('taken', []).append({claim}); safe_gpu.release_gpus()\n"
    return out_of_child(gpus, code, **environment)


def starts_over(out: Any) -> list[str]:
    return [line for line in out["said"] if line.endswith("starting over")]


def history(state_dir: Path) -> list[list[str]]:
    """The labels of the GPUs of each claim."""
    text = "".join(file.read_text() for file in sorted((state_dir / api.history.NAME).glob("*.jsonl")))
    return [line["labels"] for line in map(json.loads, text.splitlines()) if "labels" in line]


def test_a_chosen_gpu_that_is_ill_is_exchanged_for_a_healthy_one(fake_gpus: Any, state_dir: Path) -> None:
    fake_gpus.change(0, recovery=1)
    fake_gpus.change(2, remap="failed")
    out = claimed(fake_gpus, "1", "2")
    assert out["taken"] == [[1], [1, 3]]
    assert starts_over(out) == [f"GPU 0 seems ill ({RESET}): starting over"] * 2
    assert not [line for line in out["said"] if "no healthy one" in line]
    assert history(state_dir) == [["1"], ["1", "3"]]


def test_where_no_healthy_gpu_is_free_the_ill_one_is_kept(fake_gpus: Any) -> None:
    fake_gpus.set(3, recovery=1)
    fake_gpus.change(2, recovery=0)
    out = claimed(fake_gpus, "1, only='0,1'", "3")
    assert (out["taken"], starts_over(out)) == ([[0], [0, 1, 2]], [])
    told = [line for line in out["said"] if "no healthy one" in line]
    assert [line.partition(" seems")[0] for line in told] == ["GPU 0", "GPU 0", "GPU 1"]


def test_each_gpu_is_asked_about_once_and_the_others_only_beside_an_ill_one(fake_gpus: Any) -> None:
    def asked() -> int:
        claimed(fake_gpus, "1")
        return Counter(fake_gpus.calls())["nvmlDeviceGetFieldValues"]

    fake_gpus.options(log=1)
    assert asked() == 1
    fake_gpus.change(0, recovery=1)
    assert asked() == 8


def test_a_gpu_that_works_for_nobody_is_exchanged_too(fake_gpus: Any) -> None:
    fake_gpus.set(3, util=100)
    fake_gpus.change(2, util=0)
    out = claimed(fake_gpus, "1", "1, only='0,1'")
    why = "it shows 100% utilisation without a process or memory in use"
    assert (out["taken"], starts_over(out)) == ([[2], [0]], [f"GPU 0 seems ill ({why}): starting over"])


def test_an_instance_of_an_ill_gpu_is_taken_last(fake_gpus: Any) -> None:
    first, second, third = (fake_gpus.uuid("MIG", number) for number in range(3))
    fake_gpus.write({"mig": 1, "instances": f"{first},{second}", "recovery": 1}, {"mig": 1, "instances": third})
    code = "taken = claim(1, NoPlaceholder()); out = [taken, [gpu.uuid for gpu in safe_gpu.gpu_owner.gpus]]"
    assert out_of_child(fake_gpus, code) == [[1], [third]]


def test_run_takes_a_healthy_gpu(fake_gpus: Any, command: Any) -> None:
    fake_gpus.change(0, recovery=1)
    process = command.start("run", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES", env=fake_gpus.env)
    out, err = process.communicate(timeout=60)
    assert (out, err) == ("1\n", "")


@pytest.mark.usefixtures("state_dir")
def test_nobody_else_waits_while_the_driver_is_asked(host: Host, spies: Spies, monkeypatch: Any) -> None:
    def examined(snapshot: api.HostSnapshot, among: Any = None) -> api.HostSnapshot:
        host.event("examined")
        ill = [gpu._replace(illness=RESET) for gpu in snapshot.gpus if gpu.uuid == host.uuids[0]]
        return snapshot.updated(ill)

    monkeypatch.setattr(host, "examined", examined)
    assert taken() == [1]
    parts = " ".join(host.events).split("host.lock ")[1:]
    assert [part.partition("unlock")[0].split() for part in parts] == [["door", "entry"], ["door", "entry"]]
    assert Counter(host.events)["examined"] == 2  # GPU 0, and the others


# A context that fails, and nothing but the GPU explains it


def noted(gpus: Any) -> list[int]:
    """Indices of the GPUs with a note, each for an hour."""
    found = api.read_faults(os.environ["SAFE_GPU_DIR"], gpus.uuids)
    assert {fault.lasts for fault in found.values()} <= {3600}
    return [index for index, uuid in enumerate(gpus.uuids) if uuid in found]


def failing(gpus: Any, code: str, **environment: str) -> tuple[str, dict[str, Any]]:
    """The message and the attributes of the error of a claim."""
    kind, message, attributes = out_of_child(gpus, f"out = {code}", **environment)
    assert kind == "PlaceholderError", message
    return message, attributes


HOUR = "GPU 0 is taken last for an hour: start a new process"


@pytest.mark.parametrize(
    ("trouble", "code"), [("bad", 2), ("bad", 999), ("bad_init", 2), ("bad_init", 100), ("bad_init", 999)]
)
def test_one_broken_gpu_does_not_defeat_every_claim(fake_gpus: Any, trouble: str, code: int) -> None:
    fake_gpus.change(0, **{trouble: code})
    message, attributes = failing(fake_gpus, "claim(1)")
    assert (f"({code})" in message, HOUR in message, attributes["device_no"]) == (True, True, 0)
    assert ("80 GiB of 80 GiB of the GPU's memory are free, and nothing limits" in message) is (code == 2)
    assert "another process uses" not in message
    assert noted(fake_gpus) == [0]
    assert out_of_child(fake_gpus, "out = claim(1)") == [1]


def test_the_limits_of_a_share_do_not_excuse_a_broken_gpu(fake_gpus: Any, tmp_path: Path) -> None:
    """They have room for a context. MPS has its pipes there, so that its variable is set too."""
    fake_gpus.change(0, bad=2)
    (tmp_path / "control").touch()
    message, _ = failing(fake_gpus, "claim(1, share='20GiB')", CUDA_MPS_PIPE_DIRECTORY=str(tmp_path))
    assert HOUR in message
    assert noted(fake_gpus) == [0]


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("trouble", ["bad", "bad_init"])
def test_in_a_claim_of_several_it_is_found_out_which_gpu_fails(fake_gpus: Any, trouble: str, bad: int) -> None:
    fake_gpus.change(bad, **{trouble: 999})
    message, attributes = failing(fake_gpus, "claim(4)")
    assert f"GPU {bad} is taken last for an hour" in message
    assert attributes == {"device_no": bad, "uuid": fake_gpus.uuids[bad]}
    assert noted(fake_gpus) == [bad]
    assert out_of_child(fake_gpus, "out = claim(7)") == [index for index in range(8) if index != bad]


@pytest.mark.parametrize("option", ["ctx_error", "cuda_init_error"])
def test_what_fails_on_all_gpus_of_a_claim_is_no_fault_of_one(fake_gpus: Any, option: str) -> None:
    fake_gpus.options(**{option: 999})
    message, attributes = failing(fake_gpus, "claim(2)")
    assert "taken last" not in message
    assert attributes == {"device_no": 0, "uuid": fake_gpus.uuids[0]}
    assert noted(fake_gpus) == []


LIMITED = "__import__('resource').setrlimit(__import__('resource').RLIMIT_AS, (1 << 40, 1 << 40)) or claim(1)"


@pytest.mark.parametrize(
    ("code", "claims", "environment", "words"),
    [
        (2, LIMITED, {}, "the address space of this process is limited to 1024 GiB: raise it (ulimit -v"),
        (2, "claim(1)", {"CUDA_DEVICE_MEMORY_LIMIT_0": "9m"}, "CUDA_DEVICE_MEMORY_LIMIT_0=9m limits what this"),
        (2, "claim(1)", {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=9M"}, "LIMIT=0=9M limits what this process gets"),
        (2, "initialize() or claim(1)", {"CUDA_VISIBLE_DEVICES": "0"}, "80 GiB of 80 GiB"),
        (999, "initialize() or claim(1)", {"CUDA_VISIBLE_DEVICES": "0"}, "the driver is in a bad state"),
        (34, "claim(1)", {}, "stub"),
        (802, "claim(1)", {}, "Fabric Manager"),
        (803, "claim(1)", {}, "different versions"),
        (804, "claim(1)", {}, "newer than the kernel module"),
    ],
)
def test_what_the_process_or_its_host_explains_is_no_fault_of_the_gpu(
    fake_gpus: Any, code: int, claims: str, environment: dict[str, str], words: str
) -> None:
    fake_gpus.change(0, bad=code)
    message, _ = failing(fake_gpus, claims, **environment)
    assert words in message
    assert "taken last" not in message
    assert noted(fake_gpus) == []


def test_a_gpu_whose_memory_is_in_use_is_not_to_blame(fake_gpus: Any) -> None:
    fake_gpus.change(0, bad=2, used=(80 << 30) - (600 << 20))
    message, _ = failing(fake_gpus, "claim(1)", SAFE_GPU_UNEXPLAINED_MEMORY="80GiB")
    assert "600 MiB of 80 GiB of the GPU's memory are free: see safe-gpu status" in message
    assert noted(fake_gpus) == []


def test_a_device_file_that_cannot_be_opened_explains_that_cuda_finds_no_gpu(fake_gpus: Any) -> None:
    fake_gpus.change(0, bad_init=999)
    fake_gpus.devices("nvidiactl")
    message, _ = failing(fake_gpus, "claim(1)")
    assert "this process cannot open /dev/nvidia-uvm: load that module" in message
    assert noted(fake_gpus) == []
    fake_gpus.devices("nvidia-uvm")
    failing(fake_gpus, "claim(1)")
    assert noted(fake_gpus) == [0]


def test_a_simulated_gpu_that_refuses_contexts_for_an_unknown_reason(host: Host) -> None:
    host.occupy(host.uuids[1]).close()  # makes the directory
    write_for_all(Path(host.tree.path, f"{host.uuids[1]}.bad"), "it hangs")
    with pytest.raises(safe_gpu.PlaceholderError, match=r"it hangs.* GPU 1 is taken last for an hour: start a new "):
        safe_gpu.claim_gpus(3, timeout=0, affinity=None)
    assert taken(7) == [0, 2, 3, 4, 5, 6, 7]
