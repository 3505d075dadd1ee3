"""What ``status`` says of a host: real claims, waiters, liars and orphans on simulated GPUs, and odd GPUs."""

import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.ground import locked_host

from safe_gpu.cli.commands import main
from safe_gpu.coordination.directory import Directory
from safe_gpu.coordination.entry import make_entry, remove_entry, said_by_this_process
from safe_gpu.coordination.faults import write_fault
from safe_gpu.drivers import open_driver
from safe_gpu.drivers.presets import preset
from safe_gpu.gpus.devices import Gpu, GpuFault, GpuProcess, HostSnapshot
from safe_gpu.host import procfs
from safe_gpu.status.facts import HostStatus, of_user
from safe_gpu.status.gather import gather, status_of
from safe_gpu.status.render import render

UUIDS = [gpu.uuid for gpu in preset("dgx-a100").gpus]
ME, PARENT = os.getpid(), os.getppid()  # of the same user


CLAIMED = "pid uid user job command since until removable_by"
KEYS = {
    "status": "schema host driver driver_version state_dir gpus queue windows warnings",
    "gpu": "label index vendor uuid name pci_bus_id numa_node memory_total memory_used utilization temperature fan "
    "power power_limit state state_shown idle idle_for reason claim shares share_free processes",
    "claim": CLAIMED,
    "share": f"{CLAIMED} share memory_used",
    "process": "pid user command kind memory_used",
    "waiter": "position pid user nb_gpus share vendor since hold_for expected_start earliest_start job limit",
}


def check_document(status: HostStatus) -> None:
    """Whether the document is JSON with the keys of the reference and no others."""
    document = json.loads(json.dumps(status.to_dict(), allow_nan=False))
    gpus = document["gpus"]
    records = [("status", document), *(("gpu", gpu) for gpu in gpus), *(("waiter", one) for one in document["queue"])]
    records += [("claim", gpu["claim"]) for gpu in gpus if gpu["claim"]]
    records += [("share", share) for gpu in gpus for share in gpu["shares"]]
    records += [("process", process) for gpu in gpus for process in gpu["processes"]]
    assert [(kind, {*one}) for kind, one in records if {*one} - {"turn"} != {*KEYS[kind].split()}] == []
    assert document["schema"] == 2


def look(driver: object = None) -> HostStatus:
    """A status whose JSON and table are in order, whatever they show."""
    status = status_of(driver.detailed(driver.snapshot())) if driver else gather()  # type: ignore[attr-defined]
    check_document(status)
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


class OneGpu:
    """A driver with one GPU, on which there is what a test puts there."""

    def __init__(self, *processes: GpuProcess, **facts: object) -> None:
        self.gpu = Gpu(0, UUIDS[0], "Model", processes=processes)._replace(**facts)  # type: ignore[arg-type]

    def snapshot(self) -> HostSnapshot:
        return HostSnapshot((self.gpu, Gpu(1, UUIDS[1], "Model")), "test")

    def detailed(self, snapshot: HostSnapshot) -> HostSnapshot:
        return snapshot


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
    assert (claim.stopped, claim.note, status.gpus[5].idle) == (False, "", False)
    assert [one.pid for one in status.gpus[5].processes] == [process.pid]
    assert status.gpus[5].processes[0].user == claim.user
    assert " 42.7 " in row(status, 1)
    assert row(status, 5)[5:] == row(status, 1)[5:]
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
    assert not look(OneGpu(utilization=100)).gpus[0].idle, "in a container the driver may hide the processes"
    for used in (graphics._replace(memory_used=None), graphics, graphics._replace(memory_used=5 << 30)):
        for display in (False, True):
            assert not look(OneGpu(used, desktop, display_active=display)).gpus[0].idle, "it draws"
    assert not look(OneGpu(desktop._replace(memory_used=5 << 30))).gpus[0].idle, "a renderer may belong to it"
    for idle in ([desktop, foreign], [server], []):
        assert look(OneGpu(*idle)).gpus[0].idle
    assert f"not part of the claim: process {stranger.pid} 12345" in table(look(OneGpu(foreign)))


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
    assert procfs.parent_of(one.inside.pid) == outer.pid
    assert not one.idle
    assert f"inside it: process {one.inside.pid}" in table(status)
    assert sum(gpu.state == "claimed" for gpu in status.gpus) == 2
    outer.kill()
    after = look().gpus[int(index)]
    assert after.state == "claimed", "the claim inside it lives on"


def test_shares_are_shown_with_the_claims_that_have_them(state_dir: Path, child) -> None:
    code = CLAIM + "claim(1, NoPlaceholder(), only=0, share='20GiB'); say('held'); listen()"
    sharers = [child(code, says="held") for _ in range(2)]
    (one, *others) = look().gpus
    assert [claim.pid for claim in one.shares] == [sharer.pid for sharer in sharers]
    assert [claim.share for claim in one.shares] == [20 << 30] * 2
    assert one.claim.pid == sharers[0].pid
    assert one.share_free == 40 << 30
    assert {other.state for other in others} == {"free"}


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


def test_children_that_outlive_the_holder_are_named(state_dir: Path, child, as_user) -> None:
    """To root and their user; for others they cannot be seen."""
    code = HOLD_ONE.replace("say(", "os.fork() or signal.pause(); say(")
    process = child("import signal\n" + code, says="held")
    (heir,) = procfs.descendants(process.pid)
    assert look().gpus[0].claim.pid == process.pid
    process.kill()
    try:
        claim = look().gpus[0].claim
        assert (claim.pid, claim.user, claim.command) == (heir, procfs.user_of(heir), Path(sys.executable).name)
        assert claim.note == f"still held by process {heir}, which process {process.pid} left behind"

        def work(say, listen) -> None:
            claim = gather().gpus[0].claim
            say(f"{claim.pid} {claim.user} {claim.note}")

        left = f"still held by a process that process {process.pid} left behind"
        assert as_user(work, uid=12345).hear() == f"None {procfs.user_of(heir)} {left}"
    finally:
        os.kill(heir, signal.SIGKILL)


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
    assert (claim.elsewhere, claim.pid, claim.user) == (True, None, None)
    assert status.to_dict()["gpus"][0]["claim"]["uid"] is None
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


# The queue


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


WAIT = CLAIM + "say('ready'); claim(N, NoPlaceholder(), timeout=None); say('held'); listen()"


def test_who_waits_in_what_order(state_dir: Path, child, stop, eventually) -> None:
    child(CLAIM + "claim(8, NoPlaceholder()); say('held'); listen()", says="held")
    waiters = []
    for place, number in enumerate((4, 1, 2), 1):
        waiters.append(child(WAIT.replace("N,", f"{number},")))
        eventually(lambda place=place: len(gather().queue) == place)
    stop(waiters[1].pid)
    status = look()
    assert [(one.position, one.pid, one.nb_gpus) for one in status.queue] == [
        (place, waiter.pid, number) for place, (waiter, number) in enumerate(zip(waiters, (4, 1, 2), strict=True), 1)
    ]
    assert all(one.user == procfs.user_of(os.getpid()) for one in status.queue)
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
    assert document["gpus"][0]["claim"]["pid"] == holder.pid


@pytest.mark.parametrize("claimed", [False, True])
def test_a_gpu_that_is_taken_last_says_why(ground, claimed: bool) -> None:
    error = "CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered"
    if claimed:
        ground.hold(3)
    for index, age in ((3, 0.0), (4, 86400.0)):
        write_fault(str(ground.directory), UUIDS[index], GpuFault(time.time() - age, error))
    status = look()
    one, old = status.gpus[3:5]
    assert (one.state, old.reason) == ("claimed" if claimed else "free", "")
    assert "taken last until " in one.reason
    assert one.reason.endswith(f"since a claim failed on it: {error}")
    assert render(status, width=200, color=False).count(f"since a claim failed on it: {error}") == 1


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
    assert "free, shared with the display" in table(look(open_driver("simulated:laptop")))
    process = child(CLAIM + "claim(1); say('held'); listen()", env=environment, says="held")
    status = look(open_driver("simulated:laptop"))
    (one,) = status.gpus
    assert one.state == "display"
    assert one.claim.pid == process.pid
    assert "1 of 1 GPU free" in table(status)
