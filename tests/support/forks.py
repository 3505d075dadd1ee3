"""Forked children of this process: claims in them, what they tell, and their death at each system call."""

import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.actor import GONE, Actor

import safe_gpu

TOOLS = Path(__file__).parents[2] / "tools"
if TOOLS.exists():
    sys.path.append(str(TOOLS))
    try:
        import crash_trace
    finally:
        sys.path.remove(str(TOOLS))

CAN_TRACE = TOOLS.exists() and not crash_trace.refusal()


def in_child(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in a forked child of this process, where masks and memory policies may be changed."""
    child = Actor(lambda line: line.send(work()))
    try:
        answer = child.hear()
        assert answer != GONE, f"the child ended with {child.join()}"
        return answer
    finally:
        child.end()


def json_from_child(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in a forked child, as JSON has it; where it raises an error of this package, the facts of
    that."""

    def answer() -> str:
        try:
            return json.dumps(work())
        except safe_gpu.SafeGpuError as err:
            return json.dumps(facts_of_error(err))

    return json.loads(in_child(answer))


def facts_of_error(err: Exception) -> tuple[str, str, dict[str, object]]:
    """The name of an error, its message, and its short attributes."""
    others = {name: value for name, value in vars(err).items() if name not in ("message", "verdicts", "processes")}
    short = {name: value for name, value in others.items() if isinstance(value, str | int | tuple)}
    return type(err).__name__, str(err), short


VARIABLES = (*("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "CUDA_DEVICE_ORDER")
IN_A_PROCESS = """
import ctypes, json, os, subprocess, sys, threading
import safe_gpu
from safe_gpu import CudaPlaceholder, NoPlaceholder
from safe_gpu.claim import checks as recheck
def initialize():
    lib = ctypes.CDLL("libcuda.so.1")
    assert lib.cuInit(0) == 0
def claim(*arguments, **options):
    try:
        return safe_gpu.claim_gpus(*arguments, **{"timeout": 0, "affinity": None, **options}).devices_taken
    except safe_gpu.SafeGpuError as err:
        return facts_of_error(err)
def variables():
    return {name: os.environ[name] for name in (*VARIABLES, "SAFE_GPU_SCOPE") if name in os.environ}
"""


def out_of_child(host: Any, code: str, **environment: str) -> Any:
    """What ``code`` leaves in the dictionary ``out``, in a forked child with these fake GPUs.

    That child has loaded neither CUDA nor HIP before.
    """
    import filelock  # noqa: F401 - here, so that no child has to
    import pynvml

    from safe_gpu.drivers import nvml

    class ByPath(next(kind for kind in ctypes.CDLL.__mro__ if kind.__module__ == "ctypes")):  # type: ignore[misc]
        """Libraries as a process finds them that is started with this LD_LIBRARY_PATH."""

        def __init__(self, name: str | None, mode: int = ctypes.DEFAULT_MODE, **options: Any) -> None:
            if name and not mode & os.RTLD_NOLOAD:
                paths = [os.path.join(place, name) for place in os.environ["LD_LIBRARY_PATH"].split(":")]
                name = next(filter(os.path.exists, paths), name)
            super().__init__(name, mode, **options)

    seen = {**host.env, **environment}

    def work() -> Any:
        os.environ.update(seen)
        ctypes.CDLL = pynvml.CDLL = ByPath
        pynvml.nvmlLib, pynvml._nvmlGetFunctionPointer_cache = None, {}
        nvml.KNOWN.clear()  # of the hosts of other tests
        nvml.LINKS.clear()
        space = {
            "out": {},
            "facts_of_error": facts_of_error,
            "json_from_child": json_from_child,
            "VARIABLES": VARIABLES,
        }
        exec(IN_A_PROCESS + code, space)
        return space["out"]

    return json_from_child(work)


def each_point(work: Callable[[], object]) -> Iterator[Any]:
    """Run ``work`` in one child after the other, and kill each one system call later than the one before, until one
    reaches the end. Yields the call before which each was killed."""
    number = 0
    while True:
        pid = os.fork()
        if pid == 0:
            try:
                crash_trace.begin()
                work()
                crash_trace.end()
            finally:
                os._exit(0)
        traced = crash_trace.Traced(pid)
        killed = None
        for place, stop in enumerate(traced.stops()):
            if place == number:
                killed = stop
                traced.kill()
                break
        if killed is None:
            traced.join()
            return
        yield killed
        number += 1
