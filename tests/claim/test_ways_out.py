"""Ways out of errors in Python, followed word by word: what the message says is done, and then the error is gone."""

import ast
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.gpus import PACKAGE_ROOT

import safe_gpu

ARGUMENTS = """
nb_gpus='2'  # a whole number of GPUs, (1) or more
nb_gpus=9  # has only (8) NVIDIA GPUs
timeout='soon'  # write seconds \\((90) or (90s)\\), (15m), (1h30m), (01:30:00), (2-12:00:00) \\(days first\\) or (inf)
timeout=-1  # pass (0) \\(no wait\\), a positive number, or (None)
hold_for='30'  # write ('30h'), ('30m') or ('30s')
hold_for=-1  # give at least a second, or (unknown)
min_memory=20.5  # or a size such as ('20GiB')
min_memory=20  # write ('20GiB')
model=5  # such as ('A100'), or a pattern: ('RTX\\*4090')
max_utilization=200  # such as (10)
near='x'  # choose ('numa') or ('nvlink')
share='x'  # or a size such as ('20GiB')
share=5  # write ('5GiB') or ('5%')
share=0.5  # write share=('50%')
share='200%'  # such as ('25%')
share='0.5GiB'  # (1 GiB) is the least
prefer=5  # such as ('H100,A100')
visible_as='x'  # use ("index") or ("uuid")
vendor='x'  # choose ('nvidia') or ('amd') or ('intel')
exclude='x'  # such as ('0,2'), ('4-7') or ('GPU-8932f937')
only=99  # here \\(GPU (0-7)\\)
affinity='x'  # choose one of (node), (socket), (exclusive), (core-complex), (all), (single)
affinity=False  # pass affinity=(None)
memory='x'  # choose one of (preferred), (bind)
placeholder_fn=5  # such as (PytorchPlaceholder\\(\\)), or leave it out
placeholder_fn=safe_gpu.NoPlaceholder  # pass (NoPlaceholder\\(\\)) instead
debug_sleep=-1  # pass (0) or a positive number
"""


def error_of(**arguments: Any) -> Exception | None:
    """What a claim with these arguments raises."""
    given = {"placeholder_fn": safe_gpu.NoPlaceholder(), "affinity": None, "timeout": 0, **arguments}
    try:
        safe_gpu.GPUOwner(**given).release_gpus()
    except safe_gpu.SafeGpuError as err:
        return err
    return None


def value_of(text: str) -> Any:
    """A value as a message writes it, with or without quotes."""
    if "Placeholder" in text:
        return eval(text, {"safe_gpu": safe_gpu, **vars(api.placeholders)})
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@pytest.mark.parametrize(("wrong", "way_out"), [line.split("  # ") for line in ARGUMENTS.split("\n")[1:-1]])
def test_a_value_that_a_message_names_is_accepted(wrong: str, way_out: str, dgx: Any) -> None:
    """It may still be one that this host cannot give, such as another vendor's GPUs."""
    argument, _, text = wrong.partition("=")
    error = error_of(**{argument: value_of(text)})
    found = re.search(way_out, str(error))
    assert found is not None, error
    for example in found.groups():
        error = error_of(**{argument: value_of(example)})
        assert error is None or not re.search("is not valid|is not a|unknown|means .*[?]", str(error)), error
        assert not isinstance(error, (safe_gpu.GPUAffinityError, TypeError))
        if isinstance(error, safe_gpu.PlaceholderError):
            assert "those of simulated:dgx-a100 are simulated" in str(error), (
                "a framework that is installed gets no more"
            )


def test_of_two_that_do_not_go_together_one_is_left_out(dgx: Any) -> None:
    for first, second, words in (
        ({"delegate": True}, {"share": "20GiB"}, "leave one of them out"),
        ({"min_memory": "2GiB"}, {"share": "20GiB"}, "ask for the larger of the two as a share"),
    ):
        error = error_of(**first, **second)
        assert error is not None
        assert words in str(error)
        assert error_of(**second) is None


def test_memory_is_asked_for_by_min_memory(dgx: Any) -> None:
    found = re.search(r"pass (min_memory)=('.*')$", str(error_of(memory="20GiB")))
    assert found is not None
    assert error_of(**{found[1]: value_of(found[2])}) is None


def test_gpus_of_another_vendor(dgx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument is left out, or the variable is unset: then the host is looked at."""
    error = str(error_of(vendor="amd"))
    assert error.endswith(": leave vendor= out, or unset SAFE_GPU_DRIVER")
    assert error_of() is None


def test_the_number_for_a_job(dgx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    error = str(error_of(nb_gpus="job"))
    found = re.search("set (SAFE_GPU_NB_GPUS)=N, or write nb_gpus=N", error)
    assert found is not None
    monkeypatch.setenv(found[1], "2")
    assert error_of(nb_gpus="job") is None
    monkeypatch.setenv(found[1], "two")
    error = str(error_of(nb_gpus="job"))
    assert error.endswith("set it to a whole number from 1 up, or unset it")


@pytest.mark.parametrize("name", [name for name, one in api.VARIABLES.items() if one.words])
def test_words_of_variables(name: str, dgx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "x")
    found = re.search(rf"{name}=x is unknown: set it to (.*), or unset it", str(error_of()))
    assert found is not None
    for word in re.split(", | or ", found[1]):
        monkeypatch.setenv(name, word)
        assert "is unknown" not in str(error_of())
    monkeypatch.delenv(name)
    assert error_of() is None


def test_a_simulated_host_that_there_is(dgx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, words in (("simulated:dgx", "with one of (.*)$"), ("cuda", "choose one of (.*), simulated:PRESET")):
        monkeypatch.setenv("SAFE_GPU_DRIVER", wrong)
        found = re.search(words, str(error_of()))
        assert found is not None
        for name in found[1].split(", "):
            prefix = "simulated:" if "with one" in words else ""
            if prefix:
                monkeypatch.setenv("SAFE_GPU_DRIVER", f"{prefix}{name}")
                assert error_of() is None or "none fits" in str(error_of())


# A claim that is there already


def test_a_second_claim(dgx: Any) -> None:
    safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder())
    with pytest.raises(safe_gpu.AlreadyClaimedError) as caught:
        safe_gpu.claim_gpus(2, safe_gpu.NoPlaceholder())
    function = re.search(r": (release_gpus)\(\) first", str(caught.value))
    assert function is not None
    getattr(safe_gpu, function[1])()
    safe_gpu.claim_gpus(2, safe_gpu.NoPlaceholder())
    with pytest.raises(safe_gpu.AlreadyClaimedError, match=r"release_gpus\(\) first"):
        safe_gpu.ensure_gpus(1, safe_gpu.NoPlaceholder())
    safe_gpu.release_gpus()
    safe_gpu.ensure_gpus(1, safe_gpu.NoPlaceholder())
    safe_gpu.release_gpus()


DAEMON = """
import os, safe_gpu
def claim(): return safe_gpu.ensure_gpus(1, safe_gpu.NoPlaceholder(), affinity=None)
claim()
os.closerange(3, 256)
try:
    claim()
except safe_gpu.SafeGpuError as err:
    say(err)
listen()
safe_gpu.release_gpus()
say(len(claim().gpus))
"""


def test_a_claim_whose_descriptors_were_closed(dgx: Any, child: Any) -> None:
    daemon = child(DAEMON)
    assert daemon.hear().endswith("call release_gpus(), and claim again when that is done")
    daemon.tell("do that")
    assert daemon.hear() == "1"


def test_inside_a_claim(dgx: Any, command: Any) -> None:
    """It asks for no more than it holds, and is not delegated again."""
    with safe_gpu.GPUOwner(2, safe_gpu.NoPlaceholder(), affinity=None, delegate=True):
        code = "import safe_gpu; safe_gpu.claim_gpus({}, safe_gpu.NoPlaceholder(), affinity=None, timeout=0{})"

        def claim(number: int, more: str = "") -> str:
            words = [sys.executable, "-c", code.format(number, more)]
            env = {**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)}
            return subprocess.run(words, env=env, capture_output=True, text=True, timeout=60).stderr

        assert "claim without it" in claim(1, ", delegate=True")
        assert claim(3) != ""
        assert claim(1) == claim(2) == ""


def test_a_worker_that_inherited_what_another_one_is_to_see(command: Any, dgx: Any) -> None:
    variables = {"SAFE_GPU_EXPECT": dgx.uuids[3], "CUDA_VISIBLE_DEVICES": "0"}
    done = command.run("bind", "--", "true", env=variables)
    assert done.returncode != 0
    found = re.search("or unset (SAFE_GPU_EXPECT) if it was inherited by mistake", done.stderr)
    assert found is not None
    del variables[found[1]]
    assert command.run("bind", "--", "true", env=variables).returncode == 0


# CUDA in this process

INITIALIZED = """
import ctypes, sys
import safe_gpu
def claim(): safe_gpu.claim_gpus(1, affinity=None, timeout=0)
def start(): assert ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
for step in sys.argv[1:]:
    try:
        {"claim": claim, "start": start}[step]()
    except safe_gpu.CudaInitializedError as err:
        print(err)
"""


def test_the_claim_comes_first(fake_gpus: Any) -> None:
    said = fake_gpus.python(INITIALIZED, "start", "claim", CUDA_VISIBLE_DEVICES="0,1")
    assert "call claim_gpus() before torch.cuda.is_available()" in said
    assert said.endswith(", or start a new process\n")
    assert fake_gpus.python(INITIALIZED, "claim", "start") == ""


FORKED = """
import multiprocessing, sys
import safe_gpu
def claim():
    try:
        safe_gpu.claim_gpus(1, affinity=None, timeout=0)
    except safe_gpu.CudaInitializedError as err:
        print(err, flush=True)
if __name__ == "__main__":
    safe_gpu.claim_gpus(1, affinity=None)
    safe_gpu.release_gpus()
    child = multiprocessing.get_context(sys.argv[1]).Process(target=claim)
    child.start(); child.join()
"""


def test_a_child_is_spawned(fake_gpus: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FORKED)

    def run(method: str) -> str:
        words = [sys.executable, str(script), method]
        done = subprocess.run(words, env=fake_gpus.env, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr
        return done.stdout

    methods = re.search(r"multiprocessing's '(\w+)' \(or '(\w+)'\) method", run("fork"))
    assert methods is not None
    for method in methods.groups():
        assert run(method) == ""


# Packages


def test_what_pip_is_to_install_is_what_the_package_says() -> None:
    """Each name behind ``pip install`` is of a dependency, of an extra, or of a framework."""
    known = {re.split(r"[^\w-]", line)[0] for line in metadata.requires("safe-gpu") or ()}
    known |= {"cupy-cuda12x", "jax", "pycuda", "tensorflow", "torch"}
    named = set()
    for path in Path(safe_gpu.__file__).parent.rglob("*.py"):
        for words in re.findall(r"pip install ((?:-\S+ )*[a-z'][\w'>=.\[\]-]*)", path.read_text()):
            named.add(re.split(r"[^\w-]", words.split()[-1].strip("'"))[0])
    assert {"nvidia-ml-py", "filelock", "matplotlib", "ray"} <= named <= known
    extras = {line.split(";")[0].strip() for line in metadata.requires("safe-gpu") or () if "extra" in line}
    assert "ray>=2.40" in extras


OF_FRAMEWORKS = {name for name in safe_gpu.__all__ if name.endswith("Placeholder")} - {
    *("CudaPlaceholder", "NoPlaceholder"),
    "PyCudaPlaceholder",  # it imports a module inside the package
}


@pytest.mark.parametrize("kind", sorted(OF_FRAMEWORKS))
def test_a_framework_that_is_installed_or_left_out(kind: str, dgx: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """The module that a package of this name brings is imported then."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [str(tmp_path)])
        placeholder = getattr(safe_gpu, kind)()
        error = error_of(placeholder_fn=placeholder)
        if not isinstance(error, api.MissingPackageError):
            pytest.skip(f"installed here: {error}")
        found = re.search(r"needs (\w+), which is not installed: pip install (\S+), or (.*)$", str(error))
        assert found is not None
        (tmp_path / f"{found[1]}.py").write_text("")
        assert not isinstance(error_of(placeholder_fn=placeholder), api.MissingPackageError)
        sys.modules.pop(found[1], None)
    assert error_of(placeholder_fn=None) is None
