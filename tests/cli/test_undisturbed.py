"""A run that meets nobody: which modules it loads, and how deep the way is from the command to the lock."""

import json
import os
from typing import Any

import pytest

MOST_MODULES = 79  # of the package
# Rooms that only a claim needs that waits, fails, or runs on the GPUs of a real vendor.
OTHER_ROOMS = {"status", "engines", "doctor", "demo"}
OTHERS = {"claim.limits", "claim.worker", "claim.report", "drivers.nvml", "runtimes.cuda", "cli.status"}
HEAVY = set("logging subprocess ctypes socket hashlib shutil tempfile difflib pynvml".split())
DEEPEST, MOST_FILES = 11, 8

RUN = """
import fcntl, json, os, traceback
loaded = set(sys.modules)
lock, frames = fcntl.flock, []
def spied(fd, kind):
    if kind & fcntl.LOCK_EX:
        frames.append([frame.filename for frame in traceback.extract_stack() if "/safe_gpu/" in frame.filename])
    return lock(fd, kind)
fcntl.flock = spied
def become(*arguments):
    own = [name.removeprefix("safe_gpu.") for name in sys.modules if name.split(".")[0] == "safe_gpu"]
    say(json.dumps([own, sorted(set(sys.modules) - loaded), frames]))
    os._exit(0)
os.execv = become
from safe_gpu.cli import main
main(["run", "--", "true"])
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < (os.cpu_count() or 1), reason="needs all CPUs of the host")
def test_an_undisturbed_run(ground: Any, child: Any, command: Any) -> None:
    command.run("run", "--", "true")  # the state directory is there by now
    own, others, frames = json.loads(child(RUN).hear())
    assert len(own) <= MOST_MODULES
    assert OTHER_ROOMS.isdisjoint(name.partition(".")[0] for name in own)
    assert OTHERS.isdisjoint(own)
    assert HEAVY.isdisjoint(others)
    assert frames
    assert max(map(len, frames)) <= DEEPEST
    assert max(len(set(files)) for files in frames) <= MOST_FILES
