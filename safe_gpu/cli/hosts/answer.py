"""What a host has answered to ``status --json``: its status and figures, or why there are none. Pure."""

import json
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ...host.procfs import printable
from ...status.facts import FREE, SCHEMA
from .asking import SECONDS, Said

_LONGEST_REASON = 300

_NOT_FOUND = (126, 127)  # what sh ends with

_ADVICE = {
    "Permission denied": "a password is asked for, or your key is refused",
    "Host key verification failed": "its key is not known here; run ssh to it once by hand",
}


@dataclass(frozen=True)
class Answer:
    """One host's answer.

    Attributes:
        status: the document of ``status --json``; None if there is none.
        error: then why, printable; else "".
        text: what follows the document: with ``-v`` the host's own table.
        free, total: numbers of GPUs.
        models: product name -> number of GPUs.
        waiting, longest: the number of waiters; for how many seconds the first of them has waited, None if unknown.
        held: user -> number of GPUs, a share counting as its part.
        broken: sentences on the GPUs that cannot be used.
        identity: the same for two names of one host.
    """

    status: dict[str, Any] | None = None
    error: str = ""
    text: str = ""
    free: int = 0
    total: int = 0
    models: dict[str, int] = field(default_factory=dict)
    waiting: int = 0
    longest: float | None = None
    held: dict[str, float] = field(default_factory=dict)
    broken: tuple[str, ...] = ()
    identity: str = ""


def read_answer(said: Said) -> Answer:
    """Return what a host has said, as far as it can be believed to be a status of this schema."""
    text = said.out.decode("utf-8", "replace")
    if said.code is None:
        return Answer(error=last_line(said.err) or f"did not answer within {SECONDS:g} s")
    if said.code == 255:
        why = last_line(said.err) or "ssh cannot reach it"
        return Answer(error=next((f"{advice} ({why})" for sign, advice in _ADVICE.items() if sign in why), why))
    if said.code in _NOT_FOUND:
        where = "set remote_command in [host] of ~/.config/safe-gpu/config.ini"
        return Answer(error=f"has no safe-gpu on its PATH: {where} ({last_line(said.err)})")
    if said.code:
        return Answer(error=last_line(said.err) or f"its safe-gpu status ends with exit code {said.code}")
    begin = re.search(r"^\{", text, re.MULTILINE)
    if begin is None:
        return Answer(error=last_line(said.out or said.err) or "answers without JSON")
    if begin.start():
        banner = _shown(text[: begin.start()].split("\n", 1)[0])
        return Answer(error=f"its login files write before the JSON: {banner!r}; let them write on a terminal only")
    try:
        status, end = json.JSONDecoder().raw_decode(text)
        if status["schema"] != SCHEMA:
            schema = _shown(str(status["schema"]))
            return Answer(error=f"answers in schema {schema}, and this safe-gpu reads {SCHEMA}: update the older one")
        return _figures(status, text[end:])
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as err:
        return Answer(error=f"its answer cannot be read: {_shown(f'{type(err).__name__}: {err}')}")


def last_line(text: bytes) -> str:
    """Return the last line of what a host has written, printable, without what stands before every message."""
    line = (text.decode("utf-8", "replace").rstrip() or "").split("\n")[-1]
    return _shown(line.removeprefix("safe-gpu: ").removeprefix("warning: "))


def _shown(text: str) -> str:
    return " ".join(printable(text[:_LONGEST_REASON]).split())


def _figures(status: dict[str, Any], text: str) -> Answer:
    gpus, queue = status["gpus"], status["queue"]
    divided = {(gpu["vendor"], gpu["index"]) for gpu in gpus if gpu["uuid"].startswith("MIG-")}
    usable = [gpu for gpu in gpus if gpu["uuid"].startswith("MIG-") or (gpu["vendor"], gpu["index"]) not in divided]
    held: Counter[str] = Counter()
    for gpu in usable:
        for claim in gpu["shares"]:
            held[_shown(claim["user"] or "?")] += (claim["share"] or 0) / (gpu["memory_total"] or 1)  # type: ignore[assignment]
        if gpu["claim"] and not gpu["shares"]:
            held[_shown(gpu["claim"]["user"] or "?")] += 1
    broken = [
        f"GPU {gpu['index']}: {gpu['reason']}"
        for gpu in usable
        if gpu["state"] == "unusable" and gpu["state_shown"] != "drained"
    ]
    since = [one["since"] for one in queue if one["since"] is not None]
    return Answer(
        status,
        text=text,
        free=sum(gpu["state"] in FREE for gpu in usable),
        total=len(usable),
        models=dict(Counter(_shown(gpu["name"]) for gpu in usable)),
        waiting=len(queue),
        longest=float(max(0, int(time.time() - min(since)))) if since else None,  # which NaN and infinity are not
        held=dict(held),
        broken=tuple(map(_shown, broken)),
        identity=repr((status["host"], status["state_dir"], *(gpu["uuid"] for gpu in gpus))),
    )
