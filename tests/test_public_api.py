"""What the package offers, what importing it costs, its errors, packages that are missing, that code for the older
package runs unchanged, and how people read ages, sizes and lists of GPUs."""

import ast
import copy
import importlib
import inspect
import logging
import os
import pickle
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import filelock
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import api
from support.real import long

import safe_gpu
from safe_gpu import errors
from safe_gpu import safe_gpu as old

ROOT = Path(safe_gpu.__file__).parents[1]
CONTRACT = """
claim_gpus ensure_gpus release_gpus gpu_owner GPUOwner get_free_gpus
PytorchPlaceholder TensorflowPlaceholder PyCudaPlaceholder CupyPlaceholder JaxPlaceholder CudaPlaceholder NoPlaceholder
pytorch_placeholder tensorflow_placeholder
set_affinity Mode Scope Multithreading GPUAffinityError bind placement wrap_command AffinityOptions
SafeGpuError NoDriverError NvidiasmiError NotEnoughGpusError ClaimTimeout GpuContendedError UnsatisfiableRequestError
AlreadyClaimedError LockTimeout StateDirError CudaInitializedError PlaceholderError WrongDeviceError
""".split()


HEAVY = "torch tensorflow numpy pynvml filelock ctypes subprocess logging asyncio"


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import safe_gpu", HEAVY),
        ("from safe_gpu import SafeGpuError, NotEnoughGpusError, gpu_owner, claim_gpus, CudaPlaceholder", HEAVY),
        (
            "import safe_gpu.cli",
            "filelock pynvml logging subprocess json ctypes torch threading difflib shutil dataclasses",
        ),
        (
            "import safe_gpu; safe_gpu.claim_gpus(1, timeout=0); safe_gpu.release_gpus()",
            "torch pynvml numpy",  # filelock loads subprocess on some Pythons
        ),
    ],
)
def test_what_is_loaded(code: str, heavy: str) -> None:
    command = [sys.executable, "-S", "-c", f"{code}; import sys; print(*sys.modules)"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{Path(filelock.__file__).parents[1]}"}
    loaded = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert not [name for name in loaded if name in heavy.split()]
    assert code != "import safe_gpu" or not [name for name in loaded if name.startswith("safe_gpu.")]


REFUSAL = "safe_gpu needs CPython, and this is pypy: start it with CPython's python3"


def on_pypy(directory: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """What a Python does with these arguments in this directory if it takes itself for PyPy."""
    (directory / "sitecustomize.py").write_text("import sys; sys.implementation.name = 'pypy'")
    env = {**os.environ, "PYTHONPATH": f"{directory}:{ROOT}"}
    return subprocess.run(
        [sys.executable, *command], cwd=directory, env=env, capture_output=True, text=True, timeout=60
    )


def test_a_program_on_another_python_than_cpython_gets_an_import_error(tmp_path: Path) -> None:
    done = on_pypy(tmp_path, "-c", "import safe_gpu.cli")
    assert done.stderr.splitlines()[-1] == f"ImportError: {REFUSAL}"


@pytest.mark.parametrize("command", [("-m", "safe_gpu", "status"), ("./safe-gpu", "status")])
def test_the_command_on_another_python_is_refused_by_one_sentence(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "safe-gpu").write_text("from safe_gpu.cli import main; main()")
    done = on_pypy(tmp_path, *command)
    assert (done.returncode, done.stderr) == (70, f"safe-gpu: {REFUSAL}\n")


def test_the_metadata_says_cpython() -> None:
    pyproject = ROOT / "pyproject.toml"
    if pyproject.exists():
        assert "Implementation :: CPython" in pyproject.read_text()


def test_every_name_is_there_and_explained() -> None:
    missing = set(CONTRACT) - set(safe_gpu.__all__)
    assert missing == set(), "add them to safe_gpu/__init__.py, below TYPE_CHECKING and in the table of names"
    assert set(safe_gpu.__all__) <= set(dir(safe_gpu))
    for name in set(safe_gpu.__all__) - {"pytorch_placeholder", "tensorflow_placeholder"}:
        value = getattr(safe_gpu, name)
        explained = inspect.getdoc(value)
        if isinstance(value, type):
            explained = vars(value).get("__doc__")  # its own, not that of a base
        assert not callable(value) or explained, f"{name} is not explained"


def test_all_names_are_imported_by_a_star_and_unknown_ones_are_not_there() -> None:
    namespace: dict[str, object] = {}
    exec("from safe_gpu import *", namespace)
    assert set(safe_gpu.__all__) <= set(namespace)
    with pytest.raises(AttributeError, match=r"claimgpus'$") as caught:
        safe_gpu.claimgpus  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("claimgpus", safe_gpu), "Python may suggest another one"


def test_who_writes_the_beginning_of_a_name_is_told_the_whole() -> None:
    code = "import safe_gpu; safe_gpu.claim(1)"  # elsewhere: here the package of that name has been imported
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    told = "AttributeError: module 'safe_gpu' has no attribute 'claim': write claim_gpus"
    assert done.stderr.splitlines()[-1] == told, "once: Python adds nothing"


@pytest.mark.parametrize("name", [name for name in api.COMMANDS if name not in safe_gpu.__all__])
def test_a_command_that_is_called_as_a_function_is_named(name: str) -> None:
    """Some commands are modules too, once something has imported them."""
    with pytest.raises(AttributeError, match=f": safe-gpu {name} is a command of the shell"):
        safe_gpu.__getattr__(name)


@long
def test_a_misspelt_name_is_an_error_for_a_type_checker(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text("import safe_gpu\n\nsafe_gpu.claim_gpus(2)\nsafe_gpu.claim_gpu(2)\nprint(safe_gpu.gpu_owner)\n")
    options = ["--cache-dir", str(tmp_path / "cache"), "--follow-imports=silent", "--config-file="]
    command = [sys.executable, "-m", "mypy", *options, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert re.findall(r"program.py:([0-9]+): error: .*\[([a-z-]+)\]", done.stdout) == [("4", "attr-defined")]


def test_a_checker_knows_the_names_that_are_there() -> None:
    tree = ast.parse(Path(safe_gpu.__file__).read_text())
    [checked] = [one for one in tree.body if isinstance(one, ast.If) and ast.unparse(one.test) == "TYPE_CHECKING"]
    homes = {}
    for statement in checked.body:
        if isinstance(statement, ast.ImportFrom):
            homes |= {alias.asname: statement.module for alias in statement.names}
        elif isinstance(statement, ast.AnnAssign):
            homes[ast.unparse(statement.target)] = "claim.functions"
    assert homes == safe_gpu._HOME_OF, (
        "each name stands in safe_gpu/__init__.py below TYPE_CHECKING and in the table, with one module"
    )


def public_classes() -> set[type[Any]]:
    """The classes that a program can name, errors and those of claims across hosts too, with their bases of ours."""
    named = [getattr(safe_gpu, name) for name in safe_gpu.__all__]
    named += [*vars(errors).values(), api.ClusterClaim]
    classes = {base for one in named if isinstance(one, type) for base in one.__mro__}
    return {one for one in classes if one.__module__.startswith("safe_gpu.")}


def untyped_attributes(kind: type[Any]) -> list[str]:
    """Its public attributes whose type only the call tells that makes them. Checkers infer different types then."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    untyped = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Call, ast.Attribute)):
            names = [target.attr for target in node.targets if isinstance(target, ast.Attribute)]
            untyped += [name for name in names if not name.startswith("_")]
    typed = {
        ast.unparse(node.target).removeprefix("self.") for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)
    }
    return [name for name in untyped if name not in typed]


@pytest.mark.parametrize(
    "kind", sorted(public_classes(), key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__
)
def test_a_checker_knows_the_types_of_public_attributes(kind: type[Any]) -> None:
    assert untyped_attributes(kind) == []


def unnamed_placeholders() -> set[str]:
    """The placeholders that no caller can name, without the default on AMD GPUs, which nobody needs to name."""
    kinds = {api.placeholders.Base}
    for _ in range(4):
        kinds |= {subclass for kind in kinds for subclass in kind.__subclasses__()}
    bases = {api.placeholders.Base, api.placeholders.LibraryPlaceholder}
    names = {kind.__name__ for kind in kinds - bases if kind.__module__.startswith("safe_gpu.")}
    return names - {"HipPlaceholder"} - (set(safe_gpu.__all__) & set(CONTRACT))


def test_each_placeholder_has_a_public_name() -> None:
    advice = "add the name to safe_gpu/__init__.py, twice, and to CONTRACT of this file"
    assert unnamed_placeholders() == set(), advice

    class NewPlaceholder(api.placeholders.Base):
        """Of a framework that was added, and not to the names of the package."""

    NewPlaceholder.__module__ = "safe_gpu.runtimes.placeholders"
    assert unnamed_placeholders() == {"NewPlaceholder"}
    NewPlaceholder.__module__ = __name__


def test_the_arguments_of_a_claim() -> None:
    positional = {"nb_gpus": 1, "placeholder_fn": None, "logger": None, "debug_sleep": 0.0}
    by_name = {
        "timeout": api.DEFAULT,
        "hold_for": api.DEFAULT,
        "affinity": "node",
        "visible_as": "index",
        "delegate": False,
    }
    none = "memory min_memory model max_utilization near prefer share vendor".split()
    expected = {**positional, **by_name, **dict.fromkeys(none), "exclude": (), "only": ()}
    for callable_ in (safe_gpu.claim_gpus, safe_gpu.ensure_gpus, safe_gpu.GPUOwner):
        signature = inspect.signature(callable_)
        parameters = {name: one for name, one in signature.parameters.items() if not name.startswith("_")}
        defaults = {name: one.default for name, one in parameters.items()}
        assert defaults == expected, "write what is new into this test, in the words of the reference"
        assert [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD] == [*positional]
        assert callable_ is safe_gpu.GPUOwner or signature.return_annotation == "GPUOwner"


def test_each_argument_of_a_claim_is_explained() -> None:
    lines = re.findall(r"^ {4}([a-z_, ]+):", inspect.getdoc(safe_gpu.claim_gpus) or "", re.MULTILINE)
    explained = [name for line in lines for name in line.split(", ")]
    missing = [name for name in inspect.signature(safe_gpu.claim_gpus).parameters if name not in explained]
    assert missing == [], "explain them under Args in the docstring of claim_gpus"


def test_elsewhere_than_on_linux_the_import_works_and_a_claim_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(safe_gpu.UnsatisfiableRequestError, match="Linux only, and this is darwin"):
        safe_gpu.claim_gpus(1)


def test_the_version_is_the_distributions_and_it_is_typed() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'version = "{safe_gpu.__version__}"' in text
    assert (Path(safe_gpu.__file__).parent / "py.typed").exists()


# The older package's module


def test_both_modules_speak_of_the_same_things() -> None:
    for name in set(old.__all__) & set(safe_gpu.__all__):
        assert getattr(old, name) is getattr(safe_gpu, name)
    assert errors.NvidiasmiError is errors.NoDriverError is safe_gpu.NvidiasmiError


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """An owner that a test dropped goes with it."""
    yield
    if api.owner.current_owner() is not None:
        api.owner.current_owner().release_gpus()


def visible() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def test_claiming_one_gpu() -> None:
    assert old.gpu_owner is None
    old.claim_gpus()
    assert old.gpu_owner.devices_taken == [0]
    assert (type(old.gpu_owner.devices_taken[0]), visible(), len(old.gpu_owner.placeholders)) == (int, "0", 1)
    assert safe_gpu.gpu_owner is old.gpu_owner


def test_all_four_arguments_by_position(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mine")
    made = []

    def occupy(device_no: int) -> object:
        made.append((device_no, visible()))
        return f"pointer {device_no}"

    old.claim_gpus(2, occupy, logging.getLogger("mine"), 0.0)
    assert made == [(0, "0,1"), (1, "0,1")]
    assert old.gpu_owner.placeholders == ["pointer 0", "pointer 1"]
    assert {record.name for record in caplog.records} == {"mine"}
    old.release_gpus()  # the placeholder has no release(): nothing to call


def test_the_default_of_the_older_package_can_be_passed_where_torch_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(zeros=lambda shape, device: device))
    old.claim_gpus(2, placeholder_fn=old.PytorchPlaceholder(logger=logging))
    assert old.gpu_owner.placeholders == ["cuda:0", "cuda:1"]


def test_the_owner_can_be_constructed_and_released_explicitly(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    own = old.GPUOwner(nb_gpus=2, logger=logging, debug_sleep=0.0)
    assert own.devices_taken == [0, 1]
    assert {record.name for record in caplog.records} == {"root"}, "the logging module is a logger, too"
    assert old.gpu_owner is None
    own.release_gpus()
    assert old.GPUOwner(2).devices_taken == [0, 1], "they were given back"


def test_all_names_are_there_by_any_way_of_importing() -> None:
    names = (
        "LOCK_FILENAME, NvidiasmiError, get_free_gpus, PytorchPlaceholder, TensorflowPlaceholder, PyCudaPlaceholder, "
        "GPUOwner, claim_gpus, release_gpus, gpu_owner, pytorch_placeholder, tensorflow_placeholder"
    )
    exec(f"from safe_gpu.safe_gpu import {names}; import safe_gpu.safe_gpu as s; s.claim_gpus", {})
    assert importlib.import_module("safe_gpu.safe_gpu") is old


# Errors: one root, the bases that callers catch, data that survives pickling


VERDICTS = (
    api.GpuVerdict(api.Gpu(0, "GPU-0"), "claimed", "claimed by process 7", 7, "ada", api.Holder(7, "ada", start=12)),
)
PROCESSES = (api.GpuProcess(7, memory_used=1 << 30),)
TOO_FEW = {"nb_gpus": 2, "verdicts": VERDICTS}
PATH = {"path": "/tmp/x"}

# Class, its own attributes, the classes by which callers catch it. The older package raised RuntimeError.
TABLE: list[tuple[type[api.SafeGpuError], dict[str, Any], tuple[type[BaseException], ...]]] = [
    (errors.SafeGpuError, {}, (Exception,)),
    (errors.NoDriverError, {"driver": "nvml"}, ()),
    (errors.NotEnoughGpusError, TOO_FEW, (RuntimeError,)),
    (errors.ClaimTimeout, {**TOO_FEW, "timeout": 1.5}, (errors.NotEnoughGpusError, TimeoutError, RuntimeError)),
    (errors.GpuContendedError, {**TOO_FEW, "uuid": "GPU-0", "processes": PROCESSES}, (errors.NotEnoughGpusError,)),
    (errors.UnsatisfiableRequestError, {"value": 9, "verdicts": VERDICTS}, (ValueError, RuntimeError)),
    (errors.AlreadyClaimedError, {"devices": (0, 1)}, (RuntimeError,)),
    (errors.LockTimeout, {**PATH, "errno": 11, "pid": 7, "user": "ada", "overloaded": True}, (TimeoutError, OSError)),
    (errors.StateDirError, {**PATH, "errno": 28}, (OSError,)),
    (errors.CudaInitializedError, {"visible": ("GPU-0",)}, (RuntimeError,)),
    (errors.PlaceholderError, {"device_no": 1, "uuid": "GPU-0"}, (RuntimeError,)),
    (errors.PolicyError, {**PATH, "line": 3}, (RuntimeError,)),
    (errors.WrongDeviceError, {"device_no": 1, "expected": "GPU-0", "actual": "GPU-1"}, (RuntimeError,)),
    (errors.GPUAffinityError, {}, (ValueError, RuntimeError)),
    (errors.HolderLostError, {"host": "node1"}, (RuntimeError,)),
    (errors.MissingPackageError, {}, (ImportError,)),
    (
        errors.MissingDriverPackageError,
        {"driver": "nvml", "install": "pip"},
        (errors.NoDriverError, errors.MissingPackageError),
    ),
    (api.CudaCallError, {"call": "cuInit", "code": 3, "name": "CUDA_ERROR_NOT_INITIALIZED"}, ()),
]


def test_the_table_is_complete() -> None:
    classes = {value for name, value in vars(errors).items() if inspect.isclass(value) and name[0] != "_"}
    assert {one for one in classes if issubclass(one, api.SafeGpuError)} == {row[0] for row in TABLE} - {
        api.CudaCallError
    }


@pytest.mark.parametrize(("kind", "attributes", "bases"), TABLE)
def test_bases_message_and_attributes_which_pickling_keeps(kind: Any, attributes: dict[str, Any], bases: Any) -> None:
    assert all(issubclass(kind, base) for base in (api.SafeGpuError, *bases))
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in attributes.items()}
    error = kind("it is so: do that", **lists)
    assert str(error) == error.message == "it is so: do that"
    assert {name: getattr(error, name) for name in attributes} == attributes, "sequences come out as tuples"
    assert (str(kind()), vars(kind()).keys()) == ("", {"message", *attributes})
    assert list(inspect.signature(kind).parameters) == ["message", *attributes]
    with pytest.raises(TypeError, match="nb_gpu'"):
        kind("x", **{**attributes, "nb_gpu": 1})
    error.hint = "extra"
    error.message = "n1: it is so"  # as an engine adds the host
    pickled = [pickle.dumps(error, protocol) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    for clone in (*map(pickle.loads, pickled), copy.copy(error), copy.deepcopy(error)):
        assert (type(clone), str(clone)) == (kind, "n1: it is so")
        assert vars(clone) == {"message": "n1: it is so", "hint": "extra", **attributes}


def test_what_may_be_missing_or_added() -> None:
    assert pickle.loads(pickle.dumps(errors.StateDirError("closed", path="/tmp/x"))).errno is None
    if sys.version_info >= (3, 11):
        error = errors.NotEnoughGpusError("busy")
        error.add_note("seen on node1")
        assert pickle.loads(pickle.dumps(error)).__notes__ == ["seen on node1"]


# Packages that are missing or too old


MISSING, OLDER = "raise ModuleNotFoundError('No pynvml', name='pynvml')", "__version__ = '0.1'"


@pytest.mark.parametrize(
    ("text", "driver", "line", "code"),
    [
        (MISSING, "nvml", "run -- /bin/true", 70),
        (OLDER, "nvml", "status", 70),
        (OLDER, "auto", "wait", 69),
        (MISSING, "auto", "status", 69),
    ],
)
def test_nvidia_ml_py_is_missing_or_too_old(text: str, tmp_path: Path, line: str, driver: str, code: int) -> None:
    """That nothing but the package is missing is known where NVML was chosen."""
    (tmp_path / "pynvml.py").write_text(text)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "SAFE_GPU_DRIVER": driver, "PATH": str(tmp_path)}
    command = [sys.executable, "-m", "safe_gpu", *line.split()]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert (done.stdout, done.stderr.count("\n"), "nvidia-ml-py" in done.stderr) == ("", 1, True)


CLAIM = """
import safe_gpu
try:
    safe_gpu.claim_gpus(1, timeout=0)
except safe_gpu.SafeGpuError as err:
    print(type(err).__name__, err, safe_gpu.get_free_gpus())
"""


@pytest.mark.parametrize(
    ("text", "is_used"),
    [("raise ModuleNotFoundError('No filelock', name='filelock')", False), ("__version__ = '0.1'", True)],
)
def test_filelock_is_missing_or_too_old(text: str, is_used: bool, tmp_path: Path, dgx) -> None:
    """A claim names the package, and claims nothing; what only looks needs none."""
    if is_used:
        safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), affinity=None).release_gpus()
    (tmp_path / "filelock.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    sentence = "filelock is missing or too old ("
    for arguments, code, said in (
        ("-m safe_gpu run -- true", 70, sentence),
        ("-m safe_gpu doctor", 1, f"failed Python packages: {sentence}"),
        ("-m safe_gpu status", 0, ": 8 of 8 GPUs free"),
    ):
        command = [sys.executable, *arguments.split()]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        shown = " ".join((done.stdout + done.stderr).split())
        assert (done.returncode, said in shown) == (code, True), done
        assert "Traceback" not in shown
    done = subprocess.run([sys.executable, "-c", CLAIM], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(f"MissingPackageError the Python package {sentence}"), done
    assert done.stdout.endswith("pip install -U filelock ['0', '1', '2', '3', '4', '5', '6', '7']\n")
    assert dgx.tickets() == []


# Ages, sizes, lists of GPUs and columns, as people read them


def test_ages() -> None:
    for seconds, text, short in (
        (-5, "0 s", "0s"), (59.9, "59 s", "59s"), (60, "1 min", "1m"), (12_000, "3 h 20 min", "3h20m"),
        (86_399, "23 h 59 min", "23h59m"), (86_400, "1 d", "1d0h"), (187_200, "2 d 4 h", "2d4h"),
    ):  # fmt: skip
        assert (api.format_age(seconds), api.short_age(seconds)) == (text, short)


def test_a_moment_tells_its_day_where_that_is_not_clear() -> None:
    now = time.mktime((2026, 6, 10, 12, 0, 0, 0, 0, -1))  # a Wednesday
    hour = 3600
    for moment, text in (
        (now + 18 * hour - 60, "05:59"),
        (now + 18 * hour, "Thu 06:00"),
        (now - 18 * hour, "Tue 18:00"),
        (now + 6 * 24 * hour - 60, "Tue 11:59"),
        (now + 6 * 24 * hour, "2026-06-16"),
        (now - 6 * 24 * hour, "2026-06-04"),
    ):
        assert api.clock(moment, now) == text


def test_a_line_may_be_as_wide_as_there_is_room() -> None:
    for width, lines in ((9, ["free now", "if idle"]), (8, ["free now", "if idle"]), (7, ["free", "now if", "idle"])):
        assert api.wrapped("free now if idle", width) == lines


@given(st.sets(st.integers(0, 40)))
def test_a_range_names_each_gpu_once(indices: set[int]) -> None:
    named: list[int] = []
    for part in filter(None, api.gpu_ranges(map(str, sorted(indices))).split(",")):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(indices)
    assert api.gpu_ranges("0:0 0:1 0:2 1:0 1:1 2 3".split()) == "0:0-2,1:0,1:1,2,3"


def test_sizes_as_people_read_them() -> None:
    sizes = [0, 400 << 20, 1 << 30, int(31.2 * (1 << 30)), 80 << 30]
    assert [api.format_bytes(count) for count in sizes] == ["0 MiB", "400 MiB", "1 GiB", "31.2 GiB", "80 GiB"]


def test_a_column_is_as_wide_as_what_stands_in_it() -> None:
    numbers = api.Column("N", ["7", "123"], right=True)
    assert [numbers.padded(cell) for cell in (numbers.title, *numbers.cells)] == ["  N", "  7", "123"]
    names = api.Column("USER", ["a", "averylongname"], most=8)
    assert [names.padded(cell) for cell in (names.title, *names.cells)] == ["USER    ", "a       ", "averyl.."]
    assert api.Column("JOB", ["", ""]).width == 0


def test_wide_letters_take_two_columns_and_characters_without_width_are_cut_too() -> None:
    assert (api.display_width("日本a"), api.display_width("e\u0301")) == (5, 1)
    assert len(api.cut("a" + "\u0301" * 28_000, 8)) <= 24
    assert [api.cut("abc", width) for width in (0, 1, 2, 3)] == ["", ".", "..", "abc"]


def test_a_gpu_is_printed_as_the_expression_that_makes_it_without_defaults() -> None:
    assert repr(api.Gpu(3, "GPU-a", "NVIDIA A100")) == "Gpu(index=3, uuid='GPU-a', name='NVIDIA A100')"
    process = api.GpuProcess(7, memory_used=1 << 30)
    for gpu in api.find_preset("mig-h100").gpus:
        gpu = gpu._replace(processes=(process,), memory_beside=None)
        assert eval(repr(gpu), {"Gpu": api.Gpu, "GpuProcess": api.GpuProcess}) == gpu
