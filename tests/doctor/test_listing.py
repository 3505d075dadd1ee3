"""Whether the driver lists processes: ``doctor`` tries it with a context of its own."""

from __future__ import annotations

import os
from typing import Any

import pytest

ASK = """
from safe_gpu import doctor
found = dict(doctor.CHECKS)["process lists"](doctor.CheckedHost())
print(found.status, found.detail, found.fix, sep="|")
"""
MIB = 1 << 20


def ask(fake_gpus: Any, **variables: str) -> tuple[str, str, str]:
    status, detail, fix = fake_gpus.python(ASK, **variables).strip("\n").split("|")
    return status, detail, fix


def test_a_driver_that_lists_processes(fake_gpus: Any) -> None:
    assert ask(fake_gpus) == ("passed", "the driver lists the processes of every GPU", "")
    assert not list(fake_gpus.directory.glob("procs/*/[0-9]*")), "the context was for a moment"


@pytest.mark.parametrize("options", [{"hidden": 1}, {"lag_ms": 10**6}])
def test_a_driver_that_lists_nobody(fake_gpus: Any, options: dict[str, int]) -> None:
    fake_gpus.options(**options)
    status, detail, fix = ask(fake_gpus)
    assert status == "failed"
    assert "does not list the process of a CUDA context" in detail
    assert "--pid=host" in fix


def test_a_driver_that_lists_numbers_of_the_host(fake_gpus: Any) -> None:
    fake_gpus.options(listed_as=os.getpid())
    assert ask(fake_gpus)[0] == "passed"


def test_where_no_gpu_is_free_it_is_not_tried(fake_gpus: Any) -> None:
    for uuid in fake_gpus.uuids:
        fake_gpus.process(uuid, os.getpid())
    status, detail, _ = ask(fake_gpus)
    assert status == "passed"
    assert "not tried with a context: 1 GPU asked for, 0 free" in detail


def test_memory_of_nobody(fake_gpus: Any) -> None:
    fake_gpus.change(2, used=600 * MIB)
    status, detail, fix = ask(fake_gpus)
    assert (status, detail.startswith("GPU 2: 600 MiB of memory in use by no process")) == ("warning", True)
    assert "SAFE_GPU_UNEXPLAINED_MEMORY" in fix
    assert ask(fake_gpus, SAFE_GPU_UNEXPLAINED_MEMORY="1GiB")[0] == "passed"


def test_lists_that_nobody_asks_for(fake_gpus: Any) -> None:
    fake_gpus.change(2, compute_error=3)
    status, detail, fix = ask(fake_gpus)
    assert (status, "GPU 2" in detail, "SAFE_GPU_PROCESS_LIST=optional" in fix) == ("failed", True, True)
    status, detail, _ = ask(fake_gpus, SAFE_GPU_PROCESS_LIST="optional")
    assert (status, "by lease and memory alone" in detail) == ("warning", True)
