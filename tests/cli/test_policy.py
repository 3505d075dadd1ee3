"""``safe-gpu policy``: what applies to the user who asks, as a table and for programs."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from safe_gpu import GPUOwner, NoPlaceholder

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose file a policy must be")

TEXT = """\
[default]
max_gpus = 4
max_hold = 1d
[group root]
max_wait = 90
[user root]
max_gpus = 2
"""


@pytest.fixture
def path(rules: Any) -> Path:
    return rules(TEXT)


def test_it_shows_each_value_and_its_section(path: Path, ask: Any) -> None:
    with GPUOwner(1, NoPlaceholder(), affinity=None):
        done = ask("policy")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        f"{path}, for root",
        "",
        "max_gpus          2            [user root]",
        "max_hold          1 d          [default]",
        "default_hold      unset",
        "max_wait          90 s         [group root]",
        "idle_report_after unset",
        "weight            unset",
        "",
        "You hold 1 of your 2 GPUs.",
    ]


def test_for_programs(path: Path, ask: Any) -> None:
    assert json.loads(ask("policy", "--json").stdout) == {
        "schema": 1,
        "file": str(path),
        "user": "root",
        "uid": 0,
        "exempt": False,
        "held": 0,
        "max_gpus": 2,
        "max_hold": 86400.0,
        "default_hold": None,
        "max_wait": 90.0,
        "idle_report_after": None,
        "weight": None,
        "sections": {"max_gpus": "[user root]", "max_hold": "[default]", "max_wait": "[group root]"},
    }


def test_without_limits(path: Path, ask: Any) -> None:
    path.write_text("[default]\nmax_gpus = 1")
    assert ask("policy").stdout.startswith("root is exempt: ")
    path.chmod(0o666)
    ignored = ask("policy")
    assert ignored.stdout == f"{path} is ignored: nothing is limited\n"
    assert "mode 0666" in ignored.stderr
    path.unlink()
    assert ask("policy").stdout == f"There is no {path}: nothing is limited\n"
    assert json.loads(ask("policy", "--json").stdout)["file"] is None


def test_gpus_of_two_vendors_count_apart(path: Path, ask: Any, child: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:two-vendors")
    claim = "import safe_gpu\nsafe_gpu.GPUOwner({}, safe_gpu.NoPlaceholder(), affinity=None, timeout=0, vendor='{}')\n"
    for number, vendor in ((2, "nvidia"), (1, "amd")):
        assert child(claim.format(number, vendor) + "say('held'); listen()").hear() == "held"
    assert json.loads(ask("policy", "--json").stdout)["held"] == 3
    assert ask("policy").stdout.splitlines()[-1] == "You hold 2 of your 2 NVIDIA GPUs and 1 of your 2 AMD GPUs."


# Those of others, for the administrator


def test_of_another_user(path: Path, ask: Any) -> None:
    path.write_text("[default]\nmax_gpus = 4\n[user daemon]\nmax_gpus = 1")
    for name in ("daemon", "1"):
        done = ask("policy", "--user", name)
        assert done.stdout.splitlines()[0] == f"{path}, for daemon"
        assert "max_gpus          1            [user daemon]" in done.stdout
        assert done.stdout.splitlines()[-1] == "daemon holds 0 of 1 GPU."
    assert "there is no such user here" in ask("policy", "--user", "nobody-of-that-name").stderr


def test_of_all_users(path: Path, ask: Any) -> None:
    path.write_text("[user root]\nmax_gpus = 2\n[user daemon]\nmax_gpus = 3\n[group students-of-nobody]\nmax_gpus = 1")
    with GPUOwner(2, NoPlaceholder(), affinity=None):
        path.write_text(path.read_text().replace("max_gpus = 2", "max_gpus = 1"))  # lowered meanwhile
        done = ask("policy", "--all")
        mine = ask("policy").stdout.splitlines()[-1]
        users = json.loads(ask("policy", "--all", "--json").stdout)["users"]
    assert done.stdout.splitlines() == ["daemon            0 of 3", "root              2 of 1  above the limit"]
    assert "[group students-of-nobody]: there is no such group here" in done.stderr
    assert mine == "You hold 2 of your 1 GPU. The limit has been lowered: no claim ends, and new ones wait."
    assert users[1] == {"user": "root", "held": 2, "max_gpus": 1}


def test_a_file_before_it_is_the_host_s(path: Path, ask: Any, tmp_path: Path) -> None:
    draft = tmp_path / "draft.ini"
    draft.write_text("[user nobody-of-that-name]\nmax_gpus = 1")
    draft.chmod(0o644)
    done = ask("policy", "--check", str(draft))
    assert (done.returncode, done.stdout) == (0, f"{draft} is right\n")
    assert "[user nobody-of-that-name]: there is no such user here" in done.stderr
    draft.write_text("[default]\nmax_gpus = many")
    done = ask("policy", "--check", str(draft))
    assert (done.returncode, f"{draft}:2: max_gpus = many" in done.stderr) == (78, True)
    draft.write_text("[default]")
    draft.chmod(0o666)
    assert ask("policy", "--check", str(draft)).returncode == 1
    draft.unlink()
    assert ask("policy", "--check", str(draft)).returncode == 2
