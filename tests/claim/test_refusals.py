"""Who is refused or waits, when, and in which words; nonsense and hosts in trouble, which leave nothing behind."""

import os
import re
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.claims import claim, try_claim

import safe_gpu

LONGER = 'timeout="1h", or timeout=None to wait without limit'


def test_too_few_free_now_and_until_the_deadline(host: Any, cleanup: ExitStack, untouched: Callable[[], Any]) -> None:
    for number in range(3):
        cleanup.enter_context(host.stranger(number))
    with untouched(), pytest.raises(safe_gpu.NotEnoughGpusError) as caught:
        safe_gpu.claim_gpus(6, timeout=0)
    assert (type(caught.value), caught.value.nb_gpus) == (api.NotEnoughGpusError, 6)
    first, second, *others = str(caught.value).splitlines()
    assert first == f"6 GPUs asked for, 5 free: wait for them ({LONGER}), or ask for fewer"
    assert second.startswith(f"  GPU 0-2 (NVIDIA A100-SXM4-80GB): process {host.stranger_pid} ")
    assert others == ["  GPU 3-7 (NVIDIA A100-SXM4-80GB): free"]
    with untouched(), pytest.raises(safe_gpu.ClaimTimeout, match="wait longer") as late:
        safe_gpu.claim_gpus(6, timeout=0.05)
    assert (late.value.timeout, late.value.verdicts[0].state) == (0.05, "busy")


def test_the_fence_is_named_where_it_stands_in_the_way(host, monkeypatch, untouched, cleanup) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    sentence = "CUDA_VISIBLE_DEVICES=0 limits this process to 1 of 8 GPUs; 7 others are free"
    with untouched(), pytest.raises(api.UnsatisfiableRequestError, match=f"{sentence}.*SAFE_GPU_FENCE=ignore"):
        safe_gpu.claim_gpus(2, timeout=None)
    assert try_claim(1) == (0,)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    cleanup.enter_context(host.stranger(0))
    with (
        untouched(),
        pytest.raises(safe_gpu.NotEnoughGpusError, match=rf"{sentence} \(SAFE_GPU_FENCE=ignore disregards it\)"),
    ):
        safe_gpu.claim_gpus(1, timeout=0)
    monkeypatch.setenv("SAFE_GPU_FENCE", "ignore")
    assert safe_gpu.claim_gpus(7, timeout=0).devices_taken == [1, 2, 3, 4, 5, 6, 7]


def test_a_privileged_container_keeps_to_the_gpus_that_it_was_given(host, monkeypatch) -> None:
    """It sees all GPUs of the host. Those outside are of other pods, so no refusal advises to ignore the variable."""
    given = [gpu.uuid for gpu in host.idle.gpus[2:4]]
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", ",".join(given))
    assert try_claim(2) == (2, 3)
    with pytest.raises(api.UnsatisfiableRequestError, match="limits this process to 2 of 8 GPUs; 6 others") as refused:
        safe_gpu.claim_gpus(3, timeout=0)
    assert f"NVIDIA_VISIBLE_DEVICES={','.join(given)}" in str(refused.value)
    assert "SAFE_GPU_FENCE" not in str(refused.value)
    monkeypatch.setenv("SAFE_GPU_FENCE", "ignore")
    assert try_claim(8) == (0, 1, 2, 3, 4, 5, 6, 7)


def test_nobody_is_sent_to_the_gpus_of_other_jobs(host, monkeypatch, cleanup) -> None:
    """In a batch job the list may be the scheduler's, so no refusal advises to ignore it."""
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    cleanup.enter_context(host.stranger(0))
    for number, words in ((2, "others are free: ask for its GPUs only"), (1, "7 others are free\n")):
        with pytest.raises(api.SafeGpuError, match="CUDA_VISIBLE_DEVICES=0 limits this process to 1 of 8") as refused:
            safe_gpu.claim_gpus(number, timeout=0)
        assert words in str(refused.value)
        assert "SAFE_GPU_FENCE" not in str(refused.value)


def test_an_empty_fence_leaves_no_gpu(host, monkeypatch, untouched) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with untouched(), pytest.raises(api.UnsatisfiableRequestError, match=r"to 0 of 8 GPUs.*; 8 others are free"):
        safe_gpu.claim_gpus(1, timeout=None)
    assert safe_gpu.get_free_gpus() == [str(index) for index in range(8)]


@pytest.mark.parametrize("crowded", [2, 99])
def test_a_crowded_host_lock_is_waited_for_longer(host, monkeypatch, crowded: int) -> None:
    """As long as nobody keeps it, and not for ever."""
    tries: list[int] = []
    locked = api.Host.locked

    def overloaded(self: api.Host, *arguments: Any) -> Any:
        tries.append(1)
        if len(tries) <= crowded:
            raise api.LockTimeout("the host is overloaded", overloaded=True)
        return locked(self, *arguments)

    monkeypatch.setattr(api.Host, "locked", overloaded)
    with nullcontext() if crowded < 99 else pytest.raises(api.LockTimeout):
        assert safe_gpu.claim_gpus(1, timeout=0).devices_taken == [0]
    assert len(tries) < 99


def test_the_timeout_is_one_deadline_from_the_call(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    moments: list[float] = []

    class Slow(safe_gpu.NoPlaceholder):
        def prepare(self) -> None:
            time.sleep(0.05)
            moments.append(time.monotonic())

    def take_older_package_lock(deadline: float, logger: Any, signals: Any) -> None:
        moments.append(deadline)

    monkeypatch.setattr("safe_gpu.claim.checks.older_package_counts", lambda: True)
    monkeypatch.setattr("safe_gpu.claim.checks.take_older_package_lock", take_older_package_lock)
    called = time.monotonic()
    safe_gpu.claim_gpus(1, Slow(), timeout=60)
    prepared, deadline = moments
    assert called + 60 <= deadline <= prepared - 0.05 + 60


def test_free_gpus_are_those_of_the_host_in_numeric_order(host_of, dgx, cleanup, monkeypatch) -> None:
    host = host_of("big-16")
    dgx.uuids = host.uuids
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    dgx.hold(2)
    cleanup.enter_context(host.stranger(11))
    cleanup.enter_context(host.stranger(12, kind="graphics"))
    host.edits = {host.uuids[13]: {"processes": None}, host.uuids[14]: {"lost": True}}
    assert safe_gpu.claim_gpus(1, timeout=0).devices_taken == [3]
    assert safe_gpu.get_free_gpus() == [str(index) for index in range(16) if index not in (2, 3, 11, 13, 14)]


# Nonsense in arguments: one of each kind, through a whole claim; more messages are in tests/cli/test_mistakes.py


@pytest.mark.parametrize(
    ("arguments", "kind", "part"),
    [
        ({"nb_gpus": 10**30}, api.UnsatisfiableRequestError, "only 8"),
        ({"timeout": float("nan")}, api.UnsatisfiableRequestError, "timeout=nan"),
        ({"affinity": 3}, api.GPUAffinityError, "node"),
        ({"placeholder_fn": safe_gpu.PytorchPlaceholder}, api.PlaceholderError, "PytorchPlaceholder()"),
    ],
)
def test_arguments_that_make_no_sense(host, arguments, kind: type[api.SafeGpuError], part: str, untouched) -> None:
    """For ever, unless the argument says otherwise: what makes no sense is not waited for."""
    with untouched():
        with pytest.raises(api.SafeGpuError, match=re.escape(part)) as caught:
            safe_gpu.claim_gpus(**{"timeout": None, **arguments})
        assert type(caught.value) is kind, caught.value
    assert host.polls <= 1
    assert not Path(os.environ["SAFE_GPU_DIR"]).exists(), "no lock was needed to see that"
    assert safe_gpu.claim_gpus(1, timeout=0).devices_taken == [0]


def test_a_disk_quota_that_ends_in_the_middle_of_an_entry(host: Any, child: Any) -> None:
    # Any user can play that: no file may grow beyond ten bytes.
    code = """
import os, resource, signal, safe_gpu
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
try:
    safe_gpu.claim_gpus(2, timeout=None)
except safe_gpu.StateDirError as err:
    say(err)
say(os.environ.get("CUDA_VISIBLE_DEVICES"))
listen()
"""
    process = child(code)
    assert re.search(r"claims/\..*free some space", process.hear())
    assert process.hear() == "None"
    assert len(safe_gpu.get_free_gpus()) == 8


def test_no_descriptors_left(host: Any, child: Any) -> None:
    code = """
import os, resource, safe_gpu
safe_gpu.claim_gpus(1, timeout=0)
safe_gpu.release_gpus()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
before, results = os.listdir("/proc/self/fd"), []
for room in range(3, 45):
    resource.setrlimit(resource.RLIMIT_NOFILE, (room, hard))
    try:
        results.append(len(safe_gpu.claim_gpus(8, timeout=0).devices_taken))
        safe_gpu.release_gpus()
    except Exception as err:
        results.append(type(err).__name__)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert os.listdir("/proc/self/fd") == before, (room, os.listdir("/proc/self/fd"))
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
say(*results)
"""
    results = child(code).hear().split()
    assert results[-1] == "8"
    assert "StateDirError" in results


# The words of a refusal and of a wait, and what a waiter is told of its start


NOW = 1_000_000.0


def gpu(index: int, **values: object) -> api.Gpu:
    return api.Gpu(index, f"GPU-{index}", **{"name": "NVIDIA A100", **values})  # type: ignore[arg-type]


def claimed(index: int, since: float | None = NOW - 3600, **holder: object) -> api.GpuVerdict:
    who = api.Holder(**{"pid": 4711, "user": "ada", "since": since, **holder})  # type: ignore[arg-type]
    return api.GpuVerdict(gpu(index), "claimed", "claimed by process 4711 (ada)", who.pid, who.user, who)


def status(*verdicts: api.GpuVerdict, needed: int = 1, position: int = 1, **facts: Any) -> api.WaitStatus:
    free = sum(one.free for one in verdicts)
    return api.WaitStatus(position, free, needed, verdicts, **{"asked": api.Selection(needed).text, **facts})


FREE = api.GpuVerdict(gpu(0), "free")
BUSY = api.GpuVerdict(gpu(3), "busy", "process 12 (bob, python) uses 1 GiB", 12, "bob")
OUTSIDE = api.GpuVerdict(gpu(4), "outside", "listed in exclude=4")
ADA = api.ClaimAhead(30106, "ada", 8, NOW - 740)
BEHIND = "behind ada (pid 30106, wants 8 GPUs, queued for 12 min)"
UNUSABLE = api.GpuVerdict(gpu(5, name=""), "unusable", "the driver lost it")


def test_a_refusal_is_a_sentence_and_a_line_for_each_state_of_gpus() -> None:
    models = [api.GpuVerdict(gpu(index, name=name), "free") for index, name in ((7, "L4"), (8, "T4"), (9, "L4"))]
    verdicts = (FREE, claimed(1), claimed(2), BUSY, OUTSIDE, UNUSABLE, *models)
    assert api.refusal_message(status(*verdicts, needed=9)) == (
        f"9 GPUs asked for, 4 free: wait for them ({LONGER}), or ask for fewer\n"
        "  GPU 0 (NVIDIA A100): free\n"
        "  GPU 1,2 (NVIDIA A100): claimed by process 4711 (ada)\n"
        "  GPU 3 (NVIDIA A100): process 12 (bob, python) uses 1 GiB\n"
        "  GPU 4 (NVIDIA A100): listed in exclude=4\n"
        "  GPU 5 (name not known): the driver lost it\n"
        "  GPU 7,9 (L4): free\n"
        "  GPU 8 (T4): free"
    )


@pytest.mark.parametrize(
    ("status", "arguments", "first"),
    [
        (
            status(BUSY, ahead=ADA, position=4),
            {"waited": 5.0},
            f"0 free after 5 s, {BEHIND} and 2 more claims: wait longer ({LONGER})",
        ),
        (
            status(FREE, ahead=ADA, position=2),
            {},
            f"1 free, kept for the claim ahead, {BEHIND}: wait for it ({LONGER})",
        ),
        (status(BUSY), {"hint": "X=0 limits this"}, f"0 free: wait for it ({LONGER}). X=0 limits this"),
        (status(BUSY), {"wait_limit": "/etc/p"}, "0 free: try again (/etc/p limits the wait)"),
    ],
)
def test_the_first_sentence_says_what_to_do(status: api.WaitStatus, arguments: dict[str, Any], first: str) -> None:
    assert api.refusal_message(status, now=NOW, **arguments).splitlines()[0] == f"1 GPU asked for, {first}"
    with api.on_command_line():
        assert ("--timeout" in api.refusal_message(status, now=NOW, **arguments)) == ("timeout=" in first)


SOON = api.Forecast(NOW + 3600, NOW + 3600)
SOON_TEXT = time.strftime("starts about %H:%M", time.localtime(NOW + 3600))
BY_ADA = "ada (pid 4711) for 1 h"
TOLD = {
    "conditions leave fewer GPUs": (
        status(FREE, claimed(1), claimed(2), BUSY, OUTSIDE, UNUSABLE, needed=4),
        f"4 GPUs (1 of 4 free); GPU 1,2: {BY_ADA}; GPU 3: process 12 (bob, python) uses 1 GiB",
    ),
    "a job, a clock that was set back, and nobody knows the holder": (
        status(claimed(2, job="sge:13"), claimed(3, since=4e9), claimed(4, pid=None, user=None, since=None)),
        "1 GPU (0 free); GPU 2: ada (pid 4711, job sge:13) for 1 h; GPU 3: ada (pid 4711) for 0 s; "
        "GPU 4: unknown holder",
    ),
    "its holder has ended": (
        status(claimed(1, pid=12, left_by=7)),
        "1 GPU (0 free); GPU 1: ada (still held by process 12, which process 7 left behind) for 1 h",
    ),
    "its holder is stopped": (
        status(claimed(1, stopped=True)),
        "1 GPU (0 free); GPU 1: ada (pid 4711, stopped) for 1 h",
    ),
    "a drained GPU, passed, a part of a GPU": (
        status(
            *(claimed(0), UNUSABLE._replace(reason="drained by root: a fan", closed=True)),
            expected=SOON._replace(passed_by=2),
            asked=api.parse_request(1, share="20GiB").text,
        ),
        f"20 GiB of 1 GPU (0 free), {SOON_TEXT}; passed by 2 claims; GPU 0: {BY_ADA}; GPU 5: drained by root: a fan",
    ),
    "a limit": (api.WaitStatus(1, None, 1, limit=api.LimitReached(0.5, 1)), "1 GPU, at your limit (0.5 of 1)"),
    "a waiter that the kernel does not show": (
        api.WaitStatus(3, None, 2, ahead=ADA._replace(pid=0, user=None)),
        "2 GPUs, #3 in the queue; behind somebody (wants 8 GPUs, queued for 12 min)",
    ),
}


@pytest.mark.parametrize(("status", "text"), TOLD.values(), ids=TOLD)
def test_a_wait_is_told_in_one_line(status: api.WaitStatus, text: str) -> None:
    assert api.waiting_message(status, NOW) == f"waiting for {text}"
    for seconds, clock in ((-1, "0:00"), (3599.9, "59:59"), (360_061, "100:01:01")):
        assert api.waiting_message(status, NOW, waited=seconds) == f"waiting {clock} for {text}"
    assert api.waiting_message(status, NOW, width=12 + len(text)) == f"waiting for {text}"


def test_who_has_what_and_does_nothing_with_it() -> None:
    process = api.GpuProcess(4711)
    at_work = [
        claimed(1)._replace(gpu=gpu(1, processes=(process,))),
        claimed(2, since=NOW - 59),
        claimed(4)._replace(gpu=gpu(4, processes=None)),
        claimed(5)._replace(gpu=gpu(5, memory_used=2 << 30)),  # by whom the driver hides
        claimed(6)._replace(gpu=gpu(6, processes_private=True)),
    ]
    told = status(*at_work, claimed(0), claimed(3, stopped=True), BUSY._replace(gpu=gpu(7)), FREE._replace(gpu=gpu(8)))
    assert api.holders_line(told, NOW) == "GPU 1,2,4-6 ada · 0 ada idle · 3 ada stopped · 7 bob"


def test_a_holder_that_is_stopped_is_named_as_that(dgx: Any, child: Any, stop: Any) -> None:
    """In the refusal, and in the line of a wait."""
    hold = "safe_gpu.claim_gpus(8, safe_gpu.NoPlaceholder(), affinity=None, timeout=0)"
    holder = child(f"import safe_gpu; {hold}; say('has'); listen()", "has")
    with pytest.raises(safe_gpu.NotEnoughGpusError) as refused:
        claim(1)
    assert "stopped" not in str(refused.value)
    stop(holder.pid)
    with pytest.raises(safe_gpu.NotEnoughGpusError, match=r"since .*; stopped \(a suspended job\?\)"):
        claim(1)

    def end(status: api.WaitStatus) -> None:
        raise InterruptedError(api.waiting_message(status))

    with pytest.raises(InterruptedError, match=f"\\(pid {holder.pid}, stopped\\) for "):
        api.wait_for_gpus(1, timeout=60, on_wait=end)


QUEUED = api.WaitStatus(12, 0, 3, tuple(map(claimed, range(8))), ADA, SOON)
HEAD = f"waiting 0:07 for 3 GPUs (0 free), #12 in the queue, {SOON_TEXT}"
SHORT = HEAD.replace(" in the queue", "")


def test_what_is_cut_off_is_who_holds_what() -> None:
    for width, text in (
        (200, f"{HEAD}; {BEHIND}; GPU 0-7: {BY_ADA}"),
        (110, f"{HEAD}; {BEHIND}"[:108] + ".."),
        (len(HEAD) - 2, SHORT),
        (len(SHORT) - 1, f"{SHORT[:-3]}.."),
        (0, ""),
    ):
        assert api.waiting_message(QUEUED, NOW, waited=7, width=width) == text


def test_when_it_starts() -> None:
    later = NOW + 3600
    for expected, start in (
        (api.Forecast(), ""),
        (api.Forecast(None, later), "probably not before %H:%M"),
        (api.Forecast(NOW + 8 * 86400, None), "starts about %Y-%m-%d"),
        (api.Forecast(later, later, may_move=True), "starts %H:%M or later"),
    ):
        assert expected.text(NOW) == time.strftime(start, time.localtime(expected.start or expected.earliest or 0))


def test_the_head_is_told_who_passed_it(dgx: Any, child: Any) -> None:
    dgx.hold(*range(7), until=time.time() + 7200)
    large = child(
        "import logging, sys, time, safe_gpu\n"
        "from safe_gpu.claim import report as news\n"
        "news.REPORT_INTERVAL = news.WARNING_DELAY = 0.2\n"
        "logging.basicConfig(stream=sys.stdout, level=logging.INFO, format='%(message)s')\n"
        "safe_gpu.claim_gpus(8, safe_gpu.NoPlaceholder(), affinity=None, timeout=60)\n"
    )
    while "waiting for 8 GPUs" not in large.hear():
        pass
    claim = "safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), affinity=None, hold_for=600)"
    child(f"import safe_gpu; {claim}; say('has'); listen()", "has")
    while not re.search(r"; passed by 1 claim; GPU ", large.hear()):
        pass
