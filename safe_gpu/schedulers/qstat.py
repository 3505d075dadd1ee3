"""What a Grid Engine job asked for, from ``qstat -j JOB -xml``: the last resort, since only it knows.

The answer is for this host: a consumable counts once per slot, per job or per host, and a parallel job has slots on
several hosts. Only :func:`hard_request` and :func:`here` are pure; :func:`ask` runs qstat and reads the job's spool.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .sge import resource_names

__all__ = ["QstatError", "Request", "Slots", "ask", "hard_request", "here", "slots"]

_HARD = re.compile(r"<JB_hard_resource_list>.*?</JB_hard_resource_list>", re.DOTALL)
_NUMBERS = {"1", "8", "10"}  # CE_valtype: INT, DOUBLE, RSMAP; a boolean "gpu" picks hosts and counts nothing
_PER_SLOT, _PER_JOB = "1", "2"  # CE_consumable: YES, JOB; Univa's HOST is 3


class QstatError(Exception):
    """qstat does not answer here; the message says why."""


class Request(NamedTuple):
    """``amount`` GPUs, counted ``per`` "slot", "job" or "host"."""

    amount: float
    per: str


class Slots(NamedTuple):
    """How many slots the job has on this host (None: unknown), and whether its script runs here."""

    number: int | None
    master: bool


def ask(environ: Mapping[str, str], job_id: str, *, patience: float = 10.0) -> int:
    """GPUs that this job has on this host by its hard request, 0 where it asked for none. Takes about 0.1 s.

    ``patience`` is in seconds.

    Raises:
        QstatError: qstat is missing or refused (execution hosts need not be submit hosts), or its answer has no sense.
    """
    import subprocess

    try:
        answer = subprocess.run(
            [_program(environ), "-j", job_id, "-xml"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=dict(environ),
            timeout=patience,
        )
    except subprocess.TimeoutExpired:
        raise QstatError(f"qstat did not answer in {patience:g} s") from None
    except OSError as err:
        raise QstatError(f"qstat cannot be run here ({err.strerror or err})") from err
    text = answer.stdout.decode(errors="replace")
    if answer.returncode != 0 or f"<JB_job_number>{job_id}</JB_job_number>" not in text:
        said = _reason(text, answer.stderr.decode(errors="replace")) or f"exit status {answer.returncode}"
        raise QstatError(f"qstat does not tell about job {job_id}: {said}")
    request = hard_request(text, resource_names(environ))
    if request is None:
        return 0
    number = here(request, slots(environ) if request.per != "host" else Slots(None, True))
    if number is None:
        raise QstatError("it is not known how many slots of the job are on this host")
    return number


def hard_request(xml: str, names: Iterable[str]) -> Request | None:
    """The GPUs among the hard requests in an answer of ``qstat -j JOB -xml``; None where there are none.

    Only that list is parsed: job names and environments elsewhere make some versions write broken XML. The first of
    ``names`` that was asked for counts.

    Raises:
        QstatError: the list is no XML.
    """
    from xml.etree import ElementTree

    found = {}
    for part in _HARD.findall(xml):
        try:
            root = ElementTree.fromstring(part)
        except ElementTree.ParseError as err:
            raise QstatError(f"qstat's list of requests cannot be read ({err})") from err
        for entry in root:
            amount = _number(entry.findtext("CE_doubleval"), entry.findtext("CE_stringval"))
            if amount is not None and entry.findtext("CE_valtype", "1") in _NUMBERS:
                counted = {_PER_SLOT: "slot", _PER_JOB: "job"}.get(entry.findtext("CE_consumable", _PER_SLOT), "host")
                found[entry.findtext("CE_name", "").lower()] = Request(amount, counted)
    return next((found[name.lower()] for name in names if name.lower() in found), None)


def here(request: Request, slots: Slots) -> int | None:
    """A request as a number of GPUs on this host; None where the slots would have to be known and are not.

    A consumable that counts per job is taken from the host where the job's script runs.

    >>> here(Request(1.0, "slot"), Slots(4, True))
    4
    """
    if request.per == "slot":
        return None if slots.number is None else int(request.amount * slots.number + 0.5)
    if request.per == "job" and not slots.master:
        return 0
    return int(request.amount + 0.5)


def slots(environ: Mapping[str, str]) -> Slots:
    """How much of a parallel job is on this host. A job without a parallel environment has one slot.

    The host file lists all hosts, that of the job's script first. A task that ``qrsh -inherit`` started elsewhere has
    none; there the execution daemon's own note in the spool directory tells.
    """
    spool = environ.get("SGE_JOB_SPOOL_DIR", "")
    hostfile = _read(environ.get("PE_HOSTFILE", "")) or (_read(f"{spool}/../pe_hostfile") if spool else "")
    lines = [line.split() for line in hostfile.splitlines()]
    hosts = [(line[0], int(line[1])) for line in lines if len(line) > 1 and line[1].isdecimal()]
    if hosts:
        own = {_short(os.uname().nodename), _short(environ.get("HOSTNAME", ""))}
        numbers = [number for host, number in hosts if _short(host) in own]
        return Slots(sum(numbers) if numbers else None, bool(numbers) and _short(hosts[0][0]) in own)
    alone = environ.get("NHOSTS", "1") == "1"
    note = re.search(r"^host_slots=([0-9]+)$", _read(f"{spool}/config") if spool else "", re.MULTILINE)
    if note:
        return Slots(int(note[1]), alone)
    total = environ.get("NSLOTS", "1")
    return Slots(int(total) if alone and total.isdecimal() else None, alone)


def _reason(answer: str, error: str) -> str:
    """What qstat says instead of an answer. Son of Grid Engine refuses in XML on stdout, with exit status 0."""
    from html import unescape

    if "<unknown_jobs" in answer:
        return "it knows no such job"
    texts = re.findall(r"<AN_text>(.*?)</AN_text>", answer, re.DOTALL) or [error, answer]
    return next((unescape(text).strip().splitlines()[0] for text in texts if text.strip()), "")


def _number(*texts: str | None) -> float | None:
    for text in texts:
        try:
            amount = float(text or "")
        except ValueError:
            continue
        if 0 <= amount < 1e6:
            return amount
    return None


def _short(host: str) -> str:
    return host.partition(".")[0].lower()


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 20)
    except (OSError, ValueError):
        return ""


def _program(environ: Mapping[str, str]) -> str:
    """qstat on PATH, else where Grid Engine keeps it: jobs may run with a PATH of their own."""
    import shutil

    own = [
        environ.get("SGE_BINARY_PATH", ""),
        os.path.join(environ.get("SGE_ROOT", ""), "bin", environ.get("SGE_ARCH", "")),
    ]
    path = [environ.get("PATH", os.defpath), *(place for place in own if os.path.isabs(place))]
    program = shutil.which("qstat", path=os.pathsep.join(path))
    if program is None:
        raise QstatError("qstat is not on PATH here")
    return program
