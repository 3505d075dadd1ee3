"""What a test may leave in its process by mistake: variables, bindings, threads, descriptors, handlers of signals."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from typing import Any, NamedTuple

from safe_gpu.affinity.memory_policy import MemoryPolicy, get_policy


class ProcessState(NamedTuple):
    """This process now; ``masks`` are those of the CPUs of each thread, and ``policy`` is the caller's."""

    environment: dict[str, str]
    masks: dict[str, set[int]]
    policy: MemoryPolicy | None
    threads: list[str]
    descriptors: dict[str, str]
    handlers: dict[int, Any]

    def changes(self, before: ProcessState) -> dict[str, object]:
        """What is different now, by its name: the earlier value and this one, or of a mapping only what differs.

        A thread that has ended since then, or was only about to end, counts for nothing.
        """
        found: dict[str, object] = {}
        for name, then, now in zip(self._fields, before, self, strict=True):
            if isinstance(then, dict) and isinstance(now, dict):
                keys = then.keys() & now.keys() if name == "masks" else then.keys() | now.keys()
                pairs = {key: (then.get(key), now.get(key)) for key in keys}
                if different := {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}:
                    found[name] = different
            elif then != now:
                found[name] = (then, now)
        return found


def process_state() -> ProcessState:
    """Return what this process has now."""
    masks, descriptors = {}, {}
    for tid in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # join() returns before the kernel has ended the thread
            masks[tid] = os.sched_getaffinity(int(tid))
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            descriptors[number] = os.readlink(f"/proc/self/fd/{number}")
    policy = get_policy()
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    threads = sorted(one.name for one in threading.enumerate())
    # SIGALRM is pytest-timeout's, which lets it go when a test fails.
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals() - {signal.SIGALRM}}
    return ProcessState(environment, masks, policy, threads, descriptors, handlers)
