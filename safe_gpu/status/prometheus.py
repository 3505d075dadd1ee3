"""The state of a host as metrics, in the text format of Prometheus. Pure.

Labels are named as NVIDIA's DCGM exporter names them (``gpu``, ``UUID``), so that both join on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..procfs import printable
from .facts import GpuStatus, HostStatus

_MOST_USERS = 100  # of waiters: whoever has many user ids can wait as each of them
_OTHERS = "other"

_STATES = ("free", "claimed", "busy", "display", "unusable")

_Labels = tuple[tuple[str, str], ...]


class _Metric(NamedTuple):
    name: str
    help: str
    samples: list[tuple[_Labels, float]]


def render_metrics(status: HostStatus) -> str:
    """All metrics of a host.

    Facts that are not known have no sample. Nothing tells of claims and of the queue if they cannot be read.
    """
    return "".join(_written(metric) for metric in _metrics(status))


def _metrics(status: HostStatus) -> Iterator[_Metric]:
    gpus = status.gpus
    known = not status.warnings
    states = [(_of(one, state=state), float(one.state == state)) for one in gpus for state in _STATES]
    yield _Metric("safe_gpu_gpu_state", "1 for the state that the GPU is in, 0 for the others.", states)
    used = [(_of(one), float(one.gpu.memory_used)) for one in gpus if one.gpu.memory_used is not None]
    yield _Metric("safe_gpu_memory_used_bytes", "Memory in use on the GPU.", used)
    if not known:
        return
    claims = [one for one in gpus if one.claim is not None]
    held = [(_held(one), 1.0) for one in claims]
    yield _Metric("safe_gpu_claimed", "1 for a GPU that this user has claimed.", held)
    since = [(_held(one), one.claim.since) for one in claims if one.claim and one.claim.since]
    yield _Metric("safe_gpu_claim_start_time_seconds", "When the claim was made, in Unix seconds.", since)
    idle = [(_held(one), one.idle_for) for one in claims if one.idle_for is not None]
    yield _Metric("safe_gpu_claim_idle_seconds", "How long the claimed GPU has shown no work, as far as seen.", idle)
    until = [(_held(one), one.claim.until) for one in claims if one.claim and one.claim.until is not None]
    help_text = "When the claim is expected to end, in Unix seconds."
    yield _Metric("safe_gpu_claim_expected_end_time_seconds", help_text, until)
    yield _Metric("safe_gpu_waiting", "Waiting claims.", _waiting(status))
    waits = [status.taken_at - one.since for one in status.queue if one.since]
    oldest = max(0.0, *waits) if waits else 0.0
    yield _Metric(
        "safe_gpu_oldest_wait_seconds", "How long the first waiting claim has waited; 0 without any.", [((), oldest)]
    )


def _waiting(status: HostStatus) -> list[tuple[_Labels, float]]:
    users: dict[str, int] = {}
    for one in status.queue:
        users[one.user or ""] = users.get(one.user or "", 0) + 1
    if len(users) > _MOST_USERS:
        ranked = sorted(users, key=lambda user: (user == _OTHERS, -users[user]))
        rest = sum(users.pop(user) for user in ranked[_MOST_USERS - 1 :])
        users[_OTHERS] = rest
    return [((("user", user),), float(number)) for user, number in sorted(users.items())] or [((("user", ""),), 0.0)]


def _of(one: GpuStatus, **more: str) -> _Labels:
    return (("gpu", one.gpu.label), ("UUID", one.gpu.uuid), ("vendor", one.gpu.vendor), *more.items())


def _held(one: GpuStatus) -> _Labels:
    return _of(one, user=(one.claim and one.claim.user) or "")


def _written(metric: _Metric) -> str:
    lines = [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} gauge"]
    lines += (f"{metric.name}{_labels(labels)} {value!r}" for labels, value in _unique(metric.samples))
    return "".join(f"{line}\n" for line in lines)


def _unique(samples: Iterable[tuple[_Labels, float]]) -> Iterator[tuple[_Labels, float]]:
    """A sample for each set of labels: a driver may report a device twice, and a reader refuses all then."""
    return iter({labels: float(value) for labels, value in samples}.items())


def _labels(labels: _Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return printable(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
