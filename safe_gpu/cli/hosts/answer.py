"""What a host has answered to ``status --json``: its status and figures, or why there are none. Pure."""

import json
import time
from dataclasses import dataclass
from typing import Any

from ...host.procfs import printable
from ...status.facts import SCHEMA
from ...status.page.figures import NO_DOCUMENT, Figures, figures_of
from .asking import SECONDS, TOO_LATE, Said

_LONGEST_REASON = 300

_ADVICE = {
    "Permission denied": "a password is asked for, or your key is refused",
    "Host key verification failed": "its key is not known here; run ssh to it once by hand",
}

_NOT_FOUND = (126, 127)  # what sh ends with


@dataclass(frozen=True)
class Answer:
    """One host's answer.

    Attributes:
        status: the document of ``status --json``; None if there is none.
        figures: None if its line has ``error`` in their place, printable.
        text: what follows the document: with ``-v`` the host's own table.
        same_as: the name before it that stands for the same host.
    """

    status: dict[str, Any] | None = None
    figures: Figures | None = None
    error: str = ""
    text: str = ""
    same_as: str = ""


def read_answer(said: Said) -> Answer:
    """Return what a host has said, as far as it can be believed to be a status of this schema."""
    out, why = said.out.decode("utf-8", "replace"), last_line(said.err)
    if said.code == TOO_LATE:
        return Answer(error=why or f"did not answer within {SECONDS:g} s")
    if said.code == 255:
        advice = next((advice for sign, advice in _ADVICE.items() if sign in why), "")
        return Answer(error=f"{advice} ({why})" if advice else why or "ssh cannot reach it")
    if said.code in _NOT_FOUND:
        where = "set remote_command in [host] of ~/.config/safe-gpu/config.ini"
        return Answer(error=f"has no safe-gpu on its PATH: {where} ({why})")
    if said.code:
        return Answer(error=why or f"its safe-gpu status ends with exit code {said.code}")
    if not out.startswith("{"):
        banner = shown(out.split("\n", 1)[0])
        return Answer(error=f"its login files write before the JSON: {banner!r}; let them write on a terminal only")
    try:
        status, end = json.JSONDecoder().raw_decode(out)
        if status["schema"] != SCHEMA:
            schema = shown(str(status["schema"]))
            return Answer(error=f"answers in schema {schema}, and this safe-gpu reads {SCHEMA}: update the older one")
        return Answer(status, figures_of(status, time.time()), text=out[end:])
    except NO_DOCUMENT as err:
        return Answer(error=f"its answer cannot be read: {shown(f'{type(err).__name__}: {err}')}")


def last_line(text: bytes) -> str:
    """Return the last line of what a host has written, printable, without what stands before every message."""
    line = text.decode("utf-8", "replace").rstrip().rpartition("\n")[2]
    return shown(line.removeprefix("safe-gpu: ").removeprefix("warning: "))


def shown(text: str) -> str:
    """Return the beginning of a text as printable words."""
    return " ".join(printable(text[:_LONGEST_REASON]).split())
