"""Completion as the shells do it: they load the script, are asked what comes next, and ask the program."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import api

Complete = Callable[..., set[str]]

_BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_safe_gpu
printf '%s\\n' "${COMPREPLY[@]}"
"""
_FISH = 'source $argv[1]; complete -C "$argv[2]"'
# A shell in a terminal of its own, where the words and a tab are typed. What its completion finds is caught in compadd.
_ZSH = r"""
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "source '$1' '$2' '$3' '$4'"
while zpty -r shell line; do [[ $line == READY* ]] && break; done
zpty -n -w shell "$5"$'\t'
while zpty -r shell line; do [[ $line == *THE-END* ]] && break; done
"""
_ZSH_SETUP = r"""
PS1= RPS1=
autoload -U compinit
compinit -u -C -d $3
source $1
found=$2
compadd() {
    if [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\ * ]]; then
        builtin compadd "$@"
        return
    fi
    local -a hits
    builtin compadd -A hits "$@"
    print -rl -- $hits >> $found
    builtin compadd "$@"
}
ended() { print; print THE-END }
comppostfuncs=(ended)
bindkey '^I' complete-word
print READY
"""


@pytest.fixture
def script(tmp_path: Path, run_here: Any, command: object) -> Callable[[str], Path]:
    def write(shell: str) -> Path:
        path = tmp_path / f"safe-gpu.{shell}"
        path.write_text(run_here("completion", shell).stdout)
        return path

    return write


def program(shell: str) -> str:
    return shutil.which(shell) or pytest.skip(f"needs {shell}")


def answers(*command: object, home: Path) -> str:
    env = {**os.environ, "HOME": str(home), "XDG_CONFIG_HOME": str(home), "XDG_DATA_HOME": str(home), "TERM": "xterm"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60, env=env)
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(params=["bash", "zsh", "fish"])
def complete(request: Any, script: Callable[[str], Path], tmp_path: Path, tmp_path_factory: Any) -> Complete:
    """``complete("safe-gpu", "run", "--aff")`` is what the shell would make of the last word."""
    shell = program(request.param)
    path = script(request.param)

    def ask(*words: str) -> set[str]:
        if request.param == "bash":
            return set(answers(shell, "--norc", "-c", _BASH, "bash", path, *words, home=tmp_path).split("\n")) - {""}
        if request.param == "fish":
            out = answers(shell, "--no-config", "-c", _FISH, path, " ".join(words), home=tmp_path)
            return {line.split("\t")[0] for line in out.splitlines()}
        (tmp_path / "setup").write_text(_ZSH_SETUP)
        found = tmp_path / "found"
        found.write_text("")
        dump = tmp_path_factory.getbasetemp() / "zcompdump"  # to make it takes seconds
        answers(shell, "-f", "-c", _ZSH, "zsh", tmp_path / "setup", path, found, dump, " ".join(words), home=tmp_path)
        return set(found.read_text().splitlines())

    return ask


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("st",), {"status"}),
        (("run", "--aff"), {"--affinity"}),
        (("run", "--affinity=n"), {"--affinity=none", "--affinity=node"}),
        (("run", "-n", "2", "-q", "print"), {"printenv", "printf"}),
        (("run", "-n", "2", "cat", "--aff"), set()),  # no options of ours
    ],
)
def test_what_a_shell_completes(complete: Complete, words: tuple[str, ...], expected: set[str]) -> None:
    found = complete("safe-gpu", *words)
    assert expected <= found
    assert expected or "--affinity" not in found


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {*api.COMMANDS, "help", "--help", "--version"}),
        ("affinity --mode ", set(api.MODES)),
        ("completion b", set(api.SHELLS)),
        ("run -- ", 3),
        ("run -n 2 cat --aff", 4),
        ("run --visible-as = u", {"index", "uuid"}),
    ],
)
def test_what_may_come_next(words: str, expected: set[str] | int) -> None:
    found = api.completions(["safe-gpu", *words.split(" ")])
    if isinstance(found, dict):
        found = {word for word in found if not word.startswith("-") or not words}
    assert found == expected


def test_bash_splits_at_the_equals_sign(script: Callable[[str], Path], tmp_path: Path) -> None:
    words = ("safe-gpu", "run", "--visible-as", "=", "u")
    assert answers(program("bash"), "--norc", "-c", _BASH, "bash", script("bash"), *words, home=tmp_path) == "uuid\n"


def test_the_command_that_shells_ask_succeeds(run_here: Any) -> None:
    for words, found in (("stat", "status\n"), ("run -- ", "3\n"), ("nonsense ", "")):
        done = run_here("completion", "bash", "--", "safe-gpu", *words.split(" "))
        assert (done.returncode, done.stdout) == (0, found)


@pytest.mark.parametrize("name", api.COMMANDS)
def test_every_option_of_every_command_is_known(name: str) -> None:
    found = api.completions(["safe-gpu", name, "-"])
    hidden = ["--mode", "--pending"] if name in api.RUNNERS else []
    shown = [option for option in api.parser_of(name).names() if option not in hidden]
    assert [word for word in found if word.startswith("-")] == shown
    assert all(found[word] for word in shown)
