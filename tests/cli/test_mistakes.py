"""Mistakes that people make, and what they are told; commands of which ``safe-gpu run`` warns.

Each line of the first two tables is tried as it stands, on a simulated host with eight A100 of which nobody holds any.
Behind it are the exit code and a part of what is said, or the error and how its text begins.
"""

import inspect
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.real import unavailable

import safe_gpu
from safe_gpu.engines import dragon, ray

TYPED = """
safe-gpu stats  # [2] safe-gpu: error: there is no command 'stats': did you mean safe-gpu status? (see safe-gpu --help)
safe-gpu top  # [2] did you mean safe-gpu status --watch? (see safe-gpu --help)
safe-gpu kill 4242  # [2] there is no command 'kill': a GPU is given back when its process ends: kill PID,
safe-gpu sh -c true  # [2] there is no command 'sh': to run it on a GPU, write safe-gpu run -- sh (see safe-gpu --help)
safe-gpu xyzzy  # [2] there is no command 'xyzzy': choose from run, bind, status, history, wait, drain, resume,
safe-gpu -n 2 python train.py  # [2] -n is an option of safe-gpu run: write safe-gpu run -n ... (see safe-gpu --help)
safe-gpu run --timout 5 -- true  # [2] there is no option --timout: did you mean --timeout? (see safe-gpu run --help)
safe-gpu run --gpu 3 -- true  # [2] there is no option --gpu: did you mean --only 3?
safe-gpu run --device=cuda:1 true  # [2] did you mean --only 1?
safe-gpu run --gpu-id all -- true  # [2] there is no option --gpu-id: did you mean --only 0?
safe-gpu bind --only 3 -- true  # [2] did you mean --gpu 3?
safe-gpu run -G 2 true  # [2] there is no option -G: did you mean -n?
safe-gpu undrain 3  # [2] did you mean safe-gpu resume?
safe-gpu report  # [2] did you mean safe-gpu history --report month?
safe-gpu reserve 3  # [2] did you mean safe-gpu drain GPU --from T --until T?
safe-gpu limit  # [2] did you mean safe-gpu policy?
safe-gpu find  # [2] did you mean safe-gpu status?
safe-gpu run --exclusive -- true  # [2] no option --exclusive: leave it out, since a claim shares its GPUs with nobody
safe-gpu run --max_time 2h -- true  # [2] no option --max_time: did you mean --for? (how long the GPUs will probably
safe-gpu run --time 2h -- true  # [2] did you mean --for? (how long the GPUs will probably be held; --timeout is how
safe-gpu run --mem 20G -- true  # [2] there is no option --mem: did you mean --min-memory? (free memory on each GPU)
safe-gpu --mem 20G true  # [2] there is no option --mem: did you mean --min-memory? (free memory on each GPU)
safe-gpu run --memory 20G -- true  # [2] --memory 20G is not possible: for free memory on each GPU, write --min-memory
safe-gpu run --memory node -- true  # [2] --memory node is not possible: choose from preferred, bind
safe-gpu run --no-wait -- true  # [2] there is no option --no-wait: did you mean --timeout 0?
safe-gpu wait --nodes 2  # [2] there is no option --nodes: a claim is on one host; Ray and Dragon claim on several
safe-gpu run --output log true  # [2] there is no option --output: write safe-gpu run ... -- CMD >FILE 2>&1
safe-gpu status --mem  # [2] there is no option --mem (see safe-gpu status --help)
safe-gpu history --month  # [2] did you mean --report month?
safe-gpu drain 3 --for 3h  # [2] did you mean --until +3h?
safe-gpu drain 3 --undo  # [2] to allow claims again, write safe-gpu resume
safe-gpu drain all  # [2] safe-gpu drain: error: leave all out: all GPUs are meant if none is named (see safe-gpu drain
safe-gpu resume all  # [2] safe-gpu resume: error: leave all out: all GPUs are meant if none is named
safe-gpu resume 3 broken  # [2] error: 'broken' names no GPU: write indices or UUIDs, such as 0,2, 4-7 or GPU-8932f937
safe-gpu resume --all  # [2] leave it out: all GPUs are meant if none is named
safe-gpu wait 2  # [2] safe-gpu wait: error: unexpected argument '2': did you mean -n 2? (see safe-gpu wait --help)
safe-gpu wait -- true  # [2] no command is run here: did you mean safe-gpu run?
safe-gpu run -n  # [2] safe-gpu run: error: -n/--gpus/--nb-gpus needs a value (see safe-gpu run --help)
safe-gpu train.py  # [2] there is no command 'train.py'; there is a file of that name here: write safe-gpu run -- python
safe-gpu -l  # [2] there is no option -l: did you mean safe-gpu status? (see safe-gpu --help)
safe-gpu --list  # [2] there is no option --list: did you mean safe-gpu status?
safe-gpu -i 3 true  # [2] there is no option -i: did you mean --only 3?
safe-gpu status -l 1  # [2] there is no option -l: did you mean --watch?
safe-gpu status -i  # [2] there is no option -i: did you mean --watch?
safe-gpu status -1  # [2] there is no option -1: leave it out: the table is printed once unless --watch is given
safe-gpu status -cpu  # [2] users and commands are shown without it; --verbose adds processes, fans and power
safe-gpu status -u ben  # [2] did you mean --user NAME?
safe-gpu status ben  # [2] unexpected argument 'ben': did you mean --user ben?
safe-gpu history ben  # [2] unexpected argument 'ben': did you mean --user ben?
safe-gpu status --query-gpu=memory.used --format=csv  # [2] there is no option --query-gpu: did you mean --json?
safe-gpu status --no-color  # [2] on terminals there are colours, unless NO_COLOR=1 is set before the command
safe-gpu status --only 3  # [2] all GPUs are shown without it; --free lists those that are free, --mine shows yours
safe-gpu policy --set max_gpus=2  # [2] limits are set in /etc/safe-gpu/config.ini, by root
safe-gpu history --week  # [2] did you mean --report week?
safe-gpu run -l gpu=2 -- true  # [2] there is no option -l: did you mean -n? (how many GPUs)
safe-gpu run --least-used -- true  # [2] leave it out: only GPUs that are free are taken
safe-gpu run -pe smp 4 -- true  # [2] one process is started: write safe-gpu run ... -- mpirun -np N CMD
safe-gpu run -p gpu -- true  # [2] there is one queue for all; a claim that says --for may start earlier
safe-gpu run --gpus 0 -- true  # [2] or job; for GPU 0, write --only 0 (see safe-gpu run --help)
safe-gpu run --gpus 0,1 -- true  # [2] -n 0,1 is not a number of GPUs: a whole number from 1 up, a range
safe-gpu run -n job -- true  # [78] -n job takes the number that the batch job asked for, and this process is in no
safe-gpu run -n 9 -- true  # [78] 9 GPUs are asked for, but this host has only 8 NVIDIA GPUs: ask for fewer
safe-gpu doctor --fix  # [2] there is no option --fix: safe-gpu doctor prints each fix and changes nothing; safe-gpu
safe-gpu run --share 0.5 -- true  # [2] --share 0.5 is not valid: for that part of each GPU's memory, write --share 50%
safe-gpu run --share 25MiB -- true  # [2] --share 25MiB is not valid: 1 GiB is the least, CUDA's context included
safe-gpu run --min-memory 90GiB -- true  # [78] none fits (GPU 0-7: 80 GiB in all, 90 GiB asked for)
safe-gpu run --only 8 -- true  # [78] --only 8: there is no NVIDIA GPU 8 here (GPU 0-7)
safe-gpu run --affinity Node -- true  # [2] --affinity Node is not possible: did you mean node? choose from none, node,
safe-gpu run -- 'sh -x'  # [127] sh -x: command not found; drop the quotes: safe-gpu run -- sh -x (or write sh -c
safe-gpu run -- 'ls | wc'  # [127] command not found; for shell syntax, write safe-gpu run -- sh -c 'ls | wc'
safe-gpu run -- A=1 b  # [127] A=1: command not found; to set a variable, write safe-gpu run -- env A=1 b
safe-gpu run -- cd x  # [127] cd is part of the shell: write safe-gpu run -- bash -c 'cd x && ...'
safe-gpu run -- conda activate x  # [127] call it before, conda activate x && safe-gpu run -- ...
safe-gpu run 2 sh  # [127] 2: command not found; for that many GPUs, write safe-gpu run -n 2 -- ...
safe-gpu run -- train.py  # [127] there is a file of that name here: write safe-gpu run -- python train.py
safe-gpu run -- ./train.py  # [126] ./train.py cannot be run: it is not an executable file (chmod +x makes it one)
safe-gpu run -- ''  # [127] '': command not found; the name is empty: is a variable not set?
SAFE_GPU_TIMEOUT=soon safe-gpu wait  # [78] SAFE_GPU_TIMEOUT=soon is not a duration: write seconds (90 or 90s), 15m,
SAFE_GPU_DRIVER=cuda safe-gpu wait  # [78] there is no driver 'cuda': choose one of auto, nvml, nvidia-smi, kfd, intel,
SAFE_GPU_TIMOUT=5 safe-gpu wait  # [0] has no effect: did you mean SAFE_GPU_TIMEOUT?
CUDA_VISIBLE_DEVICES= safe-gpu wait  # [78] to 0 of 8 GPUs; 8 others are free: unset CUDA_VISIBLE_DEVICES
CUDA_VISIBLE_DEVICES=0 safe-gpu wait -n 2  # [78] CUDA_VISIBLE_DEVICES=0 limits this process to 1 of 8 GPUs; 7 others
"""
CALLED = """
claim_gpus('2')  # UnsatisfiableRequestError: nb_gpus='2' is not valid: ask for a whole number of GPUs, 1 or more
claim_gpus(min_memory=20.5)  # UnsatisfiableRequestError: min_memory=20.5 is not valid: give bytes as a whole number,
claim_gpus(1, 'torch')  # PlaceholderError: placeholder_fn='torch' cannot be called: pass a function of the CUDA ordinal
claim_gpus(gpus=2)  # TypeError: claim_gpus() got an unexpected keyword argument 'gpus': did you mean nb_gpus=?
claim_gpus(num_gpus=2)  # TypeError: claim_gpus() got an unexpected keyword argument 'num_gpus': did you mean nb_gpus=?
claim_gpus(n=2)  # TypeError: claim_gpus() got an unexpected keyword argument 'n': did you mean nb_gpus=?
claim_gpus(wait=True)  # TypeError: claim_gpus() got an unexpected keyword argument 'wait': did you mean timeout=?
claim_gpus(device=0)  # TypeError: claim_gpus() got an unexpected keyword argument 'device': did you mean only=?
ensure_gpus(placeholder=0)  # TypeError: ensure_gpus() got an unexpected keyword argument 'placeholder': did you mean
ensure_gpus(exclusive=1)  # TypeError: ensure_gpus() got an unexpected keyword argument 'exclusive': leave it out, since
claim_gpus(min_memroy=1)  # TypeError: claim_gpus() got an unexpected keyword argument 'min_memroy': did you mean min_m
GPUOwner(gpus=2)  # TypeError: GPUOwner() got an unexpected keyword argument 'gpus': did you mean nb_gpus=?
GPUOwner(whatnot=1)  # TypeError: GPUOwner() got an unexpected keyword argument 'whatnot'
engines.ray.claim(gpus=2)  # TypeError: claim() got an unexpected keyword argument 'gpus': did you mean gpus_per_node=?
engines.ray.claim(nb_gpus=2)  # TypeError: claim() got an unexpected keyword argument 'nb_gpus': did you mean gpus_per_
engines.dragon.claim(hosts=2)  # TypeError: claim() got an unexpected keyword argument 'hosts': did you mean nodes=?
engines.dragon.claim(mem=2)  # TypeError: claim() got an unexpected keyword argument 'mem': did you mean min_memory=? (
bind(device=0)  # TypeError: bind() got an unexpected keyword argument 'device': did you mean gpus=?
bind(affinity='node')  # TypeError: bind() got an unexpected keyword argument 'affinity': did you mean mode=?
claim_gpus(nodes=2)  # TypeError: claim_gpus() got an unexpected keyword argument 'nodes': a claim is on one host; Ray
claim_gpus(whatnot=1)  # TypeError: claim_gpus() got an unexpected keyword argument 'whatnot'
claim_gpus(1, nb_gpus=2)  # TypeError: claim_gpus() got multiple values for argument 'nb_gpus'
claim_gpus(memory='20G')  # GPUAffinityError: memory='20G' is not a memory policy ('preferred' or 'bind'): for GPUs with
claim_gpus(affinity=False)  # GPUAffinityError: affinity=False is not a mode: pass affinity=None to leave the CPUs as
claim_gpus(affinity=True)  # GPUAffinityError: affinity=True is not a mode: leave it out, and this process is bound to
claim_gpus(0).release()  # AttributeError: 'GPUOwner' object has no attribute 'release': call release_gpus()
claim_gpus(0).device_ids  # AttributeError: 'GPUOwner' object has no attribute 'device_ids': read devices_taken or gpus
claim_gpus(0).helo  # AttributeError: 'GPUOwner' object has no attribute 'helo'
drain(3)  # AttributeError: module 'safe_gpu' has no attribute 'drain': safe-gpu drain is a command of the shell
acquire(2)  # AttributeError: module 'safe_gpu' has no attribute 'acquire': write claim_gpus
free_gpus()  # AttributeError: module 'safe_gpu' has no attribute 'free_gpus': write get_free_gpus to see which
claim(2)  # TypeError: safe_gpu.claim is a module: call safe_gpu.claim_gpus()
(GPUOwner(1), GPUOwner(1))  # AlreadyClaimedError: this process holds GPU 0 already: release_gpus() first,
bind(9)  # GPUAffinityError: this host has no GPU 9: it has GPU 0-7
set_affinity(9, 8)  # GPUAffinityError: gpu_id=9 should be smaller than nproc_per_node=8
"""


def rows(text: str) -> list[list[str]]:
    return [line.split("  # ") for line in text.split("\n")[1:-1]]


@pytest.mark.parametrize(("line", "said"), rows(TYPED))
def test_on_the_command_line(line: str, said: str, monkeypatch: Any, tmp_path: Path, run_here: Any, dgx: Any) -> None:
    (tmp_path / "train.py").write_text("print('trained')\n")
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)
    while words[0] != "safe-gpu":
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    done = run_here(*words[1:])
    code, _, told = said.partition(" ")
    assert (f"[{done.returncode}]", done.stderr.count("\n")) == (code, 1)
    assert told in done.stderr
    assert done.stdout == ("" if done.returncode else "0\n")  # the GPU that `wait` prints
    as_python_has_it = r"\b(timeout|min_memory|model|only|exclude|nb_gpus|hold_for)="
    assert not re.search(as_python_has_it, done.stderr)
    assert dgx.tickets() == dgx.claimed() == []


@pytest.mark.parametrize(
    ("timeout", "advice"), [("0", "wait for it (--timeout 1h,"), ("0.01", "wait longer (--timeout 1h,")]
)
def test_advice_on_a_wait_that_was_too_short(timeout: str, advice: str, run_here: Any, dgx: Any) -> None:
    dgx.hold(*range(8))
    for verb, *command in (("run", "--", "true"), ("wait",)):
        done = run_here(verb, "--timeout", timeout, *command)
        assert (done.returncode, advice in done.stderr) == (75, True)
    with pytest.raises(safe_gpu.NotEnoughGpusError, match=re.escape(advice.replace("--timeout 1h", 'timeout="1h"'))):
        safe_gpu.GPUOwner(timeout=float(timeout))


class Names(dict[str, object]):
    """The package's own names, as after ``from safe_gpu import *``."""

    def __missing__(self, name: str) -> object:
        return getattr(safe_gpu, name)


@pytest.mark.parametrize(("call", "said"), rows(CALLED))
def test_in_python(call: str, said: str, dgx) -> None:
    before = dict(os.environ)
    try:
        with pytest.raises(Exception) as caught:
            eval(call, {"__builtins__": {}}, Names())
    finally:
        safe_gpu.release_gpus()
    assert f"{type(caught.value).__name__}: {caught.value}".startswith(said)
    assert not re.search(r"(^|[ (])--?[a-z]", str(caught.value)), "an option of a command"
    assert dgx.claimed() == []
    assert dict(os.environ) == before


COUNTS_GPUS = {"nb_gpus", "gpus_per_node"}


def counting_gpus() -> list[Callable[..., object]]:
    """What users call with a number of GPUs."""
    called = [getattr(safe_gpu, name) for name in safe_gpu.__all__ if name not in ("__version__", "gpu_owner")]
    called += [vars(engine)["claim"] for engine in (dragon, ray)]
    functions = [one for one in called if inspect.isfunction(one) or one is safe_gpu.GPUOwner]
    return [one for one in functions if COUNTS_GPUS & inspect.signature(one).parameters.keys()]


def test_whatever_takes_a_number_of_gpus_knows_what_it_is_called_elsewhere(dgx: Any) -> None:
    called = counting_gpus()
    assert {safe_gpu.claim_gpus, safe_gpu.ensure_gpus, safe_gpu.GPUOwner, dragon.claim, ray.claim} <= {*called}
    for one in called:
        (argument,) = COUNTS_GPUS & inspect.signature(one).parameters.keys()
        said = f"{one.__name__}() got an unexpected keyword argument 'num_gpus': did you mean {argument}=?"
        with pytest.raises(TypeError, match=f"^{re.escape(said)}$"):
            one(num_gpus=2)


@pytest.mark.parametrize(
    "call",
    [
        *("claim_gpus(9)", "ensure_gpus(9)", "GPUOwner(9)", "claim_gpus(gpus=2)", "GPUOwner(gpus=2)", "bind(9)"),
        *("get_free_gpus(vendor='x')", "engines.dragon.claim()"),
    ],
)
def test_a_traceback_has_one_line_of_ours(call: str, dgx) -> None:
    with pytest.raises(Exception) as caught:
        eval(call, {"__builtins__": {}}, Names())
    ours = [entry for entry in traceback.extract_tb(caught.value.__traceback__) if in_the_package(entry.filename)]
    assert len(ours) == 1


def in_the_package(path: str) -> bool:
    return Path(path).is_relative_to(Path(safe_gpu.__file__).parent)


def test_a_state_directory_that_cannot_be_made_is_told_once(monkeypatch: pytest.MonkeyPatch, dgx) -> None:
    monkeypatch.setenv("SAFE_GPU_DIR", "/proc/nothing")
    with pytest.raises(safe_gpu.StateDirError) as caught:
        safe_gpu.claim_gpus()
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback") == 1


def test_the_error_of_a_placeholder_of_the_program_is_shown(dgx) -> None:
    def placeholder(device_no: int) -> object:
        raise ZeroDivisionError("in the program")

    with pytest.raises(safe_gpu.PlaceholderError) as caught:
        safe_gpu.claim_gpus(1, placeholder)
    shown = "".join(traceback.format_exception(caught.value))
    assert "ZeroDivisionError: in the program\n\nThe above exception was the direct cause" in shown


def test_a_word_of_other_tools_leads_to_an_argument_that_there_is() -> None:
    arguments = set(inspect.signature(safe_gpu.claim_gpus).parameters)
    for word, meant in api.words_elsewhere.ARGUMENTS.items():
        assert word not in arguments
        assert meant.argument in {"", *arguments}
        assert meant.hint().startswith("did you mean") == bool(meant.argument)


# Commands that hand their work to another process, or choose GPUs themselves

RUN = "safe-gpu run -n 2 --"
STATE = "/tmp/safe-gpu"
AT_ONCE = "ends at once"


@pytest.fixture(autouse=True)
def no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONTAINER_HOST", raising=False)


WARNED = {
    f": screen -dmS NAME {RUN} CMD": ["screen", "timeout -s INT 1h taskset --cpu-list 0,1 screen -dmS t ./train"],
    f": sudo -u anna screen -dmS NAME {RUN} CMD": ["sudo -u anna screen -dmS t ./train"],
    f": sudo --user anna -n tmux new -d {RUN} CMD": ["sudo --user anna -n tmux new -d ./train"],
    ": sudo -n /usr/bin/docker run -v ": ["sudo -n /usr/bin/docker run IMAGE", "sudo -n /usr/bin/docker start NAME"],
    "closes the files": [
        "flock -n /tmp/x screen", "micromamba run -n x screen", "bash -o pipefail -c screen", "sh -e -c screen",
        "pkexec screen", "strace -f screen", "env --unset X A=b screen", "setpriv --reuid 5 screen",
    ],
    "closes the files that hold the claim": ["screen -dmS t ./train 1"],
    f"tmux new -d {RUN} CMD": ["tmux -L own new-session -d -s t -x 80 ./train", "env -u X A=1 bash -lc 'exec tmux'"],
    "until its last session ends": ["tmux neww 'cd x && ./train'"],
    f"echo '{RUN} CMD' | at ...": ["at now"],
    f"sbatch --wrap '{RUN} CMD'": ["sbatch -p gpu job.sh", "timeout -k 5 1h taskset -c 0-3 numactl -N 0 sbatch job.sh"],
    f"the job: {RUN} CMD": ["qsub -b y ./train", "ionice -c 2 stdbuf -oL chrt -b 0 xargs -n 1 qsub"],
    f" ... {RUN} CMD": ["bsub -q gpu ./train", "srun -n 4 ./train", "qrsh ./train", "ssh gpu2 ./train"],
    "arguments = run -n 2 -- CMD": ["condor_submit job.sub"],
    f"flux submit ... {RUN} CMD": ["flux submit -n 1 ./train"],
    "Claim inside the job: salloc ... safe-gpu run -n 2 -- CMD": ["salloc -N 1 ./train"],
    "`ray start` ends at once, and the claim with it": ["ray start --head", "nohup ray start --head --num-gpus 2"],
    "GPUs of the cluster. Add --block": ["ray start --address=h:6379"],
    "not with the job, which is not its child": ["ray job submit -- python train.py"],
    f"cmd: {RUN} CMD": ["dvc queue start -j 2"],
    f"nohup {RUN} celery ... worker &": ["celery -A x worker -l INFO --detach", "celery multi start w1 -A x"],
    f"Claim for the server: {RUN} ollama serve": ["ollama run llama3", "env A=1 /usr/local/bin/ollama run x"],
    "`systemctl start` has another process start the service": ["sudo systemctl start x.service"],
    f"ExecStart=/PATH/{RUN} CMD": ["systemctl --user -q restart x"],
    f"Claim in the script of the service: {RUN} CMD": ["service x start"],
    f"command = /PATH/{RUN} CMD": ["supervisorctl -c x.conf start train"],
    f"pm2 start '{RUN} CMD'": ["pm2 start app.py"],
    f"the host mounted: {RUN} CMD": ["kubectl -n x apply -f job.yaml", "oc exec pod -- ./train"],
    f"Claim inside the job: pueue add ... {RUN} CMD": ["pueue add ./train"],
    f"Claim inside the job: ts ... {RUN} CMD": ["ts -G 1 python train.py", "ts -n ./train"],
    f"Claim inside the job: gbatch ... {RUN} CMD": ["gbatch --gpus 1 ./train"],
    "Add --scope": ["systemd-run --user -p Nice=5 ./train --scope"],
    # Clients of containers
    "not with the container, which is not its child": [
        "docker run --rm -it -v /a:/b --name x IMAGE python -d", "docker --config=/x -l debug container run IMAGE -d",
        "docker compose -f x.yml up", "sudo -n -u root A=1 /usr/bin/docker run IMAGE", "podman --url unix:///x run I",
    ],
    f"Claim inside the container, with the state directory mounted: docker run -v {STATE}:": ["docker start NAME"],
    AT_ONCE: [
        "docker run -dp 80:80 IMAGE", "docker container run -p 80:80 --detach IMAGE", "podman-remote exec -d NAME sh",
        "docker -H tcp://h:1 --context far -D run -d IMAGE", "docker-compose --profile gpu up --build -d",
    ],
    "With --network=host the claim holds by file and by name": ["nerdctl -n k8s.io run -d IMAGE"],
    # Containers that do not learn which GPUs were claimed
    "Add -e CUDA_VISIBLE_DEVICES -e CUDA_DEVICE_ORDER": [
        "podman run --rm --device nvidia.com/gpu=all IMAGE python train.py", "sudo podman container run --gpus all I",
        "podman run --device /dev/kfd --device /dev/dri IMAGE",
    ],
    "leave out --cleanenv": ["apptainer exec --nv --cleanenv IMAGE.sif python train.py", "singularity run -C --nv I"],
    # Launchers that choose GPUs themselves
    "with --num_gpus, deepspeed chooses among all GPUs": ["deepspeed --num_gpus 2 train.py"],
    "with --include, ": ["deepspeed --master_port 29501 --include=localhost:1,2 train.py"],
    "with --gpu_ids, accelerate ": ["accelerate launch --num_processes 2 --gpu_ids 0,1 train.py"],
    "Leave it out, and accelerate takes the GPUs": ["env A=1 accelerate launch --multi_gpu --gpu_ids=0 train.py"],
}  # fmt: skip


def warned(command: str, path: str = "/nonexistent") -> str:
    return api.warning_about(shlex.split(command), path, STATE, ["-n", "2"])


@pytest.mark.parametrize(("command", "words"), [(command, words) for words in WARNED for command in WARNED[words]])
def test_what_becomes_of_the_claim_and_the_way_that_works(command: str, words: str) -> None:
    text = warned(command)
    assert (text[:9], words in text) == ("warning: ", True)


@pytest.mark.parametrize(
    "command",
    [
        "screen -ls", "screen --version", "tmux ls", "tmux kill-server", "at -l", "flux start ./train",
        "systemd-run --user --scope ./train", "nohup ./train", "setsid --fork ./train", "./screen --ligands 5",
        "bash batch", "bash -c 'cd x && sbatch next.sh'", "python train.py screen -dmS t x", "docker", "docker ps -a",
        "docker build -t run .", "docker compose ps", "sh -c docker-run", "env A=1", "grep docker run",
        "podman --log-level debug container run IMAGE",
        "podman run --device nvidia.com/gpu=all -e CUDA_VISIBLE_DEVICES IMAGE",
        "podman run --env-host --device nvidia.com/gpu=all IMAGE", "podman exec NAME nvidia-smi -L /dev/null",
        "apptainer exec --nv IMAGE.sif perl -e 1", "apptainer exec --nv --bind /data IMAGE.sif python train.py",
        "ray start --head --block", "ray stop", "ray job logs x", "ollama serve", "ollama list", "systemctl status x",
        "service x status", "service --status-all", "supervisorctl status", "pm2 logs", "kubectl get pods", "tsp -l",
        "dvc repro", "dvc queue status", "celery -A x worker", "pueue status", "ts -k 3",
        "deepspeed train.py --num_gpus 2", "deepspeed --master_port 29501 train.py",
        "accelerate launch --gpu_ids all train.py", "accelerate config --gpu_ids 0", "python train.py --num_gpus 2",
        f"nice {'-a ' * 99}x", f"env {'1=2 ' * 99}x", f"docker {'-p 80 ' * 99}ps",  # read in no time
        f"celery {'-A x ' * 99}ps", f"ray {'-a ' * 99}x",
    ],
)  # fmt: skip
def test_what_keeps_the_claim_and_its_gpus_is_not_warned_of(command: str) -> None:
    assert warned(command) == ""


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_docker_that_is_podman_and_podman_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package podman-docker has such a script."""
    script = program(tmp_path / "docker", 'exec /usr/bin/podman "$@"')
    assert warned("docker run -d IMAGE", str(script)) == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert warned("sudo docker run -d IMAGE", "/usr/bin/sudo") == ""
    monkeypatch.setenv("CONTAINER_HOST", "unix:///run/podman/podman.sock")
    assert AT_ONCE in warned("podman run -d IMAGE")


def test_it_is_said_before_the_command_starts_and_where_run_is_to_be_quiet(command, tmp_path: Path, dgx) -> None:
    sbatch = program(tmp_path / "sbatch", "echo the command >&2")
    own = ["-q", "-n", 2, "--min-memory=20GiB"]
    warning, *after = command.run("run", *own, "--", "nice", sbatch, "job.sh").stderr.splitlines()
    assert warning.startswith("safe-gpu: warning: the claim ends with `sbatch`, not with the job")
    assert "safe-gpu run -q -n 2 --min-memory=20GiB -- CMD in its script" in warning
    assert after == ["the command"]
    docker = program(tmp_path / "docker", 'echo "$@"')
    done = command.run("run", "--", docker, "run", "-d", "IMAGE")
    assert (done.returncode, done.stdout) == (0, "run -d IMAGE\n")
    assert f"-v {dgx.state_dir}:{dgx.state_dir}" in done.stderr
    assert command.run("run", "--", "echo", "docker run").stderr == ""


class Job:
    """A program that says which GPU it sees, and runs until the test ends."""

    def __init__(self, directory: Path) -> None:
        self._said = directory / "said"
        text = f'echo $$ "${{CUDA_VISIBLE_DEVICES-none}}" >{directory}/half; mv {directory}/half {self._said}'
        self.path = program(directory / "job", f"{text}\nexec sleep 600")

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
        for name, value in {"TMUX_TMPDIR": directory, "SCREENDIR": directory, "TERM": "xterm"}.items():
            monkeypatch.setenv(name, value)
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
def test_claims_in_terminal_multiplexers(
    command, dgx, job: Job, tmp_path: Path, eventually: Callable[..., None], line: str, seen: str, held: list[int]
) -> None:
    *before, session = line.split("; ")
    multiplexer = "screen" if "screen" in session else "tmux"
    if shutil.which(multiplexer) is None:
        unavailable(f"needs {multiplexer}")
    for one in before:
        subprocess.run([*one.split(), "sleep", "600"], check=True, timeout=60)
    with (tmp_path / "told").open("w") as stderr:
        started = command.start("run", "--", *session.split(), job.path, stdout=stderr, stderr=stderr)
    eventually(lambda: job.gpu() == seen)
    eventually(lambda: dgx.claimed() == held)
    job.end()
    assert started.wait(60) == 0
    eventually(lambda: dgx.claimed() == [])

    way = (tmp_path / "told").read_text().rpartition("Claim inside the session: ")[2].splitlines()[0]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    with subprocess.Popen([*way.removesuffix(" CMD").split(), job.path], **streams):
        eventually(lambda: job.gpu() == "0")
        assert dgx.claimed() == [0]
        job.end()
    eventually(lambda: dgx.claimed() == [])
