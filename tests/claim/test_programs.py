"""Claims in users' own programs: copies of the owner, closed descriptors, frozen apps, notebooks, workers, upgrades."""

import copy
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.claims import claim
from support.forks import in_fork
from support.gpus import PACKAGE_ROOT

import safe_gpu
from safe_gpu.runtimes.cuda import CUDA, CudaLibrary


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, pickle.dumps, lambda one: copy.deepcopy({"gpus": one})]
)
def test_an_owner_is_neither_copied_nor_pickled(ground: Any, duplicate: Callable[[Any], object]) -> None:
    with claim(2) as owner:
        with pytest.raises(TypeError, match=r"owner\.devices_taken or owner\.gpus.*release_gpus\(\)"):
            duplicate(owner)
        assert owner.devices_taken == [0, 1]
        assert duplicate([owner.devices_taken, owner.gpus])


@pytest.mark.parametrize("placeholder", [safe_gpu.NoPlaceholder, lambda: None])
def test_a_release_leaves_files_alone_that_have_its_old_numbers(
    ground: Any, tmp_path: Path, placeholder: Callable[[], Any]
) -> None:
    """As a daemon closes all descriptors, and opens files of its own under the same numbers."""

    def daemon() -> list[object]:
        before = os.listdir("/proc/self/fd")
        owner = safe_gpu.GPUOwner(2, placeholder(), affinity=None, timeout=0)
        taken = [int(fd) for fd in os.listdir("/proc/self/fd") if fd not in before and _of_ours(int(fd))]
        (tmp_path / "own").write_text("kept")
        own = os.open(tmp_path / "own", os.O_RDWR)
        for fd in taken:
            os.dup2(own, fd)
        child = os.fork()
        if child == 0:
            owner.release_gpus()
            os._exit(sum(not os.path.exists(f"/proc/self/fd/{fd}") for fd in taken))
        lost_in_child = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        owner.release_gpus()
        left = all(os.path.exists(f"/proc/self/fd/{fd}") for fd in taken)
        return [len(taken) > 2, lost_in_child, left, (tmp_path / "own").read_text()]

    assert in_fork(daemon) == [True, 0, True, "kept"]


def _of_ours(fd: int) -> bool:
    try:
        target = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False  # the one that listed them
    return target.startswith((os.environ["SAFE_GPU_DIR"], "socket:"))


# Programs that contain Python: frozen apps, and applications that embed it


def ask() -> str:
    """Ask CUDA in a child, which is refused; say why."""
    with pytest.raises(safe_gpu.NoDriverError) as refusal:
        CUDA.visible_in_child()
    return str(refusal.value)


@pytest.mark.parametrize("app", ["frozen", "embedding"])
def test_an_app_that_contains_python_is_not_started_again(
    app: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program, trace = tmp_path / "app", tmp_path / "started"
    program.write_text(f"#!/bin/sh\necho >> {trace}\n")
    program.chmod(0o755)
    if app == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    else:
        monkeypatch.setattr(sys, "base_exec_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(program))
    assert f"{program} is a program that contains Python" in ask()
    assert not trace.exists()


def test_an_app_that_is_called_python_is_started_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program, trace = tmp_path / "python-app", tmp_path / "started"
    again = (
        f"import sys; sys.executable = {str(program)!r}\n"
        "from safe_gpu.runtimes.cuda import CUDA\n"
        f"open({str(trace)!r}, 'a').write('once\\n')\n"
        f"len(open({str(trace)!r}).readlines()) < 9 and CUDA.visible_in_child()\n"
    )
    (tmp_path / "main.py").write_text(again)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/main.py"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE_ROOT))
    monkeypatch.setattr(sys, "executable", str(program))
    ask()
    assert trace.read_text() == "once\n"


# Cells that run twice


def test_the_same_request_keeps_its_gpus_and_another_one_does_not(ground: Any) -> None:
    owner = safe_gpu.ensure_gpus(2, safe_gpu.NoPlaceholder(), timeout=0, model="A100")
    for again in ({}, {"timeout": 5, "affinity": None}, {"min_memory": None, "only": ()}):
        assert safe_gpu.ensure_gpus(2, safe_gpu.NoPlaceholder(), model="A100", **again) is owner is safe_gpu.gpu_owner
    for other in ({"nb_gpus": 3}, {"model": None}, {"delegate": True}, {"visible_as": "uuid"}):
        held = r"holds GPU 0,1 by another request: release_gpus\(\) first"
        with pytest.raises(safe_gpu.AlreadyClaimedError, match=held) as caught:
            safe_gpu.ensure_gpus(**{"nb_gpus": 2, "model": "A100", **other})
        assert caught.value.devices == (0, 1)
    with pytest.raises(safe_gpu.AlreadyClaimedError, match=r"or call ensure_gpus\(\)"):
        claim(1)
    assert owner.devices_taken == [0, 1]
    safe_gpu.release_gpus()
    with claim(1, model="A100") as claimed:
        assert safe_gpu.ensure_gpus(model="A100") is claimed


@pytest.mark.parametrize("function", [safe_gpu.claim_gpus, safe_gpu.ensure_gpus])
def test_a_claim_of_no_gpu_hides_all(function: Any, ground: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    owner = function(0)
    assert (os.environ["CUDA_VISIBLE_DEVICES"], owner.devices_taken, owner.placeholders) == ("", [], [])
    assert safe_gpu.ensure_gpus(0) is owner
    with pytest.raises(safe_gpu.AlreadyClaimedError, match="has claimed 0 GPUs"):
        claim(1)
    safe_gpu.release_gpus()
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


# Scripts that start themselves again, as Lightning does for each further rank


RANKS = """
import os, subprocess, sys, safe_gpu
{condition}
    safe_gpu.claim_gpus(2, safe_gpu.NoPlaceholder(), affinity=None, timeout=0, delegate={delegate})
print("rank", os.environ.get("LOCAL_RANK", "0"), "on", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
if "LOCAL_RANK" not in os.environ:
    sys.exit(subprocess.run([sys.executable, *sys.argv], env={{**os.environ, "LOCAL_RANK": "1"}}).returncode)
"""


@pytest.mark.parametrize("delegate", [False, True])
def test_a_second_rank_is_told_the_line_that_works(delegate: bool, ground: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"

    def run(condition: str) -> subprocess.CompletedProcess[str]:
        script.write_text(RANKS.format(condition=condition, delegate=delegate))
        env = {**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)}
        return subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=60)

    line = 'if "LOCAL_RANK" not in os.environ:'
    refused = run("if True:")
    assert refused.returncode == 1
    assert f"claim once for all: `{line} safe_gpu.claim_gpus(...)`" in refused.stderr
    assert run(line).stdout == "rank 0 on 0,1\nrank 1 on 0,1\n"


# What others are told


def test_a_notebook_is_named(child: Any, tmp_path: Path) -> None:
    (tmp_path / "ipykernel_launcher.py").write_text(
        "import safe_gpu; safe_gpu.claim_gpus(8, safe_gpu.NoPlaceholder(), affinity=None); print('has'); input()"
    )
    environment = {"PYTHONPATH": f"{PACKAGE_ROOT}:{tmp_path}", "JPY_SESSION_NAME": "/home/anna/train.ipynb"}
    code = "import os; os.execv(sys.executable, [sys.executable, '-m', 'ipykernel_launcher', '-f', 'kernel.json'])"
    child(code, "has", env=environment)
    with pytest.raises(safe_gpu.NotEnoughGpusError, match=r"-m ipykernel_launcher train\.ipynb\)"):
        claim(1)


def test_a_kernel_that_can_have_other_gpus_only_anew_is_told_so(
    host: Any, ground: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.ask_cuda()
    monkeypatch.setattr(CudaLibrary, "visible_if_initialized", lambda self: (host.uuids[0],))
    monkeypatch.setattr(CudaLibrary, "contexts", lambda self: frozenset())
    ground.hold(0)
    with pytest.raises(
        safe_gpu.NotEnoughGpusError, match=r"start a new process.*restart the kernel.*7 others are free"
    ):
        claim(1)
    ground.hold(*range(1, 8))
    with pytest.raises(safe_gpu.NotEnoughGpusError, match=r"wait for it \(timeout="):
        claim(1)


WORKER = """
import multiprocessing, safe_gpu
safe_gpu.claim_gpus({}, safe_gpu.NoPlaceholder(), affinity=None, timeout=0)
if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=print)
    worker.start()
    worker.join()
"""


@pytest.mark.parametrize("nb_gpus", [8, 1])
def test_a_worker_that_imports_the_claim_is_told_where_to_put_it(ground: Any, tmp_path: Path, nb_gpus: int) -> None:
    """With 8 the worker gets none, with 1 it would take another one without a word."""
    (script := tmp_path / "script.py").write_text(WORKER.format(nb_gpus))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert 'put the claim under `if __name__ == "__main__":`' in done.stderr
    assert "delegate" not in done.stderr


# An upgrade under load


PACKAGE = Path(sys.modules["safe_gpu"].__file__ or "").parent


def test_a_holder_and_a_waiter_while_the_package_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    """The files of the new version cannot even be imported, so that none of it gets into these processes."""
    shutil.copytree(PACKAGE, tmp_path / "safe_gpu", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = [sys.executable, "-m", "safe_gpu", "run", "--only", "0", "--", "sh", "-c"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*run, "echo held; read line"], text=True, **pipes) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with subprocess.Popen([*run, "echo got $CUDA_VISIBLE_DEVICES"], text=True, **pipes) as waiter:
            assert waiter.stderr is not None
            assert "waiting " in waiter.stderr.readline()
            for path in (tmp_path / "safe_gpu").rglob("*.py"):
                path.write_text("raise ImportError('the new version')")
            shutil.rmtree(tmp_path / "safe_gpu" / "__pycache__", ignore_errors=True)
            assert (holder.communicate("\n", timeout=60), holder.returncode) == (("", ""), 0)
            assert (waiter.communicate(timeout=60)[0], waiter.returncode) == ("got 0\n", 0)


def test_a_refusal_after_the_upgrade(child: Any, ground: Any) -> None:
    code = """
import time
from safe_gpu import ClaimTimeout, GPUOwner, NoPlaceholder
class New:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("safe_gpu"):
            raise ModuleNotFoundError(name)
genuine = time.sleep
def sleep(seconds):
    sys.meta_path.insert(0, New())
    genuine(seconds)
time.sleep = sleep
try:
    GPUOwner(1, NoPlaceholder(), timeout=0.3)
except ClaimTimeout as err:
    say(str(err).splitlines()[0])
"""
    ground.hold(*range(8))
    assert "1 GPU asked for, 0 free after" in child(code).hear()
