"""Death at each system call of a function, in a child that is traced by ptrace(2)."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

TOOLS = Path(__file__).parents[2] / "tools"
if TOOLS.exists():
    sys.path.append(str(TOOLS))
    try:
        import crash_trace
    finally:
        sys.path.remove(str(TOOLS))

CAN_TRACE = TOOLS.exists() and not crash_trace.refusal()


def each_point(work: Callable[[], object]) -> Iterator[crash_trace.Stop]:
    """Run ``work`` in child after child, and kill each one call later than the one before; the last one lives."""
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
