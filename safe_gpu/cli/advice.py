"""Advice on a command: it is not found, would not hold the claim, or would not use its GPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import dropwhile
from shlex import join, quote
from typing import NamedTuple

from ..coordination.state_dir import state_dir_path
from ..host.foreign_files import read_start

_SHELL_SYNTAX = r"[;|&<>$`*?(){}#\n]"

# What only a shell knows: its builtins, and the functions that environments are set up with.
_OF_THE_SHELL = set(
    ". alias cd conda declare eval exec export function if for local ml module popd pushd set shopt source trap ulimit "
    "umask unalias unset while".split()
)


def hint_for(command: Sequence[str], verb: str) -> str:
    """Return how the command is written so that it is found, as the tail of a sentence; "" where nobody can tell.

    Args:
        command: its name, which is not found, and its arguments.
        verb: ``safe-gpu run`` or ``safe-gpu bind``, for the advice.
    """
    name, *arguments = command
    if not name:
        return "the name is empty: is a variable not set?"
    if re.match(r"[A-Za-z_][A-Za-z0-9_]*=", name):
        return f"to set a variable, write {verb} -- env {join(command)}"
    if name in _OF_THE_SHELL:
        return f"{name} is part of the shell: write {verb} -- bash -c {quote(f'{join(command)} && ...')}"
    if not arguments and any(blank in name for blank in " \t\n"):
        if re.search(_SHELL_SYNTAX, name):
            return f"for shell syntax, write {verb} -- sh -c {quote(name)}"
        return f"drop the quotes: {verb} -- {name.strip()} (or write sh -c {quote(name)})"
    if name.isdecimal() and name.isascii():
        return f"for that many GPUs, write {verb} -n {name} -- ..." if verb.endswith(" run") else ""
    if name.startswith("-"):
        return f"options come before --: {verb} {name} ... -- COMMAND"
    if "/" not in name and os.path.isfile(name):
        program = {".py": "python ", ".sh": "sh "}.get(os.path.splitext(name)[1], "")
        return f"there is a file of that name here: write {verb} -- {program or './'}{quote(name)}"
    if name == "python" and _found("python3"):
        return "there is a python3"
    return ""


# What runs another command: how many words stand between its options and that command.
_WRAPPERS = {
    **dict.fromkeys("sudo doas env exec nice ionice nohup setsid stdbuf time numactl xargs".split(), 0),
    **dict.fromkeys(("timeout", "taskset", "chrt", "conda", "uv"), 1),
}

_SHELLS = ("sh", "bash", "dash", "zsh", "ksh")

_OF_CONTAINERS = (
    "not D debug tls tlsverify version help debug-full experimental insecure-registry remote r noout syslog trace "
    "transient-store d i t P q detach interactive tty rm init privileged publish-all read-only oom-kill-disable "
    "no-healthcheck sig-proxy disable-content-trust quiet use-api-socket rootfs all-resources compatibility dry-run "
    "verbose build force-recreate remove-orphans"
)

# Options that take an argument; after "not", those that take none, while all others do.
_OPTIONS = {
    "sudo": "u g p C r t T h R D user group prompt close-from role type chroot chdir host",
    **dict.fromkeys(("doas", "env"), "u C unset chdir"),
    **dict.fromkeys(("conda", "uv"), "n p name prefix cwd python with directory project"),
    "nice": "n adjustment",
    "ionice": "c n p class classdata",
    "stdbuf": "i o e input output error",
    "time": "f o format output",
    "timeout": "k s kill-after signal",
    "chrt": "T P D sched-runtime sched-period sched-deadline",
    "numactl": "i N C m P p l w interleave cpunodebind physcpubind membind preferred weighted-interleave",
    "xargs": "a d E I L n P s arg-file delimiter replace max-lines max-args max-procs max-chars",
    **dict.fromkeys(("docker", "docker-compose", "nerdctl", "podman", "podman-remote"), _OF_CONTAINERS),
    **dict.fromkeys(("apptainer", "singularity"), "B bind W workdir S scratch H home o overlay pwd cwd env env-file"),
    **dict.fromkeys(("tmux", "byobu"), "c e f F L l n p s S t T x y"),
    "screen": "c e h p s S t T Logfile",
    "systemd-run": "p u E M H property unit description slice uid gid nice working-directory setenv machine host",
    "deepspeed": "not module no_python no_local_rank no_ssh no_ssh_check force_multi save_pid elastic_training",
    "accelerate": "not cpu multi_gpu tpu mps use_deepspeed use_fsdp use_megatron_lm quiet q debug m module no_python",
}

_ENDS = "the claim ends with `{shown}`, not with the {work}, which is not its child and may run on"
_ENDS_AT_ONCE = "`{shown}` ends at once, and the claim with it, so that others can claim the GPUs of the {work}"
_CLOSES = "`{shown}` closes the files that hold the claim, so that others can claim the GPUs of the {work}"
_SERVER = (
    "the server of `{program}` runs the {work}: one that is running does not hold the claim, and a new one holds it "
    "until its last {work} ends"
)
_NO_VARIABLES = ", {program} passes no variables on, so the {work} may use GPUs that others hold"
_CLEANS = f"with this option{_NO_VARIABLES}"
_CHOOSES = "with {option}, {program} chooses among all GPUs of the host, and may use those that others hold"
_COUNTS_FROM_0 = (
    "System().gpu_policies() of Dragon 0.14 counts GPUs from 0. In a claim of others, workers meet on one GPU while "
    "another is idle"
)

_IN_CONTAINER = (
    "Claim inside the container, with the state directory mounted: {program} run -v {state}:{state} ... IMAGE safe-gpu "
    "run -- CMD. With --network=host the claim holds by file and by name, with any other network by its file alone"
)
_INSIDE = "Claim inside the {work}: safe-gpu {run} CMD"
_IN_THIS = "Claim inside the {work}: {inside}"
_IN_LINE = "Claim inside the {work}: {shown} ... safe-gpu {run} CMD"
_ADD_E = "Add -e CUDA_VISIBLE_DEVICES -e CUDA_DEVICE_ORDER"
_NO_CLEANING = "To pass them on, leave out --cleanenv (-e) and --containall (-C)"
_NO_CHOICE = "Leave it out, and {program} takes the GPUs of the claim"
_BY_ENGINE = "Claim in the program (safe_gpu.engines.dragon) and use held.policies(), or Dragon 0.15"

_CLEAN = "e cleanenv C containall"
_PASSES_ON = "VISIBLE_DEVICES|AFFINITY_MASK|--env-host"


class _Row(NamedTuple):
    """Commands to warn of, what becomes of the claim, and the way that works; fields in braces are filled in.

    Attributes:
        work: what the programs start.
        commands: the subcommands that do it; "" for programs without subcommands.
        having, without: options of which the command has one, or none; "" where none matters.
        seen, unseen: patterns of which its words show the one and not the other; "" where none matters.
    """

    programs: str
    cause: str
    way: str
    work: str = "job"
    commands: str = ""
    having: str = ""
    without: str = ""
    seen: str = ""
    unseen: str = "^$"


_CLIENTS = "docker docker-compose nerdctl podman-remote"

# The first row that fits counts.
_ROWS = (
    _Row(_CLIENTS, _ENDS_AT_ONCE, _IN_CONTAINER, "container", "run exec up", "d detach"),
    _Row(_CLIENTS, _ENDS, _IN_CONTAINER, "container", "run exec up"),
    _Row(_CLIENTS, _ENDS, _IN_CONTAINER, "container", "start", "a attach i interactive"),
    _Row(_CLIENTS, _ENDS_AT_ONCE, _IN_CONTAINER, "container", "start"),
    _Row("podman", f"without -e{_NO_VARIABLES}", _ADD_E, "container", "run", seen="gpu|/dev/", unseen=_PASSES_ON),
    _Row("apptainer singularity", _CLEANS, _NO_CLEANING, "container", "exec run shell", _CLEAN, unseen=_PASSES_ON),
    _Row("screen", _CLOSES, _INSIDE, "session", having="X r x R"),
    _Row("screen", _CLOSES, _IN_THIS, "session", without="ls list wipe v version help"),
    _Row("tmux byobu", _SERVER, _INSIDE, "session", "send send-keys a at attach attach-session"),
    _Row("tmux byobu", _SERVER, _IN_THIS, "session", "new new-session neww new-window splitw split-window popup"),
    _Row("at batch", _ENDS, "Claim inside the job: echo 'safe-gpu {run} CMD' | {program} ...", without="l d r c V"),
    _Row("sbatch", _ENDS, f"{_INSIDE} in its script, or sbatch --wrap 'safe-gpu {{run}} CMD'"),
    _Row("qsub msub oarsub", _ENDS, _INSIDE),
    _Row("bsub srun qrsh condor_run ssh", _ENDS, _IN_LINE),
    _Row("flux", _ENDS, _IN_LINE, commands="submit bulksubmit run batch alloc"),
    _Row("condor_submit", _ENDS, "Claim inside the job: executable = /PATH/safe-gpu, arguments = {run} CMD"),
    _Row("systemd-run", _ENDS, "Add --scope", "service", without="scope"),
    _Row("deepspeed ds", _CHOOSES, _NO_CHOICE, having="num_gpus i include e exclude num_nodes H hostfile"),
    _Row("accelerate", _CHOOSES, _NO_CHOICE, commands="launch", having="gpu_ids gpu-ids", unseen="ids[ =]all"),
    _Row("dragon", _COUNTS_FROM_0, _BY_ENGINE),
)


def warning_about(command: Sequence[str], path: str, state_dir: str | None = None, words: Sequence[str] = ()) -> str:
    """Return a warning about a command that hands its work to a process that is not its child, as clients of containers
    and of schedulers do, or that would not use the GPUs of the claim.

    Args:
        command: its name and arguments.
        path: the file that is run for it.
        state_dir: the state directory, which a container should have; None is that of this process.
        words: the options of ``safe-gpu run``, for the way that works.

    Returns:
        Two sentences or more; "" for all other commands.
    """
    typed = _within_wrappers(command)
    if not typed or typed[0].startswith("./"):  # ./screen is the user's own
        return ""
    shown = program = os.path.basename(typed[0])
    file = path if typed[0] == command[0] else _found(typed[0])
    options, rest = _options(typed)
    if program == "docker" and _is_podman(file):
        program = "podman"
    if program == "podman" and (
        options & {"remote", "r", "url", "connection", "c"} or os.environ.get("CONTAINER_HOST")
    ):
        program = "podman-remote"  # only a client of a service, which then starts the container
    rows = [row for row in _ROWS if program in row.programs.split()]
    name = ""
    if any(row.commands for row in rows):
        name, *rest = rest or ["new"]  # tmux alone is tmux new
        while name in ("compose", "container", "mini"):
            shown += f" {name}"
            name, *rest = _options([program, *rest])[1] or [""]
        shown += f" {name}"
        options, rest = _options([program, *rest])
    row = next((row for row in rows if _fits(row, name, options, join(typed))), None)
    if row is None or (program == "dragon" and not _counts_from_0(file, typed)):
        return ""
    run = join(["run", *words, "--"])
    inside = f"safe-gpu {run} CMD"
    if rest:
        whole = command if typed == list(command[-len(typed) :]) else typed
        inner = ["sh", "-c", *rest] if len(rest) == 1 and re.search(rf"\s|{_SHELL_SYNTAX}", rest[0]) else rest
        inside = f"{join(whole[: len(whole) - len(rest)])} safe-gpu {run} {join(inner)}"
    return f"warning: {row.cause}. {row.way}".format(
        program=os.path.basename(typed[0]),
        shown=shown,
        work=row.work,
        option=next((f"{'-' * min(len(one), 2)}{one}" for one in row.having.split() if one in options), ""),
        state=(state_dir or state_dir_path()) if "{state}" in row.way else "",
        run=run,
        inside=inside,
    )


def _fits(row: _Row, name: str, options: set[str], text: str) -> bool:
    return (
        name in (row.commands.split() or [""])
        and (not row.having or not options.isdisjoint(row.having.split()))
        and options.isdisjoint(row.without.split())
        and re.search(row.seen, text) is not None
        and re.search(row.unseen, text) is None
    )


def _found(name: str) -> str:
    from shutil import which  # loads much

    return which(name) or ""


def _counts_from_0(file: str, words: Sequence[str]) -> bool:
    """Return whether a program asks Dragon 0.14 for one policy per GPU.

    That version numbers these policies from 0, and takes a number that is not in CUDA_VISIBLE_DEVICES for all GPUs. It
    is found by the files beside its own program, and only the files that the command names are read.
    """
    from pathlib import Path

    installed = Path(os.path.realpath(file)).parent.parent.glob("lib/python*/*-packages/dragonhpc-0.14*")
    return any(b"gpu_policies" in (read_start(word) or b"") for word in words) and any(installed)


def _within_wrappers(command: Sequence[str]) -> list[str]:
    """Return the command that wrappers such as sudo and nohup run, or a shell that is given a single one."""
    words = list(command)
    while words and (name := os.path.basename(words[0])) in (*_WRAPPERS, *_SHELLS):
        options, rest = _options(words)
        if name in _SHELLS:
            if "c" not in options or len(rest) != 1 or re.search(rf"{_SHELL_SYNTAX}|['\"\\]", rest[0]):
                break
            rest = rest[0].split()
        for _ in range(_WRAPPERS.get(name, 0)):
            _, rest = _options([name, *rest[1:]])
        words = list(dropwhile(lambda word: "=" in word, rest))
    return words


def _options(words: Sequence[str]) -> tuple[set[str], list[str]]:
    """Return the options of a program up to the first word that is none, without those switched off, and the words from
    there on; ``words`` begin with the program."""
    listed = _OPTIONS.get(os.path.basename(words[0]), "").split()
    rest, found = list(words[1:]), set()
    while rest and rest[0].startswith("-") and rest[0] != "-":
        option, equals, value = rest.pop(0).partition("=")
        if option == "--":
            break
        found.add(option[1:])  # -ls of screen is one
        names = [option[2:]] if option.startswith("--") else list(option[1:])  # -itd is three
        for place, name in enumerate(names, 1):
            takes_argument = (name in listed) != ("not" in listed)
            if takes_argument or value.lower() not in ("false", "0", "f"):
                found.add(name)
            if takes_argument:
                if place == len(names) and not equals:
                    del rest[:1]
                break
    return found, rest


def _is_podman(path: str) -> bool:
    """Return whether this docker is a script or a link of podman's."""
    start = read_start(path, 1024)
    return start is not None and b"podman" in os.path.basename(os.fsencode(os.path.realpath(path))) + start
