"""``doctor`` on GPUs and their driver, and whether it lists processes."""

import re

import pytest
from support.findings import ASK, finding, says

from safe_gpu.doctor import CheckedHost


def test_a_good_host_of_gpus(fake_gpus) -> None:
    fake_gpus.use_nvml_here()
    host = CheckedHost()
    for name in ("GPU driver", "access to GPUs", "process lists"):
        assert finding(name, host).status == "passed", name
    assert finding("GPU driver", host).detail == "nvml 550.54.15: 8 GPUs, NVIDIA A100-SXM4-80GB"
    fake_gpus.options(driver_version="535.54.03")
    says("GPU driver", "warning", "wrong numbers")


@pytest.mark.parametrize(
    ("change", "check", "status", "words"),
    [
        ({"lost": 1}, "access to GPUs", "warning", "GPU 2"),
        ({"handle_error": 4}, "access to GPUs", "warning", "GPU 2"),
        ({"compute_error": 999}, "process lists", "warning", "GPU 2"),
    ],
)
def test_faults_of_gpus(fake_gpus, change: dict[str, object], check: str, status: str, words: str) -> None:
    fake_gpus.change(2, **change)
    fake_gpus.use_nvml_here()
    says(check, status, words)


def test_no_gpus_and_no_driver(fake_gpus) -> None:
    fake_gpus.write()
    fake_gpus.use_nvml_here()
    assert "shows no GPU" in finding("GPU driver").detail
    fake_gpus.options(init_error=9)
    host = CheckedHost()
    assert finding("GPU driver", host).status == "failed"
    for name in ("CUDA", "access to GPUs", "process lists"):
        assert finding(name, host).status == "skipped", name


def test_a_slow_driver() -> None:
    host = CheckedHost()
    assert host.snapshot is not None
    host.poll_seconds = 3.2
    says("GPU driver", "warning", "3.20 s", host, "persistence")


def test_cuda_in_a_child(fake_gpus) -> None:
    def ask(**variables: str) -> str:
        return fake_gpus.python(ASK, "CUDA", **variables)

    assert ask(CUDA_VISIBLE_DEVICES="1") == "passed|CUDA can be initialised and sees 8 GPUs|\n"
    fake_gpus.options(cuda_init_error=802)
    assert re.match(r"failed\|CUDA could not be asked.*802", ask())


def lists(fake_gpus, **variables: str) -> tuple[str, str, str]:
    status, detail, fix = fake_gpus.python(ASK, "process lists", **variables).strip("\n").split("|")
    return status, detail, fix


def test_memory_of_nobody(fake_gpus) -> None:
    fake_gpus.change(2, used=600 << 20)
    status, detail, fix = lists(fake_gpus)
    assert (status, detail.startswith("GPU 2: 600 MiB of memory in use by no process")) == ("warning", True)
    assert "SAFE_GPU_UNEXPLAINED_MEMORY" in fix
    assert lists(fake_gpus, SAFE_GPU_UNEXPLAINED_MEMORY="1GiB")[0] == "passed"


def test_lists_that_nobody_asks_for(fake_gpus) -> None:
    fake_gpus.change(2, compute_error=3)
    status, detail, fix = lists(fake_gpus)
    assert (status, "GPU 2" in detail, "SAFE_GPU_PROCESS_LIST=optional" in fix) == ("failed", True, True)
    status, detail, _ = lists(fake_gpus, SAFE_GPU_PROCESS_LIST="optional")
    assert (status, "by its memory alone" in detail) == ("warning", True)
