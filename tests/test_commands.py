"""What an entry says of a command."""

import os

import pytest

from safe_gpu.host.commands import command_for_record, own_command, program_names


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("./train --password 1234", "train"),
        ("python train.py --password 1234", "python train.py"),
        ("/home/anna/v/bin/python3.11 -u -W ignore -Xdev /home/anna/train.py 1234", "python3.11 train.py"),
        ("python -m train 1234", "python -m train"),
        ("python -Im train 1234", "python -m train"),
        ("python -mtrain 1234", "python -m train"),
        ("python -c 1234", "python"),
        ("python -Ic 1234 5678", "python"),
        ("python - 1234", "python"),
        ("python --unheard-of 1234", "python"),
        ("python", "python"),
        ("python -m", "python -m"),
        ("bash jobs/run.sh 1234", "bash run.sh"),
        ("bash -eu run.sh 1234", "bash run.sh"),
        ("bash -c 1234", "bash"),
        ("bash -o pipefail -c 1234", "bash"),
        ("Rscript fit.R 1234", "Rscript fit.R"),
        ("torchrun --nproc-per-node 4 train.py 1234", "torchrun"),
        ("env PASSWORD=1234 python train.py", "env"),
        ("trainer: --password 1234", "trainer:"),
    ],
)
def test_names_of_program_and_script(line: str, shown: str) -> None:
    assert program_names(line.split()) == shown


def test_the_whole_command_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["sh", "-c", "echo 1234", "x" * 300]
    assert command_for_record(line) == "sh"
    monkeypatch.setenv("SAFE_GPU_RECORD_COMMAND", "names")
    assert command_for_record(line) == "sh"
    monkeypatch.setenv("SAFE_GPU_RECORD_COMMAND", "full")
    assert command_for_record(line) == ("sh -c echo 1234 " + "x" * 300)[:200]


def test_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    own = own_command()
    assert own
    with monkeypatch.context() as embedded:
        embedded.setattr("sys.orig_argv", [])
        assert own_command() == own
    assert "tests/" not in own
    monkeypatch.setenv("SAFE_GPU_RECORD_COMMAND", "full")
    with open("/proc/self/cmdline", "rb") as file:
        assert own_command() == os.fsdecode(file.read().rstrip(b"\0").replace(b"\0", b" "))[:200]
