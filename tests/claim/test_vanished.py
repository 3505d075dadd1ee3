"""A state directory that goes away while claims wait, where its users cannot make it again."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.claims import claim

from safe_gpu.claim.search import search

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose directory it is")


@pytest.fixture
def var_lib(open_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which only root may make the state directory."""
    (open_tmp / "simulated").mkdir()
    (open_tmp / "simulated").chmod(0o1777)
    (open_tmp / "lib").mkdir(mode=0o755)
    monkeypatch.setenv("SAFE_GPU_SIMULATED_DIR", str(open_tmp / "simulated"))
    monkeypatch.setenv("SAFE_GPU_DIR", str(open_tmp / "lib" / "state"))
    return open_tmp / "lib"


@pytest.fixture
def waiter(var_lib: Path, as_user: Any) -> Callable[[], Any]:
    def start() -> Any:
        def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
            class Said(logging.Handler):
                def emit(self, record: logging.LogRecord) -> None:
                    say(record.getMessage())

            logger = logging.getLogger("waiter")
            logger.addHandler(Said(logging.WARNING))
            say(claim(1, timeout=None, logger=logger).devices_taken)

        return as_user(work, uid=4711)

    return start


def test_it_comes_back_within_a_minute(var_lib: Path, ground: Any, waiter: Any) -> None:
    ground.hold(*range(8))
    one = waiter()
    assert "for 1 GPU" in one.hear()
    (var_lib / "state").rename(var_lib / "gone")
    assert "waiting a minute for it" in one.hear()
    (var_lib / "gone").rename(var_lib / "state")
    ground.let_go()
    assert one.hear() == "[0]"


def test_it_does_not(var_lib: Path, ground: Any, waiter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_LONGEST_ABSENCE", 0.1)
    ground.hold(*range(8))
    one = waiter()
    assert "for 1 GPU" in one.hear()
    (var_lib / "state").rename(var_lib / "gone")
    assert "waiting a minute for it" in one.hear()
    assert one.hear().startswith("StateDirError: ")
    (var_lib / "gone").rename(var_lib / "state")
    ground.let_go()
