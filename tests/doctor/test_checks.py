"""``doctor``: a report that says first what is wrong, and what each check finds: variables and limits, the state
directory, who holds GPUs, and GPUs with their driver, also those of other vendors."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.findings import ASK, UUIDS, environment, expect, finding, in_namespace
from support.state import simulated_doors
from support.vendor_hosts import KfdHost

import safe_gpu
from safe_gpu import doctor

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away and to act as other users")


def check_document(document: dict[str, Any]) -> None:
    assert list(document) == ["host", "checks"]
    assert document["host"] == socket.gethostname()
    for one in document["checks"]:
        assert list(one) == ["name", "status", "detail", "fix"]
        assert all(isinstance(text, str) for text in one.values())
        assert "" not in (one["name"], one["detail"])
        assert one["status"] in ("passed", "warning", "failed", "skipped")


def test_a_host_without_faults_passes_and_stays_as_it_was(state_dir: Path) -> None:
    checks = doctor.run_checks()
    assert [one.name for one in checks] == list(doctor.CHECKS)
    # A container may well be the place where the tests run, and these GPUs are simulated.
    certain = [one for one in checks if one.name not in ("visible processes", "Python packages", "GPU driver")]
    assert [one for one in certain if one.status in ("failed", "warning")] == []
    assert (doctor.exit_code(certain), state_dir.exists()) == (0, False)
    check_document(json.loads(json.dumps(doctor.to_dict(checks))))


def test_a_check_that_breaks_is_failed_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(host: api.CheckedHost) -> api.Check:
        raise ZeroDivisionError("a strange host")

    monkeypatch.setattr(doctor, "CHECKS", {"first": broken, "batch job": doctor.CHECKS["batch job"]})
    first, second = doctor.run_checks()
    assert (first.status, second.status) == ("failed", "passed")
    assert "ZeroDivisionError: a strange host" in first.detail
    assert (doctor.exit_code([first, second]), doctor.exit_code([second])) == (1, 0)


FOUND = [
    api.Check("passed", "not running", name="process lists"),
    api.Check("skipped", "there is none", name="policy file"),
    api.Check("warning", "host.lock was held by others for 3.0 s", "look for a process " + "x" * 130, "file locks"),
    api.Check("failed", "it does not answer " * 9, "restart the driver", "GPU driver"),
    api.Check("warning", "belongs to no living claim", "unset it", "batch job"),
]


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("color", [False, True])
def test_the_report_says_first_what_is_wrong(width: int, color: bool) -> None:
    text = doctor.render_checks(FOUND, color=color, width=width)
    assert ("\x1b[31mfailed\x1b[0m" in text, "\x1b[33mwarning\x1b[0m" in text) == (color, color)
    lines = re.sub(r"\x1b\[[0-9]+m", "", text).splitlines()
    assert [line.split(": ")[0] for line in lines if line[:1].strip()] == [
        "failed   GPU driver", "warning  file locks", "warning  batch job", lines[-1],
    ]  # fmt: skip
    assert sum(line.startswith(" " * 9 + "fix: ") for line in lines) == 3
    assert lines[-1] == "1 passed, 1 skipped, 1 failed, 2 warnings (-v lists all)"
    (long,) = [line for line in lines if api.display_width(line) > width and line != lines[-1]]
    assert long.strip() == "x" * 130, "what is to be copied is whole"
    lines = doctor.render_checks(FOUND, color=False, width=width, verbose=True).splitlines()
    assert lines[-4:-2] == ["passed   process lists: not running", "skipped  policy file: there is none"]


def test_from_the_command_line(state_dir: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    api.main(["doctor"])
    said = capsys.readouterr().out
    assert ("warning  GPU driver: simulated:dgx-a100 " in said, "file locks" in said) == (True, False)
    api.main(["doctor", "-v"])
    assert "skipped  file locks: " in capsys.readouterr().out
    monkeypatch.setenv("SAFE_GPU_DRIVER", "nvidia-smi")
    monkeypatch.setenv("PATH", str(state_dir))
    assert api.main(["doctor"]) == 1
    assert capsys.readouterr().out.startswith("failed   GPU driver: ")
    assert api.main(["doctor", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    check_document(document)
    statuses = {one["name"]: one["status"] for one in document["checks"]}
    assert (statuses["GPU driver"], statuses["access to GPUs"]) == ("failed", "skipped")
    assert [one for one in document["checks"] if "the check itself failed" in one["detail"]] == []


# Its own process: packages, variables, limits


VARIABLES, VISIBLE = "SAFE_GPU variables", "CUDA_VISIBLE_DEVICES"
NUMBERS_ON_THE_HOST = "8,9,10,11,12,13,14,15"  # of GPUs that the driver numbers from 0, and shows no others
FIRST_GPU = api.SimulatedDriver("dgx-a100", "/nowhere").idle.gpus[0].uuid


@pytest.mark.parametrize(
    ("check", "variables", "status", "words"),
    [
        (VARIABLES, {}, "passed", "none"),
        (VARIABLES, {"SAFE_GPU_TIMEOUT": "15m", "SAFE_GPU_NB_GPUS": "2", "SAFE_GPU_FENCE": "ignore"}, "passed", "15m"),
        (VARIABLES, {"safe_gpu_dirr": "/x"}, "warning", "safe_gpu_dirr"),
        (VARIABLES, {"SAFE_GPU_TIMEOUT": "soon"}, "failed", "soon"),
        (VISIBLE, {}, "passed", "not set"),
        (VISIBLE, {VISIBLE: "0,1,2,3,4,5,6,7"}, "passed", "all GPUs"),
        (VISIBLE, {VISIBLE: "0"}, "warning", "limits claims to 1 of 8"),
        (VISIBLE, {VISIBLE: "0", "SAFE_GPU_FENCE": "ignore"}, "passed", "is ignored"),
        (VISIBLE, {VISIBLE: "0", "SLURM_JOB_ID": "7"}, "passed", "as the job's share"),
        (VISIBLE, {VISIBLE: ""}, "failed", "CUDA shows no GPU"),
        (VISIBLE, {VISIBLE: "1,99,2"}, "warning", "CUDA reads '1,99,2' as GPU 1"),
        (VISIBLE, {"NVIDIA_VISIBLE_DEVICES": FIRST_GPU}, "passed", "this container was given 1 of the 8 GPUs"),
        (VISIBLE, {"NVIDIA_VISIBLE_DEVICES": FIRST_GPU, VISIBLE: "0"}, "warning", "limits claims to 1 of 8"),
        (VISIBLE, {"SAFE_GPU_DRIVER": "simulated:max1550", "ZE_AFFINITY_MASK": ""}, "passed", "not set"),
        ("batch job", {}, "passed", "not in a batch job"),
        ("batch job", {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "passed", "rank 1 of 4"),
        ("batch job", {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0,1"}, "passed", "2 GPUs asked for"),
        ("batch job", {"SLURM_JOB_ID": "7", VISIBLE: "0,1"}, "passed", "in slurm job slurm:7"),
        ("batch job", {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "2,3", VISIBLE: "0,1"}, "warning", "0,1"),
        ("batch job", {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": NUMBERS_ON_THE_HOST, VISIBLE: "0"}, "passed", "slurm:7"),
    ],
)
def test_variables(check: str, variables: dict[str, str], status: str, words: str) -> None:
    expect(check, status, words, environment(**variables))


def test_the_list_of_a_scheduler_is_not_ignored() -> None:
    for value, status in (("10000", "failed"), ("1,99", "warning")):
        expect(VISIBLE, status, fix="ask the scheduler", host=environment(**{VISIBLE: value, "SLURM_JOB_ID": "7"}))


@pytest.mark.parametrize(("scope", "fix"), [("", ", or set SAFE_GPU_FENCE=ignore"), ("0123456789abcdef", "")])
def test_inside_a_claim_its_gpus_are_the_limit(scope: str, fix: str) -> None:
    hidden = environment(**{VISIBLE: "", "SAFE_GPU_SCOPE": scope})
    assert finding(VISIBLE, hidden).fix == f"unset {VISIBLE}{fix}"


def test_numbers_that_mean_other_gpus_to_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:workstation-mixed")
    expect(VISIBLE, "warning", "ambiguous", environment(CUDA_VISIBLE_DEVICES="1"), "PCI_BUS_ID")


@as_root
@pytest.mark.parametrize(
    ("prepare", "status", "words", "fix"),
    [
        ("printf '[default]\nmax_gpus = 4\n[user anna]\nmax_gpus = 1' > $P", "passed", "2 sections", ""),
        ("printf '[default]\nmax_gpus = many' > $P", "failed", ":2: max_gpus = many is not a number", "message says"),
        ("echo '[default]' > $P; chmod 666 $P", "warning", "mode 0666): it is ignored", "as root"),
        ("true", "warning", "does not exist", "unset SAFE_GPU_POLICY"),
    ],
)
def test_a_policy(tmp_path: Path, prepare: str, status: str, words: str, fix: str) -> None:
    path = str(tmp_path / "policy.ini")
    subprocess.run(f"umask 022; {prepare}", shell=True, check=True, env={**os.environ, "P": path}, timeout=60)
    expect("policy file", status, words, environment(SAFE_GPU_POLICY=path), fix)


# The state directory


@pytest.fixture
def used(state_dir: Path) -> Path:
    """A state directory that is used."""
    api.setup.make(str(state_dir))
    return state_dir


def test_a_missing_directory_will_be_made_where_it_can_be(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not exist yet" in finding("state directory").detail
    assert finding("file locks").status == "skipped"
    monkeypatch.setenv("SAFE_GPU_DIR", str(state_dir / "deep" / "down"))
    expect("state directory", "failed", f"there is no {state_dir / 'deep'} to which", fix="create that directory")
    assert not state_dir.exists()
    monkeypatch.setenv("SAFE_GPU_DIR", "state")
    expect("state directory", "failed", "relative")


def test_a_directory_in_use_passes_and_one_of_another_mode_may_be_there_by_mistake(used: Path) -> None:
    """Or its owner replaces it by a link: no advice opens or removes it."""
    before = sorted(used.rglob("*"))
    expect("file locks", "passed")
    expect("state directory", "passed", "mode 1777")
    assert sorted(used.rglob("*")) == before
    used.chmod(0o755)
    expect("state directory", "warning", "mode 0755 and belongs to ")
    assert finding("state directory").fix.startswith("set SAFE_GPU_DIR")


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("chmod 777 .", "warning", "every user may remove"),
        ("mv $PWD $PWD.moved && ln -s $PWD.moved $PWD", "failed", "symbolic link"),
        ("rm -r $PWD && touch $PWD", "failed", "not a directory"),
        ("rm -r history && ln -s /tmp history", "failed", "history is not a directory, or it is a symbolic link"),
        ("chmod 600 host.lock", "failed", "mode 0600 in place of 0666"),
        ("ln -sf /etc/passwd host.lock", "failed", "is a symbolic link"),
        ("chmod 700 ..", "warning", "other users cannot enter it"),
        ("mkdir leases", "warning", "leases is of an older build"),
    ],
)
def test_faults_of_the_directory(used: Path, fault: str, status: str, words: str) -> None:
    subprocess.run(fault, shell=True, check=True, cwd=used, timeout=60)
    expect("state directory", status, words)


@as_root
@pytest.mark.parametrize("part", ["", "claims"])
def test_who_can_remove_what_others_rely_on_is_named(used: Path, part: str) -> None:
    os.chown(used / part, 54321, 54321)
    expect(
        "state directory", "warning", "54321 can remove other users' files", fix="as root: safe-gpu setup --state-dir"
    )


def test_network_file_systems(used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safe_gpu.coordination.directory.file_system_at", lambda path, device: api.FileSystem("nfs4"))
    expect("state directory", "failed", "nfs4", fix="SAFE_GPU_DIR")


def test_a_host_lock_that_is_never_given_back(used: Path, child: Any, eventually: Any, monkeypatch: Any) -> None:
    code = f"import fcntl; file = open('{used}/host.lock', 'rb+'); fcntl.flock(file, fcntl.LOCK_EX); "
    holder = child(code + "say('locked'); listen()", says="locked")
    os.kill(holder.pid, signal.SIGSTOP)
    eventually(lambda: api.procfs.is_stopped(holder.pid))
    monkeypatch.setattr("safe_gpu.doctor.state.PATIENCE", 0.05)
    expect("file locks", "failed", f"process {holder.pid} of ", fix="the message says")
    holder.kill()
    assert finding("file locks").status == "passed"


@as_root
def test_what_is_drained_and_what_is_ignored(used: Path) -> None:
    expect("GPUs in service", "passed")
    (used / "closed").write_text(f"{UUIDS[3]} - - - a fan\nGPU-gone - - - \n{UUIDS[4]}\n")
    said = "GPU 3 drained by root: a fan; GPU GPU-gone drained by root; "
    expect(
        "GPUs in service", "warning", said, fix=f"as root: take 2 lines of GPUs that resume does not know out of {used}"
    )
    expect("GPUs in service", "warning", f"closed has a line that closes no GPU, and is ignored: {UUIDS[4]}")


def test_entries_that_do_not_count(used: Path) -> None:
    expect("entries", "passed")
    (used / "queue" / f"7.{'a' * 16}").symlink_to("/etc/passwd")
    user = api.procfs.user_name(os.geteuid())
    expect("entries", "warning", f"{used}/queue/7.{'a' * 16} of {user} is ignored", fix="ask the owners")


@as_root
def test_a_name_of_a_gpu_that_is_drained_runs_no_command_of_its_writer(used: Path) -> None:
    """Root pastes the advice."""
    os.chown(used, 4711, 4711)
    (used / "closed").write_text("".join(f"GPU-{number};$(touch${{IFS}}pwned) - - - \n" for number in range(99)))
    os.chown(used / "closed", 4711, 4711)
    found = finding("GPUs in service")
    assert "$(touch" in found.detail
    assert found.fix.endswith(f": take 99 lines of GPUs that resume does not know out of {used}/closed")


# Who holds GPUs


def test_a_process_namespace_of_its_own() -> None:
    found = in_namespace("true", "visible processes", "-p", "-f", "--mount-proc")
    assert (found.status, "--pid=host" in found.fix) == ("warning", True)


def test_no_proc() -> None:
    found = in_namespace("mount -t tmpfs none /proc", "visible processes", user=12345)
    assert (found.status, "hidepid" in found.detail) == ("warning", False)
    assert found.detail.startswith("there is no /proc here")
    assert found.fix.startswith("mount /proc")


def test_hidden_processes_of_others() -> None:
    mount = "mount -t proc -o hidepid=2 none /proc"
    found = in_namespace(mount, "visible processes", user=12345)
    assert (found.status, "hidepid" in found.detail) == ("warning", True)
    if os.readlink("/proc/self/ns/pid") == "pid:[4026531836]":
        assert in_namespace(mount, "visible processes").status == "passed", "nothing is hidden from root"


@pytest.mark.parametrize("is_first", [True, False])
def test_driver_pids_that_do_not_resolve(fake_gpus: Any, is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all processes are seen, it has ended."""
    monkeypatch.setattr(api.procfs, "pid_namespace", lambda: api.procfs.FIRST_PID_NAMESPACE if is_first else 1)
    fake_gpus.use_nvml_here()
    fake_gpus.process(fake_gpus.uuids[1], os.getpid())
    expect("ended processes", "passed")
    for number in (1, 2):
        fake_gpus.process(fake_gpus.uuids[number], 1 << 29, static=True)
    host = api.CheckedHost()
    if is_first:
        said = f"GPU 1,2: process {1 << 29} has ended and the driver keeps its memory"
        fix = "reset the GPU if that lasts: look for Xid in dmesg, then `nvidia"
        expect("ended processes", "warning", said, host, fix)
        expect("visible processes", "passed", host=host)
    else:
        expect("ended processes", "passed", host=host)
        expect("visible processes", "warning", "1 of 2 processes", host)


def test_a_claim_in_another_state_directory(dgx: Any) -> None:
    expect("state directories of claims", "passed")
    dgx.hold(0)
    doors = simulated_doors()
    for uuid in UUIDS[1:3]:
        assert doors.take_whole(uuid, parts_here=())
    expect("state directories of claims", "warning", "GPU 1,2: claimed in another", fix="/etc/safe-gpu/config.ini")
    doors.release()
    expect("state directories of claims", "passed")


# GPUs and their driver


def test_a_good_host_of_gpus(fake_gpus) -> None:
    fake_gpus.use_nvml_here()
    host = api.CheckedHost()
    for name in ("access to GPUs", "health of GPUs", "process lists"):
        expect(name, "passed", host=host)
    expect("GPU driver", "passed", "nvml 550.54.15: 8 GPUs, NVIDIA A100-SXM4-80GB", host)
    fake_gpus.options(driver_version="535.54.03")
    expect("GPU driver", "warning", "wrong numbers")


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"lost": 1}, "access to GPUs"),
        ({"compute_error": 999}, "process lists"),
        ({"recovery": 1}, "health of GPUs"),
        ({"util": 100}, "health of GPUs"),
    ],
)
def test_faults_of_gpus(fake_gpus, change: dict[str, object], check: str) -> None:
    fake_gpus.change(2, **change)
    fake_gpus.use_nvml_here()
    expect(check, "warning", "GPU 2")


def test_gpus_that_claims_take_last(fake_gpus) -> None:
    fake_gpus.change(2, remap="failed")
    fake_gpus.use_nvml_here()
    for number in (2, 5):
        fault = api.GpuFault(time.time(), "a claim failed")
        api.write_fault(os.environ["SAFE_GPU_DIR"], fake_gpus.uuids[number], fault)
    host = api.CheckedHost()
    detail = finding("health of GPUs", host).detail
    noted = r"taken last until \w+ \d\d:\d\d, since a claim failed there: a claim failed"
    ill = "taken last while a row of its memory is broken and could not be remapped"
    assert re.fullmatch(f"GPU 2 is {noted}; {ill}; GPU 5 is {noted}", detail)
    expect("health of GPUs", "warning", "GPU 2", host, "safe-gpu drain")


def test_no_gpus_and_no_driver(fake_gpus) -> None:
    fake_gpus.write()
    fake_gpus.use_nvml_here()
    assert "shows no GPU" in finding("GPU driver").detail
    fake_gpus.options(init_error=9)
    host = api.CheckedHost()
    expect("GPU driver", "failed", host=host)
    for name in ("CUDA", "access to GPUs", "health of GPUs", "process lists"):
        expect(name, "skipped", host=host)


@pytest.mark.parametrize(
    ("loaded", "fix"),
    [
        ("proc/driver/nvidia/version", "look for Xid in dmesg, then `nvidia-smi -r` as root"),
        ("sys/class/kfd/kfd/topology/nodes", "look for amdgpu in dmesg"),
    ],
)
def test_a_driver_that_does_not_answer(
    fake_gpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: str, fix: str
) -> None:
    """It is asked in a child, which can be left. Here it is NVML in place of any."""
    (tmp_path / "root" / loaded).mkdir(parents=True)
    fake_gpus.options(hangs="nvmlInitWithFlags", log=1)
    for name, value in {**fake_gpus.env, "SAFE_GPU_FSROOT": str(tmp_path / "root")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(import_module("safe_gpu.doctor.check"), "PATIENCE", 3.0)
    monkeypatch.setattr(api.awaiting, "FIRST", 0.1)
    told: list[str] = []
    environ = {**os.environ, "SAFE_GPU_DRIVER": "auto"}
    host = api.CheckedHost({**environ, "SAFE_GPU_DRIVER": "nvml"} if "nvidia" in loaded else environ, told.append)
    expect("GPU driver", "failed", "the driver does not answer: it has kept a child process waiting for 3 s", host, fix)
    for name in ("CUDA", "access to GPUs", "process lists"):
        expect(name, "skipped", host=host)
    assert told[0].startswith("waiting for the GPU driver since ")
    assert fake_gpus.calls() == ["nvmlInitWithFlags"]


def test_a_slow_driver() -> None:
    host = api.CheckedHost()
    assert host.snapshot is not None
    host.poll_seconds = 3.2
    expect("GPU driver", "warning", "3.20 s", host, "persistence")


def test_cuda_in_a_child(fake_gpus) -> None:
    def ask(**variables: str) -> str:
        return fake_gpus.python(ASK, "CUDA", **variables)

    assert ask(CUDA_VISIBLE_DEVICES="1") == "passed|CUDA can be initialised and sees 8 GPUs|\n"
    fake_gpus.options(cuda_init_error=802)
    assert re.match(r"failed\|CUDA could not be asked.*802", ask())


def test_memory_of_nobody(fake_gpus) -> None:
    fake_gpus.change(2, used=600 << 20)
    fake_gpus.use_nvml_here()
    found = finding("process lists")
    assert (found.status, found.detail.startswith("GPU 2: 600 MiB of memory in use by no process")) == ("warning", True)
    assert "SAFE_GPU_UNEXPLAINED_MEMORY" in found.fix


def test_lists_that_nobody_asks_for(fake_gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus.change(2, compute_error=3)
    fake_gpus.use_nvml_here()
    expect("process lists", "failed", "GPU 2", fix="SAFE_GPU_PROCESS_LIST=optional")
    monkeypatch.setenv("SAFE_GPU_PROCESS_LIST", "optional")
    expect("process lists", "warning", "by its memory alone")


# Hosts with AMD GPUs, and with GPUs of both vendors


def found() -> dict[str, api.Check]:
    """Name of a check -> its finding."""
    return {one.name: one for one in doctor.run_checks()}


def test_rows_on_a_simulated_amd_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:mi300x-cpx")
    checks = found()
    assert not checks.keys() & {"CUDA", "CUDA_VISIBLE_DEVICES"}
    assert checks["ROCR_VISIBLE_DEVICES"].status == "passed"
    assert not re.search("nvidia-smi|Xid|NVML|CUDA can", str(checks))
    assert checks["HIP"].detail == "safe_gpu does not ask HIP about these GPUs"


def test_a_tree_without_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    KfdHost(tmp_path)
    monkeypatch.setenv("SAFE_GPU_DRIVER", "kfd")
    monkeypatch.setenv("SAFE_GPU_FSROOT", str(tmp_path))
    expect("GPU driver", "failed", fix="--device /dev/kfd")


@pytest.mark.parametrize("vendor", ["amd", "intel"])
def test_a_driver_that_is_chosen_and_not_there(vendor: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (driver,) = api.VENDORS[vendor].drivers
    monkeypatch.setenv("SAFE_GPU_DRIVER", driver)
    monkeypatch.setenv("SAFE_GPU_FSROOT", str(tmp_path))
    expect("GPU driver", "failed", fix=api.VENDORS[vendor].install)


def test_the_other_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:two-vendors")
    with safe_gpu.GPUOwner(1, vendor="amd", timeout=0, affinity=None, delegate=True):
        assert "HIP" in found(), "a claim inside a claim of AMD GPUs gets those"
    assert "CUDA" in found()


def test_a_host_without_a_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("safe_gpu.settings.variables.HOST_FILES", (str(tmp_path / "config.ini"),))
    expect("policy file", "skipped", host=environment())
