"""Who holds and who waits: whose an entry is says the owner of the file, whatever the entry says of others."""

import ctypes
import json
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.claims import claim

import safe_gpu
from safe_gpu.coordination.holders import living_claims
from safe_gpu.host import procfs
from safe_gpu.status.facts import HostStatus, WaiterStatus
from safe_gpu.status.gather import gather
from safe_gpu.status.metrics import render_metrics

VICTIM, NEIGHBOUR, VIEWER = 4711, 4712, 4713

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")


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


@needs_root
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


def test_a_process_whose_first_thread_has_ended_lives(state_dir: Path, as_user: Any, seen: Any) -> None:
    def leave_a_thread(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        claim(8)

        def stay() -> None:
            while procfs._stat_fields(os.getpid())[0] != b"Z":
                pass
            say("a zombie")
            listen()
            os._exit(0)

        threading.Thread(target=stay).start()
        ctypes.CDLL(None).pthread_exit(None)

    half = as_user(leave_a_thread, uid=NEIGHBOUR)
    assert half.hear() == "a zombie"
    assert not procfs.has_ended(half.pid)
    assert not procfs.is_exiting(half.pid)
    assert seen(VIEWER)[:3] == (half.pid, "4712", NEIGHBOUR)
    half.tell()
    os.waitid(os.P_PID, half.pid, os.WEXITED | os.WNOWAIT)
    assert procfs.has_ended(half.pid)


UNSHARED = "no user namespaces here"


def test_who_is_unknown_to_a_user_namespace_is_nobody(state_dir: Path, user: Any, as_user: Any) -> None:
    """All whom it does not know look like one user, who is not this one."""
    assert user(VICTIM, 8).hear() == str([*range(8)])

    def look(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        if ctypes.CDLL(None, use_errno=True).unshare(0x10000000):  # CLONE_NEWUSER
            say(UNSHARED)
            return
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {VIEWER} 1")
        procfs.is_unknown_user.cache_clear()
        procfs.has_all_ids.cache_clear()
        one = gather().gpus[0].claim
        assert one is not None
        say(json.dumps([[entry.uid for entry in living_claims()], one.user, one.uid]))

    answer = as_user(look, uid=VIEWER).hear()
    if answer == UNSHARED:
        pytest.skip(UNSHARED)
    owners, user, uid = json.loads(answer)
    assert owners == [-1]
    assert user is None
    assert uid in (None, -1)


# The queue


@needs_root
def test_a_ticket_that_names_somebody_else(state_dir: Path, as_user: Any, ground: Any) -> None:
    from safe_gpu.coordination.directory import Directory
    from safe_gpu.coordination.entry import make_entry

    victim = as_user(lambda say, listen: listen(), uid=VICTIM)
    with Directory(str(state_dir), "queue") as queue:
        said = {"pid": victim.pid, "start": procfs.start_time(victim.pid), "pidns": procfs.pid_namespace()}
        _, held = make_entry(queue, 1, {**said, "user": "4711", "gpus": ground.uuids, "nb_gpus": 1}, by_children=False)
    os.fchown(held.fd, NEIGHBOUR, NEIGHBOUR)
    (one,) = gather().queue
    assert (one.pid, one.user) == (os.getpid(), "4712"), "who has it, and not whom it names"
    with pytest.raises(safe_gpu.NotEnoughGpusError, match="behind 4712 ") as refused:
        claim()
    assert not re.search(r"\b4711\b", str(refused.value))
    held.release()


def test_metrics_of_a_thousand_users_who_wait() -> None:
    """A neighbour with a range of user ids (subuid(5)) can wait as each of them."""
    users = ["ada"] * 5 + ["other"] * 3 + [f"u{number}" for number in range(1000)]
    queue = tuple(WaiterStatus(place, 1, user, 1, 1.0) for place, user in enumerate(users, 1))
    text = render_metrics(HostStatus("h", "nvml", "", "/s", 2.0, (), queue))
    samples = [line.rpartition(" ") for line in text.splitlines() if line.startswith("safe_gpu_waiting{")]
    assert len(samples) == 100
    numbers = {labels: float(value) for labels, _, value in samples}
    assert sum(numbers.values()) == len(users)
    assert numbers['safe_gpu_waiting{user="ada"}'] == 5
    assert numbers['safe_gpu_waiting{user="other"}'] == len(users) - 5 - 98
