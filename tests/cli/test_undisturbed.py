"""A run that meets nobody: which modules it loads, and how deep the way is from the command to the lock."""

import json
import os
from typing import Any

import pytest

# What only a claim that waits, fails, is limited, or runs on another vendor's GPUs needs is not here.
OWN = """
affinity affinity.binding affinity.cpu_shares affinity.memory_policy affinity.options affinity.planner claim
claim.arguments claim.checks claim.checks.bad_gpu claim.checks.confirmation claim.checks.opened claim.functions
claim.held claim.history_entry claim.host claim.host.ancestors claim.host.host_view claim.host.inside
claim.host.outer_claim claim.host.polls claim.host.visible_limit claim.owner claim.placeholder_set claim.search
claim.search.attempt claim.search.decision claim.search.kernel_facts claim.search.leases_of_look
claim.search.names_of_look claim.search.queue_place claim.search.search claim.times claim.variables cli cli.advice
cli.arguments cli.become cli.commands cli.job cli.output cli.wait_line coordination coordination.files
coordination.files.descriptors coordination.files.file_system coordination.files.lease_dir
coordination.files.location coordination.files.refusals coordination.files.shared_directory coordination.files.state_dir
coordination.files.warnings coordination.history coordination.leases coordination.leases.claim_end
coordination.leases.file_names coordination.leases.lease
coordination.leases.previous_record coordination.leases.record coordination.leases.slots coordination.locks
coordination.locks.cleaner_guard coordination.locks.flock coordination.locks.host_lock coordination.locks.legacy_lock
coordination.locks.record_locks coordination.scope_names coordination.signals coordination.socket_names drivers
drivers.base drivers.kernel drivers.presets drivers.simulated errors gpus gpus.devices gpus.vendors gpus.visible host
host.commands host.decoding host.foreign_files host.procfs host.programs runtimes runtimes.causes runtimes.child runtimes.library
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
