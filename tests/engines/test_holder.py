"""What a holder does on its host: the claim, the report, the place of the workers."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from safe_gpu import (
    AffinityOptions,
    AlreadyClaimedError,
    NoPlaceholder,
    NotEnoughGpusError,
    UnsatisfiableRequestError,
    get_free_gpus,
)
from safe_gpu.affinity.binding import undo
from safe_gpu.engines.holder import Holder, HostReport, Wishes, enter_worker


@pytest.fixture
def make() -> Iterator[Callable[..., Holder]]:
    """Holders in this process, one at a time; they release at the end."""
    made: list[Holder] = []

    def make_one(**wishes: Any) -> Holder:
        made.append(Holder(pickle.loads(pickle.dumps(Wishes(**wishes))), "a test"))
        return made[-1]

    yield make_one
    for holder in made:
        holder.release()


def test_it_claims_delegates_and_gives_back(make: Callable[..., Holder]) -> None:
    before = dict(os.environ), os.sched_getaffinity(0)
    holder = make()
    held = holder.claim(2, 0)
    assert isinstance(held, tuple)
    assert [gpu.index for gpu in held] == [0, 1]
    assert os.sched_getaffinity(0) == before[1], "the holder itself is not bound"
    for gpu in held:
        assert gpu.environment == {
            "CUDA_VISIBLE_DEVICES": str(gpu.index),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "SAFE_GPU_SCOPE": os.environ["SAFE_GPU_SCOPE"],
        }
        assert gpu.inherited_position is None
        assert gpu.cpus == {cpu for core in gpu.cores for cpu in core} <= before[1]
    assert get_free_gpus() == ["2", "3", "4", "5", "6", "7"]
    holder.release()
    holder.release()
    assert (dict(os.environ), os.sched_getaffinity(0)) == before
    assert len(get_free_gpus()) == 8
    assert isinstance(holder.claim(8, 0), tuple), "and it may claim again"


def test_refusals_are_answers(make: Callable[..., Holder]) -> None:
    assert isinstance(make().claim(9, 0), UnsatisfiableRequestError)
    assert isinstance(make(selection={"model": "V100"}).claim(1, 0), UnsatisfiableRequestError)
    holder = make(affinity=AffinityOptions(mode="unique_contiguous", min_physical_cores=5000))
    assert not isinstance(holder.claim(1, 0), tuple)
    assert len(get_free_gpus()) == 8, "a claim whose CPUs cannot be planned holds nothing"


def test_the_place_in_an_inherited_list(make: Callable[..., Holder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,4,2")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    held = make(selection={"only": [2, 6]}).claim(2, 0)
    assert isinstance(held, tuple)
    assert [(gpu.index, gpu.inherited_position) for gpu in held] == [(2, 2), (6, 0)]


def test_uuids(make: Callable[..., Holder]) -> None:
    (gpu,) = make(visible_as="uuid", affinity=None).claim(1, 0)  # type: ignore[misc]
    assert gpu.environment["CUDA_VISIBLE_DEVICES"] == gpu.uuid
    assert "CUDA_DEVICE_ORDER" not in gpu.environment
    assert (gpu.cpus, gpu.cores) == (frozenset(), ())


def test_the_report(make: Callable[..., Holder], monkeypatch: pytest.MonkeyPatch) -> None:
    holder = make()
    report = holder.report()
    assert isinstance(report, HostReport)
    assert report == make().report()
    assert holder.report(3).free == 8
    holder.claim(2, 0)
    assert isinstance(make().claim(1, 0), AlreadyClaimedError)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")  # as in another process
    assert make().report(3).free == 6
    assert make().report(9).free == -1
    assert make(selection={"model": "H100"}).report(1).free == -1


def test_two_state_directories_are_two_hosts(make: Callable[..., Holder], monkeypatch: pytest.MonkeyPatch) -> None:
    here = make().report().rank
    monkeypatch.setenv("SAFE_GPU_DIR", os.environ["SAFE_GPU_DIR"] + "-other")
    assert make().report().rank != here


def test_an_exclusive_gpu_is_left_to_the_workers(fake_gpus: Any) -> None:
    code = """
import sys
from safe_gpu.engines.holder import Holder, Wishes
holder = Holder(Wishes(affinity=None), "a test")
assert isinstance(holder.claim(1, 0), tuple)
print(len([thing for thing in holder._owner.placeholders if thing is not None]))
"""
    assert fake_gpus.python(code).split() == ["1"]
    fake_gpus.set(8, mode=3)
    assert fake_gpus.python(code).split() == ["0"]


def test_a_placeholder_of_the_callers(make: Callable[..., Holder]) -> None:
    assert isinstance(make(placeholder_fn=NoPlaceholder()).claim(1, 0), tuple)


def test_busy_is_an_answer_too(make: Callable[..., Holder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    answer = make().claim(1, 0)
    assert isinstance(answer, (NotEnoughGpusError, UnsatisfiableRequestError))


def test_a_worker_is_moved_or_says_why_not() -> None:
    mask = os.sched_getaffinity(0)
    cpu = min(mask)
    try:
        assert "bound" in enter_worker([cpu], None, None)
        assert os.sched_getaffinity(0) == {cpu}
    finally:
        undo()
    assert enter_worker([], None, None) == "not bound"
    assert enter_worker([max(mask) + 4096], None, None).startswith("not bound: ")
    undo()
    assert os.sched_getaffinity(0) == mask
