"""The number of GPUs that the batch job asked for, for ``nb_gpus="job"``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..argument_style import ArgumentStyle
from ..errors import UnsatisfiableRequestError
from .context import count
from .job import current

if TYPE_CHECKING:
    from .context import JobContext


_WAY_OUT = "set SAFE_GPU_NB_GPUS=N, or write the number of GPUs instead of job"

_COUNTED = {"slurm": "SLURM_GPUS_ON_NODE", "pbs": "PBS_NGPUS"}

# These schedulers list the assigned GPUs in one of these variables and may have no variable with their number.
_LISTED = {"lsf", "pbs"}
_LISTS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def number_for_job(
    environ: Mapping[str, str], *, ask: bool = True, spelling: type[ArgumentStyle] = ArgumentStyle
) -> int:
    """The number of GPUs that this process is to claim, from 1 up.

    ``SAFE_GPU_NB_GPUS`` takes precedence and is not divided. Otherwise the GPUs of the job on this host
    (:func:`declared_gpus`) are divided by the number of ranks that a launcher started here, rounding down: ranks work
    in step, so each gets the same number.

    Args:
        ask: whether qstat may be run.
        spelling: how the caller writes arguments, for messages.

    Raises:
        UnsatisfiableRequestError: the number is not known, or it is too small. ``value`` is 0 if the job is known to
            have asked for no GPU.
    """
    own = environ.get("SAFE_GPU_NB_GPUS", "").strip()
    if own:
        number = count(environ, "SAFE_GPU_NB_GPUS")
        if not number:
            raise UnsatisfiableRequestError(
                f"SAFE_GPU_NB_GPUS={own!r} is not a number of GPUs: set it to a whole number from 1 up, or unset it",
                value=own,
            )
        return number
    context = current(environ)
    if context.scheduler is None:
        raise UnsatisfiableRequestError(
            f"{spelling.setting('nb_gpus', spelling.value('job'))} takes the number that the batch job asked for, and "
            f"this process is in no batch job: {_WAY_OUT}",
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
    """The number of GPUs that the batch job asked for on this host, for all ranks together; None if not known.

    The number comes from the scheduler's variables. In Grid Engine it comes from qstat, if ``ask`` is true (about
    0.1 s, at most ``patience`` seconds). It never raises, because claims use it only for a warning.
    """
    return _declared(environ, current(environ), ask, patience)[0]


def _declared(environ: Mapping[str, str], context: JobContext, ask: bool, patience: float) -> tuple[int | None, str]:
    """The number, or None with the reason in brackets, for the end of a clause."""
    if context.requested_gpus is not None:
        return context.requested_gpus, ""
    if context.scheduler == "sge" and context.job_id is not None and ask:
        from . import qstat

        try:
            return qstat.ask(environ, context.job_id, patience=patience), ""
        except qstat.QstatError as err:
            return None, f" ({err})"
    visible = next((environ[name] for name in _LISTS if name in environ), None)
    if context.scheduler in _LISTED and visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1", "NoDevFiles")]), ""
    variable = _COUNTED.get(context.scheduler or "")
    return None, f" ({variable} is not set)" if variable else ""
