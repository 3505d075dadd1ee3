"""The number of GPUs that the batch job asked for: by its variables, or by Grid Engine's qstat.

Most versions of Grid Engine show the number nowhere else. The answer is for this host: a consumable counts per slot,
per job or per host, and a parallel job has slots on several hosts. :func:`hard_request` and :func:`here` are pure;
:func:`ask_qstat` runs qstat and reads the job's spool directory.
"""

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ..errors import UnsatisfiableRequestError
from ..host.foreign_files import printable
from ..host.programs import TooLate, TooMuch, find_program, output_of
from ..wording import style
from ..wording.text import plural
from .job import SCHEDULERS, JobContext, count, current, lines_of_this_host, resource_names, text_of, visible_gpus

_MOST_OUTPUT = 4 << 20
_LONGEST = 300  # characters of a reason
# JRS is a request set of Open Cluster Scheduler 9.1.
_LISTS = [f"{of}_{one}_list" for of in ("JB_hard", "JB_soft", "JRS_hard", "JRS_soft") for one in ("resource", "queue")]
_LISTS += ["JB_master_hard_queue_list"]
_MODEL = "(?<![a-z0-9])(?:[apvh]100|[hb]200|mi[1-3][0-9]{2}x?)(?![a-z0-9])"
_GPU_LIKE = re.compile(f"gpu|cuda|nvidia|geforce|tesla|quadro|radeon|rtx|gtx|{_MODEL}", re.IGNORECASE)
_SLOTS = "[0-9]{1,9}"
_NUMBERS, _FLAG = {"1", "8", "10"}, "5"  # CE_valtype: INT, DOUBLE, RSMAP; BOOL picks hosts and counts nothing
_PER = {"1": "slot", "2": "job"}  # CE_consumable: YES, JOB; HOST is 3


class QstatError(Exception):
    """A scheduler gives no usable answer on this host; the message says why."""


class ResourceRequest(NamedTuple):
    """A request for ``amount`` GPUs per slot, per job or per host; ``per`` is "slot", "job" or "host".

    It is "slave slot" or "slave host" where only the slave tasks of a parallel job get them.
    """

    amount: float
    per: str


class Slots(NamedTuple):
    """The number of slots of the job on this host (None: unknown), and whether its script is known to run here."""

    number: int | None
    master: bool


def ask_qstat(environ: Mapping[str, str], job_id: str, *, patience: float = 10.0) -> int:
    """Return the number of GPUs that this job has on this host by its hard request, 0 if it asked for none.

    It takes about 0.1 s, at most ``patience`` seconds.

    Raises:
        QstatError: qstat is missing or refused (execution hosts need not be submit hosts), or its answer is invalid.
    """
    # A job's PATH may lack Grid Engine's directories.
    root, kind = environ.get("SGE_ROOT", ""), environ.get("SGE_ARCH", "")
    own = environ.get("SGE_BINARY_PATH", ""), os.path.join(root, "bin", kind)
    code, text, error = _asked(environ, "qstat", "-j", job_id, "-xml", patience=patience, beside=own)
    if code != 0 or f"<JB_job_number>{job_id}</JB_job_number>" not in text:
        said = _reason(text, error) or f"exit status {code}"
        raise QstatError(f"qstat gives no information on job {job_id}: {said}")
    if limit := re.search(r"<CE_name>h_rt</CE_name>(?:(?!<CE_name>).)*?<CE_doubleval>([0-9]+)", text, re.DOTALL):
        _run_times[job_id] = int(limit[1])
    request = hard_request(text, resource_names(environ))
    if request is None:
        return 0
    number = here(request, slots(environ))
    if number is None:
        hosts = ", ".join(dict(_hosts(environ))) or "no host"
        tasks = f"how many of its tasks are on this host, {os.uname().nodename}"
        doubt = f"{tasks}, is unclear: its host file names {hosts}"
        raise QstatError(printable(doubt[:_LONGEST]))
    return number


def _asked(
    environ: Mapping[str, str], name: str, *arguments: str, patience: float, beside: Iterable[str] = ()
) -> tuple[int, str, str]:
    """Run a program of the scheduler; return its exit status, its output and its errors.

    Raises:
        QstatError: it is missing, cannot be run or does not answer in ``patience`` seconds.
    """
    try:
        program = find_program(name, environ, *filter(os.path.isabs, beside))
        if program is None:
            raise QstatError(f"{name} is not on PATH here")
        variables = {**environ, "LC_ALL": "C"}
        return output_of(
            [program, *arguments], env=variables, timeout=patience, most=_MOST_OUTPUT, separate_stderr=True
        )
    except TooLate:
        raise QstatError(f"{name} did not answer in {patience:g} s") from None
    except TooMuch:
        raise QstatError(f"{name} prints more than {_MOST_OUTPUT >> 20} MiB") from None
    except OSError as err:
        raise QstatError(f"{name} cannot be run here ({err.strerror or err})") from err


_run_times: dict[str, int] = {}
"""Number of a job of Grid Engine -> its hard limit h_rt, in seconds, by the answers of qstat in this process."""

_PATIENCE = 3.0


def with_end(environ: Mapping[str, str], job: JobContext, *, ask: bool) -> JobContext:
    """Return the job with its end or its walltime, where the scheduler told these with the number of GPUs, or is asked.

    Args:
        ask: whether Slurm may be asked, which takes about 0.05 s, at most 3 s.
    """
    if job.ends is not None or job.walltime is not None or job.job_id is None:
        return job
    if job.scheduler == "sge":
        return job._replace(walltime=_run_times.get(job.job_id))
    if job.scheduler != "slurm" or not ask:
        return job
    number = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or ""
    try:
        code, text, _ = _asked(environ, "squeue", "-h", "-j", number, "-o", "%e", patience=_PATIENCE)
        ends = int(time.mktime(time.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S")))
    except (QstatError, ValueError, OverflowError):  # a job without a limit ends at N/A
        return job
    return job if code else job._replace(ends=ends)


def hard_request(xml: str, names: Iterable[str]) -> ResourceRequest | None:
    """Return the request for GPUs in an answer of ``qstat -j JOB -xml``; None if the job asked for none.

    The first of ``names`` that was requested as a number counts. The master task's request set is for one task, on the
    host of the job's script. That of the slave tasks precedes it.

    Raises:
        QstatError: a list is not valid XML; or the job speaks of GPUs in a resource, a queue or a parallel environment
            and gives no number, as with a flag, a soft request, or a name that is not in ``names``.
    """
    names = [name.lower() for name in names]
    found = {}
    spoken = [f"-pe {pe}" for pe in re.findall("<JB_pe>([^<]{1,99})</JB_pe>", xml) if _GPU_LIKE.search(pe)]
    for tag, scope, entries in _request_lists(xml):
        for entry in entries:
            name, text = entry.findtext("CE_name") or entry.findtext("QR_name") or "", entry.findtext("CE_stringval")
            kind, amount = entry.findtext("CE_valtype", "1"), _number(entry.findtext("CE_doubleval"))
            if kind == _FLAG and amount == 0:  # wants a host without
                continue
            wanted, _, _ = f"{name}={text}".partition("!")  # -l hostname=!gpu*, -q !gpu.q
            if name.lower() in names or _GPU_LIKE.search(wanted):
                spoken.append(f"-q {name}" if text is None else f"-l {name}={text}")
            if amount is not None and kind in _NUMBERS and tag.endswith("_hard_resource_list"):
                per = _PER.get(entry.findtext("CE_consumable", "1"), "host")
                per = {"1": "job", "2": f"slave {per}"}.get(scope, per)  # JRS_scope: master, slave
                found[name.lower()] = ResourceRequest(amount, per)
    request = next((found[name] for name in names if name in found), None)
    if request is None and spoken:
        hint = "SAFE_GPU_SGE_RESOURCE=NAME would say which resource counts them"
        raise QstatError(f"{printable(spoken[0][:_LONGEST])} gives no number of GPUs; {hint}")
    return request


def _request_lists(xml: str) -> Iterator[tuple[str, str, Any]]:
    """Yield each list of resources or queues: its name, its scope, its element.

    Nothing else is parsed, because some versions write broken XML in other parts (job names, environments).

    Raises:
        QstatError: a list is not valid XML.
    """
    from xml.etree import ElementTree

    for name in _LISTS:
        for part in xml.split(f"</{name}>")[:-1]:
            before, begun, entries = part.partition(f"<{name}>")
            try:
                root = ElementTree.fromstring(f"<{name}>{entries}</{name}>") if begun else ()
            except ElementTree.ParseError as err:
                raise QstatError(f"qstat's list of requests cannot be read ({err})") from err
            yield name, before.rpartition("<JRS_scope>")[2][:1], root


def here(request: ResourceRequest, slots: Slots) -> int | None:
    """Return a request as a number of GPUs on this host; None if it depends on the number of slots and that is not
    known.

    A request per job counts on the host where the job's script runs, and nowhere else. There the number of slave tasks
    depends on ``job_is_first_task`` of the parallel environment, which qstat does not show.

    >>> here(ResourceRequest(1.0, "slot"), Slots(4, True))
    4
    """
    if request.per.startswith("slave") and (slots.master or slots.number is None):
        return None
    if request.per.endswith("slot"):
        return None if slots.number is None else int(request.amount * slots.number + 0.5)
    if request.per == "job" and not slots.master:
        return None if slots.number is None else 0
    return int(request.amount + 0.5)


def slots(environ: Mapping[str, str]) -> Slots:
    """Return the slots of this job on this host. A job without a parallel environment has one slot.

    A task that ``qrsh -inherit`` started has a directory of its own in the spool directory of the job, where the host
    file lies only on the host of the job's script. Elsewhere its NHOSTS is 1, too. The file ``config`` of the execution
    daemon in the spool directory has the number of slots here.
    """
    spool = environ.get("SGE_JOB_SPOOL_DIR", "").rstrip("/")
    hosts = _hosts(environ)
    if mine := lines_of_this_host([host for host, _ in hosts], environ):
        return Slots(sum(hosts[line][1] for line in mine), mine[0] == 0)
    in_task = spool and not re.fullmatch(r"[0-9]+\.[0-9]+", os.path.basename(spool))
    alone = environ.get("NHOSTS", "1") == "1" and not hosts
    note = re.search(rf"^host_slots=({_SLOTS})$", text_of(f"{spool}/config") if spool else "", re.MULTILINE)
    master = os.path.exists(f"{spool}/../pe_hostfile") if in_task else alone or note is not None
    total = note[1] if note else environ.get("NSLOTS", "1") if alone else ""
    return Slots(int(total) if re.fullmatch(_SLOTS, total) else None, master)


def _hosts(environ: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return the hosts of this job and the slots there, the host of the job's script first; [] if there is no list."""
    spool = environ.get("SGE_JOB_SPOOL_DIR", "")
    hostfile = text_of(environ.get("PE_HOSTFILE", "")) or (text_of(f"{spool}/../pe_hostfile") if spool else "")
    lines = [line.split() for line in hostfile.split("\n")]
    return [(line[0], int(line[1])) for line in lines if len(line) > 1 and re.fullmatch(_SLOTS, line[1])]


def _reason(answer: str, error: str) -> str:
    """Return the reason why qstat gave no answer. Son of Grid Engine refuses in XML on stdout, with exit status 0."""
    from html import unescape

    if "<unknown_jobs" in answer:
        return "it knows no such job"
    denial, ended, _ = answer.partition("<AN_text>")[2].partition("</AN_text>")
    said = denial if ended else error.strip() or answer
    return printable(unescape(said[:_LONGEST]).strip().partition("\n")[0])


def _number(text: str | None) -> float | None:
    try:
        amount = float(text or "")
    except ValueError:
        return None
    return amount if 0 <= amount < 1e6 else None


def number_for_job(environ: Mapping[str, str], *, ask: bool = True) -> int:
    """Return the number of GPUs that this process is to claim, from 1 up.

    ``SAFE_GPU_NB_GPUS`` takes precedence and is not divided. Otherwise the GPUs of the job on this host
    (:func:`declared_gpus`) are divided by the number of ranks that a launcher started here, rounding down: ranks work
    in step, so each gets the same number. A rank that its launcher gave GPUs of its own gets these.

    Args:
        ask: whether qstat may be run.

    Raises:
        UnsatisfiableRequestError: the number is not known, or it is too small. ``value`` is 0 if the job is known to
            have asked for no GPU.
    """
    if own := environ.get("SAFE_GPU_NB_GPUS", "").strip():
        if number := count(environ, "SAFE_GPU_NB_GPUS"):
            return number
        wrong = f"SAFE_GPU_NB_GPUS={own!r} is not a number of GPUs"
        raise UnsatisfiableRequestError(f"{wrong}: set it to a whole number from 1 up, or unset it", value=own)
    way_out = f"set SAFE_GPU_NB_GPUS=N, or write {style.setting('nb_gpus', 'N')}"
    context = current(environ)
    if context.scheduler is None:
        asked = f"{style.written('nb_gpus', 'job')} takes the number that the batch job asked for"
        raise UnsatisfiableRequestError(f"{asked}, and this process is in no batch job: {way_out}", value="job")
    job = f"job {context.job_label or '(of unknown number)'}"
    number, trouble = _declared(environ, context, ask, 10.0)
    if number is None:
        raise UnsatisfiableRequestError(f"how many GPUs {job} asked for is not known{trouble}: {way_out}", value="job")
    ranks = 1 if context.own_list else context.local_size or 1
    if number < ranks:
        few = f"{plural(number)} on this host, for {ranks} processes here: start at most {number}, ask for more GPUs"
        few = few if number else "no GPU on this host: ask its scheduler for some"
        raise UnsatisfiableRequestError(f"{job} asked for {few}, or {way_out}", value=number)
    return number // ranks


def declared_gpus(environ: Mapping[str, str], *, ask: bool = True, patience: float = 10.0) -> int | None:
    """Return the number of GPUs that the batch job asked for on this host, for all ranks together; None if not known.

    The number comes from the scheduler's variables. In Grid Engine it comes from qstat, if ``ask`` is true (about
    0.1 s, at most ``patience`` seconds). It never raises, because claims use it only for a warning.
    """
    return _declared(environ, current(environ), ask, patience)[0]


def _declared(environ: Mapping[str, str], context: JobContext, ask: bool, patience: float) -> tuple[int | None, str]:
    """Return the number, or None with the reason in brackets, for the end of a clause."""
    if context.requested_gpus is not None:
        return context.requested_gpus, ""
    if context.scheduler == "sge" and context.job_id is not None and ask:
        try:
            return ask_qstat(environ, context.job_id, patience=patience), ""
        except QstatError as err:
            return None, f" ({err})"
    scheduler = next((one for one in SCHEDULERS if one.name == context.scheduler), None)
    if scheduler is not None and scheduler.lists_gpus and (visible := visible_gpus(environ)):
        return None, f" ({plural(visible)} visible to each of {context.local_size} processes may be its own or shared)"
    return None, f" ({scheduler.number} is not set)" if scheduler is not None and scheduler.number else ""
