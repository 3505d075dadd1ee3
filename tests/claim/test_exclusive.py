"""Claims of GPUs in compute mode EXCLUSIVE_PROCESS, whose children use CUDA: real processes on fake libraries."""

from typing import Any

from support.forks import out_of_child

CODE = """
import logging
warnings = []
def keep(record):
    if record.levelno >= logging.WARNING:
        warnings.append(record.getMessage())
logging.getLogger("safe_gpu").addFilter(keep)
USE = "from safe_gpu.runtimes.cuda import CUDA; CUDA.hold(0); print('used')"
def child_says():
    done = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True)
    return done.stdout + done.stderr
"""


def run(gpus: Any, code: str) -> Any:
    """What ``code`` leaves in ``out``."""
    return out_of_child(gpus, CODE + code)


def test_the_child_processes_of_a_claim_can_use_an_exclusive_gpu(fake_gpus: Any) -> None:
    fake_gpus.set(2)
    fake_gpus.change(1, mode=3)
    code = """
claim(1, only=1)
out = [list(safe_gpu.gpu_owner.placeholders), child_says()]
safe_gpu.release_gpus()
claim(2)
out.append(warnings)
"""
    placeholders, child, (warning,) = run(fake_gpus, code)
    assert (placeholders, child) == ([None], "used\n")
    assert warning.startswith("GPU 1 admits one process (compute mode EXCLUSIVE_PROCESS): this claim makes no ")
    assert "CudaPlaceholder()" in warning


def test_a_placeholder_that_was_chosen_stays_there_with_a_warning(fake_gpus: Any) -> None:
    fake_gpus.set(1, mode=3)
    code = "claim(1, CudaPlaceholder()); out = [safe_gpu.gpu_owner.placeholders[0].uuid, child_says(), warnings]"
    placeholder, child, warnings = run(fake_gpus, code)
    assert placeholder == fake_gpus.uuids[0]
    assert "CUDA_ERROR_DEVICE_UNAVAILABLE (46)" in child
    assert [warning.partition(": ")[0] for warning in warnings] == [
        "GPU 0 admits one process (compute mode EXCLUSIVE_PROCESS), and with CudaPlaceholder that is this process"
    ]
    assert "NoPlaceholder()" in warnings[0]


def test_nothing_is_told_where_nothing_keeps_children_out(fake_gpus: Any) -> None:
    fake_gpus.set(2, mode=3)
    assert run(fake_gpus, "claim(1, NoPlaceholder()); out = [child_says(), warnings]") == ["used\n", []]
    fake_gpus.change(0, mode=0)
    code = "claim(1, only=0); out = [safe_gpu.gpu_owner.placeholders[0].uuid, child_says(), warnings]"
    assert run(fake_gpus, code) == [fake_gpus.uuids[0], "used\n", []]
