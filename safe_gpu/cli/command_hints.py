"""Advice on a command: it is not found, or it starts a container through a daemon."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from shlex import join, quote
from shutil import which

# Commands of docker and nerdctl: their containers are no children of the client, which alone would hold the claim.


_CLIENTS = frozenset({"docker", "nerdctl", "docker-compose", "podman", "podman-remote"})

# What runs another command: its options that take an argument, and how many words stand before that command.
_WRAPPERS = {
    "sudo": ("ugpCrtThRD", 0),
    "doas": ("uC", 0),
    "env": ("uCS", 0),
    "nice": ("n", 0),
    "ionice": ("cnp", 0),
    "nohup": ("", 0),
    "setsid": ("", 0),
    "stdbuf": ("ioe", 0),
    "time": ("fo", 0),
    "timeout": ("ks", 1),
}

# Options without an argument; all others take one. Of the client itself, and of its commands.
_GLOBAL_SWITCHES = frozenset(
    "D v debug tls tlsverify version help debug-full experimental insecure-registry remote r "
    "noout syslog trace transient-store".split()
)
_SWITCHES = frozenset(
    "d i t P q detach interactive tty rm init privileged publish-all read-only oom-kill-disable no-healthcheck "
    "sig-proxy disable-content-trust quiet help use-api-socket rootfs".split()
)
_START_SWITCHES = _SWITCHES | {"a", "attach"}
_COMPOSE_SWITCHES = frozenset({"all-resources", "compatibility", "dry-run", "verbose"})
_OFF = ("false", "0", "f")


def warning_about(command: Sequence[str], path: str, state_dir: str) -> str:
    """What to say before a command is run that starts a container through a daemon; "" for all other commands.

    Args:
        command: its name and arguments; path: the file that is run for it.
        state_dir: the state directory, which the container should have.
    """
    words = _unwrapped(command)
    if not words:
        return ""
    client = os.path.basename(words[0])
    if client == "docker" and _is_podman(path if words[0] == command[0] else which(words[0]) or ""):
        client = "podman"
    options, rest = _options(words[1:], _GLOBAL_SWITCHES)
    if client in ("podman", "podman-remote"):
        if client == "podman" and not _is_remote(options):
            return ""
        client = "podman --remote"
    elif client == "docker-compose":
        client, rest = "docker", ["compose", *rest]
    name, detached = _started_by(rest)
    if not name:
        return ""
    claim_ends = (
        f"`{client} {name}` ends at once, and the claim with it, so that others can claim the GPUs of the container"
        if detached
        else f"the claim ends with `{client} {name}`, not with the container, which is no child of it and may run on"
    )
    engine = client.partition(" ")[0]
    return (
        f"warning: {claim_ends}. Claim inside the container, with the state directory mounted: {engine} run -v "
        f"{state_dir}:{state_dir} ... IMAGE safe-gpu run -- CMD. With --network=host the claim holds by file and by "
        "name, with any other network by its file alone"
    )


def _is_remote(options: Mapping[str, str]) -> bool:
    """Whether podman is only the client of a service, which then starts the container."""
    if any(name in options and options[name].lower() not in _OFF for name in ("remote", "r")):
        return True
    return bool(options.keys() & {"url", "connection", "c"} or os.environ.get("CONTAINER_HOST"))


def _started_by(words: list[str]) -> tuple[str, bool]:
    """The command that starts a process in a container, and whether it ends before that process; "" for others."""
    if words[:1] == ["container"]:
        words = words[1:]
    name, rest = (words[0], words[1:]) if words else ("", [])
    if name in ("run", "exec"):
        return name, _is_on(rest, _SWITCHES, "d", "detach")
    if name == "start":
        return name, not _is_on(rest, _START_SWITCHES, "a", "attach", "i", "interactive")
    if name == "compose":
        _, after = _options(rest, _COMPOSE_SWITCHES)
        if after and after[0] in ("up", "run", "exec", "start"):
            return f"compose {after[0]}", after[0] == "start" or _is_on(after[1:], _SWITCHES, "d", "detach")
    return "", False


def _unwrapped(words: Sequence[str]) -> Sequence[str]:
    """The words from the container engine's client on, without sudo and the like before it; none if it is none."""
    while words:
        name = os.path.basename(words[0])
        if name in _CLIENTS:
            return words
        if name not in _WRAPPERS:
            return ()
        with_argument, skipped = _WRAPPERS[name]
        rest = list(words[1:])
        while rest and rest[0].startswith("-") and rest[0] != "-":
            option = rest.pop(0)
            if option == "--":
                break
            if len(option) == 2 and option[1] in with_argument:
                rest = rest[1:]
        while rest and name in ("sudo", "env") and "=" in rest[0]:
            rest.pop(0)
        words = rest[skipped:]
    return ()


def _options(words: Sequence[str], switches: frozenset[str]) -> tuple[dict[str, str], list[str]]:
    """The options up to the first word that is none, by name, and the words from there on; the values are text."""
    rest, found = list(words), {}
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if not equals and name not in switches and rest:
                value = rest.pop(0)
            found[name] = value
            continue
        letters = word[1:]
        while letters:
            name, letters = letters[0], letters[1:]
            if letters.startswith("="):
                found[name], letters = letters[1:], ""
            elif name in switches:
                found[name] = ""
            else:
                found[name] = letters or (rest.pop(0) if rest else "")
                letters = ""
    return found, rest


def _is_on(words: Sequence[str], switches: frozenset[str], *names: str) -> bool:
    options, _ = _options(words, switches)
    return any(name in options and options[name].lower() not in _OFF for name in names)


def _is_podman(path: str) -> bool:
    """Whether this docker is a script or a link of podman's."""
    if os.path.basename(os.path.realpath(path)) == "podman":
        return True
    try:
        with open(path, "rb", buffering=0) as file:
            begin = file.read(1024)
    except OSError:
        return False
    return begin.startswith(b"#!") and b"podman" in begin


# What to do about a command that does not exist: the mistakes that a shell would have caught. Read after one only.


# What only a shell knows: its builtins, and the functions that environments are set up with.
_OF_THE_SHELL = set(
    ". alias cd conda declare eval exec export function if for local ml module popd pushd set shopt source trap ulimit "
    "umask unalias unset while".split()
)
_SHELL_SYNTAX = re.compile(r"[;|&<>$`*?(){}#\n]")


def hint_for(command: Sequence[str], verb: str) -> str:
    """How the command is written so that it is found, as the tail of a sentence; "" where nobody can tell.

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
