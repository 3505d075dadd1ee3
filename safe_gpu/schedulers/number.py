"""How many GPUs the batch job asked for: what ``nb_gpus="job"`` means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..errors import UnsatisfiableRequestError
from .context import count

if TYPE_CHECKING:
    from .context import JobContext

__all__ = ["declared_gpus", "number_for_job"]

_WAY_OUT = "set SAFE_GPU_NB_GPUS=N, or ask for a number of GPUs instead of 'job'"

_COUNTED = {"slurm": "SLURM_GPUS_ON_NODE", "pbs": "PBS_NGPUS"}

# Where the scheduler gives GPUs but does not count them in a variable of its own, it sets this one.
_LISTED = {"lsf", "pbs"}


def number_for_job(environ: Mapping[str, str], *, ask: bool = True) -> int:
    """The number of GPUs that this process is to claim, from 1 up.

    ``SAFE_GPU_NB_GPUS`` comes first and is taken as it stands. Else it is what the job has on this host
    (:func:`declared_gpus`), divided evenly where a launcher started several ranks here: 4 GPUs for 4 ranks are 1 each,
    and what does not divide is left over, since ranks work in step.

    Raises:
        UnsatisfiableRequestError: the number is not known, or there is none to take; the message names the way out.
            Its ``value`` is 0 where the job is known to have asked for no GPU.
    """
    from . import current

    own = environ.get("SAFE_GPU_NB_GPUS", "").strip()
    if own:
        number = count(environ, "SAFE_GPU_NB_GPUS")
        if not number:
            raise UnsatisfiableRequestError(
                f"SAFE_GPU_NB_GPUS={own!r} is no number of GPUs: set it to a whole number from 1 up, or unset it",
                value=own,
            )
        return number
    context = current(environ)
    if context.scheduler is None:
        raise UnsatisfiableRequestError(
            f"nb_gpus='job' takes the number that the batch job asked for, and this process is in no batch job: "
            f"{_WAY_OUT}",
            value="job",
        )
    job = f"job {context.job_label or '(of unknown number)'}"
    number, trouble = _declared(environ, context, ask, 10.0)
    if number is None:
        raise UnsatisfiableRequestError(f"how many GPUs {job} asked for is not known{trouble}: {_WAY_OUT}", value="job")
    if number == 0:
        raise UnsatisfiableRequestError(
            f"{job} asked for no GPU on this host: ask its scheduler for some, or {_WAY_OUT}", value=0
        )
    ranks = context.local_size or 1
    if number < ranks:
        raise UnsatisfiableRequestError(
            f"{job} asked for {number} GPU(s) on this host and {ranks} processes were started here: start at most "
            f"{number}, ask for more GPUs, or {_WAY_OUT}",
            value=number,
        )
    return number // ranks


def declared_gpus(environ: Mapping[str, str], *, ask: bool = True, patience: float = 10.0) -> int | None:
    """How many GPUs the batch job asked for on this host, all ranks together; None where nobody says.

    The scheduler's variables tell, except in Grid Engine, where ``ask`` allows to run qstat (about 0.1 s; ``patience``
    seconds at most). It never raises: to warn of a claim larger than what the job declared is no reason to fail it.
    """
    from . import current

    return _declared(environ, current(environ), ask, patience)[0]


def _declared(environ: Mapping[str, str], context: JobContext, ask: bool, patience: float) -> tuple[int | None, str]:
    """The number, and where there is none, why (as the tail of a sentence)."""
    if context.requested_gpus is not None:
        return context.requested_gpus, ""
    if context.scheduler == "sge" and context.job_id is not None and ask:
        from . import qstat

        try:
            return qstat.ask(environ, context.job_id, patience=patience), ""
        except qstat.QstatError as err:
            return None, f" ({err})"
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if context.scheduler in _LISTED and visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1", "NoDevFiles")]), ""
    variable = _COUNTED.get(context.scheduler or "")
    return None, f" ({variable} is not set)" if variable else ""
