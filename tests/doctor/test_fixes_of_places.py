"""Fixes of ``doctor`` for the state directory, what stands in it, /proc and containers, followed word by word."""

import os
import re
import resource
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.findings import UUIDS, environment, finding, in_namespace
from support.forks import in_child
from support.real import long
from support.seccomp import needs_known_calls, refuse

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount and to act as other users")

PROC, DIRECTORY = "visible processes", "state directory"


def shell(line: str, cwd: Path | None = None) -> None:
    subprocess.run(line, shell=True, check=True, cwd=cwd, timeout=60)


# /proc


@as_root
@pytest.mark.parametrize("group", [pytest.param(0, marks=long), 54321])
def test_a_proc_that_hides_processes(group: int) -> None:
    """It is remounted, or the user is taken into the group of the option."""
    hidden = f"mount -t proc -o hidepid=2,gid={group} none /proc"
    found = in_namespace(hidden, PROC, user=12345)
    assert found.status == "warning"
    assert "add you to the group of the mount option gid=" in found.fix
    assert "remount /proc without hidepid" in found.fix
    remounted = in_namespace(f"{hidden} && mount -o remount,hidepid=0 none /proc", PROC, user=12345)
    joined = in_namespace(hidden, PROC, user=12345, groups=[group])
    expected = "passed"
    if not first_namespace():
        expected = "warning"  # of the namespace, which this container has of its own
    for found in (remounted, joined):
        assert (found.status, "hidepid" in found.detail) == (expected, False)


def first_namespace() -> bool:
    return api.procfs.pid_namespace() == api.procfs.FIRST_PID_NAMESPACE


@as_root
def test_a_proc_that_is_not_there() -> None:
    missing = "mount -t tmpfs none /proc"
    fix = in_namespace(missing, PROC, user=12345).fix
    assert fix.startswith("mount /proc in this chroot")
    found = in_namespace(f"{missing} && mount -t proc proc /proc", PROC, user=12345)
    assert "there is no /proc here" not in found.detail
    assert found.status == "passed" or not first_namespace()


@as_root
def test_a_container_with_the_processes_of_the_host() -> None:
    """As ``--pid=host`` makes it: the same without a PID namespace of its own."""
    if not first_namespace():
        pytest.skip("this is a container itself, without the processes of its host")
    own = in_namespace("true", PROC, "-m", "-p", "-f", "--mount-proc")
    assert own.status == "warning"
    assert own.fix == "start the container with --pid=host"
    assert in_namespace("true", PROC, "-m").status == "passed"


# The state directory


def moved(fix: str, open_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set SAFE_GPU_DIR as a fix says, to a directory that the fix describes."""
    way_out = re.match(r"set SAFE_GPU_DIR, for all users, to a directory .* \(mode (\d+)\)$", fix)
    assert way_out is not None, fix
    other = open_tmp / "another"
    other.mkdir()
    other.chmod(int(way_out[1], 8))
    monkeypatch.setenv("SAFE_GPU_DIR", str(other))


@pytest.mark.parametrize(
    "fault", ["chmod 755 .", "chmod 777 .", "chmod 700 ..", "chmod 600 host.lock", "mv $PWD $PWD.x; ln -s $PWD.x $PWD"]
)
def test_another_directory(open_tmp: Path, fault: str, monkeypatch: pytest.MonkeyPatch, as_user: Any) -> None:
    (open_tmp / "above").mkdir()
    path = open_tmp / "above/state"
    api.setup.make(str(path))
    monkeypatch.setenv("SAFE_GPU_DIR", str(path))
    shell(fault, cwd=path)
    found = finding(DIRECTORY)
    assert found.status in ("warning", "failed")
    moved(found.fix, open_tmp, monkeypatch)
    assert finding(DIRECTORY).status == "passed"
    assert as_user(lambda say, listen: say(finding(DIRECTORY).status), uid=4711).hear() == "passed"


NFS = "sed 's@ - tmpfs none @ - nfs4 server:/x @' /proc/self/mountinfo"


@as_root
def test_a_network_file_system(open_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tmpfs, of which a file over that of the kernel says that it is an NFS."""
    (open_tmp / "share").mkdir()
    mount = f"mount -t tmpfs -o mode=1777 none {open_tmp}/share"
    told = f"{NFS} > {open_tmp}/mounts && mount --bind {open_tmp}/mounts /proc/$$/mountinfo"
    variables = {"SAFE_GPU_DIR": str(open_tmp / "share/state")}
    found = in_namespace(f"{mount} && mkdir -m 1777 {open_tmp}/share/state && {told}", DIRECTORY, **variables)
    if "nfs4" not in found.detail:
        pytest.skip(f"the table of mounts cannot be covered here: {found}")
    assert found.status == "failed"
    moved(found.fix, open_tmp, monkeypatch)
    variables = {"SAFE_GPU_DIR": os.environ["SAFE_GPU_DIR"]}
    assert in_namespace(f"{mount} && {told}", DIRECTORY, **variables).status == "passed"


def test_a_directory_above_that_is_missing(open_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = open_tmp / "deep/down"
    monkeypatch.setenv("SAFE_GPU_DIR", str(path))
    way_out = re.fullmatch(r"create that directory, open to all users \(mode (\d+)\)", finding(DIRECTORY).fix)
    assert way_out is not None
    path.parent.mkdir()
    path.parent.chmod(int(way_out[1], 8))
    assert finding(DIRECTORY).status == "passed"


@as_root
def test_a_directory_above_that_is_root_s(
    open_tmp: Path, run_here: Any, as_user: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.cli_setup, "RULE", str(open_tmp / "rule.conf"))
    path = open_tmp / "deep/down"
    path.parent.mkdir(mode=0o755)
    monkeypatch.setenv("SAFE_GPU_DIR", str(path))

    def check(say: Any, listen: Any) -> None:
        found = finding(DIRECTORY)
        say(f"{found.status} {found.fix}")

    words = as_user(check, uid=4711).hear().partition("as root: safe-gpu ")
    assert words[0] == "failed "
    assert run_here(*shlex.split(words[2])).returncode in (0, 1)  # 1: the line for root's file is left to do
    assert as_user(check, uid=4711).hear() == "passed "


@as_root
def test_lines_that_close_no_gpu_are_removed(state_dir: Path, command: Any) -> None:
    api.setup.make(str(state_dir))
    (state_dir / "closed").write_text(f"{UUIDS[4]}\n")
    fix = finding("GPUs in service").fix
    way_out = re.fullmatch("remove what is ignored, and drain again with (safe-gpu drain)", fix)
    assert way_out is not None
    (state_dir / "closed").unlink()
    assert finding("GPUs in service").status == "passed"
    assert command.run(*way_out[1].split()[1:], "4").returncode == 0
    assert finding("GPUs in service").detail == "GPU 4 drained by root"


@as_root
def test_a_directory_with_too_many_names(state_dir: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``setup`` makes a new one, once the old one has been moved away."""
    monkeypatch.setattr(api.cli_setup, "RULE", str(state_dir.parent / "rule.conf"))
    monkeypatch.setattr("safe_gpu.coordination.crowds.MANY", 20)
    monkeypatch.setattr(api.setup, "MANY", 20)
    api.setup.make(str(state_dir))
    for number in range(30):
        (state_dir / "queue" / f"x{number}").touch()
    found = finding("entries")
    assert found.status == "warning"
    way_out = re.search("; as root, while nobody waits: safe-gpu (.*)", found.fix)
    assert way_out is not None
    done = run_here(*shlex.split(way_out[1]))
    move = re.search(r"move this one away \((.*)\) and run", done.stderr)
    if move is not None:
        shell(move[1])
        done = run_here(*shlex.split(way_out[1]))
    assert done.returncode in (0, 1), done.stderr
    assert finding("entries").status == "passed"


# Claims


@needs_known_calls
def test_doors_that_cannot_be_taken() -> None:
    """A sandbox allows sockets again, and a limit on open files is raised."""

    def refused() -> api.Check:
        refuse("socket")
        return finding("doors of GPUs")

    assert "allow sockets of AF_UNIX in this sandbox" in in_child(refused).fix
    assert in_child(lambda: finding("doors of GPUs")).status == "passed"


def test_more_open_files() -> None:
    def limited() -> tuple[str, str, str]:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        number = os.dup(0)
        os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
        found = finding("doors of GPUs")
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return found.detail, found.fix, finding("doors of GPUs").status

    detail, fix, afterwards = in_child(limited)
    assert "Too many open files" in detail
    assert "more open files (ulimit -n)" in fix
    assert afterwards == "passed"


def test_one_state_directory_for_all_sessions(
    open_tmp: Path, state_dir: Path, child: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two users with directories of their own are given that of the settings of the host."""
    monkeypatch.setenv("SAFE_GPU_SIMULATED_DIR", str(open_tmp / "host"))
    code = """
import os, safe_gpu
from safe_gpu.settings import variables
if "HOST_FILE" in os.environ:
    variables.HOST_FILES = (os.environ["HOST_FILE"],)
    del os.environ["SAFE_GPU_DIR"]
owner = safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None)
say("claimed"); listen()
"""
    check = "state directories of claims"
    other = child(code, says="claimed", env={"SAFE_GPU_DIR": str(open_tmp / "other")})
    found = finding(check)
    way_out = re.match(r"set state_dir in (\S+), and no other SAFE_GPU_DIR", found.fix)
    assert (found.status, way_out is not None) == ("warning", True)
    other.kill()
    path = open_tmp / "config.ini"
    path.write_text(f"[host]\nstate_dir = {open_tmp}/common\n")
    path.chmod(0o644)
    monkeypatch.setattr("safe_gpu.settings.variables.HOST_FILES", (str(path),))
    monkeypatch.delenv("SAFE_GPU_DIR")
    api.variables.read_anew()
    try:
        child(code, says="claimed", env={"SAFE_GPU_DIR": "", "HOST_FILE": str(path)})
        assert finding(check).status == "passed"
        assert len(api.living_claims()) == 1
    finally:
        api.variables.read_anew()


def test_processes_beside_claims_are_started_with_run(dgx: Any, command: Any, eventually: Any) -> None:
    """Ended, and started again as a claim: on another GPU."""
    check = "processes beside claims"
    dgx.hold(0, uid=4711)
    stranger = subprocess.Popen(["sleep", "infinity"], start_new_session=True)
    (context,) = dgx.occupy(0, pid=stranger.pid)
    found = finding(check)
    assert found.status == "warning"
    assert found.fix.endswith("to end them, and to start them with safe-gpu run")
    context.close()
    stranger.kill()
    stranger.wait()
    started = command.start("run", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES; exec sleep 600")
    index = int(started.stdout.readline())
    dgx.occupy(index, pid=started.pid)
    assert (finding(check).status, index != 0) == ("passed", True)


def test_claims_whose_gpu_was_divided_are_ended(fake_gpus: Any, state_dir: Path, child: Any, command: Any) -> None:
    """Next time the GPU is drained first: then nobody claims it meanwhile."""
    check = "modes of claimed GPUs"
    fake_gpus.set(2)
    fake_gpus.use_nvml_here()
    code = "import safe_gpu; safe_gpu.claim_gpus(only=0, placeholder_fn=safe_gpu.NoPlaceholder(), affinity=None)\n"
    holder = child(f"{code}say('claimed'); listen()", says="claimed", env=fake_gpus.env)
    fake_gpus.change(0, mig=1, instances=fake_gpus.uuid("MIG", 1), imem=10 << 30)
    found = finding(check)
    assert found.status == "warning"
    assert f"process {holder.pid} of " in found.detail
    assert found.fix.startswith("ask their users to end these claims")
    holder.kill()
    assert finding(check).status == "passed"


# Batch jobs


def test_what_a_job_asks_its_scheduler_for() -> None:
    """The variables are those that Slurm sets once it was asked."""
    found = finding("batch job", environment(SLURM_JOB_ID="7", SAFE_GPU_NB_GPUS="", SLURM_GPUS_ON_NODE="0"))
    if found.status == "passed":
        found = finding("batch job", environment(SLURM_JOB_ID="7", SLURM_JOB_GPUS="", SLURM_GPUS_ON_NODE="0"))
    assert found.fix == "ask the scheduler for the GPUs that the job uses", found
    assert finding("batch job", environment(SLURM_JOB_ID="7", SLURM_JOB_GPUS="0")).status == "passed"


def test_a_list_that_is_corrected() -> None:
    fix = finding("CUDA_VISIBLE_DEVICES", environment(CUDA_VISIBLE_DEVICES="1,99,2")).fix
    assert fix.startswith("correct it, or unset CUDA_VISIBLE_DEVICES")
    corrected = finding("CUDA_VISIBLE_DEVICES", environment(CUDA_VISIBLE_DEVICES="1,2"))
    assert "limits claims to 2 of 8 GPUs" in corrected.detail
    assert finding("CUDA_VISIBLE_DEVICES", environment()).status == "passed"


def test_a_job_uses_the_gpus_that_slurm_says() -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "2,3"}
    found = finding("batch job", environment(**job, CUDA_VISIBLE_DEVICES="0,1"))
    assert found.fix.endswith("or set CUDA_VISIBLE_DEVICES as Slurm says")
    assert finding("batch job", environment(**job, CUDA_VISIBLE_DEVICES=job["SLURM_JOB_GPUS"])).status == "passed"
