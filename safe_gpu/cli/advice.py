"""Advice on a command: it is not found, would not hold the claim, or would not use its GPUs."""

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from ..coordination.directory import state_dir_path
from ..host.foreign_files import read_start

_SHELL_SYNTAX = r"[;|&<>$`*?(){}#\n]"

# Builtins and words that only a shell knows.
_OF_THE_SHELL = frozenset(
    ". alias cd declare eval exec export function if for local popd pushd set shopt source trap ulimit umask unalias "
    "unset while".split()
)

# Functions that set an environment up. The shell of a script or of bash -c does not have them.
_OF_THE_OWN_SHELL = frozenset("conda deactivate mamba micromamba ml module pyenv spack workon".split())


def hint_for(command: Sequence[str], verb: str) -> str:
    """Return how the command is written so that it is found, as the tail of a sentence; "" where nobody can tell.

    Args:
        command: its name, which is not found, and its arguments.
        verb: ``safe-gpu run`` or ``safe-gpu bind``, for the advice.
    """
    from shlex import join, quote

    name, *arguments = command
    if not name:
        return "the name is empty: is a variable not set?"
    if re.match(r"[A-Za-z_][A-Za-z0-9_]*=", name):
        return f"to set a variable, write {verb} -- env {join(command)}"
    if name in _OF_THE_SHELL:
        return f"{name} is part of the shell: write {verb} -- bash -c {quote(f'{join(command)} && ...')}"
    if name in _OF_THE_OWN_SHELL:
        return f"{name} is a function of your shell: call it before, {join(command)} && {verb} -- ..."
    if not arguments and any(blank in name for blank in " \t\n"):
        if re.search(_SHELL_SYNTAX, name):
            return f"for shell syntax, write {verb} -- sh -c {quote(name)}"
        return f"drop the quotes: {verb} -- {name.strip()} (or write sh -c {quote(name)})"
    if name.isdecimal() and name.isascii():
        if verb.endswith(" run"):
            return f"for that many GPUs, write {verb} -n {name} -- ..."
        return ""
    if name.startswith("-"):
        return f"options come before --: {verb} {name} ... -- COMMAND"
    if "/" not in name and os.path.isfile(name):
        program = {".py": "python ", ".sh": "sh "}.get(os.path.splitext(name)[1], "./")
        return f"there is a file of that name here: write {verb} -- {program}{quote(name)}"
    if name == "python" and _found("python3"):
        return "there is a python3"
    return ""


# Programs that run the command behind their options, and a shell that is given one.
_RUNNERS = (
    "sudo|doas|pkexec|runuser|setpriv|env|exec|command|nice|ionice|nohup|setsid|stdbuf|unbuffer|time|timeout|taskset|chrt|"
    r"numactl|prlimit|unshare|systemd-inhibit|strace|ltrace|xargs|flock(?: -\S+)* \S+|"
    r"(?:conda|mamba|micromamba|uv|poetry|pipenv|pixi) run|"
    r"(?:ba|da|z|k)?sh(?= (?:-\S+ (?:\w+ )?)?-\w*c )"
)
_VALUE = r"(?![-\d]|\w+=)\S+ "
_WRAPPED = (
    rf"(?:(?:\S*/)?(?:{_RUNNERS}) (?:-\w (?:{_VALUE})?|--\w[\w-]* (?:{_VALUE})?|-\S+ |\d\S* |(?!\d)\w+=\S* )*)*"
    r"(?:(?!\./)\S*/)?"  # ./screen is the user's own
)

# Without them the command may not do what it does with them.
_AS_OTHER_USER = re.compile(r"(?:\S*/)?(?:sudo|doas|pkexec) ")

_OPTIONS = r"(?:-\S+ (?:(?!-)\S+ )?)*?"  # each with a word or none

# What only asks a service to start the container.
_CLIENT = (
    rf"(docker|docker-compose|nerdctl|podman-remote|podman(?= {_OPTIONS}(?:--remote|-r|--url|--connection|-c) )) "
    rf"{_OPTIONS}(?:(?:compose|container) {_OPTIONS})?(run|exec|up|start) "
)

_NO_VARIABLES = "{program} passes no variables on, so the {work} may use GPUs that others hold"
_ENDS = "the claim ends with `{shown}`, not with the {work}, which is not its child and may run on"
_ENDS_AT_ONCE = "`{shown}` ends at once, and the claim with it, so that others can claim the GPUs of the {work}"
_ANOTHER_STARTS = (
    "`{shown}` has another process start the {work}, which neither holds the claim nor learns which GPUs were claimed"
)
_CHOOSES = "with {last}, {program} chooses among all GPUs of the host, and may use those that others hold"
_NO_CHOICE = "Leave it out, and {program} takes the GPUs of the claim"
_IN_CONTAINER = (
    "Claim inside the container, with the state directory mounted: {program} run -v {state}:{state} ... IMAGE safe-gpu "
    "run -- CMD. With --network=host the claim holds by file and by name, with any other network by its file alone"
)
_IN_JOB = "Claim inside the job: safe-gpu {run} CMD"
_INSIDE = "Claim inside the {work}: {shown} ... safe-gpu {run} CMD"


class _Advice(NamedTuple):
    """Commands to warn of, what becomes of the claim, and the way that works; fields in braces are filled in.

    Attributes:
        pattern: of the command line from the program on, whose words each end with a blank. The groups are the program,
            and perhaps its subcommand or the option that matters.
        work: what the command starts.
    """

    pattern: str
    cause: str
    way: str = _INSIDE
    work: str = "job"

    def warning(self, found: re.Match[str], run: str, state_dir: str | None) -> str:
        """Return the warning about a command line in which the pattern was found.

        Args:
            run: ``run`` with its options, for the way that works.
            state_dir: the state directory; None is that of this process.
        """
        facts = {
            "program": found[1],
            "shown": " ".join(found.groups()).strip(),
            "last": found.groups()[-1],
            "work": self.work,
            "run": run,
        }
        cause = self.cause.format(**facts)
        before = found.string[: found.start(1)]
        if _AS_OTHER_USER.match(before):
            facts["program"] = before + facts["program"]
            facts["shown"] = before + facts["shown"]
        if "{state}" in self.way:
            facts["state"] = state_dir or state_dir_path()
        return f"warning: {cause}. {self.way.format(**facts)}"


# The programs of the table. To look for its patterns in every command takes longer than a claim.
_PROGRAMS = frozenset(
    "docker docker-compose nerdctl podman podman-remote apptainer singularity screen tmux byobu at batch sbatch qsub "
    "msub oarsub bsub srun salloc qrsh qlogin condor_run ssh mosh pdsh clush flux condor_submit systemd-run systemctl "
    "service supervisorctl pm2 ray dvc celery ollama kubectl oc pueue ts tsp gbatch deepspeed ds accelerate".split()
)

# The first that fits counts.
_TABLE = (
    _Advice(rf"{_CLIENT}{_OPTIONS}(?:-\w*d\w*|--detach) ", _ENDS_AT_ONCE, _IN_CONTAINER, "container"),
    _Advice(_CLIENT, _ENDS, _IN_CONTAINER, "container"),
    _Advice(
        rf"(podman) {_OPTIONS}(?:container )?(run) (?!.*(?:VISIBLE_DEVICES|AFFINITY_MASK|--env-host)).*(?:gpu|/dev/)",
        f"without -e, {_NO_VARIABLES}",
        "Add -e CUDA_VISIBLE_DEVICES -e CUDA_DEVICE_ORDER",
        "container",
    ),
    _Advice(
        rf"(apptainer|singularity) {_OPTIONS}(exec|run|shell) {_OPTIONS}(?:-e|--cleanenv|-C|--containall) "
        "(?!.*(?:VISIBLE_DEVICES|AFFINITY_MASK))",
        f"with this option, {_NO_VARIABLES}",
        "To pass them on, leave out --cleanenv (-e) and --containall (-C)",
        "container",
    ),
    _Advice(
        "(screen) (?!-ls |-list |-wipe |-v |--?version |--?help )",
        "`{shown}` closes the files that hold the claim, so that others can claim the GPUs of the {work}",
        "Claim inside the {work}: {program} -dmS NAME safe-gpu {run} CMD",
        work="session",
    ),
    _Advice(
        rf"(tmux|byobu) {_OPTIONS}((?:new|neww|split|popup|send|a|at|attach)(?:-\w+|w)? |$)",
        "the server of `{program}` runs the {work}: one that is running does not hold the claim, and a new one holds "
        "it until its last {work} ends",
        "Claim inside the {work}: {program} new -d safe-gpu {run} CMD",
        work="session",
    ),
    _Advice("(at|batch) (?!-[ldrcV] )", _ENDS, "Claim inside the job: echo 'safe-gpu {run} CMD' | {program} ..."),
    _Advice("(sbatch) ", _ENDS, f"{_IN_JOB} in its script, or sbatch --wrap 'safe-gpu {{run}} CMD'"),
    _Advice("(qsub|msub|oarsub) ", _ENDS, _IN_JOB),
    _Advice("(bsub|srun|salloc|qrsh|qlogin|condor_run|ssh|mosh|pdsh|clush) ", _ENDS),
    _Advice(rf"(flux) {_OPTIONS}((?:mini )?(?:submit|bulksubmit|run|batch|alloc)) ", _ENDS),
    _Advice("(condor_submit) ", _ENDS, "Claim inside the job: executable = /PATH/safe-gpu, arguments = {run} CMD"),
    _Advice(rf"(systemd-run) (?!{_OPTIONS}--scope )", _ENDS, "Add --scope", "service"),
    _Advice(
        rf"(systemctl) {_OPTIONS}(start|restart|enable) ",
        _ANOTHER_STARTS,
        "Claim in the unit of the service: ExecStart=/PATH/safe-gpu {run} CMD",
        "service",
    ),
    _Advice(
        r"(service) (?!-)\S+ (start|restart) ",
        _ANOTHER_STARTS,
        "Claim in the script of the service: safe-gpu {run} CMD",
        "service",
    ),
    _Advice(
        rf"(supervisorctl) {_OPTIONS}(start|restart) ",
        _ANOTHER_STARTS,
        "Claim in the configuration of the program: command = /PATH/safe-gpu {run} CMD",
        "program",
    ),
    _Advice(
        rf"(pm2) {_OPTIONS}(start|restart) ", _ANOTHER_STARTS, "Claim in it: pm2 start 'safe-gpu {run} CMD'", "program"
    ),
    _Advice(
        rf"(ollama) {_OPTIONS}(run) ",
        "`{shown}` lets the server of {program} compute, which neither holds the claim nor uses its GPUs",
        "Claim for the server: safe-gpu {run} ollama serve",
    ),
    _Advice(
        rf"(kubectl|oc) {_OPTIONS}(run|create|apply|exec) ",
        _ANOTHER_STARTS,
        "Claim inside the pod, with the state directory of the host mounted: safe-gpu {run} CMD",
        "pod",
    ),
    _Advice(rf"(ray) {_OPTIONS}(start) (?!.*--block )", _ENDS_AT_ONCE, "Add --block", "cluster"),
    _Advice("(ray) (job submit) ", _ENDS),
    _Advice("(dvc) (queue start) ", _ENDS_AT_ONCE, "Claim in each stage of dvc.yaml: cmd: safe-gpu {run} CMD", "tasks"),
    _Advice(
        r"(celery) (?:\S+ )*?(--detach|multi start|multi restart) ",
        _ENDS_AT_ONCE,
        "Start the worker without that: nohup safe-gpu {run} celery ... worker &",
        "worker",
    ),
    _Advice(rf"(pueue) {_OPTIONS}(add) ", _ANOTHER_STARTS),
    _Advice(r"(tsp|ts) (?:-[nfmgEBd] |-[LNGD] \S+ )*(?!-)\S", _ANOTHER_STARTS),
    _Advice("(gbatch) ", _ANOTHER_STARTS),
    _Advice(
        rf"(deepspeed|ds) {_OPTIONS}(--num_gpus|--num_nodes|--include|--exclude|--hostfile|-[ieH])[ =]",
        _CHOOSES,
        _NO_CHOICE,
    ),
    _Advice(rf"(accelerate) launch {_OPTIONS}(--gpu[-_]ids)[ =](?!all )", _CHOOSES, _NO_CHOICE),
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
    line = "".join(f"{word} " for word in command)
    if _PROGRAMS.isdisjoint(re.split(r"[\s/]+", line)):
        return ""
    if re.match(f"{_WRAPPED}docker ", line) and _is_podman(_file_of_docker(command, path)):
        line = line.replace("docker ", "podman ", 1)
    if os.environ.get("CONTAINER_HOST"):  # makes it a client of a service, which then starts the container
        line = line.replace("podman ", "podman --remote ", 1)
    return _warning(line, words, state_dir)


def _warning(line: str, words: Sequence[str], state_dir: str | None) -> str:
    """Return the warning of the table about a command line whose words each end with a blank; "" if there is none."""
    from shlex import join

    run = join(["run", *words, "--"])
    for advice in _TABLE:
        found = re.match(_WRAPPED + advice.pattern, line)
        if found is not None:
            return advice.warning(found, run, state_dir)
    return ""


def _file_of_docker(command: Sequence[str], path: str) -> str:
    """Return the docker that a command runs: its own file, or the one on PATH where another program runs docker."""
    if os.path.basename(command[0]) == "docker":
        return path
    return _found("docker")


def _found(name: str) -> str:
    from shutil import which  # loads much

    return which(name) or ""


def _is_podman(path: str) -> bool:
    """Return whether this docker is a script or a link of podman's."""
    start = read_start(path, 1024)
    if start is None:
        return False
    return b"podman" in os.path.basename(os.fsencode(os.path.realpath(path))) + start
