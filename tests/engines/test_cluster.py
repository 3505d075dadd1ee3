"""All or nothing across hosts: what one claim does, as tables, and what many claims at once do to each other."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from safe_gpu.devices import Gpu, GpuVerdict
from safe_gpu.engines.cluster import ClusterClaim, ClusterGpu, claim_on_all, on_host
from safe_gpu.errors import ClaimTimeout, HolderLostError, NotEnoughGpusError, SafeGpuError, UnsatisfiableRequestError

VERDICTS = (GpuVerdict(Gpu(0, "GPU-0"), "claimed", "process 7 of ann", pid=7, user="ann"),)


class Host:
    """GPUs that claims in threads compete for, first come, first served."""

    def __init__(self, name: str, gpus: int = 8) -> None:
        self.name = name
        self.gpus = gpus
        self.free = gpus
        self.changed = threading.Condition()
        self.queue: list[object] = []

    def take(self, number: int, timeout: float | None) -> None:
        ticket = object()
        with self.changed:
            self.queue.append(ticket)
            try:
                if not self.changed.wait_for(lambda: self.queue[0] is ticket and self.free >= number, timeout):
                    raise NotEnoughGpusError(
                        f"{self.free} of {number} GPUs are free", nb_gpus=number, verdicts=VERDICTS
                    )
                self.free -= number
            finally:
                self.queue.remove(ticket)
                self.changed.notify_all()

    def give(self, number: int) -> None:
        with self.changed:
            self.free += number
            assert self.free <= self.gpus, "given back twice"
            self.changed.notify_all()


class Claimer:
    """A claim of some GPUs of a Host; keeps a diary."""

    def __init__(self, host: Host, number: int = 8, diary: list[str] | None = None) -> None:
        self._host = host
        self.number = number
        self.diary = [] if diary is None else diary
        self.holds = False
        self.result: SafeGpuError | None = None
        self.timeout: float | None = 0

    @property
    def host(self) -> str:
        return self._host.name

    @property
    def rank(self) -> tuple[str, ...]:
        return (self._host.name,)

    def begin(self, timeout: float | None) -> None:
        assert not self.holds, "claimed twice"
        self.diary.append(f"{'try' if timeout == 0 else 'wait'} {self.host}")
        self.result, self.timeout = None, timeout
        if timeout == 0:
            self._take()

    def _take(self) -> None:
        try:
            self._host.take(self.number, self.timeout)
            self.holds = True
        except SafeGpuError as err:
            self.result = err

    def outcome(self) -> str:
        if self.timeout != 0:
            self._take()
        if self.result is not None:
            raise self.result
        return f"{self.host}'s GPUs"

    def give_back(self) -> None:
        assert self.holds
        self.diary.append(f"give back {self.host}")
        self.holds = False
        self._host.give(self.number)

    def given_back(self) -> None:
        assert not self.holds

    def abandon(self) -> None:
        self.diary.append(f"abandon {self.host}")
        if self.holds:
            self.holds = False
            self._host.give(self.number)


class Scripted(Claimer):
    """Answers each ``begin`` with the next entry: True, or an error."""

    def __init__(self, name: str, diary: list[str], *answers: SafeGpuError | bool) -> None:
        super().__init__(Host(name), diary=diary)
        self.answers = list(answers)

    def begin(self, timeout: float | None) -> None:
        self.diary.append(f"{'try' if timeout == 0 else 'wait'} {self.host}")
        answer = self.answers.pop(0)
        self.result = None if answer is True else answer
        self.holds = answer is True
        self._host.free = 0

    def outcome(self) -> str:
        if self.result is not None:
            raise self.result
        return f"{self.host}'s GPUs"


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
        grants = claim_on_all(claimers, timeout, on_wait=lambda host, err: waited.append(host))
        assert grants == ["b's GPUs", "c's GPUs", "a's GPUs"]
        assert all(claimer.holds for claimer in claimers)
    else:
        host, kind = failure
        with pytest.raises(kind, match=f"^{host}: ") as caught:
            claim_on_all(claimers, timeout, on_wait=lambda host, err: waited.append(host))
        assert type(caught.value) is kind
        assert caught.value.host == host  # type: ignore[attr-defined]
        assert not any(claimer.holds for claimer in claimers)
    assert sorted(diary[-3:]) == ABANDON_ALL if failure else "abandon" not in " ".join(diary)
    assert [step for step in diary if "abandon" not in step] == [step for step in expected if "abandon" not in step]
    assert waited == [step[5:] for step in diary if step.startswith("wait")]


def test_the_deadline_is_one_for_all_hosts() -> None:
    now = [0.0]
    timeouts: list[float | None] = []

    class Slow(Scripted):
        def begin(self, timeout: float | None) -> None:
            timeouts.append(timeout)
            super().begin(timeout)
            now[0] += 3 if timeout else 0

    diary: list[str] = []
    claimers = [
        Slow("a", diary, busy(), True),
        Slow("b", diary, busy(), busy(), True),
        Slow("c", diary, OK, busy(), busy()),
    ]
    with pytest.raises(ClaimTimeout, match=r"^c: 0 of 8 GPUs") as caught:
        claim_on_all(claimers, 6, clock=lambda: now[0])
    assert [timeout for timeout in timeouts if timeout] == [6, 3]
    assert caught.value.timeout == 6
    assert caught.value.verdicts == VERDICTS
    assert caught.value.nb_gpus == 8


def test_a_timeout_names_what_was_asked_for_not_what_was_left() -> None:
    with pytest.raises(ClaimTimeout) as caught:
        claim_on_all([Scripted("a", [], busy(), late())], 90)
    assert caught.value.timeout == 90


def test_whatever_interrupts_leaves_nothing() -> None:
    class Interrupted(Claimer):
        def outcome(self) -> str:
            raise KeyboardInterrupt

    first, second = Host("a"), Host("b")
    with pytest.raises(KeyboardInterrupt):
        claim_on_all([Claimer(first), Interrupted(second)], 10)
    assert (first.free, second.free) == (8, 8)


def test_an_error_says_where_once() -> None:
    error = on_host("hostb", on_host("hosta", busy()))
    assert str(error) == "hosta: 0 of 8 GPUs are free"
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.host, copy.verdicts) == (str(error), "hosta", VERDICTS)


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads that give way to each other all the time."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("timeout", [0, 60])
def test_two_claims_from_opposite_ends(timeout: float, eager_threads: None) -> None:
    """One wins at least, or both one after the other; ``test_cluster_scale.py`` has crowds of them."""
    for _ in range(20):
        hosts = [Host("hosta"), Host("hostb")]
        start = threading.Barrier(2)

        def rival(wanted: list[Host], start: threading.Barrier = start) -> bool:
            claimers = [Claimer(host) for host in wanted]
            start.wait()
            try:
                claim_on_all(claimers, timeout)
            except NotEnoughGpusError:
                assert not any(claimer.holds for claimer in claimers)
                return False
            for claimer in claimers:
                claimer.give_back()  # which asserts that it holds its host
            return True

        with ThreadPoolExecutor(2) as pool:
            won = list(pool.map(rival, (hosts, hosts[::-1])))
        assert any(won), "both lost"
        assert timeout == 0 or all(won)
        assert [host.free for host in hosts] == [8, 8]


def test_time_grows_with_the_slowest_host_only() -> None:
    """Eight hosts whose claims are open at the same moment: none could end if they were claimed one by one."""
    together = threading.Barrier(8, timeout=30)

    class Meeting(Claimer):
        def begin(self, timeout: float | None) -> None:
            self.thread = threading.Thread(target=together.wait, daemon=True)
            self.thread.start()
            super().begin(timeout)

        def outcome(self) -> str:
            self.thread.join(30)
            assert not together.broken
            return super().outcome()

    claimers = [Meeting(Host(f"host{number}")) for number in range(8)]
    assert len(claim_on_all(claimers, 5)) == 8


class Held(ClusterClaim):
    def __init__(self, gpus: list[ClusterGpu]) -> None:
        super().__init__(gpus)
        self.calls: list[str] = []

    def _check(self, gpus: object) -> None:
        self.calls.append("check")

    def _release(self) -> None:
        self.calls.append("release")


def test_a_claim_is_released_once_and_useless_afterwards() -> None:
    gpus = [ClusterGpu("hostb", "2", 0, "GPU-b0"), ClusterGpu("hosta", "1", 3, "GPU-a3", frozenset({4, 5}))]
    with Held(gpus) as claim:
        assert claim.gpus == tuple(gpus)
        assert claim.hosts == ("hostb", "hosta")
        claim.check()
        assert repr(claim) == "<Held hostb:0, hosta:3>"
    claim.release()
    assert claim.calls == ["check", "release"]
    with pytest.raises(UnsatisfiableRequestError, match="claim again"):
        claim.check()


def test_a_gpu_of_another_claim_is_refused() -> None:
    with Held([ClusterGpu("hosta", "1", 0, "GPU-0")]) as claim, pytest.raises(UnsatisfiableRequestError, match="hostb"):
        claim._known(ClusterGpu("hostb", "2", 0, "GPU-1"))
