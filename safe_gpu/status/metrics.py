"""The state of a host as metrics, in the text format of Prometheus. Pure.

Labels are named as NVIDIA's DCGM exporter names them (``gpu``, ``UUID``), so that both join on them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from ..host.foreign_files import printable
from .facts import GpuStatus, HostStatus

_MOST_USERS = 100  # of waiters: somebody with many user ids can wait as each of them

_OTHERS = "other"

_STATES = ("free", "claimed", "busy", "display", "unusable")


def render_metrics(status: HostStatus) -> str:
    """Return all metrics of a host.

    Facts that are not known have no sample. Metrics of claims and of the queue are left out if these cannot be read.
    """
    return "".join(_metrics(status))


def _metrics(status: HostStatus) -> Iterator[str]:
    gpus, queue = status.gpus, status.queue
    yield _metric("up", "1 if the state of the host could be read.", [("", float(not status.warnings))])
    states = [(_of(one, state=state), float(one.state == state)) for one in gpus for state in _STATES]
    yield _metric("gpu_state", "1 for the state that the GPU is in, 0 for the others.", states)
    yield _metric("memory_used_bytes", "Memory in use on the GPU.", [(_of(one), one.gpu.memory_used) for one in gpus])
    if status.warnings:
        return
    held = [(one, claim, claim.user or "") for one in gpus for claim in one.claims]
    owned = [(_of(one, user=user), one, claim) for one, claim, user in held]
    yield _metric("claimed", "1 for a GPU that this user has claimed.", [(labels, 1.0) for labels, _, _ in owned])
    help_text = "When the claim was made, in Unix seconds."
    yield _metric("claim_start_time_seconds", help_text, [(labels, one.since or None) for labels, _, one in owned])
    help_text = "How long the claimed GPU has shown no work, as far as looks tell."
    yield _metric("claim_idle_seconds", help_text, [(labels, one.idle_for) for labels, one, _ in owned])
    help_text = "When the claim is expected to end, in Unix seconds."
    yield _metric("claim_expected_end_time_seconds", help_text, [(labels, one.until) for labels, _, one in owned])
    outdated = [(labels, 1.0) for labels, _, one in owned if one.held_as is not None and one.held_as.outdated]
    help_text = "1 where the GPU has been divided otherwise since it was claimed."
    yield _metric("claim_outdated", help_text, outdated)
    shared = [(_of(one, user=user, pid=str(claim.pid or "")), claim) for one, claim, user in held if one.shares]
    help_text = "Memory of the shared GPU that this claim holds."
    yield _metric("share_bytes", help_text, [(labels, one.share) for labels, one in shared])
    help_text = "Memory that the processes of this claim use on the shared GPU."
    yield _metric("share_used_bytes", help_text, [(labels, one.memory_used) for labels, one in shared])
    jobs = [(_of(one, user=user, batch_job=claim.job), 1.0) for one, claim, user in held if claim.job]
    yield _metric("claim_info", "The batch job of a claim.", jobs)
    yield _by_user("max_gpus", "How many GPUs a user who holds some or waits may hold.", status.max_gpus)
    limited = Counter(one.user or "" for one in queue if one.limit)
    yield _by_user("waiting_at_limit", "Waiting claims whose user holds as many GPUs as allowed.", limited)
    yield _metric("waiting", "Waiting claims.", _waiting(status))
    oldest = max((status.taken_at - one.since for one in queue if one.since), default=0.0)
    help_text = "How long the first waiting claim has waited; 0 without any."
    yield _metric("oldest_wait_seconds", help_text, [("", max(0.0, oldest))])


def _by_user(name: str, help_text: str, numbers: Mapping[str, int]) -> str:
    return _metric(name, help_text, [(_labels(user=user), numbers[user]) for user in sorted(numbers)[:_MOST_USERS]])


def _waiting(status: HostStatus) -> list[tuple[str, float]]:
    users = Counter(one.user or "" for one in status.queue)
    if len(users) > _MOST_USERS:
        ranked = sorted(users, key=lambda user: (user == _OTHERS, -users[user]))
        users[_OTHERS] = sum(users.pop(user) for user in ranked[_MOST_USERS - 1 :])
    return [(_labels(user=user), number) for user, number in sorted(users.items())] or [(_labels(user=""), 0)]


def _of(one: GpuStatus, **more: str) -> str:
    return _labels(gpu=one.gpu.label, UUID=one.gpu.uuid, vendor=one.gpu.vendor, **more)


def _labels(**labels: str) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return printable(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _metric(name: str, help_text: str, samples: Iterable[tuple[str, float | None]]) -> str:
    """Return one sample for each set of labels: a driver may report a device twice, which readers refuse."""
    lines = [f"# HELP safe_gpu_{name} {help_text}", f"# TYPE safe_gpu_{name} gauge"]
    known = {labels: float(value) for labels, value in samples if value is not None}
    lines += (f"safe_gpu_{name}{labels} {value!r}" for labels, value in known.items())
    return "".join(f"{line}\n" for line in lines)
