"""From holders on nodes to a claim of all or nothing: which nodes, in which order, what comes of holders that fail."""

import pickle
import random
import re
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import api


class Node(api.RemoteHolder):
    """A holder without a process: grants what its host has free, first numbers first. ``lost``: it fails at this."""

    def __init__(self, node_id: str, host: str, free: list[int]) -> None:
        self.node_id = node_id
        self.host = host
        self.free = free
        self.held: list[int] = []
        self.lost = ""
        self.ended = False
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def call(self, method: str, *arguments: Any) -> None:
        self.calls.append((method, arguments))

    def answer(self, limit: float | None) -> Any:
        method, arguments = self.calls[-1]
        if self.lost == method:
            raise api.HolderLostError(f"{self.host}: gone", host=self.host)
        return getattr(self, f"_{method}")(*arguments)

    def _report(self, count_for: int) -> api.HostReport:
        return api.HostReport((self.host,), len(self.free) if count_for else 0)

    def _claim(self, nb_gpus: int, timeout: float | None) -> tuple[api.ClusterGpu, ...] | api.SafeGpuError:
        if len(self.free) < nb_gpus:
            return api.NotEnoughGpusError(f"{len(self.free)} of {nb_gpus} GPUs are free", nb_gpus=nb_gpus)
        self.held, self.free[:nb_gpus] = self.free[:nb_gpus], []
        return tuple(api.ClusterGpu("", "", index, f"GPU-{self.host}-{index}") for index in self.held)

    def _release(self) -> None:
        self.free += self.held
        self.held = []

    def _ping(self) -> None:
        pass

    def end(self) -> None:
        self.ended = True
        self._release()


def make(**free: int) -> list[Node]:
    """One node on each host, with that many free GPUs."""
    return [Node(f"id-{host}", host, list(range(number))) for host, number in free.items()]


@pytest.mark.parametrize(
    ("free", "wanted", "chosen"),
    [
        ({"z": 4, "a": 4}, (2, 2), ["z", "a"]),  # in the order of the nodes
        ({"a": 8, "b": 2, "c": 4}, (1, 3), ["c"]),  # enough, and the fullest of those
        ({"a": 0, "b": 8, "c": 3}, (2, 3), ["b", "c"]),
    ],
)
def test_nodes_with_enough_free_gpus_are_chosen(free: Any, wanted: Any, chosen: Any) -> None:
    nodes = make(**free)
    held = api.claim_through(nodes, *wanted, 0)
    found = [(gpu.host, gpu.node_id, gpu.index, holder.host) for gpu, holder in held.items()]
    assert found == [(host, f"id-{host}", index, host) for host in chosen for index in range(wanted[1])]
    assert [node.host for node in nodes if not node.ended] == chosen
    assert sum(free.values()) - sum(len(node.free) for node in nodes) == len(held)


def test_when_one_cannot_deliver_all_holders_are_ended() -> None:
    nodes = make(a=4, b=1)
    with pytest.raises(api.NotEnoughGpusError, match=r"^b: 1 of 2") as caught:
        api.claim_through(nodes, 2, 2, 0)
    assert caught.value.host == "b"  # type: ignore[attr-defined]
    assert [(node.ended, len(node.free)) for node in nodes] == [(True, 4), (True, 1)]


def test_a_node_that_does_not_start_is_left_out_where_there_are_others() -> None:
    nodes = make(a=4, b=4, c=4)
    nodes[0].lost = "report"
    assert {gpu.host for gpu in api.claim_through(nodes, 2, 1, 0)} == {"b", "c"}
    nodes = make(a=4, b=4)
    nodes[0].lost = "report"
    with pytest.raises(api.HolderLostError, match="a: gone"):
        api.claim_through(nodes, 2, 1, 0)
    assert all(node.ended for node in nodes)


def test_nodes_that_are_one_host_make_one_claim() -> None:
    free = list(range(8))
    nodes = [Node("1", "a", free), Node("2", "a", free)]
    held = api.claim_through(nodes, 2, 4, 0)
    assert [(gpu.node_id, gpu.index) for gpu in held] == [("1" if index < 4 else "2", index) for index in range(8)]
    assert (set(held.values()), nodes[1].ended) == ({nodes[0]}, True)


def test_a_claim_says_which_holder_is_gone() -> None:
    nodes = make(a=2, b=2)
    claim = api.ClusterClaim(api.claim_through(nodes, 2, 1, 0))
    claim.check()
    nodes[1].lost = "ping"
    with pytest.raises(api.HolderLostError, match="b: gone"):
        claim.check()
    claim.checked(claim.gpus[0])
    with pytest.raises(api.HolderLostError):
        claim.checked(claim.gpus[1])
    with pytest.raises(api.UnsatisfiableRequestError, match="pass one of"):
        claim.checked(api.ClusterGpu("b", "2", 7, "GPU-of another claim"))
    assert (claim.hosts, repr(claim)) == (("a", "b"), "<ClusterClaim a:0, b:0>")
    nodes[1].lost = "release"
    claim.release()
    asked = len(nodes[0].calls)
    claim.release()
    assert len(nodes[0].calls) == asked, "once"
    with pytest.raises(api.UnsatisfiableRequestError, match="claim again"):
        claim.check()
    assert [(node.ended, len(node.free)) for node in nodes] == [(True, 2), (True, 2)]


ALIVE = {
    "id1": api.NodeFacts(("head", "10.0.0.1"), has_gpus=False),
    "id2": api.NodeFacts(("hosta", "10.0.0.2"), has_gpus=True),
    "id3": api.NodeFacts(("hostb", "10.0.0.3"), has_gpus=True),
    "id4": api.NodeFacts(("hostb", "10.0.0.4"), has_gpus=True),
}


@pytest.mark.parametrize(
    ("nodes", "chosen", "count"),
    [
        (1, ["id2", "id3", "id4"], 1),  # holders look for themselves which of them have more to give
        (4, ["id1", "id2", "id3", "id4"], 4),
        ("head", ["id1"], 1),
        (["10.0.0.3", "hosta", "id1"], ["id3", "id2", "id1"], 3),
    ],
)
def test_nodes_that_may_take_part(nodes: int | str | list[str], chosen: list[str], count: int) -> None:
    assert api.choose_nodes(nodes, ALIVE, "the cluster") == (chosen, count)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (0, "ask for 1 node or more"),
        (True, "ask for 1 node or more"),
        (5, "5 nodes asked for, and the cluster has 4: head, hosta, hostb"),
        (["hosta", "id2"], "named twice"),
        (["hostx"], "'hostx' is no live node; live nodes: head, hosta, hostb"),
        (["hostb"], "2 nodes, name one by its id"),
    ],
)
def test_nodes_that_cannot_take_part(nodes: int | list[str], words: str) -> None:
    with pytest.raises(api.UnsatisfiableRequestError, match=words) as caught:
        api.choose_nodes(nodes, ALIVE, "the cluster")
    assert caught.value.value is not None


VERDICTS = (api.GpuVerdict(api.Gpu(0, "GPU-0"), "claimed", "process 7 of ann", pid=7, user="ann"),)
BUSY = api.NotEnoughGpusError("0 of 8 GPUs are free", nb_gpus=8, verdicts=VERDICTS)


class Scripted(api.RemoteHolder):
    """The holder on one host: answers each claim with the next entry, True or an error, and keeps a diary."""

    def __init__(self, name: str, diary: list[str], *answers: api.SafeGpuError | bool) -> None:
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
        assert arguments[0] == 8
        self.diary.append(f"{'try' if arguments[1] == 0 else 'wait'} {self.host}")
        answer = pickle.loads(pickle.dumps(self.answers.pop(0)))
        self.holds = answer is True
        self.result = f"{self.host}'s GPUs" if self.holds else answer

    def answer(self, limit: float | None) -> Any:
        return self.result

    def end(self) -> None:
        self.diary.append(f"abandon {self.host}")
        self.holds = False


def claim_all(holders: list[Scripted], timeout: float | None, **options: Any) -> list[Any]:
    return api.claim_on_all([api.HostClaim([holder], (holder.host,), 8) for holder in holders], timeout, **options)


OK = True
LATE = api.ClaimTimeout("0 of 8 GPUs are free", nb_gpus=8, verdicts=VERDICTS, timeout=1)
NEVER = api.UnsatisfiableRequestError("this host has 4 GPUs", value=8)
GONE = api.HolderLostError("the holder is gone", host="")
TRY_ALL = "try a, try b, try c"

STORIES = {
    "the first busy: nothing is held while it is waited for": (
        10, [BUSY, OK], [OK, OK], [OK, OK], f"{TRY_ALL}, give back b, give back c, wait a, try b, try c", "",
    ),
    "two busy: waited for one after the other": (
        10, [OK], [BUSY, OK], [BUSY, BUSY, OK], f"{TRY_ALL}, wait b, try c, wait c", "",
    ),
    "one that can never: no waiting": (10, [BUSY], [OK], [NEVER], TRY_ALL, "c"),
    "a holder dies": (10, [OK], [GONE], [OK], TRY_ALL, "b"),
    "no waiting, the first busy: no other is touched": (0, [BUSY], [], [], "try a", "a"),
}  # fmt: skip
"""Timeout, answers of the three hosts, what is done, and the host whose last answer is the claim's error."""


@pytest.mark.parametrize("story", STORIES)
def test_each_step_of_a_claim_across_hosts_in_its_order(story: str) -> None:
    timeout, a, b, c, expected, failed = STORIES[story]
    diary: list[str] = []
    claimers = [Scripted("b", diary, *b), Scripted("c", diary, *c), Scripted("a", diary, *a)]  # any order
    waited: list[str] = []
    if failed:
        kind = type({"a": a, "b": b, "c": c}[failed][-1])
        with pytest.raises(kind, match=f"^{failed}: ") as caught:
            claim_all(claimers, timeout, on_wait=lambda host, err: waited.append(host))
        assert (type(caught.value), caught.value.host) == (kind, failed)  # type: ignore[attr-defined]
        assert getattr(caught.value, "timeout", timeout) == timeout, "not what was left"
        assert not any(claimer.holds for claimer in claimers)
        assert sorted(diary[-3:]) == ["abandon a", "abandon b", "abandon c"]
        del diary[-3:]
    else:
        grants = claim_all(claimers, timeout, on_wait=lambda host, err: waited.append(host))
        assert grants == ["b's GPUs", "c's GPUs", "a's GPUs"]
        assert all(claimer.holds for claimer in claimers)
    assert diary == expected.split(", ")
    assert waited == [step[5:] for step in diary if step.startswith("wait")]


class Watched(Scripted):
    """Answers that fit what is asked, and a diary with a letter for each step: try, wait, release, answer."""

    def call(self, method: str, *arguments: Any) -> None:
        self.answers = self.answers or [OK]
        if method == "claim" and arguments[1] != 0 and self.answers[0] is BUSY:
            self.answers[0] = OK if arguments[1] is None else LATE
        super().call(method, *arguments)
        self.diary[-1] = "r" if method == "release" else self.diary[-1][0]

    def answer(self, limit: float | None) -> Any:
        self.diary.append("a")
        return super().answer(limit)


ANSWERS = st.sampled_from([OK, OK, BUSY, BUSY, NEVER, GONE])


@settings(max_examples=100)
@given(st.lists(st.lists(ANSWERS, max_size=4), min_size=1, max_size=5), st.sampled_from([None, 0, 10]))
def test_no_claim_waits_for_a_host_while_it_holds_a_later_one(answers: list[Any], timeout: float | None) -> None:
    """So there is no cycle of claims that wait for each other. All hosts of a round are asked before one has answered,
    and there are at most as many waits as hosts."""
    diary: list[str] = []
    holders = [Watched(str(number), diary, *one) for number, one in enumerate(answers)]

    def check(host: str, refusal: object) -> None:
        assert not any(one.holds for one in holders[int(host) :])

    try:
        claim_all(holders[::-1], timeout, on_wait=check)
        assert all(one.holds for one in holders)
    except api.SafeGpuError:
        assert not any(one.holds for one in holders)
        assert timeout is not None or any(NEVER in one or GONE in one for one in answers), "it could wait"
        del diary[-len(holders) :]  # each is abandoned
    assert re.fullmatch("(t+a+(r+a+)?(wa)?)*", "".join(diary)), diary
    assert diary.count("w") <= len(holders)


def test_the_deadline_is_one_for_all_hosts() -> None:
    now = [0.0]
    timeouts: list[float | None] = []

    class Slow(Scripted):
        def call(self, method: str, *arguments: Any) -> None:
            super().call(method, *arguments)
            if method == "claim" and arguments[1]:
                timeouts.append(arguments[1])
                now[0] += 3

    claimers = [Slow("a", [], BUSY, OK), Slow("b", [], BUSY, BUSY, OK), Slow("c", [], OK, BUSY, BUSY)]
    with pytest.raises(api.ClaimTimeout, match=r"^c: 0 of 8 GPUs") as caught:
        claim_all(claimers, 6, clock=lambda: now[0])
    assert timeouts == [6, 3]
    assert (caught.value.timeout, caught.value.verdicts, caught.value.nb_gpus) == (6, VERDICTS, 8)


def test_whatever_interrupts_leaves_nothing() -> None:
    class Interrupted(Scripted):
        def answer(self, limit: float | None) -> Any:
            raise KeyboardInterrupt

    claimers = [Scripted("a", [], True), Interrupted("b", [], True)]
    with pytest.raises(KeyboardInterrupt):
        claim_all(claimers, 10)
    assert not any(claimer.holds for claimer in claimers)


class Host:
    """One whose GPUs go to one claim after the other, first come, first served: the first in the queue has them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: list[api.RemoteHolder] = []
        self.changed = Condition()
        self.alive = True


class Rival(api.RemoteHolder):
    """The holder of one claim on such a host, which answers from threads of its own."""

    def __init__(self, host: Host) -> None:
        self.host = self.node_id = host.name
        self.on = host
        self.answers: SimpleQueue[Any] = SimpleQueue()

    def call(self, method: str, *arguments: Any) -> None:
        Thread(target=lambda: self.answers.put(getattr(self, f"_{method}")(*arguments))).start()

    def answer(self, limit: float | None) -> Any:
        answer = self.answers.get(timeout=20)  # far longer than any wait
        if isinstance(answer, api.HolderLostError):
            raise answer
        return answer

    def end(self) -> None:
        with self.on.changed:
            if self in self.on.queue:
                self.on.queue.remove(self)
            self.on.changed.notify_all()

    _release = end

    def _report(self, count_for: int) -> api.HostReport:
        return api.HostReport((self.host,))

    def _claim(self, number: int, timeout: float | None) -> Any:
        with self.on.changed:
            self.on.queue.append(self)
            if self.on.alive and self.on.changed.wait_for(lambda: self.on.queue[:1] == [self], timeout):
                return tuple(api.ClusterGpu("", "", index, f"{self.host}-{index}") for index in range(number))
        self.end()
        return pickle.loads(pickle.dumps(GONE if not self.on.alive else BUSY if timeout == 0 else LATE))


@pytest.mark.parametrize("turn", range(20))
def test_rivals_never_deadlock_and_get_all_or_nothing(turn: int) -> None:
    """They claim some of the hosts from opposite ends, with any timeout, and now and then a host is lost."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    pick = random.Random(seed)
    hosts = [Host(f"host{number}") for number in range(6)]
    pick.choice(hosts).alive = pick.random() > 0.2
    failed: list[str] = []

    def claim(wanted: Sequence[Host], timeout: float | None) -> None:
        allowed: tuple[type[api.SafeGpuError], ...] = (
            () if all(host.alive for host in wanted) else (api.HolderLostError,)
        )
        if timeout is not None:
            allowed += (api.NotEnoughGpusError,) if timeout == 0 else (api.ClaimTimeout,)
        holders = [Rival(host) for host in wanted]
        try:
            held = api.ClusterClaim(api.claim_through(holders, len(holders), 8, timeout))
            assert held.hosts == tuple(host.name for host in wanted), "not in the order of the nodes"
            assert len(held.gpus) == 8 * len(wanted)
            assert [host.queue[0] for host in wanted] == holders
            held.release()
        except allowed:
            pass
        except BaseException as err:
            failed.append(repr(err))

    rivals = []
    for number in range(pick.randint(2, 6)):
        wanted = sorted(pick.sample(hosts, pick.randint(1, 6)), key=lambda host: host.name, reverse=number % 2 == 1)
        rivals.append(Thread(target=claim, args=(wanted, pick.choice([None, None, 0, pick.uniform(0.01, 0.1)]))))
    for rival in rivals:
        rival.start()
    for rival in rivals:
        rival.join()
    assert failed == []
    assert not any(host.queue for host in hosts)
