"""When indices in CUDA_VISIBLE_DEVICES have come to mean other GPUs than those of the claim."""

import pytest

from safe_gpu.gpus.devices import Gpu, HostSnapshot
from safe_gpu.runtimes.visible_devices import stale_indices

GPUS = [Gpu(index, f"GPU-{index}", "Model") for index in range(4)]


def host(*lost: int) -> HostSnapshot:
    return HostSnapshot(tuple(gpu._replace(lost=gpu.index in lost) for gpu in GPUS))


def uuids(*indices: int) -> list[str]:
    return [f"GPU-{index}" for index in indices]


@pytest.mark.parametrize(
    ("value", "claimed", "lost", "text"),
    [
        # They mean what they did.
        ("1", (1,), (), ""),
        ("1", (1,), (3,), ""),  # a GPU behind it is lost
        ("GPU-1", (1,), (0,), ""),
        (None, (1,), (0,), ""),
        ("", (1,), (0,), ""),
        ("-1", (1,), (0,), ""),  # a program that hides its GPUs
        ("1,", (1,), (), ""),
        ("1", (), (0,), ""),  # no claim
        # They have shifted.
        ("1", (1,), (0,), "now means GPU 2, which this claim does not hold, since GPU 0 is lost: "),
        ("1,2", (1, 2), (1,), "now means GPU 3, which this claim does not hold, since GPU 1 is lost: "),
        ("3", (3,), (0,), "now means fewer GPUs than this claim holds, since GPU 0 is lost: "),
        ("0,1,2,3", (0, 1, 2, 3), (2,), "now means fewer GPUs than this claim holds, since GPU 2 is lost: "),
        ("1", (2,), (), "now means GPU 1, which this claim does not hold: "),
    ],
)
def test_what_indices_mean_now(value: str | None, claimed: tuple[int, ...], lost: tuple[int, ...], text: str) -> None:
    found = stale_indices(value, "PCI_BUS_ID", uuids(*claimed), host(*lost))
    if not text:
        assert found == ""
        return
    assert found.startswith(f"CUDA_VISIBLE_DEVICES={value} {text}")
    left = [index for index in claimed if index not in lost]
    assert f"set CUDA_VISIBLE_DEVICES={','.join(uuids(*left))} before CUDA starts" in found


def test_a_claim_whose_gpus_are_lost_has_nothing_left() -> None:
    assert ": end this claim" in stale_indices("1", "PCI_BUS_ID", uuids(1), host(1))


def test_a_gpu_that_the_driver_does_not_list_any_more() -> None:
    gone = HostSnapshot(tuple(gpu._replace(index=gpu.index - 1) for gpu in GPUS[1:]))
    assert "now means GPU 1, which this claim does not hold: " in stale_indices("1", "PCI_BUS_ID", uuids(1), gone)
    assert "since a claimed GPU is gone: end this claim" in stale_indices("0", "PCI_BUS_ID", uuids(0), gone)
