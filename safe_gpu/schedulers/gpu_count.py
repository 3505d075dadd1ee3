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
from ..host.programs import Output, TooLate, TooMuch, find_program, output_of
from ..wording import style
from ..wording.text import plural
from .job import (
    GridEngine,
    JobContext,
    Slurm,
    count,
    current,
    lines_of_this_host,
    resource_names,
    scheduler_of,
    text_of,
    visible_gpus,
)

_MOST_OUTPUT = 4 << 20
_LONGEST = 300  # characters of a reason

# The lists of requests in qstat's answer. JRS is a request set of Open Cluster Scheduler 9.1.
_LISTS = (
    "JB_hard_resource_list", "JB_hard_queue_list", "JB_soft_resource_list", "JB_soft_queue_list",
    "JRS_hard_resource_list", "JRS_hard_queue_list", "JRS_soft_resource_list", "JRS_soft_queue_list",
    "JB_master_hard_queue_list",
)  # fmt: skip
_MODEL = "(?<![a-z0-9])(?:[apvh]100|[hb]200|mi[1-3][0-9]{2}x?)(?![a-z0-9])"
_GPU_LIKE = re.compile(f"gpu|cuda|nvidia|geforce|tesla|quadro|radeon|rtx|gtx|{_MODEL}", re.IGNORECASE)
_SLOTS = "[0-9]{1,9}"

# CE_valtype: INT, DOUBLE, RSMAP; BOOL picks hosts and counts nothing.
_NUMBERS = ("1", "8", "10")
_FLAG = "5"

_PER = {"1": "slot", "2": "job"}  # CE_consumable: YES, JOB; HOST is 3

# JRS_scope.
_MASTER_TASK = "1"
_SLAVE_TASKS = "2"


class QstatError(Exception):
    """A scheduler gives no usable answer on this host; the message says why."""


class ResourceRequest(NamedTuple):
    """A request for ``amount`` GPUs per slot, per job or per host; ``per`` is "slot", "job" or "host".

    ``of_slaves``: whether only the slave tasks of a parallel job get them.
    """

    amount: float
    per: str
    of_slaves: bool = False


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
    programs = os.path.join(environ.get("SGE_ROOT", ""), "bin", environ.get("SGE_ARCH", ""))
    own = (environ.get("SGE_BINARY_PATH", ""), programs)
    answer = _asked(environ, "qstat", "-j", job_id, "-xml", patience=patience, beside=own)
    if answer.status != 0 or f"<JB_job_number>{job_id}</JB_job_number>" not in answer.text:
        said = _reason(answer) or f"exit status {answer.status}"
        raise QstatError(f"qstat gives no information on job {job_id}: {said}")
    limit = re.search(r"<CE_name>h_rt</CE_name>(?:(?!<CE_name>).)*?<CE_doubleval>([0-9]+)", answer.text, re.DOTALL)
    if limit:
        _run_times[job_id] = int(limit[1])
    request = hard_request(answer.text, resource_names(environ))
    if request is None:
        return 0
    number = here(request, slots(environ))
    if number is None:
        hosts = ", ".join(dict.fromkeys(host.name for host in _hosts(environ))) or "no host"
        tasks = f"how many of its tasks are on this host, {os.uname().nodename}"
        doubt = f"{tasks}, is unclear: its host file names {hosts}"
        raise QstatError(printable(doubt[:_LONGEST]))
    return number


def _asked(
    environ: Mapping[str, str], name: str, *arguments: str, patience: float, beside: Iterable[str] = ()
) -> Output:
    """Run a program of the scheduler, and return what it answers.

    Args:
        patience: seconds.
        beside: directories in which the program may be beside those on PATH; relative ones do not count.

    Raises:
        QstatError: it is missing, cannot be run or does not answer in ``patience`` seconds.
    """
    try:
        program = find_program(name, environ, *[place for place in beside if os.path.isabs(place)])
        if program is None:
            raise QstatError(f"{name} is not on PATH here")
        variables = {**environ, "LC_ALL": "C"}
        command = [program, *arguments]
        return output_of(command, env=variables, timeout=patience, most=_MOST_OUTPUT, separate_stderr=True)
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
    """Return the job with its end or its walltime, where the scheduler gave these with the number of GPUs, or is asked.

    Args:
        ask: whether Slurm may be asked, which takes about 0.05 s, at most 3 s.
    """
    if job.ends is not None or job.walltime is not None or job.job_id is None:
        return job
    scheduler = scheduler_of(job)
    if isinstance(scheduler, GridEngine):
        return job._replace(walltime=_run_times.get(job.job_id))
    if isinstance(scheduler, Slurm) and ask:
        return job._replace(ends=_end_by_squeue(environ))
    return job


def _end_by_squeue(environ: Mapping[str, str]) -> int | None:
    """Return when Slurm ends this job; None if that is not known."""
    number = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or ""
    try:
        answer = _asked(environ, "squeue", "-h", "-j", number, "-o", "%e", patience=_PATIENCE)
        ends = int(time.mktime(time.strptime(answer.text.strip(), "%Y-%m-%dT%H:%M:%S")))
    except (QstatError, ValueError, OverflowError):  # a job without a limit ends at N/A
        return None
    if answer.status != 0:
        return None
    return ends


def hard_request(xml: str, names: Iterable[str]) -> ResourceRequest | None:
    """Return the request for GPUs in an answer of ``qstat -j JOB -xml``; None if the job asked for none.

    The first of ``names`` that was requested as a number counts. The master task's request set is for one task, on the
    host of the job's script. That of the slave tasks precedes it.

    Raises:
        QstatError: a list is not valid XML; or the job speaks of GPUs in a resource, a queue or a parallel environment
            and gives no number, as with a flag, a soft request, or a name that is not in ``names``.
    """
    names = [name.lower() for name in names]
    found: dict[str, ResourceRequest] = {}
    spoken = [f"-pe {pe}" for pe in re.findall("<JB_pe>([^<]{1,99})</JB_pe>", xml) if _GPU_LIKE.search(pe)]
    for entry in _entries(xml):
        if entry.kind == _FLAG and entry.amount == 0:  # wants a host without
            continue
        if entry.name.lower() in names or entry.is_like_gpu:
            spoken.append(entry.option)
        if entry.amount is not None and entry.kind in _NUMBERS and entry.is_hard_resource:
            found[entry.name.lower()] = ResourceRequest(entry.amount, entry.per, of_slaves=entry.scope == _SLAVE_TASKS)
    for name in names:
        if name in found:
            return found[name]
    if spoken:
        hint = "SAFE_GPU_SGE_RESOURCE=NAME would say which resource counts them"
        raise QstatError(f"{printable(spoken[0][:_LONGEST])} gives no number of GPUs; {hint}")
    return None


class _Entry(NamedTuple):
    """One entry of a list of resources or queues.

    Attributes:
        list_name: one of ``_LISTS``.
        scope: of the list, as ``JRS_scope``.
        name: of a resource or a queue.
        text: the value of a resource; None for a queue.
        kind: as ``CE_valtype``.
        amount: the value of a resource as a number, None if it is none.
        consumable: as ``CE_consumable``.
    """

    list_name: str
    scope: str
    name: str
    text: str | None
    kind: str
    amount: float | None
    consumable: str

    @property
    def is_hard_resource(self) -> bool:
        """Whether the job runs nowhere without it."""
        return self.list_name.endswith("_hard_resource_list")

    @property
    def is_like_gpu(self) -> bool:
        """Whether it seems to be about GPUs, and does not exclude some: ``-l hostname=!gpu*``, ``-q !gpu.q``."""
        wanted = f"{self.name}={self.text}".partition("!")[0]
        return _GPU_LIKE.search(wanted) is not None

    @property
    def option(self) -> str:
        """How it was asked for."""
        if self.text is None:
            return f"-q {self.name}"
        return f"-l {self.name}={self.text}"

    @property
    def per(self) -> str:
        """As in :class:`ResourceRequest`. The master task is one."""
        if self.scope == _MASTER_TASK:
            return "job"
        return _PER.get(self.consumable, "host")


def _entries(xml: str) -> Iterator[_Entry]:
    """Yield each entry of each list of resources or queues.

    Nothing else is parsed, because some versions write broken XML in other parts (job names, environments).

    Raises:
        QstatError: a list is not valid XML.
    """
    for list_name in _LISTS:
        for part in xml.split(f"</{list_name}>")[:-1]:
            before, begun, content = part.partition(f"<{list_name}>")
            if not begun:
                continue
            scope = before.rpartition("<JRS_scope>")[2][:1]
            for element in _parsed(f"<{list_name}>{content}</{list_name}>"):
                yield _Entry(
                    list_name,
                    scope,
                    name=element.findtext("CE_name") or element.findtext("QR_name") or "",
                    text=element.findtext("CE_stringval"),
                    kind=element.findtext("CE_valtype", "1"),
                    amount=_number(element.findtext("CE_doubleval")),
                    consumable=element.findtext("CE_consumable", "1"),
                )


def _parsed(xml: str) -> Any:
    from xml.etree import ElementTree

    try:
        return ElementTree.fromstring(xml)
    except ElementTree.ParseError as err:
        raise QstatError(f"qstat's list of requests cannot be read ({err})") from err


def here(request: ResourceRequest, slots: Slots) -> int | None:
    """Return a request as a number of GPUs on this host; None if it depends on the number of slots and that is not
    known.

    A request per job counts on the host where the job's script runs, and nowhere else. There the number of slave tasks
    depends on ``job_is_first_task`` of the parallel environment, which qstat does not show.

    >>> here(ResourceRequest(1.0, "slot"), Slots(4, True))
    4
    """
    if request.of_slaves and (slots.master or slots.number is None):
        return None
    if request.per == "slot":
        if slots.number is None:
            return None
        return _rounded(request.amount * slots.number)
    if request.per == "job" and not request.of_slaves and not slots.master:
        if slots.number is None:
            return None
        return 0
    return _rounded(request.amount)


def _rounded(amount: float) -> int:
    return int(amount + 0.5)


def slots(environ: Mapping[str, str]) -> Slots:
    """Return the slots of this job on this host. A job without a parallel environment has one slot.

    A task that ``qrsh -inherit`` started has a directory of its own in the spool directory of the job, where the host
    file lies only on the host of the job's script. Elsewhere its NHOSTS is 1, too. The file ``config`` of the execution
    daemon in the spool directory has the number of slots here.
    """
    spool = environ.get("SGE_JOB_SPOOL_DIR", "").rstrip("/")
    hosts = _hosts(environ)
    lines = lines_of_this_host([host.name for host in hosts], environ)
    if lines:
        return Slots(sum(hosts[line].slots for line in lines), master=lines[0] == 0)
    is_alone = environ.get("NHOSTS", "1") == "1" and not hosts
    config = text_of(f"{spool}/config") if spool else ""
    note = re.search(rf"^host_slots=({_SLOTS})$", config, re.MULTILINE)
    number = ""
    if note:
        number = note[1]
    elif is_alone:
        number = environ.get("NSLOTS", "1")
    is_inherited_task = spool != "" and not re.fullmatch(r"[0-9]+\.[0-9]+", os.path.basename(spool))
    if is_inherited_task:
        master = os.path.exists(f"{spool}/../pe_hostfile")
    else:
        master = is_alone or note is not None
    if not re.fullmatch(_SLOTS, number):
        return Slots(None, master)
    return Slots(int(number), master)


class _Host(NamedTuple):
    """A host of a parallel job, and the number of slots there."""

    name: str
    slots: int


def _hosts(environ: Mapping[str, str]) -> list[_Host]:
    """Return the hosts of this job, the host of the job's script first; [] if there is no list."""
    spool = environ.get("SGE_JOB_SPOOL_DIR", "")
    hostfile = text_of(environ.get("PE_HOSTFILE", ""))
    if not hostfile and spool:
        hostfile = text_of(f"{spool}/../pe_hostfile")
    hosts = []
    for line in hostfile.split("\n"):
        fields = line.split()
        if len(fields) > 1 and re.fullmatch(_SLOTS, fields[1]):
            hosts.append(_Host(fields[0], int(fields[1])))
    return hosts


def _reason(answer: Output) -> str:
    """Return the reason why qstat gave no answer. Son of Grid Engine refuses in XML on stdout, with exit status 0."""
    from html import unescape

    if "<unknown_jobs" in answer.text:
        return "it knows no such job"
    said = answer.errors.strip() or answer.text
    denial, ended, _ = answer.text.partition("<AN_text>")[2].partition("</AN_text>")
    if ended:
        said = denial
    return printable(unescape(said[:_LONGEST]).strip().partition("\n")[0])


def _number(text: str | None) -> float | None:
    try:
        amount = float(text or "")
    except ValueError:
        return None
    if not 0 <= amount < 1e6:
        return None
    return amount


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
    own = environ.get("SAFE_GPU_NB_GPUS", "").strip()
    if own:
        number = count(environ, "SAFE_GPU_NB_GPUS")
        if number:
            return number
        wrong = f"SAFE_GPU_NB_GPUS={own!r} is not a number of GPUs"
        raise UnsatisfiableRequestError(f"{wrong}: set it to a whole number from 1 up, or unset it", value=own)
    way_out = f"set SAFE_GPU_NB_GPUS=N, or write {style.setting('nb_gpus', 'N')}"
    context = current(environ)
    if context.scheduler is None:
        asked = f"{style.written('nb_gpus', 'job')} takes the number that the batch job asked for"
        raise UnsatisfiableRequestError(f"{asked}, and this process is in no batch job: {way_out}", value="job")
    job = f"job {context.job_label or '(of unknown number)'}"
    number, trouble = _declared(environ, context, ask=ask, patience=10.0)
    if number is None:
        raise UnsatisfiableRequestError(f"how many GPUs {job} asked for is not known{trouble}: {way_out}", value="job")
    ranks = context.local_size or 1
    if context.own_list:
        ranks = 1
    if number < ranks:
        few = f"{plural(number)} on this host, for {ranks} processes here: start at most {number}, ask for more GPUs"
        if number == 0:
            few = "no GPU on this host: ask its scheduler for some"
        raise UnsatisfiableRequestError(f"{job} asked for {few}, or {way_out}", value=number)
    return number // ranks


def declared_gpus(environ: Mapping[str, str], *, ask: bool = True, patience: float = 10.0) -> int | None:
    """Return the number of GPUs that the batch job asked for on this host, for all ranks together; None if not known.

    The number comes from the scheduler's variables. In Grid Engine it comes from qstat, if ``ask`` is true (about
    0.1 s, at most ``patience`` seconds). It never raises, because claims use it only for a warning.
    """
    number, _ = _declared(environ, current(environ), ask=ask, patience=patience)
    return number


def _declared(environ: Mapping[str, str], job: JobContext, *, ask: bool, patience: float) -> tuple[int | None, str]:
    """Return the number, or None with the reason in brackets, for the end of a clause."""
    if job.requested_gpus is not None:
        return job.requested_gpus, ""
    scheduler = scheduler_of(job)
    if scheduler is None:
        return None, ""
    if isinstance(scheduler, GridEngine) and job.job_id is not None and ask:
        try:
            return ask_qstat(environ, job.job_id, patience=patience), ""
        except QstatError as err:
            return None, f" ({err})"
    visible = visible_gpus(environ)
    if scheduler.lists_gpus and visible:
        return None, f" ({plural(visible)} visible to each of {job.local_size} processes may be its own or shared)"
    if scheduler.number:
        return None, f" ({scheduler.number} is not set)"
    return None, ""
