"""``safe-gpu run -- dragon program.py``: which launchers would not use the GPUs of the claim is told before."""

from pathlib import Path

import pytest

from safe_gpu.cli.advice import warning_about

PROGRAM = "from dragon.native.machine import System\nPool(policy=System().gpu_policies(), processes_per_policy=4)\n"


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment that has a ``dragon``, and a program beside it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "dragon").touch()
    (tmp_path / "pool.py").write_text(PROGRAM)
    (tmp_path / "other.py").write_text("held.policies()\n")
    return tmp_path


@pytest.mark.parametrize(
    ("version", "command", "warned"),
    [
        ("0.14.1", "dragon -s pool.py", True),
        ("0.14.1", "nice -n 5 dragon -w ssh -t tcp pool.py --epochs 3", True),
        ("0.14.1", "dragon -s other.py", False),
        ("0.14.1", "dragon -s no-such-file.py", False),
        ("0.14.1", "python pool.py", False),
        ("0.15.0", "dragon -s pool.py", False),
        ("", "dragon -s pool.py", False),
    ],
)
def test_one_policy_for_each_gpu(
    environment: Path, monkeypatch: pytest.MonkeyPatch, version: str, command: str, warned: bool
) -> None:
    monkeypatch.chdir(environment)
    dragon = environment / "bin" / "dragon"
    dragon.chmod(0o755)
    monkeypatch.setenv("PATH", str(dragon.parent))
    if version:
        (environment / "lib" / "python3.11" / "site-packages" / f"dragonhpc-{version}.dist-info").mkdir(parents=True)
    text = warning_about(command.split(), str(dragon), "/tmp/safe-gpu")
    assert ("held.policies()" in text) == warned == bool(text)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("deepspeed --num_gpus 2 train.py", "--num_gpus"),
        ("deepspeed --master_port 29501 --include=localhost:1,2 train.py", "--include"),
        ("deepspeed --no_local_rank -i localhost:1 train.py", "-i"),
        ("ds --num_gpus=4 train.py", "--num_gpus"),
        ("conda run -n env deepspeed --exclude localhost:0 train.py", "--exclude"),
        ("nohup deepspeed -H hosts train.py", "-H"),
        ("accelerate launch --num_processes 2 --gpu_ids 0,1 train.py", "--gpu_ids"),
        ("env A=1 accelerate launch --multi_gpu --gpu_ids=0 train.py", "--gpu_ids"),
        ("deepspeed train.py --num_gpus 2", ""),
        ("deepspeed --master_port 29501 train.py", ""),
        ("accelerate launch --gpu_ids all train.py", ""),
        ("accelerate config --gpu_ids 0", ""),
        ("python train.py --num_gpus 2", ""),
    ],
)
def test_launchers_that_choose_gpus_themselves(command: str, option: str) -> None:
    text = warning_about(command.split(), "/nonexistent", "/tmp/safe-gpu")
    assert text.startswith(f"warning: with {option}, ") if option else text == ""
    assert not option or "others hold. Leave it out" in text
