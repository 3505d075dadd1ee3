"""A GPU on which a claim failed: it is noted, taken last, and forgiven once a placeholder works there."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from support.forks import forked
from support.ground import write_for_all

import safe_gpu
from safe_gpu import PlaceholderError
from safe_gpu.coordination.faults import write_fault
from safe_gpu.gpus.devices import GpuFault

ECC = "CUDA_ERROR_ECC_UNCORRECTABLE"


def notes(directory: str | None = None) -> list[str]:
    """UUIDs of the GPUs with a note."""
    return sorted(path.stem for path in Path(directory or os.environ["SAFE_GPU_DIR"], "faults").glob("[!.]*"))


def claim(number: int = 1, **options: Any) -> safe_gpu.GPUOwner:
    return safe_gpu.claim_gpus(number, **{"timeout": 0, "affinity": None, **options})


def damage(host: Any, uuid: str) -> None:
    """Let a simulated GPU refuse contexts."""
    host.occupy(uuid).close()  # makes the directory
    write_for_all(Path(*host._place, f"{uuid}.bad"), f"{ECC}: uncorrectable ECC error encountered")


def test_a_claim_that_gets_a_bad_gpu_fails_and_the_next_takes_another(
    host: Any, caplog: pytest.LogCaptureFixture
) -> None:
    damage(host, host.uuids[0])
    with pytest.raises(
        PlaceholderError, match=rf"{ECC}.* GPU 0 is taken last for a day: start a new process$"
    ) as caught:
        claim(2)
    assert (caught.value.device_no, caught.value.uuid) == (0, host.uuids[0])
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert notes() == [host.uuids[0]]
    assert "Failed to acquire placeholder on GPU 0" in caplog.text
    assert claim(7).devices_taken == [1, 2, 3, 4, 5, 6, 7]
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


@pytest.mark.parametrize(("placeholder", "forgiven"), [(None, True), (safe_gpu.NoPlaceholder(), False)])
def test_a_noted_gpu_is_forgiven_where_a_placeholder_works(
    host: Any, ground: Any, placeholder: Any, forgiven: bool
) -> None:
    write_fault(os.environ["SAFE_GPU_DIR"], host.uuids[0], GpuFault(time.time(), ECC))
    ground.hold(*range(1, 8))
    assert claim(placeholder_fn=placeholder).devices_taken == [0]
    assert notes() == ([] if forgiven else [host.uuids[0]])


def test_a_note_that_cannot_be_written_costs_nothing(host: Any, caplog: pytest.LogCaptureFixture) -> None:
    claim()
    safe_gpu.release_gpus()
    Path(os.environ["SAFE_GPU_DIR"], "faults", f"{host.uuids[0]}.{os.geteuid()}").mkdir(parents=True)
    damage(host, host.uuids[0])
    with pytest.raises(PlaceholderError, match=ECC):
        claim()
    assert "the note that a GPU failed cannot be changed" in caplog.text


# With CUDA, which fixes the GPUs of a process when it starts


def run(gpus: Any, code: str) -> Any:
    """What an expression gives in a new process."""
    return forked(gpus, f"out = {code}")


def test_a_hidden_process_on_an_exclusive_gpu_makes_it_the_last_choice(fake_gpus: Any, stranger_pid: int) -> None:
    fake_gpus.set(8, mode=3)
    fake_gpus.process(fake_gpus.uuids[0], stranger_pid, 8 << 20, kind="graphics")  # not among those that are asked for
    assert run(fake_gpus, "claim(1)")[0] == "PlaceholderError"
    assert run(fake_gpus, "claim(1)") == [1]


@pytest.mark.parametrize(("trouble", "number", "noted"), [("bad", 1, [0]), ("bad_init", 1, [0]), ("bad_init", 4, [])])
def test_a_failure_of_cuda_is_blamed_on_the_gpu_or_on_the_only_one_that_its_start_saw(
    fake_gpus: Any, trouble: str, number: int, noted: list[int]
) -> None:
    fake_gpus.change(0, **{trouble: 214})
    name, message, _ = run(fake_gpus, f"claim({number})")
    assert (name, "(214)" in message) == ("PlaceholderError", True)
    assert notes() == [fake_gpus.uuids[index] for index in noted]
    assert not noted or run(fake_gpus, "claim(7)") == [1, 2, 3, 4, 5, 6, 7]
