from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest

from safe_gpu.gpus.devices import Gpu, GpuProcess, HostSnapshot
from safe_gpu.selection.request import parse_request

GPU = Gpu(3, "GPU-a", "Model", processes=(GpuProcess(7, memory_used=5),))


@pytest.mark.parametrize("record", [GPU, GpuProcess(7), HostSnapshot((GPU,), "nvml"), parse_request(2, model="A100")])
def test_records_compare_by_what_they_say(record: object) -> None:
    for twin in (copy.deepcopy(record), pickle.loads(pickle.dumps(record)), replace(record)):  # type: ignore[type-var]
        assert twin == record
        assert hash(twin) == hash(record)
    name, value = next(iter(vars(record).items()))
    assert record != replace(record, **{name: None})  # type: ignore[type-var]
    assert record != vars(record)
    assert f"{type(record).__name__}({name}={value!r}" in repr(record)
    with pytest.raises(FrozenInstanceError):
        setattr(record, name, value)


def test_records_of_two_kinds_differ() -> None:
    class Other(GpuProcess):
        pass

    assert Other(7) != GpuProcess(7)
