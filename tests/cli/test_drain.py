"""``safe-gpu drain`` and ``resume``: no new claims on a GPU, by root's word or that of the state directory's owner."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safe_gpu import GPUOwner, NoPlaceholder, NotEnoughGpusError, get_free_gpus
from safe_gpu.cli.commands import main
from safe_gpu.coordination.leases import drained_gpus

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who drains GPUs")


@pytest.fixture
def etc(open_tmp: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the host's settings, which does not exist yet."""
    monkeypatch.setenv("SAFE_GPU_POLICY", str(open_tmp / "etc" / "config.ini"))
    return open_tmp / "etc"


def claim(**options: Any) -> list[int]:
    with GPUOwner(1, NoPlaceholder(), affinity=None, **{"timeout": 0, **options}) as owner:
        return owner.devices_taken


def test_claims_take_others_and_holders_go_on(etc: Path, ask: Any, command: Any, ground: Any) -> None:
    holder = command.start("run", "--", "sh", "-c", "echo up; exec sleep 600")
    assert holder.stdout.readline() == "up\n"
    done = ask("drain", "0-3", "--reason", "a fan is\nbroken")
    assert done.returncode == 0
    user = done.stderr.partition("claimed by ")[2].partition(" ")[0]
    assert done.stderr.splitlines()[:2] == [
        f"safe-gpu: GPU 0: drained by root: a fan is broken; claimed by {user} until that claim ends",
        "safe-gpu: GPU 1: drained by root: a fan is broken",
    ]
    assert claim() == [4]
    assert get_free_gpus() == ["4", "5", "6", "7"]
    with pytest.raises(NotEnoughGpusError, match="drained by root: a fan is broken"):
        claim(only="1-3")
    shown = json.loads(ask("status", "--json").stdout)["gpus"]
    assert [one["state"] for one in shown] == ["claimed"] + ["unusable"] * 3 + ["free"] * 4
    assert "drained by root: a fan is broken" in shown[0]["reason"]
    assert "GPU 1 drained by root: a fan is broken" in " ".join(ask("doctor").stdout.split())
    (etc / "config.ini").touch()
    waiter = command.start("run", "--only", "1-3", "--", "sh", "-c", "echo got $CUDA_VISIBLE_DEVICES")
    assert "for 1 GPU (0 of 3 free); GPU 1-3: drained by root: a fan is broken" in waiter.stderr.readline()
    assert ask("resume", "2").returncode == 0
    assert waiter.communicate(timeout=60)[0] == "got 2\n"
    assert ask("resume").returncode == 0
    assert drained_gpus() == {}
    assert holder.poll() is None


def test_it_outlives_the_state_directory(etc: Path, ask: Any, ground: Any) -> None:
    ask("drain")
    assert (etc / "drained").exists()
    assert sorted(drained_gpus()) == sorted(ground.uuids)
    with pytest.raises(NotEnoughGpusError, match="drained by root"):
        claim()
    assert "this host has no GPU 9" in ask("resume", "9").stderr


def as_anna(as_user: Any, work: Callable[[], object]) -> str:
    def told(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        say(work())

    return str(as_user(told, uid=4711).hear())


def test_the_owner_of_the_state_directory(etc: Path, state_dir: Path, as_user: Any, ground: Any) -> None:
    claim()  # makes it
    refused = as_anna(as_user, lambda: main(["drain", "3"]))
    assert refused == "78"
    os.chown(state_dir, 4711, 4711)
    assert as_anna(as_user, lambda: main(["drain", "3"])) == "0"
    assert drained_gpus() == {ground.uuids[3]: "drained by 4711"}
    assert main(["drain", "3"]) == 0  # root's word comes first
    assert drained_gpus() == {ground.uuids[3]: "drained by root"}
    assert as_anna(as_user, lambda: main(["resume", "3"])) == "0"
    assert drained_gpus() == {ground.uuids[3]: "drained by root"}


@pytest.mark.parametrize(("uid", "mode"), [(4712, 0o644), (0, 0o666)])
def test_a_file_that_others_could_have_written(etc: Path, state_dir: Path, ground: Any, uid: int, mode: int) -> None:
    claim()
    (state_dir / "drained").write_text(f"{ground.uuids[0]} because")
    os.chown(state_dir / "drained", uid, uid)
    (state_dir / "drained").chmod(mode)
    assert drained_gpus() == {}


def test_no_further_share_of_a_drained_gpu(etc: Path, ask: Any, command: Any) -> None:
    holder = command.start("run", "--share", "10GiB", "--", "sh", "-c", "echo up; exec sleep 600")
    assert holder.stdout.readline() == "up\n"
    assert claim(share="10GiB", only=0) == [0]
    ask("drain", "0")
    with pytest.raises(NotEnoughGpusError, match="drained by root"):
        claim(share="10GiB", only=0)
    assert claim(share="10GiB") == [1]


def test_instances_of_a_drained_gpu(etc: Path, ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:mig-h100")
    free = get_free_gpus()
    drained = next(label.partition(":")[0] for label in free if ":" in label)
    ask("drain", drained)
    assert get_free_gpus() == [label for label in free if label.partition(":")[0] != drained]
