"""The commands on a machine with a real GPU."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from safe_gpu.runtimes.cuda import same_device

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SEEN = "from safe_gpu.runtimes import runtime as library_child; print(*library_child.visible_in_child())"


@pytest.mark.parametrize("visible_as", ["index", "uuid"])
def test_the_command_of_run_sees_the_claimed_gpu_alone(gpu: Any, command: Any, visible_as: str) -> None:
    done = command.start("run", "--only", gpu.uuid, "--visible-as", visible_as, "--", sys.executable, "-c", SEEN)
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0, err
    (seen,) = out.split()
    assert same_device(seen, gpu.uuid)


def test_status_shows_the_claim_and_its_end(gpu: Any, command: Any, claimer: Any, eventually: Any) -> None:
    def shown() -> Any:
        status = command.run("status", "--json")
        assert status.returncode == 0, status.stderr
        return next(one for one in json.loads(status.stdout)["gpus"] if one["uuid"] == gpu.uuid)

    assert shown()["state"] in ("free", "display")
    process = claimer("claim(uuid); say('holds'); listen()", says="holds")
    during = shown()
    assert during["state"] in ("claimed", "display")
    assert during["claim"]["pid"] == process.pid
    process.kill()
    eventually(lambda: shown()["claim"] is None)


def test_a_race_on_this_machine(gpu: Any, command: Any) -> None:
    process = command.start("demo")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    assert "Verdict:" in out
    assert "A race on a simulated host" not in out.partition("Verdict:")[0]
