"""``doctor`` on the state directory, on who holds GPUs, on GPUs and their driver, and whether it lists processes."""

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.findings import ASK, UUIDS, finding, in_namespace, says
from support.ground import simulated_doors

from safe_gpu.coordination import setup
from safe_gpu.doctor import CheckedHost
from safe_gpu.host import procfs
from safe_gpu.host.procfs import FileSystem

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away and to act as other users")


@pytest.fixture
def used(state_dir: Path) -> Path:
    """A state directory that is used."""
    setup.make(str(state_dir))
    return state_dir


def test_a_missing_directory_will_be_made_where_it_can_be(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not exist yet" in finding("state directory").detail
    assert finding("file locks").status == "skipped"
    monkeypatch.setenv("SAFE_GPU_DIR", str(state_dir / "deep" / "down"))
    says("state directory", "failed", f"there is no {state_dir / 'deep'} to which", fix="create that directory")
    assert not state_dir.exists()
    monkeypatch.setenv("SAFE_GPU_DIR", "state")
    says("state directory", "failed", "relative")


def test_a_directory_in_use_passes_and_one_of_another_mode_may_be_there_by_mistake(used: Path) -> None:
    """Or its owner replaces it by a link: no advice opens or removes it."""
    before = sorted(used.rglob("*"))
    says("file locks", "passed")
    says("state directory", "passed", "mode 1777")
    assert sorted(used.rglob("*")) == before
    used.chmod(0o755)
    says("state directory", "warning", "mode 0755 and belongs to ")
    assert finding("state directory").fix.startswith("set SAFE_GPU_DIR")


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
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
    subprocess.run(fault, shell=True, check=True, cwd=used, timeout=60)
    says("state directory", status, words)


@as_root
@pytest.mark.parametrize("part", ["", "claims"])
def test_who_can_remove_what_others_rely_on_is_named(used: Path, part: str) -> None:
    os.chown(used / part, 54321, 54321)
    says("state directory", "warning", "54321 can remove other users' files", fix="as root: safe-gpu setup --state-dir")


def test_network_file_systems(used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safe_gpu.coordination.directory.file_system_at", lambda path, device: FileSystem("nfs4"))
    says("state directory", "failed", "nfs4", fix="SAFE_GPU_DIR")


def test_a_host_lock_that_is_never_given_back(used: Path, child: Any, eventually: Any, monkeypatch: Any) -> None:
    code = f"import fcntl; file = open('{used}/host.lock', 'rb+'); fcntl.flock(file, fcntl.LOCK_EX); "
    holder = child(code + "say('locked'); listen()", says="locked")
    os.kill(holder.pid, signal.SIGSTOP)
    eventually(lambda: procfs.is_stopped(holder.pid))
    monkeypatch.setattr("safe_gpu.doctor.state._PATIENCE", 0.05)
    says("file locks", "failed", f"process {holder.pid} of ", fix="the message says")
    holder.kill()
    assert finding("file locks").status == "passed"


@as_root
def test_what_is_drained_and_what_is_ignored(used: Path) -> None:
    says("GPUs in service", "passed")
    (used / "closed").write_text(f"{UUIDS[3]} - - - a fan\nGPU-gone - - - \n{UUIDS[4]}\n")
    said = "GPU 3 drained by root: a fan; GPU GPU-gone drained by root; "
    says("GPUs in service", "warning", said, fix="resume 3 GPU")
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


def test_a_claim_in_another_state_directory(ground: Any) -> None:
    says("state directories of claims", "passed")
    ground.hold(0)
    doors = simulated_doors()
    for uuid in UUIDS[1:3]:
        assert doors.take_whole(uuid, known=())
    says("state directories of claims", "warning", "GPU 1,2: claimed in another", fix="/etc/safe-gpu/config.ini")
    doors.release()
    says("state directories of claims", "passed")


# GPUs and their driver


def test_a_good_host_of_gpus(fake_gpus) -> None:
    fake_gpus.use_nvml_here()
    for name in ("access to GPUs", "process lists"):
        says(name, "passed")
    says("GPU driver", "passed", "nvml 550.54.15: 8 GPUs, NVIDIA A100-SXM4-80GB")
    fake_gpus.options(driver_version="535.54.03")
    says("GPU driver", "warning", "wrong numbers")


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"lost": 1}, "access to GPUs"),
        ({"handle_error": 4}, "access to GPUs"),
        ({"compute_error": 999}, "process lists"),
    ],
)
def test_faults_of_gpus(fake_gpus, change: dict[str, object], check: str) -> None:
    fake_gpus.change(2, **change)
    fake_gpus.use_nvml_here()
    says(check, "warning", "GPU 2")


def test_no_gpus_and_no_driver(fake_gpus) -> None:
    fake_gpus.write()
    fake_gpus.use_nvml_here()
    assert "shows no GPU" in finding("GPU driver").detail
    fake_gpus.options(init_error=9)
    says("GPU driver", "failed")
    for name in ("CUDA", "access to GPUs", "process lists"):
        says(name, "skipped")


def test_a_slow_driver() -> None:
    host = CheckedHost()
    assert host.snapshot is not None
    host.poll_seconds = 3.2
    says("GPU driver", "warning", "3.20 s", host, "persistence")


def test_cuda_in_a_child(fake_gpus) -> None:
    def ask(**variables: str) -> str:
        return fake_gpus.python(ASK, "CUDA", **variables)

    assert ask(CUDA_VISIBLE_DEVICES="1") == "passed|CUDA can be initialised and sees 8 GPUs|\n"
    fake_gpus.options(cuda_init_error=802)
    assert re.match(r"failed\|CUDA could not be asked.*802", ask())


def lists(fake_gpus, **variables: str) -> tuple[str, str, str]:
    status, detail, fix = fake_gpus.python(ASK, "process lists", **variables).strip("\n").split("|")
    return status, detail, fix


def test_memory_of_nobody(fake_gpus) -> None:
    fake_gpus.change(2, used=600 << 20)
    status, detail, fix = lists(fake_gpus)
    assert (status, detail.startswith("GPU 2: 600 MiB of memory in use by no process")) == ("warning", True)
    assert "SAFE_GPU_UNEXPLAINED_MEMORY" in fix
    assert lists(fake_gpus, SAFE_GPU_UNEXPLAINED_MEMORY="1GiB")[0] == "passed"


def test_lists_that_nobody_asks_for(fake_gpus) -> None:
    fake_gpus.change(2, compute_error=3)
    status, detail, fix = lists(fake_gpus)
    assert (status, "GPU 2" in detail, "SAFE_GPU_PROCESS_LIST=optional" in fix) == ("failed", True, True)
    status, detail, _ = lists(fake_gpus, SAFE_GPU_PROCESS_LIST="optional")
    assert (status, "by its memory alone" in detail) == ("warning", True)
