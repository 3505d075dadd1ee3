"""The state of a host as metrics, in the text format of Prometheus. Pure.

Labels are named as NVIDIA's DCGM exporter names them (``gpu``, ``UUID``), so that both join on them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from ..gpus.devices import Holder
from ..host.foreign_files import printable
from .facts import GpuStatus, HostStatus

_MOST_USERS = 100  # of waiters: somebody with many user ids can wait as each of them

_OTHERS = "other"

_STATES = ("free", "claimed", "busy", "display", "unusable")

_Sample = tuple[str, float | None]
"""Labels and a value; None if that is not known."""


class _ClaimMetric(NamedTuple):
    """A metric with a sample for each claim of a GPU.

    Attributes:
        value: returns that of a claim; None for no sample.
    """

    name: str
    help_text: str
    value: Callable[[GpuStatus, Holder], float | None]


def _outdated(one: GpuStatus, claim: Holder) -> float | None:
    if claim.held_as is None or not claim.held_as.outdated:
        return None
    return 1.0


def _bytes_beside(one: GpuStatus, claim: Holder) -> float | None:
    if one.gpu.processes is None or not one.gpu.processes_supported or one.gpu.processes_private:
        return None
    sizes = [process.memory_used for process in one.beside]
    if None in sizes:
        return None
    return float(sum(size or 0 for size in sizes))


_OF_CLAIMS = (
    _ClaimMetric("claimed", "1 for a GPU that this user has claimed.", lambda one, claim: 1.0),
    _ClaimMetric(
        "claim_start_time_seconds", "When the claim was made, in Unix seconds.", lambda one, claim: claim.since or None
    ),
    _ClaimMetric(
        "claim_idle_seconds",
        "How long the claimed GPU has shown no work, as far as status has looked.",
        lambda one, claim: one.idle_for,
    ),
    _ClaimMetric(
        "claim_utilization",
        "Mean utilization of the GPU in percent since it was claimed, as far as status has looked.",
        lambda one, claim: claim.utilization,
    ),
    _ClaimMetric(
        "claim_expected_end_time_seconds",
        "When the claim is expected to end, in Unix seconds.",
        lambda one, claim: claim.until,
    ),
    _ClaimMetric(
        "claim_beside_bytes", "Memory used on the GPU by processes that are not part of the claim.", _bytes_beside
    ),
    _ClaimMetric("claim_outdated", "1 if the GPU has been divided differently since it was claimed.", _outdated),
)

_OF_SHARES = (
    _ClaimMetric("share_bytes", "Memory of the shared GPU that this claim holds.", lambda one, claim: claim.share),
    _ClaimMetric(
        "share_used_bytes",
        "Memory that the processes of this claim use on the shared GPU.",
        lambda one, claim: claim.memory_used,
    ),
)


def render_metrics(status: HostStatus) -> str:
    """Return all metrics of a host.

    Facts that are not known have no sample. Metrics of claims and of the queue are left out if these cannot be read.
    """
    metrics = _metrics_of_gpus(status)
    if not status.warnings:
        metrics += _metrics_of_claims(status)
        metrics += _metrics_of_queue(status)
    return "".join(metrics)


def _metrics_of_gpus(status: HostStatus) -> list[str]:
    is_up = float(not status.warnings)
    states: list[_Sample] = []
    memory: list[_Sample] = []
    for one in status.gpus:
        states += [(_of(one, state=state), float(one.state == state)) for state in _STATES]
        memory.append((_of(one), one.gpu.memory_used))
    return [
        _metric("up", "1 if the state of the host could be read.", [("", is_up)]),
        _metric("gpu_state", "1 for the state that the GPU is in, 0 for the others.", states),
        _metric("memory_used_bytes", "Memory in use on the GPU.", memory),
    ]


def _metrics_of_claims(status: HostStatus) -> Iterator[str]:
    claims: list[tuple[str, GpuStatus, Holder]] = []
    shares: list[tuple[str, GpuStatus, Holder]] = []
    jobs: list[_Sample] = []
    for one in status.gpus:
        for claim in one.claims:
            user = claim.user or ""
            claims.append((_of(one, user=user), one, claim))
            if one.shares:
                shares.append((_of(one, user=user, pid=str(claim.pid or "")), one, claim))
            if claim.job:
                jobs.append((_of(one, user=user, batch_job=claim.job), 1.0))
    for metric in _OF_CLAIMS:
        samples = [(labels, metric.value(one, claim)) for labels, one, claim in claims]
        yield _metric(metric.name, metric.help_text, samples)
    for metric in _OF_SHARES:
        samples = [(labels, metric.value(one, claim)) for labels, one, claim in shares]
        yield _metric(metric.name, metric.help_text, samples)
    yield _metric("claim_info", "The batch job of a claim.", jobs)


def _metrics_of_queue(status: HostStatus) -> list[str]:
    limited = Counter(one.user or "" for one in status.queue if one.limit)
    waits = [status.taken_at - one.since for one in status.queue if one.since]
    longest = max([0.0, *waits])
    return [
        _by_user("max_gpus", "How many GPUs a user who holds some or waits may hold.", status.max_gpus),
        _by_user("waiting_at_limit", "Waiting claims whose user holds as many GPUs as allowed.", limited),
        _metric("waiting", "Waiting claims.", _waiting(status)),
        _metric("oldest_wait_seconds", "How long the first waiting claim has waited; 0 without any.", [("", longest)]),
    ]


def _by_user(name: str, help_text: str, numbers: Mapping[str, int]) -> str:
    users = sorted(numbers)[:_MOST_USERS]
    return _metric(name, help_text, [(_labels(user=user), numbers[user]) for user in users])


def _waiting(status: HostStatus) -> list[_Sample]:
    """Return the number of waiters of each user; beyond a hundred users those with the fewest count together."""
    users = Counter(one.user or "" for one in status.queue)
    if not users:
        return [(_labels(user=""), 0)]
    if len(users) > _MOST_USERS:
        ranked = sorted(users, key=lambda user: (user == _OTHERS, -users[user]))
        users[_OTHERS] = sum(users.pop(user) for user in ranked[_MOST_USERS - 1 :])
    return [(_labels(user=user), number) for user, number in sorted(users.items())]


def _of(one: GpuStatus, **more: str) -> str:
    return _labels(gpu=one.gpu.label, UUID=one.gpu.uuid, vendor=one.gpu.vendor, **more)


def _labels(**labels: str) -> str:
    pairs = [f'{name}="{_escaped(value)}"' for name, value in labels.items()]
    return "{" + ",".join(pairs) + "}"


def _escaped(value: str) -> str:
    return printable(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _metric(name: str, help_text: str, samples: Iterable[_Sample]) -> str:
    """Return one sample for each set of labels: a driver may report a device twice, which readers refuse."""
    known = {labels: float(value) for labels, value in samples if value is not None}
    lines = [f"# HELP safe_gpu_{name} {help_text}", f"# TYPE safe_gpu_{name} gauge"]
    lines += [f"safe_gpu_{name}{labels} {value!r}" for labels, value in known.items()]
    return "".join(f"{line}\n" for line in lines)
