"""The words of a refusal and of a wait."""

from __future__ import annotations

import pytest

from safe_gpu.claim.messages import ClaimAhead, WaitStatus, refusal_message, waiting_message
from safe_gpu.cli.parser import CommandLine
from safe_gpu.devices import Gpu, GpuVerdict, LeaseHolder
from safe_gpu.selection.request import Selection

NOW = 1_000_000.0


def gpu(index: int, **values: object) -> Gpu:
    return Gpu(index, f"GPU-{index}", **{"name": "NVIDIA A100", **values})  # type: ignore[arg-type]


def claimed(index: int, since: float | None = NOW - 3600, **holder: object) -> GpuVerdict:
    who = LeaseHolder(**{"pid": 4711, "user": "ada", "since": since, **holder})  # type: ignore[arg-type]
    return GpuVerdict(gpu(index), "claimed", "claimed by process 4711 (ada)", who.pid, who.user, who)


FREE = GpuVerdict(gpu(0), "free")
BUSY = GpuVerdict(gpu(3), "busy", "process 12 (bob, python) uses 1 GiB", 12, "bob")
OUTSIDE = GpuVerdict(gpu(4), "outside", "listed in exclude=4")
ADA = ClaimAhead(30106, "ada", 8, NOW - 740)
BEHIND = "behind ada (pid 30106, wants 8 GPUs, queued for 12 min)"
UNUSABLE = GpuVerdict(gpu(5), "unusable", "the driver lost it")


MODELS = [GpuVerdict(gpu(index, name=name), "free") for index, name in enumerate(["L4", "T4", "L4", "L4"])]
INSTANCE = GpuVerdict(gpu(2, mig_parent="GPU-2", mig_instance=1), "free")


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
        ([GpuVerdict(gpu(0, name=""), "free")], "\n  GPU 0 (GPU-0): free"),
        ([GpuVerdict(gpu(1), "display")], "\n  GPU 1 (NVIDIA A100): free, shared with the display"),
        ([INSTANCE], "\n  GPU 2:1 (NVIDIA A100): free"),
    ],
    ids=["all kinds", "one holder", "models", "no name", "a display", "a MIG instance"],
)
def test_a_refusal_is_a_sentence_and_a_line_for_each_gpu(verdicts: list[GpuVerdict], lines: str) -> None:
    first, *rest = refusal_message(Selection(9), verdicts).split("\n")
    assert first.startswith("9 GPUs asked for, ")
    assert rest == lines.split("\n")[1:]


@pytest.mark.parametrize(
    ("nb_gpus", "arguments", "first"),
    [
        (1, {}, "1 GPU asked for, 0 free: wait for it (timeout=)."),
        (2, {}, "2 GPUs asked for, 0 free: wait for them (timeout=)."),
        (1, {"waited": 90.0}, "1 GPU asked for, 0 free after 1 min: wait longer (timeout=)."),
        (1, {"ahead": ADA, "position": 2}, f"1 GPU asked for, 0 free, {BEHIND}: wait for it (timeout=)."),
        (
            2,
            {"ahead": ADA, "position": 4, "waited": 5.0},
            f"2 GPUs asked for, 0 free after 5 s, {BEHIND} and 2 more claims: wait longer (timeout=).",
        ),
        (1, {"hint": "X=0 limits this"}, "1 GPU asked for, 0 free: wait for it (timeout=). X=0 limits this."),
    ],
)
def test_the_first_sentence_says_what_to_do(nb_gpus: int, arguments: dict[str, object], first: str) -> None:
    text = refusal_message(Selection(nb_gpus), (BUSY,), now=NOW, **arguments)  # type: ignore[arg-type]
    assert text.splitlines()[0] == first


def test_a_request_from_the_command_line_is_answered_with_its_options() -> None:
    text = refusal_message(Selection(2, spelling=CommandLine), (FREE, BUSY))
    assert text.startswith("2 GPUs asked for, 1 free: wait for them (--timeout), or ask for fewer.")


def status(*verdicts: GpuVerdict, free: int = 0, needed: int = 1) -> WaitStatus:
    return WaitStatus(1, free, needed, verdicts)


TOLD = [
    (status(), "1 GPU, 0 free"),
    (
        status(FREE, claimed(1), claimed(2), BUSY, OUTSIDE, UNUSABLE, free=1, needed=4),
        "4 GPUs, 1 free; GPU 1,2: ada (pid 4711) for 1 h; GPU 3: process 12 (bob, python) uses 1 GiB",
    ),
    (
        status(claimed(1, job="sge:12.3", since=NOW - 61), claimed(2, job="sge:13", since=None)),
        "1 GPU, 0 free; GPU 1: ada (pid 4711, job sge:12.3) for 1 min; GPU 2: ada (pid 4711, job sge:13)",
    ),
    (status(claimed(1, pid=None, user=None, since=None)), "1 GPU, 0 free; GPU 1: unknown holder"),
    (status(FREE, claimed(1), free=2), "1 GPU; GPU 1: ada (pid 4711) for 1 h"),
    (
        status(claimed(0, pid=9, user="bob"), *(claimed(i) for i in range(1, 8)), needed=8),  # the holder of most first
        "8 GPUs, 0 free; GPU 1-7: ada (pid 4711) for 1 h; GPU 0: bob (pid 9) for 1 h",
    ),
    (WaitStatus(2, None, 1, ahead=ADA), f"1 GPU {BEHIND}"),
    (WaitStatus(0, None, 1, ahead=ADA._replace(stopped=True)), f"1 GPU {BEHIND.replace('6,', '6, stopped,')}"),
    (WaitStatus(3, None, 2, ahead=ADA), f"2 GPUs {BEHIND} and 1 more claim"),
    (WaitStatus(2, None, 1, ahead=ADA._replace(since=0.0)), "1 GPU behind ada (pid 30106, wants 8 GPUs)"),
    (
        WaitStatus(2, None, 1, ahead=ClaimAhead(0, "unknown", None, 0.0)),
        "1 GPU behind a claim whose ticket cannot be read",
    ),
]


@pytest.mark.parametrize(("status", "text"), TOLD)
def test_a_wait_is_told_in_one_line(status: WaitStatus, text: str) -> None:
    text = f"waiting for {text}"
    assert waiting_message(status, NOW) == text
    assert waiting_message(status, NOW, width=len(text)) == text


AHEAD = WaitStatus(3, None, 2, ahead=ADA)
LINES_AHEAD = [
    f"waiting for 2 GPUs {BEHIND} and 1 more claim",
    f"waiting for 2 GPUs {BEHIND}",
    "waiting for 2 GPUs behind ada (pid 30106, wants 8 GPUs)",
    "waiting for 2 GPUs behind ada (pid 30106)",
]
BY_ADA = [claimed(i, job="sge:1") for i in range(6)]
HELD = status(*BY_ADA, claimed(6, pid=9, user="bob", since=NOW - 60), BUSY, needed=2)
OF_ADA = "waiting for 2 GPUs, 0 free; GPU 0-5: ada (pid 4711, job sge:1) for 1 h"
LINES_HELD = [
    f"{OF_ADA}; GPU 6: bob (pid 9) for 1 min; GPU 3: process 12 (bob, python) uses 1 GiB",
    f"{OF_ADA}; GPU 6: bob (pid 9) for 1 min; GPU 3: bob (pid 12)",
    f"{OF_ADA}; GPU 6: bob (pid 9) for 1 min; 1 more",
    f"{OF_ADA}; GPU 6: bob (pid 9); 1 more",
    f"{OF_ADA}; 2 more",
    "waiting for 2 GPUs, 0 free; GPU 0-5: ada (pid 4711) for 1 h; 2 more",
    "waiting for 2 GPUs, 0 free; GPU 0-5: ada (pid 4711); 2 more",
]


@pytest.mark.parametrize(("status", "longest_first"), [(AHEAD, LINES_AHEAD), (HELD, LINES_HELD)])
def test_where_columns_are_few_name_and_pid_stay(status: WaitStatus, longest_first: list[str]) -> None:
    for text, shorter in zip(longest_first, [*longest_first[1:], longest_first[-1]], strict=True):
        assert waiting_message(status, NOW, width=len(text)) == text
        assert waiting_message(status, NOW, width=len(text) - 1) == shorter
    assert waiting_message(status, NOW, width=0) == longest_first[-1]


def test_a_stranger_with_a_long_command_keeps_name_and_pid() -> None:
    stranger = BUSY._replace(reason=f"process 12 (bob, {'x' * 200}) uses 1 GiB")
    status = WaitStatus(1, 0, 1, (stranger,))
    assert waiting_message(status, NOW, width=60) == "waiting for 1 GPU, 0 free; GPU 3: bob (pid 12)"


def test_ages_count_to_now_unless_told_otherwise() -> None:
    assert "for 0 s" in waiting_message(WaitStatus(1, 0, 1, (claimed(1, since=4e9),)))  # a clock that was set back
