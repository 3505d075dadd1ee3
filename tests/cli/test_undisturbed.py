"""A run that meets nobody: which modules it loads, and how deep the way is from the command to the lock."""

import json
import os
from typing import Any

import pytest

# What only a claim that waits, fails, is limited, or runs on another vendor's GPUs needs is not here.
OWN = """
affinity affinity.binding affinity.cpu_shares affinity.memory_policy affinity.options affinity.planner claim
claim.arguments claim.around claim.checks claim.claim claim.doubts claim.functions claim.owner claim.placeholder_set
claim.search claim.search.decision claim.search.look claim.search.queue_place claim.search.search claim.variables
claim.view cli cli.advice cli.arguments cli.become cli.commands cli.job cli.output cli.wait_line coordination
coordination.closed coordination.directory coordination.doors coordination.entry coordination.faults coordination.held
coordination.history coordination.holders coordination.host_lock coordination.locks coordination.older_package
coordination.signals coordination.state_dir drivers drivers.base drivers.kernel drivers.presets drivers.simulated errors
gpus gpus.devices gpus.vendors gpus.visible gpus.windows host host.commands host.decoding host.file_systems
host.foreign_files host.procfs host.programs runtimes runtimes.causes runtimes.child runtimes.library
runtimes.placeholders runtimes.visible_devices safe_gpu schedulers schedulers.job selection selection.choice
selection.request selection.sharing selection.values selection.verdicts settings settings.durations settings.variables
topology topology.cpulist topology.files topology.host wording wording.argument_style wording.text
""".split()
HEAVY = set(
    "dataclasses logging subprocess ctypes socket hashlib shutil tempfile inspect threading difflib pynvml".split()
)
DEEPEST, MOST_FILES = 11, 8

RUN = """
import json, os, traceback
import filelock
loaded_by_filelock = set(sys.modules)
lock, frames = filelock.lock_descriptor, []
def spied(fd, **options):
    frames.append([frame.filename for frame in traceback.extract_stack() if "/safe_gpu/" in frame.filename])
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
    assert max(map(len, frames)) <= DEEPEST
    assert max(len(set(files)) for files in frames) <= MOST_FILES
