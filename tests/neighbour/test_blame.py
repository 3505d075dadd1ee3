"""Who holds and who waits: what a neighbour writes into records and tickets makes nobody else look like it."""

import ctypes
import fcntl
import json
import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.claims import claim

import safe_gpu
from safe_gpu.coordination import name_table
from safe_gpu.coordination.queue.ticket import TicketRequest, encode_ticket
from safe_gpu.host import procfs
from safe_gpu.status.facts import HostStatus, WaiterStatus
from safe_gpu.status.gather import gather
from safe_gpu.status.idle import whom_to_ask, with_reports
from safe_gpu.status.metrics import render_metrics

VICTIM, NEIGHBOUR, VIEWER = 4711, 4712, 4713


@pytest.fixture
def holder(state_dir: Path, as_user: Any, next_tick: Callable[[], None]) -> Callable[[int], Any]:
    """``holder(UID)``: a process of that user that holds all GPUs, and started when no other did."""

    def hold(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        claim(8)
        say("held")
        listen()

    def start(uid: int) -> Any:
        next_tick()
        one = as_user(hold, uid=uid)
        assert one.hear() == "held"
        next_tick()
        return one

    return start


@pytest.fixture
def seen(as_user: Any) -> Callable[[int], tuple[Any, ...]]:
    """``seen(UID)``: pid, user, uid and job of the claim of GPU 0, as ``status`` shows them to that user, and what a
    claim that is refused says."""

    def look(uid: int) -> tuple[Any, ...]:
        def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
            one = gather().gpus[0].claim
            assert one is not None
            try:
                claim()
            except safe_gpu.NotEnoughGpusError as err:
                say(json.dumps([one.pid, one.user, one.uid, one.job, str(err)]))

        return tuple(json.loads(as_user(work, uid=uid).hear()))

    return look


def rewrite(state_dir: Path, **facts: Any) -> None:
    """Write this into all records, as anybody may."""
    for path in (state_dir / "leases").glob("*.lock"):
        path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))


def identity(process: Any) -> dict[str, Any]:
    """What a record would say if that process of the victim had made it."""
    user = procfs.user_name(VICTIM)
    return {"pid": process.pid, "start": procfs.start_time(process.pid), "uid": VICTIM, "user": user}


@pytest.fixture
def old_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 5.3, the kernel does not tell who has made the socket with a name."""
    monkeypatch.setattr(name_table, "_NAME_AND_UID", 1)


def test_a_record_that_names_a_living_process_of_somebody_else(state_dir: Path, as_user: Any, holder, seen) -> None:
    neighbour = holder(NEIGHBOUR)
    victim = as_user(lambda say, listen: listen(), uid=VICTIM)
    rewrite(state_dir, **identity(victim), job="sge:1")
    pid, user, uid, job, refusal = seen(VIEWER)
    assert (pid, user, uid, job) == (neighbour.pid, "4712", NEIGHBOUR, "sge:1"), "by the name of the GPU"
    assert "(4712, job sge:1" in refusal
    assert f"process {victim.pid} " not in refusal


@pytest.mark.usefixtures("old_kernel")
def test_on_an_old_kernel_the_user_is_what_the_record_says(state_dir: Path, as_user: Any, holder, seen) -> None:
    neighbour = holder(NEIGHBOUR)
    victim = as_user(lambda say, listen: listen(), uid=VICTIM)
    rewrite(state_dir, **identity(victim), job="sge:1")
    pid, user, uid, job, refusal = seen(VIEWER)
    assert (pid, user, uid, job) == (neighbour.pid, "says: 4711", None, "sge:1")
    assert "(says: 4711, job sge:1" in refusal
    assert f"process {victim.pid} " not in refusal
    assert seen(0)[:3] == (neighbour.pid, "4712", NEIGHBOUR), "root sees who has the lock"


def test_a_record_that_tells_of_another_user_and_fits(state_dir: Path, holder: Any, seen: Any) -> None:
    """The neighbour has only the names changed; and anybody else may change them in a claim of the victim's."""
    neighbour = holder(NEIGHBOUR)
    rewrite(state_dir, uid=VICTIM, user="4711", command="innocent")
    pid, user, uid, _, refusal = seen(VIEWER)
    assert (pid, user, uid) == (neighbour.pid, "4712", NEIGHBOUR)
    assert f"claimed by process {neighbour.pid} (4712, " in refusal
    assert "innocent" not in refusal


def test_a_pid_that_the_victim_has_now(state_dir: Path, as_user: Any, holder: Any, monkeypatch) -> None:
    """The neighbour's process has ended, a child of it holds the lock, and /proc/locks goes on showing the number."""
    neighbour = holder(NEIGHBOUR)
    victim = as_user(lambda say, listen: listen(), uid=VICTIM)
    rewrite(state_dir, pid=victim.pid)
    genuine = procfs.flock_holders
    named = {neighbour.pid: victim.pid}
    monkeypatch.setattr(
        procfs,
        "flock_holders",
        lambda *args, **options: procfs.LockTable(
            (inode, [named.get(pid, pid) for pid in pids]) for inode, pids in genuine(*args, **options).items()
        ),
    )
    monkeypatch.setattr(procfs, "pids", list)  # what a user sees who may not look into processes of others
    one = gather().gpus[0].claim
    assert one is not None
    assert (one.pid, one.user, one.uid) == (None, "4712", NEIGHBOUR)
    assert f"still held by a process that an earlier process {victim.pid} left behind" in one.note
    with pytest.raises(safe_gpu.NotEnoughGpusError, match="claimed \\(4712"):
        claim()


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
    rewrite(state_dir, uid=VICTIM, user="4711")
    try:
        for uid, pid, user, owner in (
            (VIEWER, None, "says: 4711", None),
            *((u, heir, "4712", NEIGHBOUR) for u in (NEIGHBOUR, 0)),
        ):
            *told, _, refusal = seen(uid)
            assert told == [pid, user, owner]
            holder = f"process {heir}, which" if pid else "a process that"
            assert f"still held by {holder} process {gone.pid} left behind ({user}" in refusal
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


def test_who_started_a_program_that_changes_its_user(state_dir: Path, as_user: Any, seen: Any) -> None:
    def become(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        os.setresuid(NEIGHBOUR, VICTIM, VICTIM)
        claim(8)
        say("held")
        listen()

    changed = as_user(become, uid=0)
    assert changed.hear() == "held"
    assert seen(VIEWER)[:3] == (changed.pid, "4712", NEIGHBOUR)


def test_the_lock_and_not_a_record_lock_tells(state_dir: Path, as_user: Any, holder: Any, seen: Any) -> None:
    """Everybody may take a lock of fcntl(2) on a file of mode 0666 beside the claim's."""
    victim = holder(VICTIM)

    def lock(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        files = [path.open("r+") for path in (state_dir / "leases").glob("*.lock")]
        for file in files:
            fcntl.lockf(file, fcntl.LOCK_EX)
        say("locked")
        listen()

    neighbour = as_user(lock, uid=NEIGHBOUR)
    assert neighbour.hear() == "locked"
    rewrite(state_dir, pid=neighbour.pid, start=procfs.start_time(neighbour.pid))
    assert seen(VIEWER)[:3] == (victim.pid, "4711", VICTIM)


def test_no_idle_report_blames_whom_a_record_names(state_dir: Path, as_user, holder, tmp_path, monkeypatch) -> None:
    policy = tmp_path / "policy.ini"
    policy.write_text("[default]\nidle_report_after = 1m")
    policy.chmod(0o644)

    def idle() -> list[str]:
        gpus = tuple(replace(one, idle_for=61.0) for one in gather().gpus)
        return list(whom_to_ask(with_reports(gpus, str(policy)), 0).values())

    neighbour = holder(NEIGHBOUR)
    victim = as_user(lambda say, listen: listen(), uid=VICTIM)
    monkeypatch.setattr(procfs, "pids", list)  # what a user sees who may not look into processes of others
    rewrite(state_dir, uid=VICTIM, user="4711")
    assert idle() == [f"no work on GPU 0-7 for 1 min: ask 4712 (pid {neighbour.pid})"]
    rewrite(state_dir, **identity(victim))
    assert idle() == [f"no work on GPU 0-7 for 1 min: ask 4712 (pid {neighbour.pid})"]


def test_the_history_of_idle_claims_names_the_real_user(state_dir: Path, holder: Any, command: Any) -> None:
    holder(NEIGHBOUR)
    for path in (state_dir / "history").glob("*.jsonl"):
        path.write_text(path.read_text().replace('"4712"', '"4711"').replace("4712,", "4711,"))
    rewrite(state_dir, uid=VICTIM, user="4711")
    for _ in range(2):
        gather()
    (one,) = json.loads(command.run("history", "--idle", "--json").stdout)["claims"]
    assert (one["user"], one["uid"]) == ("4712", NEIGHBOUR)


# The queue


@pytest.fixture
def ticket(state_dir: Path, holder: Any, as_user: Any, eventually: Any) -> tuple[Any, Path]:
    """A neighbour who waits, and its ticket."""
    holder(VIEWER)
    waiter = as_user(lambda say, listen: claim(timeout=None), uid=NEIGHBOUR)
    eventually(lambda: len(gather().queue) == 1)
    return waiter, next((state_dir / "queue").glob("*.ticket"))


def test_a_ticket_that_names_somebody_else(ticket: tuple[Any, Path], as_user: Any) -> None:
    waiter, path = ticket
    victim = as_user(lambda say, listen: listen(), uid=VICTIM)
    path.write_text(json.dumps({**json.loads(path.read_text()), "pid": victim.pid, "user": "4711"}))
    (one,) = gather().queue
    assert (one.pid, one.user) == (waiter.pid, "4712")
    with pytest.raises(safe_gpu.NotEnoughGpusError, match="behind 4712 "):
        claim()


def test_a_ticket_of_the_victim_that_the_neighbour_keeps_locked(ticket: tuple[Any, Path], state_dir, as_user) -> None:
    """The victim was killed while it waited. Everybody may open and lock what it left."""
    left = state_dir / "queue" / "99.ticket"
    left.write_bytes(encode_ticket(1, TicketRequest(1, frozenset({"GPU-1"}))))
    left.chmod(0o644)
    os.chown(left, VICTIM, VICTIM)

    def lock(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        fd = os.open(left, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        say("locked")
        listen()

    assert as_user(lock, uid=NEIGHBOUR).hear() == "locked"
    assert [one.user for one in gather().queue] == ["4712", None]


@pytest.mark.parametrize("by_child", [False, True])
def test_a_waiter_that_was_killed_is_named_by_nobody(
    state_dir: Path, holder: Any, as_user: Any, eventually: Any, command: Any, by_child: bool
) -> None:
    """The neighbour slept on the ticket, and gets its lock; or a child of it did, which ends and leaves it the lock."""
    holder(VIEWER)
    victim = as_user(lambda say, listen: claim(timeout=None), uid=VICTIM)
    eventually(lambda: [one.user for one in gather().queue] == ["4711"])
    ticket = next((state_dir / "queue").glob("*.ticket"))

    def sleep(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        fd = os.open(ticket, os.O_RDONLY)
        if by_child and (child := os.fork()):
            os.waitpid(child, 0)
        else:
            say("sleeps")
            fcntl.flock(fd, fcntl.LOCK_EX)
            if by_child:
                os._exit(0)
        say("has it")
        listen()

    neighbour = as_user(sleep, uid=NEIGHBOUR)
    assert neighbour.hear() == "sleeps"
    os.kill(victim.pid, signal.SIGKILL)
    assert neighbour.hear() == "has it"
    status = gather()
    (one,) = status.queue
    assert (one.pid, one.user, one.nb_gpus) == (None, None, 1)
    assert '"user": null' in json.dumps(status.to_dict()["queue"])
    with pytest.raises(safe_gpu.NotEnoughGpusError, match=r"behind somebody \(wants 1 GPU, queued for ") as refused:
        claim()
    shown = render_metrics(status), command.run("status").stdout, str(refused.value)
    assert not [text for text in shown if re.search(rf"\b{VICTIM}\b", text)]


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


@pytest.mark.usefixtures("old_kernel")
def test_a_record_without_a_start_proves_nothing(state_dir: Path, holder: Any, seen: Any) -> None:
    neighbour = holder(NEIGHBOUR)
    rewrite(state_dir, start=None)
    assert seen(VIEWER)[:3] == (neighbour.pid, "says: 4712", None)
