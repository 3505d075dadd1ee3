"""``safe-gpu run -- docker run ...``: the claim would end with the client, and the user is told before."""

from pathlib import Path

import pytest

from safe_gpu.cli.advice import warning_about

STATE = "/tmp/safe-gpu"
ATTACHED, DETACHED = "not with the container", "ends at once"


def warned(command: str, path: str = "/nonexistent") -> str:
    return warning_about(command.split(), path, STATE)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("docker run --rm -it -v /a:/b --name x IMAGE python -d", ATTACHED),
        ("docker run -dp 80:80 IMAGE", DETACHED),
        ("docker container run -p 80:80 --detach IMAGE", DETACHED),
        ("docker -H tcp://h:1 --context far -D run -d IMAGE", DETACHED),
        ("docker --config=/x -l debug container run IMAGE -d", ATTACHED),
        ("docker start NAME", ATTACHED),
        ("docker compose -f x.yml up", ATTACHED),
        ("docker-compose --profile gpu up --build -d", DETACHED),
        ("nerdctl -n k8s.io run -d IMAGE", DETACHED),
        ("sudo -n -u root A=1 /usr/bin/docker run IMAGE", ATTACHED),
        ("timeout -k 5 1h nice -n 5 nohup docker run -d IMAGE", DETACHED),
        ("podman --url unix:///x run IMAGE", ATTACHED),
        ("podman-remote exec -d NAME sh", DETACHED),
    ],
)
def test_clients_of_daemons(command: str, says: str) -> None:
    text = warned(command)
    assert says in text
    assert (DETACHED in text) == (says == DETACHED)
    assert f"-v {STATE}:{STATE}" in text
    assert "--network=host" in text
    assert "IMAGE safe-gpu run" in text


@pytest.mark.parametrize(
    "command",
    [
        "docker",
        "docker ps -a",
        "docker build -t run .",
        "docker compose ps",
        "sh -c docker-run",
        "env A=1",
        "grep docker run",
        "podman --log-level debug container run IMAGE",
        "podman --remote=false run IMAGE",
        "podman run --device nvidia.com/gpu=all -e CUDA_VISIBLE_DEVICES IMAGE",
        "podman run --env-host --device nvidia.com/gpu=all IMAGE",
        "podman exec NAME nvidia-smi -L /dev/null",
        "apptainer exec --nv IMAGE.sif perl -e 1",
        "apptainer exec --nv --bind /data IMAGE.sif python train.py",
    ],
)
def test_other_commands(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONTAINER_HOST", raising=False)
    assert warned(command) == ""


@pytest.mark.parametrize(
    ("command", "way_out"),
    [
        ("podman run --rm --device nvidia.com/gpu=all IMAGE python train.py", "-e CUDA_VISIBLE_DEVICES"),
        ("sudo podman container run --gpus all IMAGE", "-e CUDA_VISIBLE_DEVICES"),
        ("podman run --device /dev/kfd --device /dev/dri IMAGE", "-e CUDA_VISIBLE_DEVICES"),
        ("apptainer exec --nv --cleanenv IMAGE.sif python train.py", "leave out --cleanenv"),
        ("singularity run -C --nv IMAGE.sif", "leave out --cleanenv"),
    ],
)
def test_containers_that_do_not_learn_which_gpus_were_claimed(
    command: str, way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CONTAINER_HOST", raising=False)
    text = warned(command)
    assert text.startswith("warning: ")
    assert "passes no variables on" in text
    assert way_out in text


def test_podman_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTAINER_HOST", "unix:///run/podman/podman.sock")
    assert DETACHED in warned("podman run -d IMAGE")


def test_a_docker_that_is_podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package podman-docker has such a script."""
    script = tmp_path / "docker"
    script.write_text('#!/bin/sh\nexec /usr/bin/podman "$@"\n')
    script.chmod(0o755)
    assert warned("docker run -d IMAGE", str(script)) == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert warned("sudo docker run -d IMAGE", "/usr/bin/sudo") == ""


def test_run_says_so_also_where_it_is_to_be_quiet(command, tmp_path: Path, ground) -> None:
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\necho "$@"\n')
    docker.chmod(0o755)
    done = command.run("run", "--quiet", "--", docker, "run", "-d", "IMAGE")
    assert (done.returncode, done.stdout) == (0, "run -d IMAGE\n")
    assert f"safe-gpu: warning: `docker run` {DETACHED}" in done.stderr
    assert f"-v {ground.directory}:{ground.directory}" in done.stderr
    assert done.stderr.count("\n") == 1
    assert command.run("run", "--", "echo", "docker run").stderr == ""
