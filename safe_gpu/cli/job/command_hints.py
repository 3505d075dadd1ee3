"""Advice on a command that starts a container in which the claim would not hold."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import which

from ...host.foreign_files import read_start

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
    """Return a warning about a command that starts a container in which the claim would not hold or not be known, or a
    program that would use some of its GPUs only.

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
    file = path if words[0] == command[0] else which(words[0]) or ""
    if client == "dragon":
        return _warning_about_dragon(file, words[1:])
    if client == "docker" and _is_podman(file):
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


def _warning_about_dragon(file: str, words: Sequence[str]) -> str:
    """Return a warning about a program that asks Dragon 0.14 for one policy per GPU.

    That version numbers these policies from 0, and takes a number that is not in CUDA_VISIBLE_DEVICES for all GPUs.
    Its own program is found by the files beside it, and only the files that the command names are read.
    """
    installed = Path(os.path.realpath(file)).parent.parent.glob("lib/python*/*-packages/dragonhpc-0.14*")
    if not any(b"gpu_policies" in (read_start(word) or b"") for word in words) or not any(installed):
        return ""
    return (
        "warning: System().gpu_policies() of Dragon 0.14 counts GPUs from 0. In a claim of others, workers meet on one "
        "GPU while another is idle: claim in the program (safe_gpu.engines.dragon) and use held.policies(), or Dragon "
        "0.15"
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
