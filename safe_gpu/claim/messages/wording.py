"""The sentences of a wait and of a refusal. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ...wording.text import cut, display_width, format_age, gpu_ranges, gpus_held, in_brackets, left_behind, plural
from .forecast import SOMEBODY, Forecast, describe_forecast

if TYPE_CHECKING:
    from ...gpus.devices import GpuVerdict
    from ...selection.request import Selection
    from ...wording.argument_style import ArgumentStyle
    from ..limits import LimitReached
    from .wait_status import ClaimAhead, WaitStatus


def refusal_message(
    request: Selection,
    verdicts: Sequence[GpuVerdict],
    *,
    hint: str = "",
    ahead: ClaimAhead | None = None,
    passed: ClaimAhead | None = None,
    spent: LimitReached | None = None,
    position: int = 0,
    waited: float = 0.0,
    wait_limit: str = "",
    elsewhere: bool = False,
    now: float | None = None,
) -> str:
    """Return why a request was not met: one sentence, then one line for the GPUs that share a reason.

    Args:
        verdicts: of every device, with holders.
        hint: what CUDA_VISIBLE_DEVICES excludes, see ``fence_hint``; a sentence without the full stop.
        ahead, position: as in :class:`WaitStatus`.
        passed: a waiter that stands ahead and is stopped.
        spent, wait_limit: as in :func:`refusal`.
        waited: seconds that the claim waited.
        elsewhere: whether another process could have them at once, in which CUDA is not initialised.
        now: in Unix seconds; None reads the clock.
    """
    free = sum(verdict.free for verdict in verdicts)
    text = f"{request.text} asked for, {_free(free, request.nb_gpus, ahead, position)}"
    if waited:
        text += f" after {format_age(waited)}"
    if ahead is not None:
        text += f", {_behind(ahead, _moment(now))}"
        text += f" and {plural(position - 2, 'more claim')}" if position > 2 else ""
    if passed is not None:
        text += f" (past {passed.user or SOMEBODY}, {', '.join(_facts(passed, _moment(now)))})"
    if spent is not None:
        text += f", and {spent}"
    way_out = "wait longer" if waited else "wait for it" if request.nb_gpus == 1 else "wait for them"
    if elsewhere:
        text += ": start a new process, which can have others (in a notebook, restart the kernel)"
    elif wait_limit:
        text += f": try again ({wait_limit} limits the wait)"
    else:
        text += f": {way_out} ({_longer_wait(request.spelling, waited)})"
    if ahead is None and spent is None and 0 < free < request.nb_gpus:
        text += ", or ask for fewer"
    return "\n".join([f"{text}. {hint}." if hint else f"{text}.", *_lines(verdicts)])


def _longer_wait(spelling: type[ArgumentStyle], waited: float) -> str:
    """Return how the caller writes a timeout of twice what was waited, or an hour, and none."""
    hours = spelling.value(f"{max(1, -int(-waited // 1800))}h").replace("'", '"')
    longer = spelling.setting("timeout", hours)
    return f"{longer}, or {spelling.setting('timeout', spelling.value(None))} to wait without limit"


def _free(free: int, needed: int, ahead: ClaimAhead | None, position: int, of: str = "") -> str:
    """Return how many GPUs are free; if enough are, but for others, for whom."""
    if ahead is None or free < needed:
        return f"{free} {of}free"
    return f"{free} {'is' if free == 1 else 'are'} free for {plural(max(1, position - 1), 'claim')} ahead"


def _lines(verdicts: Sequence[GpuVerdict]) -> Iterator[str]:
    alike: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        gpu = verdict.gpu
        reason = verdict.reason or ("free, shared with the display" if verdict.state == "display" else "free")
        alike.setdefault((gpu.name or gpu.uuid, reason), []).append(gpu.label)
    for (name, reason), labels in alike.items():
        yield f"  GPU {gpu_ranges(labels)} ({name}): {reason}"


def waiting_message(
    status: WaitStatus,
    now: float | None = None,
    *,
    waited: float | None = None,
    width: int | None = None,
    holders: bool = True,
) -> str:
    """Return one line about a wait, the most important first: ``waiting 0:07 for 3 GPUs (0 free), #2 in the queue,
    starts about 15:18; behind ada (pid 30106)``.

    Args:
        now: in Unix seconds; None reads the clock.
        waited: seconds since the wait began; None leaves them out.
        width: columns of the terminal. The end of a longer line is cut off, which is who holds what.
        holders: whether to say who holds what.
    """
    moment = _moment(now)
    start, more = describe_forecast(status.expected or Forecast(), moment)
    text = "waiting" if waited is None else f"waiting {_running_clock(waited)}"
    text += f" for {status.asked or plural(status.needed)}"
    candidates = [verdict for verdict in status.verdicts if _is_candidate(verdict)]
    if status.free is not None:
        of = f"of {len(candidates)} " * (len(candidates) < len(status.verdicts))
        text += f" ({_free(status.free, status.needed, status.ahead, status.position, of)})"
    if status.spent is not None:
        text += f", at your limit ({round(status.spent.held, 2):g} of {status.spent.most})"
    place = f", #{status.position}{{}}" if status.ahead is not None and status.position > 1 else ""
    heads = [text + place.format(words) + (start and f", {start}") for words in (" in the queue", "")]
    head = heads[0] if width is None or display_width(heads[0]) <= width else heads[1]
    who = [] if status.ahead is None else [_behind(status.ahead, moment)]
    line = "; ".join([head, *who, *(_by_holder(candidates, moment) if holders else ()), *more])
    if width is None or display_width(line) <= width:
        return line
    return cut(line if display_width(head) + _LEAST_REST <= width else head, width)


def holders_line(status: WaitStatus, now: float) -> str:
    """Return who has the GPUs that are not free, in few words: ``GPU 0,1 ada · 2 ben idle · 3 shared``; "" for none."""
    found: dict[str, list[str]] = {}
    for one in filter(_is_candidate, status.verdicts):
        if not one.free:
            shared = one.holder is not None and one.holder.sharers
            closed = one.reason.partition(" ")[0] if one.state == "unusable" else ""
            who = "shared" if shared else one.user or closed or "unknown"
            who += " idle" if one.is_idle(now) else ""
            found.setdefault(who, []).append(one.gpu.label)
    parts = [f"{gpu_ranges(labels)} {who}" for who, labels in found.items()]
    return f"GPU {' · '.join(parts)}" if parts else ""


_LEAST_REST = 12  # columns that are worth writing of who holds what


def _running_clock(seconds: float) -> str:
    """Return ``0:07`` or ``26:03:00``."""
    minutes, left = divmod(max(0, int(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{left:02}" if minutes >= 60 else f"{minutes}:{left:02}"


def _is_candidate(verdict: GpuVerdict) -> bool:
    """Return whether the request could use the GPU if it were free; a drained or reserved one comes back."""
    return verdict.state not in ("outside", "unusable") or verdict.reason.startswith(("drained by ", "reserved by "))


def _moment(now: float | None) -> float:
    return time.time() if now is None else now


def _behind(ahead: ClaimAhead, now: float) -> str:
    if ahead.in_turn is not None:
        return f"in turn: {ahead.user or SOMEBODY} ({', '.join([gpus_held(ahead.in_turn), *_facts(ahead, now)])})"
    return f"behind {ahead.user or SOMEBODY} ({', '.join(_facts(ahead, now))})"


def _facts(waiter: ClaimAhead, now: float) -> list[str]:
    facts = [f"pid {waiter.pid}"] if waiter.pid else []
    if waiter.stopped:
        facts.append("stopped")
    facts.append(f"wants {plural(waiter.nb_gpus)}")
    if waiter.since:
        facts.append(f"queued for {format_age(now - waiter.since)}")
    return facts


def _by_holder(verdicts: Iterable[GpuVerdict], now: float) -> list[str]:
    """Return who has the GPUs that are not free, those with the most GPUs first."""
    holders: dict[str, list[str]] = {}
    for verdict in verdicts:
        if not verdict.free:
            holders.setdefault(_who(verdict, now), []).append(verdict.gpu.label)
    ranked = sorted(holders.items(), key=lambda item: -len(item[1]))
    return [f"GPU {gpu_ranges(labels)}: {who}" for who, labels in ranked]


def _who(verdict: GpuVerdict, now: float) -> str:
    holder = verdict.holder
    if verdict.state != "claimed" or holder is None or holder.elsewhere or holder.sharers:
        return verdict.reason
    if not holder.user and not holder.pid:
        return "unknown holder"
    pid = f"pid {holder.pid or '?'}{holder.namespace and f' {holder.namespace}'}"
    if holder.left_by is not None:
        pid = left_behind(holder.pid, holder.left_by)
    age = f" for {format_age(now - holder.since)}" if holder.since else ""
    return f"{holder.user or 'unknown user'}{in_brackets(pid, holder.job and f'job {holder.job}')}{age}"
