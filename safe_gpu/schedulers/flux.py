"""Flux: the environment of a task of a job as a :class:`JobContext`. Pure.

The variables are those of flux-environment(7), "JOB ENVIRONMENT".
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .context import JobContext, count

# F58, such as "ƒ3ETxsR9H"; Flux takes "f" for its first letter, too.
_JOB = re.compile(r"[ƒf]([1-9A-HJ-NP-Za-km-z]{1,12})")


def parse(environ: Mapping[str, str]) -> JobContext | None:
    """The Flux job of this process; None outside one.

    Flux lists the GPUs of the job on this host in CUDA_VISIBLE_DEVICES, for AMD GPUs too, and -1 if there are none.
    With ``-o gpu-affinity=per-task`` it lists those of the task instead, which nothing tells apart. So their number is
    known only if each host runs one task.
    """
    match = _JOB.fullmatch(environ.get("FLUX_JOB_ID", "").strip())
    if match is None:
        return None
    tasks, hosts = count(environ, "FLUX_JOB_SIZE"), count(environ, "FLUX_JOB_NNODES")
    alone = tasks is not None and tasks == hosts
    listed = environ.get("CUDA_VISIBLE_DEVICES") if alone else None
    return JobContext(
        scheduler="flux",
        job_id=f"f{match[1]}",
        local_rank=count(environ, "FLUX_TASK_LOCAL_ID"),
        local_size=(tasks or None) if hosts == 1 else 1 if alone else None,
        requested_gpus=None if listed is None else len([one for one in listed.split(",") if one not in ("", "-1")]),
    )
