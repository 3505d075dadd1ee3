"""Who holds and who waits: whose an entry is says the owner of the file, whatever the entry says of others."""

import ctypes
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.claims import claim

import safe_gpu
from safe_gpu.coordination.holders import living_claims
from safe_gpu.host import procfs
from safe_gpu.status.gather import gather

VICTIM, NEIGHBOUR, VIEWER = 4711, 4712, 4713


@pytest.fixture
def seen(as_user: Any) -> Callable[[int], tuple[Any, ...]]:
    """``seen(UID)``: pid, user, uid and job of the claim of GPU 0, as ``status`` shows them to that user, and what a
    claim that is refused says."""

    def look(uid: int) -> tuple[Any, ...]:
        def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
            one = gather().gpus[0].claim
            assert one is not None
            try:
                claim(only=0)
            except safe_gpu.NotEnoughGpusError as err:
                say(json.dumps([one.pid, one.user, one.uid, one.job, str(err)]))

        return tuple(json.loads(as_user(work, uid=uid).hear()))

    return look


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")
@pytest.mark.parametrize("start", ["right", "of another process", "none"])
def test_an_entry_that_names_a_living_process_of_somebody_else(
    state_dir: Path, as_user: Any, ground: Any, seen: Any, start: str
) -> None:
    """Its number is that of an innocent process now, whether its start fits or not."""
    victim = as_user(lambda say, listen: listen(), uid=VICTIM)
    began = procfs.start_time(victim.pid) or 0
    when = {"right": began, "of another process": began + 1, "none": None}[start]
    said = {"user": "4711", "job": "sge:1", **({} if when is None else {"start": when})}
    ground.hold(0, uid=NEIGHBOUR, pid=victim.pid, **said)
    pid, user, uid, job, refusal = seen(VIEWER)
    assert (pid, user, uid, job) == (None, "4712", NEIGHBOUR, "sge:1")
    assert "4712" in refusal
    assert f"process {victim.pid} (" not in refusal
    assert not re.search(r"\b4711\b", refusal)


def test_a_child_that_outlives_its_parent(state_dir: Path, as_user: Any, seen: Any) -> None:
    def leave(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        claim(8)
        if os.fork():
            os.kill(os.getpid(), signal.SIGKILL)
        say(os.getpid())
        listen()

    gone = as_user(leave, uid=NEIGHBOUR)
    heir = int(gone.hear())
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
    try:
        for uid, pid in ((VIEWER, None), (NEIGHBOUR, heir), (0, heir)):
            *told, _, refusal = seen(uid)
            assert told == [pid, "4712", NEIGHBOUR]
            holder = f"process {heir}, which" if pid else "a process that"
            assert f"{holder} process {gone.pid} left behind (4712" in refusal
    finally:
        gone.tell()


def test_who_is_unknown_to_a_user_namespace_is_nobody(state_dir: Path, user: Any, as_user: Any) -> None:
    """All whom it does not know look like one user, who is not this one."""
    assert user(VICTIM, 8).hear() == str([*range(8)])

    def look(say: Callable[[object], None], listen: Callable[[], str]) -> Any:
        if ctypes.CDLL(None, use_errno=True).unshare(0x10000000):  # CLONE_NEWUSER
            return say("null")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {VIEWER} 1")
        procfs.is_unknown_user.cache_clear()
        procfs.has_all_ids.cache_clear()
        one = gather().gpus[0].claim
        assert one is not None
        return say(json.dumps([[entry.uid for entry in living_claims()], one.user, one.uid]))

    answer = as_user(look, uid=VIEWER).hear()
    if answer == "null":
        pytest.skip("no user namespaces here")
    assert json.loads(answer) in ([[-1], None, None], [[-1], None, -1])
