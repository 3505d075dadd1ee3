"""Environment variables: one list of them, and those that would quietly cost safety are refused or warned of."""

import ast
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.claims import try_claim

import safe_gpu
from safe_gpu.coordination.state_dir import state_dir_path
from safe_gpu.errors import StateDirError, UnsatisfiableRequestError
from safe_gpu.settings import variables as settings

ROOT = Path(safe_gpu.__file__).parent


def test_every_variable_that_is_read_is_known() -> None:
    """Any text in the source that is a name of ours, whole, and any that stands in a sentence."""
    texts = [
        node.value
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    named = {name for text in texts for name in re.findall(r"\bSAFE_GPU_[A-Z_]*[A-Z]\b(?!_?\*)", text)}
    assert "SAFE_GPU_DIR" in named
    assert {name for name in named if not name.startswith("SAFE_GPU_TEST")} <= set(settings.VARIABLES)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("SAFE_GPU_TIMOUT", "SAFE_GPU_TIMEOUT"), ("safe_gpu_dir", "SAFE_GPU_DIR"), ("SAFE_GPU_XYZZY", "")],
)
def test_a_variable_that_nobody_reads(name: str, meant: str, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    assert settings.unknown([*settings.VARIABLES, "SAFE_GPU_TEST_X", "PATH", name]) == {name: meant}
    assert [settings.doubts({known: ""}) for known in settings.VARIABLES] == [[]] * len(settings.VARIABLES)
    monkeypatch.setenv(name, "1")
    with safe_gpu.claim_gpus(1, timeout=0):
        pass
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.getMessage().startswith(f"{name} is not a variable of safe_gpu and has no effect")
    assert (f"did you mean {meant}?" in record.getMessage()) == bool(meant)


@pytest.mark.parametrize(("name", "words"), sorted(settings.CHOICES.items()))
def test_a_word_that_is_not_understood(name: str, words: tuple[str, ...], monkeypatch, ground) -> None:
    for word in ("", *words):
        settings.check({name: word})
    for word in ("off", "Ignore", "0"):
        monkeypatch.setenv(name, word)
        match = f"{name}={word} is unknown: set it to .*{words[-1]}"
        with pytest.raises(UnsatisfiableRequestError, match=match) as caught:
            safe_gpu.claim_gpus(1, timeout=0)
        assert caught.value.value == word
    assert ground.claimed() == []


@pytest.mark.parametrize("path", ["state", "~/state", "../state"])
def test_a_relative_state_directory(path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAFE_GPU_DIR", path)
    for claim in (lambda: safe_gpu.claim_gpus(1, timeout=0), safe_gpu.get_free_gpus, state_dir_path):
        with pytest.raises(StateDirError, match=rf"SAFE_GPU_DIR={re.escape(path)} is relative.* absolute path"):
            claim()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("value", "path"), [("", "/tmp/safe-gpu"), ("/x//y/", "/x/y")])
def test_an_absolute_one(value: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DIR", value)
    assert state_dir_path() == path


# A simulated driver where there is a real one


@pytest.fixture
def real_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A file that stands for the kernel driver's."""
    monkeypatch.delenv("SAFE_GPU_TEST_SIMULATED")
    monkeypatch.setattr(settings, "_REAL_DRIVERS", {str(tmp_path / "version"): "NVIDIA"})
    (tmp_path / "version").write_text("NVRM version: 550.54.15\n")
    settings.real_driver.cache_clear()
    yield tmp_path / "version"
    settings.real_driver.cache_clear()


def test_simulated_gpus_beside_real_ones_are_warned_of_every_time(real_driver: Path, caplog) -> None:
    simulated = {"SAFE_GPU_DRIVER": "simulated:dgx-a100"}
    for _ in range(2):
        assert try_claim(1) == (0,)
    said = "SAFE_GPU_DRIVER=simulated:dgx-a100: these GPUs are simulated, and this host has a real"
    assert [record.getMessage().startswith(said) for record in caplog.records if record.levelno > 20] == [True] * 2
    for variables in ({"SAFE_GPU_DRIVER": "nvml"}, {}, {**simulated, "SAFE_GPU_TEST_SIMULATED": "1"}):
        assert settings.doubts(variables) == []
    real_driver.unlink()
    settings.real_driver.cache_clear()
    assert settings.doubts(simulated) == []


# The files of root on the machine that runs the tests


def test_no_test_goes_by_the_limits_of_this_machine(child: Callable[..., Any]) -> None:
    """Neither in this process, nor in its children, nor as another user, who is a fork of it."""
    code = "from safe_gpu.settings import variables\nsay(*variables.HOST_FILES)"
    etc = str(Path(settings.HOST_FILES[0]).parent)
    assert not Path(etc).exists()
    assert child(code).hear().split(" ") == [f"{etc}/config.ini", f"{etc}/policy.ini"] == list(settings.HOST_FILES)
    plain = child(code, env={"SAFE_GPU_TEST_ETC": ""}).hear()
    assert plain.split(" ") == ["/etc/safe-gpu/config.ini", "/etc/safe-gpu/policy.ini"]


def test_whose_limits_tests_go_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's files, for all users' claims of real GPUs."""
    own, simulated = {"SAFE_GPU_TEST_ETC": "/x"}, {"SAFE_GPU_DRIVER": "simulated:dgx-a100"}
    for variables, is_root, counts in (
        ({**own, **simulated}, False, True),
        ({**own, "SAFE_GPU_DRIVER": "nvml"}, False, False),
        ({**own, "SAFE_GPU_DRIVER": "nvml"}, True, True),
        (own, False, False),
        (simulated, True, False),
    ):
        for name in ("SAFE_GPU_TEST_ETC", "SAFE_GPU_DRIVER"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(settings, "is_root", lambda is_root=is_root: is_root)
        assert settings._directory_of_root() == ("/x" if counts else "/etc/safe-gpu")
