"""The words of a refusal and of a wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safe_gpu.devices import Gpu, GpuRequest, GpuVerdict, Holder
from safe_gpu.report import WaitNews, format_age, refusal_message, waiting_message

NOW = 1_000_000.0


def gpu(index: int, **values: object) -> Gpu:
    return Gpu(index, f"GPU-{index}", **{"name": "NVIDIA A100", **values})  # type: ignore[arg-type]


def claimed(index: int, since: float | None = NOW - 3600, **holder: object) -> GpuVerdict:
    who = Holder(**{"pid": 4711, "user": "ada", "since": since, **holder})  # type: ignore[arg-type]
    return GpuVerdict(gpu(index), "claimed", "claimed by process 4711 (ada)", who.pid, who.user, who)


FREE = GpuVerdict(gpu(0), "free")
BUSY = GpuVerdict(gpu(3), "busy", "process 12 (bob, python) uses 1 GiB", 12, "bob")
OUTSIDE = GpuVerdict(gpu(4), "outside", "exclude=4 leaves it out")
UNUSABLE = GpuVerdict(gpu(5), "unusable", "the driver lost it")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0 s"),
        (0, "0 s"),
        (0.9, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (3599, "59 min"),
        (3600, "1 h"),
        (12_000, "3 h 20 min"),
        (86_399, "23 h 59 min"),
        (86_400, "1 d"),
        (187_200, "2 d 4 h"),
    ],
)
def test_ages(seconds: float, text: str) -> None:
    assert format_age(seconds) == text


@given(st.floats(min_value=0, max_value=1e9))
def test_an_age_says_at_most_what_it_is_and_nearly_all_of_it(seconds: float) -> None:
    sizes = {"s": 1, "min": 60, "h": 3600, "d": 86400}
    words = format_age(seconds).split()
    said = sum(int(number) * sizes[unit] for number, unit in zip(words[::2], words[1::2], strict=True))
    assert (
        said <= seconds < said + sizes[words[-1]] * (60 if words[-1] in ("h", "min") else 24 if words[-1] == "d" else 1)
    )


def test_a_refusal_is_a_sentence_and_a_line_for_each_gpu() -> None:
    text = refusal_message(GpuRequest(2), (FREE, claimed(1), BUSY, OUTSIDE, UNUSABLE))
    assert text.splitlines() == [
        "2 GPUs asked for, 1 free: wait for them (timeout=), or ask for fewer.",
        "  GPU 0 (NVIDIA A100): free",
        "  GPU 1 (NVIDIA A100): claimed by process 4711 (ada)",
        "  GPU 3 (NVIDIA A100): process 12 (bob, python) uses 1 GiB",
        "  GPU 4 (NVIDIA A100): exclude=4 leaves it out",
        "  GPU 5 (NVIDIA A100): the driver lost it",
    ]


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        ({}, "1 GPU asked for, 0 free: wait for them (timeout=)."),
        ({"waited": 90.0}, "1 GPU asked for, 0 free after 1 min: wait longer (timeout=)."),
        ({"position": 2}, "1 GPU asked for, 0 free, and 1 claim waiting ahead: wait for them (timeout=)."),
        (
            {"position": 4, "waited": 5.0},
            "1 GPU asked for, 0 free after 5 s, and 3 claims waiting ahead: wait longer (timeout=).",
        ),
        ({"hint": "X=0 limits this"}, "1 GPU asked for, 0 free: wait for them (timeout=). X=0 limits this."),
    ],
)
def test_the_first_sentence_says_what_to_do(arguments: dict[str, object], first: str) -> None:
    assert refusal_message(GpuRequest(1), (BUSY,), **arguments).splitlines()[0] == first  # type: ignore[arg-type]


def test_a_gpu_without_a_name_and_one_with_a_display() -> None:
    verdicts = (GpuVerdict(gpu(0, name=""), "free"), GpuVerdict(gpu(1), "display"))
    assert refusal_message(GpuRequest(3), verdicts).splitlines()[1:] == [
        "  GPU 0 (GPU-0): free",
        "  GPU 1 (NVIDIA A100): free, shared with the display",
    ]


def test_a_mig_instance_goes_by_its_label() -> None:
    instance = gpu(2, mig_parent="GPU-2", mig_instance=1)
    assert "  GPU 2:1 (NVIDIA A100): free" in refusal_message(GpuRequest(1), (GpuVerdict(instance, "free"),))


@pytest.mark.parametrize(
    ("news", "text"),
    [
        (WaitNews(1, 0, 1, ()), "waiting for 1 GPU: position 1, 0 of 1 free"),
        (
            WaitNews(3, 1, 4, (FREE, claimed(1), claimed(2), BUSY, OUTSIDE, UNUSABLE)),
            "waiting for 4 GPUs: position 3, 1 of 4 free; GPU 1,2: ada (pid 4711) for 1 h; "
            "GPU 3: process 12 (bob, python) uses 1 GiB",
        ),
        (
            WaitNews(1, 0, 1, (claimed(1, job="sge:12.3", since=NOW - 61), claimed(2, job="sge:13", since=None))),
            "waiting for 1 GPU: position 1, 0 of 1 free; GPU 1: ada (pid 4711, job sge:12.3) for 1 min; "
            "GPU 2: ada (pid 4711, job sge:13)",
        ),
        (
            WaitNews(1, 0, 1, (claimed(1, pid=None, user=None, since=None),)),
            "waiting for 1 GPU: position 1, 0 of 1 free; GPU 1: unknown user (pid ?)",
        ),
    ],
)
def test_a_wait_is_told_in_one_line(news: WaitNews, text: str) -> None:
    assert waiting_message(news, NOW) == text


def test_ages_count_to_now_unless_told_otherwise() -> None:
    assert "for 0 s" in waiting_message(WaitNews(1, 0, 1, (claimed(1, since=4e9),)))  # a clock that was set back
