"""What to do about a command that does not exist."""

import os
import re
import shutil
from collections.abc import Sequence
from shlex import join, quote

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
