"""Mistakes that people make, and what they are told: the words that help, with the exit code or the error.

The two tables are read by the tests, and each line is tried as it stands, on a simulated host with eight A100 of which
nobody holds any. Where a line ends in "...", more follows.
"""

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import safe_gpu
from safe_gpu.cli import main

TYPED = """
# The command
$ safe-gpu stats
[2] safe-gpu: error: there is no command 'stats': did you mean safe-gpu status? (see safe-gpu --help)
$ safe-gpu top
[2] safe-gpu: error: there is no command 'top': did you mean safe-gpu status --watch? (see safe-gpu --help)
$ safe-gpu kill 4242
[2] safe-gpu: error: there is no command 'kill': a GPU is given back when its process ends: kill PID, which saf...
$ safe-gpu sh -c true
[2] safe-gpu: error: there is no command 'sh': to run it on a GPU, write safe-gpu run -- sh (see safe-gpu --help)
$ safe-gpu xyzzy
[2] safe-gpu: error: there is no command 'xyzzy': choose from run, bind, status, history, wait, drain, resume, doct...
$ safe-gpu -n 2 python train.py
[2] safe-gpu: error: -n is an option of safe-gpu run: write safe-gpu run -n ... (see safe-gpu --help)
# Options
$ safe-gpu run --timout 5 -- true
[2] safe-gpu run: error: there is no option --timout: did you mean --timeout? (see safe-gpu run --help)
$ safe-gpu run --gpu 3 -- true
[2] safe-gpu run: error: there is no option --gpu: did you mean --only 3? (se...
$ safe-gpu run --device=cuda:1 true
[2] safe-gpu run: error: there is no option --device: did you mean --only 1? (se...
$ safe-gpu run --GPU_ID GPU-8a2b -- true
[2] safe-gpu run: error: there is no option --GPU_ID: did you mean --only GPU-8a2b? (se...
$ safe-gpu bind --only 3 -- true
[2] safe-gpu bind: error: there is no option --only: did you mean --gpu 3? (se...
$ safe-gpu --gpu 3 python train.py
[2] safe-gpu: error: there is no option --gpu: did you mean --only 3? (see safe-gpu --help)
$ safe-gpu wait 2
[2] safe-gpu wait: error: unexpected argument '2': did you mean -n 2? (see safe-gpu wait --help)
$ safe-gpu wait -- true
[2] safe-gpu wait: error: no command is run here: did you mean safe-gpu run? (see safe-gpu wait --help)
# Their values
$ safe-gpu run -n
[2] safe-gpu run: error: -n/--gpus/--nb-gpus needs a value (see safe-gpu run --help)
$ safe-gpu run --gpus 0,1 -- true
[2] safe-gpu run: error: -n 0,1 is not a number of GPUs: a whole number from 1 up, a range...
$ safe-gpu run -n job -- true
[78] safe-gpu: -n job takes the number that the batch job asked for, and this process is in no batch job: set SAFE_...
$ safe-gpu run -n 9 -- true
[78] safe-gpu: 9 GPUs are asked for, but this host has only 8 NVIDIA GPUs: ask for fewer
$ safe-gpu run -t 1:30 -- true
[2] safe-gpu run: error: --timeout 1:30 may be hours or minutes: write 1h30m or 1m30s (see safe-gpu run --help)
$ safe-gpu run --min-memory 20 -- true
[2] safe-gpu run: error: --min-memory 20 means 20 bytes? write 20GiB (see safe-gpu run --help)
$ safe-gpu run --share 25MiB -- true
[2] safe-gpu run: error: --share 25MiB makes no sense: 1 GiB is the least, CUDA's context included...
$ safe-gpu run --for 2 -- true
[2] safe-gpu run: error: --for 2 means 2 seconds? write 2h, 2m or 2s (see safe-gpu run --help)
$ safe-gpu run --min-memory 90GiB -- true
[78] safe-gpu: 1 GPU is asked for, but none fits (GPU 0-7: 80 GiB in all, 90 GiB asked for)
$ safe-gpu run --model 'RTX*' -- true
[78] safe-gpu: 1 GPU is asked for, but none fits (GPU 0-7: NVIDIA A100-SXM4-80GB does not match --model 'RTX*')
$ safe-gpu run --only 8 -- true
[78] safe-gpu: --only 8 names no single NVIDIA GPU of this host, which has GPU 0-7
$ safe-gpu run --only cuda:0 -- true
[2] safe-gpu run: error: --only cuda:0 makes no sense: name GPUs by index, range or UUID, such as 0,2, 4-7 or GPU-8...
$ safe-gpu run --affinity Node -- true
[2] safe-gpu run: error: --affinity Node is not possible: did you mean node? choose from none, node, socket, exclus...
# The command to run
$ safe-gpu run -- 'sh -x'
[127] safe-gpu: sh -x: command not found; drop the quotes: safe-gpu run -- sh -x (or write sh -c 'sh -x')
$ safe-gpu run -- 'ls | wc'
[127] safe-gpu: ls | wc: command not found; for shell syntax, write safe-gpu run -- sh -c 'ls | wc'
$ safe-gpu run -- A=1 b
[127] safe-gpu: A=1: command not found; to set a variable, write safe-gpu run -- env A=1 b
$ safe-gpu run -- cd x
[127] safe-gpu: cd: command not found; cd is part of the shell: write safe-gpu run -- bash -c 'cd x && ...'
$ safe-gpu run 2 sh
[127] safe-gpu: 2: command not found; for that many GPUs, write safe-gpu run -n 2 -- ...
$ safe-gpu run -- train.py
[127] safe-gpu: train.py: command not found; there is a file of that name here: write safe-gpu run -- python train.py
$ safe-gpu run -- ./train.py
[126] safe-gpu: ./train.py cannot be run: it is not an executable file (chmod +x makes it one)
$ safe-gpu run -- ''
[127] safe-gpu: '': command not found; the name is empty: is a variable not set?
# Variables
$ SAFE_GPU_TIMEOUT=soon safe-gpu wait
[78] safe-gpu: SAFE_GPU_TIMEOUT=soon is not a duration: write seconds (90 or 90s), 15m, 1h30m, 01:30:00, 2-12:00:...
$ SAFE_GPU_DRIVER=cuda safe-gpu wait
[78] safe-gpu: There is no driver 'cuda': choose one of auto, nvml, nvidia-smi, kfd, intel, simulated:PRESET.
$ SAFE_GPU_TIMOUT=5 safe-gpu wait
[0] safe-gpu: warning: SAFE_GPU_TIMOUT is not a variable of safe_gpu and has no effect: did you mean SAFE_GPU_TIMEOUT?
$ CUDA_VISIBLE_DEVICES=0 safe-gpu wait -n 2
[78] safe-gpu: 2 GPUs are asked for, but CUDA_VISIBLE_DEVICES=0 limits this process to 1 of 8 GPUs; 7 others are fr...
$ CUDA_VISIBLE_DEVICES= safe-gpu wait
[78] safe-gpu: 1 GPU is asked for, but CUDA_VISIBLE_DEVICES='' (set, but empty) limits this process to 0 of 8 GPUs;...
"""

CALLED = """
>>> claim_gpus('2')
UnsatisfiableRequestError: nb_gpus='2' makes no sense: ask for a whole number of GPUs, 1 or more (or 'job' for the...
>>> claim_gpus(timeout=-1)
UnsatisfiableRequestError: timeout=-1 is not a number of seconds: pass 0 (no wait), a positive number, or None (no...
>>> claim_gpus(min_memory=20.5)
UnsatisfiableRequestError: min_memory=20.5 makes no sense: give bytes as a whole number, or a size such as '20GiB'
>>> claim_gpus(affinity='numa')
GPUAffinityError: unknown affinity mode 'numa': choose one of node, socket, exclusive, core-complex, all, single, s...
>>> claim_gpus(visible_as='name')
UnsatisfiableRequestError: visible_as='name' is unknown: use "index" or "uuid"
>>> claim_gpus(1, 'torch')
PlaceholderError: placeholder_fn='torch' cannot be called: pass a function of the CUDA ordinal that returns what ho...
>>> GPUOwner(1), GPUOwner(1)
AlreadyClaimedError: this process holds GPU 0 already: release_gpus() first, ask for all GPUs in one claim, or...
>>> bind(9)
GPUAffinityError: this host has no GPU 9: it has GPU 0-7
>>> set_affinity(9, 8)
GPUAffinityError: gpu_id=9 should be smaller than nproc_per_node=8
>>> placement(999999999)
GPUAffinityError: there is no process 999999999 that can be read from here
"""


def table(text: str, prompt: str) -> Iterator[tuple[str, str]]:
    """What is typed, and what is said, in pairs of lines."""
    lines = [line for line in text.splitlines() if line and not line.startswith("# ")]
    for typed, said in zip(lines[::2], lines[1::2], strict=True):
        assert typed.startswith(prompt)
        yield typed.removeprefix(prompt), said


def assert_said(text: str, expected: str) -> None:
    if expected.endswith("..."):
        assert text.startswith(expected[:-3])
    else:
        assert text == expected


@pytest.mark.parametrize(("line", "said"), list(table(TYPED, "$ ")))
def test_on_the_command_line(
    line: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], ground
) -> None:
    (tmp_path / "train.py").write_text("print('trained')\n")
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)
    while words[0] != "safe-gpu":
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    code = main(words[1:])
    out, err = capsys.readouterr()
    assert out == ("" if code else "0\n")  # the GPU that `wait` prints
    assert err.count("\n") == 1
    assert_said(f"[{code}] {err.rstrip()}", said)
    assert not re.search(r"\b(timeout|min_memory|model|only|exclude|nb_gpus|hold_for)=", err), "as Python writes it"
    assert ground.tickets() == []
    assert ground.claimed() == []


@pytest.mark.parametrize(
    ("timeout", "advice"), [("0", "wait for it (--timeout 1h,"), ("0.01", "wait longer (--timeout 1h,")]
)
def test_advice_on_a_wait_that_was_too_short(timeout: str, advice: str, capsys, ground) -> None:
    ground.hold(*range(8))
    for verb in ("run", "wait"):
        assert main([verb, "--timeout", timeout, *(["--", "true"] if verb == "run" else [])]) == 75
        assert advice in capsys.readouterr().err
    with pytest.raises(safe_gpu.NotEnoughGpusError, match=re.escape(advice.replace("--timeout 1h", 'timeout="1h"'))):
        safe_gpu.GPUOwner(timeout=float(timeout))


class Names(dict[str, object]):
    """The package's own names, as after ``from safe_gpu import *``."""

    def __missing__(self, name: str) -> object:
        return getattr(safe_gpu, name)


@pytest.mark.parametrize(("call", "said"), list(table(CALLED, ">>> ")))
def test_in_python(call: str, said: str, ground) -> None:
    before = dict(os.environ)
    try:
        with pytest.raises(Exception) as caught:
            eval(call, {"__builtins__": {}}, Names())
    finally:
        safe_gpu.release_gpus()
    assert_said(f"{type(caught.value).__name__}: {caught.value}", said)
    assert not re.search(r"(^|[ (])--?[a-z]", str(caught.value)), "an option of a command"
    assert ground.claimed() == []
    assert dict(os.environ) == before
