"""What ``status`` says of a host: claims, waiters, liars, orphans, other PID namespaces, odd GPUs, and two vendors."""

import json
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support import api, findings
from support.claims import claim
from support.entries import remove_entry
from support.state import locked_host
from support.vendor_hosts import KfdHost

from safe_gpu import NoDriverError, NotEnoughGpusError

UUIDS = [gpu.uuid for gpu in api.find_preset("dgx-a100").gpus]
ME, PARENT = os.getpid(), os.getppid()  # of the same user


CLAIMED = "pid uid user job command since until removable_by held_as elsewhere"
KEYS = {
    "status": "schema host driver driver_version state_dir gpus queue windows warnings",
    "gpu": "label index vendor uuid name pci_bus_id numa_node memory_total memory_used utilization temperature fan "
    "power power_limit state state_shown idle idle_for reason claim shares share_free pieces processes beside",
    "claim": CLAIMED,
    "share": f"{CLAIMED} share memory_used",
    "process": "pid user command kind memory_used ended",
    "beside": "pid user command memory_used text",
    "waiter": "position pid user nb_gpus share vendor since hold_for expected_start earliest_start job limit",
}


def check_document(status: api.HostStatus) -> None:
    """Whether the document is JSON with the keys of the reference and no others."""
    document = json.loads(json.dumps(status.to_dict(), allow_nan=False))
    gpus = document["gpus"]
    records = [("status", document), *(("gpu", gpu) for gpu in gpus), *(("waiter", one) for one in document["queue"])]
    records += [("claim", gpu["claim"]) for gpu in gpus if gpu["claim"]]
    records += [("share", share) for gpu in gpus for share in gpu["shares"]]
    records += [("claim", piece) for gpu in gpus for piece in gpu["pieces"]]
    records += [("process", process) for gpu in gpus for process in gpu["processes"]]
    records += [("beside", process) for gpu in gpus for process in gpu["beside"]]
    for kind, record in records:
        assert {*record} - {"turn"} == {*KEYS[kind].split()}, f"write its keys into KEYS[{kind!r}] of this file"
    assert document["schema"] == 2


def look(driver: object = None) -> api.HostStatus:
    """A status whose JSON and table are in order, whatever they show."""
    status = api.status_of(driver.detailed(driver.snapshot())) if driver else api.gather()  # type: ignore[attr-defined]
    check_document(status)
    for width in (80, 140):
        assert max(map(len, api.render(status, width=width, color=False).splitlines())) <= width
    return status


def states(status: api.HostStatus) -> str:
    return " ".join(one.state for one in status.gpus)


def table(status: api.HostStatus) -> str:
    return api.render(status, width=80, color=False)


def row(status: api.HostStatus, index: int) -> str:
    return next(line for line in table(status).splitlines() if line.split()[:1] == [str(index)])


CLAIM = """
import os, safe_gpu
from safe_gpu.runtimes.placeholders import NoPlaceholder
def claim(*args, **options): return safe_gpu.claim_gpus(*args, affinity=None, **options)
"""
HOLD_ONE = CLAIM + "claim(1, NoPlaceholder(), only=0); say('held'); listen()\n"


@pytest.fixture
def holder(state_dir: Path, forked):
    """A process that has claimed GPU 0 and nothing else."""
    return forked(HOLD_ONE, says="held")


def entries(state_dir: Path, kind: str = "claims") -> list[Path]:
    return sorted(path for path in (state_dir / kind).iterdir() if not path.name.startswith("."))


class OneGpu:
    """A driver with one GPU, on which there is what a test puts there."""

    def __init__(self, *processes: api.GpuProcess, **facts: object) -> None:
        self.gpu = api.Gpu(0, UUIDS[0], "Model", processes=processes)._replace(**facts)  # type: ignore[arg-type]

    def snapshot(self) -> api.HostSnapshot:
        return api.HostSnapshot((self.gpu, api.Gpu(1, UUIDS[1], "Model")), "test")

    def detailed(self, snapshot: api.HostSnapshot) -> api.HostSnapshot:
        return snapshot


# Claims


def test_an_untouched_host_is_free_and_stays_untouched(state_dir: Path) -> None:
    status = look()
    assert (states(status), status.queue, status.warnings) == (" ".join(["free"] * 8), (), ())
    assert status.state_dir == str(state_dir)
    assert not state_dir.exists()


def test_a_claim_is_shown_with_its_holder(state_dir: Path, child) -> None:
    job = {"JOB_ID": "42", "SGE_TASK_ID": "7", "SGE_ROOT": "/opt/sge", "NSLOTS": "1"}
    before = time.time()
    process = child(CLAIM + "say(*claim(2, only='1,5').devices_taken); listen()", env=job, says="1 5")
    status = look()
    assert states(status) == "free claimed free free free claimed free free"
    held, (running,) = status.gpus[5].claim, status.gpus[5].processes
    assert (held.pid, held.user, held.job) == (process.pid, api.procfs.user_of(process.pid), "sge:42.7")
    assert (held.command, held.stopped, held.note) == (Path(sys.executable).name, False, "")
    assert before - 1 < held.since < time.time() + 1
    assert (running.pid, running.user, status.gpus[5].idle) == (process.pid, held.user, False)
    assert " 42.7 " in row(status, 1)
    assert "6 of 8 GPUs free" in table(status)


def test_a_claim_without_a_process_on_the_gpu_is_idle(holder) -> None:
    status = look()
    assert (status.gpus[0].state, status.gpus[0].idle) == ("claimed", True)
    assert row(status, 0).split()[:2] == ["0", "claimed"], "but not in its first minute"
    later = replace(status, taken_at=time.time() + 60)
    assert row(later, 0).split()[:2] == ["0", "idle"]
    assert "7 of 8 GPUs free, 1 claimed but idle (" in table(later), "nobody takes it for a free one"


def test_whose_processes_count_for_a_claim(holder, as_user) -> None:
    stranger = as_user(lambda say, listen: (say("there"), listen()), uid=12345)
    stranger.hear()
    own, unseen, foreign = (
        api.GpuProcess(holder.pid),
        api.GpuProcess(1 << 30),
        api.GpuProcess(stranger.pid, memory_used=1),
    )
    graphics = api.GpuProcess(holder.pid, kind="graphics", memory_used=5 << 20)
    desktop = api.GpuProcess(os.getpid(), kind="graphics", memory_used=5 << 20)  # of the same user
    server = api.GpuProcess(1 << 30, name="/usr/bin/nvidia-cuda-mps-server")
    assert not look(OneGpu(own)).gpus[0].idle
    assert not look(OneGpu(foreign, own)).gpus[0].idle
    assert not look(OneGpu(unseen)).gpus[0].idle, "a pid that does not resolve here may be the claim's"
    assert not look(OneGpu(processes=None)).gpus[0].idle, "unknown is not idle"
    assert not look(OneGpu(processes_supported=False)).gpus[0].idle
    assert not look(OneGpu(utilization=100)).gpus[0].idle, "in a container the driver may hide the processes"
    for used, display in ((None, False), (5 << 20, True), (5 << 30, False)):
        drawing = graphics._replace(memory_used=used)
        assert not look(OneGpu(drawing, desktop, display_active=display)).gpus[0].idle, "it draws"
    assert not look(OneGpu(desktop._replace(memory_used=5 << 30))).gpus[0].idle, "a renderer may belong to it"
    for idle in ([desktop, foreign], [server], []):
        assert look(OneGpu(*idle)).gpus[0].idle
    assert f"GPU 0: process {stranger.pid} of 12345 uses 0 MiB beside this claim" in table(look(OneGpu(foreign)))


@pytest.mark.parametrize(
    ("listed", "display", "shown"),
    [
        ([(ME, "graphics", 600 << 20), (PARENT, "graphics", 600 << 20)], False, "busy"),
        ([(ME, "graphics", 5 << 30), (ME, "compute", 5 << 30)], True, "busy"),
        ([(ME, "graphics", 5 << 30)], True, "free"),
    ],
)
def test_who_draws_without_a_claim(state_dir: Path, listed, display, shown) -> None:
    used = sum({pid: size for pid, _, size in listed}.values())
    status = look(OneGpu(*(api.GpuProcess(*one) for one in listed), memory_used=used, display_active=display))
    assert status.gpus[0].state == shown
    user = api.procfs.user_of(ME)
    assert (f" {user} " in row(status, 0)) is (shown == "busy")
    assert ("(1 of 2)" in row(status, 0)) is (PARENT in [pid for pid, *_ in listed])
    assert bool(api.of_user(status, user).gpus) is (shown == "busy")


def test_a_stopped_holder_is_marked(holder, eventually) -> None:
    os.kill(holder.pid, signal.SIGSTOP)
    eventually(lambda: api.procfs.is_stopped(holder.pid))
    status = look()
    assert status.gpus[0].claim.stopped
    assert f"process {holder.pid} is stopped" in table(status)
    os.kill(holder.pid, signal.SIGCONT)
    eventually(lambda: not api.procfs.is_stopped(holder.pid))
    assert "stopped" not in table(look())


def test_claims_inside_claims_are_shown(dgx, child) -> None:
    with claim(2, delegate=True):
        inner = child(CLAIM + "claim(1); say('held'); listen()", says="held")
        status = look()
    (one,) = [one for one in status.gpus if one.inside]
    assert (one.claim.pid, one.inside.pid, one.idle) == (ME, inner.pid, False)
    assert f"claimed again, inside this claim, by process {inner.pid}" in " ".join(table(status).split())
    assert [states(of).count("claimed") for of in (status, look())] == [2, 1], "the claim inside it lives on"


def test_who_waits_inside_a_claim_is_told_apart_from_who_waits_for_free_gpus(dgx, child, eventually) -> None:
    with claim(2, delegate=True):
        child(CLAIM + "claim(1); say('held'); listen()", says="held")
        child("import safe_gpu; say('waits'); safe_gpu.claim_gpus(2, timeout=None)", says="waits")
        eventually(lambda: dgx.tickets())
        status = look()
    assert states(status).count("free") == 6
    assert "     it is inside a claim, and waits for GPUs of that claim" in table(status)


def test_shares_are_shown_with_the_claims_that_have_them(state_dir: Path, forked) -> None:
    code = CLAIM + "claim(1, NoPlaceholder(), only=0, share='20GiB'); say('held'); listen()"
    sharers = [forked(code, says="held") for _ in range(2)]
    one = look().gpus[0]
    assert [(share.pid, share.share) for share in one.shares] == [(sharer.pid, 20 << 30) for sharer in sharers]
    assert (one.claim.pid, one.share_free) == (sharers[0].pid, 40 << 30)


# What an entry says, and what is so


def first_line_of_wait(nb_gpus: int) -> str:
    """Who holds what, as a wait for these GPUs says at first."""

    def end(status: Any) -> None:
        raise InterruptedError(api.holders_line(status, time.time()))

    with pytest.raises(InterruptedError) as told:
        api.wait_for_gpus(nb_gpus, timeout=60, on_wait=end)
    return str(told.value)


def told_of_the_first(say, listen) -> None:
    """What another user is told of the claim of GPU 0."""
    one = api.gather().gpus[0].claim
    say(f"{one.pid} {one.user} {one.note}")


def test_who_claims_is_the_owner_of_the_entry_whatever_it_says(dgx, holder) -> None:
    """The process that it names is shown if that user's process began when the entry says; else who has the entry."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    dgx.hold(1, pid=holder.pid, start=5, user="nobody", uid=12345)
    dgx.hold(2, pid=holder.pid, start=api.procfs.start_time(holder.pid), uid=12345)
    first, second, third = (one.claim for one in look().gpus[:3])
    assert (first.pid, first.user, first.uid) == (holder.pid, api.procfs.user_of(holder.pid), os.geteuid())
    for one in (second, third):
        assert (one.pid, one.user, one.uid) == (ME, "12345", 12345)
        assert one.note == f"still held by process {ME}, which an earlier process {holder.pid} left behind"
    assert second.note in " ".join(table(look()).split())


def test_children_that_outlive_the_holder_are_named(state_dir: Path, child, as_user) -> None:
    """To root and their user; for others they cannot be seen."""
    code = HOLD_ONE.replace("say(", "os.fork() or signal.pause(); say(")
    process = child("import signal\n" + code, says="held")
    (orphan,) = api.procfs.descendants(process.pid)
    process.kill()
    try:
        found = look().gpus[0].claim
        assert (found.pid, found.user, found.command) == (orphan, api.procfs.user_of(orphan), Path(sys.executable).name)
        assert found.note == f"still held by process {orphan}, which process {process.pid} left behind"
        left = f"still held by a process that process {process.pid} left behind"
        assert as_user(told_of_the_first, uid=12345).hear() == f"None {api.procfs.user_of(orphan)} {left}"
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_claim_of_another_state_directory_is_told_by_its_door(dgx, child, run_here, open_tmp: Path) -> None:
    env = {"SAFE_GPU_DIR": str(open_tmp / "other"), "SAFE_GPU_SIMULATED_DIR": str(dgx.state_dir / "simulated")}
    child(HOLD_ONE, env=env, says="held")
    status = look()
    assert states(status) == " ".join(["claimed", *["free"] * 7])
    found = status.gpus[0].claim
    assert (found.elsewhere, found.pid, found.user) == (True, None, None)
    document = status.to_dict()
    told = document["gpus"][0]["claim"]
    assert (told["elsewhere"], told["uid"], told["user"]) == (True, None, None)
    assert " ".join(row(status, 0).split()).endswith(" 34C somebody in another state directory")
    note = "GPU 0: claimed in another state directory (a private /tmp?), or its entry here was removed"
    assert note in " ".join(table(status).split())

    page = api.render_page({"h": document}, now=time.time(), every=300.0, use={})
    assert "somebody in another state directory" in page
    assert note in page
    assert api.figures_of(document, time.time()).cells["Held by"] == "somebody in another state directory 1"
    for text in (page, table(status), api.render(status, width=200, color=False, verbose=True)):
        assert "None" not in text
    del told["elsewhere"]  # as an older version
    assert note in api.render_page({"h": document}, now=time.time(), every=300.0, use={})
    with pytest.raises(NotEnoughGpusError, match=r"GPU 0 .*: claimed in another state directory"):
        claim(8)
    assert first_line_of_wait(8) == "GPU 0 somebody in another state directory"
    if os.geteuid() == 0:
        told = run_here("drain", "0", "--from", "+1h", "--until", "+2h").stderr + run_here("drain", "0").stderr
        run_here("resume", "0")
        assert told.count("claimed by somebody in another state directory") == 2


def test_an_entry_without_doors_is_at_risk_where_another_user_can_remove_it(dgx, holder) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    dgx.hold(1)
    dgx.played(1).doors.release()
    assert [one.claim.removable_by for one in look().gpus[:2]] == [None, None], "all belongs to root"
    os.chown(dgx.state_dir, 12345, 12345)
    assert [one.claim.removable_by for one in look().gpus[:2]] == [None, "12345"]
    assert row(look(), 1).split()[1:3] == ["at", "risk"]
    assert "only the claim's file keeps others off, and 12345 can remove it" in " ".join(table(look()).split())


# The queue


@pytest.fixture
def ticket(state_dir: Path):
    """Called with what it says, it makes a ticket of this process."""
    made = []

    def make(**said: object) -> None:
        with locked_host() as host:
            host.queue.refresh()
            directory = api.Directory(str(state_dir), "queue")
            said = {**api.facts_of_this_process(None), "since": time.time(), **said}
            made.append((directory, *api.make_entry(directory, host.queue.next_number, said, by_children=False)))

    yield make
    for directory, name, held in made:
        remove_entry(directory, name, held)
        directory.close()


WAIT = CLAIM + "say('ready'); claim(N, NoPlaceholder(), timeout=None); say('held'); listen()"


def test_who_waits_in_what_order(state_dir: Path, forked, stop, eventually) -> None:
    forked(CLAIM + "claim(8, NoPlaceholder()); say('held'); listen()", says="held")
    waiters = []
    for place, number in enumerate((4, 1, 2), 1):
        waiters.append(forked(WAIT.replace("N,", f"{number},")))
        eventually(lambda place=place: len(api.gather().queue) == place)
    stop(waiters[1].pid)
    status = look()
    assert [(one.position, one.pid, one.nb_gpus) for one in status.queue] == [
        (place, waiter.pid, number) for place, (waiter, number) in enumerate(zip(waiters, (4, 1, 2), strict=True), 1)
    ]
    assert [one.stopped for one in status.queue] == [False, True, False]
    assert re.search(rf"2  {api.procfs.user_of(ME)} +pid {waiters[1].pid}  1 GPU ", table(status))
    assert f"process {waiters[1].pid} is stopped" in table(status)
    waiters[0].kill()
    assert [one.pid for one in look().queue] == [waiters[1].pid, waiters[2].pid]


def test_who_waits_is_the_owner_of_the_ticket_whatever_it_says(holder, ticket) -> None:
    ticket(nb_gpus=2, gpus=UUIDS[:2], pid=holder.pid, start=5, inside="no such claim", job="sge:7")
    (one,) = look().queue
    assert (one.pid, one.user, one.job, one.note) == (ME, api.procfs.user_of(ME), "sge:7", "")
    assert one.expected_start is None, "nobody waits inside a claim that has ended"


# Trouble


def test_a_look_takes_no_lock_and_changes_only_its_own_notes(state_dir: Path, holder, ticket, run_here) -> None:
    """host.lock is held all the while."""

    def there() -> dict[Path, tuple[int, int]]:
        kept = [path for kind in ("claims", "queue") for path in entries(state_dir, kind)]
        files = state_dir.glob("*/*")
        kept += [path for path in files if path.suffix not in (".idle", ".seen") and path.name != "looks"]
        return {path: (path.stat().st_ino, path.stat().st_ctime_ns) for path in kept}  # to read may set st_atime

    ticket(nb_gpus=8, gpus=UUIDS)
    before = there()
    with locked_host():
        status = look()
        shown, document = run_here("status"), json.loads(run_here("status", "--json").stdout)
    assert (status.gpus[0].claim.pid, len(status.queue), status.warnings) == (holder.pid, 1, ())
    assert (shown.returncode, "\x1b" in shown.stdout, document["gpus"][0]["claim"]["pid"]) == (0, False, holder.pid)
    assert there() == before


def test_the_end_of_a_dead_claim_is_told_where_a_second_look_fails(holder, state_dir: Path, monkeypatch) -> None:
    """The first look has removed its entry."""

    def fail(*about: Any) -> Any:
        about[-1]()
        raise api.StateDirError("it is gone")

    holder.kill()
    monkeypatch.setattr("safe_gpu.status.gather.claims_now", fail)
    assert "it is gone" in look().warnings[0]
    (told,) = (state_dir / "history").glob("*.jsonl")
    claimed, ended = map(json.loads, told.read_text().splitlines())
    assert claimed["claim"][0] == holder.pid
    assert ended["claim"] == claimed["claim"]


def test_a_state_directory_out_of_order_is_a_warning(state_dir: Path) -> None:
    state_dir.symlink_to("/nowhere")
    status = look(OneGpu())
    assert "symbolic link" in status.warnings[0]
    assert all("not known" in one.reason for one in status.gpus), "free may be wrong here, and says so"
    assert "warning: the claims are not known" in table(status)
    state_dir.unlink()
    state_dir.write_text("")
    assert "not a directory" in look(OneGpu()).warnings[0]


def test_names_that_are_ignored_are_reported_and_hide_nothing(state_dir: Path, holder) -> None:
    (state_dir / "claims" / f"77.{'a' * 16}").symlink_to("/etc/passwd")
    for number in (78, 79):
        (state_dir / "queue" / f"{number}.{'b' * 16}").symlink_to("/etc/passwd")
    status = look()
    assert states(status) == " ".join(["claimed", *["free"] * 7])
    second, first = status.ignored
    mine = api.procfs.user_name(os.geteuid())
    assert first == f"{state_dir}/claims/77.{'a' * 16} of {mine} is ignored (a symbolic link)"
    assert second.endswith(", as do 1 more")
    assert status.to_dict()["warnings"] == [second, first]
    assert api.main(["status"]) == 0


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: path.chmod(0o600), "Permission denied"),
        (lambda path: os.truncate(path, 33_000), "33000 bytes"),
        (lambda path: path.write_text("[]"), "nonsense"),
    ],
)
def test_an_entry_that_cannot_be_read_is_told_with_its_owner(
    state_dir: Path, dgx: Any, as_user: Any, spoil: Any, why: str
) -> None:
    """Its doors keep the GPU, which is told too."""
    dgx.hold(0, uid=4711)
    dgx.hold(1, uid=0)
    path = dgx.played(0).path
    spoil(path)

    def look(say, listen) -> None:
        status = api.gather()
        say([status.ignored, states(status)[:20], status.gpus[0].reason, ask_doctor()])

    def ask_doctor() -> str:
        return findings.finding("entries").detail

    told = as_user(look, uid=4712).hear()
    assert f"{path} of 4711 is ignored (" in told
    assert told.count(why) == 2, "in status and in doctor"
    assert "claimed claimed free" in told
    assert "its entry here was removed or cannot be read" in told


@pytest.mark.parametrize("name", ["{number}.{number:016x}", ".{number:016x}"])
def test_who_has_made_very_many_names_is_told(state_dir: Path, holder, name: str) -> None:
    """Of dead entries, and of unfinished ones."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    one = state_dir / "claims" / "one"
    one.touch()
    os.chown(one, 4711, 4711)
    for number in range(7000):
        os.link(one, state_dir / "claims" / name.format(number=number + 10))
    text = rf"{state_dir}/claims has [67],00[0-9] names, which slows everybody down; 100% of them are of 4711, "
    assert re.search(text, findings.finding("entries").detail)
    assert any(re.match(text, told) for told in look().ignored)


def test_a_look_opens_each_entry_once(state_dir: Path, holder, ticket, monkeypatch) -> None:
    for _ in range(100):
        ticket(nb_gpus=1, gpus=UUIDS)
    pids, opens = Mock(side_effect=api.procfs.pids), Mock(side_effect=os.open)
    monkeypatch.setattr(api.procfs, "pids", pids)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", opens)
        assert len(api.gather().queue) == 100
    opened = Counter(call.args[0] for call in opens.mock_calls)
    assert [opened[path.name] for kind in ("claims", "queue") for path in entries(state_dir, kind)] == [1] * 101
    assert pids.call_count == 0, "the usual case asks no other process"
    for _ in range(3):
        ticket(nb_gpus=1, gpus=UUIDS, start=1)
    assert [one.pid for one in api.gather().queue] == [ME] * 103
    assert pids.call_count == 1, "one walk through /proc finds the others"


def test_a_gpu_that_is_taken_last_says_why(dgx) -> None:
    error = "CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered"
    dgx.hold(3)
    for index, age in ((2, 0.0), (3, 0.0), (4, 86400.0)):
        api.write_fault(str(dgx.state_dir), UUIDS[index], api.GpuFault(time.time() - age, error))
    status = look()
    free, claimed, old = status.gpus[2:5]
    assert (free.state, claimed.state, old.reason) == ("free", "claimed", "")
    for one in (free, claimed):
        assert "taken last until " in one.reason
        assert one.reason.endswith(f"since a claim failed there: {error}")


def test_an_ill_gpu_says_what_speaks_against_it(fake_gpus, state_dir: Path) -> None:
    fake_gpus.change(0, recovery=1)
    fake_gpus.change(1, util=97)
    fake_gpus.change(2, util=97)
    fake_gpus.process(fake_gpus.uuids[2], 1 << 29, 5 << 30, static=True)
    fake_gpus.use_nvml_here()
    ill, wedged, busy, *well = look().gpus
    assert (ill.state, ill.reason) == ("free", "taken last while the driver recommends the recovery action Reset")
    assert wedged.reason == "taken last while it shows 97% utilisation without a process or memory in use"
    assert "taken last" not in busy.reason
    assert {one.reason for one in well} == {""}
    assert "GPU 0: taken last while the driver recommends" in " ".join(table(look()).split())


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
    first, lost, parent, _, _, prohibited, busy = status.gpus
    assert [one.gpu.label for one in status.gpus] == ["0", "1", "2", "2:0", "2:1", "3", "4"]
    assert states(status) == "free unusable unusable free free unusable busy"
    assert (first.gpu.utilization, parent.gpu.mig_enabled, lost.gpu.lost) == (None, True, True)
    assert "PROHIBITED" in prohibited.reason
    assert [one.user for one in busy.processes if one.pid == 1 << 29] == [None]
    text = " ".join(table(status).split())
    for told in (f"{1 << 29}", "(1 of 2)", "GPU 2: MIG mode is on", lost.reason):
        assert told in text
    assert ": 1 of 4 GPUs free, 2 of 2 MIG instances on 1 GPU free (" in text


@pytest.mark.parametrize("is_first", [True, False])
def test_a_process_that_has_ended_and_keeps_its_memory(
    fake_gpus: Any, state_dir: Path, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all processes are seen. Elsewhere it may be one of another PID namespace."""
    monkeypatch.setattr(api.procfs, "pid_namespace", lambda: api.procfs.FIRST_PID_NAMESPACE if is_first else OTHER)
    fake_gpus.set(2)
    fake_gpus.use_nvml_here()
    fake_gpus.process(fake_gpus.uuids[1], 1 << 29, 5 << 30, static=True)
    told = f"process {1 << 29} has ended and the driver keeps its memory: reset the GPU"
    status = look()
    assert (status.gpus[1].state, told in status.gpus[1].reason) == ("busy", is_first)
    assert ("(has ended)" in row(status, 1)) == is_first
    assert (f"GPU 1: {told} if that lasts" in " ".join(table(status).split())) == is_first
    assert [one["ended"] for one in status.to_dict()["gpus"][1]["processes"]] == [is_first]
    with pytest.raises(NotEnoughGpusError) as refused:
        claim(2)
    assert (told in str(refused.value)) == is_first


def test_a_display_that_everyone_shares(state_dir: Path, child) -> None:
    environment = {"SAFE_GPU_DRIVER": "simulated:laptop"}
    assert "free, shared with the display" in table(look(api.open_driver("simulated:laptop")))
    process = child(CLAIM + "claim(1); say('held'); listen()", env=environment, says="held")
    status = look(api.open_driver("simulated:laptop"))
    assert (status.gpus[0].state, status.gpus[0].claim.pid) == ("display", process.pid)
    assert "1 of 1 GPU free" in table(status)


# Holders in other PID namespaces: their numbers mean nothing here, and nobody else is blamed for them

OTHER = 4026539999
FIRST = api.procfs.FIRST_PID_NAMESPACE


def test_where_a_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.procfs, "pid_namespace", lambda: FIRST)
    assert [api.procfs.namespace_text(one) for one in (FIRST, None, OTHER)] == ["", "", "in a container"]
    monkeypatch.setattr(api.procfs, "pid_namespace", lambda: OTHER)
    told = [api.procfs.namespace_text(one) for one in (OTHER, FIRST, OTHER + 1)]
    assert told == ["", "outside this container", "in another container"]


def test_an_unrelated_process_with_that_number_is_not_blamed(state_dir: Path, dgx, as_user) -> None:
    """Who has the entry is found by root and its user; for others it cannot be seen."""
    dgx.hold(0, pid=1, start=1, pidns=OTHER)
    (found,) = api.gather().gpus[0].claims
    assert (found.pid, found.uid) == (ME, os.geteuid())
    assert found.note.endswith("container, as process 1 there")
    said = as_user(told_of_the_first, uid=12345).hear()
    assert said.startswith(f"None {found.user} ")
    assert said.endswith("container, as process 1 there, which cannot be seen from here")


def test_a_claim_in_a_real_pid_namespace(dgx, child) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root, and unshare")
    code = "import ctypes, os, safe_gpu\nassert ctypes.CDLL(None).unshare(0x20000000) == 0\n"  # CLONE_NEWPID
    code += "if os.fork() == 0:\n    safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), affinity=None)\n"
    code += "    say(os.getpid())\n    listen()\nelse:\n    os.wait()\n"
    parent = child(code)
    try:
        assert parent.hear() == "1", "pid 1 of its namespace"
        (holder,) = api.procfs.descendants(parent.pid)
        one = api.gather().gpus[0]
        assert (one.claim.pid, one.claim.uid) == (holder, 0)
        assert one.claim.note.endswith("container, as process 1 there")
        assert "process 1 (" not in one.reason
    finally:
        parent.tell()


def test_the_processes_of_an_enclosing_claim_of_another_pid_namespace() -> None:
    said = {"v": 1, "gpus": {}, "pid": 7, "pidns": api.procfs.pid_namespace()}
    enclosing = api.Entry.read("1.x", 0, (1, 1), json.dumps(said).encode())
    assert api.pids_of_enclosing(enclosing) == (7,)
    assert api.pids_of_enclosing(enclosing._replace(pidns=OTHER)) == tuple(api.procfs.ancestors(os.getpid()))


def test_a_number_of_another_namespace_is_no_ancestor(dgx) -> None:
    held = {"pid": ME, "start": api.procfs.start_time(ME)}
    for said, blamed in (({}, True), ({"pidns": OTHER}, False)):
        dgx.hold(*range(8), **held, **said)
        with pytest.raises(NotEnoughGpusError) as refused:
            claim(timeout=0.01)
        assert ("this process itself holds" in str(refused.value)) is blamed
        dgx.let_go()


# GPUs of both vendors: one view, and what of it is left if a driver does not work


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:two-vendors")


def test_one_view_of_both(both: None, run_here: Any) -> None:
    with claim(2, vendor="amd") as owner:
        claimed = [gpu.uuid for gpu in owner.gpus]
        status = api.gather()
        assert run_here("status", "--free").stdout.split() == [*(f"nvidia:{n}" for n in range(4)), "amd:2", "amd:3"]
        assert run_here("status", "--free", "--vendor", "AMD").stdout.split() == ["2", "3"]
        assert "2 of 4 GPUs free" in run_here("status", "--vendor", "amd").stdout
    assert [one.label for one in status.gpus] == [f"{vendor}:{n}" for vendor in ("nvidia", "amd") for n in range(4)]
    assert [one.state for one in status.gpus] == ["free"] * 4 + ["claimed"] * 2 + ["free"] * 2
    held = [(one.gpu.uuid, one.claim.pid) for one in status.gpus if one.claim]
    assert held == [(uuid, os.getpid()) for uuid in claimed]
    lines = api.render(status, width=100, color=False).splitlines()
    assert "6 of 8 GPUs free" in lines[0]
    assert "GPU nvidia:0-3: NVIDIA A100-PCIE-40GB" in lines
    assert "GPU amd:0-3: AMD Instinct MI210" in lines
    assert [line.split()[:2] for line in lines if "claimed  " in line] == [["amd:0", "claimed"], ["amd:1", "claimed"]]


# Real drivers: a fake NVML and a saved tree


@pytest.fixture
def amd(fake_gpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KfdHost:
    """GPUs of AMD beside the fake ones of NVIDIA."""
    (tmp_path / "root/dev").mkdir(parents=True)
    (tmp_path / "root/dev/nvidiactl").touch()
    host = KfdHost(tmp_path / "root")
    host.gpu(0x03, 1, 0xABC)
    host.gpu(0x23, 2, 0xABD)
    fake_gpus.use_nvml_here()
    monkeypatch.setenv("SAFE_GPU_DRIVER", "auto")
    monkeypatch.setenv("SAFE_GPU_FSROOT", str(host.root))
    return host


def test_two_drivers_and_one_that_is_broken(fake_gpus: Any, amd: KfdHost, run_here: Any) -> None:
    """It is named, and the other GPUs are shown."""
    amd.process(4_000_000, queues=(2,))
    document = json.loads(run_here("status", "--json").stdout)
    assert document["driver"] == "nvml, kfd"
    found = [(gpu["vendor"], gpu["state"]) for gpu in document["gpus"]]
    assert found == [("nvidia", "free")] * 8 + [("amd", "free"), ("amd", "busy")]
    fake_gpus.options(init_error=9)

    def shown(*form: str) -> str:
        done = run_here("status", *form)
        assert (done.returncode, "not loaded" in " ".join((done.stderr if form else done.stdout).split())) == (69, True)
        return done.stdout

    assert "1 of 2 GPUs free" in shown()
    assert [gpu["vendor"] for gpu in json.loads(shown("--json"))["gpus"]] == ["amd", "amd"]
    assert shown("--free").split() == ["0"]
    metrics = shown("--prometheus")
    assert (metrics.count("safe_gpu_memory_used_bytes{"), "safe_gpu_waiting" in metrics) == (2, True)


def test_a_driver_that_breaks_between_opening_and_the_poll(both: None, monkeypatch: pytest.MonkeyPatch) -> None:
    poll = api.SimulatedDriver.snapshot

    def breaks(self: api.SimulatedDriver) -> Any:
        if self.idle.vendor == "nvidia":
            raise NoDriverError("the NVIDIA driver is gone")
        return poll(self)

    monkeypatch.setattr(api.SimulatedDriver, "snapshot", breaks)
    found = api.gather()
    assert [one.label for one in found.gpus] == ["0", "1", "2", "3"]
    assert found.broken == ("the NVIDIA driver is gone",)


def test_waiters_say_for_whose_gpus_they_wait(both: None, child: Any, command: Any) -> None:
    child("import safe_gpu\nsay(safe_gpu.claim_gpus(vendor='amd').devices_taken)\nlisten()", says="[0]")
    waiter = command.start("run", "-q", "--vendor", "amd", "-n", "4", "--", "true")
    while not (status := api.gather()).queue:
        assert waiter.poll() is None
    assert status.to_dict()["queue"][0]["vendor"] == "amd"
    assert "4 AMD GPUs" in api.render(status, width=100, color=False)
    assert api.of_vendor(status, "nvidia").queue == ()
    assert len(api.of_vendor(status, "amd").queue) == 1
