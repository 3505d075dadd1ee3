"""Leases: the kernel holds them for as long as the claim lives, and no longer."""

import errno
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safe_gpu.coordination.leases import record as leases_module
from safe_gpu.coordination.leases.file_names import lease_name
from safe_gpu.coordination.leases.lease import Lease, probe, try_lease
from safe_gpu.coordination.leases.record import LeaseRecord, read_record
from safe_gpu.coordination.locks.host_lock import HostLock
from safe_gpu.errors import StateDirError
from safe_gpu.host.procfs import printable

NAME = lease_name("GPU-1")

HOLD = """
import os
from safe_gpu.coordination.locks.host_lock import HostLock
from safe_gpu.coordination.leases.lease import try_lease
with HostLock(None) as host:
    lease = try_lease(host, "GPU-1.lock")
say("held" if lease else "refused")
"""


def take(name: str = NAME, **options: bool) -> Lease | None:
    with HostLock(time.monotonic() + 30) as host:
        return try_lease(host, name, **options)


def held(name: str = NAME) -> bool:
    with HostLock(time.monotonic() + 30) as host:
        return probe(host, name)


def test_one_holder_at_a_time_and_probes_take_nothing(state_dir: Path) -> None:
    assert not held()
    lease = take()
    assert lease is not None
    assert held()
    assert take() is None
    lease.release()
    lease.release()
    assert not held()
    again = take()
    assert again is not None
    again.release()


def test_shared_holders_stand_side_by_side_and_keep_others_out(state_dir: Path) -> None:
    first, second = take(shared=True), take(shared=True)
    assert first is not None
    assert second is not None
    assert take() is None
    assert held()
    first.release()
    second.release()
    assert not held()


@pytest.mark.parametrize("end", ["exit", "kill", "exec"])
def test_ends_with_the_process_however_it_ends(state_dir: Path, child, eventually, end: str) -> None:
    endings = {"exit": "", "kill": "os.kill(os.getpid(), 9)", "exec": "os.execv('/bin/true', ['true'])"}
    holder = child(HOLD + "listen()\n" + endings[end])
    assert holder.hear() == "held"
    assert held()
    holder.tell()
    holder.process.wait(30)
    assert not held()


def test_a_child_that_lives_on_keeps_it_and_cannot_give_it_back(state_dir: Path, child) -> None:
    code = """
if os.fork() == 0:
    lease.release()            # in a child this only closes the child's copy
    say("child"); listen(); os._exit(0)
listen()
os._exit(0)
"""
    holder = child(HOLD + code)
    assert [holder.hear(), holder.hear()] == ["held", "child"]
    assert held()

    keeper = "import signal\nif os.fork() == 0:\n    say(os.getpid()); signal.pause()\nlisten()\nos._exit(0)"
    second = child(HOLD.replace("GPU-1", "GPU-2") + keeper)
    assert second.hear() == "held"
    orphan = int(second.hear())
    second.kill()
    assert held("GPU-2.lock")
    os.kill(orphan, signal.SIGKILL)
    while held("GPU-2.lock"):
        pass


def test_release_frees_it_although_a_child_has_a_copy(state_dir: Path, child) -> None:
    code = """
import signal
if os.fork() == 0:
    say("child"); signal.alarm(60); signal.pause()
listen(); lease.release(); say("released"); listen()
"""
    holder = child(HOLD + code)
    assert [holder.hear(), holder.hear()] == ["held", "child"]
    holder.tell()
    assert holder.hear() == "released"
    assert not held()


def test_travels_through_exec_above_what_scripts_use(state_dir: Path, child) -> None:
    script = "exec 3>/dev/null 9>/dev/null; echo $$; ls -l /proc/$$/fd; echo listed; read line"
    holder = child(HOLD + f"lease.keep_across_exec()\nos.execv('/bin/bash', ['bash', '-c', {script!r}])")
    assert holder.hear() == "held"
    assert int(holder.hear()) == holder.pid
    lines = list(iter(holder.hear, "listed"))  # to its end: ls holds the descriptor as well
    (line,) = (line for line in lines if "GPU-1.lock" in line)
    assert int(line.split(" -> ")[0].split()[-1]) >= 500
    assert held()
    holder.kill()
    assert not held()


def test_a_lease_file_that_was_cleaned_away_is_not_held_by_its_old_inode(state_dir: Path) -> None:
    old = take()
    assert old is not None
    (state_dir / "leases" / NAME).unlink()
    new = take()
    assert new is not None  # the driver's process list is what protects the old holder now
    assert held()
    old.release()
    assert held()
    new.release()


# Records


def record(**changes: object) -> LeaseRecord:
    one = LeaseRecord(1, 2, 3, "alice", "h", "7.1", "python x.py", ("GPU-1",), 4.5, "")
    return one._replace(**changes)  # type: ignore[arg-type]


def test_the_record_is_one_line_of_json_with_the_keys_of_the_protocol(state_dir: Path) -> None:
    lease = take()
    assert lease is not None
    lease.write(LeaseRecord.of_this_process("12.3", None).claiming(("GPU-1",), "t").encode())
    text = (state_dir / "leases" / NAME).read_text()
    assert text.endswith("\n")
    assert text.count("\n") == 1
    raw = json.loads(text)
    keys = {"v", "pid", "start", "uid", "user", "host", "job", "command", "gpus", "since", "until", "token", "pidns"}
    assert set(raw) == keys
    expected = {
        "v": 1,
        "pid": os.getpid(),
        "pidns": os.stat("/proc/self/ns/pid").st_ino,
        "uid": os.geteuid(),
        "host": os.uname().nodename,
        "job": "12.3",
        "gpus": ["GPU-1"],
        "token": hashlib.sha256(b"t").hexdigest()[:16],
    }
    assert raw.items() >= expected.items()
    assert abs(raw["since"] - time.time()) < 3600
    lease.release()


texts = st.text(max_size=30).map(printable)


@given(st.builds(record, user=texts, job=st.none() | texts, command=st.none() | texts, token=texts, start=st.none()))
def test_records_survive_the_round_trip(one: LeaseRecord) -> None:
    assert LeaseRecord.decode(one.encode()) == one


@pytest.mark.parametrize("written", [b"caf\xe9", rb"caf\udce9"])
def test_a_byte_that_is_not_utf_8_costs_no_record(written: bytes) -> None:
    read = LeaseRecord.decode(b'{"v":1,"pid":7,"user":"anna","command":"%b","since":4.5}\n' % written)
    assert read is not None
    assert (read.pid, read.user, read.since) == (7, "anna", 4.5)
    assert read.command in ("caf\ufffd", "caf ")


def test_a_byte_that_is_not_utf_8_is_written_as_a_replacement_character(command: Any, state_dir: Path) -> None:
    done = command.run(
        *("run", "--", "sh", "-c", 'cat "$SAFE_GPU_DIR"/leases/*.lock', b"caf\xe9".decode(errors="surrogateescape")),
        env={"SAFE_GPU_RECORD_COMMAND": "full"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["command"].endswith(" caf\ufffd")
    assert "\\udc" not in done.stdout


def test_a_torn_record_is_read_again(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = take()
    assert lease is not None
    lease.write(record().encode())
    real, answers = os.pread, iter([b"", b'{"pid": 1, "us'])
    monkeypatch.setattr(leases_module.os, "pread", lambda *args: next(answers, None) or real(*args))
    with HostLock(time.monotonic() + 30) as host:
        assert read_record(host.leases, NAME) == record()
    lease.release()


def test_no_room_for_the_record_is_an_error(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = take()
    assert lease is not None

    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StateDirError, match=r"no room for .*No space left"):
        lease.write(b"{}\n")
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: 1)
    with pytest.raises(StateDirError, match="no room for"):
        lease.write(b"{}\n")
    lease.release()
