"""Fixes of ``doctor`` for GPUs and their driver, packages and containers, followed word by word: then the check passes.

What root does with nvidia-smi the fake one does to the fake GPUs, and a fake pip installs from this environment.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.findings import ASK, environment, finding
from support.gpus import program
from support.processes import ALL_ARE_SEEN
from support.real import long
from support.vendor_hosts import IntelHost

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount and to act as other users")


def typed(line: str, **variables: str) -> str:
    """The output of a line of the shell, which must end well."""
    env = {**os.environ, **variables}
    done = subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def quoted(fix: str) -> list[str]:
    """The commands between backquotes."""
    return re.findall("`(.*?)`", fix)


# nvidia-smi


def test_persistence_mode_makes_a_slow_driver_quick(fake_gpus: Any, fake_nvidia_smi: Any, eventually: Any) -> None:
    fake_gpus.set(1)
    fake_gpus.options(call_ms=100)
    fake_gpus.use_nvml_here()
    found = finding("GPU driver")
    assert (found.status, "opening and polling it took" in found.detail) == ("warning", True)
    (line,) = quoted(found.fix)
    assert line == "nvidia-smi -pm 1"
    typed(line)
    eventually(lambda: finding("GPU driver").status == "passed")


@pytest.mark.parametrize(
    ("check", "change"),
    [
        ("access to GPUs", {"lost": 1}),
        ("health of GPUs", {"recovery": 1}),
        pytest.param("health of GPUs", {"util": 100}, marks=long),
    ],
)
def test_a_reset(fake_gpus: Any, fake_nvidia_smi: Any, check: str, change: dict[str, int]) -> None:
    fake_gpus.change(2, **change)
    fake_gpus.use_nvml_here()
    found = finding(check)
    assert found.status == "warning"
    typed(quoted(found.fix)[0])
    assert finding(check).status == "passed"


@pytest.mark.skipif(not ALL_ARE_SEEN, reason="in a PID namespace it is not known whether a process has ended")
def test_a_reset_ends_what_ended_processes_hold(fake_gpus: Any, fake_nvidia_smi: Any) -> None:
    fake_gpus.process(fake_gpus.uuids[1], 1 << 29, static=True)
    fake_gpus.use_nvml_here()
    found = finding("ended processes")
    assert found.status == "warning"
    typed(quoted(found.fix)[0])
    assert finding("ended processes").status == "passed"


@pytest.mark.parametrize("nth", [0, pytest.param(1, marks=long)])
def test_a_driver_that_hangs(
    fake_gpus: Any, fake_nvidia_smi: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Any, nth: int
) -> None:
    """It is reset; if it only takes long, persistence mode helps."""
    (tmp_path / "root/proc/driver/nvidia/version").mkdir(parents=True)
    fake_gpus.options(**[{"hangs": "nvmlInitWithFlags"}, {"call_ms": 3000}][nth])
    for name, value in {**fake_gpus.env, "SAFE_GPU_FSROOT": str(tmp_path / "root")}.items():
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as patience:
        patience.setattr(import_module("safe_gpu.doctor.check"), "PATIENCE", 1.0)
        found = finding("GPU driver")
    assert (found.status, "does not answer" in found.detail) == ("failed", True)
    assert len(quoted(found.fix)) == 2
    typed(quoted(found.fix)[nth])
    fake_gpus.use_nvml_here()
    eventually(lambda: finding("GPU driver").status == "passed")


def test_the_ready_state_of_confidential_computing(fake_gpus: Any, fake_nvidia_smi: Any) -> None:
    fake_gpus.options(cuda_init_error=802)
    status, _, fix = fake_gpus.python(ASK, "CUDA").split("|")
    assert status == "failed"
    (line,) = re.findall(r"\((nvidia-smi .*?)\)", fix)
    typed(line)
    assert fake_gpus.python(ASK, "CUDA").startswith("passed|")


def test_an_ill_gpu_is_drained(fake_gpus: Any, state_dir: Path, command: Any) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, who drains")
    fake_gpus.set(2)
    fake_gpus.change(1, recovery=1)
    fake_gpus.use_nvml_here()
    assert "safe-gpu drain keeps claims off such a GPU" in finding("health of GPUs").fix
    own = {**fake_gpus.env, "SAFE_GPU_DIR": str(state_dir)}
    assert command.run("wait", "-n", "2", "--timeout", "0", env=own).returncode == 0
    api.setup.make(str(state_dir))
    assert command.run("drain", "1", env=own).returncode == 0
    refused = command.run("wait", "-n", "2", "--timeout", "0", env=own)
    assert (refused.returncode, "GPU 1 (NVIDIA A100-SXM4-80GB): drained" in refused.stderr) == (75, True)


def test_a_claim_that_works_ends_the_note_of_one_that_failed(
    fake_gpus: Any, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.setup.make(str(state_dir))
    fake_gpus.use_nvml_here()
    api.write_fault(str(state_dir), fake_gpus.uuids[5], api.GpuFault(1e12, "a claim failed"))
    assert finding("health of GPUs").status == "passed", "a note of another time"
    now = import_module("time").time()
    api.write_fault(str(state_dir), fake_gpus.uuids[5], api.GpuFault(now, "a claim failed"))
    (line,) = re.findall(r"\((python3 -c '.*?')\)", finding("health of GPUs").fix)
    typed(line.replace("python3", shlex.quote(sys.executable), 1), **fake_gpus.env)
    assert finding("health of GPUs").status == "passed"


# The driver and its package


def test_numbers_that_are_wrong(fake_gpus: Any, fake_nvidia_smi: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer driver, or nvidia-smi."""
    fake_gpus.set(1)
    fake_gpus.options(driver_version="535.54.03")
    fake_gpus.use_nvml_here()
    way_out = re.fullmatch(r"upgrade the driver to (\S+) or newer, or set (\w+)=(\S+)", finding("GPU driver").fix)
    assert way_out is not None
    fake_gpus.options(driver_version=way_out[1])
    assert "wrong numbers" not in finding("GPU driver").detail
    fake_gpus.options(driver_version="535.54.03")
    monkeypatch.setenv(way_out[2], way_out[3])
    found = finding("GPU driver", environment(**os.environ))
    assert (found.detail.startswith("nvidia-smi "), "wrong numbers" in found.detail) == (True, False)


@pytest.mark.parametrize("vendor", api.VENDORS.values(), ids=lambda vendor: vendor.title)
def test_without_a_driver_a_simulated_host(vendor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_FSROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SAFE_GPU_DRIVER", "nvidia-smi" if vendor.title == "NVIDIA" else vendor.drivers[0])
    found = finding("GPU driver")
    assert (found.status, found.fix.startswith(vendor.install)) == ("failed", True)
    way_out = re.search(r"or try (\w+)=(\S+)", found.fix)
    assert way_out is not None
    monkeypatch.setenv(way_out[1], way_out[2])
    host = api.CheckedHost()
    assert finding("GPU driver", host).status != "failed"
    assert host.vendor == vendor


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ``pip`` on PATH that installs what this environment has into a directory, which is returned and which hides
    this environment's; a module there that is to be missing raises ImportError."""
    packages = tmp_path / "packages"
    packages.mkdir()
    code = f"""
import os, shutil, sys
from importlib import metadata
words = sys.argv[1:]
verb, names = words[0], [word for word in words[1:] if not word.startswith("-")]
for name in names:
    for file in metadata.files(name) if verb == "install" else ():
        if file.suffix == ".py" and ".." not in file.parts:
            os.makedirs({str(packages)!r} + "/" + str(file.parent), exist_ok=True)
            shutil.copy(file.locate(), {str(packages)!r} + "/" + str(file))
    if verb == "uninstall" and name == "pynvml":
        shutil.rmtree({str(packages / "pynvml")!r}, ignore_errors=True)
"""
    (tmp_path / "pip.py").write_text(code)
    program(tmp_path / "bin/pip", f'exec env -u PYTHONPATH "{sys.executable}" {tmp_path}/pip.py "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return packages


def required() -> set[str]:
    """Names of the packages that safe_gpu depends on."""
    return {re.split(r"[^\w-]", line)[0] for line in metadata.requires("safe-gpu") or () if "extra" not in line}


MISSING, OLDER = "raise ImportError('it is not there')", "__version__ = '8.0.4'"


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("pynvml.py", OLDER),
        ("pynvml/__init__.py", MISSING),
        pytest.param("pynvml.py", MISSING, marks=long),
        pytest.param("pynvml/__init__.py", OLDER, marks=long),
    ],
)
def test_nvidia_ml_py_is_installed(fake_gpus: Any, fake_nvidia_smi: Any, pip: Path, module: str, text: str) -> None:
    """Where there is none, or an older module of its name: a directory comes before a file."""
    (pip / module).parent.mkdir(exist_ok=True)
    (pip / module).write_text(text)
    variables = {"PYTHONPATH": f"{pip}:{fake_gpus.env['PYTHONPATH']}", "SAFE_GPU_DRIVER": "auto"}
    status, detail, fix = fake_gpus.python(ASK, "GPU driver", **variables).strip().split("|")
    assert (status, "polled through nvidia-smi" in detail, f"({fix})" in detail) == ("warning", True, True)
    if text == MISSING and "/" in module:
        shutil.rmtree(pip / "pynvml")  # which is no package that pip knows
    typed(fix)
    assert required() >= {re.split(" ", fix)[-1]}
    assert fake_gpus.python(ASK, "GPU driver", **variables).split("|")[1].startswith("nvml ")


def test_nvml_is_where_the_loader_finds_it(
    fake_gpus: Any, fake_nvidia_smi: Any, tmp_path: Path, build_library: Any
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "libnvidia-ml.so.1").write_text("not a library")
    variables = {"SAFE_GPU_DRIVER": "auto"}
    status, _, fix = fake_gpus.python(ASK, "GPU driver", LD_LIBRARY_PATH=str(elsewhere), **variables).split("|")
    assert (status, "pip" in fix, "LD_LIBRARY_PATH" in fix) == ("warning", False, True)
    assert fake_gpus.python(ASK, "GPU driver", **variables).split("|")[1].startswith("nvml ")


def test_filelock_is_installed(pip: Path, fake_gpus: Any) -> None:
    (pip / "filelock").mkdir()
    (pip / "filelock/__init__.py").write_text("__version__ = '0.1'")
    variables = {"PYTHONPATH": f"{pip}:{fake_gpus.env['PYTHONPATH']}"}
    status, _, fix = fake_gpus.python(ASK, "Python packages", **variables).strip().split("|")
    assert status == "failed"
    typed(fix)
    assert required() >= {fix.split(" ")[-1]}
    assert fake_gpus.python(ASK, "Python packages", **variables).startswith("passed|")


# Lists of processes


def test_another_driver_lists_processes(fake_gpus: Any, fake_nvidia_smi: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus.variant("-DNO_PROCESSES")
    fake_gpus.use_nvml_here()
    found = finding("process lists")
    assert found.status == "failed"
    variables = dict(re.findall(r"(SAFE_GPU_DRIVER)=(nvidia-smi)", found.fix))
    monkeypatch.setenv("SAFE_GPU_DRIVER", variables["SAFE_GPU_DRIVER"])
    assert finding("process lists").status == "passed"


@as_root
def test_what_the_kernel_shows_to_root(open_tmp: Path, as_user: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The open files of others' processes, by which Intel's are known."""
    host = IntelHost(open_tmp / "root")
    host.gpu("0000:4d:00.0", memory=48 << 30)
    host.client(os.getpid(), "0000:4d:00.0", "drm-total-vram0:\t0")
    typed(f"chmod -R 777 {host.root}; chmod 700 {host.root}/proc/{os.getpid()}/fd*")
    monkeypatch.setenv("SAFE_GPU_FSROOT", str(host.root))
    monkeypatch.setenv("SAFE_GPU_DRIVER", "intel")

    def check(say: Any, listen: Any) -> None:
        found = finding("process lists")
        say(f"{found.status}: {found.fix}")

    assert as_user(check, uid=4711).hear().startswith("warning: make sure that nobody uses these GPUs")
    assert finding("process lists").status == "passed"


def test_a_gpu_that_the_job_was_not_given(fake_gpus: Any) -> None:
    """A scheduler lets the job open it once it was asked."""
    fake_gpus.change(2, handle_error=4)
    fake_gpus.use_nvml_here()
    assert finding("access to GPUs").fix == "ask the scheduler or the container for these GPUs"
    fake_gpus.set(8)
    assert finding("access to GPUs").status == "passed"
