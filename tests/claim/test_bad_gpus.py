"""A GPU that fails every claim: it is noted, taken last, tried before it is taken, and forgiven when it works."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from support.forks import forked
from support.ground import write_for_all

import safe_gpu
from safe_gpu import NotEnoughGpusError, PlaceholderError
from safe_gpu.coordination.faults import write_fault
from safe_gpu.gpus.devices import GpuFault

ECC = "CUDA_ERROR_ECC_UNCORRECTABLE"


def notes(directory: str | None = None) -> list[str]:
    """UUIDs of the GPUs with a note."""
    return sorted(path.stem for path in Path(directory or os.environ["SAFE_GPU_DIR"], "faults").glob("[!.]*"))


def note(uuid: str, age: float = 0.0) -> None:
    write_fault(os.environ["SAFE_GPU_DIR"], uuid, GpuFault(time.time() - age, "CUDA_ERROR_ECC_UNCORRECTABLE"))


def claim(number: int = 1, **options: Any) -> safe_gpu.GPUOwner:
    return safe_gpu.claim_gpus(number, **{"timeout": 0, "affinity": None, **options})


def damage(host: Any, uuid: str) -> None:
    """Let a simulated GPU refuse contexts."""
    host.occupy(uuid).close()  # makes the directory
    write_for_all(Path(*host._place, f"{uuid}.bad"), f"{ECC}: uncorrectable ECC error encountered")


# On a simulated host, where nothing fixes the GPUs of a process


def test_a_claim_that_gets_a_bad_gpu_takes_another(host: Any, caplog: pytest.LogCaptureFixture) -> None:
    damage(host, host.uuids[0])
    owner = claim()
    assert owner.devices_taken == [1]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert notes() == [host.uuids[0]]
    assert "GPU 0 is taken last for ten minutes" in caplog.text
    owner.release_gpus()
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_a_bad_gpu_of_several_is_replaced(host: Any) -> None:
    damage(host, host.uuids[2])
    damage(host, host.uuids[5])
    owner = claim(6)
    assert owner.devices_taken == [0, 1, 3, 4, 6, 7]
    assert len(owner.placeholders) == 6
    assert notes() == sorted([host.uuids[2], host.uuids[5]])


def test_each_gpu_is_tried_once_and_the_last_error_tells(host: Any) -> None:
    for uuid in host.uuids:
        damage(host, uuid)
    attempts = []

    def failing(device_no: int) -> None:
        attempts.append(os.environ["CUDA_VISIBLE_DEVICES"])
        raise RuntimeError("uncorrectable ECC error encountered")

    with pytest.raises(PlaceholderError, match="GPU 7 is taken last for ten minutes, but this claim can get too few"):
        claim(placeholder_fn=failing)
    assert attempts == ["0"]  # the others failed in their trials already
    assert notes() == sorted(host.uuids)


def test_only_the_bad_gpu_is_free(host: Any, ground: Any) -> None:
    damage(host, host.uuids[0])
    ground.hold(*range(1, 8))
    with pytest.raises(NotEnoughGpusError, match=f"GPU 0 .*it failed in this claim: .*{ECC}"):
        claim()
    assert notes() == [host.uuids[0]]


@pytest.mark.parametrize("text", ["Torch not compiled with CUDA enabled", "out of memory", "my bug"])
def test_the_trouble_of_a_framework_is_no_fault_of_the_gpu(host: Any, text: str, untouched: Any) -> None:
    def failing(device_no: int) -> None:
        raise RuntimeError(text)

    with untouched(), pytest.raises(PlaceholderError) as caught:
        claim(placeholder_fn=failing)
    assert caught.value.uuid == host.uuids[0]
    assert "taken last" not in str(caught.value)
    assert notes() == []


def test_a_noted_gpu_is_taken_last(host: Any) -> None:
    note(host.uuids[0])
    note(host.uuids[1])
    assert claim(6).devices_taken == [2, 3, 4, 5, 6, 7]


def test_an_old_note_does_not_make_a_gpu_the_last_choice(host: Any) -> None:
    note(host.uuids[0], age=601)
    assert claim().devices_taken == [0]
    assert notes() == []


@pytest.mark.parametrize("placeholder", [None, safe_gpu.NoPlaceholder()])
def test_a_noted_gpu_that_works_again_is_forgiven(host: Any, ground: Any, placeholder: Any) -> None:
    note(host.uuids[0])
    ground.hold(*range(1, 8))
    assert claim(placeholder_fn=placeholder).devices_taken == [0]
    assert notes() == []


def test_a_noted_gpu_that_has_to_be_taken_is_tried_first(host: Any, ground: Any) -> None:
    damage(host, host.uuids[0])
    note(host.uuids[0], age=300)
    ground.hold(*range(2, 8))
    assert claim(1, placeholder_fn=safe_gpu.NoPlaceholder()).devices_taken == [1]
    safe_gpu.release_gpus()
    with pytest.raises(PlaceholderError, match=f"GPU 0 was tried first and failed: .*{ECC}"):
        claim(1, placeholder_fn=safe_gpu.NoPlaceholder(), only=0)


def test_a_note_that_cannot_be_written_costs_nothing(host: Any, caplog: pytest.LogCaptureFixture) -> None:
    claim()
    safe_gpu.release_gpus()
    Path(os.environ["SAFE_GPU_DIR"], "faults", f"{host.uuids[0]}.{os.geteuid()}").mkdir(parents=True)
    damage(host, host.uuids[0])
    assert claim().devices_taken == [1]
    assert "note" in caplog.text


# With CUDA, which fixes the GPUs of a process when it starts


def run(gpus: Any, code: str) -> Any:
    """What an expression gives in a new process."""
    return forked(gpus, f"out = {code}")


@pytest.mark.parametrize("code", [46, 214, 714])
def test_a_bad_gpu_swallows_one_claim_and_no_more(fake_gpus: Any, code: int) -> None:
    fake_gpus.change(0, bad=code)
    name, message, _ = run(fake_gpus, "claim(1)")
    assert name == "PlaceholderError"
    assert f"({code})" in message
    assert message.endswith("; GPU 0 is taken last for ten minutes: start a new process")
    assert notes() == [fake_gpus.uuids[0]]
    assert [run(fake_gpus, "claim(1)"), run(fake_gpus, "claim(7)")] == [[1], [1, 2, 3, 4, 5, 6, 7]]


def test_a_hidden_process_on_an_exclusive_gpu_makes_it_the_last_choice(fake_gpus: Any, stranger_pid: int) -> None:
    fake_gpus.set(8, mode=3)
    fake_gpus.process(fake_gpus.uuids[0], stranger_pid, 8 << 20, kind="graphics")  # not among those that are asked for
    assert run(fake_gpus, "claim(1)")[0] == "PlaceholderError"
    assert run(fake_gpus, "claim(1)") == [1]


def test_a_noted_gpu_is_tried_in_a_child_and_the_process_stays_free(fake_gpus: Any) -> None:
    fake_gpus.set(2)
    fake_gpus.change(0, bad=214)
    fake_gpus.change(1, bad=214)
    note(fake_gpus.uuids[0])
    note(fake_gpus.uuids[1])
    code = "[claim(1), __import__('safe_gpu.runtimes.cuda').runtimes.cuda.CUDA.visible_if_initialized()]"
    (name, message, _), visible = run(fake_gpus, code)
    assert name == "PlaceholderError"
    assert "GPU 1 is taken last" in message
    assert visible is None
    fake_gpus.change(1, bad=0)
    assert run(fake_gpus, "claim(1)") == [1]  # 0 was tried, and failed
    assert notes() == [fake_gpus.uuids[0]]


def test_a_gpu_that_stays_bad_swallows_no_claim_every_ten_minutes(fake_gpus: Any) -> None:
    fake_gpus.change(0, bad=214)
    note(fake_gpus.uuids[0], age=86400)
    assert run(fake_gpus, "claim(1)") == [1]
    assert notes() == [fake_gpus.uuids[0]]
    assert run(fake_gpus, "claim(1)") == [1]


def test_run_falls_over_too(fake_gpus: Any, command: Any) -> None:
    fake_gpus.set(2)
    fake_gpus.change(0, bad=214)
    note(fake_gpus.uuids[0])
    note(fake_gpus.uuids[1])
    shown = command.run("run", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES", env=fake_gpus.env)
    assert (shown.stdout, shown.returncode) == ("1\n", 0), shown.stderr
    assert "GPU 0 is taken last for ten minutes" in shown.stderr
    assert notes() == [fake_gpus.uuids[0]]


def test_a_start_of_cuda_that_fails_leaves_other_gpus_to_the_process_but_blames_none_for_it(fake_gpus: Any) -> None:
    """The fake libcuda, as CUDA may, does not look anew after a cuInit that failed: no GPU works in that process."""
    fake_gpus.change(0, bad_init=214)
    code = """
import safe_gpu
try:  # in a forked process CUDA's refusal would be one of the fork's
    safe_gpu.claim_gpus(1, timeout=0, affinity=None)
except safe_gpu.PlaceholderError as err:
    print(err)
"""
    assert "GPU 1 works in another process: start a new process" in fake_gpus.python(code)
    assert notes() == [fake_gpus.uuids[0]]


def test_a_start_of_cuda_that_fails_on_one_of_several_gpus_is_blamed_on_that_one(fake_gpus: Any) -> None:
    fake_gpus.change(2, bad_init=214)
    assert run(fake_gpus, "claim(4)")[0] == "PlaceholderError"
    assert notes() == [fake_gpus.uuids[2]]
    assert run(fake_gpus, "claim(4)") == [0, 1, 3, 4]


def test_a_notebook_that_claims_its_noted_gpu_again_is_not_kept_out_by_itself(fake_gpus: Any) -> None:
    fake_gpus.set(1, mode=3)
    place = os.environ["SAFE_GPU_DIR"]
    code = f"""
claim(1)
kept = CudaPlaceholder()(0)  # a framework keeps its context
safe_gpu.release_gpus()
from safe_gpu.coordination.faults import write_fault
write_fault({place!r}, {fake_gpus.uuids[0]!r}, safe_gpu.gpus.devices.GpuFault({time.time()}, {ECC!r}))
out = claim(1)
"""
    assert forked(fake_gpus, code) == [0]
    assert notes() == []
