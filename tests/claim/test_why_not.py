"""The words of a refusal and of a wait, and what a waiter is told of its start."""

import re
import time
from typing import Any

import pytest

from safe_gpu.claim.limits import LimitReached
from safe_gpu.claim.report import ClaimAhead, Forecast, WaitStatus, holders_line, refusal_message, waiting_message
from safe_gpu.gpus.devices import Gpu, GpuProcess, GpuVerdict, Holder
from safe_gpu.selection.request import Selection, parse_request
from safe_gpu.wording.text import on_command_line

NOW = 1_000_000.0


def gpu(index: int, **values: object) -> Gpu:
    return Gpu(index, f"GPU-{index}", **{"name": "NVIDIA A100", **values})  # type: ignore[arg-type]


def claimed(index: int, since: float | None = NOW - 3600, **holder: object) -> GpuVerdict:
    who = Holder(**{"pid": 4711, "user": "ada", "since": since, **holder})  # type: ignore[arg-type]
    return GpuVerdict(gpu(index), "claimed", "claimed by process 4711 (ada)", who.pid, who.user, who)


def refused(needed: int, *verdicts: GpuVerdict) -> WaitStatus:
    return WaitStatus(0, sum(one.free for one in verdicts), needed, verdicts, asked=Selection(needed).text)


FREE = GpuVerdict(gpu(0), "free")
BUSY = GpuVerdict(gpu(3), "busy", "process 12 (bob, python) uses 1 GiB", 12, "bob")
OUTSIDE = GpuVerdict(gpu(4), "outside", "listed in exclude=4")
ADA = ClaimAhead(30106, "ada", 8, NOW - 740)
BEHIND = "behind ada (pid 30106, wants 8 GPUs, queued for 12 min)"
UNUSABLE = GpuVerdict(gpu(5), "unusable", "the driver lost it")


MODELS = [GpuVerdict(gpu(index, name=name), "free") for index, name in enumerate(["L4", "T4", "L4", "L4"])]


@pytest.mark.parametrize(
    ("verdicts", "lines"),
    [
        (
            (FREE, claimed(1), BUSY, OUTSIDE, UNUSABLE),
            """
  GPU 0 (NVIDIA A100): free
  GPU 1 (NVIDIA A100): claimed by process 4711 (ada)
  GPU 3 (NVIDIA A100): process 12 (bob, python) uses 1 GiB
  GPU 4 (NVIDIA A100): listed in exclude=4
  GPU 5 (NVIDIA A100): the driver lost it""",
        ),
        ([claimed(index) for index in range(8)], "\n  GPU 0-7 (NVIDIA A100): claimed by process 4711 (ada)"),
        (MODELS, "\n  GPU 0,2,3 (L4): free\n  GPU 1 (T4): free"),
        ([GpuVerdict(gpu(1), "display")], "\n  GPU 1 (NVIDIA A100): free, shared with the display"),
    ],
    ids=["all kinds", "one holder", "models", "a display"],
)
def test_a_refusal_is_a_sentence_and_a_line_for_each_gpu(verdicts: list[GpuVerdict], lines: str) -> None:
    first, *rest = refusal_message(refused(9, *verdicts)).split("\n")
    assert first.startswith("9 GPUs asked for, ")
    assert rest == lines.split("\n")[1:]


LONGER = 'timeout="1h", or timeout=None to wait without limit'
TWO_FREE = (FREE, FREE._replace(gpu=gpu(1)))


@pytest.mark.parametrize(
    ("nb_gpus", "arguments", "first"),
    [
        (1, {}, f"1 GPU asked for, 0 free: wait for it ({LONGER})."),
        (
            1,
            {"waited": 5400.0},
            f"1 GPU asked for, 0 free after 1 h 30 min: wait longer ({LONGER.replace('1h', '3h')}).",
        ),
        (
            2,
            {"ahead": ADA, "position": 4, "waited": 5.0},
            f"2 GPUs asked for, 0 free after 5 s, {BEHIND} and 2 more claims: wait longer ({LONGER}).",
        ),
        (
            2,
            {"ahead": ADA, "position": 2, "verdicts": TWO_FREE},
            f"2 GPUs asked for, 2 are free for 1 claim ahead, {BEHIND}: wait for them ({LONGER}).",
        ),
        (1, {"hint": "X=0 limits this"}, f"1 GPU asked for, 0 free: wait for it ({LONGER}). X=0 limits this."),
        (1, {"wait_limit": "/etc/p"}, "1 GPU asked for, 0 free: try again (/etc/p limits the wait)."),
    ],
)
def test_the_first_sentence_says_what_to_do(nb_gpus: int, arguments: dict[str, Any], first: str) -> None:
    arguments = dict(arguments)  # which rows share
    facts = {name: arguments.pop(name) for name in ("ahead", "position") if name in arguments}
    verdicts: Any = arguments.pop("verdicts", (BUSY,))
    text = refusal_message(refused(nb_gpus, *verdicts)._replace(**facts), now=NOW, **arguments)
    assert text.splitlines()[0] == first
    with on_command_line():
        longer = "--timeout 1h, or --timeout inf to wait without limit"
        assert refusal_message(refused(2, FREE, BUSY)).startswith(f"2 GPUs asked for, 1 free: wait for them ({longer})")


def status(*verdicts: GpuVerdict, free: int = 0, needed: int = 1, **facts: object) -> WaitStatus:
    return WaitStatus(1, free, needed, verdicts, **facts)  # type: ignore[arg-type]


def claims(*indices: int, **holder: object) -> list[GpuVerdict]:
    return [claimed(index, **holder) for index in indices]


SOON = Forecast(NOW + 3600, NOW + 3600)
SOON_TEXT = time.strftime("starts about %H:%M", time.localtime(NOW + 3600))
BY_ADA = "ada (pid 4711) for 1 h"
DRAINED = GpuVerdict(gpu(6), "unusable", "drained by root: a fan is broken")
HELD = LimitReached(1.0, 1)
TOLD = {
    "conditions leave fewer GPUs": (
        status(FREE, *claims(1, 2), BUSY, OUTSIDE, UNUSABLE, free=1, needed=4),
        f"4 GPUs (1 of 4 free); GPU 1,2: {BY_ADA}; GPU 3: process 12 (bob, python) uses 1 GiB",
    ),
    "jobs": (
        status(claimed(1, job="sge:12.3", since=NOW - 61), claimed(2, job="sge:13", since=None)),
        "1 GPU (0 free); GPU 1: ada (pid 4711, job sge:12.3) for 1 min; GPU 2: ada (pid 4711, job sge:13)",
    ),
    "nobody knows the holder": (
        status(claimed(1, pid=None, user=None, since=None)),
        "1 GPU (0 free); GPU 1: unknown holder",
    ),
    "its holder has ended": (
        status(claimed(1, pid=12, left_by=7), claimed(2, pid=None, left_by=7)),
        "1 GPU (0 free); GPU 1: ada (still held by process 12, which process 7 left behind) for 1 h; "
        "GPU 2: ada (still held by a process that process 7 left behind) for 1 h",
    ),
    "enough are free for those ahead": (
        status(*TWO_FREE, free=2, needed=2, ahead=ADA)._replace(position=4),
        f"2 GPUs (2 are free for 3 claims ahead), #4 in the queue; {BEHIND}",
    ),
    "the holder of most comes first": (
        status(claimed(0, pid=9, user="bob"), *claims(*range(1, 8)), needed=8),
        f"8 GPUs (0 free); GPU 1-7: {BY_ADA}; GPU 0: bob (pid 9) for 1 h",
    ),
    "a drained GPU": (
        status(claimed(0), DRAINED, expected=SOON),
        f"1 GPU (0 free), {SOON_TEXT}; GPU 0: {BY_ADA}; GPU 6: drained by root: a fan is broken",
    ),
    "passed, a part of a GPU": (
        status(claimed(0), expected=SOON._replace(passed_by=2), asked=parse_request(1, share="20GiB").text),
        f"20 GiB of 1 GPU (0 free), {SOON_TEXT}; passed by 2 claims; GPU 0: {BY_ADA}",
    ),
    "a limit": (WaitStatus(1, None, 1, spent=HELD._replace(held=0.5)), "1 GPU, at your limit (0.5 of 1)"),
    "the position is unknown": (
        WaitStatus(0, None, 1, ahead=ADA._replace(stopped=True)),
        f"1 GPU; {BEHIND.replace('6,', '6, stopped,')}",
    ),
    "a waiter that the kernel does not show": (
        WaitStatus(3, None, 2, ahead=ADA._replace(pid=0, user=None)),
        "2 GPUs, #3 in the queue; behind somebody (wants 8 GPUs, queued for 12 min)",
    ),
}


@pytest.mark.parametrize(("status", "text"), TOLD.values(), ids=TOLD)
def test_a_wait_is_told_in_one_line(status: WaitStatus, text: str) -> None:
    assert waiting_message(status, NOW) == f"waiting for {text}"
    for seconds, clock in ((-1, "0:00"), (67.9, "1:07"), (3599.9, "59:59"), (3600, "1:00:00"), (360_061, "100:01:01")):
        assert waiting_message(status, NOW, waited=seconds) == f"waiting {clock} for {text}"
    assert waiting_message(status, NOW, width=12 + len(text)) == f"waiting for {text}"


def test_who_has_what_and_does_nothing_with_it() -> None:
    process = GpuProcess(4711)
    at_work = [
        claimed(1)._replace(gpu=gpu(1, processes=(process,))),
        claimed(2, since=NOW - 59),
        claimed(3, since=None),
        claimed(4)._replace(gpu=gpu(4, processes=None)),
        claimed(5)._replace(gpu=gpu(5, memory_used=2 << 30)),  # by whom the driver hides
        claimed(6)._replace(gpu=gpu(6, processes_private=True)),
    ]
    told = status(*at_work, claimed(0), BUSY._replace(gpu=gpu(7)), FREE._replace(gpu=gpu(8)))
    assert holders_line(told, NOW) == "GPU 1-6 ada · 0 ada idle · 7 bob"


QUEUED = WaitStatus(12, 0, 3, tuple(claims(*range(8))), ADA, SOON)
HEAD = f"waiting 0:07 for 3 GPUs (0 free), #12 in the queue, {SOON_TEXT}"
SHORT = HEAD.replace(" in the queue", "")


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (200, f"{HEAD}; {BEHIND}; GPU 0-7: {BY_ADA}"),
        (110, f"{HEAD}; {BEHIND}"[:108] + ".."),
        (len(HEAD), HEAD),
        (len(HEAD) - 2, SHORT),
        (len(SHORT) - 1, f"{SHORT[:-3]}.."),
        (0, ""),
    ],
)
def test_what_is_cut_off_is_who_holds_what(width: int, text: str) -> None:
    assert waiting_message(QUEUED, NOW, waited=7, width=width) == text


# When it starts


LATER = NOW + 3600
FORECASTS = {
    "nothing is known": (Forecast(), ""),
    "the earliest": (Forecast(None, LATER), "probably not before %H:%M"),
    "the earliest has passed": (Forecast(None, NOW), ""),
    "another day": (Forecast(NOW + 86400, None), "starts about %a %H:%M"),
    "another week": (Forecast(NOW + 8 * 86400, None), "starts about %Y-%m-%d"),
    "others may come first": (Forecast(LATER, LATER, may_move=True), "starts %H:%M or later"),
    "any moment": (Forecast(NOW, NOW), ""),
}


@pytest.mark.parametrize(("expected", "start"), FORECASTS.values(), ids=FORECASTS)
def test_when_it_starts(expected: Forecast, start: str) -> None:
    assert expected.text(NOW) == time.strftime(start, time.localtime(expected.start or expected.earliest or 0))


def test_the_head_is_told_who_passed_it(ground: Any, child: Any) -> None:
    ground.hold(*range(7), until=time.time() + 7200)
    large = child(
        "import logging, sys, time, safe_gpu\n"
        "from safe_gpu.claim import report as news\n"
        "news._REPORT_INTERVAL = news._WARNING_DELAY = 0.2\n"
        "logging.basicConfig(stream=sys.stdout, level=logging.INFO, format='%(message)s')\n"
        "safe_gpu.claim_gpus(8, safe_gpu.NoPlaceholder(), affinity=None, timeout=60)\n"
    )
    while "waiting for 8 GPUs" not in large.hear():
        pass
    claim = "safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), affinity=None, hold_for=600)"
    child(f"import safe_gpu; {claim}; say('has'); listen()", "has")
    while not re.search(r"; passed by 1 claim; GPU ", large.hear()):
        pass


def test_run_mentions_for_once_where_it_may_help(ground: Any, command: Any) -> None:
    ground.hold(*range(8))
    first = command.start("run", "--", "true")
    assert "for 1 GPU" in first.stderr.readline()
    second, third = (command.start("run", *said, "--", "true") for said in ((), ("--for", "1h")))
    for one in (second, third):
        assert "behind" in one.stderr.readline()
    assert "--for 30m" in second.stderr.readline()
    ground.let_go()
    for one in (first, second, third):
        assert "--for" not in one.communicate(timeout=60)[1]


def test_ages_where_a_clock_was_set_back() -> None:
    assert "for 0 s" in waiting_message(WaitStatus(1, 0, 1, (claimed(1, since=4e9),)))
