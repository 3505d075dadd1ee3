"""Two numberings of GPUs: nvidia-smi's index, and CUDA's ordinal after CUDA_VISIBLE_DEVICES."""

from typing import Any

import pytest

from safe_gpu.affinity.resolve_gpus import BOUND, by_name, by_ordinal, remembered, visible
from safe_gpu.errors import GPUAffinityError, UnsatisfiableRequestError
from safe_gpu.gpus.devices import Gpu, HostSnapshot

EIGHT = HostSnapshot(tuple(Gpu(number, f"GPU-{number}{number}ab", name="A100") for number in range(8)))
MIXED = HostSnapshot((Gpu(0, "GPU-00", name="T400"), Gpu(1, "GPU-11", name="H100"), Gpu(2, "GPU-22", name="H100")))
MIG = HostSnapshot(
    (
        Gpu(0, "GPU-00", name="H100", mig_enabled=True),
        Gpu(0, "MIG-01", name="H100", mig_parent="GPU-00", mig_instance=0),
        Gpu(1, "GPU-11", name="H100"),
    )
)


@pytest.mark.parametrize(("shown", "ordinal", "index"), [(None, 3, 3), ("7,2", 1, 2), ("GPU-55,GPU-1", 1, 1)])
def test_ordinals_count_what_cuda_shows(shown: str | None, ordinal: int, index: int) -> None:
    environ = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    found = by_ordinal(ordinal, EIGHT, environ)
    assert [gpu.index for gpu in found.gpus] == [index]
    assert found.title.startswith(f"GPU {index} (GPU-{index}{index}ab), CUDA ordinal {ordinal}")
    assert (f"CUDA_VISIBLE_DEVICES={shown}" in found.title) == (shown is not None)
    assert found.notes == ()


@pytest.mark.parametrize(
    ("shown", "ordinal", "names"),
    [
        ("7,2", 2, "no GPU 2: 2 are visible with CUDA_VISIBLE_DEVICES=7,2"),
        ("7", 1, "no GPU 1: 1 is visible"),
        ("0,0", 0, "shows no GPU"),
        (None, 8, "8 are visible"),
        (None, -1, "ordinal=-1"),
        (None, "0", "ordinal='0'"),
    ],
)
def test_no_such_ordinal(shown: str | None, ordinal: Any, names: str) -> None:
    with pytest.raises(GPUAffinityError, match=names):
        by_ordinal(ordinal, EIGHT, {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown})


@pytest.mark.parametrize(
    ("snapshot", "environ", "certain"),
    [
        (EIGHT, {}, True),
        (MIXED, {}, False),
        (MIXED, {"CUDA_VISIBLE_DEVICES": "0,1,2"}, False),
        (MIXED, {"CUDA_VISIBLE_DEVICES": "0,1,2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, True),
        (MIXED, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, True),
        (MIXED, {"CUDA_VISIBLE_DEVICES": "GPU-11"}, True),
        (MIG, {"CUDA_VISIBLE_DEVICES": "0"}, False),
    ],
)
def test_an_uncertain_order_is_said(snapshot: HostSnapshot, environ: dict[str, str], certain: bool) -> None:
    notes = by_ordinal(0, snapshot, environ).notes
    assert bool(notes) != certain
    assert all("not certain which GPU" in note for note in notes)


def test_names_are_those_of_nvidia_smi() -> None:
    assert [gpu.index for gpu in by_name("5-7", EIGHT).gpus] == [5, 6, 7]
    assert by_name([1, "GPU-22"], EIGHT).title == "GPU 1,2"
    assert [gpu.uuid for gpu in by_name(0, MIG).gpus] == ["GPU-00"]  # and not its instances once more
    assert [gpu.uuid for gpu in by_name("MIG-01", MIG).gpus] == ["MIG-01"]
    with pytest.raises(GPUAffinityError, match=r"no GPU 9: it has GPU 0-7"):
        by_name(9, EIGHT)
    with pytest.raises(GPUAffinityError, match=r"no GPU 0: it has none"):
        by_name(0, HostSnapshot(()))
    with pytest.raises(UnsatisfiableRequestError):
        by_name("cuda:0", EIGHT)


def test_lost_gpus_have_no_ordinal() -> None:
    snapshot = HostSnapshot((Gpu(0, "GPU-0", lost=True), Gpu(1, "GPU-1")))
    assert [gpu.index for gpu in visible(snapshot, {}).gpus] == [1]


@pytest.mark.parametrize(
    ("bound", "shown", "indices"),
    [
        (None, None, None),
        ("", None, None),
        ("GPU-55ab", None, [5]),
        ("GPU-55ab", "5", [5]),
        ("GPU-55ab,GPU-11ab", "1,5,6", [5, 1]),
        ("GPU-55ab", "1,2", None),  # a claim or launcher has chosen other GPUs since
        ("GPU-55ab,GPU-11ab", "5", None),
        ("GPU-of-another-host", None, None),
    ],
)
def test_what_was_bound_is_known_while_it_is_visible(bound: Any, shown: Any, indices: list[int] | None) -> None:
    environ = {name: value for name, value in ((BOUND, bound), ("CUDA_VISIBLE_DEVICES", shown)) if value is not None}
    found = remembered(EIGHT, environ)
    assert (found and [gpu.index for gpu in found.gpus]) == indices


def test_a_mig_instance_is_part_of_its_gpu() -> None:
    assert remembered(MIG, {BOUND: "GPU-00", "CUDA_VISIBLE_DEVICES": "MIG-01"})
    assert remembered(MIG, {BOUND: "MIG-01", "CUDA_VISIBLE_DEVICES": "GPU-00"})
    assert not remembered(MIG, {BOUND: "GPU-11", "CUDA_VISIBLE_DEVICES": "MIG-01"})
