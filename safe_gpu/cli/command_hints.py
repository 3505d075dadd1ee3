"""Advice on a command: it is not found, or it starts a container in which the claim would not hold."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from shlex import join, quote
from shutil import which

from ..foreign_files import read_start

# Commands of docker and nerdctl: their containers are no children of the client, which alone would hold the claim.


# What runs another command: its options that take an argument.
_WRAPPERS = {
    "sudo": "ugpCrtThRD",
    "doas": "uC",
    "env": "uCS",
    "nice": "n",
    "ionice": "cnp",
    "nohup": "",
    "setsid": "",
    "stdbuf": "ioe",
    "time": "fo",
    "timeout": "ks",
}

# Options of the clients and their commands that take no argument; all others take one.
_SWITCHES = frozenset(
    "D debug tls tlsverify version help debug-full experimental insecure-registry remote r noout syslog trace "
    "transient-store d i t P q detach interactive tty rm init privileged publish-all read-only oom-kill-disable "
    "no-healthcheck sig-proxy disable-content-trust quiet use-api-socket rootfs all-resources compatibility dry-run "
    "verbose build force-recreate remove-orphans".split()
)


def warning_about(command: Sequence[str], path: str, state_dir: str) -> str:
    """Return a warning about a command that starts a container in which the claim would not hold or not be known.

    Args:
        command: its name and arguments.
        path: the file that is run for it.
        state_dir: the state directory, which the container should have.

    Returns:
        One sentence or more; "" for all other commands.
    """
    words = list(command)
    while words and (wrapper := os.path.basename(words[0])) in _WRAPPERS:
        _, words = _options(words[1:], _WRAPPERS[wrapper].__contains__)
        while words and "=" in words[0]:
            del words[0]
        if wrapper == "timeout":  # how long
            del words[:1]
    if not words:
        return ""
    client = os.path.basename(words[0])
    if client == "docker" and _is_podman(path if words[0] == command[0] else which(words[0]) or ""):
        client = "podman"
    options, rest = _of_client(words[1:])
    if client == "podman-remote" or (
        client == "podman" and (options & {"remote", "r", "url", "connection", "c"} or os.environ.get("CONTAINER_HOST"))
    ):
        client = "podman --remote"  # only a client of a service, which then starts the container
    elif client == "docker-compose":
        client, rest = "docker", ["compose", *rest]
    elif client not in ("docker", "nerdctl"):
        return _warning_about_variables(client, words[1:])
    if rest[:1] == ["container"]:
        del rest[0]
    name, *rest = rest or [""]
    if name == "compose":
        action, *rest = _of_client(rest)[1] or [""]
        name = f"compose {action}"
    options, _ = _of_client(rest)
    if name in ("run", "exec", "compose up", "compose run", "compose exec"):
        attached = not options & {"d", "detach"}
    elif name in ("start", "compose start"):
        attached = bool(options & {"a", "attach", "i", "interactive"})
    else:
        return ""
    ending = (
        f"the claim ends with `{client} {name}`, not with the container, which is not its child and may run on"
        if attached
        else f"`{client} {name}` ends at once, and the claim with it, so that others can claim the GPUs of the "
        "container"
    )
    engine = client.partition(" ")[0]
    return (
        f"warning: {ending}. Claim inside the container, with the state directory mounted: {engine} run -v "
        f"{state_dir}:{state_dir} ... IMAGE safe-gpu run -- CMD. With --network=host the claim holds by file and by "
        "name, with any other network by its file alone"
    )


def _warning_about_variables(client: str, words: Sequence[str]) -> str:
    """Return a warning about a child of this process that would not pass on which GPUs were claimed."""
    text = " ".join(words)
    if re.search("VISIBLE_DEVICES|AFFINITY_MASK|--env-host", text):
        return ""
    if client == "podman" and re.search(r"\brun .*(gpu|/dev/)", text):
        cause, way_out = "without -e", "add -e CUDA_VISIBLE_DEVICES -e CUDA_DEVICE_ORDER"
    elif client in ("apptainer", "singularity") and re.match(_CLEAN, text):
        cause, way_out = "with this option", "leave out --cleanenv (-e) and --containall (-C)"
    else:
        return ""
    return (
        f"warning: {cause}, {client} passes no variables on, so the container may use GPUs that others hold: {way_out}"
    )


_CLEAN = r"\S+ (-\S+ )*(-e|--cleanenv|-C|--containall) "


def _options(words: Sequence[str], takes_argument: Callable[[str], bool]) -> tuple[set[str], list[str]]:
    """Return the options up to the first word that is none, without those switched off; and the words from there on."""
    rest, found = list(words), set()
    while rest and rest[0].startswith("-") and rest[0] != "-":
        option, equals, value = rest.pop(0).partition("=")
        if option == "--":
            break
        names = [option[2:]] if option.startswith("--") else list(option[1:])  # -itd is three
        for place, name in enumerate(names, 1):
            if value.lower() not in ("false", "0", "f"):
                found.add(name)
            if takes_argument(name):
                if place == len(names) and not equals:
                    del rest[:1]
                break
    return found, rest


def _of_client(words: Sequence[str]) -> tuple[set[str], list[str]]:
    return _options(words, lambda name: name not in _SWITCHES)


def _is_podman(path: str) -> bool:
    """Return whether this docker is a script or a link of podman's."""
    start = read_start(path, 1024)
    return start is not None and b"podman" in os.path.basename(os.fsencode(os.path.realpath(path))) + start


# What to do about a command that does not exist: the mistakes that a shell would have caught. Loaded only after one.


# What only a shell knows: its builtins, and the functions that environments are set up with.
_OF_THE_SHELL = set(
    ". alias cd conda declare eval exec export function if for local ml module popd pushd set shopt source trap ulimit "
    "umask unalias unset while".split()
)
_SHELL_SYNTAX = re.compile(r"[;|&<>$`*?(){}#\n]")


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
        if _SHELL_SYNTAX.search(name):
            return f"for shell syntax, write {verb} -- sh -c {quote(name)}"
        return f"drop the quotes: {verb} -- {name.strip()} (or write sh -c {quote(name)})"
    if name.isdecimal() and name.isascii():
        return f"for that many GPUs, write {verb} -n {name} -- ..." if verb.endswith(" run") else ""
    if name.startswith("-"):
        return f"options come before --: {verb} {name} ... -- COMMAND"
    if "/" not in name and os.path.isfile(name):
        program = {".py": "python ", ".sh": "sh "}.get(os.path.splitext(name)[1], "")
        return f"there is a file of that name here: write {verb} -- {program or './'}{quote(name)}"
    if name == "python" and shutil.which("python3"):
        return "there is a python3"
    return ""
