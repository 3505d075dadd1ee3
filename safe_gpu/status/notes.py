"""The remarks below the table of GPUs, which the terminal and the page show. Pure."""

from collections.abc import Iterator

from ..gpus.devices import Holder
from ..host.foreign_files import printable
from ..selection.verdicts import why_kept
from ..wording.text import format_age, format_bytes, gpu_ranges
from .facts import GpuStatus, HostStatus
from .rows import is_over, short_command

_MOST_BESIDE = 4  # processes on a GPU that are not of its claims: any user can start more


def notes_of(status: HostStatus) -> list[str]:
    """Return the remarks on the GPUs and when they are reserved, each once with the GPUs that it is about."""
    labels_of: dict[str, list[str]] = {}
    for one in status.gpus:
        for note in dict.fromkeys(_notes(one)):
            labels_of.setdefault(printable(note), []).append(one.label)
    for window in status.windows:
        for one in status.gpus:
            if window.covers(one.gpu) and str(window) not in one.reason:
                labels_of.setdefault(printable(str(window)), []).append(one.label)
    return [f"GPU {gpu_ranges(labels)}: {note}" for note, labels in labels_of.items()]


def _notes(one: GpuStatus) -> Iterator[str]:
    """Yield the remarks on a GPU and its claims."""
    yield from _notes_on_claims(one)
    if one.idle_report and one.idle_for is not None:
        yield f"no work for {format_age(one.idle_for)}"
    if one.inside is not None:
        process = f"{one.inside.pid or '?'} {_user_and_command(one.inside)}".rstrip()
        yield f"claimed again, inside this claim, by process {process}"
        yield from _notes_on_claim(one.inside)
    yield from _notes_on_bystanders(one)
    ended = [process.pid for process in one.users if process.ended]
    for pid in dict.fromkeys(ended):
        yield why_kept(pid)
    if one.claim is None:
        yield from _notes_without_claim(one)
    else:
        yield from _notes_on_use(one, one.claim)


def _notes_on_claims(one: GpuStatus) -> Iterator[str]:
    several = one.shares or one.pieces
    for claim in several:
        for note in _notes_on_claim(claim):
            yield f"process {claim.pid or '?'}: {note}"
    if one.claim is not None and not several:
        yield from _notes_on_claim(one.claim)


def _notes_on_claim(claim: Holder) -> Iterator[str]:
    if claim.held_as is not None:
        yield claim.held_as.text
    if claim.stopped:
        yield f"process {claim.pid} is stopped (a suspended job?) and keeps the GPU"
    if claim.note:
        yield claim.note
    if claim.removable_by:
        yield f"only the claim's file keeps others off, and {claim.removable_by} can remove it (safe-gpu doctor)"
    if is_over(claim):
        yield f"uses more than its share: {format_bytes(claim.memory_used or 0)} of {format_bytes(claim.share or 0)}"


def _notes_on_bystanders(one: GpuStatus) -> Iterator[str]:
    for process in one.beside[:_MOST_BESIDE]:
        yield process.text
    more = len(one.beside) - _MOST_BESIDE
    if more > 0:
        yield f"and {more} more like these (safe-gpu status -v lists all processes)"


def _user_and_command(claim: Holder) -> str:
    command = short_command(claim.command)
    if not claim.user:
        return command
    return f"{claim.user} {command}"


def _notes_without_claim(one: GpuStatus) -> Iterator[str]:
    if one.state == "busy" and one.users:
        return  # its row names the process
    if one.reason:
        yield one.reason
    elif one.state == "display":
        yield "free, shared with the display"


def _notes_on_use(one: GpuStatus, claim: Holder) -> Iterator[str]:
    if one.reason and (one.state not in ("claimed", "display") or claim.elsewhere or claim.full):
        yield one.reason.partition(";")[0]
    if one.fault:
        yield one.fault
