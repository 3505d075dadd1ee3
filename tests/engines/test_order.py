"""All or nothing across hosts: what one claim does, as tables; test_cluster_scale.py has crowds of them."""

import pickle
from typing import Any

import pytest

from safe_gpu.engines.claim import Holder, HostClaim, claim_on_all, on_host
from safe_gpu.errors import ClaimTimeout, HolderLostError, NotEnoughGpusError, SafeGpuError, UnsatisfiableRequestError
from safe_gpu.gpus.devices import Gpu, GpuVerdict

VERDICTS = (GpuVerdict(Gpu(0, "GPU-0"), "claimed", "process 7 of ann", pid=7, user="ann"),)


class Scripted(Holder):
    """The holder on one host: answers each claim with the next entry, True or an error, and keeps a diary."""

    def __init__(self, name: str, diary: list[str], *answers: SafeGpuError | bool) -> None:
        self.host = self.node_id = name
        self.diary = diary
        self.answers = list(answers)
        self.holds = False
        self.result: Any = None

    def call(self, method: str, *arguments: Any) -> None:
        assert self.holds == (method == "release"), "claimed twice, or given back for nothing"
        if method == "release":
            self.diary.append(f"give back {self.host}")
            self.holds, self.result = False, None
            return
        number, timeout = arguments
        assert number == 8
        self.diary.append(f"{'try' if timeout == 0 else 'wait'} {self.host}")
        answer = self.answers.pop(0)
        self.holds = answer is True
        self.result = f"{self.host}'s GPUs" if self.holds else answer

    def answer(self, limit: float | None) -> Any:
        return self.result

    def end(self) -> None:
        self.diary.append(f"abandon {self.host}")
        self.holds = False


def claim_all(holders: list[Scripted], timeout: float | None, **options: Any) -> list[Any]:
    return claim_on_all([HostClaim([holder], (holder.host,), 8) for holder in holders], timeout, **options)


def busy() -> NotEnoughGpusError:
    return NotEnoughGpusError("0 of 8 GPUs are free", nb_gpus=8, verdicts=VERDICTS)


def late() -> ClaimTimeout:
    return ClaimTimeout("0 of 8 GPUs are free", nb_gpus=8, verdicts=VERDICTS, timeout=1)


def never() -> UnsatisfiableRequestError:
    return UnsatisfiableRequestError("this host has 4 GPUs", value=8)


OK = True
TRY_ALL = ["try a", "try b", "try c"]
ABANDON_ALL = ["abandon a", "abandon b", "abandon c"]

STORIES = {
    "all free: one try of everything": (10, [OK], [OK], [OK], TRY_ALL, None),
    "the first busy: nothing is held while it is waited for": (
        10, [busy(), OK], [OK, OK], [OK, OK],
        [*TRY_ALL, "give back b", "give back c", "wait a", "try b", "try c"], None,
    ),
    "the middle busy: only the first stays held": (
        10, [OK], [busy(), OK], [OK, OK], [*TRY_ALL, "give back c", "wait b", "try c"], None,
    ),
    "two busy: waited for one after the other": (
        10, [OK], [busy(), OK], [busy(), busy(), OK], [*TRY_ALL, "wait b", "try c", "wait c"], None,
    ),
    "the last busy, in vain": (
        10, [OK], [OK], [busy(), late()], [*TRY_ALL, "wait c", *ABANDON_ALL],
        ("c", ClaimTimeout),
    ),
    "one that can never: no waiting": (
        10, [busy()], [OK], [never()], [*TRY_ALL, *ABANDON_ALL], ("c", UnsatisfiableRequestError),
    ),
    "a holder dies": (
        10, [OK], [HolderLostError("the holder is gone", host="")], [OK], [*TRY_ALL, *ABANDON_ALL],
        ("b", HolderLostError),
    ),
    "no waiting, all free: the first, then the others": (0, [OK], [OK], [OK], TRY_ALL, None),
    "no waiting, the first busy: no other is touched": (
        0, [busy()], [], [], ["try a", *ABANDON_ALL], ("a", NotEnoughGpusError),
    ),
    "no waiting, a later one busy": (
        0, [OK], [OK], [busy()], [*TRY_ALL, *ABANDON_ALL], ("c", NotEnoughGpusError),
    ),
    "waiting for ever": (None, [OK], [OK], [busy(), OK], [*TRY_ALL, "wait c"], None),
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES)
def test_story(story: str) -> None:
    timeout, a, b, c, expected, failure = STORIES[story]
    diary: list[str] = []
    claimers = [Scripted("b", diary, *b), Scripted("c", diary, *c), Scripted("a", diary, *a)]  # any order
    waited: list[str] = []
    if failure is None:
        grants = claim_all(claimers, timeout, on_wait=lambda host, err: waited.append(host))
        assert grants == ["b's GPUs", "c's GPUs", "a's GPUs"]
        assert all(claimer.holds for claimer in claimers)
    else:
        host, kind = failure
        with pytest.raises(kind, match=f"^{host}: ") as caught:
            claim_all(claimers, timeout, on_wait=lambda host, err: waited.append(host))
        assert type(caught.value) is kind
        assert caught.value.host == host  # type: ignore[attr-defined]
        assert getattr(caught.value, "timeout", timeout) == timeout, "not what was left"
        assert not any(claimer.holds for claimer in claimers)
    assert sorted(diary[-3:]) == ABANDON_ALL if failure else "abandon" not in " ".join(diary)
    assert [step for step in diary if "abandon" not in step] == [step for step in expected if "abandon" not in step]
    assert waited == [step[5:] for step in diary if step.startswith("wait")]


def test_the_deadline_is_one_for_all_hosts() -> None:
    now = [0.0]
    timeouts: list[float | None] = []

    class Slow(Scripted):
        def call(self, method: str, *arguments: Any) -> None:
            super().call(method, *arguments)
            if method == "claim":
                timeouts.append(arguments[1])
                now[0] += 3 if arguments[1] else 0

    diary: list[str] = []
    claimers = [
        Slow("a", diary, busy(), True),
        Slow("b", diary, busy(), busy(), True),
        Slow("c", diary, OK, busy(), busy()),
    ]
    with pytest.raises(ClaimTimeout, match=r"^c: 0 of 8 GPUs") as caught:
        claim_all(claimers, 6, clock=lambda: now[0])
    assert [timeout for timeout in timeouts if timeout] == [6, 3]
    assert caught.value.timeout == 6
    assert caught.value.verdicts == VERDICTS
    assert caught.value.nb_gpus == 8


def test_whatever_interrupts_leaves_nothing() -> None:
    class Interrupted(Scripted):
        def answer(self, limit: float | None) -> Any:
            raise KeyboardInterrupt

    claimers = [Scripted("a", [], True), Interrupted("b", [], True)]
    with pytest.raises(KeyboardInterrupt):
        claim_all(claimers, 10)
    assert not any(claimer.holds for claimer in claimers)


def test_an_error_says_where_once() -> None:
    error = on_host("hostb", on_host("hosta", busy()))
    assert str(error) == "hosta: 0 of 8 GPUs are free"
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.host, copy.verdicts) == (str(error), "hosta", VERDICTS)
