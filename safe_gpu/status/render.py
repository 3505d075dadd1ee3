"""The screen of ``safe-gpu status``. Pure."""

from collections import Counter
from collections.abc import Iterable

from ..wording.text import gpu_ranges, plural, wrapped
from .facts import FREE, GpuStatus, HostStatus
from .notes import notes_of
from .table import Marks, Screen, gpu_table, table
from .waiting import notes_on_waiter, queue_of

# The states of which the headline says how many GPUs are in them, in words that nobody takes for "free".
_COUNTED_STATES = {"idle": "claimed but idle", "at risk": "at risk", "drained": "drained"}


def render(
    status: HostStatus,
    *,
    width: int,
    color: bool,
    shown: HostStatus | None = None,
    verbose: bool = False,
    bar: str = "█▌░",
    piped: bool = False,
) -> str:
    """Return the status as text of which no line is wider than ``width`` columns.

    Args:
        color: whether to add ANSI colours.
        shown: the part of it whose GPUs and waiters are listed; None lists all.
        verbose: whether waiters of one user have a line each, and the processes on each GPU.
        bar: the characters of memory that is used, half used, and free.
        piped: whether another program reads it, so that names of users are whole, and lines as much wider as they
            need.
    """
    screen = Screen(width, color, verbose, Marks(*bar), piped)
    if shown is None:
        shown = status
    lines = _headline(status, screen)
    lines.append("")
    if shown.gpus:
        lines += gpu_table(shown, screen)
        lines += _note_lines(shown, screen)
    elif status.gpus:
        lines += wrapped("no GPU is held or used by this user", width)
    else:
        lines += wrapped("no GPUs", width)
    lines += _queue_lines(shown, screen)
    for warning in _warnings(status):
        lines.append("")
        lines += screen.warning(f"warning: {warning}")
    return "\n".join(lines)


def _warnings(status: HostStatus) -> list[str]:
    warnings = [status.shift, status.doubt, *status.broken, *status.ignored, *status.warnings]
    return [warning for warning in warnings if warning]


def _headline(status: HostStatus, screen: Screen) -> list[str]:
    counts = ", ".join(_counts(status))
    driver = f"{status.driver} {status.driver_version}".strip()
    headline = wrapped(f"{status.host}: {counts} ({driver})", screen.width)
    lines = [screen.paint(line, "bold") for line in headline]
    for model in _models(status):
        lines += wrapped(model, screen.width)
    return lines


def _counts(status: HostStatus) -> list[str]:
    """Return how many GPUs are free, how many in other states, and how many wait."""
    instances = [one for one in status.gpus if one.gpu.is_mig_instance]
    whole = [one for one in status.gpus if not one.gpu.is_mig_instance and not one.gpu.mig_enabled]
    counts = []
    if whole or not instances:
        counts.append(f"{_number_free(whole)} of {plural(len(whole))} free")
    if instances:
        parents = {one.gpu.mig_parent for one in instances}
        divided = f"{plural(len(instances), 'MIG instance')} on {plural(len(parents))}"
        counts.append(f"{_number_free(instances)} of {divided} free")
    states = Counter(one.shown_state(status.taken_at) for one in status.gpus)
    counts += [f"{states[state]} {words}" for state, words in _COUNTED_STATES.items() if states[state]]
    if status.queue:
        counts.append(f"{len(status.queue)} waiting")
    return counts


def _number_free(gpus: Iterable[GpuStatus]) -> int:
    return sum(one.state in FREE for one in gpus)


def _models(status: HostStatus) -> list[str]:
    """Return a line for each model, with its GPUs if there are GPUs of other models."""
    labels_of: dict[str, list[str]] = {}
    for one in status.gpus:
        if not one.gpu.is_mig_instance:
            model = one.gpu.name or "(name not known)"
            labels_of.setdefault(model, []).append(one.label)
    if len(labels_of) == 1:
        [(model, labels)] = labels_of.items()
        return [f"{len(labels)} x {model}"]
    return [f"GPU {gpu_ranges(labels)}: {model}" for model, labels in labels_of.items()]


def _note_lines(status: HostStatus, screen: Screen) -> list[str]:
    lines: list[str] = []
    for note in notes_of(status):
        lines += screen.warning(note)
    if not lines:
        return []
    return ["", *lines]


def _queue_lines(status: HostStatus, screen: Screen) -> list[str]:
    if not status.queue:
        return []
    queue = queue_of(status, verbose=screen.verbose, most_of_user=screen.most_of_user, whole_names=screen.piped)
    headings, *rows = table(queue.columns, screen.width, optional=("PLANNED", "WAITED"))
    lines = ["", screen.paint(f"Waiting, {queue.order}:", "bold"), screen.paint(headings, "bold")]
    for group, row in zip(queue.groups, rows, strict=True):
        lines.append(row)
        for note in notes_on_waiter(group[0]):
            lines += screen.warning(note, indent="     ")
    number_shown = sum(len(group) for group in queue.groups)
    if len(status.queue) > number_shown:
        lines.append(f"... and {len(status.queue) - number_shown} more")
    return lines
