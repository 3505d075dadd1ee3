"""What all tests share stands in ``support``, a module for each concern; here is what concerns the run as a whole."""

import ctypes
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

pytest_plugins = ["support.gpus", "support.guard", "support.processes", "support.state", "support.terminals"]

# A job that a shell put in the background ignores SIGINT, one under nohup SIGHUP, and so would all that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# With this variable each of a thousand children compiles the package anew, which takes as long as all that is tested.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    sys.dont_write_bytecode = False

# What the administrator of this machine has set counts for real programs of other users too: it is hidden from them.
if os.geteuid() == 0 and os.path.isdir("/etc/safe-gpu") and ctypes.CDLL(None).unshare(0x20000) == 0:  # CLONE_NEWNS
    hide = "mount --make-rslave / && mount -t tmpfs -o mode=755 tmpfs /etc/safe-gpu"
    subprocess.run(hide, shell=True, check=False)

# How long an example takes says nothing on a busy machine.
with suppress(ImportError):  # the tests marked gpu do without hypothesis
    from hypothesis import settings

    settings.register_profile("unhurried", deadline=None)
    settings.load_profile("unhurried")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m gpu``, import only the modules that have such tests: a host with a GPU may lack what others need."""
    if config.getoption("markexpr").strip() != "gpu":
        return None
    if collection_path.is_dir():
        files = list(collection_path.rglob("test_*.py"))
    elif collection_path.suffix != ".py" or collection_path.name == "conftest.py":
        return None
    else:
        files = [collection_path]
    return None if any("mark.gpu" in file.read_text() for file in files) else True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """With ``-n auto``, one process more than cores: some tests mostly wait for others."""
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else len(os.sched_getaffinity(0)) + 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", help="run the tests in the random order of this seed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest test of the last file goes first: no process is to work on alone at the end."""
    items.sort(key=lambda item: item.path.name != "test_tools.py")
    if config.getoption("shuffle") is not None:
        random.Random(config.getoption("shuffle")).shuffle(items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker and not real_gpu(*marker.args):
        pytest.skip(f"needs a real {'AMD' if marker.args else 'NVIDIA'} GPU")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line in place of a page of skips: how many by cause, which is how their reasons begin."""
    reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ())]
    causes = Counter(re.split("[,:]", reason)[0] for reason in reasons)
    if causes and not terminalreporter.hasopt("skipped"):
        counts = ", ".join(f"{cause} ({count})" for cause, count in causes.most_common())
        terminalreporter.write_line(f"Skipped: {counts}. More: pytest -rs")


def real_gpu(vendor: str = "nvidia") -> bool:
    """Whether this machine has a GPU of "nvidia" or "amd", or fakes play one (``tests/gpu/test_on_fakes.py``)."""
    if vendor == "amd":
        return os.path.exists(f"{os.environ.get('SAFE_GPU_FSROOT', '')}/dev/kfd")
    if "FAKE_GPU_DIR" in os.environ or os.path.exists("/dev/dxg"):
        return True
    return any(name[6:].isdigit() for name in os.listdir("/dev") if name.startswith("nvidia"))
