"""``doctor`` on the state directory: whose it is, its file system, locks and history."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.findings import UUIDS, finding, in_namespace, says

import safe_gpu
from safe_gpu.coordination.leases.file_names import lease_name
from safe_gpu.coordination.state_dir import FileSystem
from safe_gpu.doctor.state import directory as state
from safe_gpu.host import procfs


def test_a_missing_directory_will_be_made_where_it_can_be(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not exist yet" in finding("state directory").detail
    assert finding("file locks").status == "skipped"
    monkeypatch.setenv("SAFE_GPU_DIR", str(state_dir / "deep" / "down"))
    found = finding("state directory")
    assert (found.status, f"mkdir -p {state_dir / 'deep'}" in found.fix) == ("failed", True)
    assert not state_dir.exists()


def test_a_directory_in_use_passes(claimed, state_dir: Path) -> None:
    for name in ("state directory", "file locks", "free disk space", "file system"):
        says(name, "passed")
    assert "mode 1777" in finding("state directory").detail
    assert not [path for path in state_dir.rglob("*") if "doctor" in path.name]


LEASES = [f"leases/{lease_name(uuid)}" for uuid in UUIDS]


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("chmod 755 .", "warning", "0755"),
        ("chmod 777 .", "warning", "0777"),
        ("mv $PWD $PWD.moved && ln -s $PWD.moved $PWD", "failed", "symbolic link"),
        ("rm -r $PWD && touch $PWD", "failed", "not a directory"),
        ("chmod 755 leases", "warning", "leases has mode 0755"),
        (f"chmod 600 {LEASES[0]}", "failed", "mode 0600 in place of 0666"),
        (f"ln -s /etc/passwd {LEASES[1]}", "failed", "is a symbolic link"),
        (f"mkdir {LEASES[1]}", "failed", "not a regular file"),
        (f"ln host.lock {LEASES[1]}", "failed", "a hard link to host.lock"),
        ("chmod 700 ..", "warning", "other users cannot enter it"),
    ],
)
def test_faults_of_the_directory(claimed, state_dir: Path, fault: str, status: str, words: str) -> None:
    says("state directory", "passed")
    subprocess.run(fault, shell=True, check=True, cwd=state_dir, timeout=60)
    says("state directory", status, words)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")
@pytest.mark.parametrize("part", ["", "leases", "queue", "host.lock", f"leases/{lease_name(UUIDS[0])}"])
def test_an_ordinary_user_who_owns_what_others_rely_on_is_a_risk(claimed, state_dir: Path, part: str) -> None:
    (state_dir / "queue").mkdir(exist_ok=True)
    (state_dir / "queue").chmod(0o1777)
    os.chown(state_dir / part, 54321, 54321)
    says(
        "state directory", "warning", f"{state_dir / part} belongs to 54321, who can remove", fix=" setup --state-dir "
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as other users")
def test_a_directory_that_one_user_alone_has_used_is_no_risk(state_dir: Path, as_user) -> None:
    def claim(say, listen) -> None:
        safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0).release_gpus()
        say("claimed")

    assert as_user(claim, uid=54321).hear() == "claimed"
    says("state directory", "passed", "belongs to 54321")
    assert as_user(claim, uid=54322).hear() == "claimed"
    says("state directory", "warning", "who can remove other users' files")


def test_a_device_without_files_of_root_in_the_directory_of_the_settings(
    claimed, state_dir: Path, open_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, whose settings count")
    says("state directory", "passed")
    (open_tmp / "config.ini").write_text(f"[host]\nstate_dir = {state_dir}\n")
    monkeypatch.setenv("SAFE_GPU_POLICY", str(open_tmp / "config.ini"))
    says("state directory", "warning", "GPUs 0,1,2,3,4,5,6,7: no lease files of root's", fix=f"--state-dir {state_dir}")
    for uuid in UUIDS[1:]:
        for name in (f"{uuid}.lock", f"{uuid}.inner.lock"):
            (state_dir / "leases" / name).touch()
            (state_dir / "leases" / name).chmod(0o666)
    says("state directory", "warning", "GPU 0: no lease files of root's", fix=", again")


def test_what_is_closed_to_an_ordinary_user_is_failed(claimed, state_dir: Path, as_user) -> None:
    def work(say, listen) -> None:
        say(finding("state directory").status)
        listen()
        say(finding("state directory").status)
        say(finding("file locks").status)

    user = as_user(work, uid=12345)
    assert user.hear() == "passed"
    state_dir.chmod(0o755)
    user.tell()
    assert user.hear() == "failed"
    assert user.hear() == "failed"


def test_network_file_systems(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "file_system_of", lambda fd: FileSystem("nfs4"))
    says("file system", "failed", "nfs4", fix="SAFE_GPU_DIR")


def test_no_room_and_read_only(open_tmp: Path) -> None:
    options = {"SAFE_GPU_DIR": str(open_tmp / "small" / "state")}
    (open_tmp / "small").mkdir()
    for mount, check, words in (
        ("mount -t tmpfs -o size=1m,nr_inodes=8 none .", "free disk space", "inodes"),
        ("mount -t tmpfs -o size=1m none . && head -c 1048576 /dev/zero > $PWD/x", "free disk space", "0 KiB"),
        ("mount -t tmpfs -o ro none .", "file system", "read-only"),
    ):
        found = in_namespace(f"cd {open_tmp}/small && {mount}", check, **options)
        assert (found.status, words in found.detail) == ("failed", True), found


def test_a_host_lock_that_is_never_given_back(claimed, state_dir: Path, child, eventually, monkeypatch: Any) -> None:
    code = "import os\nfrom safe_gpu.coordination.locks.host_lock import HostLock\n"
    holder = child(code + "with HostLock(None):\n    say('locked'); listen()", says="locked")
    os.kill(holder.pid, signal.SIGSTOP)
    eventually(lambda: procfs.is_stopped(holder.pid))
    monkeypatch.setattr(state, "_PATIENCE", 0.05)
    says("file locks", "failed", f"process {holder.pid}", fix=f"kill -CONT {holder.pid}")
    holder.kill()
    assert finding("file locks").status == "passed"


def test_locks_that_are_slow_or_do_not_exclude(claimed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_LONG_HOLD", -1.0)
    says("file locks", "warning", "held by others for")
    monkeypatch.setattr(state, "lock_file", lambda fd: True)
    says("file locks", "failed", "do not exclude each other")


def test_a_lease_that_was_removed_under_its_claim(claimed, state_dir: Path) -> None:
    says("lease files", "passed")
    (state_dir / LEASES[0]).unlink()
    says("lease files", "warning", f"the lease of {UUIDS[0]} that process {os.getpid()}")
    claimed.release()
    says("lease files", "passed")


@pytest.mark.parametrize(
    ("prepare", "status", "words", "fix"),
    [
        ("true", "passed", "nothing has been recorded", ""),
        ("mkdir -m 1777 history", "passed", "mode 1777", ""),
        ("mkdir -m 1755 history", "warning", "not recorded", "chmod 1777"),
        ("mkdir -m 777 history", "warning", "remove", "chmod 1777"),
        ("ln -s /tmp history", "warning", "may not be recorded", "set SAFE_GPU_DIR"),
    ],
)
def test_the_history(state_dir: Path, prepare: str, status: str, words: str, fix: str) -> None:
    state_dir.mkdir()
    state_dir.chmod(0o1777)
    subprocess.run(prepare, shell=True, check=True, cwd=state_dir, timeout=60)
    says("history", status, words, fix=fix)
