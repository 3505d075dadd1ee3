"""``doctor`` on the state directory, and who holds GPUs."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.findings import UUIDS, finding, in_namespace, says

from safe_gpu.coordination import directory as directories
from safe_gpu.coordination.doors import Doors
from safe_gpu.doctor import CheckedHost, state
from safe_gpu.host import procfs
from safe_gpu.host.procfs import FileSystem

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away and to act as other users")


def test_a_missing_directory_will_be_made_where_it_can_be(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not exist yet" in finding("state directory").detail
    assert finding("file locks").status == "skipped"
    monkeypatch.setenv("SAFE_GPU_DIR", str(state_dir / "deep" / "down"))
    says("state directory", "failed", f"there is no {state_dir / 'deep'} to which", fix="create that directory")
    assert not state_dir.exists()


def test_a_directory_in_use_passes(used: Path) -> None:
    before = sorted(used.rglob("*"))
    for name in ("state directory", "file locks"):
        says(name, "passed")
    assert "mode 1777" in finding("state directory").detail
    assert sorted(used.rglob("*")) == before


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("chmod 755 .", "warning", "mode 0755 and belongs to "),
        ("chmod 777 .", "warning", "every user may remove"),
        ("mv $PWD $PWD.moved && ln -s $PWD.moved $PWD", "failed", "symbolic link"),
        ("rm -r $PWD && touch $PWD", "failed", "not a directory"),
        ("chmod 755 claims", "warning", "claims has mode 0755"),
        ("rm -r history && ln -s /tmp history", "failed", "history is not a directory, or it is a symbolic link"),
        ("chmod 600 host.lock", "failed", "mode 0600 in place of 0666"),
        ("ln -sf /etc/passwd host.lock", "failed", "is a symbolic link"),
        ("rm host.lock && mkdir host.lock", "failed", "not a regular file"),
        ("chmod 700 ..", "warning", "other users cannot enter it"),
        ("mkdir leases", "warning", "leases is of an older build"),
    ],
)
def test_faults_of_the_directory(used: Path, fault: str, status: str, words: str) -> None:
    says("state directory", "passed")
    subprocess.run(fault, shell=True, check=True, cwd=used, timeout=60)
    says("state directory", status, words)


@as_root
@pytest.mark.parametrize("part", ["", "claims"])
def test_who_can_remove_what_others_rely_on_is_named(used: Path, part: str) -> None:
    os.chown(used / part, 54321, 54321)
    says("state directory", "warning", "54321 can remove other users' files", fix="as root: safe-gpu setup --state-dir")


def test_no_advice_opens_or_removes_a_directory(used: Path) -> None:
    """It may be one that SAFE_GPU_DIR names by mistake, or that its owner replaces by a link."""
    used.chmod(0o755)
    assert finding("state directory").fix.startswith("set SAFE_GPU_DIR")


def test_network_file_systems(used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories, "file_system_at", lambda path, device: FileSystem("nfs4"))
    says("state directory", "failed", "nfs4", fix="SAFE_GPU_DIR")


LOCKS = """
from safe_gpu.coordination.host_lock import Host
from safe_gpu.host.signals import DeferredSignals
with DeferredSignals() as signals, Host() as host:
    host.look()
    with host.locked(None, signals):
        say("locked"); listen()
"""


def test_a_host_lock_that_is_never_given_back(used: Path, child: Any, eventually: Any, monkeypatch: Any) -> None:
    holder = child(LOCKS, says="locked")
    os.kill(holder.pid, signal.SIGSTOP)
    eventually(lambda: procfs.is_stopped(holder.pid))
    monkeypatch.setattr(state, "_PATIENCE", 0.05)
    says("file locks", "failed", f"process {holder.pid} of ", fix="the message says")
    holder.kill()
    assert finding("file locks").status == "passed"


@as_root
def test_what_is_drained_and_what_is_ignored(used: Path) -> None:
    says("GPUs in service", "passed")
    (used / "closed").write_text(f"{UUIDS[3]} - - - a fan\nGPU-gone - - - \n{UUIDS[4]}\n")
    says(
        "GPUs in service", "warning", "GPU 3 drained by root: a fan; GPU GPU-gone drained by root; ", fix="resume 3 GPU"
    )
    says("GPUs in service", "warning", f"closed has a line that closes no GPU, and is ignored: {UUIDS[4]}")


# Who holds GPUs


def test_a_process_namespace_of_its_own() -> None:
    found = in_namespace("true", "visible processes", "-p", "-f", "--mount-proc")
    assert (found.status, "--pid=host" in found.fix) == ("warning", True)


def test_hidden_processes_of_others() -> None:
    mount = "mount -t proc -o hidepid=2 none /proc"
    found = in_namespace(mount, "visible processes", user=12345)
    assert (found.status, "hidepid" in found.detail) == ("warning", True)
    if os.readlink("/proc/self/ns/pid") == "pid:[4026531836]":
        assert in_namespace(mount, "visible processes").status == "passed", "nothing is hidden from root"


def test_driver_pids_that_do_not_resolve(fake_gpus: Any) -> None:
    fake_gpus.use_nvml_here()
    fake_gpus.process(fake_gpus.uuids[1], os.getpid())
    if os.readlink("/proc/self/ns/pid") == "pid:[4026531836]":
        assert finding("visible processes").status == "passed"
    fake_gpus.process(fake_gpus.uuids[1], 1 << 29, static=True)
    says("visible processes", "warning", "1 of 2 processes")


def test_a_claim_in_another_state_directory(claimed: Any) -> None:
    says("state directories of claims", "passed")
    host = CheckedHost()
    assert host.snapshot is not None
    doors = Doors(host.snapshot.name_prefix)
    try:
        for uuid in UUIDS[:3]:
            assert doors.take_whole(uuid, known=())
        claimed(UUIDS[0])
        says("state directories of claims", "warning", "GPU 1,2: claimed in another", host, "/etc/safe-gpu/config.ini")
    finally:
        doors.release()
    says("state directories of claims", "passed")
