"""Holders and waiters in a time namespace, where the kernel tells other start times, are shown as what they are."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.claims import claim, try_claim

ALL = ["unshare", "--time", "--boottime"]
OFFSETS = ["1000000", "-5"]  # seconds; it cannot be before the boot

CLAIM = """
import os, sys, safe_gpu
def claim(nb_gpus=1, **options):
    return safe_gpu.claim_gpus(nb_gpus, safe_gpu.NoPlaceholder(), affinity=None, **options)
def say(*words): print(*words, flush=True)
def listen(): sys.stdin.readline()
"""


@pytest.fixture(params=OFFSETS)
def there(request: pytest.FixtureRequest, state_dir: Path, child: Callable[..., Any]) -> Callable[..., Any]:
    """``there("say(1)", says="1")``: a process in a time namespace of its own that runs some code."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare, to make a time namespace")
    made = subprocess.run([*ALL, request.param, "--fork", "true"], capture_output=True, text=True, timeout=60)
    if made.returncode:
        pytest.skip(f"no time namespace can be made here: {made.stderr.strip()}")

    def start(code: str, says: str) -> Any:
        words = [*ALL, request.param, "--fork", sys.executable, "-c", CLAIM + code]
        env = {"SAFE_GPU_FENCE": "ignore"}  # what a claim of this process has set
        return child(f"import os\nos.execvp('unshare', {words!r})", says=says, env=env)

    return start


def note_of(status: api.HostStatus, index: int) -> tuple[int | None, str]:
    one = status.gpus[index].claim
    assert one is not None
    return one.pid, one.note


def test_a_holder_there_is_no_process_that_another_one_left_behind(there: Callable[..., Any]) -> None:
    parent = there("claim(only=0); say('held'); listen()", says="held")
    (holder,) = api.procfs.descendants(parent.pid)
    assert note_of(api.gather(), 0) == (holder, "")
    (entry,) = api.living_claims()
    assert entry.start != api.procfs.start_time(holder)
    assert api.holders.lives_here(entry)
    assert not api.holders.has_ended(entry)
    assert not api.holders.has_ended(entry._replace(start=api.procfs.start_time(holder)))
    assert api.holders.has_ended(entry._replace(start=entry.start + 100)), "another process had that number"


def test_a_holder_elsewhere_is_seen_from_there(there: Callable[..., Any], dgx: Any) -> None:
    """Also one in a third time namespace."""
    code = "from safe_gpu.status.gather import gather\n"
    code += "say([(one.claim.pid, one.claim.note) for one in gather().gpus if one.claim])\n"
    pid = os.getpid()
    with claim(1, only=0):
        third = there("claim(only=1); say('held'); listen()", says="held")
        (holder,) = api.procfs.descendants(third.pid)
        there(code, says=f"[({pid}, ''), ({holder}, '')]")


def test_a_holder_that_has_made_one_for_its_children(there: Callable[..., Any], child: Callable[..., Any]) -> None:
    """The kernel tells that one's offsets of it."""
    code = "from ctypes import CDLL\nclaim(only=0)\nassert CDLL(None).unshare(0x80) == 0\n"  # CLONE_NEWTIME
    code += "open('/proc/self/timens_offsets', 'w').write('boottime 7000 0')\nsay('held'); listen()"
    holder = child(CLAIM + code, says="held")
    assert note_of(api.gather(), 0) == (holder.pid, "")
    code = "from safe_gpu.status.gather import gather\nsay(gather().gpus[0].claim.pid, gather().gpus[0].claim.note)"
    there(code, says=f"{holder.pid}")


def test_where_there_are_no_others_a_start_is_exact() -> None:
    told = api.procfs.start_time(os.getpid())
    assert told is not None
    assert [api.procfs.is_start(told + more, os.getpid(), told) for more in (-1, 0, 1)] == [False, True, False]


def test_a_share_there_lets_others_in_beside_it(there: Callable[..., Any]) -> None:
    """Its process lives, so its door is its own, and not one of another state directory."""
    there("claim(only=0, share='20GiB'); say('held'); listen()", says="held")
    assert try_claim(1, only=0, share="20GiB") == (0,)


def test_a_waiter_there(there: Callable[..., Any], dgx: Any, eventually: Callable[..., None]) -> None:
    dgx.hold(*range(8))
    parent = there("say('waits'); claim(timeout=None); listen()", says="waits")
    eventually(lambda: len(api.gather().queue) > 0)
    (waiter,) = api.gather().queue
    assert [waiter.pid] == api.procfs.descendants(parent.pid)
    assert waiter.note == ""


def test_a_parent_elsewhere_is_known_as_the_parent(there: Callable[..., Any]) -> None:
    code = "try: claim(only=0, timeout=0)\nexcept safe_gpu.NotEnoughGpusError as err: say(str(err).partition(':')[0])"
    with claim(1, only=0):
        there(code, says=f"process {os.getpid()}, a parent of this one, holds GPU 0")


def test_when_a_claim_there_began(there: Callable[..., Any]) -> None:
    """By the clock since boot, since the other one may jump."""
    there("claim(only=0); say('held'); listen()", says="held")
    (found,), _ = api.claims_between(0.0, 4e9)
    assert found.since - 60 < found.not_before <= found.since + 1
