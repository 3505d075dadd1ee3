"""Claims in users' own programs: copies of the owner, closed descriptors, frozen apps, notebooks, worker pools."""

import copy
import os
import pickle
import pydoc
import subprocess
import sys
from collections.abc import Callable, Iterable
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


def _reopened(fds: Iterable[int], path: Path) -> None:
    """Close these descriptors, as daemons do, and open files of the program's own under the same numbers."""
    path.write_text("kept")
    own = os.open(path, os.O_RDWR)
    for fd in fds:
        os.dup2(own, fd)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("placeholder", [safe_gpu.NoPlaceholder, lambda: None])
def test_a_release_leaves_files_alone_that_have_its_old_numbers(
    ground: Any, tmp_path: Path, placeholder: Callable[[], Any]
) -> None:
    def daemon() -> list[object]:
        before = os.listdir("/proc/self/fd")
        owner = safe_gpu.GPUOwner(2, placeholder(), affinity=None, timeout=0)
        taken = [int(fd) for fd in os.listdir("/proc/self/fd") if fd not in before and _of_ours(int(fd))]
        _reopened(taken, tmp_path / "own")
        child = os.fork()
        if child == 0:
            owner.release_gpus()
            os._exit(sum(not _is_open(fd) for fd in taken))
        lost_in_child = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        owner.release_gpus()
        return [len(taken) > 2, lost_in_child, sum(not _is_open(fd) for fd in taken), (tmp_path / "own").read_text()]

    assert in_fork(daemon) == [True, 0, 0, "kept"]


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


@pytest.mark.parametrize("again", [{}, {"timeout": 5, "affinity": None}, {"min_memory": None, "only": ()}])
def test_the_same_request_keeps_its_gpus(ground: Any, again: dict[str, Any]) -> None:
    owner = safe_gpu.ensure_gpus(2, safe_gpu.NoPlaceholder(), timeout=0)
    assert safe_gpu.ensure_gpus(2, safe_gpu.NoPlaceholder(), **again) is owner is safe_gpu.gpu_owner
    assert owner.devices_taken == [0, 1]
    safe_gpu.release_gpus()
    assert safe_gpu.ensure_gpus(2, safe_gpu.NoPlaceholder(), timeout=0) is not owner


def test_it_keeps_what_a_claim_holds(ground: Any) -> None:
    with claim(1, model="A100") as owner:
        assert safe_gpu.ensure_gpus(model="A100") is owner


@pytest.mark.parametrize("other", [{"nb_gpus": 2}, {"model": "A100"}, {"delegate": True}, {"visible_as": "uuid"}])
def test_another_request_does_not(ground: Any, other: dict[str, Any]) -> None:
    with claim(1) as owner:
        with pytest.raises(
            safe_gpu.AlreadyClaimedError, match=r"holds GPU 0 by another request: release_gpus\(\) first"
        ) as caught:
            safe_gpu.ensure_gpus(**other)
        assert caught.value.devices == (0,)
        assert owner.devices_taken == [0]
        with pytest.raises(safe_gpu.AlreadyClaimedError, match=r"or call ensure_gpus\(\)"):
            claim(1)


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


# What a user sees of an error


def test_help_shows_what_callers_can_give() -> None:
    shown = pydoc.render_doc(safe_gpu.GPUOwner)
    assert "_on_wait" not in shown
    assert "_command" not in shown
    assert "<default>" not in shown
    assert "timeout: float | str | DefaultTimeout | None = DEFAULT" in shown.replace("'", "")  # shown before 3.14


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
