"""A GPU that is lost after a claim shifts CUDA's numbers: `status` and `bind` inside the claim notice it."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu.affinity.binding import undo

SHIFT = "CUDA_VISIBLE_DEVICES=1 now means GPU 2, which this claim does not hold, since GPU 0 is lost"


@pytest.fixture
def shell(fake_gpus: Any, command: Any) -> Any:
    """A shell that has claimed GPU 1 by ``run`` and reads its commands from a pipe."""
    fake_gpus.set(4)
    process = command.start("run", "--only", "1", "--", "sh", stdin=subprocess.PIPE, env=fake_gpus.env)

    def ask(line: str, lost: int | None = None) -> list[str]:
        if lost is not None:
            fake_gpus.change(lost, lost=1)
        process.stdin.write(f"{line} 2>&1; echo DONE $?\n")
        process.stdin.flush()
        lines = []
        while not lines or not lines[-1].startswith("DONE"):
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        return lines

    assert ask("echo $CUDA_VISIBLE_DEVICES") == ["1\n", "DONE 0\n"]  # it has claimed
    return ask


@pytest.mark.skipif(not os.path.exists("/sys/devices/system/cpu/cpu0/topology"), reason="needs /sys")
def test_status_and_bind_notice_it(shell: Any, fake_gpus: Any, command: Any) -> None:
    assert "means" not in "".join(shell("COLUMNS=200 safe-gpu status"))
    *lines, done = shell("COLUMNS=300 safe-gpu status", lost=0)
    assert f"warning: {SHIFT}" in "".join(lines)
    assert done == "DONE 0\n"
    said, brace, rest = "".join(shell("safe-gpu status --json")[:-1]).partition("{")
    assert SHIFT in said
    assert json.loads(brace + rest)["schema"] == 2
    assert "means" not in "".join(shell(f"CUDA_VISIBLE_DEVICES={fake_gpus.uuids[1]} safe-gpu status"))
    *lines, bound, _ = shell("safe-gpu bind -- echo bound")
    assert (SHIFT in "".join(lines), bound) == (True, "bound\n")
    outside = command.run("status", env={**fake_gpus.env, "CUDA_VISIBLE_DEVICES": "1"})
    assert "means" not in outside.stdout + outside.stderr


@pytest.fixture
def unbound() -> Iterator[None]:
    """Undo the binding of this process after the test."""
    yield
    undo()


def test_bind_in_python_notices_it(host: Any, unbound: None) -> None:
    safe_gpu.claim_gpus(1, only=1, affinity=None, timeout=0)
    assert SHIFT not in str(safe_gpu.bind())
    host.edits[host.uuids[0]] = {"lost": True}
    assert SHIFT in str(safe_gpu.bind())


def test_bind_makes_no_state_directory(host: Any, unbound: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    safe_gpu.bind()
    assert not Path(os.environ["SAFE_GPU_DIR"]).exists()
