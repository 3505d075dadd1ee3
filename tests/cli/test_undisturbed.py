"""A run that meets nobody: which modules it loads, and how deep the way is from the command to the lock."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

# What only a claim that waits, fails, is limited, or runs on another vendor's GPUs needs is not here.
OWN = """
safe_gpu affinity affinity.binding affinity.cpu_shares affinity.options argument_style claim claim.attempt claim.claim
claim.leasing claim.options claim.owner claim.queue_place claim.search claim.times claim.view cli cli.become
cli.commands cli.output cli.parser cli.run coordination coordination.files coordination.history coordination.holders
coordination.leases coordination.legacy coordination.locks coordination.records coordination.signals
coordination.socket_names cpulist devices drivers drivers.base drivers.kernel drivers.presets drivers.simulated errors
foreign_files procfs programs runtimes runtimes.placeholders runtimes.runtime runtimes.visible_devices
runtimes.visible_limit schedulers schedulers.job selection selection.backfill selection.choice selection.request
selection.sharing selection.values selection.verdicts settings text vendors
""".split()
HEAVY = set(
    "dataclasses logging subprocess ctypes socket hashlib shutil tempfile inspect threading difflib pynvml".split()
)
DEEPEST = 12

RUN = """
import json, os, traceback
import filelock
loaded_by_filelock = set(sys.modules)
lock, frames = filelock.lock_descriptor, []
def spied(fd, **options):
    frames.append(sum("/safe_gpu/" in frame.filename for frame in traceback.extract_stack()))
    return lock(fd, **options)
filelock.lock_descriptor = spied
def become(*arguments):
    own = [name.removeprefix("safe_gpu.") for name in sys.modules if name.split(".")[0] == "safe_gpu"]
    say(json.dumps([own, sorted(set(sys.modules) - loaded_by_filelock), frames]))
    os._exit(0)
os.execv = become
from safe_gpu.cli import main
main(["run", "--", "true"])
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < (os.cpu_count() or 1), reason="needs all CPUs of the host")
def test_an_undisturbed_run(ground: Any, child: Any, command: Any) -> None:
    command.run("run", "--", "true")  # the state directory is there by now
    own, others, frames = json.loads(child(RUN).hear())
    assert sorted(own) == sorted(OWN)
    assert HEAVY.isdisjoint(others)
    assert frames
    assert max(frames) <= DEEPEST
