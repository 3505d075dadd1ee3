"""From holders on nodes to a claim: which nodes, which GPUs of which holder, what happens to holders that fail."""

from typing import Any

import pytest

from safe_gpu.engines.claim import ClusterClaim, Holder, NodeFacts, choose_nodes, claim_through
from safe_gpu.engines.holder import ClusterGpu, HostReport
from safe_gpu.errors import HolderLostError, NotEnoughGpusError, SafeGpuError, UnsatisfiableRequestError


class Node(Holder):
    """A holder without a process: grants what the node has free, first numbers first."""

    def __init__(self, node_id: str, host: str, free: dict[str, list[int]], *, lost: str = "") -> None:
        self.node_id = node_id
        self.host = host
        self.free = free
        self.held: list[int] = []
        self.lost = lost
        self.ended = False
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def call(self, method: str, *arguments: Any) -> None:
        self.calls.append((method, arguments))

    def answer(self, limit: float | None) -> Any:
        method, arguments = self.calls[-1]
        if self.lost == method:
            raise HolderLostError(f"{self.host}: gone", host=self.host)
        return getattr(self, f"_{method}")(*arguments)

    def _report(self, count_for: int) -> HostReport:
        return HostReport((self.host,), len(self.free[self.host]) if count_for else 0)

    def _claim(self, nb_gpus: int, timeout: float | None) -> tuple[ClusterGpu, ...] | SafeGpuError:
        free = self.free[self.host]
        if len(free) < nb_gpus:
            return NotEnoughGpusError(f"{len(free)} of {nb_gpus} GPUs are free", nb_gpus=nb_gpus)
        self.held, free[:nb_gpus] = free[:nb_gpus], []
        return tuple(ClusterGpu("", "", index, f"GPU-{self.host}-{index}") for index in self.held)

    def _release(self) -> None:
        self.free[self.host] += self.held
        self.held = []

    def _ping(self) -> None:
        pass

    def end(self) -> None:
        self.ended = True
        self._release()


def make(**free: int) -> tuple[list[Node], dict[str, list[int]]]:
    """One node on each host, with that many free GPUs."""
    gpus = {host: list(range(number)) for host, number in free.items()}
    return [Node(f"id-{host}", host, gpus) for host in free], gpus


def test_gpus_come_with_their_node_in_the_order_of_the_nodes() -> None:
    nodes, free = make(z=4, a=4)
    held = claim_through(nodes, 2, 2, 0)
    found = [(gpu.host, gpu.node_id, gpu.index) for gpu in held]
    assert found == [(host, f"id-{host}", index) for host in "za" for index in (0, 1)]
    assert [holder.host for holder in held.values()] == ["z", "z", "a", "a"]
    assert not any(node.ended for node in nodes)
    assert [len(gpus) for gpus in free.values()] == [2, 2]


@pytest.mark.parametrize(
    ("free", "wanted", "chosen"),
    [
        ({"a": 8, "b": 2, "c": 4}, (1, 3), ["c"]),  # enough, and the fullest of those
        ({"a": 8, "b": 2, "c": 4}, (2, 3), ["a", "c"]),
        ({"a": 8, "b": 8, "c": 8}, (2, 8), ["a", "b"]),  # all the same: in their order
        ({"a": 0, "b": 8, "c": 3}, (2, 3), ["b", "c"]),
    ],
)
def test_nodes_with_enough_free_gpus_are_chosen(free: Any, wanted: Any, chosen: Any) -> None:
    nodes, _ = make(**free)
    held = claim_through(nodes, *wanted, 0)
    assert list(dict.fromkeys(gpu.host for gpu in held)) == chosen
    assert [node.host for node in nodes if not node.ended] == chosen


def test_when_one_cannot_deliver_all_holders_are_ended() -> None:
    nodes, free = make(a=4, b=1)
    with pytest.raises(NotEnoughGpusError, match=r"^b: 1 of 2") as caught:
        claim_through(nodes, 2, 2, 0)
    assert caught.value.host == "b"  # type: ignore[attr-defined]
    assert all(node.ended for node in nodes)
    assert [len(gpus) for gpus in free.values()] == [4, 1]


def test_a_node_that_does_not_start_is_left_out_where_there_are_others() -> None:
    nodes, _ = make(a=4, b=4, c=4)
    nodes[0].lost = "report"
    assert {gpu.host for gpu in claim_through(nodes, 2, 1, 0)} == {"b", "c"}
    nodes, _ = make(a=4, b=4)
    nodes[0].lost = "report"
    with pytest.raises(HolderLostError, match="a: gone"):
        claim_through(nodes, 2, 1, 0)
    assert all(node.ended for node in nodes)


def test_nodes_that_are_one_host_make_one_claim() -> None:
    free = {"a": list(range(8))}
    nodes = [Node("1", "a", free), Node("2", "a", free)]
    held = claim_through(nodes, 2, 4, 0)
    assert [(gpu.node_id, gpu.index) for gpu in held] == [("1" if index < 4 else "2", index) for index in range(8)]
    assert set(held.values()) == {nodes[0]}
    assert nodes[1].ended


def test_a_claim_says_which_holder_is_gone() -> None:
    nodes, free = make(a=2, b=2)
    claim = ClusterClaim(claim_through(nodes, 2, 1, 0))
    claim.check()
    nodes[1].lost = "ping"
    with pytest.raises(HolderLostError, match="b: gone"):
        claim.check()
    claim.checked(claim.gpus[0])
    with pytest.raises(HolderLostError):
        claim.checked(claim.gpus[1])
    with pytest.raises(UnsatisfiableRequestError, match="pass one of"):
        claim.checked(ClusterGpu("b", "2", 7, "GPU-of another claim"))
    assert (claim.hosts, repr(claim)) == (("a", "b"), "<ClusterClaim a:0, b:0>")
    nodes[1].lost = "release"
    claim.release()
    asked = len(nodes[0].calls)
    claim.release()
    assert len(nodes[0].calls) == asked, "once"
    with pytest.raises(UnsatisfiableRequestError, match="claim again"):
        claim.check()
    assert all(node.ended for node in nodes)
    assert [len(gpus) for gpus in free.values()] == [2, 2]


ALIVE = {
    "id1": NodeFacts(("head", "10.0.0.1"), has_gpus=False),
    "id2": NodeFacts(("hosta", "10.0.0.2"), has_gpus=True),
    "id3": NodeFacts(("hostb", "10.0.0.3"), has_gpus=True),
}
TWICE = {**ALIVE, "id4": NodeFacts(("hostb", "10.0.0.4"), has_gpus=True)}  # a name of two nodes


@pytest.mark.parametrize(
    ("nodes", "chosen", "count"),
    [
        (1, ["id2", "id3"], 1),  # holders look for themselves which of the two has more to give
        (2, ["id2", "id3"], 2),
        (3, ["id1", "id2", "id3"], 3),
        ("head", ["id1"], 1),
        (["10.0.0.3", "hosta", "id1"], ["id3", "id2", "id1"], 3),
    ],
)
def test_nodes_that_may_take_part(nodes: int | str | list[str], chosen: list[str], count: int) -> None:
    assert choose_nodes(nodes, ALIVE, "the cluster") == (chosen, count)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (0, "ask for 1 node or more"),
        (True, "ask for 1 node or more"),
        ([], "names no node"),
        (4, "4 nodes asked for, and the cluster has 3: head, hosta, hostb"),
        (["hosta", "id2"], "named twice"),
        (["hostx"], "'hostx' is no live node; live nodes: head, hosta, hostb"),
        (["hostb"], "2 nodes, name one by its id"),
    ],
)
def test_nodes_that_cannot_take_part(nodes: int | list[str], words: str) -> None:
    with pytest.raises(UnsatisfiableRequestError, match=words) as caught:
        choose_nodes(nodes, TWICE if nodes == ["hostb"] else ALIVE, "the cluster")
    assert caught.value.value is not None
