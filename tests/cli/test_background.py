"""``safe-gpu run -- screen ...``: what hands its work to another process does not hold the claim, and is warned of."""

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.real import unavailable

from safe_gpu.cli.advice import warning_about

RUN = "safe-gpu run -n 2 --"


def warned(command: str) -> str:
    return warning_about(shlex.split(command), "/nonexistent", "/tmp/safe-gpu", ["-n", "2"])


@pytest.mark.parametrize(
    ("command", "way"),
    [
        ("screen", f"screen ... {RUN}"),
        ("screen -dmS t ./train 1", f"screen ... {RUN}"),
        ("tmux", f"tmux ... {RUN}"),
        ("tmux -L own new-session -d -s t -x 80 ./train", f"tmux new-session ... {RUN}"),
        ("tmux neww 'cd x && ./train'", f"tmux neww ... {RUN}"),
        ("byobu send-keys -t t ./train Enter", f"byobu send-keys ... {RUN}"),
        ("at now", f"echo '{RUN} CMD' | at"),
        ("batch", f"echo '{RUN} CMD' | batch"),
        ("sbatch -p gpu job.sh", f"sbatch --wrap '{RUN} CMD'"),
        ("qsub -b y ./train", f"the job: {RUN} CMD"),
        ("bsub -q gpu ./train", f"bsub ... {RUN} CMD"),
        ("srun -n 4 ./train", f"srun ... {RUN} CMD"),
        ("qrsh ./train", f"qrsh ... {RUN} CMD"),
        ("ssh gpu2 ./train", f"ssh ... {RUN} CMD"),
        ("condor_submit job.sub", "arguments = run -n 2 -- CMD"),
        ("flux submit -n 1 ./train", f"flux submit ... {RUN} CMD"),
        ("flux mini batch job.sh", f"flux mini batch ... {RUN} CMD"),
        ("systemd-run --user -p Nice=5 ./train --scope", "Add --scope"),
        ("sudo -u anna screen -dmS t ./train", f"screen ... {RUN}"),
        ("env -u X A=1 nohup /usr/bin/tmux new -d ./train", f"tmux new ... {RUN}"),
        ("timeout -k 5 1h taskset -c 0-3 numactl -N 0 sbatch job.sh", f"'{RUN} CMD'"),
        ("ionice -c 2 stdbuf -oL chrt -b 0 xargs -n 1 qsub", f"{RUN} CMD"),
        ("bash -lc 'exec tmux new -d ./train'", f"tmux new ... {RUN}"),
    ],
)
def test_the_way_that_works_is_named(command: str, way: str) -> None:
    text = warned(command)
    assert text.startswith("warning: ")
    assert way in text


@pytest.mark.parametrize(
    "command",
    [
        "screen -ls",
        "screen --version",
        "tmux ls",
        "tmux kill-server",
        "at -l",
        "flux start ./train",
        "systemd-run --user --scope ./train",
        "nohup ./train",
        "setsid --fork ./train",
        "./screen --ligands 5",
        "bash batch",
        "bash -c 'cd x && sbatch next.sh'",
        "python train.py screen -dmS t x",
    ],
)
def test_what_holds_the_claim_is_not_warned_of(command: str) -> None:
    assert warned(command) == ""


def test_it_is_said_before_the_command_starts(command, tmp_path: Path) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho the command >&2\n")
    sbatch.chmod(0o755)
    own = ["-q", "-n", 2, "--min-memory=20GiB"]
    warning, *after = command.run("run", *own, "--", "nice", sbatch, "job.sh").stderr.splitlines()
    assert warning.startswith("safe-gpu: warning: the claim ends with `sbatch`, not with the job")
    assert "safe-gpu run -q -n 2 --min-memory=20GiB -- CMD in its script" in warning
    assert after == ["the command"]


class Job:
    """A program that says which GPU it sees, and runs until the test ends."""

    def __init__(self, directory: Path) -> None:
        self._said = directory / "said"
        self.path = directory / "job"
        self.path.write_text(f'#!/bin/sh\necho $$ "${{CUDA_VISIBLE_DEVICES-none}}" >{directory}/half\n')
        with self.path.open("a") as script:
            script.write(f"mv {directory}/half {self._said}\nexec sleep 600\n")
        self.path.chmod(0o755)

    def gpu(self) -> str:
        """What it sees; "" until it runs."""
        return self._said.read_text().split()[1] if self._said.exists() else ""

    def end(self) -> None:
        if self._said.exists():
            os.kill(int(self._said.read_text().split()[0]), signal.SIGKILL)
            self._said.unlink()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """A job, with sessions of screen and tmux that are this test's own."""
    with tempfile.TemporaryDirectory(prefix="s-") as directory:  # short, since sockets lie there
        monkeypatch.setenv("TMUX_TMPDIR", directory)
        monkeypatch.setenv("SCREENDIR", directory)
        monkeypatch.setenv("TERM", "xterm")
        for name in ("TMUX", "STY"):
            monkeypatch.delenv(name, raising=False)
        job = Job(Path(directory))
        yield job
        job.end()
        if shutil.which("tmux"):
            subprocess.run(["tmux", "kill-server"], capture_output=True, timeout=60)


@pytest.mark.parametrize(
    ("line", "seen", "held"),
    [("nohup screen -dmS t", "0", []), ("tmux new -d", "0", [0]), ("tmux new -d; tmux neww -d", "none", [])],
)
def test_sessions(
    command, ground, job: Job, tmp_path: Path, eventually: Callable[..., None], line: str, seen: str, held: list[int]
) -> None:
    *before, session = line.split("; ")
    program = "screen" if "screen" in session else "tmux"
    if shutil.which(program) is None:
        unavailable(f"needs {program}")
    for one in before:
        subprocess.run([*one.split(), "sleep", "600"], check=True, timeout=60)
    told = tmp_path / "told"
    with told.open("w") as stderr:
        started = command.start("run", "--", *session.split(), job.path, stdout=stderr, stderr=stderr)
    eventually(lambda: job.gpu() == seen)
    eventually(lambda: ground.claimed() == held)
    job.end()
    assert started.wait(60) == 0
    eventually(lambda: ground.claimed() == [])

    way = told.read_text().rpartition("Claim inside the session: ")[2].splitlines()[0]
    begin, _, end = way.partition(" ... ")
    assert session.removeprefix("nohup ").startswith(begin)
    way = [*session.split(), *end.removesuffix(" CMD").split(), job.path]
    with subprocess.Popen(way, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        eventually(lambda: job.gpu() == "0")
        assert ground.claimed() == [0]
        job.end()
    eventually(lambda: ground.claimed() == [])
