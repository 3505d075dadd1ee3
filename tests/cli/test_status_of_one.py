"""``status --user``, ``--mine`` and ``--free``, and the GPUs that ``wait`` prints."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from safe_gpu.host import procfs


@pytest.fixture
def busy(state_dir: Path, command: Any, ground: Any) -> None:
    """This user has claimed GPUs 0 and 1, and somebody unknown GPU 5."""
    ground.hold(5)
    started = command.start("run", "-n", 2, "--", "sh", "-c", "echo up; read x", stdin=subprocess.PIPE)
    assert started.stdout.readline() == "up\n"


def test_free_gpus_one_on_a_line(busy: None, ask: Any) -> None:
    done = ask("status", "--free")
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n3\n4\n6\n7\n", "")


def test_nothing_is_free_where_the_claims_are_not_known(state_dir: Path, ask: Any) -> None:
    state_dir.mkdir()
    (state_dir / "claims").touch()
    done = ask("status", "--free")
    assert (done.returncode, done.stdout) == (73, "")
    assert "warning" in done.stderr


@pytest.mark.parametrize("option", ["--mine", "--user"])
def test_gpus_of_one_user(busy: None, ask: Any, option: str) -> None:
    arguments = [option] if option == "--mine" else [option, procfs.user_name(os.geteuid())]
    document = json.loads(ask("status", "--json", *arguments).stdout)
    holders = {one["index"]: one["claim"]["user"] for one in document["gpus"]}
    assert {0, 1} <= holders.keys() <= {0, 1, 5}  # ground's holder is this user too
    table = ask("status", *arguments).stdout
    assert ": 5 of 8 GPUs free" in table.splitlines()[0]
    assert not any(line.split()[:1] == ["2"] for line in table.splitlines())


def test_a_user_without_gpus(busy: None, ask: Any) -> None:
    assert json.loads(ask("status", "--json", "--user", "nobody").stdout)["gpus"] == []
    assert "none of these GPUs" in ask("status", "--user", "nobody").stdout
