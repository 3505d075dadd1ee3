"""Advice comes in the caller's own words: ``timeout=`` in Python, ``--timeout`` on the command line."""

from __future__ import annotations

import pickle
import re

import pytest

from safe_gpu import GPUOwner, SafeGpuError
from safe_gpu.argument_style import ArgumentStyle
from safe_gpu.cli.parser import CommandLine
from safe_gpu.selection.request import parse_request

# What the command line gets, what Python gets, and what each is to read.
ASKED = [
    (["-n", "9"], {"nb_gpus": 9}, "9 GPUs", "9 GPUs"),
    (["-n", "8", "--exclude", "3"], {"nb_gpus": 8, "exclude": 3}, "listed in --exclude 3", "listed in exclude=3"),
    (["-n", "2", "--only", "3"], {"nb_gpus": 2, "only": 3}, "not listed in --only 3", "not listed in only=3"),
    (["--only", "11"], {"only": 11}, "--only 11 names no single GPU", "only=11 names no single GPU"),
    (["--model", "RTX*"], {"model": "RTX*"}, "not match --model 'RTX*'", "not match model='RTX*'"),
    (["-n", "job"], {"nb_gpus": "job"}, "-n job takes the number", "nb_gpus='job' takes the number"),
    (["--timeout", "0"], {"timeout": 0}, "wait for it (--timeout)", "wait for it (timeout=)"),
    (["--timeout", "0.01"], {"timeout": 0.01}, "wait longer (--timeout)", "wait longer (timeout=)"),
    (["--timeout", "5y"], {"timeout": "5y"}, "--timeout 5y is not a duration", "timeout='5y' is not a duration"),
    (
        ["--min-memory", "20 parsecs"],
        {"min_memory": "20 parsecs"},
        "--min-memory '20 parsecs' makes no sense: give bytes as a whole number, or a size such as 20GiB",
        "min_memory='20 parsecs' makes no sense: give bytes as a whole number, or a size such as '20GiB'",
    ),
    (["--exclude", "x"], {"exclude": "x"}, "--exclude x makes no sense", "exclude='x' makes no sense"),
    (["--only", "x"], {"only": "x"}, "--only x makes no sense", "only='x' makes no sense"),
    (["--model", ""], {"model": ""}, "--model '' makes no sense", "model='' makes no sense"),
]


@pytest.mark.parametrize("subcommand", ["run", "wait"])
@pytest.mark.parametrize(("options", "arguments", "expected", "_"), ASKED)
def test_the_command_line_speaks_of_its_options(
    command, ground, subcommand: str, options: list[str], arguments: dict[str, object], expected: str, _: str
) -> None:
    ground.hold(*range(8))
    done = command.run(subcommand, *options, *(["--", "true"] if subcommand == "run" else []))
    assert done.returncode in (2, 75, 78)
    assert expected in done.stderr
    assert not re.search(rf"\b({'|'.join(arguments)})=", done.stderr), "an argument as Python writes it"
    assert "argument -" not in done.stderr, "the option is named twice"


@pytest.mark.parametrize(("_", "arguments", "__", "expected"), ASKED)
def test_python_speaks_of_its_arguments(
    ground, _: list[str], arguments: dict[str, object], __: str, expected: str
) -> None:
    ground.hold(*range(8))
    with pytest.raises(SafeGpuError) as caught:
        GPUOwner(**{"timeout": 0.01, **arguments})  # type: ignore[arg-type]
    assert expected in str(caught.value)
    assert not re.search(r"(^|[ (])--?[a-z]", str(caught.value).replace("nvidia-smi -c", "")), "an option of a command"


def test_gpus_to_bind_to_are_named_by_their_own_option(command) -> None:
    assert "--gpu x makes no sense" in command.run("bind", "--gpu", "x", "--", "true").stderr


def test_a_variable_is_written_as_everywhere(command) -> None:
    done = command.run("run", "--", "true", env={"SAFE_GPU_TIMEOUT": "soon"})
    assert done.returncode == 78
    assert "SAFE_GPU_TIMEOUT='soon' is not a duration" in done.stderr


@pytest.mark.parametrize("spelling", [ArgumentStyle, CommandLine])
def test_a_request_keeps_its_spelling(spelling: type[ArgumentStyle]) -> None:
    request = parse_request(2, only="0-3", spelling=spelling)
    assert pickle.loads(pickle.dumps(request)) == request
    assert request.spelling is spelling
