"""Commands of which ``safe-gpu run`` warns: they hand their work to another process, or choose GPUs themselves."""

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
STATE = "/tmp/safe-gpu"
IN_CONTAINER = f"Claim inside the container, with the state directory mounted: {{}} run -v {STATE}:{STATE} ... IMAGE"
AS_CHILD, AT_ONCE = "not with the container, which is not its child", "ends at once"
ADD_E, LEAVE_OUT = "Add -e CUDA_VISIBLE_DEVICES -e CUDA_DEVICE_ORDER", "leave out --cleanenv"


@pytest.fixture(autouse=True)
def no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONTAINER_HOST", raising=False)


def warned(command: str, path: str = "/nonexistent") -> str:
    return warning_about(shlex.split(command), path, STATE, ["-n", "2"])


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("screen", f"screen -dmS NAME {RUN} CMD"),
        ("screen -dmS t ./train 1", "closes the files that hold the claim"),
        ("tmux", f"tmux new -d {RUN} CMD"),
        ("tmux -L own new-session -d -s t -x 80 ./train", f"tmux new -d {RUN} CMD"),
        ("tmux neww 'cd x && ./train'", "until its last session ends"),
        ("byobu send-keys -t t ./train Enter", f"byobu new -d {RUN} CMD"),
        ("at now", f"echo '{RUN} CMD' | at ..."),
        ("batch", f"echo '{RUN} CMD' | batch ..."),
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
        # Behind programs that run them
        ("sudo -u anna screen -dmS t ./train", f"screen -dmS NAME {RUN} CMD"),
        ("env -u X A=1 nohup /usr/bin/tmux new -d ./train", f"tmux new -d {RUN} CMD"),
        ("timeout -k 5 1h taskset -c 0-3 numactl -N 0 sbatch job.sh", f"'{RUN} CMD'"),
        ("ionice -c 2 stdbuf -oL chrt -b 0 xargs -n 1 qsub", f"{RUN} CMD"),
        ("bash -lc 'exec tmux new -d ./train'", f"tmux new -d {RUN} CMD"),
        # Clients of containers
        ("docker run --rm -it -v /a:/b --name x IMAGE python -d", AS_CHILD),
        ("docker start NAME", IN_CONTAINER.format("docker")),
        ("docker run -dp 80:80 IMAGE", AT_ONCE),
        ("docker container run -p 80:80 --detach IMAGE", AT_ONCE),
        ("docker -H tcp://h:1 --context far -D run -d IMAGE", AT_ONCE),
        ("docker --config=/x -l debug container run IMAGE -d", AS_CHILD),
        ("docker compose -f x.yml up", AS_CHILD),
        ("docker-compose --profile gpu up --build -d", AT_ONCE),
        ("nerdctl -n k8s.io run -d IMAGE", "With --network=host the claim holds by file and by name"),
        ("sudo -n -u root A=1 /usr/bin/docker run IMAGE", AS_CHILD),
        ("podman --url unix:///x run IMAGE", AS_CHILD),
        ("podman-remote exec -d NAME sh", AT_ONCE),
        # Containers that do not learn which GPUs were claimed
        ("podman run --rm --device nvidia.com/gpu=all IMAGE python train.py", ADD_E),
        ("sudo podman container run --gpus all IMAGE", ADD_E),
        ("podman run --device /dev/kfd --device /dev/dri IMAGE", ADD_E),
        ("apptainer exec --nv --cleanenv IMAGE.sif python train.py", LEAVE_OUT),
        ("singularity run -C --nv IMAGE.sif", LEAVE_OUT),
        # Launchers that choose GPUs themselves
        ("deepspeed --num_gpus 2 train.py", "with --num_gpus, deepspeed chooses among all GPUs"),
        ("deepspeed --master_port 29501 --include=localhost:1,2 train.py", "with --include, "),
        ("deepspeed --no_local_rank -i localhost:1 train.py", "with -i, "),
        ("conda run -n env ds --exclude localhost:0 train.py", "with --exclude, ds "),
        ("nohup deepspeed -H hosts train.py", "with -H, "),
        ("accelerate launch --num_processes 2 --gpu_ids 0,1 train.py", "with --gpu_ids, accelerate "),
        ("env A=1 accelerate launch --multi_gpu --gpu_ids=0 train.py", "Leave it out, and accelerate takes the GPUs"),
    ],
)
def test_what_becomes_of_the_claim_and_the_way_that_works(command: str, words: str) -> None:
    text = warned(command)
    assert text.startswith("warning: ")
    assert words in text


@pytest.mark.parametrize(
    "command",
    [
        "screen -ls", "screen --version", "tmux ls", "tmux kill-server", "at -l", "flux start ./train",
        "systemd-run --user --scope ./train", "nohup ./train", "setsid --fork ./train", "./screen --ligands 5",
        "bash batch", "bash -c 'cd x && sbatch next.sh'", "python train.py screen -dmS t x", "docker", "docker ps -a",
        "docker build -t run .", "docker compose ps", "sh -c docker-run", "env A=1", "grep docker run",
        "podman --log-level debug container run IMAGE", "podman --remote=false run IMAGE",
        "podman run --device nvidia.com/gpu=all -e CUDA_VISIBLE_DEVICES IMAGE",
        "podman run --env-host --device nvidia.com/gpu=all IMAGE", "podman exec NAME nvidia-smi -L /dev/null",
        "apptainer exec --nv IMAGE.sif perl -e 1", "apptainer exec --nv --bind /data IMAGE.sif python train.py",
        "deepspeed train.py --num_gpus 2", "deepspeed --master_port 29501 train.py",
        "accelerate launch --gpu_ids all train.py", "accelerate config --gpu_ids 0", "python train.py --num_gpus 2",
        f"nice {'-a ' * 99}x", f"env {'1=2 ' * 99}x", f"docker {'-p 80 ' * 99}ps",  # read in no time
    ],
)  # fmt: skip
def test_what_keeps_the_claim_and_its_gpus_is_not_warned_of(command: str) -> None:
    assert warned(command) == ""


def test_podman_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTAINER_HOST", "unix:///run/podman/podman.sock")
    assert AT_ONCE in warned("podman run -d IMAGE")


def test_a_docker_that_is_podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package podman-docker has such a script."""
    script = program(tmp_path / "docker", 'exec /usr/bin/podman "$@"')
    assert warned("docker run -d IMAGE", str(script)) == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert warned("sudo docker run -d IMAGE", "/usr/bin/sudo") == ""


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_it_is_said_before_the_command_starts_and_where_run_is_to_be_quiet(command, tmp_path: Path, ground) -> None:
    sbatch = program(tmp_path / "sbatch", "echo the command >&2")
    own = ["-q", "-n", 2, "--min-memory=20GiB"]
    warning, *after = command.run("run", *own, "--", "nice", sbatch, "job.sh").stderr.splitlines()
    assert warning.startswith("safe-gpu: warning: the claim ends with `sbatch`, not with the job")
    assert "safe-gpu run -q -n 2 --min-memory=20GiB -- CMD in its script" in warning
    assert after == ["the command"]
    docker = program(tmp_path / "docker", 'echo "$@"')
    done = command.run("run", "--", docker, "run", "-d", "IMAGE")
    assert (done.returncode, done.stdout) == (0, "run -d IMAGE\n")
    assert f"-v {ground.directory}:{ground.directory}" in done.stderr
    assert command.run("run", "--", "echo", "docker run").stderr == ""


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
    command_line = [*way.removesuffix(" CMD").split(), job.path]
    with subprocess.Popen(command_line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        eventually(lambda: job.gpu() == "0")
        assert ground.claimed() == [0]
        job.end()
    eventually(lambda: ground.claimed() == [])
