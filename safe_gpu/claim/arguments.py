"""The arguments of a claim, checked before it changes anything."""

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..affinity.planner import AffinityOptions, falls_back, parse_options
from ..coordination.host_lock import MINIMUM_PATIENCE
from ..errors import GPUAffinityError, PlaceholderError, UnsatisfiableRequestError, package_logger
from ..gpus.devices import HostSnapshot
from ..host import procfs
from ..host.awaiting import Tell, tell_by
from ..host.foreign_files import printable_lines
from ..host.procfs import process_global
from ..runtimes.cuda_variables import render_cuda
from ..schedulers.job import JobContext, count, current, end_can_be_asked
from ..selection.request import Conditions, Selection, parse_request
from ..settings import variables as settings
from ..settings.values import as_index, number_of, parse_duration, parse_seconds, parse_size
from ..wording import style

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .limits import Quota


# Default timeouts in seconds. The scheduler has assigned a GPU to a batch job, so one will become free. Elsewhere the
# wait only covers the exit of a previous process.
_BATCH = 300.0

_INTERACTIVE = 10.0


UNDER_MAIN = (
    'put the claim under `if __name__ == "__main__":`, since each worker of multiprocessing imports the main module'
)


class DefaultTimeout:
    """The type of :data:`DEFAULT`, which stands for the result of :func:`default_timeout`."""

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT = process_global("default", DefaultTimeout())


def parse_timeout(timeout: object, environ: Mapping[str, str], *, in_batch_job: bool) -> float | None:
    """Return the seconds to wait, None for no limit. ``timeout`` is a number, None, a text for :func:`parse_duration`,
    or DEFAULT.

    Raises:
        UnsatisfiableRequestError: the value is negative, not a number, or of another type.
    """
    if timeout is DEFAULT:
        return default_timeout(environ, in_batch_job=in_batch_job)
    what = "a number of seconds: pass 0 (no wait), a positive number, or None (no limit)"
    return parse_seconds(timeout, "timeout", what)


def default_timeout(environ: Mapping[str, str], *, in_batch_job: bool) -> float | None:
    """Return ``SAFE_GPU_TIMEOUT``, else 300 s inside a batch job, else 10 s."""
    text = environ.get("SAFE_GPU_TIMEOUT")
    if text:
        return parse_duration(text, "SAFE_GPU_TIMEOUT")
    if in_batch_job:
        return _BATCH
    return _INTERACTIVE


_DAY = 86400.0

# ``hold_for="30"`` is probably 30 minutes or hours: a number below this, in seconds, that is written as text.
_UNIT_MISSING_BELOW = 60


class HoldTime(NamedTuple):
    """How long a claim will probably hold its GPUs, from the moment that it gets them.

    Attributes:
        seconds: at least 1; None if that is not known.
        end: when the batch job ends, Unix seconds; used if ``seconds`` is None.
        stated: whether the caller stated it. If not, a claim inside another one ends with that one.
    """

    seconds: float | None = None
    end: float | None = None
    stated: bool = False

    def at(self, now: float, outer_end: float | None = None) -> float | None:
        """Return the seconds for a claim that gets its GPUs at ``now``, at least 1; None is unknown.

        Args:
            outer_end: when the enclosing claim will probably end, Unix seconds; None if there is none, or if that is
                not known.
        """
        if self.stated:
            return self.seconds
        end = outer_end
        if end is None:
            if self.seconds is not None:
                return self.seconds
            end = self.end
        if end is None or end <= now:
            return None
        return max(1.0, round(end - now, 3))


UNKNOWN = HoldTime()


def parse_hold_for(hold_for: object, environ: Mapping[str, str], job: JobContext) -> HoldTime:
    """Return the meaning of ``hold_for``: seconds, a text for ``parse_duration``, None for unknown, or DEFAULT.

    The default is ``SAFE_GPU_FOR``, else the end of the batch job if that is at most a day away, else unknown.

    Raises:
        UnsatisfiableRequestError: less than a second, not a number, or of another type.
    """
    if hold_for is not DEFAULT:
        return HoldTime(_hold_seconds(hold_for, "hold_for"), stated=True)
    text = environ.get("SAFE_GPU_FOR")
    if text:
        return HoldTime(_hold_seconds(text, "SAFE_GPU_FOR"))
    now = time.time()
    end: float | None = job.ends
    if end is None and job.walltime is not None:
        # The job began with its session. In a later session the end is estimated too late, which delays nobody.
        end = now - (procfs.seconds_running(os.getsid(0)) or 0.0) + job.walltime
    if end is None or not now < end <= now + _DAY:
        return UNKNOWN
    return HoldTime(end=end)


def _hold_seconds(value: object, name: str) -> float | None:
    word = ""
    if isinstance(value, str):
        word = value.strip().lower()
    if word == "unknown":
        return None
    what = "a time to hold GPUs: give at least a second, or unknown"
    seconds = parse_seconds(value, name, what, least=1.0)
    is_short = seconds is not None and seconds < _UNIT_MISSING_BELOW
    if name == "hold_for" and is_short and word.isdecimal():
        in_hours = style.value(f"{value}h")
        in_minutes = style.value(f"{value}m")
        in_seconds = style.value(f"{value}s")
        raise UnsatisfiableRequestError(
            f"{style.written(name, value)} means {value} seconds? write {in_hours}, {in_minutes} or {in_seconds}",
            value=value,
        )
    return seconds


class _ByDefault(str):
    """The default of ``affinity``: equal to the mode "node", but a failure to bind only warns."""


NODE_BY_DEFAULT = _ByDefault("node")


class ClaimOptions(NamedTuple):
    """The checked arguments of a claim.

    Attributes:
        request: which GPUs, and how many.
        timeout: seconds to wait from ``began``, a ``time.monotonic()`` value; 0 does not wait, None waits without
            limit.
        logger: gets the steps at INFO.
        hold: how long the GPUs will probably be held.
        placeholder_fn: returns what holds a GPU; None is the default of the driver.
        binding: CPU affinity; None does not change it.
        memory: NUMA memory policy, or None.
        binding_required: whether the claim fails if binding fails.
        visible_as: how CUDA_VISIBLE_DEVICES names the GPUs.
        pause: seconds between setting CUDA_VISIBLE_DEVICES and the placeholders.
        delegate: whether child processes may claim from this claim.
        job: the batch job of this process.
        command: the command as in records, set by ``safe-gpu run``; None is that of this process.
        quota: the limits of the policy file; None if there is no such file.
        wait_limit: the policy file, if it made ``timeout`` shorter than was asked for.
        on_wait: called with a :class:`~safe_gpu.claim.report.WaitStatus` when waiting begins, when something changes,
            and once a minute. None: the logger gets these reports.
        on_delay: called with a line where a driver or a placeholder takes long. None: the logger gets it.
    """

    request: Selection
    timeout: float | None
    began: float
    logger: Any
    placeholder_fn: Callable[[int], Any] | None = None
    binding: "AffinityOptions | None" = None
    memory: str | None = None
    binding_required: bool = False
    visible_as: str = "index"
    pause: float = 0.0
    delegate: bool = False
    job: JobContext = JobContext()
    command: str | None = None
    on_wait: Callable[[Any], None] | None = None
    hold: HoldTime = UNKNOWN
    quota: "Quota | None" = None
    wait_limit: str = ""
    on_delay: Tell | None = None

    @property
    def tell(self) -> Tell:
        """What takes the lines about a driver or a placeholder that takes long."""
        if self.on_delay is None:
            return tell_by(self.logger)
        return self.on_delay

    @property
    def deadline(self) -> float:
        """``time.monotonic()`` value at which the wait ends; ``math.inf`` if it never does."""
        if self.timeout is None:
            return math.inf
        return self.began + self.timeout

    @property
    def lock_deadline(self) -> float | None:
        """``time.monotonic()`` value until which an attempt waits for host.lock; None waits without limit.

        It is always some time ahead. Otherwise the last attempt of a claim would fail whenever many processes use the
        lock.
        """
        if self.timeout is None:
            return None
        return max(self.began + self.timeout, time.monotonic() + MINIMUM_PATIENCE)


def imports_main() -> bool:
    """Return whether multiprocessing imports the main module of its parent into this process."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and getattr(process.current_process(), "_inheriting", False)


def warn_worker(logger: Any) -> None:
    """Warn that each worker of multiprocessing claims, if this process is one that imports the main module."""
    if imports_main():
        logger.warning("this worker claims GPUs of its own: %s", UNDER_MAIN)


def asks_for_none(nb_gpus: object) -> bool:
    """Return whether a claim is for no GPU: 0, or "job" where ``SAFE_GPU_NB_GPUS`` is 0."""
    if nb_gpus == "job":
        return count(os.environ, "SAFE_GPU_NB_GPUS") == 0
    return as_index(nb_gpus) == 0


def read_options(
    nb_gpus: int | str | tuple[int, int] = 1,
    *,
    placeholder_fn: Callable[[int], Any] | None = None,
    logger: Any = None,
    debug_sleep: float = 0.0,
    timeout: float | str | DefaultTimeout | None = DEFAULT,
    affinity: "str | AffinityOptions | None" = None,
    memory: str | None = None,
    visible_as: str = "index",
    delegate: bool = False,
    hold_for: float | str | DefaultTimeout | None = DEFAULT,
    vendor: str | None = None,
    command: str | None = None,
    on_wait: Callable[[Any], None] | None = None,
    on_delay: Tell | None = None,
    **conditions: "Unpack[Conditions]",
) -> ClaimOptions:
    """Check the arguments of ``claim_gpus``. The timeout counts from this call.

    Raises:
        UnsatisfiableRequestError: names the argument, its value and what to do.
        PlaceholderError: ``placeholder_fn`` is not callable.
    """
    began = time.monotonic()
    environ = os.environ
    if delegate and conditions.get("share") is not None:
        raise UnsatisfiableRequestError(
            f"delegate=True with share={conditions['share']!r}: no claim can be made inside a share, so leave one of "
            "them out",
            value=delegate,
        )
    logger = _checked_logger(logger)
    job = current(environ)
    number = nb_gpus
    if nb_gpus == "job":
        number = _number_for_job(environ)
    request = parse_request(number, vendor=vendor, **conditions)
    wait = parse_timeout(timeout, environ, in_batch_job=job.scheduler is not None)
    job_with_end = job
    if end_can_be_asked(job) and hold_for is DEFAULT and not environ.get("SAFE_GPU_FOR"):
        job_with_end = _ask_for_end(job, environ, request)
    hold = parse_hold_for(hold_for, environ, job_with_end)
    render_cuda((), visible_as=visible_as, snapshot=HostSnapshot(()))  # for its check of visible_as
    settings.check(environ)
    _check_binding(affinity, memory)
    binding = parse_options(affinity, memory)
    binding_required = (affinity is not NODE_BY_DEFAULT or memory is not None) and not falls_back(affinity)
    pause = _checked_pause(debug_sleep)
    _check_placeholder(placeholder_fn)
    for doubt in settings.doubts(environ):
        logger.warning("%s", doubt)
    return ClaimOptions(
        request=request,
        timeout=wait,
        began=began,
        logger=logger,
        placeholder_fn=placeholder_fn,
        binding=binding,
        memory=memory,
        binding_required=binding_required,
        visible_as=visible_as,
        pause=pause,
        delegate=delegate,
        job=job,
        command=command,
        on_wait=on_wait,
        hold=hold,
        on_delay=on_delay,
    )


def _checked_logger(logger: Any) -> Any:
    if logger is None:
        return package_logger()
    if not callable(getattr(logger, "info", None)):
        problem = f"logger={logger!r} is not a logger: pass a logging.Logger, or leave it out"
        raise UnsatisfiableRequestError(problem, value=logger)
    return logger


def _number_for_job(environ: Mapping[str, str]) -> int:
    from ..schedulers.gpu_count import number_for_job

    return number_for_job(environ)


def _ask_for_end(job: JobContext, environ: Mapping[str, str], request: Selection) -> JobContext:
    """Return a batch job with its end, if its scheduler tells that."""
    from ..schedulers.gpu_count import with_end

    # Thousands of array tasks of one GPU would ask it at once.
    return with_end(environ, job, ask=job.task_id is None or request.nb_gpus > 1)


def _check_binding(affinity: object, memory: object) -> None:
    """Refuse what means something else: a condition of memory, and affinity as a switch.

    Raises:
        GPUAffinityError: it is such a value.
    """
    if affinity is False:
        raise GPUAffinityError("affinity=False is not a mode: pass affinity=None to leave the CPUs as they are")
    if affinity is True:
        raise GPUAffinityError(
            "affinity=True is not a mode: leave it out, and this process is bound to the CPUs next to its GPUs if that "
            'is possible; affinity="node" fails where it is not'
        )
    if memory is not None and _is_size(memory):
        raise GPUAffinityError(
            f"memory={memory!r} is not a memory policy ('preferred' or 'bind'): for GPUs with that much free memory, "
            f"pass min_memory={memory!r}"
        )


def _is_size(value: object) -> bool:
    try:
        parse_size(value, "memory")
    except UnsatisfiableRequestError:
        return False
    return True


def _checked_pause(debug_sleep: float) -> float:
    pause = number_of(debug_sleep)
    if not 0 <= pause < math.inf:  # time.sleep would refuse it after the claim
        problem = f"debug_sleep={debug_sleep!r} is not a number of seconds: pass 0 or a positive number"
        raise UnsatisfiableRequestError(problem, value=debug_sleep)
    return pause


def _check_placeholder(placeholder_fn: object) -> None:
    if placeholder_fn is not None and not callable(placeholder_fn):
        raise PlaceholderError(
            f"placeholder_fn={placeholder_fn!r} cannot be called: pass a function of the CUDA ordinal that returns "
            "what holds that GPU, such as PytorchPlaceholder(), or leave it out"
        )


def with_policy_limits(options: ClaimOptions) -> ClaimOptions:
    """Return the options with the limits of the policy file of this host, if there is one. Takes no lock.

    Raises:
        PolicyError: the file cannot be read, or a line of it is wrong.
    """
    path = settings.existing_policy(os.environ)
    if path is None:
        given = os.environ.get("SAFE_GPU_POLICY")
        if given:
            options.logger.warning("SAFE_GPU_POLICY=%s does not exist: nothing is limited", printable_lines(given))
        return options
    from .limits import quota_of

    return options._replace(quota=quota_of(path, options.logger.warning))
