"""``doctor`` on who holds and waits, and on the older package."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from support.findings import HOLD, UUIDS, environment, finding, in_namespace, says

from safe_gpu.coordination.leases.file_names import lease_name
from safe_gpu.doctor import packages as checks_of_process
from safe_gpu.doctor.check import CheckedHost
from safe_gpu.doctor.state import claims as legacy
from safe_gpu.host import procfs


def test_a_process_namespace_of_its_own() -> None:
    found = in_namespace("true", "visible processes", "-p", "-f", "--mount-proc")
    assert (found.status, "--pid=host" in found.fix) == ("warning", True)


def test_hidden_processes_of_others() -> None:
    mount = "mount -t proc -o hidepid=2 none /proc"
    found = in_namespace(mount, "visible processes", user=12345)
    assert (found.status, "hidepid" in found.detail) == ("warning", True)
    if os.readlink("/proc/self/ns/pid") == "pid:[4026531836]":
        assert in_namespace(mount, "visible processes").status == "passed", "nothing is hidden from root"


def test_driver_pids_that_do_not_resolve(fake_gpus) -> None:
    fake_gpus.use_nvml_here()
    fake_gpus.process(fake_gpus.uuids[1], os.getpid())
    if os.readlink("/proc/self/ns/pid") == "pid:[4026531836]":
        assert finding("visible processes").status == "passed"
    fake_gpus.process(fake_gpus.uuids[1], 1 << 29, static=True)
    says("visible processes", "warning", "1 of 2 processes")


def test_suspended_holders_and_waiters(state_dir: Path, child, eventually) -> None:
    holder = child(HOLD, says="held")
    waiter = child(HOLD.replace("only=0", "only=0, timeout=None"))
    eventually(lambda: any(path.read_text() for path in (state_dir / "queue").glob("*.ticket")))
    assert finding("holders and waiters").status == "passed"
    for process in (holder, waiter):
        os.kill(process.pid, signal.SIGSTOP)
        eventually(lambda process=process: procfs.is_stopped(process.pid))
    # /proc/locks may miss one while other processes lock and unlock files.
    said = ("holds GPU 0", *(f"process {process.pid} (" for process in (holder, waiter)))
    eventually(lambda: all(text in finding("holders and waiters").detail for text in said))
    eventually(lambda: f"kill -CONT {holder.pid} {waiter.pid}" in finding("holders and waiters").fix)
    assert finding("holders and waiters").status == "warning"


def test_all_gpus_of_a_stopped_holder(state_dir: Path, child, eventually) -> None:
    holder = child(HOLD.replace("gpus(1", "gpus(2").replace("only=0", "only='0,5'"), says="held")
    os.kill(holder.pid, signal.SIGSTOP)
    eventually(lambda: "which holds GPUs 0,5" in finding("holders and waiters").detail)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who sees the processes of all")
def test_a_claim_in_another_state_directory(
    state_dir: Path, open_tmp: Path, child, monkeypatch: pytest.MonkeyPatch
) -> None:
    says("state directories of claims", "passed")
    monkeypatch.setenv("SAFE_GPU_SIMULATED_DIR", str(open_tmp / "simulated"))  # one host for both
    holder = child(HOLD, says="held", env={"SAFE_GPU_DIR": str(open_tmp / "other")})
    words = f"GPU 0 in {open_tmp / 'other'} (process {holder.pid} of "
    says("state directories of claims", "warning", words, fix="/etc/safe-gpu/config.ini")
    claim = CheckedHost().status.gpus[0].claim
    assert claim is not None
    assert (claim.pid, claim.note) == (holder.pid, f"its lease is in {open_tmp / 'other'}")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who installs for all")
def test_a_package_that_others_cannot_read(open_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = open_tmp / "safe_gpu" / "doctor"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    monkeypatch.setattr(checks_of_process, "__file__", str(package / "process.py"))
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    monkeypatch.setattr("filelock.__file__", str(package.parent / "__init__.py"))
    says("shared installation", "passed")
    package.parent.chmod(0o700)  # umask 077
    says("shared installation", "warning", f"{package.parent} has mode 0700", fix="umask 022")
    package.parent.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(open_tmp / "pyenv" / "python"))
    (open_tmp / "pyenv").mkdir(mode=0o750)
    (open_tmp / "pyenv" / "python").touch(mode=0o755)
    says("shared installation", "warning", f"{open_tmp / 'pyenv'} has mode 0750")


def test_a_claim_from_the_future(state_dir: Path, child) -> None:
    child(HOLD, says="held")
    assert finding("clock").status == "passed"
    record = state_dir / "leases" / lease_name(UUIDS[0])
    record.write_text(json.dumps({**json.loads(record.read_text()), "since": time.time() + 7200}))
    says("clock", "warning", "in the future")


@pytest.fixture
def old_lock(open_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = open_tmp / "safe_gpu" / "lock"
    monkeypatch.setattr(legacy, "LOCK_FILE", str(path))
    monkeypatch.delenv("SAFE_GPU_LEGACY_LOCK")
    return path


def test_the_older_package(old_lock: Path, child) -> None:
    assert "not been used" in finding("safe-gpu 1.x and 2.0").detail
    old_lock.parent.mkdir()
    old_lock.touch()
    assert "claims take its lock too" in finding("safe-gpu 1.x and 2.0").detail
    theirs = child(
        f"import fcntl\nf = open({str(old_lock)!r}, 'w')\nfcntl.lockf(f, fcntl.LOCK_EX)\nsay('locked'); listen()"
    )
    assert theirs.hear() == "locked"
    assert f"process {theirs.pid}" in finding("safe-gpu 1.x and 2.0").detail
    assert finding("safe-gpu 1.x and 2.0", environment(SAFE_GPU_LEGACY_LOCK="never")).status == "warning"


def test_the_older_package_closed_to_us(old_lock: Path, as_user) -> None:
    old_lock.parent.mkdir()
    old_lock.touch(0o644)
    old_lock.chmod(0o644)

    def work(say, listen) -> None:
        say(finding("safe-gpu 1.x and 2.0").status)
        listen()
        found = finding("safe-gpu 1.x and 2.0")
        say(f"{found.status} {found.fix}")

    user = as_user(work, uid=12345)
    assert user.hear() == "warning"
    old_lock.chmod(0o666)
    old_lock.parent.chmod(0o700)
    user.tell()
    assert user.hear().startswith("warning have its users upgrade")
