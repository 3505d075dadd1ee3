"""What ``status`` says of a host: real claims, waiters, liars and orphans on simulated GPUs, and odd GPUs."""

import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ground import locked_host

import safe_gpu
from safe_gpu.cli.commands import main
from safe_gpu.coordination.directory import Directory
from safe_gpu.coordination.entry import make_entry, remove_entry, said_by_this_process
from safe_gpu.coordination.faults import write_fault
from safe_gpu.drivers.presets import preset
from safe_gpu.gpus.devices import Gpu, GpuFault, GpuProcess, Holder, HostSnapshot
from safe_gpu.host import procfs
from safe_gpu.status.facts import GpuStatus, HostStatus, ProcessStatus, WaiterStatus, of_user
from safe_gpu.status.gather import gather
from safe_gpu.status.render import render
from safe_gpu.wording.text import display_width

UUIDS = [gpu.uuid for gpu in preset("dgx-a100").gpus()]


INTEGER, TEXT, NUMBER = (int, type(None)), (str, type(None)), (int, float, type(None))
# Keys of the document, each with the types of its values.
DOCUMENT = {
    **dict.fromkeys(("host", "driver", "driver_version", "state_dir"), str), "schema": int, "gpus": list, "queue": list,
    "windows": list, "warnings": list,
}  # fmt: skip
GPU = {
    **dict.fromkeys(("label", "vendor", "uuid", "name", "pci_bus_id", "state", "state_shown", "reason"), str),
    "index": int, "idle": bool,
    **dict.fromkeys(("numa_node", "memory_total", "memory_used", "utilization", "temperature"), INTEGER),
    "idle_for": NUMBER,
    "claim": (dict, type(None)), "processes": list, "shares": list, "share_free": INTEGER,
}  # fmt: skip
CLAIMED = {"pid": INTEGER, "uid": INTEGER, "user": TEXT, "job": TEXT, "command": TEXT, "since": NUMBER, "until": NUMBER}
CLAIMED["removable_by"] = TEXT
PROCESS = {"pid": int, "user": TEXT, "command": TEXT, "kind": str, "memory_used": INTEGER}
WAITER = {
    "position": int, "pid": INTEGER, "user": TEXT, "nb_gpus": INTEGER, "share": INTEGER, "vendor": TEXT,
    **dict.fromkeys(("since", "hold_for", "expected_start", "earliest_start"), NUMBER), "job": TEXT,
    "limit": (list, type(None)),
}  # fmt: skip
WINDOW = {"from": float, "until": float, "gpus": list, "for": TEXT, "by": str, "reason": str}


def check_types(found: dict[str, Any], types: dict[str, Any]) -> None:
    assert found.keys() == types.keys()
    assert [name for name, value in found.items() if not isinstance(value, types[name])] == []


def check_document(document: dict[str, Any]) -> None:
    check_types(document, DOCUMENT)
    assert document["schema"] == 2
    for one in document["gpus"]:
        check_types(one, GPU)
        assert one["vendor"] in ("nvidia", "amd")
        assert one["state"] in ("free", "claimed", "busy", "display", "unusable")
        if one["claim"] is not None:
            check_types(one["claim"], CLAIMED)
        for process in one["processes"]:
            check_types(process, PROCESS)
    for one in document["queue"]:
        check_types(one, {**WAITER, "turn": NUMBER} if "turn" in one else WAITER)
    for one in document["windows"]:
        check_types(one, WINDOW)


def look(driver: object = None) -> HostStatus:
    """A status whose JSON and table are in order, whatever they show."""
    status = gather(driver)  # type: ignore[arg-type]
    check_document(json.loads(json.dumps(status.to_dict(), allow_nan=False)))
    for width in (80, 140):
        assert max(map(len, render(status, width=width, color=False).splitlines())) <= width
    return status


def states(status: HostStatus) -> str:
    return " ".join(one.state for one in status.gpus)


def table(status: HostStatus) -> str:
    return render(status, width=80, color=False)


def row(status: HostStatus, index: int) -> str:
    return next(line for line in table(status).splitlines() if line.split()[:1] == [str(index)])


CLAIM = """
import os, safe_gpu
from safe_gpu.runtimes.placeholders import NoPlaceholder
def claim(*args, **options): return safe_gpu.claim_gpus(*args, affinity=None, **options)
"""
HOLD_ONE = CLAIM + "claim(1, NoPlaceholder(), only=0); say('held'); listen()\n"


@pytest.fixture
def holder(state_dir: Path, child):
    """A process that has claimed GPU 0 and nothing else."""
    return child(HOLD_ONE, says="held")


def entries(state_dir: Path, kind: str = "claims") -> list[Path]:
    return sorted(path for path in (state_dir / kind).iterdir() if not path.name.startswith("."))


# Claims


def test_an_untouched_host_is_free_and_stays_untouched(state_dir: Path) -> None:
    status = look()
    assert states(status) == " ".join(["free"] * 8)
    assert status.queue == ()
    assert status.warnings == ()
    assert status.state_dir == str(state_dir)
    assert not state_dir.exists()
    state_dir.mkdir(0o777)
    assert states(look()) == " ".join(["free"] * 8)
    assert list(state_dir.iterdir()) == []


def test_a_claim_is_shown_with_its_holder(state_dir: Path, child) -> None:
    job = {"JOB_ID": "42", "SGE_TASK_ID": "7", "SGE_ROOT": "/opt/sge", "NSLOTS": "1"}
    before = time.time()
    process = child(CLAIM + "say(*claim(2, only='1,5').devices_taken); listen()", env=job, says="1 5")
    status = look()
    assert states(status) == "free claimed free free free claimed free free"
    claim = status.gpus[5].claim
    assert claim is not None
    assert claim.pid == process.pid
    assert claim.user == procfs.user_of(process.pid)
    assert claim.job == "sge:42.7"
    assert claim.command == Path(sys.executable).name
    assert before - 1 < (claim.since or 0) < time.time() + 1
    assert not claim.stopped
    assert claim.note == ""
    assert not status.gpus[5].idle
    assert [one.pid for one in status.gpus[5].processes] == [process.pid]
    assert status.gpus[5].processes[0].user == claim.user
    assert " 42.7 " in row(status, 1)
    assert row(status, 5).endswith("  with GPU 1"), "a claim is described once"
    assert " 42.7 " in render(status, width=120, color=False)
    assert "6 of 8 GPUs free" in table(status)


def test_a_claim_without_a_process_on_the_gpu_is_idle(holder, ground) -> None:
    status = look()
    assert (status.gpus[0].state, status.gpus[0].idle) == ("claimed", True)
    assert row(status, 0).split()[:2] == ["0", "claimed"], "but not in its first minute"
    later = replace(status, taken_at=time.time() + 60)
    assert row(later, 0).split()[:2] == ["0", "idle"]
    assert "7 of 8 GPUs free, 1 idle (" in table(later)
    (context,) = ground.occupy(0)  # this process is of the same user
    assert not look().gpus[0].idle
    context.close()
    assert look().gpus[0].idle


class OneGpu:
    """A driver with one GPU, on which there is what a test puts there."""

    def __init__(self, *processes: GpuProcess, **facts: object) -> None:
        self.gpu = Gpu(0, UUIDS[0], "Model", processes=processes)._replace(**facts)  # type: ignore[arg-type]

    def snapshot(self) -> HostSnapshot:
        return HostSnapshot((self.gpu, Gpu(1, UUIDS[1], "Model")), "test")

    def detailed(self, snapshot: HostSnapshot) -> HostSnapshot:
        return snapshot


def test_a_status_asks_for_what_no_claim_needs(fake_gpus) -> None:
    fake_gpus.use_nvml_here()
    fake_gpus.set(2, util=37)
    fake_gpus.process(fake_gpus.uuids[0], os.getpid(), 1 << 20, kind="graphics")
    first, second = look().gpus
    assert (first.gpu.utilization, second.gpu.utilization) == (37, 37)
    assert [(process.pid, process.kind) for process in first.processes] == [(os.getpid(), "graphics")]
    assert (first.state, second.processes) == ("free", ())


def test_whose_processes_count_for_a_claim(holder, as_user) -> None:
    stranger = as_user(lambda say, listen: (say("there"), listen()), uid=12345)
    stranger.hear()
    own, unseen, foreign = GpuProcess(holder.pid), GpuProcess(1 << 30), GpuProcess(stranger.pid, memory_used=1)
    graphics = GpuProcess(holder.pid, kind="graphics", memory_used=5 << 20)
    desktop = GpuProcess(os.getpid(), kind="graphics", memory_used=5 << 20)  # of the same user
    server = GpuProcess(1 << 30, name="/usr/bin/nvidia-cuda-mps-server")
    assert not look(OneGpu(own)).gpus[0].idle
    assert not look(OneGpu(foreign, own)).gpus[0].idle
    assert not look(OneGpu(unseen)).gpus[0].idle, "a pid that does not resolve here may be the claim's"
    assert not look(OneGpu(processes=None)).gpus[0].idle, "unknown is not idle"
    assert not look(OneGpu(processes_supported=False)).gpus[0].idle
    for used in (graphics._replace(memory_used=None), graphics, graphics._replace(memory_used=5 << 30)):
        for display in (False, True):
            assert not look(OneGpu(used, desktop, display_active=display)).gpus[0].idle, "it draws"
    assert not look(OneGpu(desktop._replace(memory_used=5 << 30))).gpus[0].idle, "a renderer may belong to it"
    for idle in ([desktop], [desktop, foreign], [server], [foreign], []):
        assert look(OneGpu(*idle)).gpus[0].idle
    assert f"not part of the claim: process {stranger.pid} 12345" in table(look(OneGpu(foreign)))


ME, PARENT = os.getpid(), os.getppid()  # of the same user


@pytest.mark.parametrize(
    ("listed", "display", "shown"),
    [
        ([(ME, "graphics", 5 << 30)], False, "busy"),
        ([(ME, "graphics", 600 << 20), (PARENT, "graphics", 600 << 20)], False, "busy"),
        ([(ME, "graphics", 5 << 30), (ME, "compute", 5 << 30)], True, "busy"),
        ([(ME, "graphics", 1 << 30)], False, "free"),
        ([(ME, "graphics", 5 << 30)], True, "free"),
    ],
)
def test_who_draws_without_a_claim(state_dir: Path, listed, display, shown) -> None:
    used = sum({pid: size for pid, _, size in listed}.values())
    status = look(OneGpu(*(GpuProcess(*one) for one in listed), memory_used=used, display_active=display))
    assert status.gpus[0].state == shown
    user = procfs.user_of(ME)
    assert (f" {user} " in row(status, 0)) is (shown == "busy")
    assert ("(1 of 2)" in row(status, 0)) is (PARENT in [pid for pid, *_ in listed])
    assert bool(of_user(status, user).gpus) is (shown == "busy")


def test_a_stopped_holder_is_marked(holder, eventually) -> None:
    os.kill(holder.pid, signal.SIGSTOP)
    eventually(lambda: procfs.is_stopped(holder.pid))
    status = look()
    assert status.gpus[0].claim.stopped
    assert "stopped" in status.gpus[0].reason
    assert f"process {holder.pid} is stopped" in table(status)
    os.kill(holder.pid, signal.SIGCONT)
    eventually(lambda: not procfs.is_stopped(holder.pid))
    assert "stopped" not in table(look())


def test_claims_inside_claims_are_shown(state_dir: Path, child) -> None:
    outer = child(
        CLAIM + "claim(2, NoPlaceholder(), delegate=True)\n"
        "if os.fork() == 0:\n"
        "    os.execv(sys.executable, [sys.executable, '-c', 'import safe_gpu; "
        'o = safe_gpu.claim_gpus(1, affinity=None); print("inner", o.devices_taken[0], flush=True); input()\'])\n'
        "os.wait()"
    )
    word, index = outer.hear().split()
    assert word == "inner"
    status = look()
    one = status.gpus[int(index)]
    assert one.claim.pid == outer.pid
    assert one.claim.token
    assert one.inside is not None
    assert procfs.parent_of(one.inside.pid) == outer.pid
    assert not one.idle
    assert f"inside it: process {one.inside.pid}" in table(status)
    assert sum(gpu.state == "claimed" for gpu in status.gpus) == 2
    outer.kill()
    after = look().gpus[int(index)]
    assert after.state == "claimed", "the inner claim lives on"


@pytest.fixture
def ticket(state_dir: Path):
    """Called with what it says, it makes a ticket of this process."""
    made = []

    def make(**said: object) -> None:
        with locked_host() as host:
            host.queue.refresh()
            directory = Directory(str(state_dir), "queue")
            said = {**said_by_this_process(None), "since": time.time(), **said}
            made.append((directory, *make_entry(directory, host.queue.next_number, said, by_children=False)))

    yield make
    for directory, name, held in made:
        remove_entry(directory, name, held)
        directory.close()


# What an entry says, and what is so


def test_who_claims_is_the_owner_of_the_entry_whatever_it_says(ground, holder) -> None:
    """The process that it names is shown if that user's process began when the entry says; else who has the entry."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    ground.hold(1, pid=holder.pid, start=5, user="nobody", uid=12345)
    ground.hold(2, pid=holder.pid, start=procfs.start_time(holder.pid), uid=12345)
    first, second, third = (one.claim for one in look().gpus[:3])
    assert (first.pid, first.user, first.uid) == (holder.pid, procfs.user_of(holder.pid), os.geteuid())
    for claim in (second, third):
        assert (claim.pid, claim.user, claim.uid) == (ME, "12345", 12345)
        assert claim.note == f"still held by process {ME}, which an earlier process {holder.pid} left behind"
    assert second.note in " ".join(table(look()).split())


@pytest.fixture
def heir(state_dir: Path, child):
    """A process that the holder of GPU 0 has started, which still has its entry; the holder has been killed."""
    code = HOLD_ONE.replace("say(", "os.fork() or signal.pause(); say(")
    process = child("import signal\n" + code, says="held")
    (pid,) = procfs.descendants(process.pid)
    assert look().gpus[0].claim.pid == process.pid
    process.kill()
    yield pid
    os.kill(pid, signal.SIGKILL)


def test_children_that_outlive_the_holder_are_named(heir) -> None:
    claim = look().gpus[0].claim
    assert claim.pid == heir
    assert claim.user == procfs.user_of(heir)
    assert claim.command == Path(sys.executable).name
    assert re.fullmatch(rf"still held by process {heir}, which process \d+ left behind", claim.note)


def test_an_heir_of_another_user_is_not_looked_for(heir, as_user) -> None:
    def work(say, listen) -> None:
        claim = gather().gpus[0].claim
        say(f"{claim.pid} {claim.user} {claim.note}")

    said = as_user(work, uid=12345).hear()
    mine = procfs.user_of(heir)
    assert re.fullmatch(rf"None {mine} still held by a process that process \d+ left behind", said)


def test_a_dead_entry_holds_nothing(ground) -> None:
    ground.hold(0)
    played = ground.played(0)
    assert look().gpus[0].state == "claimed"
    played.die()
    assert look().gpus[0].state == "free"
    assert played.path.exists(), "who looks removes nothing"


def test_a_claim_of_another_state_directory_is_told_by_its_door(ground, child, open_tmp: Path) -> None:
    env = {"SAFE_GPU_DIR": str(open_tmp / "other"), "SAFE_GPU_SIMULATED_DIR": str(ground.directory / "simulated")}
    child(HOLD_ONE, env=env, says="held")
    status = look()
    assert states(status) == " ".join(["claimed", *["free"] * 7])
    claim = status.gpus[0].claim
    assert (claim.elsewhere, claim.pid, claim.uid, claim.user) == (True, None, -1, None)
    assert "GPU 0: claimed in another state directory" in table(status)


def test_an_entry_without_doors_is_at_risk_where_another_user_can_remove_it(ground, holder) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    ground.hold(1)
    ground.played(1).doors.release()
    assert [one.claim.removable_by for one in look().gpus[:2]] == [None, None], "all belongs to root"
    os.chown(ground.directory, 12345, 12345)
    assert [one.claim.removable_by for one in look().gpus[:2]] == [None, "12345"]
    assert row(look(), 1).split()[1:3] == ["at", "risk"]
    assert "nothing but its entry keeps others off it, and 12345 can remove that" in " ".join(table(look()).split())


def test_shares_are_shown_with_the_claims_that_have_them(state_dir: Path, child) -> None:
    code = CLAIM + "claim(1, NoPlaceholder(), only=0, share='20GiB'); say('held'); listen()"
    sharers = [child(code, says="held") for _ in range(2)]
    (one, *others) = look().gpus
    assert [claim.pid for claim in one.shares] == [sharer.pid for sharer in sharers]
    assert [claim.share for claim in one.shares] == [20 << 30] * 2
    assert one.claim.pid == sharers[0].pid
    assert one.share_free == 40 << 30
    assert {other.state for other in others} == {"free"}


# The queue


WAIT = CLAIM + "say('ready'); claim(N, NoPlaceholder(), timeout=None); say('held'); listen()"


def queued(count: int) -> bool:
    return len(gather().queue) == count


def test_who_waits_in_what_order(state_dir: Path, child, stop, eventually) -> None:
    child(CLAIM + "claim(8, NoPlaceholder()); say('held'); listen()", says="held")
    waiters = []
    for place, number in enumerate((4, 1, 2), 1):
        waiters.append(child(WAIT.replace("N,", f"{number},")))
        eventually(lambda place=place: queued(place))
    stop(waiters[1].pid)
    status = look()
    assert [(one.position, one.pid, one.nb_gpus) for one in status.queue] == [
        (place, waiter.pid, number) for place, (waiter, number) in enumerate(zip(waiters, (4, 1, 2), strict=True), 1)
    ]
    assert all(one.user == procfs.user_of(os.getpid()) for one in status.queue)
    assert sorted(one.since for one in status.queue) == [one.since for one in status.queue]
    assert [one.stopped for one in status.queue] == [False, True, False]
    text = table(status)
    assert "3 waiting" in text
    assert re.search(rf"2  \w+ +pid {waiters[1].pid}  1 GPU ", text)
    assert f"process {waiters[1].pid} is stopped" in text
    waiters[0].kill()
    assert [one.pid for one in look().queue] == [waiters[1].pid, waiters[2].pid]


def test_who_waits_is_the_owner_of_the_ticket_whatever_it_says(holder, ticket) -> None:
    ticket(nb_gpus=2, gpus=UUIDS[:2], pid=holder.pid, start=5, inside="no such claim", job="sge:7")
    (one,) = look().queue
    assert (one.pid, one.user, one.job, one.note) == (ME, procfs.user_of(ME), "sge:7", "")
    assert one.expected_start is None, "nobody waits inside a claim that has ended"


def test_waiters_of_the_same_claim_start_one_after_the_other(state_dir: Path, child, ticket) -> None:
    code = "claim(2, NoPlaceholder(), only='0,1', hold_for=3600, delegate=True); say('held'); listen()"
    child(CLAIM + code, says="held")
    now, token = time.time(), look().gpus[0].claim.token
    wanted = {"nb_gpus": 1, "gpus": UUIDS[:2], "hold_for": 600}
    for inside in ("", token, token, token):
        ticket(**wanted, inside=inside)
    starts = [round((one.expected_start - now) / 600) for one in look().queue]
    assert starts == [6, 0, 0, 1]


# Trouble


def test_a_look_takes_no_lock_and_leaves_the_entries_alone(state_dir: Path, holder, ticket) -> None:
    """host.lock is held all the while."""
    ticket(nb_gpus=8, gpus=UUIDS)
    kept = [(path, path.stat()) for kind in ("claims", "queue") for path in entries(state_dir, kind)]
    assert len(kept) == 2
    with locked_host():
        status = look()
    assert (status.gpus[0].claim.pid, len(status.queue), status.warnings) == (holder.pid, 1, ())
    assert [(path, path.stat()) for path, _ in kept] == kept


def test_a_state_directory_out_of_order_is_a_warning(state_dir: Path) -> None:
    state_dir.symlink_to("/nowhere")
    status = look(OneGpu())
    assert len(status.gpus) == 2
    (warning,) = status.warnings
    assert "symbolic link" in warning
    assert all("not known" in one.reason for one in status.gpus), "free may be wrong here, and says so"
    assert "warning: The claims are not known" in table(status)
    state_dir.unlink()
    state_dir.write_text("")
    assert "not a directory" in look(OneGpu()).warnings[0]


def test_names_that_count_for_nothing_are_told_and_hide_nothing(state_dir: Path, holder) -> None:
    (state_dir / "claims" / f"77.{'a' * 16}").symlink_to("/etc/passwd")
    for number in (78, 79):
        (state_dir / "queue" / f"{number}.{'b' * 16}").symlink_to("/etc/passwd")
    status = look()
    assert states(status) == " ".join(["claimed", *["free"] * 7])
    second, first = status.ignored
    mine = procfs.user_name(os.geteuid())
    assert first == f"{state_dir}/claims/77.{'a' * 16} of {mine} counts for nothing (Too many levels of symbolic links)"
    assert second.endswith(", as do 1 more")
    assert status.to_dict()["warnings"] == [second, first]
    assert main(["status"]) == 0


def test_an_ordinary_user_sees_what_root_claimed(state_dir: Path, holder, as_user) -> None:
    def work(say, listen) -> None:
        status = gather()
        claim = status.gpus[0].claim
        say(f"{states(status)} {claim.pid} {claim.user} {claim.note}".strip())

    other = as_user(work, uid=12345)
    mine = procfs.user_of(holder.pid)
    assert other.hear() == f"claimed {' '.join(['free'] * 7)} {holder.pid} {mine}"


# Odd GPUs


def test_mig_lost_gpus_and_values_the_driver_does_not_give(fake_gpus, state_dir: Path) -> None:
    fake_gpus.write(
        {"util": "NA", "memory_error": 3, "memory_v2_error": 3},
        {"lost": 1, "uuid": "GPU-lost"},
        {"mig": 1, "uuid": "GPU-parent", "instances": "MIG-a,MIG-b", "imem": 10 << 30},
        {"uuid": "GPU-x", "mode": 2},
        {"uuid": "GPU-y"},
    )
    fake_gpus.use_nvml_here()
    fake_gpus.process("GPU-y", 1 << 29, 5 << 30, static=True)
    fake_gpus.process("GPU-y", 1, 1 << 30, static=True)
    status = look()
    by_uuid = {one.gpu.uuid: one for one in status.gpus}
    assert [one.gpu.label for one in status.gpus] == ["0", "1", "2", "2:0", "2:1", "3", "4"]
    assert by_uuid["MIG-a"].state == "free"
    parent = next(one for one in status.gpus if one.gpu.mig_enabled)
    assert parent.state == "unusable"
    assert "MIG" in parent.reason
    assert status.gpus[0].gpu.utilization is None
    assert by_uuid["GPU-x"].state == "unusable"
    assert "PROHIBITED" in by_uuid["GPU-x"].reason
    assert by_uuid["GPU-y"].state == "busy"
    assert [one.user for one in by_uuid["GPU-y"].processes if one.pid == 1 << 29] == [None]
    text = table(status)
    assert f"{1 << 29}" in text
    assert "(1 of 2)" in text
    assert ": 1 of 4 GPUs free, 2 of 2 MIG instances on 1 GPU free (" in text
    assert "GPU 2: MIG mode is on" in text
    lost = next(one for one in status.gpus if one.gpu.lost)
    assert lost.state == "unusable"
    assert lost.reason in " ".join(text.split())


def test_a_display_that_everyone_shares(state_dir: Path, child) -> None:
    environment = {"SAFE_GPU_DRIVER": "simulated:laptop"}
    from safe_gpu.drivers import open_driver

    assert "free, shared with the display" in table(look(open_driver("simulated:laptop")))
    process = child(CLAIM + "claim(1); say('held'); listen()", env=environment, says="held")
    status = look(open_driver("simulated:laptop"))
    (one,) = status.gpus
    assert one.state == "display"
    assert one.claim.pid == process.pid
    assert "1 of 1 GPU free" in table(status)


# The table

texts = st.text(max_size=40)
ages = st.none() | st.floats(0, 2e9)
pids, names, amounts = st.integers(1, 1 << 22), st.none() | texts, st.none() | st.integers(0, 1 << 38)
commands = st.none() | st.text(max_size=200)
claims = st.builds(
    Holder, st.none() | pids, names, names, commands, ages, stopped=st.booleans(), note=texts, until=ages
)
used = st.none() | st.integers(0, 100)
gpus = st.builds(
    lambda index, name, total, used, load: Gpu(
        index, "GPU-1", name, memory_total=total, memory_used=used, utilization=load
    ),
    *(st.integers(0, 31), texts, amounts, amounts, used),
)
processes = st.builds(ProcessStatus, pids, names, names, st.just("compute"), amounts)
gpu_statuses = st.builds(
    GpuStatus,
    gpus,
    st.sampled_from("free claimed busy display unusable".split()),
    idle=st.booleans(),
    reason=texts,
    claim=st.none() | claims,
    inside=st.none() | claims,
    processes=st.lists(processes, max_size=2).map(tuple),
)
waits = (st.booleans(), texts, st.none() | st.floats(1, 1e6), ages, st.none(), amounts, names)
waiters = st.builds(
    WaiterStatus, st.integers(1, 999), st.none() | pids, names, st.none() | st.integers(1, 64), ages, *waits
)
hosts = st.builds(
    HostStatus,
    *map(st.just, ("gpu01.example.org", "nvml", "550.54.15", "/tmp/safe-gpu", 1.8e9)),
    gpus=st.lists(gpu_statuses, max_size=4).map(tuple),
    queue=st.lists(waiters, max_size=3).map(tuple),
    warnings=st.lists(texts, max_size=1).map(tuple),
)
ANSI = re.compile(r"\x1b\[[0-9]+m")


@settings(max_examples=30)
@given(hosts, st.sampled_from([40, 80, 100, 200]))
def test_no_line_is_too_wide_and_nothing_plays_tricks(status: HostStatus, width: int) -> None:
    text = render(status, width=width, color=False)
    lines = text.split("\n")
    assert max(map(display_width, lines)) <= width
    for line in lines:
        assert line.isprintable()
    colored = render(status, width=width, color=True)
    assert "\x1b[" in colored
    assert ANSI.sub("", colored) == text
    check_document(json.loads(json.dumps(status.to_dict(), allow_nan=False)))


def test_a_crowd_of_waiters_is_cut() -> None:
    crowd = tuple(WaiterStatus(place, place + 10, "anna", 1, None, note="odd") for place in range(1, 1501))
    status = HostStatus("h", "nvml", "1", "/d", 12_001.0, (), crowd)
    text = render(status, width=80, color=False)
    assert "1500 waiting" in text
    assert text.endswith("\n... and 1400 more")
    assert text.count("anna") == 100
    plain = replace(status, queue=tuple(replace(one, note="", job=f"sge:7.{one.position}") for one in crowd))
    assert re.search(r"^1-1500  anna +1500 x 1 GPU", render(plain, width=80, color=False), re.M)
    assert re.search(r"^ +3  anna  7\.3 +1 GPU", render(plain, width=80, color=False, verbose=True), re.M)
    assert [one["position"] for one in status.to_dict()["queue"]] == list(range(1, 1001))
    assert "more" not in render(replace(status, queue=crowd[:100]), width=80, color=False)


def test_a_full_table_of_eighty_columns() -> None:
    claim = Holder(1234567, "averylongusername", "sge:1234567.890", "/usr/bin/python train.py --epochs 3", 1.0)
    gpu = Gpu(7, "GPU-7", "NVIDIA H100 80GB HBM3", memory_total=80 << 30, memory_used=79 << 30, utilization=100)
    busy = GpuStatus(
        gpu._replace(index=8), "busy", processes=(ProcessStatus(4242, "bob", "./x --y", "compute", 5 << 30),)
    )
    status = HostStatus("h", "nvml", "1", "/d", 12_001.0, (GpuStatus(gpu, "claimed", claim=claim), busy))
    assert render(status, width=80, color=False).split("\n")[3:] == [
        "GPU  STATE    MEMORY        UTIL  USER      JOB/PID       HELD  COMMAND",
        "  7  claimed  █████ 79/80G  100%  averyl..  1234567.890  3h20m  python train.p..",
        "  8  busy     █████ 79/80G  100%  bob       pid 4242            x --y",
    ]


def test_what_gpus_have_in_common_stands_once() -> None:
    """Claims, and notes on several GPUs; a claim that is not known is not taken for the one before it."""
    claim = Holder(7, "anna", None, "train", 1.0, stopped=True, until=2.0)
    unknown = Holder(note="odd")
    drained = GpuStatus(Gpu(0, "GPU-0"), "unusable", reason="drained by root: dust", drained=True)
    held = [(0, claim), (1, claim), (2, unknown), (3, unknown), (4, claim)]
    gpus = [GpuStatus(Gpu(number, "GPU-x"), "claimed", claim=one) for number, one in held]
    gpus += [replace(drained, gpu=Gpu(number, "GPU-x")) for number in (5, 6, 7)]
    lines = render(HostStatus("h", "nvml", "1", "/d", 62.0, tuple(gpus)), width=80, color=False).split("\n")
    assert lines[0] == "h: 0 of 8 GPUs free, 3 drained (nvml 1)"
    assert [" ".join(line.split()) for line in lines[4:]] == [
        "0 claimed - - anna pid 7 1m -1m train",
        "1 claimed - - anna",
        "2 claimed - - ? pid ? ? ?",
        "3 claimed - - ? pid ? ? ?",
        "4 claimed - - anna with GPU 0",
        *("5 drained - -", "6 drained - -", "7 drained - -", ""),
        "GPU 0,1,4: process 7 is stopped (a suspended job?) and keeps the GPU",
        "GPU 0,1,4: overdue 1 min",
        "GPU 2,3: odd",
        "GPU 5-7: drained by root: dust",
    ]


WARM = Gpu(0, "GPU-0", memory_total=80 << 30, memory_used=42 << 30, utilization=7, temperature=61)


@pytest.mark.parametrize(
    ("width", "user", "command", "until", "columns"),
    [
        (80, "anna", "train", None, "TEMP USER JOB/PID HELD COMMAND"),
        (80, "anna", "python train.py --epochs 3 --batch 64", None, "TEMP USER JOB/PID HELD COMMAND"),
        (80, "anna", "train", 9e3, "TEMP USER JOB/PID HELD LEFT COMMAND"),
        (80, "annabell", "python train.py --epochs 3", 9e3, "USER JOB/PID HELD LEFT COMMAND"),
        (72, "anna", "train", None, "TEMP USER JOB/PID HELD COMMAND"),
        (60, "anna", "train", None, "USER JOB/PID HELD COMMAND"),
        (100, "annabell", "python train.py --epochs 3", 9e3, "TEMP USER JOB/PID HELD LEFT COMMAND"),
    ],
)
def test_the_temperature_is_shown_where_it_fits(
    width: int, user: str, command: str, until: float | None, columns: str
) -> None:
    claim = Holder(1234567, user, None, command, 1.0, until=until)
    status = HostStatus("h", "nvml", "1", "/d", 3001.0, (GpuStatus(WARM, "claimed", claim=claim),))
    title, row = render(status, width=width, color=False).split("\n")[3:5]
    assert title.split() == f"GPU STATE MEMORY UTIL {columns}".split()
    assert (" 61C " in row) == ("TEMP" in columns)
    assert ("█" in row) == (width >= 72)
    assert len(row) <= width


def test_every_row_of_a_claim_has_its_user_dim_where_it_is_repeated() -> None:
    """A name of any length is whole where another program reads it."""
    long = "annabell.with-a-long-name"[:24]
    held = [Holder(7, long, None, "train", 1.0)] * 2 + [Holder(8, "ben", None, "eval", 1.0)] * 2
    gpus = tuple(GpuStatus(Gpu(number, f"GPU-{number}"), "claimed", claim=one) for number, one in enumerate(held))
    status = HostStatus("h", "nvml", "1", "/d", 62.0, gpus)
    assert render(status, width=80, color=False, piped=True).count(long) == 2
    colored = render(status, width=120, color=True)
    assert [colored.count(f"{dim}{user}") for user in (long, "ben") for dim in ("", "\x1b[2m")] == [2, 1, 2, 1]


def test_verbose_lists_the_processes_on_each_gpu() -> None:
    claim = Holder(7, "anna", "sge:8", "train", 1.0)
    processes = (
        ProcessStatus(7, "anna", "/usr/bin/python train.py", "compute", 20 << 30),
        ProcessStatus(4242, "b\x1b[2Jn\r", "./x\ny \x1b]0;z\x07", "graphics", 22 << 30),
        ProcessStatus(9, None, None, "mps", None),
    )
    gpus = (GpuStatus(WARM, "claimed", claim=claim, processes=processes),)
    gpus += (GpuStatus(Gpu(1, "GPU-1"), "claimed", claim=claim), GpuStatus(Gpu(2, "GPU-2"), "free"))
    status = HostStatus("h", "nvml", "1", "/d", 62.0, gpus)
    plain, verbose = (render(status, width=100, color=False, verbose=one).split("\n")[4:] for one in (False, True))
    assert [" ".join(line.split()) for line in verbose] == [
        "0 claimed █████░░░░░ 42/80G 7% 61C anna 8 1m train",
        "graphics ██▌░░░░░░░ 22/80G b [2Jn pid 4242 x y ]0;z",
        "compute ██▌░░░░░░░ 20/80G anna pid 7 python train.py",
        "mps ?/80G ? pid 9 (cannot be seen here)",
        "1 claimed - - anna",
        "2 free - -",
    ]
    rows = [" ".join(line.split()) for line in plain]
    assert rows == ["0 claimed █████░░░░░ 42/80G 7% 61C anna 8 1m train", "1 claimed - - anna", "2 free - -"]


def test_of_an_unknown_holder_the_process_on_the_gpu_is_shown() -> None:
    """The GPU is claimed through another state directory, whose processes this user cannot ask."""
    gpu = Gpu(0, "GPU-0", utilization=97)
    claim = Holder(elsewhere=True)
    running = ProcessStatus(7, "anna", "/usr/bin/train -x", "compute", 5)
    one = GpuStatus(gpu, "claimed", claim=claim, processes=(running,), reason="claimed elsewhere; more")
    status = HostStatus("h", "nvml", "1", "/d", 100.0, (one,))
    lines = render(status, width=80, color=False).split("\n")[4:]
    assert " ".join(lines[0].split()) == "0 claimed - 97% anna pid 7 ? train -x"
    assert lines[1:] == ["", "GPU 0: claimed elsewhere"]
    assert replace(one, processes=(), idle=True).shown_state(100.0) == "claimed", "since when is not known"


def test_json_has_the_state_of_the_table() -> None:
    held = GpuStatus(Gpu(0, "GPU-0"), "claimed", claim=Holder(1, since=1.0))
    states = {
        "claimed": held,
        "idle": replace(held, idle=True),
        "shared": replace(held, claim=Holder.of_sharers([held.claim])),
        "at risk": replace(held, claim=Holder(1, since=1.0, removable_by="eve")),
        "drained": GpuStatus(held.gpu, "unusable", drained=True),
        "unusable": GpuStatus(held.gpu, "unusable"),
        "free": GpuStatus(held.gpu, "free"),
    }
    status = HostStatus("h", "nvml", "1", "/d", 100.0, tuple(states.values()))
    assert [one["state_shown"] for one in status.to_dict()["gpus"]] == [*states]
    table = render(status, width=80, color=False)
    assert [state for state in states if not re.search(rf"(?m)^  0  {state} ", table)] == []


def test_what_computes_is_not_idle(holder) -> None:
    """In a container the driver may hide the processes of the claim."""
    assert not look(OneGpu(utilization=100)).gpus[0].idle
    assert look(OneGpu(utilization=0)).gpus[0].idle


def test_each_sharer_has_its_row_and_its_notes() -> None:
    gib = 1 << 30
    first = Holder(7, "anna", "sge:8", "train", 1.0, share=20 * gib, memory_used=30 * gib)
    second = Holder(9, "ben", None, "infer", 90.0, share=40 * gib, memory_used=gib, until=95.0)
    gpu = Gpu(0, "GPU-0", memory_total=80 * gib, memory_used=31 * gib, utilization=5)
    one = GpuStatus(gpu, "claimed", claim=Holder.of_sharers((first, second)), share_free=10 * gib, idle=True)
    status = HostStatus("h", "nvml", "1", "/d", 100.0, (one,))
    lines = render(status, width=80, color=False).split("\n")[3:]
    assert [" ".join(line.split()) for line in lines[1:]] == [
        "0 shared ████░░░░░░ 31/80G 5% 2 claims, 10 GiB unclaimed",
        "share ██████████ 30/20G anna 8 1m train",
        "share ░░░░░░░░░░ 1.0/40G ben pid 9 10s -5s infer",
        "",
        "GPU 0: process 7: uses more than its share: 30 GiB of 20 GiB",
        "GPU 0: process 9: overdue 5 s",
    ]
    assert "0  idle " in render(replace(status, taken_at=150.0), width=80, color=False)
    other = first._replace(memory_used=gib)  # the same claim on another GPU
    status = replace(status, gpus=(one, replace(one, gpu=gpu._replace(index=1), claim=Holder.of_sharers([other]))))
    assert render(status, width=80, color=False).count("anna") == 2
    assert "/20G        anna  with GPU 0\n" in render(status, width=80, color=False)


def test_a_narrow_queue_leaves_out_the_least_important() -> None:
    waiter = WaiterStatus(1, 7, "averylonguser", 12, 5.0, hold_for=90.0, job="sge:1234567.890", share=1 << 34)
    waiter = replace(waiter, limit=(10, 12), expected_start=3600.0)
    status = HostStatus("h", "nvml", "1", "/d", 10.0, (), (waiter,))
    shown = {width: render(status, width=width, color=False).split("\n")[-2:] for width in (72, 80, 120)}
    assert shown[80] == [
        "#  USER      JOB/PID      WANTS              WAITED  STARTS",
        "1  averyl..  1234567.890  16 GiB of 12 GPUs      5s  in 59m, at limit (10 of 12)",
    ]
    assert "GPUs  in 59m, at limit (10 of 12)" in shown[72][1]
    assert shown[120][0].split() == "# USER JOB/PID WANTS WAITED PLANNED STARTS".split()


def test_a_look_opens_each_entry_once(state_dir: Path, holder, ticket, monkeypatch) -> None:
    for _ in range(100):
        ticket(nb_gpus=1, gpus=UUIDS)
    walks, opened = [], []
    real_pids, real_open = procfs.pids, os.open

    def counting(path, *arguments, **options):
        opened.append(path)
        return real_open(path, *arguments, **options)

    monkeypatch.setattr(procfs, "pids", lambda: walks.append(1) or real_pids())
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", counting)
        assert len(gather().queue) == 100
    names = [path.name for kind in ("claims", "queue") for path in entries(state_dir, kind)]
    assert [opened.count(name) for name in names] == [1] * 101
    assert walks == [], "the usual case asks no other process"
    for _ in range(3):
        ticket(nb_gpus=1, gpus=UUIDS, start=1)
    assert [one.pid for one in gather().queue] == [ME] * 103
    assert walks == [1], "one walk through /proc finds the others"


def test_from_the_command_line(state_dir: Path, holder, capsys) -> None:
    """Nothing but notes for the next look is left behind."""

    def there() -> set[Path]:
        return {path for path in state_dir.rglob("*") if path.suffix not in (".idle", ".seen")}

    before = there()
    assert main(["status"]) == 0
    assert there() == before
    assert "\x1b" not in capsys.readouterr().out
    assert main(["status", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    check_document(document)
    assert document["gpus"][0]["claim"]["pid"] == holder.pid


# GPUs on which a claim has failed


ERROR = "CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered"


def note(state_dir: Path, index: int, age: float = 0) -> None:
    write_fault(str(state_dir), UUIDS[index], GpuFault(time.time() - age, ERROR))


def test_a_free_gpu_that_is_taken_last_says_why(state_dir: Path) -> None:
    note(state_dir, 0)
    note(state_dir, 1, age=86400)
    status = gather()
    first, second = status.gpus[:2]
    assert (first.state, second.state, second.reason) == ("free", "free", "")
    assert first.reason.startswith("taken last until ")
    assert first.reason.endswith(f"since a claim failed on it: {ERROR}")
    assert status.to_dict()["gpus"][0]["reason"] == first.reason
    table = render(status, width=200, color=False)
    assert table.count(f"since a claim failed on it: {ERROR}") == 1
    assert "8 of 8 GPUs free" in table


def test_a_claimed_one_too(state_dir: Path) -> None:
    with safe_gpu.GPUOwner(8, affinity=None, timeout=0):
        note(state_dir, 3)
        status = gather()
        assert status.gpus[3].state == "claimed"
        assert status.gpus[3].reason.endswith(ERROR)
        assert f"since a claim failed on it: {ERROR}" in render(status, width=200, color=False)
